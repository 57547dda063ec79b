"""All s masks in one banded pass: the autograd operator around the compiled CPU kernel.

It saves q, k, v, the output and the log-sum-exp only; everything else is computed again in the backward pass.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hf_poslsh.ops._backward import backward
from hf_poslsh.ops._forward import forward
from hf_poslsh.ops._scratch import Rules, Tables, make_columns, make_scratch, row_stride
from hf_poslsh.ops._tokens import Tokens, compact_tokens, cut_items, unlimited
from hf_poslsh.ops._transforms import SECOND, transformable, transforms_active
from hf_poslsh.ops.bias import UNLIMITED, Layout, PositionBias
from hf_poslsh.ops.rectangles import rectangles_attention
from hf_poslsh.ops.rotary import Turns

_ITEM_QUERIES = 1024  # queries of one work item: long enough to pay for packing the keys before them
_PAIRS_OF_A_THREAD = 2**18  # fewer pairs of tokens (as in decoding) are not worth waking a second thread


def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled estimator in one pass over each query's window.

    For a causal query only the left bin edges matter: ``s M~_ij = #{r : left_r(i) <= j}``, so all hashes are one
    softmax over a contiguous run of keys with a count for each (derived here). Time and memory are linear in the
    number of tokens.

    Args:
        query: ``(B, H, Q, D)``; the compiled kernel serves the CPU, plain torch every other device.
        key: ``(B, H_kv, K, D)``.
        value: ``(B, H_kv, K, D)``.
        bias: the positional bias of all H heads.
        layout: positions, segments and the host's mask.
        scale: factor of the scores.
        turns: how queries and sinks are turned that are too far apart; None: true rotary distances.

    Returns:
        Output ``(B, H, Q, D)`` in the dtype of ``query`` and the log-sum-exp ``(B, H, Q)`` in float32 (float64
        for float64 input). Both carry gradients to query, key and value.
    """
    if query.device.type != "cpu":
        return rectangles_attention(query, key, value, bias, layout, scale, turns)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    operator = _Transformable.apply if transforms_active() else _banded
    out, lse = operator(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        *bias.tensors,
        layout.query_positions,
        layout.key_positions,
        layout.query_segments,
        layout.key_segments,
        None if turns is None else turns.queries.to(dtype),
        None if turns is None else turns.sinks.to(dtype),
        bias.sink_tokens,
        layout.is_causal,
        unlimited(layout.window),
        unlimited(layout.chunk),
        scale,
        UNLIMITED if turns is None else turns.max_distance,
        turns is not None and turns.interleaved,
    )
    return out.to(query.dtype), lse


