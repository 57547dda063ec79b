"""The dense oracle: float64, n x n, written to be read. Everything else is compared with it."""

from __future__ import annotations

import torch

from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.rotary import Turns, is_far, turn


def allowed_pairs(layout: Layout) -> torch.Tensor:
    """Which pairs the layout lets through: bool ``(B or 1, Q, K)``."""
    i = layout.query_positions[:, :, None]
    j = layout.key_positions[:, None, :]
    allowed = (i >= 0) & (j >= 0)
    if layout.query_segments is not None and layout.key_segments is not None:
        allowed = allowed & (layout.query_segments[:, :, None] == layout.key_segments[:, None, :])
    if layout.is_causal:
        allowed = allowed & (j <= i)
    if layout.window is not None:
        allowed = allowed & ((i - j).abs() < layout.window)
    if layout.chunk is not None:
        allowed = allowed & (i.div(layout.chunk, rounding_mode="floor") == j.div(layout.chunk, rounding_mode="floor"))
    return allowed


def pair_weights(bias: PositionBias, layout: Layout, sample: int | None = None) -> torch.Tensor:
    """Weight of every pair, allowed or not: float64 ``(B or 1, H, Q, K)``; of one hash only if ``sample``."""
    i = layout.query_positions[:, None, :, None]
    j = layout.key_positions[:, None, None, :]
    samples = range(bias.hashes.num_samples) if sample is None else [sample]
    widths = torch.from_numpy(bias.hashes.widths.copy()).to(i.device)[None, :, :, None]
    shifts = torch.from_numpy(bias.hashes.shifts.copy()).to(i.device)[None, :, :, None]
    query_bins = ((layout.query_positions[:, None, None, :].double() + shifts) / widths).floor()
    key_bins = ((layout.key_positions[:, None, None, :].double() + shifts) / widths).floor()
    count = sum((query_bins[:, :, r, :, None] == key_bins[:, :, r, None, :]).double() for r in samples)
    slopes = torch.from_numpy(bias.slopes.copy()).to(i.device)[None, :, None, None]
    reach = torch.from_numpy(bias.reach.copy()).to(i.device)[None, :, None, None]
    distance = (i - j).abs()
    weight = count / len(samples) * (-slopes * distance).exp()
    weight = torch.where(distance < reach, weight, 0.0)
    if bias.sink_tokens:
        weight = torch.where((j < bias.sink_tokens) & (j >= 0), 1.0, weight)
    return weight


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    estimator: str,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over ``score + log(weight)`` of all allowed pairs, in float64, by autograd's own rules.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, K, D)``.
        value: ``(B, H_kv, K, D)``.
        bias: the positional bias of all H heads.
        layout: positions, segments and the host's mask.
        scale: factor of the scores.
        estimator: ``"pooled"`` or ``"mean"``.
        turns: how queries and sinks are turned that are too far apart; None: true rotary distances.

    Returns:
        Output ``(B, H, Q, D)`` in the dtype of ``query``, and the log-sum-exp ``(B, H, Q)`` in float64 (-inf for a
        row without a visible key). For ``"mean"`` the log-sum-exp is that of the pooled weights.
    """
    scores, v = _scores(query, key, value, layout, scale, torch.float64, turns)
    allowed = allowed_pairs(layout)[:, None]
    out, lse = _masked_softmax(scores, torch.where(allowed, pair_weights(bias, layout), 0.0), v)
    if estimator == "mean":
        masks = (pair_weights(bias, layout, r) for r in range(bias.hashes.num_samples))
        outs = [_masked_softmax(scores, torch.where(allowed, mask, 0.0), v)[0] for mask in masks]
        out = torch.stack(outs).mean(0)
    return out.to(query.dtype), lse


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    estimator: str,
    turns: Turns | None = None,
) -> torch.Tensor:
    """The weights with which ``reference_attention`` sums the values, dense, for study.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, K, D)``.
        bias: as there, like the others.
        layout: see there.
        scale: see there.
        estimator: see there.
        turns: see there.

    Returns:
        ``(B, H, Q, K)`` in the dtype of ``query``; a row sums to 1, or is 0 if it sees no key.
    """
    scores, _ = _scores(query, key, key, layout, scale, torch.float64, turns)
    identity = torch.eye(key.shape[2], dtype=torch.float64, device=key.device)
    allowed = allowed_pairs(layout)[:, None]
    samples: list[int | None] = [*range(bias.hashes.num_samples)] if estimator == "mean" else [None]
    masks = (torch.where(allowed, pair_weights(bias, layout, sample), 0.0) for sample in samples)
    return torch.stack([_masked_softmax(scores, mask, identity)[0] for mask in masks]).mean(0).to(query.dtype)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled estimator as ``reference_attention`` has it, computed in float32 (float64 for float64 input)."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores, v = _scores(query, key, value, layout, scale, dtype, turns)
    weight = torch.where(allowed_pairs(layout)[:, None], pair_weights(bias, layout), 0.0).to(dtype)
    out, lse = _masked_softmax(scores, weight, v)
    return out.to(query.dtype), lse


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float,
    dtype: torch.dtype,
    turns: Turns | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``(B, H, Q, K)`` and values ``(B, H, K, D)``; what a masked token holds is taken as 0."""
    groups = query.shape[1] // key.shape[1]
    exists = (layout.key_positions >= 0)[:, None, :, None]
    k = torch.where(exists, key, 0).to(dtype).repeat_interleave(groups, dim=1)
    v = torch.where(exists, value, 0).to(dtype).repeat_interleave(groups, dim=1)
    q = torch.where((layout.query_positions >= 0)[:, None, :, None], query, 0).to(dtype)
    scores = q @ k.transpose(-1, -2)
    if turns is not None:
        to_start = turns.keys
        if to_start is None:
            to_start = turns.sinks[layout.key_positions.clamp(0, turns.sinks.shape[0] - 1)]
        far_q = turn(q, turns.queries, turns.interleaved).to(dtype)
        far_k = turn(k, to_start, turns.interleaved).to(dtype)
        far = is_far(layout.query_positions[:, None, :, None], layout.key_positions[:, None, None, :], turns)
        scores = torch.where(far, far_q @ far_k.transpose(-1, -2), scores)
    return scores * scale, v


def _masked_softmax(
    scores: torch.Tensor, weight: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.where(weight > 0, scores + weight.clamp_min(torch.finfo(weight.dtype).tiny).log(), -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    probabilities = (logits - top).exp()
    total = probabilities.sum(-1, keepdim=True)
    empty = total == 0
    out = probabilities @ value / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + top).squeeze(-1)
    return out, lse
