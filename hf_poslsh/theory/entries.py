"""The law of one entry of M~ over the draws: its variance and the chance that it is 0, for both samplers, exactly.

Notation: d the distance of a pair, L = e^{-d/sigma} its kernel value, s = K m the hashes: K widths, each with m
shifts (``iid``: m = 1 and every width from the whole law; ``staggered``: one width from each of K equal-probability
strata). p(b) = max(0, 1 - d/b) is the chance that a pair shares a bin of width b under a uniform shift. Widths are
in units of sigma, x = b / sigma, with density x e^{-x}, and t = d / sigma.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from hf_poslsh.hashing import staggered_copies


def groups(samples: int, sampler: str) -> tuple[int, int]:
    """K and m: the number of independent widths, and how many shifts share one."""
    if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 1:
        raise ValueError(f"samples is {samples!r}; it must be an integer of at least 1.")
    if sampler not in ("iid", "staggered"):
        raise ValueError(f"sampler is {sampler!r}; choose staggered or iid.")
    copies = 1 if sampler == "iid" else staggered_copies(int(samples))
    return int(samples) // copies, copies


def entry_variance(
    distance: np.ndarray | float, sigma: float, samples: int, sampler: str = "staggered"
) -> np.ndarray:
    """Variance of an entry of M~ over the draws, exactly.

    ``iid``: s M~_ij is binomial(s, L), so ``L (1 - L) / s``.

    ``staggered`` (derived here): the groups are independent, so ``Var = K^-2 sum_k Var(Y_k)``, Y_k the share of the
    m hashes of group k under which the pair collides. Given the width, the pair collides where the shift falls on an
    arc of length b - d of a circle of length b, and m shifts b/m apart hit it floor(m p) or ceil(m p) times, m p on
    average: with f the fractional part of m p, ``Var(Y_k | b) = f (1 - f) / m^2``. Hence

        Var = 1/(K m^2) E[f (1 - f)] + K^-2 sum_k Var(p(b) | stratum k)

    Both parts are integrals of 1, p and p^2 over x e^{-x} between break points of l = floor(m p) or of the strata:
    for x >= t, the integrals of x e^{-x}, (x - t) e^{-x} and (x - t)^2 / x e^{-x} from x to infinity are
    (1 + x) e^{-x}, (1 + x - t) e^{-x} and (1 + x - 2t) e^{-x} + t^2 E_1(x).

    Args:
        distance: d in positions, any shape.
        sigma: length scale in positions.
        samples: s.
        sampler: ``"staggered"`` or ``"iid"``.

    Returns:
        float64 array of the shape of ``distance``.
    """
    count, copies = groups(samples, sampler)
    t = np.asarray(distance, dtype=np.float64) / sigma
    if sampler == "iid":
        return np.exp(-t) * -np.expm1(-t) / samples
    positive = np.where(t > 0, t, 1.0)
    shifts = np.zeros_like(positive)
    for level in range(copies):
        i0, i1, i2 = _integrals(positive, positive / (1 - level / copies), _upper(positive, level + 1, copies))
        shifts += -(copies**2) * i2 + copies * (2 * level + 1) * i1 - level * (level + 1) * i0
    widths = np.zeros_like(positive)
    edges = _strata(count)
    for k in range(count):
        low, high = (np.maximum(edge, positive) for edge in edges[k : k + 2])
        _, i1, i2 = _integrals(positive, low, high)
        widths += count * i2 - (count * i1) ** 2
    return np.where(t > 0, np.maximum(shifts / (count * copies**2) + widths / count**2, 0.0), 0.0)


def staggered_variance_bound(samples: int) -> float:
    """Bound on the variance of any entry under the staggered sampler: ``1 / (4 K m^2) + 1 / (4 K^2)``.

    Derivation, from the two parts in ``entry_variance``: f (1 - f) <= 1/4 gives the first. In stratum k, p(b) lies
    between its values at the two ends, r_k apart, so its variance is at most r_k^2 / 4; p rises with b from 0 to at
    most 1, so sum r_k <= 1 and sum r_k^2 <= 1. With m = sqrt(s)/2, K = 2 sqrt(s) the bound is
    ``1 / (2 s^{3/2}) + 1 / (16 s)``, against 1 / (4 s) for independent draws: a quarter of it for large s.

    The second part is O(K^-3) where all r_k are O(1/K), but not everywhere: the innermost stratum holds the widths
    from 0 to about sigma sqrt(2 / K), so at distances of that order its p runs from 0 to a constant, and it alone
    adds of the order of K^-2, that is 1/s. The rate s^{-3/2} of the first part is what one sees until then: from
    s = 16 to 1024 the worst standard deviation falls as s^-0.67, from 16384 to 65536 as s^-0.54 (computed by
    ``entry_variance``).
    """
    count, copies = groups(samples, "staggered")
    return 1 / (4 * count * copies**2) + 1 / (4 * count**2)


def collision_range(distance: np.ndarray, sigma: float, samples: int, sampler: str) -> np.ndarray:
    """Sum over groups of the squared length of the interval that Y_k lies in (see ``entry_variance``).

    ``iid``: Y_k is 0 or 1, so s. ``staggered``: floor(m p)/m at the narrowest to ceil(m p)/m at the widest width.
    """
    count, copies = groups(samples, sampler)
    t = np.asarray(distance, dtype=np.float64) / sigma
    if sampler == "iid":
        return np.full(t.shape, float(count))
    edges = _strata(count)
    total = np.ones_like(t)  # beyond the outermost border that stratum alone has pairs in one bin
    near = t < edges[-2]
    inner = np.zeros(int(near.sum()))
    for k in range(count):
        low, high = (_collision(t[near], edge) for edge in edges[k : k + 2])
        inner += ((np.ceil(copies * high - 1e-12) - np.floor(copies * low + 1e-12)) / copies) ** 2
    total[near] = inner
    return total


def hidden_probability(
    distance: np.ndarray | float, sigma: float, samples: int, sampler: str = "staggered"
) -> np.ndarray:
    """Chance that a pair shares no bin under any of the s hashes, exactly.

    ``iid``: ``(1 - L)^s``. ``staggered`` (derived here): given the width no one of m staggered shifts hits with
    chance ``max(0, 1 - m p)``: 1 for x <= t, ``1 - m + m t / x`` for t < x < t m / (m - 1), then 0. Its mean over
    each stratum is elementary, and the strata are independent.

    Arguments and shape are those of ``entry_variance``.
    """
    count, copies = groups(samples, sampler)
    t = np.asarray(distance, dtype=np.float64) / sigma
    if sampler == "iid":
        with np.errstate(divide="ignore"):
            return np.exp(samples * np.log(-np.expm1(-t)))
    hidden = np.ones_like(t)
    edges = _strata(count)
    end = t * copies / (copies - 1) if copies > 1 else np.full_like(t, np.inf)
    for k in range(count):
        low, high = edges[k : k + 2]
        middle = np.clip(t, low, high)
        last = np.clip(end, low, high)
        certain = _survival(np.float64(low)) - _survival(middle)
        falling = _falling(middle, t, copies) - _falling(last, t, copies)
        hidden *= np.clip(count * (certain + falling), 0.0, 1.0)
    return np.where(t > 0, hidden, 0.0)


def expected_square_error(n: int, sigma: float, samples: int, sampler: str = "staggered") -> float:
    """``E ||M~ - L||_F^2`` of the symmetric n x n matrices: ``sum_d 2 (n - d) Var_d``, exactly.

    Half of it for causal matrices. Distances whose variance is below 1e-14 of the sum's scale are left out.
    """
    distance = np.arange(1, reach(n, sigma, samples), dtype=np.float64)
    return float(np.sum(2 * (n - distance) * entry_variance(distance, sigma, samples, sampler)))


def reach(n: int, sigma: float, samples: int) -> int:
    """Distance from which on ``s e^{-d/sigma} < 1e-15``, or n: what lies beyond changes no sum over distances."""
    return int(min(n, math.ceil(sigma * (math.log(samples) + 35.0)) + 1))


def _strata(count: int) -> np.ndarray:
    """Borders of the K strata of the unit width: float64 ``(K + 1,)``, from 0 to infinity."""
    return np.append(special.gammaincinv(2.0, np.arange(count) / count), np.inf)


def _collision(t: np.ndarray, x: float) -> np.ndarray:
    return np.ones_like(t) if np.isinf(x) else np.maximum(0.0, 1 - t / x) if x > 0 else np.where(t > 0, 0.0, 1.0)


def _upper(t: np.ndarray, level: int, copies: int) -> np.ndarray:
    return t / (1 - level / copies) if level < copies else np.full_like(t, np.inf)


def _survival(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), 0.0, (1 + np.where(np.isinf(x), 0.0, x)) * np.exp(-x))


def _falling(x: np.ndarray, t: np.ndarray, copies: int) -> np.ndarray:
    finite = np.where(np.isinf(x), 0.0, x)
    return np.where(np.isinf(x), 0.0, ((1 - copies) * (1 + finite) + copies * t) * np.exp(-finite))


def _integrals(t: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of 1, p and p^2 over the density x e^{-x} from ``low`` to ``high`` (both at least t > 0)."""

    def beyond(x: np.ndarray) -> tuple[np.ndarray, ...]:
        finite = np.where(np.isinf(x), 1e3, x)  # e^{-1000} is 0
        tail = np.exp(-finite)
        second = (1 + finite - 2 * t) * tail + t * t * special.exp1(finite)
        return (1 + finite) * tail, (1 + finite - t) * tail, second

    return tuple(a - b for a, b in zip(beyond(low), beyond(high), strict=True))  # type: ignore[return-value]
