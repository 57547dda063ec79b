"""The banded pass on the CPU, backward: the same walk as ``_forward``, weights computed again."""

from __future__ import annotations

import math

import numpy as np

from hf_poslsh.ops._rows import (
    add_rows,
    clear,
    clear_around,
    copy,
    end_groups,
    enter_bins,
    gather,
    leave_bins,
    pack_panels,
    pack_rows,
    pad,
    scatter,
    score,
    score_gradient,
    strip_end,
    subtract_slope,
    turn_panels,
    turn_row,
    unpack_row,
    visible,
    visible_sinks,
)
from hf_poslsh.ops._scratch import jit, lend, lend_columns, round_up
from hf_poslsh.ops._simd import BLOCK, ROWS, address, fetch_add, unowned, weigh
from hf_poslsh.ops._tokens import first_key

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@jit
def _turn_back(far_sums, positions, document, sinks, turns, rules, sums):
    """Adds the gradient of sinks that were turned to position 0, turned back, to that of the sinks."""
    width, one = round_up(rules.depth, BLOCK), far_sums.dtype.type(1)
    for j in range(sinks):
        at = j * width
        turn_row(far_sums, at, turns, positions[document + j] * 2 * rules.pairs, -one, rules, far_sums, at)
        for d in range(rules.depth):
            sums[at + d] += far_sums[at + d]


