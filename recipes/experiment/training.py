"""The training loop of one arm, on any number of processes, with checkpoints to continue from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.utils.data import DataLoader, Dataset
from transformers import get_cosine_schedule_with_warmup

from experiment.console import progress
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    scheduler = get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, settings.steps)
    loader = DataLoader(sequences, batch_size=settings.batch_size)
    sizes = [sum(p.numel() for p in of) for of in (model.parameters(), trained)]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    best = Best(accelerator, states / "best", save)
    done = latest_state(states)
    if done:
        accelerator.load_state(str(states / str(done)))
        loader = accelerator.skip_first_batches(loader, done)
        console.print(f"{title}: continuing after step {done}")
    model.train()
    loss = math.nan
    tokens = settings.batch_size * settings.length
    with progress(console, title, settings.steps - done) as meter:
        for step, batch in enumerate(loader, done + 1):
            if on_step is not None:
                on_step(accelerator.unwrap_model(model), step - 1)
            loss = _step(accelerator, model, optimizer, scheduler, batch, settings.max_grad_norm)
            if not math.isfinite(loss):
                raise FloatingPointError(f"{title}: the loss is {loss} at step {step}; try a lower learning rate.")
            meter.advance(tokens, f"loss {loss:.3f}")
            if validation is not None and (step % settings.validate_every == 0 or step == settings.steps):
                held_out = mean_loss(accelerator, model, validation)
                console.print(f"{title}: validation loss {held_out:.4f} after step {step}")
                best.offer(model, step, held_out)
            if settings.save_every and step % settings.save_every == 0 and step < settings.steps:
                _save_state(accelerator, states, step)
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
            "seconds": round(meter.seconds, 2),
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


def _step(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batch: dict[str, Any], max_grad_norm: float
) -> float:
    targets = (batch["labels"][:, 1:] != -100).sum()
    total = accelerator.reduce(targets, reduction="sum")
    # The model returns its share of the mean over all processes; their gradients are averaged, not summed.
    share = model(**batch, num_items_in_batch=total, use_cache=False).loss
    accelerator.backward(share * accelerator.num_processes)
    accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return accelerator.reduce(share.detach(), reduction="sum").item()


def latest_state(states: Path) -> int:
    """The step of the newest complete state; 0 if there is none."""
    return max((int(path.name) for path in _states(states)), default=0)


def _states(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.name.isdecimal()]


def _save_state(accelerator: Accelerator, states: Path, step: int) -> None:
    folder = states / str(step)
    accelerator.save_state(str(partial_folder(folder)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        finish_folder(folder)
        for older in _states(states):
            if older != folder:
                shutil.rmtree(older)
    accelerator.wait_for_everyone()
