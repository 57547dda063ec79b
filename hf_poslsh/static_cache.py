"""The bounded KV cache in memory of a fixed size, for compiled decoding: tensors only, no value is read.

A column belongs to a position, not to a slot: the sinks have one each, the others share a ring as long as the reach,
so that a token takes the column of the one that just went out of sight. Padding goes to a column that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, StaticLayer

from hf_poslsh.cache import Sight


class Ring(NamedTuple):
    """What one layer's attention is given in one forward: sinks, ring in order, new tokens.

    Args:
        sinks: number of columns of sinks.
        window: number of columns of the ring.
        before: int64 ``(rows,)``, tokens of the document before this forward.
    """

    sinks: int
    window: int
    before: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Positions of the earlier keys, rising, -1 where there is none: int64 ``(rows, sinks + window)``."""
        before, device = self.before[:, None], self.before.device
        sinks = torch.arange(self.sinks, device=device)
        window = before - self.window + torch.arange(self.window, device=device)
        return torch.cat(
            [torch.where(sinks < before, sinks, -1), torch.where(window >= self.sinks, window, -1)], dim=1
        )

    def columns(self, positions: torch.Tensor) -> torch.Tensor:
        """The column of each position, whatever it holds; positions and columns int64 of one shape."""
        return torch.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % max(self.window, 1)
        )


