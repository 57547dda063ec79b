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
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from experiment.console import progress
from experiment.corpus import Sequences
from experiment.files import finish_folder, partial_folder
from experiment.settings import TrainingSettings


def train(
    accelerator: Accelerator,
    console: Console,
    title: str,
    model: Any,
    sequences: Sequences,
    settings: TrainingSettings,
    states: Path,
    on_step: Callable[[Any, int], None] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Trains a model, from the last state in ``states`` if there is one.

    The loss of a step is the mean over the targets of all processes, however they are spread.

    Args:
        accelerator: its data loader configuration has ``split_batches=True``: batches are counted globally.
        console: of the main process.
        title: beside the progress bar.
        model: a causal language model of transformers, with its initial weights.
        sequences: ``steps * batch_size`` items.
        settings: see ``TrainingSettings``.
        states: folder of the states to continue from.
        on_step: called with the model and the number of steps done, before each step.

    Returns:
        The trained model as ``accelerator.prepare`` made it, and what to report of the training.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    scheduler = get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, settings.steps)
    loader = DataLoader(sequences, batch_size=settings.batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
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
            if settings.save_every and step % settings.save_every == 0 and step < settings.steps:
                _save_state(accelerator, states, step)
        report = {
            "parameters": parameters,
            "steps": settings.steps,
            "tokens": settings.steps * tokens,
            "final_loss": loss,
            "seconds": round(meter.seconds, 2),
            "tokens_per_second": round(meter.tokens_per_second, 1),
            "processes": accelerator.num_processes,
        }
    accelerator.wait_for_everyone()
    return model, report


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
    return max((int(path.name) for path in states.glob("[0-9]*")), default=0)


def _save_state(accelerator: Accelerator, states: Path, step: int) -> None:
    folder = states / str(step)
    accelerator.save_state(str(partial_folder(folder)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        finish_folder(folder)
        for older in states.iterdir():
            if older != folder:
                shutil.rmtree(older)
    accelerator.wait_for_everyone()
