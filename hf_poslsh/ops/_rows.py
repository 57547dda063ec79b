"""The parts of the CPU kernel: bins of the current query, visible keys, packed rows, products of a strip.

Arrays are flat. A *strip* is ``STRIP`` query rows; its columns are packed keys, counted from the strip's origin.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hf_poslsh.hashing import first_in_bin, last_in_bin
from hf_poslsh.ops._scratch import GROUPS, STRIP, jit, round_up
from hf_poslsh.ops._simd import BLOCK, LANES, ROWS, address, multiply, multiply_add
from hf_poslsh.ops._tokens import first_key, host_interval, last_seen

PAD = -3e38  # a score that weighs nothing
# Sums may be reordered; NaN and inf keep their meaning.
_fast_jit = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})


# --- bins -------------------------------------------------------------------------------------------------


@jit
def _add(count, start, end, amount):
    for j in range(np.uint64(max(start, 0)), np.uint64(min(max(end, 0), count.size))):
        count[j] += amount


@jit
def enter_bins(position, start, end, key_positions, widths, shifts, bins, seen, count, base):
    """Moves every hash whose bin ended on to the bin of ``position``; to be called where it is beyond ``seen[2]``.

    ``start`` and ``end`` bound the keys of the query's document. ``bins`` is int64 ``(3, s)``: first and end key
    of each hash's current bin, and its last position. ``seen`` is int64 ``(3,)``: the interval of keys in any
    bin, and the position at which the first bin ends. ``count[0]`` belongs to the key ``base``.
    """
    one = count.dtype.type(1)
    low, high, last = end, start, np.int64(2**62)
    for r in range(widths.size):
        if position > bins[2, r]:
            _add(count, bins[0, r] - base, bins[1, r] - base, -one)
            first = position
            if position != bins[2, r] + 1:
                first = first_in_bin(position, widths[r], shifts[r])
            bins[2, r] = last_in_bin(position, widths[r], shifts[r])
            bins[0, r] = first_key(key_positions, start, end, first)
            bins[1, r] = first_key(key_positions, start, end, bins[2, r] + 1)
            _add(count, bins[0, r] - base, bins[1, r] - base, one)
        low, high, last = min(low, bins[0, r]), max(high, bins[1, r]), min(last, bins[2, r])
    seen[0], seen[1], seen[2] = low, high, last


@jit
def leave_bins(bins, seen):
    """Marks the bins as those of another document; their counts are taken back when the next one is entered."""
    bins[2] = -1
    seen[2] = -1


@jit
def visible(position, start, end, key_positions, low, high, reach, causal, window, chunk):
    """Interval of visible keys of one query, given the interval of keys in any of its bins."""
    first, last = host_interval(position, window, chunk)
    low = max(low, first_key(key_positions, start, end, max(first, position - reach + 1)))
    if not causal:
        position = min(last, position + reach - 1)
    return low, min(high, first_key(key_positions, start, end, position + 1))


@jit
def visible_sinks(position, start, sinks, key_positions, causal, window, chunk):
    """Interval of the document's ``sinks`` that one query sees, counted from the document's first key."""
    first, last = host_interval(position, window, chunk)
    low = first_key(key_positions, start, start + sinks, first) - start
    high = first_key(key_positions, start, start + sinks, (position if causal else last) + 1) - start
    return low, max(low, high)


@jit
def strip_end(start, end, query_keys):
    """End of the strip from ``start``: at most STRIP rows, all of one document."""
    stop = min(start + STRIP, end)
    while query_keys[stop - 1, 0] != query_keys[start, 0] or query_keys[stop - 1, 1] != query_keys[start, 1]:
        stop -= 1
    return stop


@jit
def end_groups(
    start, stop, query_positions, first, end, key_positions, widths, shifts, reach, causal, window, chunk, origin,
    ends,
):  # fmt: skip
    """Last column that each group of rows may see, counted from the packed key ``origin``."""
    for group in range(GROUPS):
        row = min(start + (group + 1) * ROWS, stop) - 1
        seen = last_seen(
            query_positions[row], first, end, key_positions, widths, shifts, reach, causal, window, chunk
        )
        ends[group] = max(seen - origin, 0)


# --- rows in and out --------------------------------------------------------------------------------------


@jit
def pack_panels(source, offset, stride, depth_stride, slots, start, end, depth, panels):
    """Rows ``slots[start:end]`` of a tensor, transposed in blocks: ``panels[block, d, lane]``, zero-padded."""
    for block in range((end - start + BLOCK - 1) // BLOCK):
        base = block * depth * BLOCK
        for lane in range(BLOCK):
            index = start + block * BLOCK + lane
            if index < end:
                row = offset + slots[index] * stride
                for d in range(depth):
                    panels[np.uint64(base + d * BLOCK + lane)] = source[np.uint64(row + d * depth_stride)]
            else:
                for d in range(depth):
                    panels[np.uint64(base + d * BLOCK + lane)] = 0


@jit
def pack_rows(source, offset, stride, depth_stride, slots, start, end, depth, factor, rows, width):
    """Rows ``slots[start:end]`` of a tensor times ``factor``, one after another, ``width`` apart."""
    for index in range(start, end):
        _copy_row(
            source, offset + slots[index] * stride, depth_stride, rows, (index - start) * width, 1, depth, factor
        )


@jit
def consecutive(slots, start, end):
    """Whether ``slots[start:end]`` are neighbours in the tensor."""
    return end <= start or slots[end - 1] - slots[start] == end - 1 - start


@jit
def unpack_row(rows, index, width, factor, target, offset, depth_stride, depth):
    """Writes one packed row times ``factor`` to a tensor."""
    _copy_row(rows, index * width, 1, target, offset, depth_stride, depth, factor)


@jit
def _copy_row(source, source_at, source_stride, target, target_at, target_stride, depth, factor):
    if source_stride == 1 and target_stride == 1:
        ahead = np.uint64(target_at) - np.uint64(source_at)
        for i in range(np.uint64(source_at), np.uint64(source_at + depth)):
            target[i + ahead] = source[i] * factor
    else:
        for d in range(depth):
            target[np.uint64(target_at + d * target_stride)] = (
                source[np.uint64(source_at + d * source_stride)] * factor
            )


@jit
def add_rows(sums, width, slots, start, end, gradient, offset, stride, depth_stride, depth, factor):
    """Adds packed rows times ``factor`` to the rows ``slots[start:end]`` of a gradient."""
    for index in range(start, end):
        target = offset + slots[index] * stride
        for d in range(depth):
            gradient[target + d * depth_stride] += sums[(index - start) * width + d] * factor


@jit
def clear(array, start, end):
    """Zeros on [start, end)."""
    for j in range(np.uint64(start), np.uint64(max(start, end))):
        array[j] = 0


@jit
def turn_row(source, source_at, turns, turns_at, sign, rules, target, target_at):
    """Writes a packed row, turned by ``turns[turns_at]`` (back, if ``sign`` is -1); it may stand where it stood."""
    pairs, offset = rules.pairs, rules.pair_offset
    cosines, sines, first = np.uint64(turns_at), np.uint64(turns_at + pairs), np.uint64(source_at)
    second, to_first, to_second = np.uint64(source_at + offset), np.uint64(target_at), np.uint64(target_at + offset)
    if rules.pair_step == 1:  # apart, so that the compiler sees that a vector at a time will do
        for m in range(np.uint64(pairs)):
            cos, sin, a, b = turns[cosines + m], sign * turns[sines + m], source[first + m], source[second + m]
            target[to_first + m] = a * cos - b * sin
            target[to_second + m] = b * cos + a * sin
    else:
        for m in range(np.uint64(pairs)):
            at = np.uint64(2) * m
            cos, sin, a, b = turns[cosines + m], sign * turns[sines + m], source[first + at], source[second + at]
            target[to_first + at] = a * cos - b * sin
            target[to_second + at] = b * cos + a * sin
    for d in range(2 * pairs, rules.depth):
        target[target_at + d] = source[source_at + d]


@jit
def turn_panels(panels, positions, start, end, turns, rules, turned):
    """The sinks ``start`` to ``end`` in the panels ``panels``, turned to position 0, to the panels ``turned``."""
    pairs, step, offset = rules.pairs, rules.pair_step, rules.pair_offset
    turned[:] = panels
    for index in range(start, end):
        block, lane = (index - start) // BLOCK, (index - start) % BLOCK
        base, at = block * rules.depth * BLOCK + lane, positions[index] * 2 * pairs
        for m in range(pairs):
            first, second = base + m * step * BLOCK, base + (m * step + offset) * BLOCK
            cos, sin = turns[at + m], turns[at + pairs + m]
            turned[first] = panels[first] * cos - panels[second] * sin
            turned[second] = panels[second] * cos + panels[first] * sin


@jit
def copy(source, start, end, target):
    """target[start:end] = source[start:end]."""
    for j in range(np.uint64(start), np.uint64(end)):
        target[j] = source[j]


# --- one row of a strip -----------------------------------------------------------------------------------


@jit
def pad(scores, start, end):
    """Writes PAD behind ``end`` up to the last vector; the number of vectors from ``start`` on.

    So the vector loops leave no scalar remainder, which would cost a short row more than all the rest.
    """
    vectors = (end - start + LANES - 1) // LANES
    for j in range(np.uint64(end), np.uint64(start + vectors * LANES)):
        scores[j] = PAD
    return vectors


@_fast_jit
def subtract_slope(scores, start, end, slope, position, key_positions, first):
    """scores[j] -= slope * distance, where column ``start`` is the key ``first``."""
    ahead = np.uint64(first) - np.uint64(start)
    for j in range(np.uint64(start), np.uint64(end)):
        scores[j] -= slope * scores.dtype.type(abs(position - key_positions[j + ahead]))


@_fast_jit
def score_gradient(gradients, weights, start, end, delta):
    """gradients[j] = weights[j] * (gradients[j] - delta)."""
    for j in range(np.uint64(start), np.uint64(end)):
        gradients[j] = weights[j] * (gradients[j] - delta)


@jit
def clear_around(array, line, start, end, group_start, group_end):
    """Zeros in a row outside [start, end), over the blocks of keys that its group computes with."""
    stop = line + round_up(group_end, ROWS)
    clear(array, line + group_start // ROWS * ROWS, min(start, stop))
    clear(array, end, stop)


# --- products of a strip ----------------------------------------------------------------------------------


@jit
def score(one, strip, depth, panels, first_panel, scores, stride, groups, ends):
    """scores[row, key] = strip @ panels, for every group of rows up to its last column."""
    for panel in range((ends[groups - 1] + BLOCK - 1) // BLOCK):
        for group in range(groups):
            if panel * BLOCK < ends[group]:
                multiply(
                    one, address(strip, group * ROWS * depth), depth, 1,
                    address(panels, (first_panel + panel) * depth * BLOCK), BLOCK,
                    address(scores, group * ROWS * stride + panel * BLOCK), stride, depth,
                )  # fmt: skip


@jit
def gather(one, weights, stride, starts, ends, rows, rows_at, row_length, out, width, groups):
    """out[row, d] += weights @ rows, every group of rows over its own columns; ``rows_at`` is that of column 0."""
    for group in range(groups):
        depth = ends[group] - starts[group]
        if depth > 0:
            for d in range(0, width, BLOCK):
                multiply_add(
                    one, address(weights, group * ROWS * stride + starts[group]), stride, 1,
                    address(rows, rows_at + starts[group] * row_length + d), row_length,
                    address(out, group * ROWS * width + d), width, depth,
                )  # fmt: skip


@jit
def scatter(one, weights, stride, row_starts, row_ends, rows, strip, width, out, first_row):
    """out[key, d] += weights^T @ strip, every group of keys over the rows that see any of it."""
    low = high = 0
    for key in range(row_starts[0] // ROWS * ROWS, row_ends[rows - 1], ROWS):
        while low < rows and row_ends[low] <= key:
            low += 1
        high = max(high, low)
        while high < rows and row_starts[high] < key + ROWS:
            high += 1
        if high > low:
            for d in range(0, width, BLOCK):
                multiply_add(
                    one, address(weights, low * stride + key), 1, stride,
                    address(strip, low * width + d), width,
                    address(out, (first_row + key) * width + d), width, high - low,
                )  # fmt: skip
