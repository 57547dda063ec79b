"""The documented meaning of Positional LSH attention, its argument checks, and the choice of implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_poslsh.hashing import PositionalHash
from hf_poslsh.ops.banded import banded_attention
from hf_poslsh.ops.bias import UNLIMITED, Layout, PositionBias
from hf_poslsh.ops.blocks import blocks_attention
from hf_poslsh.ops.flex import flex_pass
from hf_poslsh.ops.reference import reference_attention
from hf_poslsh.ops.rotary import Rotary, Turns, make_turns
from hf_poslsh.slopes import resolve_sigma

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def positional_lsh_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hashes: PositionalHash,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    estimator: str = "pooled",
    sink_tokens: int = 0,
    max_distance: int | None = None,
    rotary: Rotary | None = None,
    impl: str = "auto",
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    query_segments: torch.Tensor | None = None,
    key_segments: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention whose pairs are weighted by the mean of s random block masks.

    ``out_i = sum_j M~_ij e^{s_ij} v_j / sum_j M~_ij e^{s_ij}`` with ``s_ij = scale * q_i . k_j`` and M~ the mean
    mask of ``hashes`` (the pooled estimator of Wolfson and Wagner 2026, which converges to ALiBi as s grows).

    Args:
        query: ``(B, H, Q, D)``; float32, bfloat16, float16 or float64. Softmax is in float32 or better.
        key: ``(B, H_kv, K, D)`` with H a multiple of H_kv; query head h uses KV head ``h // (H / H_kv)``.
        value: ``(B, H_kv, K, D)``.
        hashes: one row of hashes per query head.
        is_causal: hide keys at later positions than the query.
        scale: factor of the scores; 1 / sqrt(D) if None.
        estimator: ``"pooled"``, or ``"mean"``: the average of s separately normalised block softmaxes.
        sink_tokens: positions below this keep weight 1 for all later queries of their document.
        max_distance: the rotary distance of a query and a sink is min(i - j, max_distance), at least 1; their score
            is then ``scale * R(max_distance - i) q_i . R(-j) k_j`` where i - j is larger. None: as they come.
        rotary: with ``max_distance``: the rotary embedding that query and key were rotated by, each by its position
            (or by its position and one number that a document's tokens share).
        impl: ``"reference"`` (dense float64 oracle), ``"banded"`` (all masks in one pass, memory linear in n),
            ``"flex"`` (the same by torch's FlexAttention, compiled), ``"blocks"`` (the paper's s passes, merged) or
            ``"auto"`` (by device and estimator, see ``choose_impl``).
        query_positions: integer ``(Q,)`` or ``(B, Q)``; negative marks a padded query, whose output is 0. By
            default the queries are the last Q of the K tokens.
        key_positions: integer ``(K,)`` or ``(B, K)``; negative marks a masked key, which contributes exactly
            nothing, even if it holds NaN. Default: 0 .. K-1. Positions of a document rise along a row.
        query_segments: integer ``(Q,)`` or ``(B, Q)``: document of each query. Nothing crosses documents.
        key_segments: integer ``(K,)`` or ``(B, K)``, not falling along a row.
        window: the host model's own sliding window: keys this many positions away, or more, are hidden.
        chunk: the host model's own attention chunk: keys of another chunk of this many positions are hidden.
        return_lse: also return the log-sum-exp of every row.

    Returns:
        Output ``(B, H, Q, D)`` in the dtype of ``query``; 0 for a row without a visible key. With ``return_lse``
        also the log of ``sum_j M~_ij e^{s_ij}``, float32 (float64 for float64 input) ``(B, H, Q)``, -inf for a
        row without a visible key.

    Raises:
        ValueError: an argument does not fit the others; the message names it.
    """
    if not isinstance(hashes, PositionalHash):
        raise ValueError(f"hashes is a {type(hashes).__name__}; make one by PositionalHash.sample(...).")
    layout = make_layout(
        query, key, is_causal, query_positions, key_positions, query_segments, key_segments, window, chunk
    )
    bias = PositionBias.from_hashes(hashes, sink_tokens)
    turns = _turns(query, layout, sink_tokens, max_distance, rotary)
    out, lse = biased_attention(query, key, value, bias, layout, scale, estimator, impl, return_lse, turns)
    return out if lse is None else (out, lse)


