"""How much is looked at: the widest bin, visible keys and multiply-adds per token, expected and for given draws."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from scipy import integrate, special

from hf_poslsh.hashing import PositionalHash
from hf_poslsh.theory.entries import groups, hidden_probability, reach
from hf_poslsh.theory.operators import _checked, bin_starts


def wider_probability(width: float, sigma: float) -> float:
    """``P(b > t) = (1 + t/sigma) e^{-t/sigma}`` of one hash: the tail of Gamma(2, sigma), integrated by parts."""
    x = max(width, 0.0) / sigma
    return (1 + x) * math.exp(-x)


def widest_bin(sigma: float, samples: int, delta: float, sampler: str = "staggered") -> float:
    """Width that none of s hashes exceeds with probability at least ``1 - delta``: a bound in positions.

    Derivation: a union over the K widths (s for iid) asks for ``K (1 + x) e^{-x} <= delta``, solved for x exactly;
    the strata have the law Gamma(2, sigma) in the mean, so that the sum of their chances is the same. For
    ``staggered`` the union is exact, since only the outermost stratum can be so wide. As
    ``(1 + x) e^{-x} <= 2 e^{-(1 + x) / 2}``, x is at most ``2 log(2 K / delta) - 1``: the width is
    O(sigma log(s / delta)). A bin holds at most ceil(width) positions.
    """
    count, _ = groups(samples, sampler)
    _check_delta(delta)
    return sigma * float(special.gammainccinv(2.0, delta / count))


def expected_widest_bin(sigma: float, samples: int, sampler: str = "staggered") -> float:
    """Mean of the widest of s widths, in positions.

    ``iid``: ``int_0^inf (1 - F(x)^s) dx`` with F the law of one. ``staggered``: the widest lies in the outermost of
    the K strata, ``[q, inf)``, whose mean is ``K int_q^inf x^2 e^{-x} dx = K (q^2 + 2 q + 2) e^{-q}``.
    """
    count, _ = groups(samples, sampler)
    if sampler == "staggered":
        q = float(special.gammaincinv(2.0, (count - 1) / count))
        return sigma * count * (q * q + 2 * q + 2) * math.exp(-q)
    mean, _ = integrate.quad(
        lambda x: -math.expm1(samples * math.log1p(-special.gammaincc(2.0, x))) if x else 1.0,
        0.0,
        math.log(samples) + 50.0,
        limit=200,
    )
    return sigma * mean


def expected_keys(n: int, sigma: float, samples: int, sampler: str = "staggered", algorithm: str = "banded") -> float:
    """Mean number of keys that a causal query of n tokens meets, over queries and draws, exactly.

    Derivation: the key at distance d exists for n - d of the n queries. ``blocks`` meets it once for every hash
    under which the two share a bin: ``s L_d`` times, in all about ``s (sigma + 1/2)``. ``banded`` meets it once if
    any hash joins them: with chance ``1 - hidden_probability(d)``. For iid draws the distances from a query to its
    s left edges are at most s independent exponentials of mean sigma, so its mean is at most ``1 + sigma H_s``.

    Args:
        n: number of tokens.
        sigma: length scale in positions.
        samples: s.
        sampler: ``"staggered"`` or ``"iid"``.
        algorithm: ``"banded"`` or ``"blocks"``.

    Returns:
        Keys per query, the query's own included (once per hash for ``blocks``).
    """
    _checked(n, sigma)
    groups(samples, sampler)
    distance = np.arange(reach(n, sigma, samples), dtype=np.float64)
    if algorithm not in ("banded", "blocks"):
        raise ValueError(f"algorithm is {algorithm!r}; choose banded or blocks.")
    if algorithm == "blocks":
        met = samples * np.exp(-distance / sigma)
    else:
        met = 1 - hidden_probability(distance, sigma, samples, sampler)
    return float(np.sum((1 - distance / n) * met))


class DrawnKeys(NamedTuple):
    """Mean keys per causal query for given draws, the query's own included (once per hash for ``blocks``)."""

    banded: float
    blocks: float


def drawn_keys(
    hashes: PositionalHash,
    n: int,
    head: int = 0,
    sinks: int = 0,
    window: int | None = None,
    chunk: int | None = None,
) -> DrawnKeys:
    """What ``expected_keys`` is the mean of, for given draws, exactly, in O(n + bins).

    ``banded``: the first visible key of query i is the start of the earliest bin that holds i. ``blocks``: a bin of
    length l gives its l queries ``l (l + 1) / 2`` keys.

    Args:
        hashes: the draws.
        n: number of tokens.
        head: row of ``hashes``.
        sinks: so many first keys are visible to all; counted by ``banded`` only.
        window: keys so far away, or more, are hidden, sinks too; by ``banded`` only.
        chunk: keys of another chunk of so many are hidden, sinks too; by ``banded`` only.
    """
    _checked(n, 1.0)
    starts, offsets = bin_starts(hashes, n, head)
    banded, blocks = _key_sums(n, starts, offsets, min(sinks, n), min(window or n, n), min(chunk or n, n))
    return DrawnKeys(banded / n, blocks / n)


def multiply_adds(keys: float, head_dim: int) -> float:
    """Multiply-adds per token and head for ``keys`` visible keys: ``head_dim`` each for q . k and for the value."""
    return 2.0 * head_dim * keys


def full_attention_keys(n: int) -> float:
    """Keys that a causal query of n tokens meets under full attention, on average: ``(n + 1) / 2``."""
    return (n + 1) / 2


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must be a probability between 0 and 1.")


@njit(cache=True, nogil=True)
def _key_sums(n, starts, offsets, sinks, window, chunk):
    latest = np.zeros(n, dtype=np.int64)  # by first position, the end of the longest bin that starts there
    blocks = 0
    for r in range(offsets.size - 1):
        for k in range(offsets[r], offsets[r + 1]):
            end = starts[k + 1] if k + 1 < offsets[r + 1] else n
            latest[starts[k]] = max(latest[starts[k]], end)
            blocks += (end - starts[k]) * (end - starts[k] + 1) // 2
    banded = 0
    first = 0
    for i in range(n):
        while latest[first] <= i:
            first += 1
        lowest = max(i - window + 1, i // chunk * chunk)
        near = max(first, lowest)
        banded += i - near + 1 + max(min(sinks, near) - lowest, 0)
    return banded, blocks
