"""From logits to per-token scores. No models, no files, no averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch


def score_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood and rank of each target.

    Args:
        logits: ``(..., V)``, any float dtype; the softmax is in float32 or better.
        targets: integer ``(...)``, in ``0 .. V-1``.

    Returns:
        The negative log-likelihoods in nats, float32 (float64 for float64 logits) ``(...)``, and the ranks, int64
        ``(...)``: how many tokens are rated above the target; among equal logits the lower token id counts as
        rated above. The target is among the model's k best where its rank is below k.

    Raises:
        FloatingPointError: a negative log-likelihood is NaN.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    index = targets.unsqueeze(-1)
    target_logits = logits.gather(-1, index)
    nll = logits.logsumexp(-1) - target_logits.squeeze(-1)
    if nll.isnan().any():
        raise FloatingPointError(
            f"{int(nll.isnan().sum())} of {nll.numel()} target log-likelihoods are NaN; the model's weights or "
            "activations are not finite."
        )
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < index
    above = (logits > target_logits) | ((logits == target_logits) & lower_id)
    return nll, above.sum(-1)


@dataclass(frozen=True)
class TokenScores:
    """Scores of T targets.

    Args:
        document: int64 ``(T,)``, the target's document.
        target: int64 ``(T,)``, its token index in that document.
        context: int64 ``(T,)``, the number of tokens that were read before it.
        bytes: int64 ``(T,)``, how many UTF-8 bytes of the text it stands for.
        nll: float64 ``(T,)``, negative log-likelihood in nats.
        rank: int64 ``(T,)``, how many tokens were rated above it.

    Raises:
        ValueError: the arrays differ in shape.
    """

    document: np.ndarray
    target: np.ndarray
    context: np.ndarray
    bytes: np.ndarray
    nll: np.ndarray
    rank: np.ndarray

    def __post_init__(self) -> None:
        shapes = {name: array.shape for name, array in self.arrays().items()}
        if len(set(shapes.values())) != 1 or self.nll.ndim != 1:
            raise ValueError(f"the arrays of TokenScores must share one shape (T,); got {shapes}.")

    def __len__(self) -> int:
        return len(self.nll)

    def __getitem__(self, chosen: np.ndarray) -> TokenScores:
        """The scores of some targets: a boolean mask or indices."""
        return TokenScores(**{name: array[chosen] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields by name, as ``numpy.savez`` and the constructor take them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def empty(cls) -> TokenScores:
        """No scores: the share of a process that found nothing left to do."""
        return cls(
            **{field.name: np.empty(0, "float64" if field.name == "nll" else "int64") for field in fields(cls)}
        )

    @classmethod
    def concatenate(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """All parts together, in document order, whatever the order of the parts.

        Raises:
            ValueError: there are no scores, or a target was scored twice.
        """
        if sum(len(part) for part in parts) == 0:
            raise ValueError("there are no scores to put together; score at least one window.")
        joined = {field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        order = np.lexsort((joined["target"], joined["document"]))
        scores = cls(**joined)[order]
        twice = (np.diff(scores.document) == 0) & (np.diff(scores.target) == 0)
        if twice.any():
            raise ValueError(
                f"{int(twice.sum())} targets were scored twice, the first at token {scores.target[1:][twice][0]}; "
                "windows must not share targets."
            )
        return scores


def require_same_targets(scores: Mapping[Any, TokenScores], what: str = "lengths") -> None:
    """Checks that the same tokens of the same documents were scored, standing for the same text.

    Args:
        scores: by length, by arm, by seed.
        what: the plural of what the keys are, for the message.

    Raises:
        ValueError: two of them differ in their targets, so that their figures must not be compared.
    """
    items = list(scores.items())
    for key, other in items[1:]:
        first_key, first = items[0]
        if not all(np.array_equal(first.arrays()[n], other.arrays()[n]) for n in ("document", "target", "bytes")):
            raise ValueError(f"{what} {first_key} and {key} scored different targets; they can't be compared.")