class RingLayer(StaticLayer):
    """Keys and values ``(B, H_kv, sinks + window + 1, D)`` of one layer; the last column takes what is not kept.

    Args:
        length: tokens that the cache as a whole may see.
        sinks: number of sinks.
        window: number of earlier tokens that a query may see, sinks aside.
    """

    is_croppable = False

    def __init__(self, length: int, sinks: int, window: int) -> None:
        super().__init__(max_cache_len=sinks + window + 1)
        self.length, self.sinks, self.window = length, sinks, window
        self.held: torch.Tensor | None = None  # int64 (B,): tokens of each row's current document
        self._plan: tuple[Ring, torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """The host's, with a count of tokens for each row."""
        super().lazy_initialization(key_states, key_states if value_states is None else value_states)
        self.held = torch.zeros(key_states.shape[0], dtype=torch.int64, device=key_states.device)

    def plan(self, before: torch.Tensor, new: torch.Tensor, after: torch.Tensor) -> Ring:
        """Says where the coming ``update`` is to find and to put its tokens.

        Args:
            before: int64 ``(rows,)``, tokens of the document before this forward.
            new: int64 ``(rows, Q)``, positions of the new tokens in the last document, -1 for all others.
            after: int64 ``(rows,)``, tokens of the last document after this forward.
        """
        ring = Ring(self.sinks, self.window, before)
        kept = (new >= 0) & ((new < self.sinks) | (new >= after[:, None] - self.window))
        self._plan = ring, torch.where(kept, ring.columns(new), self.sinks + self.window), after
        return ring

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in keys and values ``(B, H_kv, Q, D)``.

        Returns:
            Keys and values of the sinks, of the ring from its oldest position on, and the new ones.

        Raises:
            ValueError: the forward was not planned: the model is not patched.
        """
        if self._plan is None:
            raise ValueError(
                "a bounded static cache was given to a model that is not patched, or twice to one forward; give that "
                "model a cache of its own."
            )
        (ring, columns, after), self._plan = self._plan, None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        order = ring.columns(ring.positions().clamp_min(0))
        outs = []
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            assert store is not None
            outs.append(torch.cat([_take(store, order), new], dim=2))
            _put(store, columns, new)
        assert self.held is not None
        self.held.copy_(after.expand_as(self.held))
        self.cumulative_length.add_(key_states.shape[2])
        return outs[0], outs[1]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Number of slots of the cache as a whole, and 0; the plan says which of them are there."""
        return self.length, 0

    def get_max_length(self) -> int:
        """Number of tokens that the cache as a whole may see."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a token pushed out does not come back.

        Raises:
            ValueError: always, unless nothing is to be removed.
        """
        if tokens_to_remove:
            raise ValueError(
                "a bounded static cache cannot take tokens back; use PosLSHConfig(cache='full') or a dynamic cache."
            )

    def reorder_cache(self, beam_idx: Any) -> None:
        """Puts the rows in another order, int64 ``(B,)``."""
        super().reorder_cache(beam_idx)
        if self.held is not None:
            self.held = self.held.index_select(0, beam_idx.to(self.held.device))

    def reset(self) -> None:
        """Forgets all tokens."""
        super().reset()
        if self.held is not None:
            self.held.zero_()


def _take(store: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns ``(B or 1, K)`` of ``(B, H, C, D)``."""
    if columns.shape[0] == 1:
        return store.index_select(2, columns[0])
    return store.gather(2, columns[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3]))


def _put(store: torch.Tensor, columns: torch.Tensor, new: torch.Tensor) -> None:
    """Writes ``new`` ``(B, H, Q, D)`` into columns ``(B or 1, Q)``."""
    if columns.shape[0] == 1:
        store.index_copy_(2, columns[0], new)
    else:
        store.scatter_(2, columns[:, None, :, None].expand_as(new), new)


def make_static_bounded(cache: Cache, sights: dict[int, Sight], length: int) -> None:
    """Replaces layers of an empty static cache by bounded ones, in place, where that takes less memory.

    Args:
        cache: ``StaticCache(config=...)``.
        sights: by layer, of the layers that the method patches; the others keep the host's.
        length: tokens that the cache as a whole is to see; it may be told longer by its own layers.
    """
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    length = max(length, *(layer.get_mask_sizes(1)[0] for layer in static))
    for index, sight in sights.items():
        old, window = static[index], sight.earlier
        if isinstance(old, RingLayer) or sight.sinks + window + 1 >= old.max_cache_len:
            continue
        layer = RingLayer(length, sight.sinks, window)
        if old.keys is not None:  # a compiled prefill needs its memory beforehand
            layer.lazy_initialization(old.keys, old.values)
        cache.layers[index] = layer


def has_rings(cache: Cache) -> bool:
    """Whether some layer of a cache is a ``RingLayer``."""
    return any(isinstance(layer, RingLayer) for layer in cache.layers)


def plan_rings(
    cache: Cache,
    queries: int,
    seen: int | torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor | None,
    sights: Sequence[Sight],
) -> dict[int, Ring]:
    """Plans every ``RingLayer``.

    Args:
        cache: the cache, before any layer updates it.
        queries: number of new tokens.
        seen: number of tokens that the cache has seen.
        positions: int64 ``(rows, slots)`` of all slots, those to come included.
        segments: int64 ``(rows, slots)`` or None.
        sights: of every layer.

    Returns:
        What each such layer gives its attention.

    Raises:
        ValueError: the queries see further than a ring reaches, or go on in another document than the cache's last
            (in a compiled graph the latter is a ``RuntimeError`` of torch).
    """
    slots = torch.arange(positions.shape[1], device=positions.device)
    now = seen + torch.arange(queries, device=positions.device)
    before = torch.where(slots < seen, positions, -1).amax(1) + 1
    new = positions.index_select(1, now)
    carried = before
    if segments is not None:
        document = segments.index_select(1, now)
        new = torch.where(document == document[:, -1:], new, -1)
        carried = torch.where(document[:, 0] == document[:, -1], before, 0)
    after = torch.maximum(new.amax(1) + 1, carried)
    rings: dict[int, Ring] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, RingLayer):
            continue
        sight = sights[index]
        if sight.earlier > layer.window or sight.sinks > layer.sinks:
            raise ValueError(
                f"the static cache of layer {index} holds {layer.window} earlier tokens and {layer.sinks} sinks, but "
                f"its queries see {sight.earlier} and {sight.sinks}; let the model make a cache of its own."
            )
        if not rings and layer.held is not None:
            _check_continued(before, layer.held)
        rings[index] = layer.plan(before, new, after)
    return rings


def _check_continued(before: torch.Tensor, held: torch.Tensor) -> None:
    require(
        ((before == 0) | (before == held)).all(),
        "a bounded static cache goes on from its last tokens only: to change the padding mask of earlier tokens or "
        "to return to an earlier document, use PosLSHConfig(cache='full').",
    )


def require(condition: torch.Tensor, message: str) -> None:
    """A check of values on the device: ``ValueError``; in a compiled graph ``RuntimeError`` of torch."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
