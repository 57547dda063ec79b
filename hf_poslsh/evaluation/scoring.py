"""Runs a causal language model over windows. The only file of the package that calls a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_poslsh.evaluation.documents import Document
from hf_poslsh.evaluation.scores import TokenScores, score_logits
from hf_poslsh.evaluation.windows import Window

_LOGITS_AT_ONCE = 2**24  # 64 MiB in float32: a vocabulary of 49152 at 16384 positions would be 3 GiB


def score_windows(
    model: Any,
    documents: Sequence[Document],
    windows: Sequence[Window],
    *,
    batch_tokens: int = 8192,
    share: tuple[int, int] = (0, 1),
    on_batch: Callable[[int], None] | None = None,
) -> TokenScores:
    """The scores of all targets of the windows.

    Windows are batched from the longest to the shortest, padded on the right; a causal model never sees what stands
    to the right. Logits are made for scored positions alone, a bounded number at once. The attention is the model's
    own: full where it is full.

    Args:
        model: a causal language model of transformers, on any device, of any float dtype. It is in evaluation mode
            during the call and as before afterwards.
        documents: what the windows are cut from.
        windows: what to read and score.
        batch_tokens: read at most so many tokens at once, padding included, but at least one window.
        share: ``(process, processes)``: score every ``processes``-th batch, from this one on. The batches do not
            depend on the number of processes, so that neither do the scores.
        on_batch: called after each batch with the number of tokens it read, without padding.

    Returns:
        One entry per target, in document order; none if no batch is left for this process.

    Raises:
        ValueError: a window does not lie in its document, ``batch_tokens`` is below 1, a target occurs twice, or the
            logits are not what the model's output embedding returns.
        FloatingPointError: the model's output is NaN.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1.")
    for window in windows:
        tokens = len(documents[window.document])
        if not (0 <= window.start < window.end < tokens and 1 <= window.scored <= window.length):
            raise ValueError(f"{window} does not fit its document of {tokens} tokens (the last is a target only).")
    process, processes = share
    was_training = model.training
    model.eval()
    try:
        parts = []
        for batch in _batches(windows, batch_tokens)[process::processes]:
            parts.append(_score_batch(model, documents, batch))
            if on_batch is not None:
                on_batch(sum(window.length for window in batch))
    finally:
        model.train(was_training)
    return TokenScores.concatenate(parts) if parts else TokenScores.empty()


def _batches(windows: Sequence[Window], batch_tokens: int) -> list[list[Window]]:
    batches: list[list[Window]] = []
    for window in sorted(windows, key=lambda window: -window.length):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= batch_tokens:
            batches[-1].append(window)
        else:
            batches.append([window])
    return batches


@torch.no_grad()
def _score_batch(model: Any, documents: Sequence[Document], batch: Sequence[Window]) -> TokenScores:
    inputs = np.zeros((len(batch), batch[0].length), dtype=np.int64)
    for row, window in zip(inputs, batch, strict=True):
        document = documents[window.document]
        row[: window.length] = document.ids[window.start : window.end]
        if document.bos is not None:
            row[0] = document.bos
    hidden, head, vocabulary = _hidden_states(model, torch.from_numpy(inputs).to(model.device))
    rows = np.repeat(np.arange(len(batch)), [window.scored for window in batch])
    columns = np.concatenate([np.arange(window.length - window.scored, window.length) for window in batch])
    owner = np.array([window.document for window in batch], dtype=np.int64)[rows]
    target = np.concatenate([np.array(window.targets, dtype=np.int64) for window in batch])
    ids, counts = (
        np.concatenate([getattr(documents[w.document], name)[w.targets.start : w.targets.stop] for w in batch])
        for name in ("ids", "bytes")
    )
    selected = hidden[torch.from_numpy(rows).to(hidden.device), torch.from_numpy(columns).to(hidden.device)]
    targets = torch.from_numpy(ids.astype(np.int64))
    nll, rank = [], []
    for some_hidden, some_targets in zip(
        selected.split(max(1, _LOGITS_AT_ONCE // vocabulary)),
        targets.split(max(1, _LOGITS_AT_ONCE // vocabulary)),
        strict=True,
    ):
        logits = head(some_hidden)  # perhaps on another device: a model may be spread over several
        some_nll, some_rank = score_logits(logits, some_targets.to(logits.device))
        nll.append(some_nll.double().cpu())
        rank.append(some_rank.cpu())
    return TokenScores(
        document=owner,
        target=target,
        context=columns + 1,
        bytes=counts,
        nll=torch.cat(nll).numpy(),
        rank=torch.cat(rank).numpy(),
    )


def _hidden_states(model: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, Any, int]:
    """What the output embedding is given ``(B, L, H)``, that module, and the size of the vocabulary.

    The module sees only the last position during the call; its one row of logits, compared with what the model made
    of it, shows that applying the module to other positions later is all there is to do.
    """
    head = model.get_output_embeddings()
    seen: list[torch.Tensor] = []

    def keep_last(module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        seen.append(arguments[0])
        return (arguments[0][:, -1:],)

    handle = head.register_forward_pre_hook(keep_last)
    try:
        logits = model(input_ids=inputs, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape[:2] != inputs.shape:
        raise ValueError(
            f"{type(model).__name__} calls its output embedding otherwise than once on all positions; it can't be "
            "scored."
        )
    expected = head(seen[0][:, -1:]).to(logits.device)
    if not torch.allclose(expected.double(), logits.double(), rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output embedding (soft-capping, scaling); it can't "
            "be scored."
        )
    return seen[0], head, logits.shape[-1]
