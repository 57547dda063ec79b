"""Max-norm and Frobenius norm of ``M~ - L`` for given draws: exact, without the matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hf_poslsh.hashing import PositionalHash
from hf_poslsh.theory.operators import _checked, bin_starts


class ErrorNorms(NamedTuple):
    """Norms of ``M~ - L`` over the pairs asked for.

    Args:
        largest: the largest absolute entry.
        frobenius: root of the sum of the squared entries.
        rms: root of the mean of the squared entries over the ``n (n - 1)`` pairs (half of them if causal) of
            different positions; the diagonal is exact. 0 if n is 1.
    """

    largest: float
    frobenius: float
    rms: float


def error_norms(hashes: PositionalHash, n: int, sigma: float, head: int = 0, causal: bool = False) -> ErrorNorms:
    """Exact norms of ``M~ - L`` in O(bins + n * min(s, window)), memory linear in n and bins.

    Derivation: to the left of row i, ``s M~_ij`` counts the hashes whose bin of i starts at or before j: a step
    function of j that rises at the distinct left edges of i, at most ``min(s, window)`` of them. From row i - 1 to
    row i an edge moves only where a bin starts at i, and then to i itself; so the edges stay sorted in a linked
    list at one step per bin. Between two edges the entry is ``c - a^d``, ``a = e^{-1/sigma}``, with c constant and
    d = i - j: monotone in d, so its extremes are at the ends of the run, and its squares sum to
    ``c^2 len - 2 c sum a^d + sum a^{2d}``, from tables of the two power sums. Left of the first edge c is 0. The
    matrix is symmetric with a zero diagonal: the other triangle doubles the sum of squares. Rounding hides root mean
    square errors below about 1e-8.

    Args:
        hashes: the draws.
        n: number of positions.
        sigma: length scale in positions.
        head: which head.
        causal: norms of the lower triangle.

    Returns:
        See ``ErrorNorms``.
    """
    _checked(n, sigma)
    starts, offsets = bin_starts(hashes, n, head)
    before = np.empty_like(starts)
    before[1:] = starts[:-1]
    before[offsets[:-1]] = -1
    order = np.argsort(starts, kind="stable")  # merges s sorted runs
    powers = np.exp(-np.arange(n) / sigma)
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (powers, powers**2))
    largest, total = _sweep(n, starts[order], before[order], hashes.num_samples, powers, sums, squares)
    pairs = n * (n - 1) / 2
    frobenius = np.sqrt(total if causal else 2 * total)
    return ErrorNorms(float(largest), float(frobenius), float(np.sqrt(total / pairs)) if pairs else 0.0)


@njit(cache=True, nogil=True)
def _sweep(n, starts, before, samples, powers, sums, squares):
    count = np.zeros(n, dtype=np.int64)  # hashes whose current left edge is this position
    older = np.full(n, -1, dtype=np.int64)
    newer = np.full(n, -1, dtype=np.int64)
    oldest = newest = -1
    event = 0
    largest = total = 0.0
    for i in range(n):
        while event < starts.size and starts[event] == i:
            old = before[event]
            event += 1
            if old >= 0:
                count[old] -= 1
                if count[old] == 0:
                    if older[old] >= 0:
                        newer[older[old]] = newer[old]
                    else:
                        oldest = newer[old]
                    if newer[old] >= 0:
                        older[newer[old]] = older[old]
                    else:
                        newest = older[old]
            if count[i] == 0:
                older[i] = newest
                if newest >= 0:
                    newer[newest] = i
                else:
                    oldest = i
                newest = i
            count[i] += 1
        # Left of all edges.
        far = i - oldest + 1
        if oldest > 0:
            largest = max(largest, powers[far])
            total += squares[i + 1] - squares[far]
        edge, hits = oldest, 0
        while edge >= 0:
            hits += count[edge]
            level = hits / samples
            far = i - edge
            near = i - newer[edge] + 1 if newer[edge] >= 0 else 1  # the diagonal has no error
            if far >= near:
                largest = max(largest, abs(level - powers[far]), abs(level - powers[near]))
                length, first, second = far - near + 1, sums[far + 1] - sums[near], squares[far + 1] - squares[near]
                total += max(level * level * length - 2 * level * first + second, 0.0)
            edge = newer[edge]
    return largest, total
