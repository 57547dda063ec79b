"""Texts as tokens: the ids, the bytes that each stands for, and what every window begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Document:
    """A text as a model reads it.

    Args:
        ids: int64 ``(N,)``, token ids; the first is ``bos`` where there is one.
        bytes: int64 ``(N,)``, how many UTF-8 bytes of the text each token stands for; 0 for ``bos``.
        bos: the token that every window begins with, or None.

    Raises:
        ValueError: the arrays differ in shape.
    """

    ids: np.ndarray
    bytes: np.ndarray
    bos: int | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.bytes.shape:
            raise ValueError(f"ids and bytes must share one shape (N,); got {self.ids.shape} and {self.bytes.shape}.")

    def __len__(self) -> int:
        return len(self.ids)


def encode_document(tokenizer: Any, text: str) -> Document:
    """Encodes a text, without special tokens but for a beginning-of-sequence token.

    **Beginning of sequence.** Where the tokenizer itself puts one before a text, so does this, and every window
    begins with it, in place of the token that stands there: a model that was trained with it has never seen a text
    without, and often uses it as an attention sink. The window's length, and so the largest position, stays the
    same. Where the tokenizer adds none, neither do the windows.

    **Bytes.** With a byte-level tokenizer each character of a token's name is one byte, exactly. With any other, a
    token stands for the text from the end of the token before it to its own end (so what the tokenizer drops counts
    for the next token; a character split over several tokens counts for the first). Either way the bytes of all
    tokens add up to those of the text.

    Args:
        tokenizer: a fast tokenizer of transformers.
        text: the whole document.

    Raises:
        ValueError: the tokenizer is a slow one, which can't say where its tokens stand, or the text has no tokens.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; bits per byte need a fast one.")
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    if not len(ids):
        raise ValueError("the text has no tokens; give one that is not empty.")
    counts = _bytes_of_names(tokenizer, encoding["input_ids"], text)
    if counts is None:
        counts = _bytes_of_offsets(np.array(encoding["offset_mapping"], dtype=np.int64)[:, 1], text)
    bos = begins_with(tokenizer)
    if bos is None:
        return Document(ids, counts)
    return Document(np.concatenate([[bos], ids]), np.concatenate([[0], counts]), bos)


def begins_with(tokenizer: Any) -> int | None:
    """The beginning-of-sequence token that the tokenizer itself puts before a text, or None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][0] == bos else None


def _bytes_of_names(tokenizer: Any, ids: list[int], text: str) -> np.ndarray | None:
    if "ByteLevel" not in repr(tokenizer.backend_tokenizer.decoder):
        return None
    counts = np.array([len(name) for name in tokenizer.convert_ids_to_tokens(ids)], dtype=np.int64)
    # A normaliser or an added space makes the tokens spell another text than the one given.
    return counts if counts.sum() == len(text.encode()) else None


def _bytes_of_offsets(ends: np.ndarray, text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    ends = np.maximum.accumulate(ends)
    ends[-1] = len(text)
    return np.diff(before[ends], prepend=0)
