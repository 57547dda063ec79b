"""PosLSHConfig: the knobs of the method, checked, to and from a dict. It knows nothing of models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

_CHOICES: dict[str, tuple[str, ...]] = {
    "bias": ("poslsh", "alibi", "fixed_blocks", "window", "none"),
    "sampler": ("staggered", "iid"),
    "estimator": ("pooled", "mean"),
    "rope": ("keep", "drop"),
    "scope": ("head", "layer", "model"),
    "resample": ("fixed", "step"),
    "impl": ("auto", "reference", "banded", "blocks", "flex"),
    "cache": ("bounded", "full"),
}


_ADDED = ("max_distance", "full_heads")  # not in files of earlier versions, which meant the default


@dataclasses.dataclass(frozen=True)
class PosLSHConfig:
    """What ``patch_model`` puts in place of a model's attention.

    Args:
        bias: ``"poslsh"`` (the method), or a baseline behind the same interface: ``"alibi"`` (exact ALiBi, cut
            where at most ``tolerance`` of a row's weight lies), ``"fixed_blocks"`` (blocks of 2 sigma, no
            shift), ``"window"`` (plain sliding window of ``window`` keys), ``"none"`` (all weights 1).
        num_samples: hashes per head, s. The cost of the banded pass grows with log s.
        sampler: ``"staggered"`` (stratified widths, staggered shifts: smaller error at equal cost) or
            ``"iid"`` (the paper's independent draws).
        estimator: ``"pooled"`` (one softmax over the averaged mask; converges to ALiBi) or ``"mean"`` (average
            of s block softmaxes; does not converge to ALiBi, for comparison).
        sigma: length scale in positions: ``"alibi"`` (reciprocal ALiBi slopes, per head), one number, or one
            per query head.
        sink_tokens: the first so many positions of every document stay visible with weight 1.
        max_distance: cap on the rotary distance between a query and a sink token, and between a query and any key in
            ``full_heads``: it becomes min(i - j, max_distance). Keys in the band keep their true distance. None: no
            cap; distances beyond the trained context length are then untrained. ``"auto"``: one eighth of the trained
            context length, filled in by ``patch_model``.
        rope: ``"keep"`` (pretrained models) or ``"drop"`` (no other position signal: training from scratch).
        layers: indices of the layers to patch, or None for all.
        full_heads: for every layer of the model, the KV heads that keep all their keys, ``[[], [0, 2], ...]``. They
            compute what the original does, at rotary distances of at most ``max_distance`` where that is set.
            None: no such heads.
        scope: what shares one set of unit draws: every ``"head"`` its own, one per ``"layer"``, one per
            ``"model"``.
        resample: ``"fixed"`` (the same masks always) or ``"step"`` (fresh masks every training step, keyed by
            an explicit step number; evaluation uses the fixed ones).
        seed: seed of the counter-based generator, 0 <= seed < 2**63.
        impl: how it is computed, see ``positional_lsh_attention``.
        window: number of visible keys, the query's own included, for ``bias="window"`` only.
        tolerance: for ``bias="alibi"``: the largest share of a row's weight that the cut may drop.
        cache: ``"bounded"`` (the dynamic and static KV caches that the model makes keep what later tokens can
            see, and no more; where the bias has no bound they are the host's) or ``"full"`` (the host's). A prompt
            of any length fits with ``generate(prefill_chunk_size=...)``. Caches given by the user stay as they are.

    Raises:
        ValueError: a field has a value that is not supported, or fields contradict each other.
    """

    bias: str = "poslsh"
    num_samples: int = 20
    sampler: str = "staggered"
    estimator: str = "pooled"
    sigma: str | float | tuple[float, ...] = "alibi"
    sink_tokens: int = 0
    max_distance: int | str | None = None
    rope: str = "keep"
    layers: tuple[int, ...] | None = None
    full_heads: tuple[tuple[int, ...], ...] | None = None
    scope: str = "head"
    resample: str = "fixed"
    seed: int = 0
    impl: str = "auto"
    window: int | None = None
    tolerance: float = 1e-6
    cache: str = "bounded"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        _check_int("num_samples", self.num_samples, 1, 1_000_000)
        _check_int("sink_tokens", self.sink_tokens, 0, 2**31 - 1)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        object.__setattr__(self, "sigma", _checked_sigma(self.sigma))
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        object.__setattr__(self, "full_heads", _checked_full_heads(self.full_heads))
        if not _is_number(self.tolerance) or not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance!r}; it must lie between 0 and 1.")
        self._check_max_distance()
        if self.bias == "window":
            if self.window is None:
                raise ValueError("bias='window' needs window=<number of visible keys>.")
            _check_int("window", self.window, 1, 2**31 - 1)
        elif self.window is not None:
            raise ValueError(f"window={self.window!r} goes with bias='window' only, not bias={self.bias!r}.")
        if self.estimator == "mean":
            if self.bias != "poslsh":
                raise ValueError(f"estimator='mean' goes with bias='poslsh' only, not bias={self.bias!r}.")
            if self.impl not in ("auto", "reference", "blocks"):
                raise ValueError(
                    f"estimator='mean' is computed by impl='blocks' or 'reference', not impl={self.impl!r}."
                )
        if self.resample == "step" and self.bias != "poslsh":
            raise ValueError(f"resample='step' draws hashes; bias={self.bias!r} has none.")

    def _check_max_distance(self) -> None:
        distance = self.max_distance
        if distance is None:
            return
        if distance != "auto":
            if isinstance(distance, str):
                raise ValueError(f"max_distance is {distance!r}; give an integer of at least 1, 'auto' or None.")
            _check_int("max_distance", distance, 1, 2**31 - 1)
        if self.rope == "drop":
            raise ValueError(
                f"max_distance={distance!r} bounds rotary distances; rope='drop' has none. Leave one out."
            )
        if self.full_heads is None and (self.sink_tokens == 0 or self.bias == "none"):
            raise ValueError(
                f"max_distance={distance!r} bounds the rotary distance of what a query sees outside of its band; "
                f"with bias={self.bias!r} and sink_tokens={self.sink_tokens} that is nothing. Set sink_tokens (and "
                "another bias than 'none') or full_heads, or leave max_distance out."
            )

    @classmethod
    def paper(cls, **fields: Any) -> PosLSHConfig:
        """The paper's set-up: independent draws, ALiBi slopes, no RoPE (for training from scratch)."""
        return cls(**{"sampler": "iid", "sigma": "alibi", "rope": "drop", **fields})

    @classmethod
    def pretrained(cls, **fields: Any) -> PosLSHConfig:
        """What a pretrained model survives without training, at any length.

        Sigma 256, RoPE kept, and one sink token whose rotary distance stays within the trained context length.
        """
        fields = {"sigma": 256.0, "sink_tokens": 1, "rope": "keep", **fields}
        sees_far = (fields["sink_tokens"] != 0 and fields.get("bias") != "none") or fields.get(
            "full_heads"
        ) is not None
        sees_far = sees_far and fields["rope"] == "keep"
        return cls(**{"max_distance": "auto" if sees_far else None, **fields})

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types (tuples become lists)."""
        fields = dataclasses.asdict(self)
        return {name: _as_list(value) for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PosLSHConfig:
        """The inverse of ``to_dict``. Missing fields take their defaults.

        Raises:
            ValueError: ``fields`` is no mapping, or has a field that this version does not know. An unknown
                field may change what a model computes, so it is never ignored.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"a PosLSHConfig is read from a mapping, not from {type(fields).__name__}.")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(map(str, set(fields) - known))
        if unknown:
            raise ValueError(
                f"unknown PosLSHConfig fields {unknown}; this version knows {sorted(known)}. "
                "A newer hf-poslsh may have written them: pip install -U hf-poslsh."
            )
        return cls(**fields)

    @classmethod
    def from_saved(cls, fields: Mapping[str, Any]) -> PosLSHConfig:
        """``from_dict`` for what was saved: every field must be there.

        Raises:
            ValueError: as ``from_dict``, or a field is missing: its default may be another model than the saved one.
        """
        known = [field.name for field in dataclasses.fields(cls)] if isinstance(fields, Mapping) else []
        missing = [name for name in known if name not in {*fields, *_ADDED}]
        if missing:
            raise ValueError(
                f"the saved PosLSHConfig (entry 'poslsh' of a config.json) lacks {missing}; it was edited. Put back "
                "what was saved, or patch the original again."
            )
        return cls.from_dict(fields)

    def replace(self, **fields: Any) -> PosLSHConfig:
        """A copy with some fields changed, checked again."""
        return self.from_dict({**self.to_dict(), **fields})


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float64 holds
        return False


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be an integer from {low} to {high}.")


