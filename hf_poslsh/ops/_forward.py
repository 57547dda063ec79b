"""The banded pass on the CPU, forward: compiled loops, one call a thread.

A thread takes items (a row of the batch, a KV head, a run of queries) from a shared counter, packs the keys
that the item sees, and walks its queries in strips of ``STRIP`` rows. For every head it keeps ``count``, the
number of hashes under which each packed key shares the current query's bin: a hash touches it only when the
query enters a new bin, which costs about s additions a query however wide the bins are. Scores, their softmax
and the products run on the strip's own interval of keys; nothing of size n x n, or of size n x s, exists.

Scores are kept in units of log 2 (the queries are scaled by log2 e), so that exponentials are powers of two.
"""

from __future__ import annotations

import math

import numpy as np

from hf_poslsh.ops._rows import (
    clear,
    consecutive,
    copy,
    end_groups,
    enter_bins,
    gather,
    leave_bins,
    pack_panels,
    pack_rows,
    pad,
    score,
    strip_end,
    subtract_slope,
    turn_panels,
    turn_row,
    unpack_row,
    visible,
    visible_sinks,
)
from hf_poslsh.ops._scratch import jit, lend, lend_columns, round_up
from hf_poslsh.ops._simd import BLOCK, ROWS, address, fetch_add, largest, unowned, weigh
from hf_poslsh.ops._tokens import first_key

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@jit
def forward(queue, items, strides, query, key, value, out, lse, rules, tables, scratch, band, sink, far, one):
    """Takes items from ``queue`` and writes their rows of ``out`` and ``lse``.

    Tensors are flat views of their storage; ``strides`` is int64 ``(4, 5)``: offset and strides (batch, head,
    token, dim) of query, key, value and out. ``band``, ``sink`` and ``far`` are ``Columns``; ``one`` has the type.
    """
    tables, scratch = lend(tables, scratch)
    band, sink, far = lend_columns(band), lend_columns(sink), lend_columns(far)
    query, key, value, out, lse = unowned(query), unowned(key), unowned(value), unowned(out), unowned(lse)
    items, strides = unowned(items), unowned(strides)
    depth, width, stride = rules.depth, round_up(rules.depth, BLOCK), rules.stride
    causal, window, chunk = rules.causal, rules.window, rules.chunk
    strip, result, bins, seen = scratch.strip, scratch.result, scratch.bins, scratch.seen
    count, scores, starts, ends = band.counts, band.weights, band.starts, band.ends
    rows, samples = tables.query_slot.shape[0], tables.widths.shape[1]
    group_size = rules.heads // rules.kv_heads
    kind = query.dtype
    factor = kind.type(rules.scale * LOG2E)
    limit, turn_size = rules.max_distance, 2 * rules.pairs
    sink.counts[:] = samples
    sink.starts[:] = 0

    while True:
        item = fetch_add(queue.ctypes.data, 1)
        if item >= items.shape[0]:
            break
        b, g, item_start, item_end = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        base, key_end = items[item, 4], items[item, 5]
        positions, documents = tables.query_position[b % rows], tables.query_keys[b % rows]
        slots, key_slots = tables.query_slot[b % rows], tables.key_slot[b % rows]
        key_positions = tables.key_position[b % rows]
        query_turns = tables.query_turns[b % tables.query_turns.shape[0]]
        k_at = strides[1, 0] + b * strides[1, 1] + g * strides[1, 2]
        v_at = strides[2, 0] + b * strides[2, 1] + g * strides[2, 2]
        pack_panels(key, k_at, strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, band.panels)
        # Values that lie in whole rows already are read where they are.
        in_place = strides[2, 4] == 1 and depth == width and consecutive(key_slots, base, key_end)
        values, values_at, value_stride = band.rows, np.int64(0), width
        if in_place:
            values, value_stride = value, strides[2, 3]
            if key_end > base:
                values_at = v_at + key_slots[base] * value_stride
        else:
            pack_rows(
                value, v_at, strides[2, 3], strides[2, 4], key_slots, base, key_end, depth, one, band.rows, width
            )  # fmt: skip
        for h in range(g * group_size, (g + 1) * group_size):
            widths, shifts, reach = tables.widths[h], tables.shifts[h], tables.reach[h]
            slope = kind.type(tables.slopes[h] * LOG2E)
            count[:] = 0
            bins[:2] = 0
            q_at = strides[0, 0] + b * strides[0, 1] + h * strides[0, 2]
            out_at = strides[3, 0] + b * strides[3, 1] + h * strides[3, 2]
            document, end, sinks = np.int64(-1), np.int64(-1), np.int64(0)
            start = item_start
            while start < item_end:
                stop = strip_end(start, item_end, documents)
                used = (stop - start + ROWS - 1) // ROWS
                if documents[start, 0] != document or documents[start, 1] != end:
                    document, end = documents[start, 0], documents[start, 1]
                    leave_bins(bins, seen)
                    if rules.sink_tokens:
                        sinks = first_key(key_positions, document, end, rules.sink_tokens) - document
                        sink.ends[:] = sinks
                        pack_panels(
                            key, k_at, strides[1, 3], strides[1, 4], key_slots, document, document + sinks, depth,
                            sink.panels,
                        )  # fmt: skip
                        pack_rows(
                            value, v_at, strides[2, 3], strides[2, 4], key_slots, document, document + sinks, depth,
                            one, sink.rows, width,
                        )  # fmt: skip
                        if turn_size:
                            turn_panels(
                                sink.panels, key_positions, document, document + sinks, tables.sink_turns, rules,
                                far.panels,
                            )  # fmt: skip
                if positions[start] > seen[2]:
                    enter_bins(
                        positions[start], document, end, key_positions, widths, shifts, bins, seen, count, base
                    )
                low, high = visible(
                    positions[start], document, end, key_positions, seen[0], seen[1], reach, causal, window, chunk
                )
                panel = max(max(low, document + sinks) - base, 0) // BLOCK
                origin = base + panel * BLOCK
                end_groups(
                    start, stop, positions, document, end, key_positions, widths, shifts, reach, causal, window,
                    chunk, origin, ends,
                )  # fmt: skip
                pack_rows(query, q_at, strides[0, 3], strides[0, 4], slots, start, stop, depth, factor, strip, depth)
                score(one, strip, depth, band.panels, panel, scores, stride, used, ends)
                some_far = sinks > 0 and positions[stop - 1] - key_positions[document] > limit
                if sinks and positions[start] - key_positions[document + sinks - 1] <= limit:
                    score(one, strip, depth, sink.panels, 0, sink.weights, rules.sink_stride, used, sink.ends)
                if some_far:
                    for i in range(stop - start):
                        turn_row(
                            strip, i * depth, query_turns, slots[start + i] * turn_size, one, rules,
                            scratch.far_strip, i * depth,
                        )  # fmt: skip
                    score(
                        one, scratch.far_strip, depth, far.panels, 0, far.weights, rules.sink_stride, used, sink.ends
                    )
                for i in range(stop - start):
                    position = positions[start + i]
                    if position > seen[2]:
                        enter_bins(position, document, end, key_positions, widths, shifts, bins, seen, count, base)
                    low, high = visible(
                        position, document, end, key_positions, seen[0], seen[1], reach, causal, window, chunk
                    )
                    low = max(low, document + sinks)
                    line, group = i * stride, i // ROWS
                    a = line + min(low - origin, ends[group])
                    z = max(line + high - origin, a)
                    if i % ROWS == 0:
                        starts[group] = a - line
                    top, total, vectors = kind.type(-np.inf), kind.type(0), 0
                    if z > a:
                        if slope != 0:
                            subtract_slope(scores, a, z, slope, position, key_positions, low)
                        vectors = pad(scores, a, z)
                        top = largest(one, address(scores, a), vectors)
                    if sinks:
                        mine = i * rules.sink_stride
                        if some_far:
                            split = first_key(key_positions, document, document + sinks, position - limit) - document
                            copy(far.weights, mine, mine + split, sink.weights)
                        first, last = visible_sinks(position, document, sinks, key_positions, causal, window, chunk)
                        if last > first:
                            sink_at = address(sink.weights, mine + first)
                            sink_vectors = pad(sink.weights, mine + first, mine + last)
                            top = max(top, largest(one, sink_at, sink_vectors))
                            total += weigh(one, sink_at, address(sink.counts, 0), sink_vectors, top)
                        clear(sink.weights, mine, mine + first)
                        clear(sink.weights, mine + last, mine + sinks)
                    if z > a:
                        total += weigh(one, address(scores, a), address(count, low - base), vectors, top)
                    clear(scores, line + starts[group], a)
                    clear(scores, z, line + ends[group])
                    scratch.tops[i], scratch.totals[i] = top, total
                clear(result, 0, used * ROWS * width)
                gather(
                    one, scores, stride, starts, ends, values, values_at + (origin - base) * value_stride,
                    value_stride, result, width, used,
                )  # fmt: skip
                if sinks:
                    gather(
                        one, sink.weights, rules.sink_stride, sink.starts, sink.ends, sink.rows, 0, width, result,
                        width, used,
                    )  # fmt: skip
                for i in range(stop - start):
                    at = (b * rules.heads + h) * rules.queries + slots[start + i]
                    total = scratch.totals[i]
                    if total == 0:  # no visible key
                        clear(result, i * width, (i + 1) * width)
                        total, lse[at] = 1.0, -np.inf
                    else:
                        lse[at] = (scratch.tops[i] + math.log2(total / samples)) * LN2
                    unpack_row(
                        result, i, width, kind.type(1 / total), out, out_at + slots[start + i] * strides[3, 3],
                        strides[3, 4], depth,
                    )  # fmt: skip
                start = stop
