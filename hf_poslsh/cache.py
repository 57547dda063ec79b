"""A KV cache that stops growing: what no later token can see is dropped, by exact arithmetic.

A bin is never wider than the widest draw, so a key further back than that has weight 0 for every later query of its
document (sinks aside). Positions decide, not slots: padding takes no room in a bin. The model plans each forward
from the positions of its tokens; the layers of the cache only do as they are told. No attention here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.ops._tokens import unlimited
from hf_poslsh.ops.bias import UNLIMITED, bias_from_config


class Sight(NamedTuple):
    """Which earlier positions of its document a query sees in one layer; UNLIMITED where nothing limits it.

    Args:
        reach: keys so many positions away, or more, are never seen, sinks aside.
        sinks: positions below this are sinks.
        window: the host's own sliding window. Limits sinks too.
        chunk: the host's own attention chunk. Limits sinks too.
        full: KV heads that see all that window and chunk let through; the other fields are those of the others.
    """

    reach: int
    sinks: int
    window: int
    chunk: int
    full: tuple[int, ...] = ()

    @property
    def widest(self) -> Sight:
        """What all heads together see."""
        return self._replace(reach=UNLIMITED) if self.full else self

    @property
    def bounded(self) -> bool:
        """Whether there is a distance from which on nothing but sinks is seen."""
        return self.earlier < UNLIMITED - 1

    @property
    def earlier(self) -> int:
        """Largest number of keys before a query that it sees, sinks aside."""
        return min(self.reach, self.window, self.chunk) - 1

    def sees(self, positions: np.ndarray, query: np.ndarray) -> np.ndarray:
        """Which keys a query, or any later one, may see.

        Args:
            positions: int64 ``(rows, K)``, negative for keys that nobody sees.
            query: int64 ``(rows,)``, positions of the first query.

        Returns:
            bool ``(rows, K)``.
        """
        distance = query[:, None] - positions
        seen = (distance < self.reach) | (positions < self.sinks)
        seen &= (positions >= 0) & (distance < self.window)
        if self.chunk < UNLIMITED:
            seen &= positions // self.chunk >= query[:, None] // self.chunk
        return seen

    def number_seen(self, query: np.ndarray) -> np.ndarray:
        """Number of positions before each query that it sees: int64, of the shape of ``query``."""
        first = np.maximum(query - self.window + 1, 0)
        if self.chunk < UNLIMITED:
            first = np.maximum(first, query // self.chunk * self.chunk)
        near = np.maximum(first, query - self.reach + 1)
        return query - near + np.maximum(np.minimum(self.sinks, near) - first, 0)


@functools.lru_cache(maxsize=4096)
def sight_of_layer(
    method: PosLSHConfig,
    num_heads: int,
    layer: int,
    step: int | None,
    window: int | None,
    chunk: int | None,
    kv_heads: int = 1,
) -> Sight:
    """The sight of one layer: that of its widest head, full heads aside.

    Args:
        method: the method; a layer that it does not patch has the host's limits only.
        num_heads: number of global query heads.
        layer: layer index.
        step: training step that keys the draws, or None for the fixed ones.
        window: the host's own sliding window of this layer, or None.
        chunk: the host's own attention chunk of this layer, or None.
        kv_heads: number of global KV heads; counts where some of them are full.
    """
    if method.layers is not None and layer not in method.layers:
        return Sight(UNLIMITED, 0, unlimited(window), unlimited(chunk))
    reach = bias_from_config(method, num_heads, layer, step).reach
    full = heads_of(method, layer)
    if full:
        rest = query_heads(full, num_heads, kv_heads)[1]
        return Sight(int(reach[rest].max(initial=1)), method.sink_tokens, unlimited(window), unlimited(chunk), full)
    return Sight(int(reach.max()), method.sink_tokens, unlimited(window), unlimited(chunk))


def heads_of(method: PosLSHConfig, layer: int) -> tuple[int, ...]:
    """The KV heads of a layer that keep all their keys."""
    return method.full_heads[layer] if method.full_heads is not None else ()


@functools.lru_cache(maxsize=4096)
def query_heads(full: tuple[int, ...], num_heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
    """Query heads of the full KV heads, and all others; each rising."""
    group = num_heads // kv_heads
    owners = [head // group for head in range(num_heads)]
    return [h for h, g in enumerate(owners) if g in full], [h for h, g in enumerate(owners) if g not in full]


class BoundedLayer(DynamicLayer):
    """One layer's keys and values, of which a forward's plan says which to keep.

    ``slots`` are those of the tokens held, rising, the same for all rows; ``seen`` counts the dropped ones too.
    Between ``activate_past_recording`` and ``crop`` nothing is dropped, so that tokens can be taken back.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.full: list[int] = []  # KV heads that keep all their keys: see SplitLayer
        self.slots = np.empty(0, np.int64)
        self.seen = 0
        self.record_past = False
        self._settled = False  # a crop has said what is final, the next forward may drop
        self._rooms = Room(), Room()
        self._plan: tuple[np.ndarray, np.ndarray | None] | None = None

    def plan(
        self, queries: int, positions: np.ndarray, segments: np.ndarray | None, sight: Sight | None
    ) -> np.ndarray:
        """Decides what the coming ``update`` keeps.

        Args:
            queries: number of new tokens.
            positions: int64 ``(rows, slots)`` of all tokens, negative for those that nobody sees any more.
            segments: int64 ``(rows, slots)`` or None.
            sight: what queries of this layer see; None to keep everything.

        Returns:
            Slots of the keys that ``update`` will return, int64.
        """
        held = np.arange(len(self.slots))
        after = None
        if sight is not None and (not self.record_past or self._settled):
            first = first_query(positions, self.seen)
            held = np.flatnonzero(sight.sees(positions[:, self.slots], first).any(0))
            self._settled = False
        slots = np.concatenate([self.slots[held], np.arange(self.seen, self.seen + queries)])
        # Single tokens are dropped by the next update, which copies anyway; a long prompt's are not kept till then.
        if sight is not None and not self.record_past and queries > 1:
            last = positions if segments is None else np.where(segments == segments[:, -1:], positions, -1)
            after = np.flatnonzero(sight.sees(last[:, slots], last.max(1) + 1).any(0))
        self._plan = held, after
        return slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """The host's, with empty tensors that have all dimensions."""
        value_states = key_states if value_states is None else value_states
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values ``(B, H_kv, Q, D)`` and drops what the plan says.

        Returns:
            Keys and values of the planned slots, the new ones last.

        Raises:
            ValueError: the forward was not planned: the model is not patched.
        """
        if self._plan is None:
            raise ValueError(
                "a bounded cache was given to a model that is not patched, or twice to one forward; give that model "
                "a cache of its own, such as DynamicCache()."
            )
        (held, after), self._plan = self._plan, None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if after is None:
            keys, values = (
                room.extend(old, held, new)
                for room, old, new in zip(
                    self._rooms, (self.keys, self.values), (key_states, value_states), strict=True
                )
            )
        else:
            keys, values = _joined(self.keys, held, key_states), _joined(self.values, held, value_states)
        queries = key_states.shape[2]
        self.slots = np.concatenate([self.slots[held], np.arange(self.seen, self.seen + queries)])
        self.seen += queries
        self.keys, self.values = keys, values
        if after is not None and len(after) < len(self.slots):
            self.slots = self.slots[after]
            self.keys, self.values = _joined(keys, after), _joined(values, after)
        return keys, values

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Number of keys and a first slot, as if the tokens held were the last ones; the plan has the real slots."""
        return len(self.slots) + query_length, self.seen - len(self.slots)

    def get_seq_length(self, *args: Any) -> int:
        """Number of tokens seen, dropped ones included."""
        return self.seen

    def offload(self) -> None:
        """The host's; the room behind the tokens is given up too."""
        super().offload()
        self._rooms = Room(), Room()

    def activate_past_recording(self) -> None:
        """Keeps everything from now on, until ``crop`` says which tokens are final."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` tokens. A positive number is the length to crop to.

        Whether what is left is enough to go on from there is checked by the next forward.
        """
        length = self.seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.seen)
        kept = int(np.searchsorted(self.slots, length))
        self._settled, self.seen = True, max(length, 0)
        if self.keys is not None and self.values is not None and kept < len(self.slots):
            self.slots = self.slots[:kept]
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.keys = self.values = None
        self.is_initialized = False
        self._rooms = Room(), Room()
        self.slots, self.seen, self._settled, self._plan = np.empty(0, np.int64), 0, False, None


