"""What a host says of rotary positions: trained context length, frequencies, and whether distances can be bounded."""

from __future__ import annotations

from typing import Any

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.ops.rotary import Rotary

ROTARY_KINDS = ("half", "interleaved")
"""How a family pairs the dimensions of a head, see ``Rotary``."""
_FIXED = ("default", "linear", "yarn", "llama3")  # frequencies that do not depend on the length of the text


def _parameters(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def trained_length(config: Any) -> int:
    """Tokens that a model's rotary embedding was trained for, before its frequencies were rescaled for more."""
    original = _parameters(config).get("original_max_position_embeddings")
    return int(original or config.max_position_embeddings)


def covered_length(config: Any) -> int:
    """Largest rotary distance that a model knows: its trained length, times the factor of rescaled frequencies."""
    parameters = _parameters(config)
    if parameters.get("rope_type", "default") == "default":
        return trained_length(config)
    scaled = int(trained_length(config) * (parameters.get("factor") or 1.0))
    return max(scaled, config.max_position_embeddings if "original_max_position_embeddings" in parameters else 0)


def auto_max_distance(config: Any) -> int:
    """The number that ``max_distance="auto"`` stands for.

    An eighth of the trained context length. Chosen by measurement, see docs/beyond.md.
    """
    return max(trained_length(config) // 8, 1)


def check_max_distance(method: PosLSHConfig, config: Any, rotary: str | None) -> None:
    """Checks that rotary distances can be bounded in a model.

    Args:
        method: the method.
        config: the model's text config.
        rotary: how its family pairs dimensions, or None where that is not known.

    Raises:
        ValueError: they cannot, or ``max_distance`` is still ``"auto"``.
    """
    if method.max_distance is None:
        return
    if method.max_distance == "auto":
        raise ValueError(
            "max_distance is 'auto' in a model's config; patch_model puts a number there. Give a number."
        )
    if rotary is None:
        raise ValueError(
            f"max_distance={method.max_distance} needs to know how {config.model_type!r} pairs the dimensions that "
            "it rotates; say so: register_family(..., rotary='half' or 'interleaved'). Or leave max_distance out."
        )
    parameters = _parameters(config)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(
            f"max_distance={method.max_distance} does not go with {config.model_type!r}, whose layers have rotary "
            f"embeddings of different kinds ({', '.join(map(str, parameters))}). Set max_distance=None."
        )
    kind = parameters.get("rope_type", "default")
    if kind not in _FIXED:
        raise ValueError(
            f"max_distance={method.max_distance} does not go with rope_type={kind!r}, whose frequencies depend on "
            f"the length of the text; supported: {', '.join(_FIXED)}. Set max_distance=None."
        )


def rotary_of(base: Any, kind: str) -> Rotary:
    """The rotary embedding of a base model: its own frequencies, float32 as its forward takes them."""
    return Rotary(base.rotary_emb.inv_freq.float(), kind == "interleaved")
