"""Bounds on ``M~ - L`` and on what it does to the output, each with its derivation, and how many samples one needs.

Errors are absolute: divide a spectral one by ``kernel_norm_limit(sigma)`` for a relative one. n is the number of
positions, s the hashes of a head; spectral bounds are for the symmetric (non-causal) matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from hf_poslsh.theory.entries import collision_range, expected_square_error, groups
from hf_poslsh.theory.operators import _checked
from hf_poslsh.theory.work import _check_delta

_MOST_SAMPLES = 10**12


def kernel_norm_limit(sigma: float) -> float:
    """``coth(1 / (2 sigma))``, which ``||L||_2`` grows to with n and never exceeds.

    Derivation: the norm of a Toeplitz matrix is at most the maximum of its symbol
    ``sum_d e^{-|d|/sigma} cos(d w)``, here at w = 0: ``(1 + a) / (1 - a)`` with ``a = e^{-1/sigma}``.
    """
    return 1 / math.tanh(1 / (2 * sigma))


def psi(sigma: float) -> float:
    """``1 + sigma + (e^{1/sigma} + 1) / (e^{1/sigma} - 1)``, the scale of the paper's spectral bounds."""
    return 1 + sigma + kernel_norm_limit(sigma)


def paper_spectral_mean(n: int, sigma: float, samples: int) -> float:
    """The paper's ``E ||M~ - L||_2 <~ Psi (sqrt(log n / s) + log n / s)``, its hidden constant taken as 1.

    Source: the paper's theorem as its authors' scripts compute it, for iid draws. ``spectral_mean`` is a bound with
    all constants.
    """
    return psi(sigma) * (math.sqrt(math.log(n) / samples) + math.log(n) / samples)


def paper_spectral_tail(eps: float, n: int, sigma: float, samples: int) -> float:
    """The paper's ``P(||M~ - L||_2 >= eps) <= n exp(-s eps^2 / (4 Psi (4 Psi + eps)))``, at most 1.

    Source: as ``paper_spectral_mean``. It is implied by ``spectral_tail`` for n >= 3 and iid draws (derived here):
    with tau = 1 + sigma, ``Psi >= 5 tau / 3``, as coth(1 / (2 sigma)) >= max(1, 2 sigma) >= 2 tau / 3; so its
    exponent y is at most 24/44 of ours, x. Where y >= 0.84, x - y >= log 2 makes up for our factor 2; elsewhere it
    exceeds 1.
    """
    scale = 4 * psi(sigma)
    return min(1.0, math.exp(math.log(n) - samples * eps**2 / (scale * (scale + eps))))


def spectral_tail(eps: float, n: int, sigma: float, samples: int, sampler: str = "iid") -> float:
    """``P(||M~ - L||_2 >= eps) <= 2 n exp(-K eps^2 / (8 tau (3 tau + eps / 3)))``, tau = 1 + sigma, at most 1.

    K is s for iid draws and the number of groups, s / m, for staggered ones (a proof, not their true accuracy).

    Derivation: let Y_k be the mean mask of group k and X_k = Y_k - E Y_k. Masks are positive semidefinite and their
    norm is their largest bin, so ``||X_k|| <= max(||Y_k||, ||E Y_k||)`` and ``E ||X_k||^p <= 2 E (b_k + 1)^p``. With
    ``E b^l = (l + 1)! sigma^l`` the binomial theorem gives ``E (b + 1)^p <= (p + 1)! tau^p``, averaged over strata
    too. Hence ``sum_k E ||X_k||^p <= K p!/2 A^2 R^{p-2}`` with ``A^2 = 12 tau^2``, ``R = 4 tau / 3``, since
    ``(p + 1) / 3 <= (4/3)^{p-2}`` for p >= 2. That is the moment condition of the matrix Bernstein inequality
    (Tropp 2012, theorem 6.2; its proof uses the sum over k only): for K matrices of mean 0 and either sign,
    ``P(||sum X_k|| >= K eps) <= 2 n exp(-K eps^2 / (2 (A^2 + R eps)))``.

    Args:
        eps: absolute error.
        n: number of positions.
        sigma: length scale in positions.
        samples: s.
        sampler: ``"iid"`` or ``"staggered"``.

    Returns:
        A probability bound.
    """
    count, _ = groups(samples, sampler)
    tau = 1 + _checked(n, sigma)
    return min(1.0, math.exp(math.log(2 * n) - count * eps**2 / (8 * tau * (3 * tau + eps / 3))))


def spectral_mean(n: int, sigma: float, samples: int, sampler: str = "iid") -> float:
    """Bound on ``E ||M~ - L||_2``: ``tau (sqrt(24 l / K) + 8 l / (3 K))``, l = log(2 n) + 1, tau = 1 + sigma.

    Derivation: in ``spectral_tail`` an exponent u holds at ``eps = R u / K + sqrt((R u / K)^2 + 2 A^2 u / K)``, at
    most ``2 R u / K + sqrt(2 A^2 u / K)``. So the error exceeds that with u = log(2 n) + w with chance at most
    e^{-w}: it is dominated by the same with w exponential of mean 1, and the square root is concave.
    """
    count, _ = groups(samples, sampler)
    level = math.log(2 * n) + 1
    return (1 + _checked(n, sigma)) * (math.sqrt(24 * level / count) + 8 * level / (3 * count))


