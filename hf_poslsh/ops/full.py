"""Heads that see all keys of their document, at rotary distances min(i - j, d) where those are bounded.

Two passes, merged by their log-sum-exps. Near: the keys less than d away, as they come. Far: the others, where the
query stands at d and the key at 0; the keys ``j <= i - d`` are a causal attention of queries that stand d earlier.
(Derived here from the rule of ``rotary``; ReRoPE and Self-Extend bound distances for all keys too.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from hf_poslsh.ops._transforms import SECOND, transforms_active
from hf_poslsh.ops.banded import banded_attention, merged_backward
from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.blocks import merge_attention
from hf_poslsh.ops.functional import biased_attention
from hf_poslsh.ops.reference import attention_weights
from hf_poslsh.ops.rotary import Turns, turn

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def full_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float,
    turns: Turns | None = None,
    turned: torch.Tensor | None = None,
    impl: str = "auto",
    plain: bool = False,
) -> torch.Tensor:
    """Causal attention over everything that the layout lets through.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, K, D)``, rotated by their positions, those of ``turned`` by nothing.
        value: ``(B, H_kv, K, D)``.
        layout: positions, segments and the host's own window and chunk; causal.
        scale: factor of the scores.
        turns: bounds all rotary distances; has ``keys``, except for one query with ``turned``. None: true distances.
        turned: bool ``(B or 1, K)``: keys that stand at 0 already. Each is at least d away from all queries.
        impl: of both passes, see ``positional_lsh_attention``; ``"auto"`` takes torch's flash kernel where it can.
        plain: the caller knows that the queries are the last Q of K tokens of one document without padding, and that
            the host's window and chunk limit nothing.

    Returns:
        ``(B, H, Q, D)`` in the dtype of ``query``; 0 for a row without a visible key.
    """
    if impl == "reference":
        bias = _everything(query.shape[1])
        key = turned_back(key, turns, turned)
        return biased_attention(query, key, value, bias, layout, scale, impl=impl, turns=turns)[0]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    plain = plain and query.device.type == "cpu" and not torch.compiler.is_compiling() and not transforms_active()
    if query.shape[2] == 1 and impl == "auto":
        if plain and not needs_grad:
            return _one_query_by_flash(query, key, value, scale, turns, turned)
        return _one_query(query, key, value, layout, scale, turns, turned)
    if plain and impl == "auto":
        return _by_flash(query, key, value, layout, scale, turns, turned)
    everything = _everything(query.shape[1])
    if turns is None:
        return biased_attention(query, key, value, everything, layout, scale, impl=impl)[0]
    near = dataclasses.replace(layout, window=min(turns.max_distance, layout.window or turns.max_distance))
    far_query, far_key = _turned(query, key, turns, turned)
    passes = [
        biased_attention(query, key, value, everything, near, scale, impl=impl, with_lse=True),
        biased_attention(
            far_query,
            far_key,
            value,
            everything,
            _shifted(layout, turns.max_distance),
            scale,
            impl=impl,
            with_lse=True,
        ),
    ]
    return merge_attention((out, lse) for out, lse in passes if lse is not None)[0]


def full_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    layout: Layout,
    scale: float,
    turns: Turns | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention weights of ``full_attention``, dense: ``(B, H, Q, K)``; ``turns`` with ``keys``."""
    key = turned_back(key, turns, turned)
    return attention_weights(query, key, _everything(query.shape[1]), layout, scale, "pooled", turns)


@torch.compiler.assume_constant_result
def _everything(heads: int) -> PositionBias:
    """Weight 1 for every key."""
    return _weight_one(heads)


@functools.lru_cache(maxsize=64)
def _weight_one(heads: int) -> PositionBias:
    return PositionBias.window(heads, None)


