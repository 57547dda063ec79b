"""What the base model's forward is given, checked before anything is computed."""

from __future__ import annotations

from typing import Any

import torch

from hf_poslsh.static_cache import require

_WEIGHTS_LIMIT = 2**31  # bytes of float32 attention weights that one forward may make


def check_weights(config: Any, tokens: torch.Tensor, slots: int) -> None:
    """Checks that the attention weights of a forward take no more memory than is made for them.

    Args:
        config: the text config.
        tokens: new tokens ``(B, Q)``, or their embeddings.
        slots: tokens so far, the new ones included.

    Raises:
        ValueError: they would take more.
    """
    size = config.num_hidden_layers * config.num_attention_heads * tokens.shape[0] * tokens.shape[1] * slots * 4
    if size > _WEIGHTS_LIMIT:
        raise ValueError(
            f"output_attentions=True would make {size / 2**30:.1f} GiB of attention weights ({tokens.shape[1]} "
            f"queries of {tokens.shape[0]} rows by {slots} tokens, in all heads and layers); at most "
            f"{_WEIGHTS_LIMIT / 2**30:g} GiB are made, by the dense reference. Give a shorter text, or fewer rows."
        )


def check_mask(mask: Any, tokens: torch.Tensor, seen: int | torch.Tensor, cache: Any) -> None:
    """Checks that a padding mask covers all tokens so far.

    Args:
        mask: what was given as ``attention_mask``.
        tokens: new tokens ``(B, Q)``, or their embeddings.
        seen: number of tokens that the cache has seen.
        cache: the cache or None.

    Raises:
        ValueError: it does not, or is no such mask.
    """
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        kind = f"{mask.ndim}-D tensor" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is a {kind}; a patched model takes the 2-D padding mask (batch, tokens) only. Documents "
            "in one row are told apart by position_ids that restart, by seq_idx or by cu_seq_lens_q."
        )
    static = isinstance(seen, torch.Tensor) or (cache is not None and cache.is_compileable)
    needed = tokens.shape[1] + (0 if isinstance(seen, torch.Tensor) else seen)
    good = mask.shape[1] >= needed if static else mask.shape[1] == needed
    if not good or (mask.shape[0] != 1 and mask.shape[0] != tokens.shape[0]):  # `in` fails on compiled symbols
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must cover the {needed} tokens so far, cached ones "
            f"included, of {tokens.shape[0]} rows."
        )
    if isinstance(seen, torch.Tensor):
        require(
            seen + tokens.shape[1] <= mask.shape[1],
            "attention_mask is shorter than the tokens so far; it must cover the cached ones too.",
        )


def sequence_ends(tokens: torch.Tensor, seen: int | torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The borders of documents in one packed row, ``cu_seq_lens_q`` of the forward's arguments, or None.

    Raises:
        ValueError: they don't go with the tokens or the cache.
    """
    ends = kwargs.get("cu_seq_lens_q")
    if ends is None and kwargs.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_k was given without cu_seq_lens_q; pass both.")
    if ends is None and kwargs.get("seq_idx") is None:
        return None
    if not isinstance(seen, torch.Tensor) and seen > 0:
        raise ValueError(
            f"cu_seq_lens_q and seq_idx describe whole rows, but the cache holds {seen} tokens already; "
            "continue packed rows by position_ids."
        )
    if ends is not None and tokens.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q goes with one packed row, not with a batch of {tokens.shape[0]}.")
    return ends