def alibi_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sigma: np.ndarray | Sequence[float],
    *,
    is_causal: bool = True,
    scale: float | None = None,
    tolerance: float = 1e-6,
    max_score: float | np.ndarray | None = None,
    sink_tokens: int = 0,
    max_distance: int | None = None,
    rotary: Rotary | None = None,
    impl: str = "auto",
    return_lse: bool = False,
    **layout: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact ALiBi, ``L_ij = e^{-|i-j|/sigma}`` in place of M~, cut where what lies beyond is certified to be small.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, K, D)``.
        value: ``(B, H_kv, K, D)``.
        sigma: length scale in positions, one per query head.
        is_causal: hide keys at later positions than the query.
        scale: factor of the scores; 1 / sqrt(D) if None.
        tolerance: the largest share of a row's weight that the cut may drop, see ``certified_reach``.
        max_score: bound on ``|s_ij|``, one number or one per head, where known; else measured from the norms.
        sink_tokens: positions below this keep weight 1.
        max_distance: as for ``positional_lsh_attention``, like ``rotary``.
        rotary: see there.
        impl: as for ``positional_lsh_attention``; ``"reference"`` does not cut.
        return_lse: also return the log-sum-exp.
        layout: positions, segments, window and chunk, as for ``positional_lsh_attention``.

    Returns:
        As ``positional_lsh_attention``.

    Raises:
        ValueError: an argument does not fit the others; the message names it.
    """
    bias = PositionBias.alibi(resolve_sigma(tuple(sigma), query.shape[1]), tolerance, sink_tokens)
    tokens = make_layout(query, key, is_causal, **layout)
    if max_score is not None:
        scores = np.broadcast_to(np.asarray(max_score, dtype=np.float64), (bias.num_heads,))
        bias = bias.cut(certified_reach(bias.slopes, scores, key.shape[2], tolerance))
    turns = _turns(query, tokens, sink_tokens, max_distance, rotary)
    out, lse = biased_attention(query, key, value, bias, tokens, scale, "pooled", impl, return_lse, turns)
    return out if lse is None else (out, lse)


def _turns(
    query: torch.Tensor, layout: Layout, sink_tokens: int, max_distance: int | None, rotary: Rotary | None
) -> Turns | None:
    if max_distance is None and rotary is None:
        return None
    if max_distance is None or rotary is None:
        raise ValueError("max_distance and rotary go together; give both.")
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or not 1 <= max_distance < UNLIMITED:
        raise ValueError(f"max_distance is {max_distance!r}; it must be an integer of at least 1, or None.")
    if not sink_tokens:
        raise ValueError(f"max_distance={max_distance} bounds the distance of sinks, and sink_tokens is 0; set that.")
    frequencies = rotary.frequencies
    if (
        frequencies.ndim != 1
        or not frequencies.is_floating_point()
        or not 0 < 2 * len(frequencies) <= query.shape[-1]
    ):
        raise ValueError(
            f"rotary.frequencies is {frequencies.dtype} of shape {tuple(frequencies.shape)}; it must be floating "
            f"point and have one element per pair of dimensions, from 1 to {query.shape[-1] // 2}."
        )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return make_turns(rotary, layout.query_positions, max_distance, sink_tokens, dtype)


def certified_reach(slopes: np.ndarray, max_score: np.ndarray, keys: int, tolerance: float) -> np.ndarray:
    """Distance from which on all keys of an ALiBi row together carry at most ``tolerance`` of its weight.

    Derivation: with ``|s_ij| <= U`` a row weighs at least ``e^{-U}`` (its own key, at distance 0), and the keys at
    distance d or more at most ``2 e^U min(keys, 1 / (1 - e^{-1/sigma})) e^{-d/sigma}`` (both sides, a geometric
    series). Their ratio is at most the tolerance for ``d >= sigma (2 U + log(...) + log(2 / tolerance))``.

    Args:
        slopes: 1 / sigma of every head.
        max_score: U of every head.
        keys: number of keys.
        tolerance: between 0 and 1.

    Returns:
        int64 ``(heads,)``, ``UNLIMITED`` where U is not finite.
    """
    terms = np.minimum(keys, -1 / np.expm1(-slopes))
    reach = np.ceil((2 * max_score + np.log(np.maximum(terms, 1.0)) + math.log(2 / tolerance)) / slopes)
    return np.where(np.isfinite(reach) & (reach < UNLIMITED), reach, UNLIMITED).astype(np.int64)


def _measured_score(query: torch.Tensor, key: torch.Tensor, layout: Layout, scale: float) -> np.ndarray:
    """Bound on ``|s_ij|`` of every head by Cauchy and Schwarz: the product of the largest norms."""

    def largest(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(tensor.detach(), dim=-1, dtype=torch.float64)
        return torch.where((positions >= 0)[:, None], norms, 0.0).amax((0, 2))

    group = query.shape[1] // key.shape[1]
    keys = largest(key, layout.key_positions).repeat_interleave(group)
    return (abs(scale) * largest(query, layout.query_positions) * keys).cpu().numpy()


def biased_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: PositionBias,
    layout: Layout,
    scale: float | None = None,
    estimator: str = "pooled",
    impl: str = "auto",
    with_lse: bool = False,
    turns: Turns | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention under any ``PositionBias``: checks the arguments and calls the implementation.

    Shapes, results and errors are those of ``positional_lsh_attention``; ``turns`` (from ``make_turns``) says how
    queries and sinks are turned that are too far apart. Returns the output, and the log-sum-exp if ``with_lse``, else
    None.
    """
    _check_tensors(query, key, value, bias)
    _check_layout(query, key, layout)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if estimator not in ("pooled", "mean"):
        raise ValueError(f"estimator is {estimator!r}; choose pooled or mean.")
    impl = choose_impl(impl, estimator, query.device.type, query.dtype)
    lse: torch.Tensor | None
    if impl == "reference":
        out, lse = reference_attention(query, key, value, bias, layout, scale, estimator, turns)
    else:
        if bias.tolerance is not None and query.numel() and key.numel():
            score = _measured_score(query, key, layout, scale)
            bias = bias.cut(certified_reach(bias.slopes, score, key.shape[2], bias.tolerance))
        if impl == "blocks":
            out, lse = blocks_attention(query, key, value, bias, layout, scale, estimator, turns)
        elif impl == "flex":
            out, lse = flex_pass(query, key, value, bias, layout, scale, with_lse, turns)
        else:
            out, lse = banded_attention(query, key, value, bias, layout, scale, turns)
    if not with_lse or lse is None:
        return out, None
    return out, lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def choose_impl(impl: str, estimator: str, device: str, dtype: torch.dtype) -> str:
    """The implementation that serves a call; ``"auto"`` is decided here and nowhere else.

    On the CPU ``banded``; on CUDA ``flex``, but ``banded`` in float64, which FlexAttention does not take; elsewhere
    ``banded``. The ``"mean"`` estimator needs the s passes of ``blocks``.
    """
    known = ("auto", "reference", "banded", "blocks", "flex")
    if impl not in known:
        raise ValueError(f"impl is {impl!r}; choose one of {', '.join(known)}.")
    if estimator == "mean" and impl in ("banded", "flex"):
        raise ValueError(f"impl={impl!r} pools all masks in one pass; estimator='mean' needs impl='blocks'.")
    if impl == "auto":
        if estimator == "mean":
            return "blocks"
        return "flex" if device == "cuda" and dtype != torch.float64 else "banded"
    return impl


