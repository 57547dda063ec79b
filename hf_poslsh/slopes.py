"""ALiBi slopes, and the length scale sigma of every head. Nothing else lives here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi slopes of all query heads.

    For a power of two ``n`` the slope of head ``h = 1..n`` is ``2**(-8 h / n)``. Otherwise the list starts with
    the slopes of ``c`` heads, ``c`` the largest power of two below ``n``, and goes on with every other slope of
    ``2 c`` heads, from the first. The closed form is not used for other head counts: it gives other numbers.

    Args:
        num_heads: number of query heads, at least 1.

    Returns:
        float64 array of shape ``(num_heads,)``; sigma is its reciprocal (unit: positions).

    Raises:
        ValueError: ``num_heads`` is not a positive integer.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), and the rule of their published models.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, (int, np.integer)) or num_heads < 1:
        raise ValueError(f"num_heads is {num_heads!r}; it must be an integer of at least 1.")
    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = _power_of_two_slopes(power)
    if power < num_heads:
        slopes += _power_of_two_slopes(2 * power)[::2][: num_heads - power]
    return np.array(slopes, dtype=np.float64)


def _power_of_two_slopes(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


def resolve_sigma(sigma: str | float | Sequence[float], num_heads: int) -> np.ndarray:
    """The length scale of every query head from what a config says.

    Args:
        sigma: ``"alibi"`` (reciprocal ALiBi slopes), one positive number for all heads, or one per head.
        num_heads: number of global query heads.

    Returns:
        float64 array of shape ``(num_heads,)``, in positions.

    Raises:
        ValueError: a list whose length is not ``num_heads``, an unknown name, or a value that is not positive.
    """
    if isinstance(sigma, str):
        if sigma != "alibi":
            raise ValueError(f"sigma is {sigma!r}; the only name is 'alibi'. Give a number or one per head.")
        return 1.0 / alibi_slopes(num_heads)
    values = np.asarray(sigma, dtype=np.float64)
    if values.ndim == 0:
        values = np.full(num_heads, float(values))
    if values.shape != (num_heads,):
        raise ValueError(
            f"sigma has shape {values.shape} but the model has {num_heads} query heads; "
            "give one number, or one per query head."
        )
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"sigma is {sigma!r}; every value must be positive and finite.")
    return values
