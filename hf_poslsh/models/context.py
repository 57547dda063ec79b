"""Where the tokens of one forward stand: plain tensor arithmetic, once per forward, without reading a value.

A *slot* numbers the tokens of a row as they came, padding included. A *position* numbers the real tokens of one
document from 0. Positions are what the bins are made of: they are derived from the padding mask and from document
borders, so that a padded or packed row gets the very masks of the row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.ops.bias import Layout
from hf_poslsh.ops.rotary import Turns
from hf_poslsh.static_cache import Ring


class Context(NamedTuple):
    """What the base model tells every attention layer. A named tuple, so that hooks can move its tensors.

    Args:
        method: the method and its knobs.
        positions: int64 ``(B or 1, slots)``; -1 for padding, for tokens to come, and for cached tokens that
            belong to an earlier document.
        segments: int64 ``(B or 1, slots)``, not falling along a row, or None for one document a row.
        first_query: slot of the first query; a tensor where the cache counts in one.
        key_slots: of every layer, first slot and number of its keys, or the slots of all its keys, int64 ``(K,)``,
            or the ring that they are in.
        step: training step that keys the draws, or None for the fixed ones.
        turns: of the queries, of sinks and of the keys of full heads, where the method bounds rotary distances.
        plain: every slot is known to hold a token of one document, so that slots are positions.
        weights: the attention weights are asked for.
    """

    method: PosLSHConfig
    positions: torch.Tensor
    segments: torch.Tensor | None
    first_query: int | torch.Tensor
    key_slots: tuple[tuple[int, int] | torch.Tensor | Ring, ...]
    step: int | None
    turns: Turns | None = None
    plain: bool = False
    weights: bool = False

    def num_keys(self, layer: int, queries: int) -> int:
        """Number of keys that a layer's attention is to be given for so many queries."""
        slots = self.key_slots[layer]
        if isinstance(slots, Ring):
            return slots.sinks + slots.window + queries
        return slots.shape[0] if isinstance(slots, torch.Tensor) else slots[1]

    def by_slot(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Weights ``(B, H, Q, K)`` of a layer's keys as ``(B, H, Q, slots so far)``: 0 where no key is held."""
        slots = self.key_slots[layer]
        if isinstance(slots, Ring) or not isinstance(self.first_query, int):
            raise ValueError(
                "output_attentions=True does not go with a static cache, whose columns are no tokens; use a dynamic "
                "one."
            )
        if not isinstance(slots, torch.Tensor):
            slots = torch.arange(slots[0], sum(slots))
        whole = weights.new_zeros(*weights.shape[:3], self.first_query + weights.shape[2])
        return whole.index_copy(3, slots.to(weights.device), weights)

    def layout(
        self,
        layer: int,
        queries: int,
        device: torch.device,
        window: int | None,
        chunk: int | None,
        all_slots: bool = False,
    ) -> Layout:
        """The layout of one layer's queries and keys, on ``device``; with ``all_slots``, of the keys of all slots."""
        key_slots = self.key_slots[layer]
        if all_slots:
            assert isinstance(self.first_query, int)
            key_slots = 0, self.first_query + queries
        query_slots = self.first_query + torch.arange(queries, device=self.positions.device)

        def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = rows.to(device)
            queries = rows.index_select(1, query_slots.to(device))
            if isinstance(key_slots, torch.Tensor):
                keys = rows.index_select(1, key_slots.to(device))
            elif isinstance(key_slots, Ring):
                keys = queries
            else:
                keys = rows[:, key_slots[0] : sum(key_slots)]
            return queries, keys

        query_positions, key_positions = split(self.positions)
        query_segments, key_segments = (None, None) if self.segments is None else split(self.segments)
        if isinstance(key_slots, Ring):  # the earlier keys belong to the document of the first query
            earlier = key_slots.positions().to(device)
            key_positions = torch.cat([earlier, key_positions], dim=1)
            if key_segments is not None:
                key_segments = torch.cat([key_segments[:, :1].expand_as(earlier), key_segments], dim=1)
        return Layout(query_positions, key_positions, query_segments, key_segments, True, window, chunk)


def place_tokens(
    queries: int,
    slots: int,
    first_query: int | torch.Tensor,
    device: torch.device,
    padding_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    sequence_ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions and segments of all slots, cached ones included.

    A document starts where ``position_ids`` fall or repeat, where ``sequence_ids`` change, or where
    ``sequence_ends`` says. Cached tokens have no position ids any more: the first id of this forward, counted from
    0, tells how far back its document reaches, and what lies before that is hidden.

    Args:
        queries: number of tokens in this forward.
        slots: number of slots to place: the tokens seen and the new ones, or more (a static cache's length).
        first_query: slot of the first new token.
        device: where to compute.
        padding_mask: ``(B, >= first_query + queries)``, nonzero for real tokens; None if all are.
        position_ids: int64 ``(B or 1, queries)`` or None.
        sequence_ids: integer ``(B or 1, queries)``, the document of each new token, or None (``seq_idx``).
        sequence_ends: integer ``(documents + 1,)``, borders in one packed row, or None (``cu_seq_lens_q``).

    Returns:
        ``positions`` and ``segments`` as in ``Context``.
    """
    slot = torch.arange(slots, device=device)
    query_slots = first_query + torch.arange(queries, device=device)
    exists = (slot < first_query + queries)[None]
    if padding_mask is None:
        rank = slot[None]
    else:
        # Without a comparison of the lengths, on which a compiled graph would depend.
        real, length = padding_mask.to(device) != 0, padding_mask.shape[1]
        exists = exists & (slot < length) & real.index_select(1, slot.clamp_max(length - 1))
        rank = exists.cumsum(-1) - 1
    query_rank = rank.index_select(1, query_slots)
    query_exists = exists.index_select(1, query_slots)
    before = query_rank + 1 - query_exists.long()  # real tokens before each query

    starts = []
    if position_ids is not None:
        lag = query_rank - position_ids.to(device)
        if padding_mask is not None:
            # Padding has arbitrary position ids: it takes the lag of the real token before it, or else after it.
            index = torch.arange(queries, device=device)
            first = query_exists.long().argmax(-1, keepdim=True)
            real_before = torch.where(query_exists, index, 0).cummax(-1).values
            lag = lag.gather(1, torch.maximum(real_before, first))
        restarts = lag.diff(dim=1, prepend=lag[:, :1]) > 0
        starts.append(torch.where(restarts, before, lag[:, :1].clamp_min(0)))
    if sequence_ids is not None:
        ids = sequence_ids.to(device)
        changes = ids.diff(dim=1, prepend=ids[:, :1]) != 0
        starts.append(torch.where(changes, before, 0))
    if sequence_ends is not None:
        borders = torch.zeros(queries + 1, dtype=torch.bool, device=device)
        borders[sequence_ends.to(device).long()] = True
        starts.append(torch.where(borders[:queries], before, 0))
    if not starts:
        return torch.where(exists, rank, -1), None

    document = starts[0]
    for start in starts[1:]:
        document = torch.maximum(document, start)
    document = document.cummax(-1).values
    document = document.index_select(1, (slot - first_query).clamp(0, queries - 1))
    positions = torch.where(exists & (rank >= document), rank - document, -1)
    # One new token sees one document: the others are hidden already.
    return positions, document if queries > 1 else None
