"""Rotary distances that stop growing: how far a rotated query or key is turned on, and the turning itself.

The rotary distance of a pair that is seen from outside of the band is min(i - j, d), d = ``max_distance``. Queries
and keys come rotated by their positions already, and rotations add: with ``q_i = R(i) q`` and ``k_j = R(j) k``, the
pair ``R(d - i) q_i = R(d) q`` and ``R(-j) k_j = R(0) k`` stands at distance d (derived here; RoPE: Su et al. 2021).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Rotary(NamedTuple):
    """How a model's rotary position embedding turns its heads.

    Args:
        frequencies: ``(pairs,)``, radians per position of every pair of dimensions; ``2 pairs <= D``, and dimensions
            behind those are not turned. Angles are computed in its dtype, as the model does: a difference of two
            angles is then exact.
        interleaved: pair m is dimensions ``(2 m, 2 m + 1)`` (Llama-4); else ``(m, m + pairs)``, which is what most
            models of transformers do.
    """

    frequencies: torch.Tensor
    interleaved: bool = False

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Angles in radians, float64 ``(..., pairs)``, of positions ``(...)``."""
        return (positions[..., None].to(self.frequencies.dtype) * self.frequencies).double()


class Turns(NamedTuple):
    """Cosines and sines that move the tokens of one forward: queries from i to d, keys from j to 0.

    Args:
        max_distance: d, the largest rotary distance of a pair that is seen from outside of the band.
        queries: ``(B or 1, Q, 2, pairs)``, cosine and sine of the turn by d - i of every query.
        sinks: ``(sinks, 2, pairs)``, of the turn by -j of the sink at position j.
        interleaved: as in ``Rotary``.
        keys: ``(B or 1, K, 2, pairs)``, of the turn by -j of every key, for heads that see all of them; else None.
    """

    max_distance: int
    queries: torch.Tensor
    sinks: torch.Tensor
    interleaved: bool
    keys: torch.Tensor | None = None

    def on(self, device: torch.device) -> Turns:
        """The same on a device."""
        keys = None if self.keys is None else self.keys.to(device)
        return self._replace(queries=self.queries.to(device), sinks=self.sinks.to(device), keys=keys)

    def of_keys(self, slots: Any) -> Turns:
        """The turns of some of the keys: those of ``(first, number)``, or of int64 slots ``(K,)``."""
        assert self.keys is not None
        if isinstance(slots, torch.Tensor):
            return self._replace(keys=self.keys.index_select(1, slots.to(self.keys.device)))
        return self._replace(keys=self.keys[:, slots[0] : slots[0] + slots[1]])

    def of_rows(self, rows: slice) -> Turns:
        """The turns of some of the queries."""
        return self._replace(queries=self.queries[:, rows])


def make_turns(
    rotary: Rotary,
    positions: torch.Tensor,
    max_distance: int,
    sink_tokens: int,
    dtype: torch.dtype,
    key_positions: torch.Tensor | None = None,
) -> Turns:
    """The turns of one forward; every layer with this rotary embedding shares them.

    Args:
        rotary: the model's.
        positions: int64 ``(B or 1, Q)``, of the queries in their documents; what a negative one gets is not used.
        max_distance: d.
        sink_tokens: number of sinks of a document.
        dtype: float32 or float64, of cosines and sines.
        key_positions: int64 ``(B or 1, K)``, of the keys of heads that see all of them, or None.
    """
    rotary = rotary._replace(frequencies=rotary.frequencies.to(positions.device))
    far = rotary.angles(torch.full((), max_distance, device=positions.device))
    sinks = torch.arange(sink_tokens, device=positions.device)
    return Turns(
        max_distance,
        _cos_sin(far - rotary.angles(positions), dtype),
        turns_to_start(rotary, sinks, dtype),
        rotary.interleaved,
        None if key_positions is None else turns_to_start(rotary, key_positions, dtype),
    )


def turns_to_start(rotary: Rotary, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine ``(..., 2, pairs)`` of the turn by -j of keys at the positions j ``(...)``."""
    return _cos_sin(-rotary.angles(positions), dtype)


def turns_back(rotary: Rotary, old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine ``(..., 2, pairs)`` that turn keys back by ``new`` positions, if ``old`` of them are done."""
    return _cos_sin(rotary.angles(old) - rotary.angles(new), dtype)


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float64:  # whole turns go in float64, the rest is small enough for float32
        angles = angles * (0.5 / math.pi)
        angles = (angles - angles.round()).to(dtype) * (2 * math.pi)
    return torch.stack([angles.cos(), angles.sin()], dim=-2)


def turn(states: torch.Tensor, turns: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turns heads on.

    Args:
        states: rotated queries or keys ``(B, H, N, D)``.
        turns: ``(B or 1, N, 2, pairs)``, cosine and sine.
        interleaved: as in ``Rotary``.

    Returns:
        ``(B, H, N, D)`` in the dtype of ``turns``.
    """
    states, cos, sin = states.to(turns.dtype), turns[:, None, :, 0], turns[:, None, :, 1]
    pairs = turns.shape[-1]
    turned, rest = states[..., : 2 * pairs], states[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2), rest], dim=-1)
    a, b = turned[..., :pairs], turned[..., pairs:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def is_far(query_positions: torch.Tensor, key_positions: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Which of the bounded pairs (of all keys, or of sinks) are further apart than d: bool, positions broadcast."""
    bounded = (key_positions >= 0) & (turns.keys is not None or key_positions < turns.sinks.shape[0])
    return bounded & (query_positions - key_positions > turns.max_distance)
