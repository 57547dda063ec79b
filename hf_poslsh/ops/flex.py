"""All masks in one pass of torch's FlexAttention; its block mask is built from bin edges, not from an n x n mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_poslsh.ops._tokens import blocks_seen
from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.rotary import Turns, turn

_BLOCK = 128  # tokens of a block of the mask


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def flex_pass(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    with_lse: bool,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The pooled estimator as a score modification: ``score + log(count / s)`` over the blocks that a query sees.

    The count of a pair comes from an int32 table of left bin edges ``(s, heads, positions)``, memory linear in the
    length. Arguments and results are those of ``banded_attention``; the log-sum-exp is None unless ``with_lse``. The
    first call for a shape compiles.

    Raises:
        ValueError: a gradient or the log-sum-exp is needed on the CPU, where compiled FlexAttention has neither.
    """
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if query.device.type == "cpu" and (needs_grad or with_lse):
        raise ValueError(
            f"impl='flex' has no {'backward pass' if needs_grad else 'log-sum-exp'} on the CPU (torch's "
            "FlexAttention); use impl='banded' or 'auto' there."
        )
    far = None if turns is None else _far_scores(query, key, layout, turns) * scale
    score_mod, mask_mod = _modifications(bias, layout, far, turns)
    mask = _block_mask(query, key, bias, layout, mask_mod)
    exists = (layout.key_positions >= 0)[:, None, :, None]
    result = _compiled()(
        query,
        torch.where(exists, key, 0),
        torch.where(exists, value, 0),
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        **_lse_request(with_lse),
    )
    if not with_lse:
        return result, None
    out, lse = result
    return out, getattr(lse, "lse", lse)


def _lse_request(with_lse: bool) -> dict[str, Any]:
    if not with_lse:
        return {}
    request = getattr(torch_flex, "AuxRequest", None)  # torch 2.9 and later
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _modifications(
    bias: PositionBias, layout: Layout, far: torch.Tensor | None, turns: Turns | None
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    device = layout.query_positions.device
    query_positions, key_positions = layout.query_positions.to(torch.int32), layout.key_positions.to(torch.int32)
    query_rows, key_rows = query_positions.shape[0] > 1, key_positions.shape[0] > 1
    length = int(max(query_positions.amax(), key_positions.amax(), torch.zeros((), device=device))) + 1
    edges = torch.from_numpy(bias.hashes.left_edges(np.arange(length)).astype(np.int32)).to(device)
    slopes = torch.tensor(bias.slopes, dtype=torch.float32, device=device)
    reach = torch.tensor(np.minimum(bias.reach, 2**31 - 1), dtype=torch.int32, device=device)
    samples, sinks, causal = bias.hashes.num_samples, bias.sink_tokens, layout.is_causal
    window, chunk = layout.window, layout.chunk
    query_segments, key_segments = layout.query_segments, layout.key_segments

    def position(b: Any, i: Any, j: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query_positions[b if query_rows else 0, i], key_positions[b if key_rows else 0, j]

    def score_mod(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        at, to = position(b, i, j)
        # A padded token is masked, but its position must not index outside the table.
        row, column = at.clamp(min=0), to.clamp(min=0)
        count = torch.zeros_like(score)
        for r in range(samples):
            edge = edges[h, r, row]
            shared = edge <= to if causal else edge == edges[h, r, column]
            count = count + shared.to(score.dtype)
        distance = (at - to).abs()
        weighed = score + torch.log(count / samples) - slopes[h] * distance
        weighed = torch.where((count > 0) & (distance < reach[h]), weighed, -math.inf)
        if not sinks:
            return weighed
        if far is not None and turns is not None:
            score = torch.where(at - to > turns.max_distance, far[b, h, i, column.clamp(max=sinks - 1)], score)
        return torch.where(to < sinks, score, weighed)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        at, to = position(b, i, j)
        allowed = (at >= 0) & (to >= 0)
        if causal:
            allowed = allowed & (to <= at)
        if window is not None:
            allowed = allowed & ((at - to).abs() < window)
        if chunk is not None:
            allowed = allowed & (at // chunk == to // chunk)
        if query_segments is not None and key_segments is not None:
            rows = b if query_segments.shape[0] > 1 else 0, b if key_segments.shape[0] > 1 else 0
            allowed = allowed & (query_segments[rows[0], i] == key_segments[rows[1], j])
        return allowed

    return score_mod, mask_mod


def _far_scores(query: torch.Tensor, key: torch.Tensor, layout: Layout, turns: Turns) -> torch.Tensor:
    """Scores of every query, turned to d, and the sinks of its document, turned to 0: ``(B, H, Q, sinks)``."""
    batch, kv_heads = key.shape[:2]
    exists = layout.key_positions >= 0
    sinks, place = turns.sinks.shape[0], layout.key_positions.clamp(0, turns.sinks.shape[0] - 1)
    turned = turn(torch.where(exists[:, None, :, None], key, 0), turns.sinks[place], turns.interleaved)
    queries = turn(query, turns.queries, turns.interleaved).unflatten(1, (kv_heads, -1))
    # Keys in the order of document and position, so that the sinks of each query's document are found by bisection.
    segments = (torch.zeros_like(layout.key_positions), torch.zeros_like(layout.query_positions))
    if layout.key_segments is not None and layout.query_segments is not None:
        segments = layout.key_segments, layout.query_segments
    ranks = torch.where(exists, segments[0] * 2**32 + layout.key_positions, 2**62)
    ranks, order = (rows.expand(batch, -1).contiguous() for rows in ranks.sort(dim=1))
    scores = []
    for position in range(sinks):
        wanted = (segments[1] * 2**32 + position).expand(batch, -1).contiguous()
        found = torch.searchsorted(ranks, wanted).clamp_max(ranks.shape[1] - 1)
        slots = order.gather(1, found)[:, None, :, None].expand(-1, kv_heads, -1, key.shape[3])
        scores.append((queries * turned.gather(2, slots)[:, :, None]).sum(-1))
    return torch.stack(scores, dim=-1).flatten(1, 2)


def _block_mask(
    query: torch.Tensor, key: torch.Tensor, bias: PositionBias, layout: Layout, mask_mod: Callable[..., torch.Tensor]
) -> BlockMask:
    seen = blocks_seen(query, key, bias, layout, _BLOCK)
    blocks = (key.shape[2] + _BLOCK - 1) // _BLOCK
    ends = np.where(seen[..., 1::2] > seen[..., ::2], (seen[..., 1::2] + _BLOCK - 1) // _BLOCK, 0)
    starts = np.minimum(seen[..., ::2] // _BLOCK, ends)
    ends[..., 0] = np.maximum(
        np.minimum(ends[..., 0], np.where(ends[..., 1] > 0, starts[..., 1], blocks)), starts[..., 0]
    )
    sinks, window = np.moveaxis(ends - starts, -1, 0)
    order = np.arange(blocks)
    indices = np.where(order < sinks[..., None], starts[..., :1] + order, starts[..., 1:] + order - sinks[..., None])
    counts = torch.from_numpy(sinks + window).to(query.device, torch.int32)
    indices = torch.from_numpy(np.clip(indices, 0, blocks - 1)).to(query.device, torch.int32)
    lengths = (query.shape[2], key.shape[2])
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=lengths)
