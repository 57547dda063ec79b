"""The banded pass on the CPU: compiled loops, forward and backward, one call a thread.

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
from numba import njit

from hf_poslsh.hashing import first_in_bin, last_in_bin
from hf_poslsh.ops._simd import BLOCK, LANES, ROWS, address, fetch_add, largest, multiply, multiply_add, weigh
from hf_poslsh.ops._tokens import first_key, host_interval, last_seen

STRIP = 32  # query rows that share one read of the keys
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
PAD = -3e38  # a score that weighs nothing
_FAST = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and inf keep their meaning

_jit = njit(nogil=True, cache=True)


def _up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


_up = njit(nogil=True, cache=True, inline="always")(_up)


@njit(nogil=True, cache=True, fastmath=_FAST)
def _add(count, start, end, amount):
    for j in range(np.uint64(max(start, 0)), np.uint64(min(max(end, 0), count.size))):
        count[j] += amount


@_jit
def _enter_bins(position, keys, key_positions, widths, shifts, bins, seen, count, base):
    """Moves every hash whose bin ended on to the bin of ``position``; the interval of keys in any bin.

    ``bins`` is int64 ``(3, s)``: first and end compact key of the current bin, and its last position. ``seen``
    is int64 ``(3,)``: the interval of keys in any bin, and the position at which the first bin ends.
    """
    if position <= seen[2]:
        return seen[0], seen[1]
    one = count.dtype.type(1)
    low, high, last = keys[1], keys[0], np.int64(2**62)
    for r in range(widths.size):
        if position > bins[2, r]:
            _add(count, bins[0, r] - base, bins[1, r] - base, -one)
            first = position
            if position != bins[2, r] + 1:
                first = first_in_bin(position, widths[r], shifts[r])
            bins[2, r] = last_in_bin(position, widths[r], shifts[r])
            bins[0, r] = first_key(key_positions, keys[0], keys[1], first)
            bins[1, r] = first_key(key_positions, keys[0], keys[1], bins[2, r] + 1)
            _add(count, bins[0, r] - base, bins[1, r] - base, one)
        low, high, last = min(low, bins[0, r]), max(high, bins[1, r]), min(last, bins[2, r])
    seen[0], seen[1], seen[2] = low, high, last
    return low, high


@_jit
def _leave_bins(bins, seen):
    """Marks the bins as those of another document; their counts are taken back when the next one is entered."""
    bins[2], seen[2] = -1, -1


@_jit
def _visible(position, keys, key_positions, low, high, reach, causal, window, chunk):
    """Interval of visible keys of one query, given the interval of keys in any of its bins."""
    first, last = host_interval(position, window, chunk)
    low = max(low, first_key(key_positions, keys[0], keys[1], max(first, position - reach + 1)))
    if causal:
        return low, min(high, first_key(key_positions, keys[0], keys[1], position + 1))
    return low, min(high, first_key(key_positions, keys[0], keys[1], min(last, position + reach - 1) + 1))


@_jit
def _pack_panels(source, offset, stride, depth_stride, slots, start, end, depth, panels):
    """Rows ``slots[start:end]`` of a tensor, transposed in blocks: ``panels[block, d, lane]``, zero-padded."""
    for block in range((end - start + BLOCK - 1) // BLOCK):
        panel = panels[block * depth * BLOCK : (block + 1) * depth * BLOCK].reshape(depth, BLOCK)
        for lane in range(BLOCK):
            index = start + block * BLOCK + lane
            if index < end:
                row = source[offset + slots[index] * stride :][: 1 + (depth - 1) * depth_stride]
                for d in range(depth):
                    panel[d, lane] = row[d * depth_stride]
            else:
                panel[:, lane] = 0


@_jit
def _pack_rows(source, offset, stride, depth_stride, slots, start, end, depth, factor, rows, width):
    """Rows ``slots[start:end]`` of a tensor times ``factor``, one after another, zero-padded to ``width``."""
    for index in range(start, end):
        row = source[offset + slots[index] * stride :][: 1 + (depth - 1) * depth_stride]
        packed = rows[(index - start) * width : (index - start + 1) * width]
        if depth_stride == 1:
            for d in range(depth):
                packed[d] = row[d] * factor
        else:
            for d in range(depth):
                packed[d] = row[d * depth_stride] * factor
        packed[depth:] = 0


@_jit
def _unpack_row(packed, factor, target, offset, depth_stride, depth):
    """Writes a packed row times ``factor`` to a tensor."""
    row = target[offset:][: 1 + (depth - 1) * depth_stride]
    if depth_stride == 1:
        for d in range(depth):
            row[d] = packed[d] * factor
    else:
        for d in range(depth):
            row[d * depth_stride] = packed[d] * factor


@_jit
def _score(one, strip, depth, panels, first_panel, num_panels, scores, stride, groups, ends):
    """scores[row, key] = strip @ panels; a group of rows leaves out the panels beyond its last key."""
    for panel in range(num_panels):
        for group in range(groups):
            if panel * BLOCK < ends[group]:
                multiply(
                    one, address(strip, group * ROWS * depth), depth, 1,
                    address(panels, (first_panel + panel) * depth * BLOCK), BLOCK,
                    address(scores, group * ROWS * stride + panel * BLOCK), stride, depth,
                )  # fmt: skip


@_jit
def _gather(one, weights, stride, starts, ends, rows, width, first_row, out, groups):
    """out[row, d] += weights @ rows, each group of rows over its own interval of keys."""
    for group in range(groups):
        depth = ends[group] - starts[group]
        if depth > 0:
            for d in range(0, width, BLOCK):
                multiply_add(
                    one, address(weights, group * ROWS * stride + starts[group]), stride, 1,
                    address(rows, (first_row + starts[group]) * width + d), width,
                    address(out, group * ROWS * width + d), width, depth,
                )  # fmt: skip


@_jit
def _scatter(one, weights, stride, row_start, row_end, rows, first, end, strip, width, out, first_row):
    """out[key, d] += weights^T @ strip, each group of keys over the rows of the strip that see any of it."""
    low = high = 0
    for key in range(first // ROWS * ROWS, end, ROWS):
        while low < rows and row_end[low] <= key:
            low += 1
        high = max(high, low)
        while high < rows and row_start[high] < key + ROWS:
            high += 1
        if high > low:
            for d in range(0, width, BLOCK):
                multiply_add(
                    one, address(weights, low * stride + key), 1, stride,
                    address(strip, low * width + d), width,
                    address(out, (first_row + key) * width + d), width, high - low,
                )  # fmt: skip


# The loops below go by whole vectors, so that short rows pay for no scalar remainder: scores behind the last
# key are set to PAD first, whose weight is nothing beside the row's largest, and cleared afterwards.


@_jit
def _pad(scores, start, end):
    """Writes PAD behind ``end`` up to the last vector; the number of vectors from ``start`` on."""
    vectors = (end - start + LANES - 1) // LANES
    for j in range(np.uint64(end), np.uint64(start + vectors * LANES)):
        scores[j] = PAD
    return vectors


@njit(nogil=True, cache=True, fastmath=_FAST)
def _slope(scores, start, end, slope, position, key_positions, first):
    offset = np.uint64(first) - np.uint64(start)
    for j in range(np.uint64(start), np.uint64(end)):
        scores[j] -= slope * scores.dtype.type(abs(position - key_positions[j + offset]))


@njit(nogil=True, cache=True, fastmath=_FAST)
def _score_gradient(gradients, weights, start, end, delta):
    for j in range(np.uint64(start), np.uint64(end)):
        gradients[j] = weights[j] * (gradients[j] - delta)


@_jit
def _clear(array, start, end):
    for j in range(np.uint64(start), np.uint64(max(start, end))):
        array[j] = 0


@_jit
def _clear_around(array, line, start, end, group_start, group_end):
    """Zeros in a row outside [start, end), over the blocks of keys that its strip computes with."""
    _clear(array, line + group_start // ROWS * ROWS, min(start, line + _up(group_end, ROWS)))
    _clear(array, end, line + _up(group_end, ROWS))


@_jit
def _widen(narrow, wide, size, depth, width):
    for i in range(size):
        for d in range(depth):
            wide[i * width + d] = narrow[i * depth + d]


@_jit
def _flush(sums, width, first, count, slots, gradient, offset, strides, depth, factor):
    """Adds packed rows times ``factor`` to the rows ``slots[first : first + count]`` of a gradient."""
    for i in range(count):
        target = offset + slots[first + i] * strides[3]
        for d in range(depth):
            gradient[target + d * strides[4]] += sums[i * width + d] * factor


@_jit
def _strip_end(start, end, query_keys):
    """End of the strip from ``start``: at most STRIP rows, all of one segment."""
    stop = min(start + STRIP, end)
    while query_keys[stop - 1, 0] != query_keys[start, 0] or query_keys[stop - 1, 1] != query_keys[start, 1]:
        stop -= 1
    return stop


@_jit
def _plan_strip(
    start, stop, query_positions, keys, key_positions, widths, shifts, reach, window_start, causal, window, chunk,
    base, bins, seen, count, group_ends,
):  # fmt: skip
    """First packed key and number of panels of a strip, and the end of every group of rows within it."""
    position = query_positions[start]
    low, high = _enter_bins(position, keys, key_positions, widths, shifts, bins, seen, count, base)
    low, high = _visible(position, keys, key_positions, low, high, reach, causal, window, chunk)
    low = max(low, window_start)
    origin = max(low - base, 0) // BLOCK * BLOCK
    for group in range(STRIP // ROWS):
        row = min(start + (group + 1) * ROWS, stop) - 1
        end = last_seen(
            query_positions[row], keys[0], keys[1], key_positions, widths, shifts, reach, causal, window, chunk
        )
        group_ends[group] = max(end - base - origin, 0)
    panels = (group_ends[STRIP // ROWS - 1] + BLOCK - 1) // BLOCK
    return origin, panels


@_jit
def _sink_interval(position, keys, key_positions, sinks, causal, window, chunk):
    """Sinks that one query sees, as an interval counted from the first key of the segment."""
    first, last = host_interval(position, window, chunk)
    last = position if causal else last
    start = first_key(key_positions, keys[0], keys[0] + sinks, first) - keys[0]
    end = first_key(key_positions, keys[0], keys[0] + sinks, last + 1) - keys[0]
    return start, max(start, end)


@_jit
def forward(
    queue, items, dims, strides, query, key, value, out, lse, query_slot, query_position, query_keys, key_slot,
    key_position, widths, shifts, slopes, reach, sink_tokens, causal, window, chunk, scale, one,
):  # fmt: skip
    """Takes items from ``queue`` and writes their rows of ``out`` and ``lse``.

    Tensors are flat views of their storage; ``strides`` is int64 ``(4, 5)``: offset and strides (batch, head,
    token, dim) of query, key, value and out. ``dims`` is (H, H_kv, Q, D). ``one`` carries the compute type.
    """
    heads, kv_heads, queries, depth = dims
    rows, samples = query_slot.shape[0], widths.shape[1]
    kind = query.dtype
    width = _up(depth, BLOCK)
    span = 0
    for item in range(items.shape[0]):
        span = max(span, items[item, 5] - items[item, 4])
    padded = _up(span, BLOCK) + BLOCK
    sink_padded = _up(min(np.int64(sink_tokens), np.int64(key_slot.shape[1])), BLOCK)
    stride, sink_stride = padded + 16, sink_padded + 16
    key_panels, value_rows = np.empty(padded * depth, kind), np.empty(padded * width, kind)
    sink_panels, sink_rows = np.empty(sink_padded * depth, kind), np.empty(sink_padded * width, kind)
    scores, sink_scores = np.empty(STRIP * stride, kind), np.empty(STRIP * sink_stride, kind)
    count, strip, result = np.empty(padded, kind), np.zeros(STRIP * depth, kind), np.empty(STRIP * width, kind)
    bins, seen = np.empty((3, samples), np.int64), np.empty(3, np.int64)
    groups = STRIP // ROWS
    starts, ends, full = np.empty(groups, np.int64), np.empty(groups, np.int64), np.empty(groups, np.int64)
    totals, tops = np.empty(STRIP, np.float64), np.empty(STRIP, np.float64)
    sink_count = np.full(sink_stride, one * samples, kind)
    log_samples = math.log2(samples)

    while True:
        item = fetch_add(queue.ctypes.data, 1)
        if item >= items.shape[0]:
            break
        b, g, item_start, item_end, base, key_end = items[item]
        row = b % rows
        positions, segments, slots = query_position[row], query_keys[row], query_slot[row]
        key_positions, key_slots = key_position[row], key_slot[row]
        k_at, v_at = (
            strides[1, 0] + b * strides[1, 1] + g * strides[1, 2],
            strides[2, 0] + b * strides[2, 1] + g * strides[2, 2],
        )
        _pack_panels(key, k_at, strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, key_panels)
        _pack_rows(value, v_at, strides[2, 3], strides[2, 4], key_slots, base, key_end, depth, one, value_rows, width)
        _clear(value_rows, (key_end - base) * width, padded * width)
        for h in range(g * (heads // kv_heads), (g + 1) * (heads // kv_heads)):
            slope = kind.type(slopes[h] * LOG2E)
            count[:] = 0
            bins[:2] = 0
            _leave_bins(bins, seen)
            q_at = strides[0, 0] + b * strides[0, 1] + h * strides[0, 2]
            o_at = strides[3, 0] + b * strides[3, 1] + h * strides[3, 2]
            segment, sinks = np.int64(-1), np.int64(0)
            start = item_start
            while start < item_end:
                stop = _strip_end(start, item_end, segments)
                keys = segments[start]
                if keys[0] != segment:
                    segment = keys[0]
                    _leave_bins(bins, seen)
                    if sink_tokens:
                        sinks = first_key(key_positions, keys[0], keys[1], np.int64(sink_tokens)) - keys[0]
                        _pack_panels(
                            key,
                            k_at,
                            strides[1, 3],
                            strides[1, 4],
                            key_slots,
                            keys[0],
                            keys[0] + sinks,
                            depth,
                            sink_panels,
                        )
                        _pack_rows(
                            value,
                            v_at,
                            strides[2, 3],
                            strides[2, 4],
                            key_slots,
                            keys[0],
                            keys[0] + sinks,
                            depth,
                            one,
                            sink_rows,
                            width,
                        )
                origin, panels = _plan_strip(
                    start, stop, positions, keys, key_positions, widths[h], shifts[h], reach[h], keys[0] + sinks,
                    causal, window, chunk, base, bins, seen, count, ends,
                )  # fmt: skip
                used = (stop - start + ROWS - 1) // ROWS
                _pack_rows(
                    query,
                    q_at,
                    strides[0, 3],
                    strides[0, 4],
                    slots,
                    start,
                    stop,
                    depth,
                    kind.type(scale * LOG2E),
                    strip,
                    depth,
                )
                _score(one, strip, depth, key_panels, origin // BLOCK, panels, scores, stride, used, ends)
                if sinks:
                    full[:] = sinks
                    _score(
                        one,
                        strip,
                        depth,
                        sink_panels,
                        0,
                        _up(sinks, BLOCK) // BLOCK,
                        sink_scores,
                        sink_stride,
                        used,
                        full,
                    )
                for i in range(stop - start):
                    position = positions[start + i]
                    low, high = _enter_bins(position, keys, key_positions, widths[h], shifts[h], bins, seen, count, base)
                    low, high = _visible(position, keys, key_positions, low, high, reach[h], causal, window, chunk)
                    low = max(low, keys[0] + sinks)
                    line = i * stride
                    group = i // ROWS
                    a = line + min(low - base - origin, ends[group])
                    z = max(line + high - base - origin, a)
                    if i % ROWS == 0:
                        starts[group] = a - line
                    top = kind.type(-np.inf)
                    if z > a:
                        if slope != 0:
                            _slope(scores, a, z, slope, position, key_positions, low)
                        vectors = _pad(scores, a, z)
                        top = largest(one, address(scores, a), vectors)
                    total = kind.type(0)
                    if sinks:
                        first, last = _sink_interval(position, keys, key_positions, sinks, causal, window, chunk)
                        mine = i * sink_stride
                        if last > first:
                            sink_vectors = _pad(sink_scores, mine + first, mine + last)
                            sink_at = address(sink_scores, mine + first)
                            top = max(top, largest(one, sink_at, sink_vectors))
                            total += weigh(one, sink_at, address(sink_count, 0), sink_vectors, top)
                        _clear(sink_scores, mine, mine + first)
                        _clear(sink_scores, mine + last, mine + sinks)
                    if z > a:
                        total += weigh(one, address(scores, a), address(count, low - base), vectors, top)
                    _clear(scores, line + starts[group], a)
                    _clear(scores, z, line + ends[group])
                    totals[i], tops[i] = total, top
                _clear(result, 0, used * ROWS * width)
                _gather(one, scores, stride, starts, ends, value_rows, width, origin, result, used)
                if sinks:
                    starts[:] = 0
                    _gather(one, sink_scores, sink_stride, starts, full, sink_rows, width, 0, result, used)
                for i in range(stop - start):
                    inverse = kind.type(0 if totals[i] == 0 else 1 / totals[i])
                    target = o_at + slots[start + i] * strides[3, 3]
                    _unpack_row(result[i * width :], inverse, out, target, strides[3, 4], depth)
                    at = (b * heads + h) * queries + slots[start + i]
                    if totals[i] != 0:
                        lse[at] = (tops[i] + math.log2(totals[i]) - log_samples) * LN2
                    else:
                        lse[at] = -np.inf
                start = stop


@_jit
def backward(
    queue, items, dims, strides, query, key, value, out, out_grad, lse, lse_grad, query_grad, key_grad, value_grad,
    query_slot, query_position, query_keys, key_slot, key_position, widths, shifts, slopes, reach, sink_tokens,
    causal, window, chunk, scale, one,
):  # fmt: skip
    """Takes items from ``queue``, writes their rows of ``query_grad`` and adds to ``key_grad`` and ``value_grad``.

    Tensors are flat views; ``strides`` is int64 ``(8, 5)``: query, key, value, out, out_grad, query_grad, key_grad,
    value_grad. No two items in flight at a time may share keys.

    With P_ij the weights of the softmax and dP_ij = dout_i . v_j: dS_ij = P_ij (dP_ij - delta_i), where delta_i
    = dout_i . out_i - dlse_i; dq = scale dS k, dk = scale dS^T q, dv = P^T dout.
    """
    heads, kv_heads, queries, depth = dims
    rows, samples = query_slot.shape[0], widths.shape[1]
    kind = query.dtype
    width = _up(depth, BLOCK)
    span = 0
    for item in range(items.shape[0]):
        span = max(span, items[item, 5] - items[item, 4])
    padded = _up(span, BLOCK) + BLOCK
    sink_padded = _up(min(np.int64(sink_tokens), np.int64(key_slot.shape[1])), BLOCK)
    stride, sink_stride = padded + 16, sink_padded + 16
    key_panels = np.empty(padded * depth, kind)
    value_panels = np.empty(padded * depth, kind)
    key_rows = np.empty(padded * width, kind)
    key_sums = np.empty(padded * width, kind)
    value_sums = np.empty(padded * width, kind)
    sink_key_panels = np.empty(sink_padded * depth, kind)
    sink_value_panels = np.empty(sink_padded * depth, kind)
    sink_key_rows = np.empty(sink_padded * width, kind)
    sink_key_sums = np.empty(sink_padded * width, kind)
    sink_value_sums = np.empty(sink_padded * width, kind)
    weights = np.empty(STRIP * stride, kind)
    gradients = np.empty(STRIP * stride, kind)
    sink_weights = np.empty(STRIP * sink_stride, kind)
    sink_gradients = np.empty(STRIP * sink_stride, kind)
    count = np.empty(padded, kind)
    strip = np.zeros(STRIP * depth, kind)
    out_strip = np.zeros(STRIP * depth, kind)
    wide_strip = np.zeros(STRIP * width, kind)
    wide_out_strip = np.zeros(STRIP * width, kind)
    result = np.empty(STRIP * width, kind)
    bins, seen = np.empty((3, samples), np.int64), np.empty(3, np.int64)
    groups = STRIP // ROWS
    starts, ends, full = np.empty(groups, np.int64), np.empty(groups, np.int64), np.empty(groups, np.int64)
    row_starts = np.empty(STRIP, np.int64)
    row_ends = np.empty(STRIP, np.int64)
    sink_row_starts = np.empty(STRIP, np.int64)
    sink_row_ends = np.empty(STRIP, np.int64)
    sink_count = np.full(sink_stride, one * samples, kind)
    log_samples = math.log2(samples)

    while True:
        item = fetch_add(queue.ctypes.data, 1)
        if item >= items.shape[0]:
            break
        b, g, item_start, item_end, base, key_end = items[item]
        row = b % rows
        positions, segments, slots = query_position[row], query_keys[row], query_slot[row]
        key_positions, key_slots = key_position[row], key_slot[row]
        at = strides[:, 0] + b * strides[:, 1]
        kv_at = at + g * strides[:, 2]
        _pack_panels(key, kv_at[1], strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, key_panels)
        _pack_panels(value, kv_at[2], strides[2, 3], strides[2, 4], key_slots, base, key_end, depth, value_panels)
        _pack_rows(key, kv_at[1], strides[1, 3], strides[1, 4], key_slots, base, key_end, depth, one, key_rows, width)
        _clear(key_rows, (key_end - base) * width, padded * width)
        _clear(key_sums, 0, padded * width)
        _clear(value_sums, 0, padded * width)
        segment, sinks = np.int64(-1), np.int64(0)
        for h in range(g * (heads // kv_heads), (g + 1) * (heads // kv_heads)):
            slope = kind.type(slopes[h] * LOG2E)
            count[:] = 0
            bins[:2] = 0
            _leave_bins(bins, seen)
            head_at = at + h * strides[:, 2]
            start = item_start
            while start < item_end:
                stop = _strip_end(start, item_end, segments)
                keys = segments[start]
                if keys[0] != segment or start == item_start:
                    _leave_bins(bins, seen)
                    if sink_tokens:
                        _flush(
                            sink_key_sums,
                            width,
                            segment,
                            sinks,
                            key_slots,
                            key_grad,
                            kv_at[6],
                            strides[6],
                            depth,
                            kind.type(LN2),
                        )
                        _flush(
                            sink_value_sums,
                            width,
                            segment,
                            sinks,
                            key_slots,
                            value_grad,
                            kv_at[7],
                            strides[7],
                            depth,
                            one,
                        )
                        sinks = first_key(key_positions, keys[0], keys[1], np.int64(sink_tokens)) - keys[0]
                        _pack_panels(
                            key,
                            kv_at[1],
                            strides[1, 3],
                            strides[1, 4],
                            key_slots,
                            keys[0],
                            keys[0] + sinks,
                            depth,
                            sink_key_panels,
                        )
                        _pack_panels(
                            value,
                            kv_at[2],
                            strides[2, 3],
                            strides[2, 4],
                            key_slots,
                            keys[0],
                            keys[0] + sinks,
                            depth,
                            sink_value_panels,
                        )
                        _pack_rows(
                            key,
                            kv_at[1],
                            strides[1, 3],
                            strides[1, 4],
                            key_slots,
                            keys[0],
                            keys[0] + sinks,
                            depth,
                            one,
                            sink_key_rows,
                            width,
                        )
                        _clear(sink_key_sums, 0, sink_key_sums.size)
                        _clear(sink_value_sums, 0, sink_value_sums.size)
                    segment = keys[0]
                origin, panels = _plan_strip(
                    start, stop, positions, keys, key_positions, widths[h], shifts[h], reach[h], keys[0] + sinks,
                    causal, window, chunk, base, bins, seen, count, ends,
                )  # fmt: skip
                size = stop - start
                used = (size + ROWS - 1) // ROWS
                _pack_rows(
                    query,
                    head_at[0],
                    strides[0, 3],
                    strides[0, 4],
                    slots,
                    start,
                    stop,
                    depth,
                    kind.type(scale * LOG2E),
                    strip,
                    depth,
                )
                _pack_rows(
                    out_grad,
                    head_at[4],
                    strides[4, 3],
                    strides[4, 4],
                    slots,
                    start,
                    stop,
                    depth,
                    one,
                    out_strip,
                    depth,
                )
                _widen(strip, wide_strip, size, depth, width)
                _widen(out_strip, wide_out_strip, size, depth, width)
                _score(one, strip, depth, key_panels, origin // BLOCK, panels, weights, stride, used, ends)
                _score(one, out_strip, depth, value_panels, origin // BLOCK, panels, gradients, stride, used, ends)
                if sinks:
                    full[:] = sinks
                    blocks = _up(sinks, BLOCK) // BLOCK
                    _score(one, strip, depth, sink_key_panels, 0, blocks, sink_weights, sink_stride, used, full)
                    _score(
                        one, out_strip, depth, sink_value_panels, 0, blocks, sink_gradients, sink_stride, used, full
                    )
                for i in range(size):
                    position = positions[start + i]
                    low, high = _enter_bins(position, keys, key_positions, widths[h], shifts[h], bins, seen, count, base)
                    low, high = _visible(position, keys, key_positions, low, high, reach[h], causal, window, chunk)
                    low = max(low, keys[0] + sinks)
                    line = i * stride
                    group = i // ROWS
                    a = line + min(low - base - origin, ends[group])
                    z = max(line + high - base - origin, a)
                    if i % ROWS == 0:
                        starts[group] = a - line
                    slot = slots[start + i]
                    at_row = (b * heads + h) * queries + slot
                    shift = kind.type(lse[at_row] * LOG2E + log_samples)
                    delta = kind.type(0) if lse_grad.size == 0 else -lse_grad[at_row]
                    for d in range(depth):
                        delta += out[head_at[3] + slot * strides[3, 3] + d * strides[3, 4]] * out_strip[i * depth + d]
                    delta = kind.type(delta)
                    row_starts[i], row_ends[i] = a - line, z - line
                    if z > a:
                        if slope != 0:
                            _slope(weights, a, z, slope, position, key_positions, low)
                        vectors = _pad(weights, a, z)
                        weigh(one, address(weights, a), address(count, low - base), vectors, shift)
                        _score_gradient(gradients, weights, a, z, delta)
                    # A group of keys is summed over every row that sees any of it: zeros around the visible run.
                    _clear_around(weights, line, a, z, starts[group], ends[group])
                    _clear_around(gradients, line, a, z, starts[group], ends[group])
                    if sinks:
                        first, last = _sink_interval(position, keys, key_positions, sinks, causal, window, chunk)
                        mine = i * sink_stride
                        if last > first:
                            vectors = _pad(sink_weights, mine + first, mine + last)
                            sink_at = address(sink_weights, mine + first)
                            weigh(one, sink_at, address(sink_count, 0), vectors, shift)
                            _score_gradient(sink_gradients, sink_weights, mine + first, mine + last, delta)
                        sink_row_starts[i], sink_row_ends[i] = 0, sinks
                        _clear_around(sink_weights, mine, mine + first, mine + last, 0, sinks)
                        _clear_around(sink_gradients, mine, mine + first, mine + last, 0, sinks)
                _clear(result, 0, used * ROWS * width)
                _gather(one, gradients, stride, starts, ends, key_rows, width, origin, result, used)
                first, last = row_starts[0], row_ends[size - 1]
                _scatter(
                    one,
                    gradients,
                    stride,
                    row_starts,
                    row_ends,
                    size,
                    first,
                    last,
                    wide_strip,
                    width,
                    key_sums,
                    origin,
                )
                _scatter(
                    one,
                    weights,
                    stride,
                    row_starts,
                    row_ends,
                    size,
                    first,
                    last,
                    wide_out_strip,
                    width,
                    value_sums,
                    origin,
                )
                if sinks:
                    starts[:] = 0
                    _gather(one, sink_gradients, sink_stride, starts, full, sink_key_rows, width, 0, result, used)
                    _scatter(
                        one,
                        sink_gradients,
                        sink_stride,
                        sink_row_starts,
                        sink_row_ends,
                        size,
                        0,
                        sinks,
                        wide_strip,
                        width,
                        sink_key_sums,
                        0,
                    )
                    _scatter(
                        one,
                        sink_weights,
                        sink_stride,
                        sink_row_starts,
                        sink_row_ends,
                        size,
                        0,
                        sinks,
                        wide_out_strip,
                        width,
                        sink_value_sums,
                        0,
                    )
                for i in range(size):
                    target = head_at[5] + slots[start + i] * strides[5, 3]
                    _unpack_row(result[i * width :], kind.type(scale), query_grad, target, strides[5, 4], depth)
                start = stop
        _flush(
            key_sums, width, base, key_end - base, key_slots, key_grad, kv_at[6], strides[6], depth, kind.type(LN2)
        )
        _flush(value_sums, width, base, key_end - base, key_slots, value_grad, kv_at[7], strides[7], depth, one)
        _flush(sink_key_sums, width, segment, sinks, key_slots, key_grad, kv_at[6], strides[6], depth, kind.type(LN2))
        _flush(sink_value_sums, width, segment, sinks, key_slots, value_grad, kv_at[7], strides[7], depth, one)