@jit
def backward(
    queue, items, strides, query, key, value, out, out_grad, lse, lse_grad, query_grad, key_grad, value_grad, rules,
    tables, scratch, band, sink, far, one,
):  # fmt: skip
    """Takes items from ``queue``, writes their rows of ``query_grad`` and adds to ``key_grad`` and ``value_grad``.

    Tensors are flat views; ``strides`` is int64 ``(8, 5)``: query, key, value, out, out_grad, query_grad, key_grad,
    value_grad. No two items in flight at a time may share keys. ``lse_grad`` is empty where it is zero.

    With P_ij the weights of the softmax and dP_ij = dout_i . v_j: dS_ij = P_ij (dP_ij - delta_i), where delta_i
    = dout_i . out_i - dlse_i; dq = scale dS k, dk = scale dS^T q, dv = P^T dout.
    """
    tables, scratch = lend(tables, scratch)
    band, sink, far = lend_columns(band), lend_columns(sink), lend_columns(far)
    query, key, value, out, out_grad = unowned(query), unowned(key), unowned(value), unowned(out), unowned(out_grad)
    lse, lse_grad, query_grad = unowned(lse), unowned(lse_grad), unowned(query_grad)
    key_grad, value_grad = unowned(key_grad), unowned(value_grad)
    items, strides = unowned(items), unowned(strides)
    depth, width, stride = rules.depth, round_up(rules.depth, BLOCK), rules.stride
    causal, window, chunk = rules.causal, rules.window, rules.chunk
    strip, out_strip, result = scratch.strip, scratch.out_strip, scratch.result
    bins, seen, count, starts, ends = scratch.bins, scratch.seen, band.counts, band.starts, band.ends
    rows, samples = tables.query_slot.shape[0], tables.widths.shape[1]
    group_size = rules.heads // rules.kv_heads
    kind = query.dtype
    factor, ln2, scale = kind.type(rules.scale * LOG2E), kind.type(LN2), kind.type(rules.scale)
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
        dk_at = strides[6, 0] + b * strides[6, 1] + g * strides[6, 2]
        dv_at = strides[7, 0] + b * strides[7, 1] + g * strides[7, 2]
        pack_panels(key, k_at, strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, band.panels)
        pack_panels(value, v_at, strides[2, 3], strides[2, 4], key_slots, base, key_end, depth, band.value_panels)
        pack_rows(key, k_at, strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, one, band.rows, width)
        clear(band.key_sums, 0, band.key_sums.size)
        clear(band.value_sums, 0, band.value_sums.size)
        for h in range(g * group_size, (g + 1) * group_size):
            widths, shifts, reach = tables.widths[h], tables.shifts[h], tables.reach[h]
            slope = kind.type(tables.slopes[h] * LOG2E)
            count[:] = 0
            bins[:2] = 0
            q_at = strides[0, 0] + b * strides[0, 1] + h * strides[0, 2]
            out_at = strides[3, 0] + b * strides[3, 1] + h * strides[3, 2]
            do_at = strides[4, 0] + b * strides[4, 1] + h * strides[4, 2]
            dq_at = strides[5, 0] + b * strides[5, 1] + h * strides[5, 2]
            document, end, sinks = np.int64(-1), np.int64(-1), np.int64(0)
            start = item_start
            while start < item_end:
                stop = strip_end(start, item_end, documents)
                size = stop - start
                used = (size + ROWS - 1) // ROWS
                if documents[start, 0] != document or documents[start, 1] != end:
                    if sinks:
                        if turn_size:
                            _turn_back(
                                far.key_sums, key_positions, document, sinks, tables.sink_turns, rules, sink.key_sums
                            )
                        add_rows(
                            sink.key_sums, width, key_slots, document, document + sinks, key_grad, dk_at,
                            strides[6, 3], strides[6, 4], depth, ln2,
                        )  # fmt: skip
                        add_rows(
                            sink.value_sums, width, key_slots, document, document + sinks, value_grad, dv_at,
                            strides[7, 3], strides[7, 4], depth, one,
                        )  # fmt: skip
                    document, end = documents[start, 0], documents[start, 1]
                    leave_bins(bins, seen)
                    if rules.sink_tokens:
                        sinks = first_key(key_positions, document, end, rules.sink_tokens) - document
                        sink.ends[:] = sinks
                        sink.row_starts[:] = 0
                        sink.row_ends[:] = sinks
                        pack_panels(
                            key, k_at, strides[1, 3], strides[1, 4], key_slots, document, document + sinks, depth,
                            sink.panels,
                        )  # fmt: skip
                        pack_panels(
                            value, v_at, strides[2, 3], strides[2, 4], key_slots, document, document + sinks, depth,
                            sink.value_panels,
                        )  # fmt: skip
                        pack_rows(
                            key, k_at, strides[1, 3], strides[1, 4], key_slots, document, document + sinks, depth,
                            one, sink.rows, width,
                        )  # fmt: skip
                        if turn_size:
                            turn_panels(
                                sink.panels, key_positions, document, document + sinks, tables.sink_turns, rules,
                                far.panels,
                            )  # fmt: skip
                            for j in range(sinks):
                                turn_row(
                                    sink.rows, j * width, tables.sink_turns, key_positions[document + j] * turn_size,
                                    one, rules, far.rows, j * width,
                                )  # fmt: skip
                            clear(far.key_sums, 0, far.key_sums.size)
                        clear(sink.key_sums, 0, sink.key_sums.size)
                        clear(sink.value_sums, 0, sink.value_sums.size)
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
                pack_rows(
                    out_grad, do_at, strides[4, 3], strides[4, 4], slots, start, stop, depth, one, out_strip, depth
                )
                for i in range(size):
                    unpack_row(strip, i, depth, one, scratch.wide_strip, i * width, 1, depth)
                    unpack_row(out_strip, i, depth, one, scratch.wide_out_strip, i * width, 1, depth)
                score(one, strip, depth, band.panels, panel, band.weights, stride, used, ends)
                score(one, out_strip, depth, band.value_panels, panel, band.gradients, stride, used, ends)
                some_far = sinks > 0 and positions[stop - 1] - key_positions[document] > limit
                some_near = sinks > 0 and positions[start] - key_positions[document + sinks - 1] <= limit
                if some_far:
                    for i in range(size):
                        turn_row(
                            strip, i * depth, query_turns, slots[start + i] * turn_size, one, rules,
                            scratch.far_strip, i * depth,
                        )  # fmt: skip
                        unpack_row(scratch.far_strip, i, depth, one, scratch.far_wide_strip, i * width, 1, depth)
                    score(
                        one, scratch.far_strip, depth, far.panels, 0, far.weights, rules.sink_stride, used, sink.ends
                    )
                if some_near:
                    score(one, strip, depth, sink.panels, 0, sink.weights, rules.sink_stride, used, sink.ends)
                if sinks:
                    score(
                        one, out_strip, depth, sink.value_panels, 0, sink.gradients, rules.sink_stride, used,
                        sink.ends,
                    )  # fmt: skip
                for i in range(size):
                    position, slot = positions[start + i], slots[start + i]
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
                    band.row_starts[i], band.row_ends[i] = a - line, z - line
                    at = (b * rules.heads + h) * rules.queries + slot
                    shift = kind.type(lse[at] * LOG2E + math.log2(samples))
                    delta = kind.type(0) if lse_grad.size == 0 else -lse_grad[at]
                    for d in range(depth):
                        delta += out[out_at + slot * strides[3, 3] + d * strides[3, 4]] * out_strip[i * depth + d]
                    if z > a:
                        if slope != 0:
                            subtract_slope(band.weights, a, z, slope, position, key_positions, low)
                        vectors = pad(band.weights, a, z)
                        weigh(one, address(band.weights, a), address(count, low - base), vectors, shift)
                        score_gradient(band.gradients, band.weights, a, z, delta)
                    # A group of keys is summed over every row that sees any of it: zeros around the visible run.
                    clear_around(band.weights, line, a, z, starts[group], ends[group])
                    clear_around(band.gradients, line, a, z, starts[group], ends[group])
                    if sinks:
                        mine = i * rules.sink_stride
                        first, last = visible_sinks(position, document, sinks, key_positions, causal, window, chunk)
                        split = 0
                        if some_far:
                            split = first_key(key_positions, document, document + sinks, position - limit) - document
                            copy(far.weights, mine, mine + split, sink.weights)
                        if last > first:
                            vectors = pad(sink.weights, mine + first, mine + last)
                            weigh(one, address(sink.weights, mine + first), address(sink.counts, 0), vectors, shift)
                            score_gradient(sink.gradients, sink.weights, mine + first, mine + last, delta)
                        clear_around(sink.weights, mine, mine + first, mine + last, 0, sinks)
                        clear_around(sink.gradients, mine, mine + first, mine + last, 0, sinks)
                        if some_far:  # what comes through turned pairs, and what does not
                            copy(sink.gradients, mine, mine + split, far.gradients)
                            clear_around(far.gradients, mine, mine, mine + split, 0, sinks)
                            clear(sink.gradients, mine, mine + split)
                clear(result, 0, used * ROWS * width)
                gather(
                    one, band.gradients, stride, starts, ends, band.rows, (origin - base) * width, width, result,
                    width, used,
                )  # fmt: skip
                scatter(
                    one, band.gradients, stride, band.row_starts, band.row_ends, size, scratch.wide_strip, width,
                    band.key_sums, origin - base,
                )  # fmt: skip
                scatter(
                    one, band.weights, stride, band.row_starts, band.row_ends, size, scratch.wide_out_strip, width,
                    band.value_sums, origin - base,
                )  # fmt: skip
                if some_far:
                    clear(scratch.far_result, 0, used * ROWS * width)
                    gather(
                        one, far.gradients, rules.sink_stride, sink.starts, sink.ends, far.rows, 0, width,
                        scratch.far_result, width, used,
                    )  # fmt: skip
                    scatter(
                        one, far.gradients, rules.sink_stride, sink.row_starts, sink.row_ends, size,
                        scratch.far_wide_strip, width, far.key_sums, 0,
                    )  # fmt: skip
                    for i in range(size):
                        turn_row(
                            scratch.far_result, i * width, query_turns, slots[start + i] * turn_size, -one, rules,
                            scratch.far_result, i * width,
                        )  # fmt: skip
                        for d in range(depth):
                            result[i * width + d] += scratch.far_result[i * width + d]
                if sinks:
                    gather(
                        one, sink.gradients, rules.sink_stride, sink.starts, sink.ends, sink.rows, 0, width, result,
                        width, used,
                    )  # fmt: skip
                    scatter(
                        one, sink.gradients, rules.sink_stride, sink.row_starts, sink.row_ends, size,
                        scratch.wide_strip, width, sink.key_sums, 0,
                    )  # fmt: skip
                    scatter(
                        one, sink.weights, rules.sink_stride, sink.row_starts, sink.row_ends, size,
                        scratch.wide_out_strip, width, sink.value_sums, 0,
                    )  # fmt: skip
                for i in range(size):
                    unpack_row(
                        result, i, width, scale, query_grad, dq_at + slots[start + i] * strides[5, 3],
                        strides[5, 4], depth,
                    )  # fmt: skip
                start = stop
            if sinks:
                if turn_size:
                    _turn_back(far.key_sums, key_positions, document, sinks, tables.sink_turns, rules, sink.key_sums)
                add_rows(
                    sink.key_sums, width, key_slots, document, document + sinks, key_grad, dk_at, strides[6, 3],
                    strides[6, 4], depth, ln2,
                )  # fmt: skip
                add_rows(
                    sink.value_sums, width, key_slots, document, document + sinks, value_grad, dv_at, strides[7, 3],
                    strides[7, 4], depth, one,
                )  # fmt: skip
        add_rows(
            band.key_sums, width, key_slots, base, key_end, key_grad, dk_at, strides[6, 3], strides[6, 4], depth, ln2
        )
        add_rows(
            band.value_sums, width, key_slots, base, key_end, value_grad, dv_at, strides[7, 3], strides[7, 4], depth,
            one,
        )  # fmt: skip