def _checked_sigma(sigma: Any) -> str | float | tuple[float, ...]:
    if sigma == "alibi":
        return "alibi"
    if _is_number(sigma) and sigma > 0:
        return float(sigma)
    is_list = isinstance(sigma, Sequence) and not isinstance(sigma, str) and len(sigma) > 0
    if is_list and all(_is_number(value) and value > 0 for value in sigma):
        return tuple(float(value) for value in sigma)
    raise ValueError(
        f"sigma is {sigma!r}; give 'alibi', one positive finite number, or a list of one per query head."
    )


def _checked_full_heads(full_heads: Any) -> tuple[tuple[int, ...], ...] | None:
    if full_heads is None:
        return None

    def is_list(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str)

    good = is_list(full_heads) and all(is_list(heads) for heads in full_heads)
    if not good or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for heads in full_heads for i in heads):
        raise ValueError(
            f"full_heads is {full_heads!r}; give None, or for every layer a list of its KV heads from 0: "
            "[[], [0, 2], ...]."
        )
    if any(len(set(heads)) != len(heads) for heads in full_heads):
        raise ValueError(f"full_heads is {full_heads!r}; every KV head of a layer may be named once.")
    if not any(full_heads):
        raise ValueError(f"full_heads is {full_heads!r}, which names no head; give None.")
    return tuple(tuple(sorted(heads)) for heads in full_heads)


def _checked_layers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    good = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    if not good or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in layers):
        raise ValueError(f"layers is {layers!r}; give None for all, or a list of layer indices from 0.")
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers is {layers!r}; every layer may be named once.")
    return tuple(sorted(layers))
