"""Which KV heads of an unpatched model fetch from afar: scores by attention mass, a ranking, the best share of them.

A query of a patched head reads nothing beyond its reach. Few heads of a model ever read from far away, and those can
be found without training, from the attention of a few prompts. Nothing here changes a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from peft import PeftModel
from torch import nn

from hf_poslsh.models.attention import host_limits
from hf_poslsh.models.families import HOSTS, Family, family_of, supported_models
from hf_poslsh.models.rope import covered_length
from hf_poslsh.probes import Probe, natural_probes, planted_probes, probe_masses

KINDS = ("planted", "natural")
"""The kinds of scores."""


@dataclass(frozen=True, eq=False)
class RetrievalScores:
    """How much of their attention the KV heads of a model give to what is to be fetched from afar.

    Args:
        planted: float64 ``(layers, kv_heads)``, from 0 to 1: the mass from the positions that predict a planted
            number to its digits.
        natural: float64 ``(layers, kv_heads)``, from 0 to 1: the mass from a repeated passage to what the first copy
            says next.
        settings: what the scores were made with, in JSON types.

    Raises:
        ValueError: the arrays are not two of one shape.
    """

    planted: np.ndarray
    natural: np.ndarray
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in KINDS:
            object.__setattr__(self, kind, np.asarray(getattr(self, kind), np.float64))
        if self.planted.ndim != 2 or not self.planted.size or self.planted.shape != self.natural.shape:
            raise ValueError(
                f"the scores have shapes {self.planted.shape} and {self.natural.shape}; both must be of one shape "
                "(layers, kv_heads), as retrieval_scores makes them."
            )

    def of(self, kind: str) -> np.ndarray:
        """The scores of a kind, float64 ``(layers, kv_heads)``.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; choose {' or '.join(map(repr, KINDS))}.")
        scores: np.ndarray = getattr(self, kind)
        return scores

    def ranking(self, kind: str = "planted") -> list[tuple[int, int, float]]:
        """All KV heads as (layer, head, score), the best first; equal scores by layer, then by head.

        Args:
            kind: ``"planted"``, which finds the heads that a passkey needs, or ``"natural"``.

        Raises:
            ValueError: there is no such kind.
        """
        scores = self.of(kind)
        entries = [(layer, head, float(scores[layer, head])) for layer, head in np.ndindex(scores.shape)]
        return sorted(entries, key=lambda entry: -entry[2])  # sorted keeps the order of equals

    def to_dict(self) -> dict[str, Any]:
        """Lists and plain values, for JSON."""
        return {**{kind: self.of(kind).tolist() for kind in KINDS}, "settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RetrievalScores:
        """The scores that ``to_dict`` wrote.

        Raises:
            ValueError: a kind of scores is missing, or their shapes make no sense.
        """
        missing = [kind for kind in KINDS if kind not in data]
        if missing:
            raise ValueError(f"the scores have no {', '.join(missing)}; give what RetrievalScores.to_dict returns.")
        return cls(data["planted"], data["natural"], dict(data.get("settings", {})))


def retrieval_scores(
    model: nn.Module,
    tokenizer: Any,
    *,
    length: int = 2048,
    prompts: int = 4,
    seed: int = 0,
    texts: Sequence[str] | None = None,
    on_prompt: Callable[[int, int], None] | None = None,
) -> RetrievalScores:
    """Scores the KV heads of an unpatched model by how much they attend to what is to be fetched from afar.

    Two kinds of prompts, ``prompts`` of each, one pass per prompt. *Planted*: a number of five digits somewhere in a
    text of no interest and a question for it at the end; the mass from the positions that predict the digits to the
    planted digits. *Natural*: a passage at the start of a text that comes again at its end; the mass from positions
    of the second copy to the token that came next in the first. A score is the mean over the positions, the maximum
    over the query heads that share the KV head, and the mean over the prompts. Softmax rows are computed for these
    positions alone: memory grows linearly with ``length``.

    Args:
        model: an unpatched causal language model, base model or PEFT model of a supported family. It is left as it
            was, with its mode and its attention implementation.
        tokenizer: of the model.
        length: tokens of a prompt.
        prompts: prompts of each kind.
        seed: of the planted numbers and the random tokens; no global generator is used.
        texts: what natural prompts are made of, joined; random tokens if None.
        on_prompt: called after each prompt with how many of how many are done.

    Returns:
        The scores. Those of a layer with a sliding window or chunk of the host's are masses under its mask.

    Raises:
        ValueError: the model is patched, of an unknown family, or has no layer that sees ``length`` tokens;
            ``length`` is too small for a prompt or beyond what the model's positions cover; ``texts`` are too short;
            another argument is out of range; or the attention is not finite.

    Example:
        >>> scores = retrieval_scores(model, tokenizer)
        >>> heads_for_share(scores, 0.2)
    """
    for name, number, least in (("prompts", prompts, 1), ("seed", seed, 0), ("length", length, 2)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} is {number!r}; give a whole number, {least} or larger.")
    if isinstance(texts, str):
        raise ValueError("texts is one string; give a list of strings.")
    target: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    base = _base_of(target, _check_family(target))
    config = base.config
    check_length(config, length)
    probes = {
        "planted": planted_probes(tokenizer, length, prompts, seed),
        "natural": natural_probes(tokenizer, length, prompts, seed, texts),
    }
    found = {}
    with _evaluating(target):
        done, total = 0, len(KINDS) * prompts
        for kind in KINDS:
            masses = []
            for probe in probes[kind]:
                masses.append(_finite_masses(base, probe))
                done += 1
                if on_prompt is not None:
                    on_prompt(done, total)
            found[kind] = np.mean(masses, 0)
    settings = {
        "model": getattr(target, "name_or_path", "") or "",
        "dtype": str(base.dtype).removeprefix("torch."),
        "length": length,
        "prompts": prompts,
        "seed": seed,
        "texts": None if texts is None else len(texts),
    }
    return RetrievalScores(found["planted"], found["natural"], settings)


def heads_for_share(scores: RetrievalScores, share: float, kind: str = "planted") -> tuple[tuple[int, ...], ...]:
    """The best KV heads, by layer: the value of ``PosLSHConfig.full_heads``.

    Args:
        scores: of all KV heads.
        share: how many of all KV heads, as a share; the number is rounded.
        kind: the ranking, ``"planted"`` or ``"natural"``.

    Returns:
        For each layer the indices of the chosen KV heads in ascending order; an empty tuple where none is chosen.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1, or less than one head; or there is no such kind.
    """
    ranking = scores.ranking(kind)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(
            f"share is {share!r}; it must be above 0 and at most 1, such as 0.2 for a fifth of the heads."
        )
    count = round(share * len(ranking))
    if count < 1:
        raise ValueError(
            f"share is {share}, which is less than one of the model's {len(ranking)} KV heads; "
            f"give at least {1 / len(ranking):.3g}."
        )
    chosen = ranking[:count]
    return tuple(tuple(sorted(head for la, head, _ in chosen if la == layer)) for layer in range(len(scores.planted)))


def check_length(config: Any, length: int) -> None:
    """Checks that at least one layer of a model sees a prompt whole.

    Args:
        config: the model's text config.
        length: tokens of a prompt.

    Raises:
        ValueError: the model's positions do not cover the length, or all layers have a smaller window or chunk.
    """
    covered = covered_length(config)
    if length > covered:
        raise ValueError(
            f"length is {length}, but the positions of this {config.model_type} model cover {covered} tokens; "
            "give at most that."
        )
    limits = [host_limits(config, layer) for layer in range(config.num_hidden_layers)]
    widest = max(min(window or length, chunk or length) for window, chunk in limits)
    if widest < length:
        raise ValueError(
            f"length is {length}, but no layer of this {config.model_type} model sees more than {widest} tokens: all "
            "have a sliding window or chunk, and none fetches from beyond. Supported are models with at least one "
            f"layer of full attention; give a length of at most {widest} to rank its heads within their windows."
        )


def _check_family(target: nn.Module) -> Family:
    if type(target) in HOSTS:
        raise ValueError(
            f"this {type(target).__name__} is patched: its heads no longer see what is far away. Supported are "
            "unpatched models; call unpatch_model(model) first, or load the original."
        )
    family = family_of(target)
    if family is None:
        raise ValueError(
            f"cannot score the heads of a {type(target).__name__}; supported are exactly {supported_models()}, "
            "before torch.compile or other wrappers. hf_poslsh.register_family adds a model type."
        )
    return family


def _base_of(target: nn.Module, family: Family) -> Any:
    """The base model inside: it gives all that is needed, and no logits, which would be the largest tensor of all."""
    base: Any = next(module for module in target.modules() if type(module) is HOSTS[family.base])
    for index, layer in enumerate(base.layers):
        if type(layer.self_attn) is not HOSTS[family.attention]:
            raise ValueError(
                f"layer {index} has attention {type(layer.self_attn).__name__}, whose heads cannot be scored; "
                f"supported is exactly {HOSTS[family.attention].__name__}: undo what replaced it."
            )
    return base


def _finite_masses(base: Any, probe: Probe) -> np.ndarray:
    masses = probe_masses(base, probe)
    if not np.isfinite(masses).all():
        layer = int(np.argwhere(~np.isfinite(masses))[0, 0])
        raise ValueError(
            f"the attention of layer {layer} is not finite in {base.dtype}; load the model in bfloat16 or float32."
        )
    return masses


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and every module's own mode again."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
