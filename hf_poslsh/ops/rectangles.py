"""The banded pass in plain torch, for devices without a kernel of their own: dense rectangles, one at a time."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from hf_poslsh.ops._tokens import blocks_seen
from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.reference import dense_attention
from hf_poslsh.ops.rotary import Turns

_ROWS = 256  # query slots of one rectangle


def rectangles_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled estimator over rectangles of queries and the keys that they may see.

    A rectangle is ``_ROWS`` queries of one group of heads; only one is held at a time, and the backward pass computes
    it again, so memory is linear in the number of tokens. Arguments and results are those of ``banded_attention``.
    """
    seen = blocks_seen(query, key, bias, layout, _ROWS)
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    for g in range(key.shape[1]):
        heads = slice(g * group, (g + 1) * group)
        parts = [
            checkpoint(
                _rectangle, query[:, heads], key[:, [g]], value[:, [g]], bias.of_heads(heads), layout, scale,
                block * _ROWS, seen[:, heads, block], turns, use_reentrant=False,
            )
            for block in range(seen.shape[2])
        ]  # fmt: skip
        outs.append(torch.cat([out for out, _ in parts], dim=2))
        lses.append(torch.cat([lse for _, lse in parts], dim=2))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _rectangle(query, key, value, bias, layout, scale, start, seen, turns):
    rows = slice(start, start + _ROWS)
    sinks = seen[..., 1] > seen[..., 0]
    window = seen[..., 3] > seen[..., 2]
    low = int(seen[..., 2][window].min()) if window.any() else 0
    high = int(seen[..., 3][window].max()) if window.any() else 0
    first = int(seen[..., 0][sinks].min()) if sinks.any() else low
    last = min(int(seen[..., 1][sinks].max()), low) if sinks.any() else low
    device = query.device
    slots = torch.cat([torch.arange(first, last, device=device), torch.arange(low, high, device=device)])
    part = Layout(
        layout.query_positions[:, rows],
        layout.key_positions[:, slots],
        None if layout.query_segments is None else layout.query_segments[:, rows],
        None if layout.key_segments is None else layout.key_segments[:, slots],
        layout.is_causal,
        layout.window,
        layout.chunk,
    )
    turns = None if turns is None else turns.of_rows(rows)
    return dense_attention(query[:, :, rows], key[:, :, slots], value[:, :, slots], bias, part, scale, turns)
