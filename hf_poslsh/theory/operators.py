"""L, the mean mask M~ and their difference as linear operators: nothing of size n x n is ever made.

A product with L takes O(n) by its recursion, one with M~ takes O(n + number of bins) by sums over bins. Norms come
from SciPy's Lanczos. One head at a time; float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numba import njit
from scipy import optimize
from scipy.sparse import linalg

from hf_poslsh.hashing import PositionalHash, last_in_bin

_DENSE = 32  # positions; below, a norm is taken of the matrix itself


class BiasOperator(linalg.LinearOperator):
    """A square matrix over positions, known by its products with vectors.

    Args:
        n: number of positions.
        product: computes ``A x`` of a float64 vector ``(n,)``.
        transposed: computes ``A^T x``; the same function if the matrix is symmetric.
    """

    def __init__(
        self,
        n: int,
        product: Callable[[np.ndarray], np.ndarray],
        transposed: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        super().__init__(np.float64, (n, n))
        self.symmetric = product is transposed
        self._product, self._transposed = product, transposed

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._product(np.ascontiguousarray(x, dtype=np.float64).ravel())

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._transposed(np.ascontiguousarray(x, dtype=np.float64).ravel())


def kernel_operator(n: int, sigma: float, causal: bool = False) -> BiasOperator:
    """L with ``L_ij = e^{-|i-j|/sigma}``, or its lower triangle.

    Derivation: with ``a = e^{-1/sigma}``, ``f_i = sum_{j<=i} a^{i-j} x_j`` obeys ``f_i = x_i + a f_{i-1}``, and so
    does the sum over ``j >= i`` from the other end. The two share the term j = i.

    Args:
        n: number of positions.
        sigma: length scale in positions.
        causal: only ``j <= i``.

    Returns:
        An operator of shape ``(n, n)``, O(n) per product.
    """
    decay = math.exp(-1.0 / _checked(n, sigma))

    def forward(x: np.ndarray) -> np.ndarray:
        return _decayed_sums(x, decay)

    def backward(x: np.ndarray) -> np.ndarray:
        return _decayed_sums(x[::-1], decay)[::-1]

    def both(x: np.ndarray) -> np.ndarray:
        return forward(x) + backward(x) - x

    return BiasOperator(n, forward, backward) if causal else BiasOperator(n, both, both)


def mask_operator(hashes: PositionalHash, n: int, head: int = 0, causal: bool = False) -> BiasOperator:
    """M~ of given draws, or its lower triangle.

    Derivation: with prefix sums ``P_i = sum_{j<i} x_j`` the sum over a bin ``[b, e)`` is ``P_e - P_b``, the same for
    all rows of the bin, so that one number enters at b and leaves at e. Causal rows take ``P_{i+1} - P_b``, columns
    ``P_e - P_j``: again what depends on the bin changes at its border only. A hash costs one step per bin.

    Args:
        hashes: the draws.
        n: number of positions, below 2**31.
        head: which head.
        causal: only ``j <= i``.

    Returns:
        An operator of shape ``(n, n)``, O(n + bins) per product; about ``s n / sigma`` bins are kept (4 bytes each).
    """
    _checked(n, 1.0)
    starts, offsets = bin_starts(hashes, n, head)

    def both(x: np.ndarray) -> np.ndarray:
        return _bin_sums(x, starts, offsets)

    def rows(x: np.ndarray) -> np.ndarray:
        return _sums_to_the_left(x, starts, offsets)

    def columns(x: np.ndarray) -> np.ndarray:
        return _sums_to_the_right(x, starts, offsets)

    return BiasOperator(n, rows, columns) if causal else BiasOperator(n, both, both)


def error_operator(hashes: PositionalHash, n: int, sigma: float, head: int = 0, causal: bool = False) -> BiasOperator:
    """``M~ - L``, symmetric or lower triangular; arguments as for its two parts."""
    mask, kernel = mask_operator(hashes, n, head, causal), kernel_operator(n, sigma, causal)

    def product(x: np.ndarray) -> np.ndarray:
        return mask._product(x) - kernel._product(x)

    def transposed(x: np.ndarray) -> np.ndarray:
        return mask._transposed(x) - kernel._transposed(x)

    return BiasOperator(n, product, transposed if causal else product)


def spectral_norm(operator: BiasOperator, tolerance: float = 1e-3, seed: int = 0) -> float:
    """Largest singular value, by SciPy's Lanczos (``eigsh``; ``svds`` where the matrix is not symmetric).

    Args:
        operator: from this module.
        tolerance: relative accuracy at which Lanczos stops. It comes from below: the result is never larger than
            the norm, rounding aside.
        seed: of the start vector; the same seed gives the same result.

    Returns:
        The norm.
    """
    n = operator.shape[0]
    if n <= _DENSE:
        return float(np.linalg.norm(operator @ np.eye(n), 2))
    start = np.random.default_rng(seed).standard_normal(n)
    if not np.any(operator.matvec(start)):
        return 0.0  # Lanczos refuses the zero matrix
    if operator.symmetric:
        value = linalg.eigsh(operator, k=1, v0=start, tol=tolerance, return_eigenvectors=False)
    else:
        value = linalg.svds(operator, k=1, v0=start, tol=tolerance, return_singular_vectors=False)
    return float(abs(value[0]))


def kernel_norm(n: int, sigma: float) -> float:
    """Spectral norm of the symmetric L, exactly, in O(1).

    L is the Kac-Murdock-Szegoe matrix: with ``a = e^{-1/sigma}`` its largest eigenvalue is
    ``(1 - a^2) / ((1 - a)^2 + 4 a sin^2(t / 2))``, t the root of
    ``sin((n+1) t) - 2 a sin(n t) + a^2 sin((n-1) t)`` between 0 and ``pi / (n + 1)`` (Grenander and Szegoe 1958).
    It grows with n to ``coth(1 / (2 sigma))``, see ``bounds.kernel_norm_limit``.
    """
    a = math.exp(-1.0 / _checked(n, sigma))
    if n == 1 or a == 0.0:
        return 1.0

    def characteristic(t: float) -> float:
        return math.sin((n + 1) * t) - 2 * a * math.sin(n * t) + a * a * math.sin((n - 1) * t)

    t = optimize.brentq(characteristic, 1e-9 / n, math.pi / (n + 1), xtol=1e-18, rtol=1e-14)
    gap = -math.expm1(-1.0 / sigma)
    return -math.expm1(-2.0 / sigma) / (gap**2 + 4 * a * math.sin(t / 2) ** 2)


def bin_starts(hashes: PositionalHash, n: int, head: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """First positions of the non-empty bins over positions 0 .. n-1.

    Returns:
        ``starts`` int32 ``(bins,)``, those of each hash in turn, ascending, the first one 0; and ``offsets`` int64
        ``(s + 1,)``: the bins of hash r are ``starts[offsets[r]:offsets[r + 1]]``.
    """
    if not 0 <= head < hashes.num_heads:
        raise ValueError(f"head is {head}; the hashes have heads 0 to {hashes.num_heads - 1}.")
    offsets = np.zeros(hashes.num_samples + 1, dtype=np.int64)
    most = np.minimum(n, np.ceil(n / hashes.widths[head]) + 1)
    starts = np.empty(int(most.sum()), dtype=np.int32)
    _find_bins(n, hashes.widths[head], hashes.shifts[head], offsets, starts)
    return starts[: offsets[-1]], offsets


def _checked(n: int, sigma: float) -> float:
    if not 1 <= n < 2**31:
        raise ValueError(f"n is {n}; it must be a number of positions from 1 to 2**31 - 1.")
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"sigma is {sigma}; it must be a positive finite length scale in positions.")
    return float(sigma)


@njit(cache=True, nogil=True)
def _find_bins(n, widths, shifts, offsets, starts):
    count = 0
    for r in range(widths.size):
        position = np.int64(0)
        while position < n:
            starts[count] = position
            count += 1
            position = position + 1 if widths[r] <= 1.0 else last_in_bin(position, widths[r], shifts[r]) + 1
        offsets[r + 1] = count


@njit(cache=True, nogil=True)
def _decayed_sums(x, decay):
    out = np.empty(x.size)
    total = 0.0
    for i in range(x.size):
        total = x[i] + decay * total
        out[i] = total
    return out


@njit(cache=True, nogil=True)
def _prefix(x):
    prefix = np.empty(x.size + 1)
    prefix[0] = 0.0
    for i in range(x.size):
        prefix[i + 1] = prefix[i] + x[i]
    return prefix


@njit(cache=True, nogil=True)
def _bin_sums(x, starts, offsets):
    n, samples = x.size, offsets.size - 1
    prefix = _prefix(x)
    change = np.zeros(n + 1)
    for r in range(samples):
        for k in range(offsets[r], offsets[r + 1]):
            first = starts[k]
            end = starts[k + 1] if k + 1 < offsets[r + 1] else n
            total = prefix[end] - prefix[first]
            change[first] += total
            change[end] -= total
    out = np.empty(n)
    running = 0.0
    for i in range(n):
        running += change[i]
        out[i] = running / samples
    return out


@njit(cache=True, nogil=True)
def _sums_to_the_left(x, starts, offsets):
    n, samples = x.size, offsets.size - 1
    prefix = _prefix(x)
    change = np.zeros(n)  # of the sum over hashes of the prefix sum at the bin's first position
    for r in range(samples):
        for k in range(offsets[r] + 1, offsets[r + 1]):
            change[starts[k]] += prefix[starts[k]] - prefix[starts[k - 1]]
    out = np.empty(n)
    running = 0.0
    for i in range(n):
        running += change[i]
        out[i] = prefix[i + 1] - running / samples
    return out


@njit(cache=True, nogil=True)
def _sums_to_the_right(x, starts, offsets):
    n, samples = x.size, offsets.size - 1
    prefix = _prefix(x)
    change = np.zeros(n)  # of the sum over hashes of the prefix sum at the bin's end
    for r in range(samples):
        before = 0.0
        for k in range(offsets[r], offsets[r + 1]):
            end = prefix[starts[k + 1]] if k + 1 < offsets[r + 1] else prefix[n]
            change[starts[k]] += end - before
            before = end
    out = np.empty(n)
    running = 0.0
    for i in range(n):
        running += change[i]
        out[i] = running / samples - prefix[i]
    return out
