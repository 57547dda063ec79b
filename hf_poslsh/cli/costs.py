"""What a method costs on a model of given shape: windows, cache and FLOPs, exactly, for its own draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hf_poslsh.cache import Sight, heads_of, query_heads, sight_of_layer
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.hashing import MAX_WIDTH
from hf_poslsh.models.attention import host_limits
from hf_poslsh.ops.bias import UNLIMITED, PositionBias, bias_from_config
from hf_poslsh.theory.work import drawn_keys


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's shape, as far as attention is concerned."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of the text part of a transformers config.

        Raises:
            ValueError: a number of it is none.
        """
        text = config.get_text_config()
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            number = getattr(text, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"config.json has {name}={number!r}; it must be an integer of at least 1.")
        return cls(text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.head_dim)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One layer at a length of n tokens, for a batch.

    Args:
        layer: layer index.
        patched: whether the method applies to it.
        windows: by query head, how many keys the widest bin holds at most, or a sliding window; None: no limit.
        host_window: the model's own sliding window, or None.
        host_chunk: the model's own attention chunk, or None.
        keys_per_query: keys that a query meets, mean over queries and heads.
        cache_tokens: the most tokens of a sequence that the KV cache holds on the way to n; full heads hold all n.
        cache_bytes: keys and values of those.
        flops: of q . k and of the values, for all n tokens.
        full_heads: KV heads that keep all their keys.
    """

    layer: int
    patched: bool
    windows: list[int | None]
    host_window: int | None
    host_chunk: int | None
    keys_per_query: float
    cache_tokens: int
    cache_bytes: int
    flops: int
    full_heads: list[int]


def layer_costs(
    config: Any, method: PosLSHConfig | None, n: int, batch: int, bytes_per_number: int
) -> list[LayerCost]:
    """The cost of every layer of a model; that of the host's own attention where ``method`` is None.

    Raises:
        ValueError: the method does not fit the model.
    """
    return [
        _layer_cost(config.get_text_config(), Shape.of(config), method, layer, n, batch, bytes_per_number)
        for layer in range(Shape.of(config).layers)
    ]


def number_format(config: Any, name: str | None) -> tuple[str, int]:
    """Name and bytes of a number in a cache: of ``name``, such as ``"bfloat16"``, or else of the checkpoint.

    Raises:
        ValueError: the config has a dtype that is none.
    """
    text = config.get_text_config()
    name = name or str(text.dtype or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"config.json has dtype={name!r}, which torch does not know.")
    return name, dtype.itemsize


def full_cost(shape: Shape, n: int, batch: int, bytes_per_number: int) -> tuple[int, int]:
    """Bytes of one layer's cache that holds all n tokens, and the FLOPs of its full causal attention."""
    pairs = n * (n + 1) // 2
    return token_bytes(shape, batch, bytes_per_number) * n, 4 * shape.head_dim * shape.heads * pairs * batch


def token_bytes(shape: Shape, batch: int, bytes_per_number: int) -> int:
    """Bytes of the key and the value of one token in one layer."""
    return 2 * shape.kv_heads * shape.head_dim * bytes_per_number * batch


def _layer_cost(
    text: Any, shape: Shape, method: PosLSHConfig | None, layer: int, n: int, batch: int, bytes_per_number: int
) -> LayerCost:
    window, chunk = host_limits(text, layer)
    patched = method is not None and (method.layers is None or layer in method.layers)
    bias = PositionBias.window(shape.heads, None)
    last = np.array([n - 1])
    tokens = np.array([_held_by_host(window, chunk, n)])
    full: tuple[int, ...] = ()
    if method is not None:  # bounded layers stand in for the host's own sliding ones too
        if patched:
            bias = bias_from_config(method, shape.heads, layer)
        full = heads_of(method, layer)
        sight = sight_of_layer(method, shape.heads, layer, None, window, chunk, shape.kv_heads)
        if method.cache == "bounded" and sight.bounded:
            last = _last_queries(sight, n)
            tokens = sight.number_seen(last) + 1  # what the query sees, and itself
    full_queries = query_heads(full, shape.heads, shape.kv_heads)[0]
    whole = PositionBias.window(shape.heads, None)
    kinds = [whole if head in full_queries else bias for head in range(shape.heads)]
    pairs = [_visible_pairs(kind, head, n, window, chunk) for head, kind in enumerate(kinds)]
    reach = [int(kind.reach[head]) for head, kind in enumerate(kinds)]
    held = int((tokens * (shape.kv_heads - len(full)) + (last + 1) * len(full)).max())  # of all KV heads together
    return LayerCost(
        layer,
        patched,
        [None if limit >= UNLIMITED else limit for limit in reach],
        window,
        chunk,
        sum(pairs) / (n * shape.heads),
        int(tokens.max()),
        held * token_bytes(shape, batch, bytes_per_number) // shape.kv_heads,
        4 * shape.head_dim * sum(pairs) * batch,
        list(full),
    )


def _last_queries(sight: Sight, n: int) -> np.ndarray:
    """Queries of which one sees most: the last, the last that still sees the sinks, the last of a chunk."""
    return np.array([n - 1, min(n, sight.chunk) - 1, min(n, sight.window) - 1])


def _held_by_host(window: int | None, chunk: int | None, n: int) -> int:
    limit = window or chunk
    return n if limit is None else min(n, limit - 1)  # what the next token sees besides itself


def _visible_pairs(bias: PositionBias, head: int, n: int, window: int | None, chunk: int | None) -> int:
    """Pairs of a query and a key that it sees, in one head."""
    hashes = bias.hashes
    if hashes.widths[head, 0] < MAX_WIDTH:
        return round(n * drawn_keys(hashes, n, head, bias.sink_tokens, window, chunk).banded)
    sight = Sight(int(bias.reach[head]), bias.sink_tokens, window or UNLIMITED, chunk or UNLIMITED)
    return n + int(sight.number_seen(np.arange(n)).sum())
