"""The start of a run, and what a person sees of it: progress, tables and errors, from the main process alone."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, InitProcessGroupKwargs
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging


def start_run() -> tuple[Accelerator, Console]:
    """The processes of this run, and the console of the main one; those of the others are silent."""
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else processes started without a GPU don't find each other
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        # One process may read held-out texts for long while the others wait for it.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=4))],
    )
    use_all_cores(accelerator)
    end_with_launcher()
    transformers_logging.disable_progress_bar()
    # That tied weights are saved once needs no warning, nor that an adapter's base model is not on the Hub.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Could not find a config file in ")
    width = None if sys.stdout.isatty() else 200  # a log file has room for the whole table
    return accelerator, Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True, width=width)


def start_trackers(accelerator: Accelerator, names: Sequence[str], title: str, folder: Path, settings: Any) -> None:
    """Opens the trackers that get the losses; their files are in ``folder``, trackio's where TRACKIO_DIR says."""
    if names:
        folder.mkdir(parents=True, exist_ok=True)  # without it W&B writes to a temporary one
        accelerator.project_configuration.set_directories(str(folder))
        accelerator.log_with = filter_trackers(list(names), str(folder))
        options = {"wandb": {"dir": str(folder)}}
        accelerator.init_trackers(title, config={"settings": json.dumps(settings)}, init_kwargs=options)


def log(accelerator: Accelerator, title: str, figures: Mapping[str, float], step: int) -> None:
    """Sends the figures of a step to all trackers, under ``title``: every arm counts its own steps, from 1."""
    values = {f"{title}/{name}": value for name, value in figures.items()}
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":  # which drops what is logged under a step that it has passed
            tracker.log({**values, f"{title}/step": step})
        else:
            tracker.log(values, step=step)


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError where a tracker is unknown or not installed."""
    available = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in available:
            raise ValueError(
                f"trackers: {name!r} is not among those that are installed ({', '.join(available) or 'none'}); "
                "pip install it, or remove it."
            )


def stop(accelerator: Accelerator, error: Exception) -> NoReturn:
    """Ends the program with the message of an error of the user's, without a traceback, and exit status 2."""
    Console(stderr=True, quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True).print(
        f"[bold red]error:[/] {escape(str(error))}"
    )
    raise SystemExit(2)


def end_with_launcher() -> None:
    """Under ``accelerate launch`` on Linux: SIGTERM to the launcher reaches this process, too.

    The launcher of a single process ends without passing the signal on; the training would go on alone.
    """
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:  # which every launcher sets
        parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM, 0, 0, 0)


def use_all_cores(accelerator: Accelerator) -> int:
    """Gives a CPU process its share of the cores, and returns the number of threads.

    ``accelerate launch`` sets OMP_NUM_THREADS to 1 where nothing else was asked for, which halves a two-core
    machine. A larger OMP_NUM_THREADS, or ``--num_cpu_threads_per_process``, is left as it is.
    """
    if accelerator.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return torch.get_num_threads()


class Meter:
    """A running count for ``progress``: ``advance(tokens=..., note=...)``."""

    def __init__(self, console: Console, progress: Progress, title: str, total: int) -> None:
        self._console, self._progress, self._title, self._total = console, progress, title, total
        self._done = self._tokens = self._printed = 0
        self._task = progress.add_task(title, total=total, note="", speed="")
        self._clock = progress.get_time
        self._start = self._clock()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    @property
    def tokens_per_second(self) -> float:
        """Mean since the start."""
        return self._tokens / max(self.seconds, 1e-9)

    def advance(self, tokens: int, note: str = "", units: int = 1) -> None:
        """Counts ``units`` of the total and ``tokens`` tokens; ``note`` is shown beside the bar."""
        self._done, self._tokens = self._done + units, self._tokens + tokens
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, advance=units, note=note, speed=speed)
        tenth = 10 * self._done // self._total
        if not self._console.is_terminal and tenth > self._printed:  # a log file gets ten lines instead of a bar
            self._printed = tenth
            self._console.print(f"{self._title}  {self._done}/{self._total}  {note}  {speed}")


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Meter]:
    """A progress bar with a note, tokens per second and the time left; ten lines where output is no terminal."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)
    with bar:
        yield Meter(console, bar, title, total)


def results_table(arms: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One row per arm: perplexity at each length, accuracy at the first and the last.

    Args:
        arms: for each arm the ``lengths`` of an evaluation: summaries by length.
        title: above the table.
    """
    first = next(iter(arms.values()))
    lengths = list(first)
    accuracies = [key for key in first[lengths[0]] if key.startswith("top_")]
    ends = dict.fromkeys((lengths[0], lengths[-1]))
    table = Table("arm", title=title, title_justify="left")
    for heading in (
        *(f"ppl {length}" for length in lengths),
        *(f"{key.removesuffix('_accuracy').replace('_', '-')} {length}" for key in accuracies for length in ends),
    ):
        table.add_column(heading, justify="right")
    for arm, by_length in arms.items():
        table.add_row(
            arm,
            *(f"{by_length[length]['perplexity']:.1f}" for length in lengths),
            *(f"{100 * by_length[length][key]:.1f} %" for key in accuracies for length in ends),
        )
    return table
