"""Evaluates a saved checkpoint: loads it as a user would, scores the held-out texts, gathers the processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiment.console import progress
from experiment.corpus import Text, encode
from experiment.settings import EvaluationSettings
from hf_poslsh.evaluation import TokenScores, Window, require_same_targets, same_target_windows, score_windows


def plan(settings: EvaluationSettings, documents: Sequence[np.ndarray]) -> dict[int, list[Window]]:
    """The windows of the protocol. Raises ValueError if the documents can't hold them."""
    return same_target_windows(
        [len(document) for document in documents], settings.lengths, settings.targets, settings.targets_per_window
    )


def evaluate_checkpoint(
    accelerator: Accelerator,
    console: Console,
    title: str,
    checkpoint: str | Path,
    texts: Sequence[Text],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """The figures of one checkpoint.

    Args:
        accelerator: the processes that share the windows.
        console: of the main process.
        title: beside the progress bar.
        checkpoint: a folder, or a name on the Hub, that holds model and tokenizer.
        texts: the held-out documents.
        settings: see ``EvaluationSettings``.

    Returns:
        On every process the same: ``protocol`` (its name, texts, tokens scored and parameters) and ``lengths``, a
        summary for each length (keys are text, as in JSON).

    Raises:
        ValueError: the texts are too short for the protocol.
    """
    documents = encode(AutoTokenizer.from_pretrained(checkpoint), texts)
    windows = plan(settings, documents)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).to(accelerator.device)
    rank, processes = accelerator.process_index, accelerator.num_processes
    scores = {}
    total = sum(length * len(of_length[rank::processes]) for length, of_length in windows.items())
    with progress(console, title, max(total, 1)) as meter:
        for length, of_length in windows.items():
            note = f"length {length}"
            parts = []
            if of_length[rank::processes]:
                parts = [
                    score_windows(
                        model,
                        documents,
                        of_length[rank::processes],
                        batch_tokens=settings.batch_tokens,
                        on_batch=lambda tokens, note=note: meter.advance(tokens, note, units=tokens),
                    )
                ]
            scores[length] = TokenScores.concatenate(gather_object(parts))
    require_same_targets(scores)
    return {
        "protocol": {
            "name": "same-targets",
            "tokens_scored": len(next(iter(scores.values()))),
            "targets_per_window": settings.targets_per_window,
            "texts": [
                {"name": text.name, "sha256": text.sha256, "tokens": len(document)}
                for text, document in zip(texts, documents, strict=True)
            ],
        },
        "lengths": {str(length): of_length.summary(settings.top_k) for length, of_length in scores.items()},
    }