class Room:
    """Memory of one layer's keys or values with room behind them: a token is added without a copy of the others.

    While gradients are off only. What ``extend`` returns is a view that the next ``extend`` may write to.
    """

    def __init__(self) -> None:
        self._store: torch.Tensor | None = None
        self.view: torch.Tensor | None = None
        self._start = self._end = 0  # columns of the view

    def __reduce__(self) -> Any:
        # A copy starts without room: after pickling, store and view would no longer share their memory.
        return Room, ()

    def extend(self, tensor: torch.Tensor, held: np.ndarray, new: torch.Tensor) -> torch.Tensor:
        """The columns ``held`` of ``tensor`` ``(B, H, K, D)``, and ``new`` after them."""
        if torch.is_grad_enabled():
            self._store = self.view = None
            return _joined(tensor, held, new)
        store, old, added = self._store, tensor.shape[2], new.shape[2]
        ours = store is not None and tensor is self.view
        ours = ours and (torch.is_inference_mode_enabled() or not tensor.is_inference())
        if store is None or not ours or len(held) == 0 or held[-1] < old - 1 or self._end + added > store.shape[2]:
            return self._move(tensor, held, new)
        edges = np.flatnonzero(np.diff(held) > 1)
        sinks = int(edges[-1]) + 1 if len(edges) else 0  # columns before the last run: they move up to it
        start = self._start + int(held[sinks]) - sinks
        end = self._end
        if sinks:
            store[:, :, start : start + sinks] = tensor[:, :, torch.from_numpy(held[:sinks]).to(tensor.device)]
        store[:, :, end : end + added] = new
        return self._look(store, start, end + added)

    def _move(self, tensor: torch.Tensor, held: np.ndarray, new: torch.Tensor) -> torch.Tensor:
        length = len(held) + new.shape[2]
        store = new.new_empty(*new.shape[:2], length + length // 4 + 16, new.shape[3])
        torch.cat([_joined(tensor, held), new] if len(held) else [new], 2, out=store[:, :, :length])
        self._store = store
        return self._look(store, 0, length)

    def _look(self, store: torch.Tensor, start: int, end: int) -> torch.Tensor:
        self._start, self._end = start, end
        self.view = store[:, :, start:end]
        return self.view


def _joined(tensor: torch.Tensor, index: np.ndarray, new: torch.Tensor | None = None) -> torch.Tensor:
    """The columns ``index`` of ``(B, H, K, D)``, and ``new`` after them, in one copy."""
    if len(index) == 0:
        return tensor[:, :, :0].clone() if new is None else new
    edges = np.flatnonzero(np.diff(index) > 1)
    starts, ends = index[np.r_[0, edges + 1]], index[np.r_[edges, -1]] + 1
    parts = [tensor[:, :, start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return torch.cat(parts if new is None else [*parts, new], dim=2)


def first_query(positions: np.ndarray, seen: int) -> np.ndarray:
    """Position of each row's first query that exists, or where the row would go on: int64 ``(rows,)``."""
    queries = positions[:, seen:]
    first = np.take_along_axis(queries, (queries >= 0).argmax(1)[:, None], 1)[:, 0]
    return np.where(first >= 0, first, positions.max(1) + 1)


def make_bounded(cache: Cache, layers: Mapping[int, BoundedLayer]) -> None:
    """Replaces layers of an empty ``DynamicCache(config=...)`` by bounded ones, in place."""
    for layer, bounded in layers.items():
        cache.layers[layer] = bounded


def has_bounded(cache: Cache) -> bool:
    """Whether some layer of a cache is ours."""
    return any(isinstance(layer, BoundedLayer) for layer in cache.layers)


def drops_keys(cache: Cache) -> bool:
    """Whether some layer of a cache does not hold all tokens for ever."""
    return has_bounded(cache) or any(getattr(layer, "is_sliding", False) for layer in cache.layers)


def check_windows(spans: Sequence[tuple[int, int]], queries: int, sights: Sequence[Sight]) -> None:
    """The check of ``plan_forward`` for compiled graphs, which read no positions: by slots, of the host's layers.

    Raises:
        ValueError: a layer has dropped tokens that a query sees, unless they are padding.
    """
    for layer, (sight, (start, length)) in enumerate(zip([s.widest for s in sights], spans, strict=True)):
        sinks_lost = sight.sinks > 0 and min(sight.window, sight.chunk) - 1 > length - queries
        if start > 0 and (sight.earlier > length - queries or sinks_lost):
            raise ValueError(_too_small(layer, length - queries, sight.earlier))


def _too_small(layer: int, there: int, needed: int) -> str:
    return (
        f"the cache of layer {layer} holds {there} of the earlier tokens that its queries see: {needed} and "
        "the sink tokens. Give a cache with a larger window, such as DynamicCache(), or none: the model makes one."
    )


@torch.compiler.disable
def plan_forward(
    cache: Cache,
    queries: int,
    seen: int,
    spans: Sequence[tuple[int, int]],
    positions: torch.Tensor,
    segments: torch.Tensor | None,
    sights: Sequence[Sight],
    keep_all: bool,
    turning: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """Plans what every layer keeps, and checks that every layer holds what the queries see.

    Args:
        cache: the cache, before any layer updates it.
        queries: number of new tokens.
        seen: number of tokens that the cache has seen.
        spans: first slot and number of keys of each layer, as the cache announces them.
        positions: int64 ``(rows, slots)``.
        segments: int64 ``(rows, slots)`` or None.
        sights: of every layer.
        keep_all: drop nothing in this forward.
        turning: for every layer, the ``Turning`` of its full heads or None.

    Returns:
        ``spans`` with the slots of all keys in place of the spans of bounded layers.

    Raises:
        ValueError: a layer lacks keys that a query sees.
    """
    slots: list[Any] = list(spans)
    places = positions.cpu().numpy()
    documents = None if segments is None else segments.cpu().numpy()
    first = first_query(places, seen)
    for layer, sight in enumerate(sights):
        held = cache.layers[layer] if layer < len(cache.layers) else None
        if isinstance(held, BoundedLayer):
            if held.full != list(sight.full):
                raise ValueError(
                    f"the cache of layer {layer} keeps all keys of the KV heads {held.full}, where full_heads names "
                    f"{list(sight.full)}: it was made for another method. Let the model make a cache of its own."
                )
            slot = held.plan(queries, places, documents, None if keep_all or not sight.bounded else sight)
            if sight.full:
                held.plan_turning(None if turning is None else turning[layer], places, first)  # type: ignore[attr-defined]
            slots[layer] = torch.from_numpy(slot).to(positions.device)
        elif spans[layer][0] > 0:
            sight = sight.widest
            slot = np.arange(spans[layer][0], sum(spans[layer]))
        else:
            continue  # holds everything
        old = slot[slot < seen]
        if len(old) < seen:
            at = places[:, old]
            there = (sight.sees(at, first) & (at < first[:, None])).sum(1)
            _check_held(layer, there, sight.number_seen(first), isinstance(held, BoundedLayer))
    return tuple(slots)


def _check_held(layer: int, there: np.ndarray, needed: np.ndarray, ours: bool) -> None:
    if (there >= needed).all():
        return
    row = int((there < needed).argmax())
    if not ours:
        raise ValueError(_too_small(layer, int(there[row]), int(needed[row])))
    raise ValueError(
        f"the bounded cache of layer {layer} holds {int(there[row])} of the {int(needed[row])} earlier tokens that "
        f"row {row} sees. It goes on from its last tokens only: to crop it far, to change the padding mask of "
        "earlier tokens or to return to an earlier document, use PosLSHConfig(cache='full')."
    )