def merged_backward(
    out_grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value through a pass on the CPU that is a part of an attention over more keys.

    Args:
        out_grad: ``(B, H, Q, D)``.
        query: as in ``banded_attention``, like the others that are not named here.
        key: see there.
        value: see there.
        out: ``(B, H, Q, D)``, of the whole attention.
        lse: ``(B, H, Q)``, of the whole attention.
        bias: of the part.
        layout: of the part.
        scale: see there.

    Returns:
        In the dtype of ``lse``.
    """
    wide = [tensor.to(lse.dtype) for tensor in (query, key, value)]
    tables = (*bias.tensors, layout.query_positions, layout.key_positions, layout.query_segments, layout.key_segments)
    numbers = (bias.sink_tokens, layout.is_causal, unlimited(layout.window), unlimited(layout.chunk), scale)
    return _banded_backward(
        out_grad.to(lse.dtype), None, *wide, out.to(lse.dtype), lse, *tables, None, None, *numbers, UNLIMITED, False
    )


@torch.library.custom_op("hf_poslsh::banded", mutates_args=(), device_types="cpu")
def _banded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    widths: torch.Tensor,
    shifts: torch.Tensor,
    slopes: torch.Tensor,
    reach: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    query_segments: torch.Tensor | None,
    key_segments: torch.Tensor | None,
    query_turns: torch.Tensor | None,
    sink_turns: torch.Tensor | None,
    sink_tokens: int,
    is_causal: bool,
    window: int,
    chunk: int,
    scale: float,
    max_distance: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = compact_tokens(Layout(query_positions, key_positions, query_segments, key_segments))
    tables = (widths, shifts, slopes, reach)
    numbers = (sink_tokens, is_causal, window, chunk, scale)
    arguments = _Arguments(tokens, tables, numbers, query_turns, sink_turns, max_distance, interleaved)
    out = _empty_like(query)
    lse = query.new_empty(query.shape[:3])
    if (tokens.query_count < query.shape[2]).any():
        out.zero_()
        lse.fill_(-torch.inf)
    items = arguments.items(query, key)
    tensors = (query, key, value, out)
    arguments.run(forward, [items], query, key, tensors, (*map(_flat, tensors), lse.numpy().reshape(-1)))
    return out, lse


@_banded.register_fake
def _(query, key, value, *arguments):
    return torch.empty_like(query), query.new_empty(query.shape[:3])


@torch.library.custom_op("hf_poslsh::banded_backward", mutates_args=(), device_types="cpu")
def _banded_backward(
    out_grad: torch.Tensor,
    lse_grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    widths: torch.Tensor,
    shifts: torch.Tensor,
    slopes: torch.Tensor,
    reach: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    query_segments: torch.Tensor | None,
    key_segments: torch.Tensor | None,
    query_turns: torch.Tensor | None,
    sink_turns: torch.Tensor | None,
    sink_tokens: int,
    is_causal: bool,
    window: int,
    chunk: int,
    scale: float,
    max_distance: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = compact_tokens(Layout(query_positions, key_positions, query_segments, key_segments))
    tables = (widths, shifts, slopes, reach)
    numbers = (sink_tokens, is_causal, window, chunk, scale)
    arguments = _Arguments(tokens, tables, numbers, query_turns, sink_turns, max_distance, interleaved)
    query_grad = _empty_like(query)
    if (tokens.query_count < query.shape[2]).any():
        query_grad.zero_()
    key_grad, value_grad = _empty_like(key).zero_(), _empty_like(value).zero_()
    lse_grads = np.empty(0, lse.numpy().dtype) if lse_grad is None else lse_grad.contiguous().numpy().reshape(-1)
    tensors = (query, key, value, out, out_grad, query_grad, key_grad, value_grad)
    q, k, v, o, do, dq, dk, dv = map(_flat, tensors)
    phases = _disjoint(arguments.items(query, key), sinks=sink_tokens > 0)
    flat = (q, k, v, o, do, lse.numpy().reshape(-1), lse_grads, dq, dk, dv)
    arguments.run(backward, phases, query, key, tensors, flat)
    return query_grad, key_grad, value_grad


@_banded_backward.register_fake
def _(out_grad, lse_grad, query, key, value, *arguments):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx, inputs, output):
    query, key, value, *tables = inputs
    ctx.save_for_backward(query, key, value, *output, *tables[:10])
    ctx.numbers = tables[10:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, out_grad, lse_grad):
    query, key, value, out, lse, *tables = ctx.saved_tensors
    if out_grad is None:
        out_grad = torch.zeros_like(out)
    grads = _banded_backward(out_grad, lse_grad, query, key, value, out, lse, *tables, *ctx.numbers)
    return (*grads, *[None] * 17)


def _no_second_derivative(ctx, *grads):
    raise ValueError(SECOND)


_banded.register_autograd(_differentiate, setup_context=_save)
_banded_backward.register_autograd(_no_second_derivative)
_Transformable = transformable(_banded, _banded_backward, 10)


class _Arguments:
    """What forward and backward pass to the kernel alike."""

    def __init__(self, tokens: Tokens, tables, numbers, query_turns, sink_turns, max_distance, interleaved) -> None:
        self.tokens = tokens
        self.tables = [tensor.numpy() for tensor in tables]
        self.numbers = numbers  # sinks, causal, window, chunk, scale
        pairs = 0 if sink_turns is None else sink_turns.shape[-1]
        self.turning = (max_distance, pairs, 2 if interleaved else 1, 1 if interleaved else pairs)
        self.turns = None
        if pairs:
            self.turns = query_turns.contiguous().flatten(1).numpy(), sink_turns.contiguous().flatten().numpy()

    def items(self, query: torch.Tensor, key: torch.Tensor) -> np.ndarray:
        """Work items, those with most pairs of visible tokens first."""
        t, (widths, shifts, _, reach) = self.tokens, self.tables
        items = cut_items(
            query.shape[0], key.shape[1], _ITEM_QUERIES, t.query_position, t.query_keys, t.query_count,
            t.key_position, widths, shifts, reach, *self.numbers[1:4],
        )  # fmt: skip
        return items[np.argsort(items[:, 4] - items[:, 5], kind="stable")]

    def run(self, kernel, phases, query, key, tensors, flat) -> None:
        """Runs a kernel over the items of each phase, one phase after another, on torch's number of threads."""
        t, (sink_tokens, causal, window, chunk, scale) = self.tokens, self.numbers
        strides = np.array([[0, *tensor.stride()] for tensor in tensors], dtype=np.int64)
        keys = max((int((items[:, 5] - items[:, 4]).max()) for items in phases if len(items)), default=0)
        sinks = min(sink_tokens, key.shape[2])
        heads, depth, dtype = query.shape[1], query.shape[3], flat[0].dtype
        rules = Rules(
            heads, key.shape[1], query.shape[2], depth, row_stride(keys), row_stride(sinks), sink_tokens, causal,
            window, chunk, scale, *self.turning,
        )  # fmt: skip
        tokens = (t.query_slot, t.query_position, t.query_keys, t.key_slot, t.key_position)
        widths, shifts, slopes, reach = self.tables
        turns = (np.empty((1, 0), dtype), np.empty(0, dtype)) if self.turns is None else self.turns
        tables = Tables(widths, shifts, slopes, reach, *tokens, *turns)
        with_gradients = kernel is backward
        threads = min(torch.get_num_threads(), max(map(len, phases), default=0))
        pairs = sum(int(((items[:, 3] - items[:, 2]) * (items[:, 5] - items[:, 4])).sum()) for items in phases)
        if pairs * heads // key.shape[1] < _PAIRS_OF_A_THREAD:
            threads = min(threads, 1)
        scratch = [
            (
                make_scratch(depth, self.tables[0].shape[1], dtype),
                make_columns(keys, depth, dtype, with_gradients),
                make_columns(sinks, depth, dtype, with_gradients),
                make_columns(sinks if self.turns else 0, depth, dtype, with_gradients),
            )
            for _ in range(threads)
        ]
        for items in phases:
            queue = np.zeros(1, np.int64)
            call = functools.partial(kernel, queue, items, strides, *flat, rules, tables)
            one = dtype.type(1)
            others = [_pool(os.getpid()).submit(call, *scratch[i], one) for i in range(1, min(threads, len(items)))]
            if len(items):
                call(*scratch[0], one)
            for other in others:
                other.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="hf_poslsh")


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like`` in NumPy's memory: NumPy asks for huge pages, where torch's page faults cost a tenth."""
    memory = torch.from_numpy(np.empty(tensor.numel(), dtype=_flat(tensor).dtype))
    return memory.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """All elements that a tensor's strides reach, as a one-dimensional view from its first element on."""
    if tensor.numel() == 0:
        return np.empty(0, tensor.detach().numpy().dtype)
    reached = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((reached,), (1,), tensor.storage_offset()).numpy()


def _disjoint(items: np.ndarray, sinks: bool) -> list[np.ndarray]:
    """Groups of items such that no two of a group add to the same keys; the groups do not depend on threads.

    The keys of a KV head's items are intervals whose two ends never fall: the first group whose last interval
    ends before the next one starts takes it. With sinks every item also adds to the start of its document.
    """
    groups: list[list[np.ndarray]] = []
    ends: list[dict[tuple[int, int], int]] = []
    for item in items[np.lexsort((items[:, 2], items[:, 1], items[:, 0]))]:
        owner, first, last = (item[0], item[1]), 0 if sinks else item[4], item[5]
        group = next((g for g in range(len(groups)) if ends[g].get(owner, 0) <= first), len(groups))
        if sinks and group < len(groups) and owner in ends[group]:
            group = next((g for g in range(len(groups)) if owner not in ends[g]), len(groups))
        if group == len(groups):
            groups.append([])
            ends.append({})
        groups[group].append(item)
        ends[group][owner] = last
    ordered = [np.stack(group) for group in groups]
    return [group[np.argsort(group[:, 4] - group[:, 5], kind="stable")] for group in ordered]