def _turned(
    query: torch.Tensor, key: torch.Tensor, turns: Turns, turned: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All queries at d and all keys at 0, in the dtype that they came in."""
    assert turns.keys is not None
    far_query = turn(query, turns.queries, turns.interleaved).to(query.dtype)
    far_key = turn(key, turns.keys, turns.interleaved).to(key.dtype)
    return far_query, far_key if turned is None else torch.where(turned[:, None, :, None], key, far_key)


def _shifted(layout: Layout, distance: int) -> Layout:
    """The layout in which a query sees ``j <= i - distance``, within the host's window and chunk."""
    query_positions = torch.where(layout.query_positions >= distance, layout.query_positions - distance, -1)
    segments = layout.query_segments, layout.key_segments
    if layout.chunk is not None:  # a chunk is a document of its own: the shift would move its border
        chunks = [rows.clamp_min(0) // layout.chunk for rows in (layout.query_positions, layout.key_positions)]
        joined = [c if s is None else s * 2**31 + c for s, c in zip(segments, chunks, strict=True)]
        segments = joined[0], joined[1]
    window = None if layout.window is None else layout.window - distance
    if window is not None and window < 1:  # the host sees nothing that is far
        query_positions, window = torch.full_like(query_positions, -1), None
    return Layout(query_positions, layout.key_positions, *segments, True, window, None)


def turned_back(key: torch.Tensor, turns: Turns | None, turned: torch.Tensor | None) -> torch.Tensor:
    """Keys ``(B, H_kv, K, D)`` as their positions rotate them, those of ``turned`` too; ``turns`` with ``keys``."""
    if turns is None or turned is None:
        return key
    assert turns.keys is not None
    there = torch.stack([turns.keys[..., 0, :], -turns.keys[..., 1, :]], dim=-2)
    return torch.where(turned[:, None, :, None], turn(key, there, turns.interleaved).to(key.dtype), key)


def _one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float,
    turns: Turns | None,
    turned: torch.Tensor | None,
) -> torch.Tensor:
    """One query a row: dense, each key read once, for the query as it is and for the one that stands at d."""
    group = query.shape[1] // key.shape[1]
    queries = query[:, :, 0].unflatten(1, (-1, group))
    position, places = layout.query_positions, layout.key_positions
    allowed = (places >= 0) & (places <= position)
    if layout.query_segments is not None and layout.key_segments is not None:
        allowed = allowed & (layout.query_segments == layout.key_segments)
    if layout.window is not None:
        allowed = allowed & (position - places < layout.window)
    if layout.chunk is not None:
        allowed = allowed & (places // layout.chunk == position // layout.chunk)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    exists = (places >= 0)[:, None, :, None]
    key, value = torch.where(exists, key, 0).to(dtype), torch.where(exists, value, 0)
    queries = queries.to(dtype)
    if turns is None:
        scores = (queries @ key.transpose(-1, -2)).to(dtype)
    else:
        far_queries = turn(query, turns.queries, turns.interleaved)[:, :, 0].unflatten(1, (-1, group))
        far = (position - places >= turns.max_distance)[:, None, None]
        if turned is None:
            assert turns.keys is not None
            far_key = turn(key, turns.keys, turns.interleaved).to(key.dtype)
            near_scores, far_scores = queries @ key.transpose(-1, -2), far_queries @ far_key.transpose(-1, -2)
        else:
            both = torch.cat([queries, far_queries], dim=2) @ key.transpose(-1, -2)
            near_scores, far_scores = both[:, :, :group], both[:, :, group:]
        scores = torch.where(far, far_scores, near_scores).to(dtype)
    scores = torch.where(allowed[:, None, None], scores * scale, -torch.inf)
    seen = allowed.any(-1)[:, None, None, None]
    weights = torch.where(seen, scores, 0.0).softmax(-1)
    out = torch.where(seen, weights.to(value.dtype) @ value, 0)
    return out.flatten(1, 2)[:, :, None]


def _one_query_by_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    turns: Turns | None,
    turned: torch.Tensor | None,
) -> torch.Tensor:
    """The same where nothing is masked and no gradient needed: each key is read once, in place.

    The query heads of a group are the queries of one dense call.
    """
    shape = (query.shape[0], key.shape[1], -1, query.shape[3])
    keys = key.shape[2]
    far = 0 if turns is None else max(keys - turns.max_distance, 0)  # the first keys, d away or more
    parts = [_flash(query.reshape(shape), key[:, :, far:], value[:, :, far:], 0.0, False, scale=scale)]
    if turns is not None and far:
        far_key = key[:, :, :far]
        if turned is None:  # otherwise those are turned already
            assert turns.keys is not None
            far_key = turn(far_key, turns.keys[:, :far], turns.interleaved).to(key.dtype)
        far_query = turn(query, turns.queries, turns.interleaved).to(query.dtype)
        parts.append(_flash(far_query.reshape(shape), far_key, value[:, :, :far], 0.0, False, scale=scale))
    return merge_attention(parts)[0].reshape(query.shape)


# --- torch's flash kernel -----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One call of the flash kernel: queries ``rows`` and keys ``keys``, of the far or of the near tensors."""

    rows: slice
    keys: slice
    causal: bool
    far: bool


def _parts(queries: int, keys: int, distance: int | None) -> list[_Part]:
    """Calls that visit what the last ``queries`` of ``keys`` tokens see, or what of it is at least ``distance`` away.

    A causal call is square: its first query sees its first key.
    """
    everything = slice(0, queries)
    start = keys - queries - (distance or 0)  # keys that every query sees
    far = distance is not None
    if start >= 0:
        seen_by_all = [_Part(everything, slice(0, start), False, far)] if start else []
        return [*seen_by_all, _Part(everything, slice(start, start + queries), True, far)]
    rows = queries + start
    return [_Part(slice(queries - rows, queries), slice(0, rows), True, far)] if rows > 0 else []


def _by_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float,
    turns: Turns | None,
    turned: torch.Tensor | None,
) -> torch.Tensor:
    if turns is None:
        return _Flash.apply(query, key, value, None, None, layout, scale, None)
    far_query, far_key = _turned(query, key, turns, turned)
    return _Flash.apply(query, key, value, far_query, far_key, layout, scale, turns.max_distance)


