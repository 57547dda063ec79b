"""Tiny random models of all families, for the tests of this package and of its users."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "llama4": (
        transformers.Llama4TextConfig,
        transformers.Llama4ForCausalLM,
        {
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "moe_layers": [],
            "no_rope_layers": [1, 0],
        },
    ),
}

FAMILIES = tuple(_FAMILIES)
"""Names that ``tiny_model`` takes."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of ``tiny_model``.

    Args:
        family: ``"mistral"``, ``"qwen3"`` or ``"llama4"``.
        **overrides: fields of the family's config.

    Raises:
        ValueError: an unknown family.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family is {family!r}; choose one of {', '.join(FAMILIES)}.")
    config_class, _, fields = _FAMILIES[family]
    return config_class(**{**_SIZES, **fields, **overrides})


def tiny_model(
    family: str, *, seed: int = 0, model_class: type[PreTrainedModel] | None = None, **overrides: Any
) -> Any:
    """An unpatched model of about 20 thousand random parameters, float32, on the CPU, in evaluation mode.

    Args:
        family: ``"mistral"``, ``"qwen3"`` or ``"llama4"``.
        seed: seed of the weights; the same seed gives the same model. The global generator is left as it was.
        model_class: a class of the family; its causal language model if None.
        **overrides: fields of the family's config.

    Returns:
        A model with 2 layers, 4 query heads, 2 KV heads and head dim 8. Mistral has no sliding window
        and Llama-4 chunks of 8192 unless ``overrides`` say so; Llama-4's second layer has no RoPE.

    Raises:
        ValueError: an unknown family.
    """
    config = tiny_config(family, **overrides)
    model_class = _FAMILIES[family][1] if model_class is None else model_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()  # type: ignore[call-arg]
