"""Attention outputs of one head under any bias, dense in float64, and how far one is from another. NumPy."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from hf_poslsh.hashing import PositionalHash, last_in_bin
from hf_poslsh.theory.norms import ErrorNorms
from hf_poslsh.theory.operators import BiasOperator, bin_starts, spectral_norm


class OutputErrors(NamedTuple):
    """How far outputs are from the exact ones; relative to those, row by row where it says row.

    Args:
        frobenius: Frobenius norm of the difference over that of the exact outputs.
        largest: largest absolute difference of a number, not relative.
        row_median: median over rows of |difference| / |exact|.
        row_90: the same, 90th percentile.
        row_99: the same, 99th percentile.
        cosine: mean over rows of the cosine between the two.
    """

    frobenius: float
    largest: float
    row_median: float
    row_90: float
    row_99: float
    cosine: float


def output_errors(approximate: np.ndarray, exact: np.ndarray) -> OutputErrors:
    """Compares outputs ``(n, D)``."""
    difference = np.linalg.norm(approximate - exact, axis=1)
    sizes = np.linalg.norm(exact, axis=1), np.linalg.norm(approximate, axis=1)
    tiny = np.finfo(np.float64).tiny
    rows = difference / np.maximum(sizes[0], tiny)
    cosine = np.sum(approximate * exact, axis=1) / np.maximum(sizes[0] * sizes[1], tiny)
    median, high, highest = (float(value) for value in np.quantile(rows, (0.5, 0.9, 0.99)))
    return OutputErrors(
        float(np.linalg.norm(difference) / max(np.linalg.norm(sizes[0]), tiny)),
        float(np.abs(approximate - exact).max()),
        median,
        high,
        highest,
        float(cosine.mean()),
    )


def score_weights(query: np.ndarray, key: np.ndarray, scale: float, causal: bool = True) -> np.ndarray:
    """``e^{s_ij - max_j s_ij}`` over the allowed pairs of one head: float64 ``(n, n)`` of query, key ``(n, D)``."""
    scores = np.asarray(query, dtype=np.float64) @ np.asarray(key, dtype=np.float64).T * scale
    if causal:
        scores[np.triu_indices(len(scores), 1)] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    return np.exp(scores, out=scores)


def biased_output(weights: np.ndarray, bias: np.ndarray, value: np.ndarray) -> np.ndarray:
    """``sum_j bias_ij w_ij v_j / sum_j bias_ij w_ij``: ``(n, D)``; weights and bias ``(n, n)``, value ``(n, D)``."""
    biased = weights * bias
    return biased @ value / biased.sum(axis=1, keepdims=True)


def kernel_matrix(n: int, sigma: float, window: int | None = None) -> np.ndarray:
    """L, dense, 0 from distance ``window`` on: float64 ``(n, n)``, not causal."""
    distance = np.arange(n)
    powers = np.exp(-distance / sigma)
    if window is not None:
        powers[window:] = 0.0
    return powers[np.abs(np.subtract.outer(distance, distance))]


def mask_matrix(hashes: PositionalHash, n: int, head: int = 0) -> np.ndarray:
    """M~ of one head, dense: float64 ``(n, n)``, not causal.

    In O(n^2 + s n), for s up to 10^5 and more: a bin ``[b, e)`` adds 1 to row b and -1 to row e in each of its
    columns; sums down the columns then count the bins that hold a pair.
    """
    borders = _borders(n, hashes.widths[head], hashes.shifts[head])
    return np.cumsum(borders[:n], axis=0) / hashes.num_samples


def matrix_errors(matrix: np.ndarray, exact: np.ndarray) -> ErrorNorms:
    """``error_norms`` of dense matrices ``(n, n)``, for s so large that a list of all bins takes more room."""
    error = matrix - exact
    frobenius = float(np.linalg.norm(error))
    pairs = np.count_nonzero(exact) - len(exact)
    return ErrorNorms(float(np.abs(error).max()), frobenius, frobenius / math.sqrt(max(pairs, 1)))


def matrix_norm(matrix: np.ndarray) -> float:
    """Spectral norm of a dense matrix ``(n, n)`` by Lanczos, see ``spectral_norm``."""
    return spectral_norm(BiasOperator(len(matrix), lambda x: matrix @ x, lambda x: matrix.T @ x))


def mean_estimator_output(
    weights: np.ndarray, hashes: PositionalHash, value: np.ndarray, head: int = 0
) -> np.ndarray:
    """The ``mean`` estimator: the average over hashes of the attention inside their bins. Arguments as above."""
    n = len(weights)
    starts, offsets = bin_starts(hashes, n, head)
    out = np.zeros_like(value, dtype=np.float64)
    for r in range(hashes.num_samples):
        borders = np.append(starts[offsets[r] : offsets[r + 1]], n)
        for first, end in itertools.pairwise(borders):
            block = weights[first:end, first:end]
            out[first:end] += block @ value[first:end] / block.sum(axis=1, keepdims=True)
    return out / hashes.num_samples


def equal_window(keys: float, n: int) -> int:
    """Sliding window whose mean number of visible keys over n causal queries is nearest to ``keys``.

    A window w shows ``w - w (w - 1) / (2 n)`` keys on average, which rises with w up to n.
    """
    windows = np.arange(1, n + 1)
    return int(windows[np.argmin(np.abs(windows - windows * (windows - 1) / (2 * n) - keys))])


@njit(cache=True, nogil=True)
def _borders(n, widths, shifts):
    change = np.zeros((n + 1, n))
    for r in range(widths.size):
        first = np.int64(0)
        while first < n:
            end = first + 1 if widths[r] <= 1.0 else min(last_in_bin(first, widths[r], shifts[r]) + 1, n)
            for i in range(first, end):
                change[first, i] += 1
                change[end, i] -= 1
            first = end
    return change
