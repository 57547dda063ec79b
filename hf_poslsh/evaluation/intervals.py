"""Confidence intervals: how much another sample of text, or another seed of training, would change a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from hf_poslsh.evaluation.scores import TokenScores

LEVEL = 0.95
"""Coverage of the intervals."""
RESAMPLES = 2000
"""Bootstrap samples; their seed is fixed."""
BLOCK_TARGETS = 256
"""Targets of a block where there are too few documents to resample."""
MIN_UNITS = 8
"""Fewer documents are not resampled, and from fewer blocks there is no interval."""


@dataclass(frozen=True)
class Units:
    """What is resampled.

    Args:
        name: ``"documents"`` or ``"blocks of 256 targets"``.
        index: int64 ``(T,)``, the unit of each target.
        count: number of units, U.
    """

    name: str
    index: np.ndarray
    count: int


def resampling_units(scores: TokenScores) -> Units:
    """Documents where there are at least ``MIN_UNITS`` of them; else blocks of ``BLOCK_TARGETS`` targets.

    Tokens of a text are not independent, so that the unit is the document. With one text or few, each is cut into
    blocks of consecutive scored targets (a last block of less than half the size joins the one before), which are
    resampled as if they were independent: such an interval speaks of other passages of these texts, not of other
    texts, and is narrower than one over documents would be.
    """
    documents, by_document = np.unique(scores.document, return_inverse=True)
    if len(documents) >= MIN_UNITS:
        return Units("documents", by_document, len(documents))
    index = np.empty(len(scores), dtype=np.int64)
    count = 0
    for document in range(len(documents)):
        mine = np.flatnonzero(by_document == document)
        blocks = max(1, round(len(mine) / BLOCK_TARGETS))
        index[mine] = count + np.minimum(np.arange(len(mine)) // BLOCK_TARGETS, blocks - 1)
        count += blocks
    return Units(f"blocks of {BLOCK_TARGETS} targets", index, count)


def bootstrap_interval(numerators: np.ndarray, denominators: np.ndarray, units: Units) -> tuple[float, float] | None:
    """The percentile bootstrap interval of ``sum(numerators) / sum(denominators)``.

    Units are drawn with replacement, all tokens of a drawn unit together; every token of the sample weighs the same.
    The draws depend on the number of units alone: two figures over the same targets are resampled alike. The
    percentile method is somewhat too narrow with few units.

    Args:
        numerators: float ``(T,)``, e.g. losses, or differences of losses between two models.
        denominators: ``(T,)``, e.g. ones, or bytes.
        units: what is resampled.

    Returns:
        The lower and the upper end, or None: fewer than ``MIN_UNITS`` units say nothing of their own spread.
    """
    if units.count < MIN_UNITS:
        return None
    sums = np.stack([np.bincount(units.index, array, units.count) for array in (numerators, denominators)])
    draws = np.random.default_rng(0).multinomial(units.count, np.full(units.count, 1 / units.count), RESAMPLES)
    above, below = sums @ draws.T
    low, high = np.quantile(above / below, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean of independent, about normally distributed values, by Student's t.

    Args:
        values: n of them, e.g. one per seed of training.

    Returns:
        The lower and the upper end, ``mean -+ t(n - 1) * std / sqrt(n)``, or None for fewer than two values.
    """
    if len(values) < 2:
        return None
    half = special.stdtrit(len(values) - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values) - half), float(np.mean(values) + half)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share of independent trials.

    Where a trial may count in part (the mean of several runs), its variance is at most that of one which is right or
    wrong with the same mean, so that the interval is then wider than need be, not narrower.

    Args:
        share: of the trials that were right, 0 to 1.
        count: number of trials, at least 1.

    Returns:
        The lower and the upper end, within 0 and 1.
    """
    z = float(special.ndtri((1 + LEVEL) / 2))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
