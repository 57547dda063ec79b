"""Where the tokens of a batch stand, in the form that the CPU kernel walks: compact, sorted, cut into items.

Masked tokens are left out and the rest numbered along the row ("compact index"), so that the keys a query
sees are one interval of compact indices. No attention here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numba import njit

from hf_poslsh.hashing import first_in_bin, last_in_bin
from hf_poslsh.ops.bias import UNLIMITED, Layout, PositionBias


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Existing tokens of each row, by compact index; all int64. Rows are B, or 1 where all rows agree.

    Args:
        query_slot: ``(rows, Q)`` index of each query in the tensors.
        query_position: ``(rows, Q)``.
        query_keys: ``(rows, Q, 2)`` compact interval of the keys of the query's segment.
        query_count: ``(rows,)`` queries that exist.
        key_slot: ``(rows, K)``.
        key_position: ``(rows, K)``.
        key_count: ``(rows,)``.
    """

    query_slot: np.ndarray
    query_position: np.ndarray
    query_keys: np.ndarray
    query_count: np.ndarray
    key_slot: np.ndarray
    key_position: np.ndarray
    key_count: np.ndarray


def compact_tokens(layout: Layout) -> Tokens:
    """Leaves out tokens with a negative position and finds the keys of every query's segment.

    Raises:
        ValueError: positions do not rise within a document, or segments fall along a row.
    """
    pairs = (
        (layout.query_positions, layout.query_segments),
        (layout.key_positions, layout.key_segments),
    )
    rows = max(tensor.shape[0] for pair in pairs for tensor in pair if tensor is not None)
    arrays = []
    for positions, segments in pairs:
        position = np.ascontiguousarray(np.broadcast_to(positions.cpu().numpy(), (rows, positions.shape[1])))
        segment = np.zeros_like(position) if segments is None else segments.cpu().numpy()
        segment = np.ascontiguousarray(np.broadcast_to(segment, position.shape))
        arrays.append(_compact(position, segment))
    query_slot, query_position, query_segment, query_count, query_bad = arrays[0]
    key_slot, key_position, key_segment, key_count, key_bad = arrays[1]
    for name, bad in (("query", query_bad), ("key", key_bad)):
        if bad >= 0:
            raise ValueError(
                f"{name}_positions do not rise within a document, or {name}_segments fall along it, in row {bad}. "
                "The banded pass needs tokens in order; impl='reference' takes any order."
            )
    query_keys = _segment_keys(query_segment, query_count, key_segment, key_count)
    return Tokens(query_slot, query_position, query_keys, query_count, key_slot, key_position, key_count)


def blocks_seen(query: torch.Tensor, key: torch.Tensor, bias: PositionBias, layout: Layout, size: int) -> np.ndarray:
    """Key slots that every block of ``size`` query slots may see, see ``seen_slots``.

    Args:
        query: ``(B, H, Q, D)``, for its shape.
        key: ``(B, H_kv, K, D)``, for its shape.
        bias: the positional bias of all H heads.
        layout: on any device.
        size: query slots of a block.

    Returns:
        int64 ``(B, H, blocks, 4)``.
    """
    t = compact_tokens(layout)
    return seen_slots(
        query.shape[0], query.shape[1], query.shape[2], size, t.query_slot, t.query_position, t.query_keys,
        t.query_count, t.key_slot, t.key_position, bias.hashes.widths, bias.hashes.shifts, bias.reach,
        layout.is_causal, unlimited(layout.window), unlimited(layout.chunk), bias.sink_tokens,
    )  # fmt: skip


def unlimited(number: int | None) -> int:
    """A window or chunk as the compiled code takes it."""
    return UNLIMITED if number is None else number


@njit(nogil=True, cache=True)
def _compact(positions, segments):
    rows, length = positions.shape
    slots = np.empty((rows, length), np.int64)
    compact_positions, compact_segments = np.empty_like(slots), np.empty_like(slots)
    counts = np.zeros(rows, np.int64)
    bad = -1
    for row in range(rows):
        count = 0
        for slot in range(length):
            position, segment = positions[row, slot], segments[row, slot]
            if position < 0:
                continue
            if count:
                before = compact_segments[row, count - 1]
                if segment < before or (segment == before and position <= compact_positions[row, count - 1]):
                    bad = row
            slots[row, count] = slot
            compact_positions[row, count] = position
            compact_segments[row, count] = segment
            count += 1
        counts[row] = count
    return slots, compact_positions, compact_segments, counts, bad


@njit(nogil=True, cache=True)
def _segment_keys(query_segments, query_counts, key_segments, key_counts):
    rows, queries = query_segments.shape
    intervals = np.zeros((rows, queries, 2), np.int64)
    for row in range(rows):
        start = end = 0
        for i in range(query_counts[row]):
            segment = query_segments[row, i]
            while start < key_counts[row] and key_segments[row, start] < segment:
                start += 1
            end = max(end, start)
            while end < key_counts[row] and key_segments[row, end] == segment:
                end += 1
            intervals[row, i, 0] = start
            intervals[row, i, 1] = end
    return intervals