def make_layout(
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool = True,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    query_segments: torch.Tensor | None = None,
    key_segments: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Layout:
    """Positions and segments as ``(B or 1, length)`` int64 tensors, with the documented defaults filled in."""
    queries, keys = query.shape[-2], key.shape[-2]
    if key_positions is None:
        key_positions = torch.arange(keys, device=key.device)
    if query_positions is None:
        if queries > keys:
            raise ValueError(
                f"there are {queries} queries but {keys} keys; by default the queries are the last of the keys. "
                "Pass query_positions and key_positions."
            )
        if key_positions.shape[-1] != keys:
            raise ValueError(f"key_positions has shape {tuple(key_positions.shape)} for {keys} keys.")
        query_positions = key_positions[..., keys - queries :]
    if key_segments is None and query_segments is not None:
        raise ValueError("query_segments and key_segments go together; give both.")
    if key_segments is not None and query_segments is None:
        if queries > keys:
            raise ValueError("query_segments and key_segments go together; give both.")
        query_segments = key_segments[..., keys - queries :]
    return Layout(
        _as_rows("query_positions", query_positions, query.shape[0], queries),
        _as_rows("key_positions", key_positions, query.shape[0], keys),
        None if query_segments is None else _as_rows("query_segments", query_segments, query.shape[0], queries),
        None if key_segments is None else _as_rows("key_segments", key_segments, query.shape[0], keys),
        is_causal,
        window,
        chunk,
    )


def _as_rows(name: str, tensor: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name} is a {kind}; it must be an integer tensor.")
    rows = tensor[None] if tensor.ndim == 1 else tensor
    if rows.ndim != 2 or rows.shape[1] != length or (rows.shape[0] != 1 and rows.shape[0] != batch):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({length},) or ({batch}, {length}).")
    return rows.to(torch.int64)


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: PositionBias) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(f"query, key and value must be (batch, heads, length, head dim); got {shapes}.")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"shapes do not fit: {shapes}; key and value must be (B, H_kv, K, D) for query (B, H, Q, D)."
        )
    if key.shape[1] == 0 or query.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads do not divide over {key.shape[1]} KV heads: {shapes}.")
    if query.shape[3] == 0:
        raise ValueError(f"the head dim is 0: {shapes}.")
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; they must share one of "
            f"{', '.join(str(dtype) for dtype in _DTYPES)}."
        )
    if key.device != query.device or value.device != query.device:
        raise ValueError(f"query, key and value are on {query.device}, {key.device}, {value.device}; use one device.")
    if bias.num_heads != query.shape[1]:
        raise ValueError(
            f"the hashes are for {bias.num_heads} heads but query has {query.shape[1]}; slopes and draws belong to "
            "global query heads. Under tensor parallelism take the rows of the local heads."
        )
    if (
        isinstance(bias.sink_tokens, bool)
        or not isinstance(bias.sink_tokens, (int, np.integer))
        or bias.sink_tokens < 0
    ):
        raise ValueError(f"sink_tokens is {bias.sink_tokens!r}; it must be an integer of at least 0.")


def _check_layout(query: torch.Tensor, key: torch.Tensor, layout: Layout) -> None:
    for name, rows, length in (
        ("query_positions", layout.query_positions, query.shape[2]),
        ("key_positions", layout.key_positions, key.shape[2]),
        ("query_segments", layout.query_segments, query.shape[2]),
        ("key_segments", layout.key_segments, key.shape[2]),
    ):
        if rows is None:
            continue
        # `not in (1, batch)` would not work where torch.compile takes the batch size as a symbol.
        if rows.shape[-1] != length or (rows.shape[0] != 1 and rows.shape[0] != query.shape[0]):
            raise ValueError(f"{name} has shape {tuple(rows.shape)} for {length} tokens in {query.shape[0]} rows.")
    for name, number in (("window", layout.window), ("chunk", layout.chunk)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; it must be an integer of at least 1, or None.")