def max_norm_tail(eps: float, n: int, sigma: float, samples: int, sampler: str = "iid") -> float:
    """Bound on ``P(max_ij |M~_ij - L_ij| >= eps)``, at most 1.

    Derivation: a union over the ``n - d`` pairs of every distance d. An entry is the mean of K independent numbers
    in [0, 1] whose means average to L = e^{-d/sigma} (iid: s bits, s M~_ij is binomial), so by Hoeffding (1963,
    theorem 1, and 2)

        P(M~ - L >= eps) <= min( exp(-K KL(L + eps || L)), exp(-2 K^2 eps^2 / W) )

    and likewise below, KL the relative entropy of two coins and W the sum of squared ranges of the K numbers
    (``collision_range``: K for iid, far less for staggered). Both sides are 0 where ``L +- eps`` leaves [0, 1].

    Args and result: as ``spectral_tail``. O(n K), or O(n) for iid.
    """
    count, _ = groups(samples, sampler)
    _checked(n, sigma)
    if eps <= 0:
        return 1.0
    if n == 1:
        return 0.0
    distance = np.arange(1, n, dtype=np.float64)
    kernel = np.exp(-distance / sigma)
    with np.errstate(divide="ignore", invalid="ignore"):
        hoeffding = -2 * count**2 * eps**2 / collision_range(distance, sigma, samples, sampler)
        total = 0.0
        for level in (kernel + eps, kernel - eps):
            inside = (level >= 0) & (level <= 1)
            entropy = special.rel_entr(level, kernel) + special.rel_entr(1 - level, 1 - kernel)
            exponent = np.where(inside, np.minimum(-count * entropy, hoeffding), -np.inf)
            total += float(np.sum((n - distance) * np.exp(exponent)))
    return min(1.0, total)


def max_norm_bound(n: int, samples: int, delta: float) -> float:
    """Max-norm error that iid draws exceed with probability at most delta, for every sigma, in closed form.

    Derivation: Hoeffding's ``2 exp(-2 s eps^2)`` for each of ``n (n - 1) / 2`` pairs, solved for eps:
    ``sqrt(log(n (n - 1) / delta) / (2 s))``. ``max_norm_tail`` is tighter.
    """
    _check_delta(delta)
    return math.sqrt(math.log(max(n * (n - 1), 1) / delta) / (2 * samples))


def frobenius_tail(eps: float, n: int, sigma: float, samples: int, sampler: str = "iid") -> float:
    """``P(||M~ - L||_F >= eps) <= E ||M~ - L||_F^2 / eps^2`` (Markov), the mean exact for both samplers."""
    return min(1.0, expected_square_error(n, sigma, samples, sampler) / eps**2) if eps > 0 else 1.0


_TAILS: dict[str, Callable[[float, int, float, int, str], float]] = {
    "spectral": spectral_tail,
    "max": max_norm_tail,
    "frobenius": frobenius_tail,
}


def required_samples(
    eps: float, n: int, sigma: float, delta: float, norm: str = "spectral", sampler: str = "iid"
) -> int:
    """Number of hashes per head for which ``P(||M~ - L|| >= eps) <= delta`` is proved here.

    Args:
        eps: absolute error in that norm, e.g. ``0.1 * kernel_norm_limit(sigma)`` for 10 % in the spectral norm.
        n: number of positions.
        sigma: length scale in positions.
        delta: probability of a larger error.
        norm: ``"spectral"``, ``"max"`` or ``"frobenius"``.
        sampler: ``"iid"``; or ``"staggered"``, for which s = 4 m^2 is returned (K = 4 m widths, m shifts each). Its
            spectral proof counts widths only and so asks for more than iid, though it errs less.

    Returns:
        The smallest s that the tail bound of that norm accepts.

    Raises:
        ValueError: an argument is out of range, or more than 10^12 hashes were needed (10^6 for ``staggered``).
    """
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps is {eps}; it must be a positive error.")
    _check_delta(delta)
    _checked(n, sigma)
    if norm not in _TAILS:
        raise ValueError(f"norm is {norm!r}; choose one of {', '.join(_TAILS)}.")
    groups(1, sampler)
    tail = _TAILS[norm]

    def count(step: int) -> int:
        return step if sampler == "iid" else max(1, 4 * (step - 1) ** 2)

    def enough(step: int) -> bool:
        return tail(eps, n, sigma, count(step), sampler) <= delta

    most = _MOST_SAMPLES if sampler == "iid" else 501
    low, high = 0, 1  # not enough, perhaps enough
    while not enough(high):
        if high >= most:
            raise ValueError(
                f"eps = {eps}, delta = {delta} need more than {count(most)} hashes in the {norm} norm with "
                f"sampler={sampler!r}; allow a larger error, or plan with sampler='iid'."
            )
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return count(high)
