"""The KV cache of a layer with full heads: all keys for those, what later tokens can still see for the others.

Where rotary distances are bounded, a key of a full head is turned to position 0 once, when it is so far behind that
every later query sees it at the largest distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_poslsh.cache import BoundedLayer, Room
from hf_poslsh.ops.rotary import Rotary, turn, turns_back


class SplitStates(NamedTuple):
    """Keys or values of one layer, by kind of head.

    Args:
        rest: ``(B, H_rest, K, D)``, of the heads whose reach is bounded, of the planned slots.
        full: ``(B, H_full, slots, D)``, of the full heads, of all slots.
        turned: bool ``(B or 1, slots)``, which columns of ``full`` stand at 0; None for values, and where none can.
    """

    rest: torch.Tensor
    full: torch.Tensor
    turned: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> SplitStates:
        """The same in another dtype."""
        return self._replace(rest=self.rest.to(dtype), full=self.full.to(dtype))


class Turning(NamedTuple):
    """What a plan needs to know of rotary distances.

    Args:
        rotary: the model's rotary embedding.
        max_distance: d; a key so far behind the next query, or further, is turned to 0.
    """

    rotary: Rotary
    max_distance: int


class SplitLayer(BoundedLayer):
    """One layer's keys and values; ``keys`` and ``values`` hold the bounded heads, as in ``BoundedLayer``.

    Args:
        full: the KV heads that keep all their keys.
        kv_heads: number of KV heads.
    """

    def __init__(self, full: Sequence[int], kv_heads: int) -> None:
        super().__init__()
        self.full = list(full)
        self.rest = [head for head in range(kv_heads) if head not in self.full]
        self.full_keys: torch.Tensor | None = None
        self.full_values: torch.Tensor | None = None
        self.turned_by = np.zeros((1, 0), np.int64)  # positions by which each key was turned back, 0: it was not
        self._full_rooms = Room(), Room()
        self._far = np.zeros((1, 0), bool)  # columns that the coming forward sees from afar alone
        self._turning: Turning | None = None

    def plan_turning(self, turning: Turning | None, positions: np.ndarray, first: np.ndarray) -> None:
        """Turns the keys that the coming forward sees from afar alone, and back what a crop has brought near again.

        Args:
            turning: None where rotary distances are not bounded, or the layer does not rotate.
            positions: int64 ``(rows, slots)`` of all tokens, negative for those that nobody sees.
            first: int64 ``(rows,)``, position of the first new query.
        """
        self._turning = turning
        if turning is None:
            if self.turned_by.any():
                raise ValueError(
                    "this cache was filled at bounded rotary distances (max_distance), and the method has none now. "
                    "Let the model make a cache of its own."
                )
            return
        if self.full_keys is None:
            return
        held = positions[:, : self.seen]
        shape = np.broadcast_shapes(held.shape, self.turned_by.shape)
        held, before = np.broadcast_to(held, shape), np.broadcast_to(self.turned_by, shape)
        self._far = (held >= 0) & (held <= first[:, None] - turning.max_distance)
        self.turned_by = np.where(held < 0, before, np.where(self._far, held, 0))
        columns = np.flatnonzero((self.turned_by != before).any(0))
        if len(columns) == 0:
            return
        keys = self.full_keys
        old, new = (torch.from_numpy(by[:, columns]).to(keys.device) for by in (before, self.turned_by))
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        index = torch.from_numpy(columns).to(keys.device)
        turned = turn(
            keys.index_select(2, index), turns_back(turning.rotary, old, new, dtype), turning.rotary.interleaved
        )
        # Only memory of our own is written to, and never while autograd may have saved it.
        writable = not torch.is_grad_enabled() and keys is self._full_rooms[0].view
        writable = writable and (torch.is_inference_mode_enabled() or not keys.is_inference())
        turned = turned.to(keys.dtype)
        self.full_keys = keys.index_copy_(2, index, turned) if writable else keys.index_copy(2, index, turned)

    @torch.compiler.disable
    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[SplitStates, SplitStates]:
        """Appends keys and values ``(B, H_kv, Q, D)``; see ``BoundedLayer.update`` for the bounded heads."""
        held = np.arange(self.seen)
        rest = super().update(key_states[:, self.rest], value_states[:, self.rest])
        new = key_states[:, self.full], value_states[:, self.full]
        old = (self.full_keys, self.full_values)
        keys, values = (
            room.extend(added[:, :, :0] if tensor is None else tensor, held, added)
            for room, tensor, added in zip(self._full_rooms, old, new, strict=True)
        )
        self.full_keys, self.full_values = keys, values
        self.turned_by = _longer(self.turned_by, keys.shape[2])
        far = _longer(self._far, keys.shape[2])
        turned = None if self._turning is None else torch.from_numpy(far).to(keys.device)
        return SplitStates(rest[0], keys, turned), SplitStates(rest[1], values)

    def crop(self, tokens_to_remove: int) -> None:
        """As ``BoundedLayer.crop``; keys that come near again are turned back by the next plan."""
        super().crop(tokens_to_remove)
        if self.full_keys is not None and self.full_values is not None:
            self.full_keys, self.full_values = self.full_keys[:, :, : self.seen], self.full_values[:, :, : self.seen]
            self.turned_by = self.turned_by[:, : self.seen]

    def _each(self, change: Any) -> None:
        if self.full_keys is not None and self.full_values is not None:
            self.full_keys, self.full_values = change(self.full_keys), change(self.full_values)

    def _rows(self, index: torch.Tensor) -> None:
        self._each(lambda states: states.index_select(0, index.to(states.device)))
        if self.turned_by.shape[0] > 1:
            self.turned_by = self.turned_by[index.cpu().numpy()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:  # type: ignore[override]
        """Puts the rows in another order, int64 ``(B,)``."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some of the rows."""
        super().batch_select_indices(indices)
        if self.full_keys is not None:
            self._rows(torch.arange(self.full_keys.shape[0], device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row."""
        super().batch_repeat_interleave(repeats)
        self._each(lambda states: states.repeat_interleave(repeats, dim=0))
        if self.turned_by.shape[0] > 1:
            self.turned_by = self.turned_by.repeat(repeats, axis=0)

    def offload(self) -> None:
        """The host's, for all heads."""
        super().offload()
        self._each(lambda states: states.to("cpu", non_blocking=True))
        self._full_rooms = Room(), Room()

    def prefetch(self) -> None:
        """The host's, for all heads."""
        super().prefetch()
        self._each(lambda states: states.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forgets all tokens."""
        super().reset()
        self.full_keys = self.full_values = None
        self.turned_by, self._far = np.zeros((1, 0), np.int64), np.zeros((1, 0), bool)
        self._full_rooms = Room(), Room()


def _longer(columns: np.ndarray, length: int) -> np.ndarray:
    """Columns ``(rows, K)`` and zeros after them."""
    return np.pad(columns, ((0, 0), (0, length - columns.shape[1])))