@njit(nogil=True, cache=True)
def first_key(key_positions, start, end, position):
    """First compact index in [start, end) of a key at ``position`` or later; ``end`` if there is none."""
    if start >= end or position <= key_positions[start]:
        return start
    ahead = position - key_positions[start]
    if key_positions[end - 1] - key_positions[start] == end - 1 - start:  # no holes, since positions rise
        return start + min(ahead, end - start)
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        if key_positions[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def host_interval(position, window, chunk):
    """First and last key position that the host's own window and chunk let a query see."""
    first = max(np.int64(0), position - window + 1)
    last = position + window - 1
    if chunk < UNLIMITED:
        first = max(first, position // chunk * chunk)
        last = min(last, position // chunk * chunk + chunk - 1)
    return first, last


@njit(nogil=True, cache=True)
def _first_seen(position, start, end, key_positions, widths, shifts, reach, window, chunk):
    seen = position
    for r in range(widths.size):
        seen = min(seen, first_in_bin(position, widths[r], shifts[r]))
    seen = max(seen, max(position - reach + 1, host_interval(position, window, chunk)[0]))
    return first_key(key_positions, start, end, seen)


@njit(nogil=True, cache=True)
def last_seen(position, start, end, key_positions, widths, shifts, reach, causal, window, chunk):
    """One past the compact index of the last key that a query sees."""
    seen = position
    if not causal:
        for r in range(widths.size):
            seen = max(seen, last_in_bin(position, widths[r], shifts[r]))
        seen = min(seen, min(position + reach - 1, host_interval(position, window, chunk)[1]))
    return first_key(key_positions, start, end, seen + 1)


@njit(nogil=True, cache=True)
def cut_items(
    batch, kv_heads, length, query_positions, query_keys, query_counts, key_positions,
    widths, shifts, reach, causal, window, chunk,
):  # fmt: skip
    """Work items ``(row, KV head, first query, end of queries, first key, end of keys)``, int64, in compact indices.

    Every query of an item, in every head of the KV head's group, sees keys of [first key, end of keys) only,
    sinks aside.
    """
    rows = query_counts.size
    group = widths.shape[0] // kv_heads
    total = 0
    for b in range(batch):
        total += (query_counts[b % rows] + length - 1) // length * kv_heads
    items = np.empty((total, 6), np.int64)
    n = 0
    for b in range(batch):
        row = b % rows
        for g in range(kv_heads):
            for start in range(0, query_counts[row], length):
                end = min(start + length, query_counts[row])
                low, high = query_keys[row, start], query_keys[row, end - 1]
                first, stop = low[1], np.int64(0)
                for h in range(g * group, (g + 1) * group):
                    first = min(first, _first_seen(
                        query_positions[row, start], low[0], low[1], key_positions[row],
                        widths[h], shifts[h], reach[h], window, chunk,
                    ))  # fmt: skip
                    stop = max(stop, last_seen(
                        query_positions[row, end - 1], high[0], high[1], key_positions[row],
                        widths[h], shifts[h], reach[h], causal, window, chunk,
                    ))  # fmt: skip
                items[n, 0], items[n, 1], items[n, 2] = b, g, start
                items[n, 3], items[n, 4], items[n, 5] = end, first, max(first, stop)
                n += 1
    return items


@njit(nogil=True, cache=True)
def seen_slots(
    batch, heads, length, size, query_slots, query_positions, query_keys, query_counts, key_slots, key_positions,
    widths, shifts, reach, causal, window, chunk, sink_tokens,
):  # fmt: skip
    """Key slots that blocks of ``size`` query slots may see: int64 ``(batch, heads, blocks, 4)``.

    The four numbers are two intervals of slots: sinks that lie before the window (empty where there are none),
    and the window. Both are empty where a block has no query that exists.
    """
    rows = query_counts.size
    blocks = (length + size - 1) // size
    seen = np.zeros((batch, heads, blocks, 4), np.int64)
    for b in range(batch):
        row = b % rows
        first_query = 0
        for block in range(blocks):
            end_query = first_query
            while end_query < query_counts[row] and query_slots[row, end_query] < (block + 1) * size:
                end_query += 1
            if end_query > first_query:
                first, last = query_keys[row, first_query], query_keys[row, end_query - 1]
                for h in range(heads):
                    low = _first_seen(
                        query_positions[row, first_query], first[0], first[1], key_positions[row],
                        widths[h], shifts[h], reach[h], window, chunk,
                    )  # fmt: skip
                    high = last_seen(
                        query_positions[row, end_query - 1], last[0], last[1], key_positions[row],
                        widths[h], shifts[h], reach[h], causal, window, chunk,
                    )  # fmt: skip
                    # Only the first query's document can begin before the window.
                    sinks = first_key(key_positions[row], first[0], first[1], sink_tokens)
                    if min(sinks, low) > first[0]:
                        seen[b, h, block, 0] = key_slots[row, first[0]]
                        seen[b, h, block, 1] = key_slots[row, min(sinks, low) - 1] + 1
                    if high > low:
                        seen[b, h, block, 2] = key_slots[row, low]
                        seen[b, h, block, 3] = key_slots[row, high - 1] + 1
            first_query = end_query
    return seen