class _Flash(torch.autograd.Function):
    """The passes and their merge as one function.

    Its backward pass gives every part the output and the log-sum-exp of the whole: the weights of the whole are
    ``e^{s_ij - lse_i}`` in any part, and ``delta_i = dout_i . out_i`` is the whole's (as in ring attention).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        far_query: torch.Tensor | None,
        far_key: torch.Tensor | None,
        layout: Layout,
        scale: float,
        distance: int | None,
    ) -> torch.Tensor:
        """Output of all parts; ``distance`` with far query and far key, or None."""
        group = query.shape[1] // key.shape[1]
        parts = _parts(query.shape[2], key.shape[2], distance)
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        if distance is not None:
            near = dataclasses.replace(layout, window=distance)
            bias = _everything(query.shape[1])
            out, lse = banded_attention(query, key, value, bias, near, scale)
            merged = out.to(lse.dtype), lse
        for part in parts:
            q, k, v = _of(part, query, key, value, far_query, far_key, group)
            out, lse = _flash(q, k, v, 0.0, part.causal, scale=scale)
            merged = _merge(merged, part.rows, out.to(lse.dtype), lse)
        assert merged is not None
        out, lse = merged
        ctx.save_for_backward(query, key, value, far_query, far_key, out, lse)
        ctx.rest = parts, layout, scale, distance, group
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Gradients of query, key and value, near and far."""
        grads = _FlashBackward.apply(out_grad, *ctx.saved_tensors, *ctx.rest)
        return (*grads, *[None] * (8 - len(grads)))


class _FlashBackward(torch.autograd.Function):
    """The gradients of ``_Flash``; a function of its own, so that a second derivative is refused by name."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        out_grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        far_query: torch.Tensor | None,
        far_key: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: list[_Part],
        layout: Layout,
        scale: float,
        distance: int | None,
        group: int,
    ) -> Any:
        """Gradients of query, key and value, and with a distance of far query and far key."""
        out_grad = out_grad.to(query.dtype).contiguous()
        wide = lse.dtype
        grads = [torch.zeros(tensor.shape, dtype=wide) for tensor in (query, key, value)]
        far_grads: list[Any] = [None, None]
        if distance is not None:
            far_grads = [torch.zeros(tensor.shape, dtype=wide) for tensor in (query, key)]
            near = dataclasses.replace(layout, window=distance)
            bias = _everything(query.shape[1])
            grads = [*merged_backward(out_grad, query, key, value, out, lse, bias, near, scale)]
        for part in parts:
            q, k, v = _of(part, query, key, value, far_query, far_key, group)
            o, g, rows_lse = out[:, :, part.rows].to(q.dtype), out_grad[:, :, part.rows], lse[:, :, part.rows]
            dq, dk, dv = _flash_backward(
                g, q, k, v, o.contiguous(), rows_lse.contiguous(), 0.0, part.causal, scale=scale
            )
            to_query, to_key = far_grads if part.far else grads[:2]
            to_query[:, :, part.rows] += dq
            to_key[:, :, part.keys] += dk.to(wide).unflatten(1, (-1, group)).sum(2)
            grads[2][:, :, part.keys] += dv.to(wide).unflatten(1, (-1, group)).sum(2)
        return tuple(grad.to(query.dtype) for grad in (*grads, *far_grads) if grad is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Refused."""
        raise ValueError(SECOND)


def _of(
    part: _Part,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far_query: torch.Tensor | None,
    far_key: torch.Tensor | None,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a part, every query head with keys of its own."""
    q, k = (far_query, far_key) if part.far else (query, key)
    assert q is not None
    assert k is not None
    k, v = (tensor[:, :, part.keys].repeat_interleave(group, dim=1) for tensor in (k, value))
    return q[:, :, part.rows], k, v


def _merge(
    merged: tuple[torch.Tensor, torch.Tensor] | None, rows: slice, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a part's rows to what was merged before; the tensors of the first are written to."""
    if merged is None:
        return out.clone(), lse.clone()
    whole_out, whole_lse = merged[0][:, :, rows], merged[1][:, :, rows]
    total = torch.logaddexp(whole_lse, lse)
    new = whole_out * (whole_lse - total).exp()[..., None] + out * (lse - total).exp()[..., None]
    merged[0][:, :, rows], merged[1][:, :, rows] = new, total
    return merged
