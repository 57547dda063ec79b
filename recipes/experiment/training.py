"""The training loop of one arm, on any number of processes, with checkpoints to continue from."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.utils.data import DataLoader, Dataset
from transformers import get_scheduler

from experiment.console import log, progress
from experiment.files import finish_folder, partial_folder, read_json, write_json
from experiment.settings import TrainingSettings


def train(
    accelerator: Accelerator,
    console: Console,
    title: str,
    model: Any,
    sequences: Dataset,
    settings: TrainingSettings,
    states: Path,
    save: Callable[[Any, Path], None],
    validation: Dataset | None = None,
    on_step: Callable[[Any, int], None] | None = None,
) -> dict[str, Any]:
    """Trains a model, from the last state in ``states`` if there is one.

    The loss of a step is the mean over the targets of all processes, however they are spread. What is kept, in
    ``states / "best"``, is the model with the lowest validation loss, or the last one where there is no validation.

    Args:
        accelerator: its data loader configuration has ``split_batches=True``: batches are counted globally.
        console: of the main process.
        title: beside the progress bar.
        model: a causal language model of transformers, with its initial weights.
        sequences: ``steps * batch_size`` items.
        settings: see ``TrainingSettings``.
        states: folder of the states to continue from, and of the model that is kept.
        save: writes the model, as ``accelerator.prepare`` made it, into a folder; called on all processes.
        validation: the sequences that choose the model.
        on_step: called with the model and the number of steps done, before each step.

    Returns:
        What to report of the training.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    if settings.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    warmup = settings.warmup_steps or round(settings.warmup_ratio * settings.steps)
    scheduler = get_scheduler(settings.schedule, optimizer, warmup, settings.steps)
    loader = DataLoader(sequences, batch_size=settings.batch_size)
    # DeepSpeed's ZeRO-3 leaves empty tensors in the place of those that it has shared out.
    sizes = [sum(getattr(p, "ds_numel", p.numel()) for p in of) for of in (model.parameters(), trained)]
    if settings.compile:
        model.compile()
    accelerator.gradient_accumulation_steps = micro_batches(settings, accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    best = Best(accelerator, states / "best", save)
    done, seconds = latest_state(states), 0.0
    if done:
        seconds = read_json(states / str(done) / "seconds.json")
        accelerator.load_state(str(states / str(done)))
        loader = accelerator.skip_first_batches(loader, done)
        console.print(f"{title}: continuing after step {done}")
    model.train()
    loss = math.nan
    tokens = settings.batch_size * settings.length
    with progress(console, title, settings.steps - done) as meter, Interruption() as interruption:
        for step, batch in enumerate(loader, done + 1):
            if on_step is not None:
                on_step(accelerator.unwrap_model(model), step - 1)
            rate = scheduler.get_last_lr()[0]
            loss = _step(accelerator, model, optimizer, scheduler, batch, settings.max_grad_norm)
            if not math.isfinite(loss):
                raise FloatingPointError(f"{title}: the loss is {loss} at step {step}; try a lower learning rate.")
            meter.advance(tokens, f"loss {loss:.3f}")
            figures = {"loss": loss, "learning_rate": rate, "tokens_per_second": meter.tokens_per_second}
            if validation is not None and (step % settings.validate_every == 0 or step == settings.steps):
                held_out = mean_loss(accelerator, model, validation)
                console.print(f"{title}: validation loss {held_out:.4f} after step {step}")
                best.offer(model, step, held_out)
                figures["validation_loss"] = held_out
            log(accelerator, title, figures, step)
            stopping = interruption.anywhere(accelerator) and step < settings.steps
            if stopping or (settings.save_every and step % settings.save_every == 0 and step < settings.steps):
                _save_state(accelerator, states, step, seconds + meter.seconds)
            if stopping:
                console.print(f"{title}: stopped after step {step}; --resume continues from there")
                raise SystemExit(128 + signal.SIGTERM)
        if validation is None:
            best.keep(model, settings.steps, None)
        return {
            "parameters": sizes[0],
            "trained_parameters": sizes[1],
            "length": settings.length,
            "steps": settings.steps,
            "kept": best.read(),
            "tokens": settings.steps * tokens,
            "final_loss": loss,
            "seconds": round(seconds + meter.seconds, 2),
            "tokens_per_second": round(meter.tokens_per_second, 1),
            "processes": accelerator.num_processes,
        }


class Best:
    """The best model so far, in a folder of its own that is replaced in one step.

    Args:
        accelerator: its processes call every method together.
        folder: of the model; beside its files, ``kept.json`` holds step and validation loss.
        save: see ``train``.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, save: Callable[[Any, Path], None]) -> None:
        self._accelerator, self._folder, self._save = accelerator, folder, save

    def read(self) -> dict[str, Any]:
        """Step and validation loss of the model that is kept."""
        return read_json(self._folder / "kept.json")

    def offer(self, model: Any, step: int, loss: float) -> None:
        """Keeps the model if its validation loss is the lowest."""
        if not self._folder.exists() or loss < self.read()["validation_loss"]:
            self._accelerator.wait_for_everyone()  # nobody replaces the folder before all have looked
            self.keep(model, step, loss)

    def keep(self, model: Any, step: int, loss: float | None) -> None:
        """Keeps the model."""
        partial = partial_folder(self._folder)
        if self._accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run may have left
        self._accelerator.wait_for_everyone()
        self._save(model, partial)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            write_json(partial / "kept.json", {"step": step, "validation_loss": loss})
            finish_folder(self._folder)
        self._accelerator.wait_for_everyone()


@torch.no_grad()
def mean_loss(accelerator: Accelerator, model: Any, sequences: Dataset) -> float:
    """Mean loss over the targets of all sequences, shared by the processes; nats per token."""
    rank, processes, count = accelerator.process_index, accelerator.num_processes, len(sequences)
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    model.eval()
    for first in range(0, count, processes):  # every process calls the model equally often: a sharded one needs it
        item = {name: value[None] for name, value in sequences[min(first + rank, count - 1)].items()}
        batch = {name: value.to(accelerator.device) for name, value in item.items()}
        targets = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch, use_cache=False).loss
        if first + rank < count:
            totals += torch.stack([loss.double() * targets, targets.double()])
    model.train()
    total, targets = accelerator.reduce(totals, reduction="sum").tolist()
    return total / targets


def micro_batches(settings: TrainingSettings, processes: int) -> int:
    """How many forward passes a process needs for a step.

    Raises:
        ValueError: the sequences of a step can't be shared out equally.
    """
    share, rest = divmod(settings.batch_size, processes)
    if rest:
        raise ValueError(
            f"training.batch_size is {settings.batch_size}, which {processes} processes can't share equally; "
            "choose a multiple."
        )
    size = settings.micro_batch_size or share
    if share % size:
        raise ValueError(
            f"training.micro_batch_size is {size}, which does not divide the {share} sequences that a process reads "
            "in a step."
        )
    return share // size


def _step(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batch: dict[str, Any], max_grad_norm: float
) -> float:
    passes = accelerator.gradient_accumulation_steps
    targets = (batch["labels"][:, 1:] != -100).sum()
    total = accelerator.reduce(targets, reduction="sum")
    loss = torch.zeros((), device=accelerator.device)
    for part in zip(*(value.chunk(passes) for value in batch.values()), strict=True):
        with accelerator.accumulate(model):
            # The model returns its share of the mean over all processes. Their gradients are averaged, and backward
            # divides by the number of passes: both belong to a sum.
            inputs = dict(zip(batch, part, strict=True))
            share = model(**inputs, num_items_in_batch=total, use_cache=False).loss
            accelerator.backward(share * accelerator.num_processes * passes)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss += share.detach()
    return accelerator.reduce(loss, reduction="sum").item()


class Interruption:
    """Within its context, SIGTERM is remembered instead of ending the program: a step is finished first."""

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True

    def anywhere(self, accelerator: Accelerator) -> bool:
        """Was any of the processes asked to stop? The same on all of them."""
        asked = torch.tensor(float(self._asked), device=accelerator.device)
        return bool(accelerator.reduce(asked, reduction="sum"))


def latest_state(states: Path) -> int:
    """The step of the newest complete state; 0 if there is none."""
    return max((int(path.name) for path in _states(states)), default=0)


def _states(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.name.isdecimal()]


def _save_state(accelerator: Accelerator, states: Path, step: int, seconds: float) -> None:
    folder = states / str(step)
    accelerator.save_state(str(partial_folder(folder)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(partial_folder(folder) / "seconds.json", seconds)
        finish_folder(folder)
        for older in _states(states):
            if older != folder:
                shutil.rmtree(older)
    accelerator.wait_for_everyone()
