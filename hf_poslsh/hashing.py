"""PositionalHash: the random bins over token positions, their draws and their edges.

Nothing here knows of attention. All bin arithmetic of the package is in float64 and goes through
``first_in_bin`` and ``last_in_bin``, so that every implementation sees the very same masks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numba import njit
from scipy import special

_STREAM = 0x706F736C7368  # second word of the Philox key: keeps our draws apart from other users of a seed
_SHARED = 2**64 - 1  # stands for "all layers" or "all heads" in the counter
_MIN_WIDTH = 1e-9  # positions; narrower bins would overflow the bin index
MAX_WIDTH = 2.0**52  # positions; one bin for everything
_GRID = 2.0**32  # unit draws are rounded to this grid, so that a libm's last bit never moves a bin


@njit(cache=True, nogil=True, inline="always")
def _bin_start(index: int, width: float, shift: float) -> int:
    """First integer p with floor((p + shift) / width) >= index, by the very arithmetic of that formula."""
    edge = index * width - shift
    start = np.int64(math.ceil(edge))
    # Rounding moves the edge by less than 1e-6 positions below 2**31: only an edge that near to an integer needs
    # the formula itself to tell on which side the integer lies.
    if abs(edge - np.rint(edge)) < 1e-5:
        while math.floor((start - 1 + shift) / width) >= index:
            start -= 1
        while math.floor((start + shift) / width) < index:
            start += 1
    return start


@njit(cache=True, nogil=True)
def first_in_bin(position: int, width: float, shift: float) -> int:
    """First position p >= 0 with floor((p + shift) / width) equal to that of ``position`` (below 2**31)."""
    return max(_bin_start(math.floor((position + shift) / width), width, shift), np.int64(0))


@njit(cache=True, nogil=True)
def last_in_bin(position: int, width: float, shift: float) -> int:
    """Last position p with floor((p + shift) / width) equal to that of ``position`` (below 2**31)."""
    return _bin_start(math.floor((position + shift) / width) + 1, width, shift) - 1


@njit(cache=True, nogil=True)
def _edges(positions: np.ndarray, widths: np.ndarray, shifts: np.ndarray, right: bool) -> np.ndarray:
    heads, samples = widths.shape
    edges = np.empty((heads, samples, positions.size), dtype=np.int64)
    for h in range(heads):
        for r in range(samples):
            for i in range(positions.size):
                if right:
                    edges[h, r, i] = last_in_bin(positions[i], widths[h, r], shifts[h, r])
                else:
                    edges[h, r, i] = first_in_bin(positions[i], widths[h, r], shifts[h, r])
    return edges


@dataclasses.dataclass(frozen=True, eq=False)
class PositionalHash:
    """s hashes for each head: ``bin_r(p) = floor((p + shift_r) / width_r)``.

    Two positions collide under a hash of width b ~ Gamma(shape 2, scale sigma) and shift uniform on [0, b)
    with probability e^{-|i-j|/sigma} (random binning features of the Laplacian kernel, Rahimi and Recht 2007;
    used for attention by Wolfson and Wagner 2026).

    Args:
        widths: bin widths in positions, float64 of shape ``(heads, samples)``, positive and finite.
        shifts: shifts in positions, float64 of shape ``(heads, samples)``, ``0 <= shift < width``.

    Raises:
        ValueError: shapes differ, or a width or shift is out of range or NaN.
    """

    widths: np.ndarray
    shifts: np.ndarray

    def __post_init__(self) -> None:
        for name in ("widths", "shifts"):
            array = np.array(getattr(self, name), dtype=np.float64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.widths.ndim != 2 or self.widths.shape != self.shifts.shape or self.widths.size == 0:
            raise ValueError(
                f"widths and shifts must share one shape (heads, samples) with at least one of each; "
                f"got {self.widths.shape} and {self.shifts.shape}."
            )
        good = (self.widths >= _MIN_WIDTH) & (self.widths <= MAX_WIDTH)
        if not good.all():
            raise ValueError(
                f"a bin width is {self.widths[~good][0]}; widths lie between {_MIN_WIDTH} and {MAX_WIDTH} positions."
            )
        good = (self.shifts >= 0) & (self.shifts < self.widths)
        if not good.all():
            raise ValueError(f"a shift is {self.shifts[~good][0]}; shifts must lie in [0, width).")

    @classmethod
    def sample(
        cls,
        sigma: float | Sequence[float] | np.ndarray,
        num_samples: int,
        seed: int = 0,
        layer: int = 0,
        sampler: str = "staggered",
        scope: str = "head",
        step: int | None = None,
    ) -> PositionalHash:
        """Draws hashes by a counter-based generator (Philox), reading and advancing no global state.

        Args:
            sigma: length scale in positions of every global query head, or one number for a single head.
            num_samples: s, hashes per head.
            seed: seed of the generator, 0 <= seed < 2**63.
            layer: layer index, part of the counter unless ``scope="model"``.
            sampler: ``"iid"`` (the paper's) or ``"staggered"``: s = K m with m the divisor of s nearest to
                sqrt(s) / 2; one width from each of K equal-probability strata, each used m times with shifts
                width / m apart from one uniform start. Every hash, averaged over the strata, has the same law,
                so the mean mask stays unbiased (derived here).
            scope: which heads share unit draws: ``"head"`` (none), ``"layer"`` or ``"model"``.
            step: training step for ``resample="step"``; None for the fixed draws.

        Returns:
            A hash with ``widths`` and ``shifts`` of shape ``(len(sigma), num_samples)``.

        Raises:
            ValueError: sigma is not positive and finite, or another argument is out of range.
        """
        scales = np.atleast_1d(np.asarray(sigma, dtype=np.float64))
        if scales.ndim != 1 or scales.size == 0 or not (np.isfinite(scales).all() and (scales > 0).all()):
            raise ValueError(f"sigma is {sigma!r}; give positive finite length scales, one per head.")
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples!r}; it must be at least 1.")
        if not 0 <= seed < 2**63 or layer < 0 or (step is not None and step < 0):
            raise ValueError(f"seed {seed!r}, layer {layer!r} and step {step!r} must be non-negative integers.")
        if scope not in ("head", "layer", "model"):
            raise ValueError(f"scope is {scope!r}; choose head, layer or model.")
        draw = {"iid": _iid_draws, "staggered": _staggered_draws}.get(sampler)
        if draw is None:
            raise ValueError(f"sampler is {sampler!r}; choose staggered or iid.")
        widths, shifts = np.empty((2, scales.size, num_samples))
        for head, scale in enumerate(scales):
            counter = (
                0 if step is None else step + 1,
                _SHARED if scope == "model" else layer,
                head if scope == "head" else _SHARED,
            )
            unit_widths, unit_shifts = draw(_Uniforms(seed, counter), num_samples)
            # No two integers share a bin narrower than 1, so the clip changes no mask.
            widths[head] = np.maximum(scale * unit_widths, _MIN_WIDTH)
            shifts[head] = np.minimum(widths[head] * unit_shifts, np.nextafter(widths[head], 0.0))
        return cls(widths, shifts)

    @classmethod
    def fixed_blocks(cls, sigma: float | Sequence[float] | np.ndarray) -> PositionalHash:
        """The paper's baseline: one block structure of width 2 sigma without a shift, for every head."""
        widths = 2.0 * np.atleast_1d(np.asarray(sigma, dtype=np.float64))[:, None]
        return cls(widths, np.zeros_like(widths))

    @property
    def num_heads(self) -> int:
        """Number of global query heads."""
        return self.widths.shape[0]

    @property
    def num_samples(self) -> int:
        """Hashes per head, s."""
        return self.widths.shape[1]

    @property
    def reach(self) -> np.ndarray:
        """int64 ``(heads,)``: a key this many positions away, or more, shares no bin with a query.

        A half-open bin of width b holds at most ceil(b) integers, so |i - j| < ceil(b).
        """
        return np.ceil(self.widths.max(axis=1)).astype(np.int64)

    def left_edges(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """First position (at least 0) of the bin of each position: int64 ``(heads, samples, len)``."""
        return _edges(_checked_positions(positions), self.widths, self.shifts, False)

    def right_edges(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """Last position of the bin of each position: int64 ``(heads, samples, len)``."""
        return _edges(_checked_positions(positions), self.widths, self.shifts, True)

    def mask_mean(self, n: int) -> np.ndarray:
        """The mean mask M~ itself, dense, for study and tests.

        Args:
            n: number of positions; memory is ``heads * n * n`` doubles.

        Returns:
            float64 ``(heads, n, n)`` with M~_ij = share of the hashes under which i and j share a bin. Not
            causal; its expectation over draws is e^{-|i-j|/sigma}.
        """
        bins = np.floor((np.arange(n, dtype=np.float64) + self.shifts[..., None]) / self.widths[..., None])
        mean = np.zeros((self.num_heads, n, n))
        for r in range(self.num_samples):
            mean += bins[:, r, :, None] == bins[:, r, None, :]
        return mean / self.num_samples


class _Uniforms:
    """Uniforms on the open interval (0, 1) from one Philox stream, in a fixed order."""

    def __init__(self, seed: int, counter: tuple[int, int, int]) -> None:
        self._bits = np.random.Philox(
            key=np.array([seed, _STREAM], dtype=np.uint64), counter=np.array([0, *counter], dtype=np.uint64)
        )

    def __call__(self, count: int) -> np.ndarray:
        # Half of an even odds step is added: 0 and 1 are never returned, so logarithms are finite.
        return ((self._bits.random_raw(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _iid_draws(uniforms: _Uniforms, samples: int) -> tuple[np.ndarray, np.ndarray]:
    widths = -np.log(uniforms(samples)) - np.log(uniforms(samples))
    return _on_grid(widths), uniforms(samples)


def _staggered_draws(uniforms: _Uniforms, samples: int) -> tuple[np.ndarray, np.ndarray]:
    copies = staggered_copies(samples)
    strata = samples // copies
    widths = special.gammaincinv(2.0, (np.arange(strata) + uniforms(strata)) / strata)
    shifts = (uniforms(strata)[:, None] + np.arange(copies) / copies) % 1.0
    return np.repeat(_on_grid(widths), copies), shifts.reshape(-1)


def staggered_copies(samples: int) -> int:
    """m, how often the staggered sampler uses one width: the divisor of s nearest to sqrt(s) / 2."""
    divisors = [m for m in range(1, samples + 1) if samples % m == 0]
    return min(divisors, key=lambda m: (abs(m - math.sqrt(samples) / 2), m))


def _on_grid(widths: np.ndarray) -> np.ndarray:
    return np.maximum(np.round(widths * _GRID), 1.0) / _GRID


def _checked_positions(positions: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(positions)
    good = array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer))
    if not good or (array.size and not (array.min() >= 0 and array.max() < 2**31)):
        raise ValueError("positions must be a one-dimensional list of integers from 0 to 2**31 - 1.")
    return array.astype(np.int64)
