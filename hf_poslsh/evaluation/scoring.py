"""Runs a causal language model over windows. The only file of the package that calls a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_poslsh.evaluation.scores import TokenScores, score_logits
from hf_poslsh.evaluation.windows import Window


def score_windows(
    model: Any,
    documents: Sequence[np.ndarray],
    windows: Sequence[Window],
    *,
    batch_tokens: int = 8192,
    on_batch: Callable[[int], None] | None = None,
) -> TokenScores:
    """The scores of all targets of the windows.

    Args:
        model: a causal language model of transformers: called as ``model(input_ids=(B, L), use_cache=False,
            logits_to_keep=scored)``, it returns ``.logits`` of the last ``scored`` positions, ``(B, scored, V)``.
            It is in evaluation mode during the call and as before afterwards.
        documents: integer token ids, ``(N_d,)`` each.
        windows: what to read and score. Consecutive windows of equal shape share a batch.
        batch_tokens: read at most so many tokens at once, but at least one window.
        on_batch: called after each batch with the number of tokens it read.

    Returns:
        One entry per target, in document order.

    Raises:
        ValueError: a window does not lie in its document, ``batch_tokens`` is below 1, or a target occurs twice.
        FloatingPointError: the model's output is NaN.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1.")
    for window in windows:
        tokens = len(documents[window.document])
        if not (0 <= window.start < window.end < tokens and 1 <= window.scored <= window.length):
            raise ValueError(f"{window} does not fit its document of {tokens} tokens (the last is a target only).")
    was_training = model.training
    model.eval()
    try:
        parts = []
        for batch in _batches(windows, batch_tokens):
            parts.append(_score_batch(model, documents, batch))
            if on_batch is not None:
                on_batch(len(batch) * batch[0].length)
    finally:
        model.train(was_training)
    return TokenScores.concatenate(parts)


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        if batch and (
            (window.length, window.scored) != (batch[0].length, batch[0].scored)
            or (len(batch) + 1) * window.length > batch_tokens
        ):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


@torch.no_grad()
def _score_batch(model: Any, documents: Sequence[np.ndarray], batch: Sequence[Window]) -> TokenScores:
    scored = batch[0].scored
    inputs = np.stack([documents[w.document][w.start : w.end] for w in batch]).astype(np.int64)
    targets = np.stack([documents[w.document][w.end - scored + 1 : w.end + 1] for w in batch]).astype(np.int64)
    output = model(input_ids=torch.from_numpy(inputs).to(model.device), use_cache=False, logits_to_keep=scored)
    nll, rank = score_logits(output.logits, torch.from_numpy(targets).to(output.logits.device))
    return TokenScores(
        document=np.repeat(np.array([w.document for w in batch], dtype=np.int64), scored),
        target=np.concatenate([np.array(w.targets, dtype=np.int64) for w in batch]),
        context=np.concatenate([np.array(w.contexts, dtype=np.int64) for w in batch]),
        nll=nll.double().cpu().numpy().reshape(-1),
        rank=rank.cpu().numpy().reshape(-1),
    )
