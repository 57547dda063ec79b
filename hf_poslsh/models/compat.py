"""What differs between the supported releases of transformers (5.4 and later). Nothing else looks at versions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import MistralModel
from transformers.utils import output_capturing

CACHE_NAME = "cache" if "cache" in inspect.signature(MistralModel.forward).parameters else "past_key_values"
"""The name of the cache argument of every forward: ``past_key_values`` before 5.24."""


def tokens_seen(cache: Any) -> int | torch.Tensor:
    """Number of tokens that ``cache`` holds. A static cache keeps it in a tensor that it updates in place."""
    seen = cache.get_query_offset() if hasattr(cache, "get_query_offset") else cache.get_seq_length()
    return seen.clone() if isinstance(seen, torch.Tensor) else seen


def key_slots(cache: Any, num_layers: int, queries: int) -> tuple[tuple[int, int], ...]:
    """First slot and number of the keys that each layer's attention will be given in this forward.

    Slots number the tokens of a row from the first that the cache ever saw, padding included. To be called before
    any layer updates the cache: afterwards the same questions get other answers.
    """
    if cache is None:
        return ((0, queries),) * num_layers
    sizes = (cache.get_mask_sizes(queries, layer) for layer in range(num_layers))
    return tuple((start, length) for length, start in sizes)


def can_record(cache: Any) -> bool:
    """Whether this release tells a cache before it takes tokens back (assisted decoding), and when they are final."""
    return hasattr(cache, "activate_past_recording")


def sub_configs_of(config_class: type, **replaced: type) -> dict[str, Any]:
    """The class attribute that names the parts of a composite config, some of them replaced."""
    for name in ("sub_configs_defaults", "sub_configs"):
        if name in vars(config_class):
            return {name: {**getattr(config_class, name), **replaced}}
    raise AttributeError(f"{config_class.__name__} names no sub-configs")


def register_output_recorders(model_class: type) -> None:
    """Lets ``output_hidden_states`` work on instances whose class was changed after they were made.

    transformers notes what can be recorded when a model is constructed, under the printed name of its class.
    """
    registry = output_capturing._CAN_RECORD_REGISTRY
    dict.__setitem__(registry, str(model_class), getattr(model_class, "_can_record_outputs", None))
