"""From the error of the bias matrix to the error of the attention output, on given queries, keys and values.

One head, causal, NumPy. With ``w_ij = e^{s_ij - max_j s_ij}`` (a row's scale cancels), ``Z_i = sum_j L_ij w_ij`` and
``Z~_i`` the same with M~: ``out_i = sum_j L_ij w_ij v_j / Z_i``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hf_poslsh.hashing import PositionalHash
from hf_poslsh.theory.operators import _checked


class RowSums(NamedTuple):
    """Sums of a row's weights; the largest plain weight of a row is 1. Each float64 ``(n,)``.

    Args:
        plain: ``sum_j w_ij``.
        kernel: ``Z_i``, weighted by L.
        mask: ``Z~_i``, weighted by M~.
        error: ``sum_j |M~ - L|_ij w_ij``.
        largest_score: ``max_j s_ij``, what the row was scaled by.
    """

    plain: np.ndarray
    kernel: np.ndarray
    mask: np.ndarray
    error: np.ndarray
    largest_score: np.ndarray


def row_sums(
    query: np.ndarray,
    key: np.ndarray,
    hashes: PositionalHash,
    sigma: float,
    head: int = 0,
    scale: float | None = None,
    rows: int = 256,
) -> RowSums:
    """Measures the row sums that the output bounds divide by, on real activations of one head.

    Args:
        query: ``(n, D)``, as attention sees it.
        key: ``(n, D)``.
        hashes: the draws.
        sigma: length scale in positions.
        head: which head of ``hashes``.
        scale: factor of the scores; 1 / sqrt(D) if None.
        rows: rows at a time; time is O(n^2 (D + s / n)), memory O(rows n).

    Returns:
        See ``RowSums``; ``result.mask.min()`` is the minimum row sum of the biased weights.
    """
    n, dim = query.shape
    _checked(n, sigma)
    if key.shape != query.shape:
        raise ValueError(f"query has shape {query.shape} and key {key.shape}; give (n, D) of one head for both.")
    scale = 1 / math.sqrt(dim) if scale is None else scale
    query, key = np.asarray(query, dtype=np.float64), np.asarray(key, dtype=np.float64)
    one = PositionalHash(hashes.widths[[head]], hashes.shifts[[head]])
    out = np.empty((5, n))
    for start in range(0, n, rows):
        i = np.arange(start, min(start + rows, n))
        j = np.arange(i[-1] + 1)
        distance = i[:, None] - j
        scores = np.where(distance >= 0, query[i] @ key[: j.size].T * scale, -np.inf)
        top = scores.max(axis=1)
        weights = np.exp(scores - top[:, None])
        rises = np.zeros((i.size, j.size))
        np.add.at(rises, (np.arange(i.size), one.left_edges(i)[0]), 1.0 / hashes.num_samples)
        kernel = np.exp(-np.maximum(distance, 0) / sigma)
        mask = rises.cumsum(1)
        sums = [(weights * part).sum(1) for part in (kernel, mask, np.abs(mask - kernel))]
        out[:, i] = np.stack([weights.sum(1), *sums, top])
    return RowSums(*out)


def output_row_bound(sums: RowSums, radius: float, largest_error: float | None = None) -> np.ndarray:
    """Bound on ``|out~_i - out_i|`` of every row: ``radius sum_j |M~ - L|_ij w_ij / Z~_i``.

    Derivation: as ``sum_j L_ij w_ij (v_j - out_i) = 0``, exactly
    ``out~_i - out_i = sum_j (M~ - L)_ij w_ij (v_j - out_i) / Z~_i``; take norms. The same holds with Z in place of
    Z~ and out~_i in place of out_i, so the larger of the two sums may divide.

    Args:
        sums: measured row sums.
        radius: bound on ``|v_j - out_i|`` and ``|v_j - out~_i|``, e.g. the diameter of the values or twice their
            largest norm (outputs are convex combinations of values).
        largest_error: where given, the max-norm of ``M~ - L`` (measured, or bounded for draws to come) stands for
            each of its entries: ``radius ||M~ - L||_max sum_j w_ij / Z~_i``, far looser in long rows.

    Returns:
        float64 ``(n,)``.
    """
    error = sums.error if largest_error is None else largest_error * sums.plain
    return radius * error / np.maximum(sums.mask, sums.kernel)


def output_frobenius_bound(
    spectral_error: float, max_score: float, sums: RowSums, value_norm: float, largest_value: float
) -> float:
    """Bound on ``||out~ - out||_F`` from the spectral error.

    It is ``e^U ||M~ - L||_2 (||V||_F + sqrt(n) max_j |v_j|) / min_i (Z~_i e^{max_j s_ij})``.

    Derivation: with ``A = (M~ - L) * e^S`` (entry by entry) the identity in ``output_row_bound`` reads
    ``out~ - out = D^{-1} (A V - diag(A 1) out)``, D the unscaled row sums ``Z~_i e^{max_j s_ij}``; A V and A 1 are at
    most ``||A||_2 ||V||_F`` and ``||A||_2 sqrt(n)``, and ``|out_i| <= max_j |v_j|``. Further ``e^{s_ij}`` is an inner
    product of feature vectors of norms ``e^{scale |q_i|^2 / 2}`` and ``e^{scale |k_j|^2 / 2}`` (the exponential of a
    positive definite kernel); so multiplying by it entry by entry raises a spectral norm at most by the product of
    the largest ones (Schur), which is e^U, ``U = scale max|q| max|k|``, once q and k are scaled to equal norms.

    Args:
        spectral_error: ``||M~ - L||_2`` of the causal matrices.
        max_score: U.
        sums: measured row sums.
        value_norm: Frobenius norm of the values.
        largest_value: ``max_j |v_j|``.

    Returns:
        A bound for the whole matrix ``(n, D)``.
    """
    smallest = float(np.min(np.log(sums.mask) + sums.largest_score))
    values = value_norm + math.sqrt(sums.plain.size) * largest_value
    with np.errstate(over="ignore"):  # scores may be so large that nothing is known
        return float(np.exp(max_score - smallest)) * spectral_error * values
