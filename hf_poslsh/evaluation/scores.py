"""From logits to per-token scores, and from scores to perplexity and accuracy. No models, no files."""

from __future__ import annotations

import math
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
    """Scores of T targets; every aggregate weights all tokens equally.

    Args:
        document: int64 ``(T,)``, the target's document.
        target: int64 ``(T,)``, its token index in that document.
        context: int64 ``(T,)``, the number of tokens that were read before it.
        nll: float64 ``(T,)``, negative log-likelihood in nats.
        rank: int64 ``(T,)``, how many tokens were rated above it.

    Raises:
        ValueError: the arrays differ in shape.
    """

    document: np.ndarray
    target: np.ndarray
    context: np.ndarray
    nll: np.ndarray
    rank: np.ndarray

    def __post_init__(self) -> None:
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if len(set(shapes.values())) != 1 or self.nll.ndim != 1:
            raise ValueError(f"the arrays of TokenScores must share one shape (T,); got {shapes}.")

    def __len__(self) -> int:
        return len(self.nll)

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
        scores = cls(**{name: array[order] for name, array in joined.items()})
        twice = (np.diff(scores.document) == 0) & (np.diff(scores.target) == 0)
        if twice.any():
            raise ValueError(
                f"{int(twice.sum())} targets were scored twice, the first at token {scores.target[1:][twice][0]}; "
                "windows must not share targets."
            )
        return scores

    def loss(self) -> float:
        """Mean negative log-likelihood in nats per token."""
        return float(self.nll.mean())

    def perplexity(self) -> float:
        """``exp(loss)``; inf where that overflows."""
        loss = self.loss()
        return math.exp(loss) if loss < 700 else math.inf

    def accuracy(self, k: int = 1) -> float:
        """Share of targets among the model's k best tokens."""
        if k < 1:
            raise ValueError(f"k is {k}; top-k accuracy needs k of at least 1.")
        return float((self.rank < k).mean())

    def summary(self, top_k: Sequence[int] = (1,)) -> dict[str, Any]:
        """The figures of a report: perplexity, loss, ``top_<k>_accuracy``, tokens scored, range of contexts."""
        return {
            "perplexity": self.perplexity(),
            "loss": self.loss(),
            **{f"top_{k}_accuracy": self.accuracy(k) for k in top_k},
            "tokens_scored": len(self),
            "context": [int(self.context.min()), int(self.context.max())],
        }


def require_same_targets(scores: Mapping[int, TokenScores]) -> None:
    """Checks that all lengths scored the same tokens of the same documents.

    Raises:
        ValueError: two lengths differ in their targets, so that their figures must not be compared.
    """
    items = list(scores.items())
    for length, other in items[1:]:
        first_length, first = items[0]
        if not (np.array_equal(first.document, other.document) and np.array_equal(first.target, other.target)):
            raise ValueError(f"lengths {first_length} and {length} scored different targets; they can't be compared.")
