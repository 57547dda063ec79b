"""What the compiled CPU kernel is given: numbers, tables, and each thread's scratch memory.

The arrays belong to the caller. The kernel takes them without owners (``unowned``): counting references for every
query would cost more than the query.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hf_poslsh.ops._simd import BLOCK, ROWS, unowned

STRIP = 32  # query rows that share one read of the keys
GROUPS = STRIP // ROWS

jit = njit(nogil=True, cache=True)


@jit
def round_up(n, multiple):
    """Smallest multiple that is at least n."""
    return (n + multiple - 1) // multiple * multiple


@jit
def room(keys):
    """Packed keys that fit, whole blocks and one to spare."""
    return round_up(keys, BLOCK) + BLOCK


@jit
def row_stride(keys):
    """Columns from one row of a strip to the next; the 16 keep rows off the same cache set."""
    return room(keys) + 16


class Rules(NamedTuple):
    """The numbers of a call."""

    heads: int
    kv_heads: int
    queries: int
    depth: int
    stride: int  # columns from row to row of a strip, of the item's keys and of the sinks
    sink_stride: int
    sink_tokens: int
    causal: bool
    window: int
    chunk: int
    scale: float
    max_distance: int  # UNLIMITED: no query is turned
    pairs: int  # of dimensions that are turned: m * pair_step and pair_offset behind it
    pair_step: int
    pair_offset: int


class Tables(NamedTuple):
    """The bias of every head and the tokens of every row; see ``PositionBias``, ``Tokens``, ``Turns``."""

    widths: np.ndarray
    shifts: np.ndarray
    slopes: np.ndarray
    reach: np.ndarray
    query_slot: np.ndarray
    query_position: np.ndarray
    query_keys: np.ndarray
    key_slot: np.ndarray
    key_position: np.ndarray
    query_turns: np.ndarray  # (rows, Q 2 pairs), see ``Turns``
    sink_turns: np.ndarray  # (sinks 2 pairs,)


class Scratch(NamedTuple):
    """Memory of one thread for a strip of queries."""

    strip: np.ndarray  # queries [row, d], scaled
    out_strip: np.ndarray  # gradient of the output [row, d] (backward)
    wide_strip: np.ndarray  # the same two, padded to whole blocks (backward)
    wide_out_strip: np.ndarray
    result: np.ndarray  # output, or gradient of the queries [row, d]
    far_strip: np.ndarray  # queries turned to the largest distance [row, d]; padded to whole blocks (backward)
    far_wide_strip: np.ndarray
    far_result: np.ndarray  # gradient of the turned queries [row, d] (backward)
    bins: np.ndarray
    seen: np.ndarray
    tops: np.ndarray
    totals: np.ndarray


def make_scratch(depth: int, samples: int, dtype: np.dtype) -> Scratch:
    """Scratch memory for heads of ``depth`` dimensions and ``samples`` hashes."""
    width = round_up(depth, BLOCK)
    strips = [np.zeros(STRIP * n, dtype) for n in (depth, depth, width, width, width, depth, width, width)]
    tops = [np.zeros(STRIP, np.float64) for _ in range(2)]
    return Scratch(*strips, np.zeros((3, samples), np.int64), np.zeros(3, np.int64), *tops)


@jit
def lend(t, s):
    """Tables and scratch memory without owners."""
    tables = Tables(
        unowned(t.widths), unowned(t.shifts), unowned(t.slopes), unowned(t.reach), unowned(t.query_slot),
        unowned(t.query_position), unowned(t.query_keys), unowned(t.key_slot), unowned(t.key_position),
        unowned(t.query_turns), unowned(t.sink_turns),
    )  # fmt: skip
    scratch = Scratch(
        unowned(s.strip), unowned(s.out_strip), unowned(s.wide_strip), unowned(s.wide_out_strip),
        unowned(s.result), unowned(s.far_strip), unowned(s.far_wide_strip), unowned(s.far_result),
        unowned(s.bins), unowned(s.seen), unowned(s.tops), unowned(s.totals),
    )  # fmt: skip
    return tables, scratch


class Columns(NamedTuple):
    """Packed keys and what a strip of queries computes with them; every thread has its own.

    One such set serves the keys of an item, a second one the sinks of a document, a third one the same sinks turned
    to position 0. Sizes: see ``make_columns``.
    """

    panels: np.ndarray  # keys, transposed in blocks: [block, d, lane]
    value_panels: np.ndarray  # values likewise (backward)
    rows: np.ndarray  # values [key, d] in the forward pass, keys in the backward pass
    key_sums: np.ndarray  # gradient of the keys [key, d] (backward)
    value_sums: np.ndarray  # gradient of the values [key, d] (backward)
    weights: np.ndarray  # scores, then weights [row, key]
    gradients: np.ndarray  # gradient of the weights, then of the scores [row, key] (backward)
    counts: np.ndarray  # hashes that hold each key with the current query
    row_starts: np.ndarray  # first column that each row of the strip sees
    row_ends: np.ndarray
    starts: np.ndarray  # first column that each group of ROWS rows sees
    ends: np.ndarray


def make_columns(keys: int, depth: int, dtype: np.dtype, backward: bool) -> Columns:
    """Scratch memory for at most ``keys`` packed keys of ``depth`` dimensions."""
    padded, width, stride = room(keys), round_up(depth, BLOCK), row_stride(keys)
    extra = int(backward)
    sizes = [padded * depth, extra * padded * depth, padded * width, *[extra * padded * width] * 2]
    sizes += [STRIP * stride, extra * STRIP * stride, padded]
    integers = [np.empty(n, np.int64) for n in (STRIP, STRIP, GROUPS, GROUPS)]
    return Columns(*(np.zeros(n, dtype) for n in sizes), *integers)


@jit
def lend_columns(c):
    """The same memory without owners."""
    return Columns(
        unowned(c.panels), unowned(c.value_panels), unowned(c.rows), unowned(c.key_sums), unowned(c.value_sums),
        unowned(c.weights), unowned(c.gradients), unowned(c.counts), unowned(c.row_starts), unowned(c.row_ends),
        unowned(c.starts), unowned(c.ends),
    )  # fmt: skip
