"""The attention function registered as "poslsh", and the mixin that attention modules become.

The modules keep the host's forward, parameters and names. All that they need to know of the forward at hand comes
in one keyword argument, ``poslsh``, which every decoder layer hands on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_poslsh.cache import heads_of, query_heads
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.context import Context
from hf_poslsh.ops.bias import Layout, PositionBias, bias_from_config
from hf_poslsh.ops.full import full_attention, full_weights
from hf_poslsh.ops.functional import biased_attention
from hf_poslsh.ops.reference import allowed_pairs, attention_weights
from hf_poslsh.ops.rotary import Turns
from hf_poslsh.split_cache import SplitStates

ATTENTION_NAME = "poslsh"
_HOST_ROWS = 1024  # query rows for which a host layer's mask is built at a time

if TYPE_CHECKING:
    _HostAttention = nn.Module
else:
    _HostAttention = object


class PosLSHAttentionMixin(_HostAttention):
    """Makes a host's attention module ours; without state, so that it is put on and off by ``__class__``."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The host's forward; RoPE replaced by no rotation where the method drops it."""
        if _context(self, kwargs).method.rope == "drop":
            position_embeddings = _no_rotation(position_embeddings)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


def _no_rotation(position_embeddings: Any) -> Any:
    # Llama-4 rotates by one complex factor, the others by a cosine and a sine.
    if isinstance(position_embeddings, torch.Tensor):
        return torch.ones_like(position_embeddings)
    cos, sin = position_embeddings
    return torch.ones_like(cos), torch.zeros_like(sin)


def _context(module: nn.Module, kwargs: dict[str, Any]) -> Context:
    context = kwargs.get("poslsh")
    if not isinstance(context, Context):
        raise ValueError(
            f"{type(module).__name__} was run with attention 'poslsh' outside a patched model; "
            "call hf_poslsh.patch_model(model), or load the checkpoint by an Auto class after `import hf_poslsh`."
        )
    return context


def host_limits(config: Any, layer: int) -> tuple[int | None, int | None]:
    """The host's own sliding window and attention chunk of a layer, in positions, or None.

    ``layer_types`` counts where the host's config class knows it: Mistral's attention never reads one.
    """
    layer_types = config.layer_types if hasattr(type(config), "layer_types") else None
    kind = "sliding_attention" if layer_types is None else layer_types[layer]
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return window, chunk


def poslsh_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | SplitStates,
    value: torch.Tensor | SplitStates,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers calls where ``config._attn_implementation == "poslsh"``.

    Args:
        module: the host's attention module; one of ours if the method patches its layer.
        query: ``(B, H, Q, D)``.
        key: ``(B, H_kv, K, D)``, cached keys included; or split into those of full heads and the others.
        value: as ``key``.
        attention_mask: None; padding, documents and windows are in the context.
        dropout: of the attention weights; must be 0 in a patched layer.
        scaling: factor of the scores.
        **kwargs: ``poslsh``, the ``Context`` of this forward; the rest is ignored.

    Returns:
        ``(B, Q, H, D)``, and the attention weights ``(B, H, Q, tokens so far)`` where the context asks for them, else
        None.

    Raises:
        ValueError: something was asked for that would otherwise be ignored silently.
    """
    context = _context(module, kwargs)
    config, layer = module.config, module.layer_idx
    if attention_mask is not None:
        raise ValueError("attention 'poslsh' takes no ready-made mask; pass the 2-D padding mask to the model.")
    if kwargs.get("is_causal") is False or not module.is_causal:
        raise ValueError("is_causal=False is not supported: the patched models are causal. Leave it out.")
    if query.shape[1] != config.num_attention_heads:
        raise ValueError(
            f"layer {layer} got {query.shape[1]} of the model's {config.num_attention_heads} query heads (tensor "
            "parallelism?); slopes and draws belong to global heads. Load the model without a tensor-parallel plan."
        )
    announced = context.num_keys(layer, query.shape[2])
    given = (key.rest if isinstance(key, SplitStates) else key).shape[2]
    if given != announced:
        raise ValueError(
            f"layer {layer} got {given} keys where the cache announced {announced}; "
            "gradient checkpointing cannot continue a filled cache, and a cache serves one forward at a time."
        )
    layout = context.layout(layer, query.shape[2], query.device, *host_limits(config, layer))

    layers = context.method.layers
    if layers is not None and layer not in layers:
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        out = _host_attention(module, query, key, value, layout, dropout, scaling)
        if not context.weights:
            return out, None
        everything = PositionBias.window(query.shape[1], None)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return out, context.by_slot(layer, attention_weights(query, key, everything, layout, scale, "pooled"))
    if not isinstance(module, PosLSHAttentionMixin):
        raise ValueError(f"layer {layer} is to be patched but is a {type(module).__name__}; call patch_model again.")
    if dropout:
        raise ValueError(
            f"attention_dropout is {dropout} in training, which attention 'poslsh' does not have; "
            "load the model with attention_dropout=0.0."
        )
    bias = _bias(dict(config.poslsh), query.shape[1], config.num_key_value_heads, layer, context.step)
    # Autocast computes the projections in half precision but leaves rotated queries and keys in float32.
    dtype = (value.rest if isinstance(value, SplitStates) else value).dtype
    query, key = query.to(dtype), key.to(dtype)
    turns = context.turns if rotates(module) else None
    turns = None if turns is None else turns.on(query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = _parts(module, query, key, value, bias, layout, scale, turns, context)
    order = [head for part in parts for head in part.heads]
    outs = [part.attend(query[:, part.heads] if len(parts) > 1 else query) for part in parts]
    out = _in_order(outs, order).transpose(1, 2).contiguous()
    if not context.weights:
        return out, None
    return out, _in_order([part.weigh(query[:, part.heads]) for part in parts], order)


def rotates(module: Any) -> bool:
    """Whether an attention layer of the host has a rotary embedding: some layers of Llama-4 have none."""
    return bool(getattr(module, "use_rope", True))


class _Part(NamedTuple):
    """Some of a layer's query heads: how their output and their weights are computed from their queries."""

    heads: list[int]
    attend: Callable[[torch.Tensor], torch.Tensor]
    weigh: Callable[[torch.Tensor], torch.Tensor]


def _in_order(parts: list[torch.Tensor], heads: list[int]) -> torch.Tensor:
    """Tensors ``(B, some of the heads, ...)`` as one, its heads in order."""
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor(heads, device=parts[0].device).argsort()
    return torch.cat(parts, dim=1).index_select(1, order)


def _parts(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    bias: PositionBias,
    layout: Layout,
    scale: float,
    turns: Turns | None,
    context: Context,
) -> list[_Part]:
    """The heads that keep all their keys, if the layer has some, and the others."""
    method, layer, queries = context.method, module.layer_idx, query.shape[2]
    kv_heads, full = module.config.num_key_value_heads, heads_of(method, layer)
    full_queries, rest_queries = query_heads(full, query.shape[1], kv_heads)
    parts = []
    if full:
        split = isinstance(key, SplitStates)
        turned, whole, all_turns = None, layout, turns
        if split:
            turned = key.turned
            whole = context.layout(layer, queries, query.device, layout.window, layout.chunk, all_slots=True)
        else:
            if turns is not None:
                all_turns = turns.of_keys(context.key_slots[layer])
            rest = [head for head in range(kv_heads) if head not in full]
            key, value = (SplitStates(states[:, rest], states[:, list(full)]) for states in (key, value))
        keys, full_key, full_value = key.full.shape[2], key.full, value.full
        plain = context.plain and whole.key_positions.shape[1] == keys
        slots = context.positions.shape[1]
        plain = plain and (layout.window is None or layout.window >= keys)
        plain = plain and (layout.chunk is None or layout.chunk >= slots)

        def attend_to_all(q: torch.Tensor) -> torch.Tensor:
            return full_attention(q, full_key, full_value, whole, scale, all_turns, turned, method.impl, plain)

        def weigh_all(q: torch.Tensor) -> torch.Tensor:
            weights = full_weights(q, full_key, whole, scale, all_turns, turned)
            return weights if split else context.by_slot(layer, weights)

        parts.append(_Part(full_queries, attend_to_all, weigh_all))
        key, value = key.rest, value.rest
    sinks = turns._replace(keys=None) if turns is not None and method.sink_tokens else None

    def attend(q: torch.Tensor) -> torch.Tensor:
        return biased_attention(q, key, value, bias, layout, scale, method.estimator, method.impl, turns=sinks)[0]

    def weigh(q: torch.Tensor) -> torch.Tensor:
        weights = attention_weights(q, key, bias, layout, scale, method.estimator, sinks)
        return context.by_slot(layer, weights)

    if rest_queries:
        parts.append(_Part(rest_queries, attend, weigh))
    return parts


@torch.compiler.assume_constant_result
def _bias(fields: dict[str, Any], num_heads: int, kv_heads: int, layer: int, step: int | None) -> PositionBias:
    """The bias of a layer's query heads, without those that are full."""
    # From the dict, because torch.compile hands a constant function plain containers only.
    method = PosLSHConfig.from_dict(fields)
    bias = bias_from_config(method, num_heads, layer, step)
    full = heads_of(method, layer)
    return bias if not full else _of_heads(bias, tuple(query_heads(full, num_heads, kv_heads)[1]))


@functools.lru_cache(maxsize=1024)
def _of_heads(bias: PositionBias, heads: tuple[int, ...]) -> PositionBias:
    return bias.of_heads(heads) if heads else bias


def _host_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """A layer that the method leaves alone: the host's SDPA under the mask of this forward, a few rows at a time."""
    outs = []
    for start in range(0, query.shape[2], _HOST_ROWS):
        part = slice(start, start + _HOST_ROWS)
        segments = None if layout.query_segments is None else layout.query_segments[:, part]
        allowed = allowed_pairs(
            Layout(
                layout.query_positions[:, part],
                layout.key_positions,
                segments,
                layout.key_segments,
                layout.is_causal,
                layout.window,
                layout.chunk,
            )
        )[:, None]
        seen = allowed.any(-1, keepdim=True)
        # A row that sees nothing would be NaN in some SDPA kernels; it sees everything and is then set to 0.
        out, _ = sdpa_attention_forward(
            module, query[:, :, part], key, value, allowed | ~seen, dropout=dropout, scaling=scaling, is_causal=False
        )
        outs.append(torch.where(seen.transpose(1, 2), out, 0))
    return torch.cat(outs, dim=1)


AttentionInterface.register(ATTENTION_NAME, poslsh_attention)
