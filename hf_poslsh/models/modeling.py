"""Mixins of the model classes: what all of them refuse, and the base model's forward."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import GenerationMode
from transformers.utils import logging

from hf_poslsh.cache import (
    BoundedLayer,
    Sight,
    check_windows,
    drops_keys,
    has_bounded,
    heads_of,
    make_bounded,
    plan_forward,
    sight_of_layer,
)
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.attention import ATTENTION_NAME, host_limits, rotates
from hf_poslsh.models.checks import check_mask, check_weights, sequence_ends
from hf_poslsh.models.compat import CACHE_NAME, can_record, key_slots, tokens_seen
from hf_poslsh.models.configuration import check_attention_name
from hf_poslsh.models.context import Context, place_tokens
from hf_poslsh.models.rope import covered_length, rotary_of
from hf_poslsh.ops.rotary import Turns, make_turns
from hf_poslsh.split_cache import SplitLayer, Turning
from hf_poslsh.static_cache import has_rings, make_static_bounded, plan_rings

if TYPE_CHECKING:
    _HostModel = PreTrainedModel
else:
    _HostModel = object

MODEL_TAGS = [ATTENTION_NAME, "requires hf-poslsh"]
"""In the head of every model card: all that a card can say that PEFT writes."""

logger = logging.get_logger(__name__)


class _PatchedModel(_HostModel):
    """What every patched model tells ``generate``, and says of itself when it is saved."""

    @property
    def name_or_path(self) -> str:
        """What the model was loaded from, for model cards.

        PEFT reads the instance's dict instead, and writes it into adapters: what ``patch_model`` puts there says
        that the original is not enough.
        """
        return self.config.name_or_path or ""

    @name_or_path.setter
    def name_or_path(self, name: str) -> None:
        self.__dict__["name_or_path"] = name

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The host's. A part of a stock model has none: the checkpoint would load as the unpatched model."""
        if kwargs.get("prefix"):
            check_whole(self)
        return super().state_dict(*args, **kwargs)

    def create_masks_for_generate(self, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The padding mask itself, where ``generate`` would make masks ahead for a static cache."""
        return attention_mask

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """The host's; of a dynamic or static cache that it makes, the patched layers become bounded."""
        given = model_kwargs.get(CACHE_NAME)
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        made: Any = model_kwargs.get(CACHE_NAME)
        if given is not None or type(made) not in (DynamicCache, StaticCache):
            return
        assists = getattr(generation_config, "is_assistant", False)
        taken_back = assists or generation_mode == GenerationMode.ASSISTED_GENERATION
        if taken_back and (isinstance(made, StaticCache) or not can_record(made)):
            return  # tokens will be taken back, without word when
        text = self.config.get_text_config()
        method = method_of(text)
        length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        if not _bound(made, text, length) and method.cache == "bounded":
            logger.warning_once(
                f"bias={method.bias!r} has no distance beyond which keys are never seen: the KV cache grows with the "
                "text. Set PosLSHConfig(cache='full') if that is meant."
            )
        if assists:
            made.activate_past_recording()


def check_whole(model: nn.Module) -> None:
    """Checks that no unpatched model of transformers holds this one: it would save a checkpoint without the method.

    A module does not know what holds it, so that all objects of the process are looked at (a quarter of a second per
    million), but for those that ``gc.freeze`` has put aside.

    Raises:
        ValueError: one does.
    """
    owner = _stock_owner(model)
    if owner is not None:
        gc.collect()  # it may be garbage by now
        owner = _stock_owner(model)
    if owner is not None:
        raise ValueError(
            f"this {type(model).__name__} is part of a {owner}, which is not patched: its checkpoints would load as "
            f"the unpatched model. Call patch_model on the {owner}, or take the part out of it."
        )


def _stock_owner(model: nn.Module) -> str | None:
    kinds = set(_subclasses(PreTrainedModel)) - set(_subclasses(_PatchedModel))
    for other in [found for found in gc.get_objects() if type(found) in kinds]:
        if other is not model and any(module is model for module in other.modules()):
            return type(other).__name__
    return None


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [kind, *(below for child in children for below in _subclasses(child))]


class PosLSHModelMixin(_PatchedModel):
    """Every patched ``PreTrainedModel``, base model or head: it runs attention "poslsh" and nothing else."""

    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from hf_poslsh.models.families import check_method, swap_classes

        check_method(config)
        super().__init__(config, *args, **kwargs)
        self.add_model_tags(MODEL_TAGS)
        swap_classes(self, config)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        model = super()._from_config(config, **kwargs)
        model.name_or_path = ""  # an adapter of random weights must not name the checkpoint that the config is from
        return model

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> str:
        return check_attention_name(attn_implementation)

    def get_correct_attn_implementation(self, requested_attention: Any, *args: Any, **kwargs: Any) -> str:
        """``"poslsh"``, or an error."""
        return check_attention_name(requested_attention)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses everything but ``"poslsh"``."""
        check_attention_name(attn_implementation)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: transformers would copy this package's source files into every checkpoint."""


class PosLSHCompositeMixin(_PatchedModel):
    """A model that holds a patched text model beside parts that are left alone."""

    _supports_attention_backend = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from hf_poslsh.models.families import check_method, swap_classes

        check_method(config.get_text_config())
        super().__init__(config, *args, **kwargs)
        self.add_model_tags(MODEL_TAGS)
        swap_classes(self, config.get_text_config())

    register_for_auto_class = PosLSHModelMixin.register_for_auto_class


class PosLSHBaseModelMixin(PosLSHModelMixin):
    """A patched base model: it tells the attention layers where the tokens stand."""

    _poslsh_step: int | None = None
    _poslsh_rotary: str | None = None  # set by register_family
    _poslsh_warned = False

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The host's forward. ``attention_mask`` is the 2-D padding mask of all tokens, cached ones included."""
        cache = past_key_values if cache is None else cache
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None:
            wants_cache = self.config.use_cache if use_cache is None else use_cache
            # A compiled graph cannot ask which keys to drop, and in training nobody reads the cache.
            if cache is None and wants_cache and not self.training and not torch.compiler.is_compiling():
                cache = DynamicCache(config=self.config)
                _bound(cache, self.config)
            kwargs["poslsh"] = self._context(tokens, attention_mask, position_ids, cache, kwargs)
        return super().forward(
            input_ids=input_ids,
            attention_mask=None,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE_NAME: cache},
            **kwargs,
        )

    def _context(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Context:
        queries = tokens.shape[1]
        seen = 0 if cache is None else tokens_seen(cache)
        slots_of_layers = key_slots(cache, self.config.num_hidden_layers, queries)
        ends = [start + length for start, length in slots_of_layers]
        if not isinstance(seen, torch.Tensor):
            ends.append(seen + queries)
        check_mask(mask, tokens, seen, cache)
        positions, segments = place_tokens(
            queries,
            max(ends),
            seen,
            tokens.device,
            mask,
            position_ids,
            kwargs.get("seq_idx"),
            sequence_ends(tokens, seen, kwargs),
        )
        method = method_of(self.config)
        step = self._draw_step(method)
        plain = method.full_heads is not None and _is_plain(positions, segments, seen)
        weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        if weights:
            check_weights(self.config, tokens, positions.shape[1])
        turns = self._turns(method, positions, queries, seen, None if weights else cache)
        self._warn_of_untrained_distances(method, positions, mask is None and segments is None)
        if cache is not None and has_rings(cache):
            rings = plan_rings(cache, queries, seen, positions, segments, _sights(self.config, step))
            slots = tuple(rings.get(layer, span) for layer, span in enumerate(slots_of_layers))
            return Context(method, positions, segments, seen, slots, step, turns, plain, weights)
        if cache is not None and drops_keys(cache):
            sights = _sights(self.config, step)
            if torch.compiler.is_compiling() and not has_bounded(cache):
                check_windows(slots_of_layers, queries, sights)
                return Context(method, positions, segments, seen, slots_of_layers, step, turns, plain, weights)
            slots_of_layers = plan_forward(
                cache, queries, int(seen), slots_of_layers, positions, segments, sights,
                keep_all=step is not None,  # the next step's draws may reach further
                turning=self._turning(method),
            )  # fmt: skip
        return Context(method, positions, segments, seen, slots_of_layers, step, turns, plain, weights)

    def _turns(
        self, method: PosLSHConfig, positions: torch.Tensor, queries: int, seen: int | torch.Tensor, cache: Any
    ) -> Turns | None:
        if method.max_distance is None:
            return None
        assert isinstance(method.max_distance, int)
        assert self._poslsh_rotary is not None
        slots = seen + torch.arange(queries, device=positions.device)
        # For one query, a split cache has turned all keys that are far already; impl="auto" reads them as they are.
        turned = queries == 1 and _splits(cache) and method.impl == "auto"
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return make_turns(
            rotary_of(self, self._poslsh_rotary),
            positions.index_select(1, slots),
            method.max_distance,
            method.sink_tokens,
            dtype,
            positions if method.full_heads is not None and not turned else None,
        )

    def _turning(self, method: PosLSHConfig) -> list[Turning | None] | None:
        if method.full_heads is None or method.max_distance is None:
            return None
        assert isinstance(method.max_distance, int)
        assert self._poslsh_rotary is not None
        turning = Turning(rotary_of(self, self._poslsh_rotary), method.max_distance)
        layers: Any = self.layers
        return [turning if rotates(layer.self_attn) else None for layer in layers]

    def _warn_of_untrained_distances(self, method: PosLSHConfig, positions: torch.Tensor, whole: bool) -> None:
        """Warns once, ``whole``: where every slot is a token of one document, whose number is its length."""
        distant = method.sink_tokens > 0 or method.full_heads is not None
        distant = distant and method.max_distance is None and method.rope == "keep"
        length = covered_length(self.config)
        if not distant or positions.shape[1] <= length or self._poslsh_warned or torch.compiler.is_compiling():
            return
        tokens = positions.shape[1] if whole else int(positions.max()) + 1
        layers = range(self.config.num_hidden_layers) if method.layers is None else method.layers
        sights = _sights(self.config)
        modules: Any = self.layers
        rotated = [layer for layer in layers if rotates(modules[layer].self_attn)]
        if tokens > length and any(min(sights[i].window, sights[i].chunk) > length for i in rotated):
            self._poslsh_warned = True
            far = "sink tokens" if method.full_heads is None else "sink tokens and the keys of its full heads"
            logger.warning(
                f"a text of {tokens} tokens is longer than the {length} that this model's rotary embedding was "
                f"trained for, and its {far} stand at their true rotary distance: expect the loss to climb. "
                "Patch with PosLSHConfig(max_distance='auto'), which keeps that distance within the trained length."
            )

    def _draw_step(self, method: PosLSHConfig) -> int | None:
        if method.resample != "step" or not self.training:
            return None
        if self._poslsh_step is None:
            raise ValueError(
                "resample='step' needs the number of the training step: call hf_poslsh.set_step(model, step) "
                "before each, or give the Trainer hf_poslsh.StepCallback()."
            )
        return self._poslsh_step


def _sights(config: Any, step: int | None = None) -> list[Sight]:
    limits = [host_limits(config, layer) for layer in range(config.num_hidden_layers)]
    heads = config.num_attention_heads, config.num_key_value_heads
    return _sights_of(dict(config.poslsh), *heads, step, limits)


@torch.compiler.assume_constant_result
def _sights_of(
    fields: dict[str, Any], num_heads: int, kv_heads: int, step: int | None, limits: list[Any]
) -> list[Sight]:
    method = _method(fields)
    return [sight_of_layer(method, num_heads, layer, step, *pair, kv_heads) for layer, pair in enumerate(limits)]


def _splits(cache: Any) -> bool:
    """Whether all layers with full heads are ours: such a cache is made whole or not at all."""
    return cache is not None and any(isinstance(layer, SplitLayer) for layer in cache.layers)


def _is_plain(positions: torch.Tensor, segments: torch.Tensor | None, seen: int | torch.Tensor) -> bool:
    """Whether all slots hold tokens of one document a row. It looks at values: not known in a compiled graph."""
    if isinstance(seen, torch.Tensor) or torch.compiler.is_compiling():
        return False
    one = segments is None or bool((segments == segments[:, :1]).all())
    return one and bool((positions == torch.arange(positions.shape[1], device=positions.device)).all())


def _bound(cache: Cache, config: Any, length: int = 0) -> bool:
    """Bounds the layers of an empty cache that have a bound, if the method says so.

    Args:
        cache: dynamic or static.
        config: of the text model.
        length: tokens that a static cache is to see.

    Returns:
        Whether a patched layer has one.
    """
    method = method_of(config)
    if method.cache == "full":
        return False
    sights = _sights(config)
    patched = range(len(sights)) if method.layers is None else method.layers
    bounded = {layer: sights[layer] for layer in patched if sights[layer].bounded}
    split = {layer: heads_of(method, layer) for layer in range(len(sights)) if heads_of(method, layer)}
    if isinstance(cache, StaticCache):
        make_static_bounded(cache, {i: sight for i, sight in bounded.items() if i not in split}, length)
    else:
        # Layers of the host too: its own sliding layers count padding, so that holes would push out what is seen.
        layers = {layer: BoundedLayer() for layer, sight in enumerate(sights) if sight.bounded}
        layers |= {layer: SplitLayer(full, config.num_key_value_heads) for layer, full in split.items()}
        make_bounded(cache, layers)
    return bool(bounded)


def method_of(config: Any) -> PosLSHConfig:
    """The method that a patched model's config describes."""
    fields = config.poslsh
    # A copy, because dynamo hands on no attribute that it has not read yet; what is no dict, from_saved refuses.
    return _method(dict(fields) if isinstance(fields, dict) else fields)


@torch.compiler.assume_constant_result
def _method(fields: dict[str, Any]) -> PosLSHConfig:
    return PosLSHConfig.from_saved(fields)
