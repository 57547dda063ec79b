"""The paper's algorithm: one block-diagonal attention for each hash, merged by their log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from hf_poslsh.hashing import PositionalHash
from hf_poslsh.ops.banded import banded_attention
from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.rotary import Turns


def merge_attention(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over several sets of keys into attention over their sum.

    With ``out_r = sum_j w_rj v_j / Z_r`` and ``lse_r = log Z_r``, the merged weights are ``sum_r w_rj``, so
    ``out = sum_r e^{lse_r - lse} out_r`` with ``lse = log sum_r e^{lse_r}``. A key in several sets counts as often.
    (Milakov and Gimelshein 2018, online softmax; used by the paper for its s hashes.)

    Args:
        parts: at least one pair of an output ``(..., D)`` and its log-sum-exp ``(...)``, -inf where the set had
            no visible key. They are taken one at a time.

    Returns:
        Merged output ``(..., D)`` in the dtype of the outputs, and log-sum-exp in that of the log-sum-exps;
        0 and -inf where no set had a visible key.

    Raises:
        ValueError: there are no parts.
    """
    merged = None
    for out, lse in parts:
        if merged is None:
            merged = out.to(lse.dtype), lse
            continue
        total = torch.logaddexp(merged[1], lse)
        empty = torch.isneginf(total)
        kept, added = ((x - torch.where(empty, 0.0, total)).exp().unsqueeze(-1) for x in (merged[1], lse))
        merged = merged[0] * kept + out.to(lse.dtype) * added, total
    if merged is None:
        raise ValueError("merge_attention got no parts; give at least one (output, log-sum-exp).")
    return merged[0].to(out.dtype), merged[1]


def blocks_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    estimator: str,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The s block-diagonal passes, merged (``"pooled"``) or averaged (``"mean"``). Work: about sigma s keys a query.

    Arguments and results are those of ``banded_attention``. For ``"mean"`` the log-sum-exp is the pooled one.
    """
    samples = bias.hashes.num_samples
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    wide = query.to(dtype), key.to(dtype), value.to(dtype)
    average = torch.zeros_like(wide[0])

    def passes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal average
        for r in range(samples):
            hashes = PositionalHash(bias.hashes.widths[:, [r]], bias.hashes.shifts[:, [r]])
            one = PositionBias(hashes, bias.slopes, bias.reach, bias.sink_tokens)
            out, lse = banded_attention(*wide, one, layout, scale, turns)
            if estimator == "mean":
                average = average + out / samples
            yield out, lse

    out, lse = merge_attention(passes())
    return (average if estimator == "mean" else out).to(query.dtype), lse - math.log(samples)
