"""The tokenizer of the texts, and the training sequences cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiment.files import finish_folder, partial_folder
from experiment.sources import Text

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Sequence[Text], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text can be encoded, and decodes to itself.

    Raises:
        ValueError: the texts are too short for so many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.content for text in texts], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"data.vocab_size is {vocab_size}, but the training texts give {tokenizer.get_vocab_size()} entries; "
            "use a smaller one or more text."
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer's folder in one step."""
    tokenizer.save_pretrained(partial_folder(folder))
    finish_folder(folder)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[np.ndarray]:
    """Token ids of each document, int64 ``(N_d,)``, without special tokens."""
    return [
        np.array(
            tokenizer(text.content, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ],
            dtype=np.int64,
        )
        for text in texts
    ]


def begun(piece: np.ndarray, bos: int | None) -> np.ndarray:
    """The piece with ``bos`` in place of its first token; as it is where ``bos`` is None or the piece is empty."""
    if bos is None or not len(piece):
        return piece
    return np.concatenate([np.array([bos], dtype=piece.dtype), piece[1:]])


class Sequences(torch.utils.data.Dataset):
    """``count`` training sequences, each a contiguous piece of one document.

    An epoch cuts every document into pieces of ``length`` tokens, beginning at a random token so that what is left
    over at the two ends differs between epochs, and visits the pieces in random order. Item i depends on
    (documents, length, seed, i) alone: all arms and all numbers of processes see the same sequences, and a
    resumed run continues with the ones that were left.

    Args:
        documents: token ids ``(N_d,)``; those shorter than ``length`` are not used.
        length: tokens per sequence.
        count: number of items.
        seed: of the order and the cuts.
        bos: every sequence begins with this token, in place of its own first, as every window of an evaluation does;
            None: it does not.

    Raises:
        ValueError: no document is long enough.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], length: int, count: int, seed: int, bos: int | None = None
    ) -> None:
        self.documents = [document for document in documents if len(document) >= length]
        if not self.documents:
            raise ValueError(
                f"no training text has {length} tokens (the longest has {max(map(len, documents), default=0)}); "
                "give longer texts or a shorter training.length."
            )
        self.length, self.count, self.seed, self.bos = length, count, seed, bos
        self.per_epoch = sum(len(document) // length for document in self.documents)
        self._epoch, self._pieces = -1, np.empty((0, 2), dtype=np.int64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 ``(length,)``; the model shifts the labels."""
        if not 0 <= index < self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        epoch, slot = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._pieces = epoch, self._cut(epoch)
        document, start = self._pieces[slot]
        ids = torch.from_numpy(begun(self.documents[document][start : start + self.length], self.bos))
        return {"input_ids": ids, "labels": ids}

    def _cut(self, epoch: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox([self.seed, epoch]))
        pieces = [
            (index, start)
            for index, document in enumerate(self.documents)
            for start in random.integers(0, len(document) % self.length + 1)
            + self.length * np.arange(len(document) // self.length)
        ]
        return random.permutation(np.array(pieces, dtype=np.int64))


class PackedSequences(torch.utils.data.Dataset):
    """``count`` training sequences filled with whole documents, none of which sees another.

    An epoch is all documents in random order, one after the other, cut every ``length`` tokens: a document that does
    not fit goes on in the next sequence, as a document of its own. The tokens left over at the end of an epoch are
    dropped. Item i depends on (documents, length, seed, i) alone.

    Args:
        documents: token ids ``(N_d,)``.
        length: tokens per sequence.
        count: number of items.
        seed: of the order.
        bos: every piece begins with this token, in place of its own first; None: it does not.

    Raises:
        ValueError: the documents together do not fill one sequence.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], length: int, count: int, seed: int, bos: int | None = None
    ) -> None:
        self.documents, self.length, self.count, self.seed, self.bos = documents, length, count, seed, bos
        self.per_epoch = sum(map(len, documents)) // length
        if not self.per_epoch:
            raise ValueError(f"the training texts have less than {length} tokens; give more or a shorter length.")
        self._epoch = -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``input_ids``, ``labels`` and ``position_ids``, int64 ``(length,)``.

        Positions begin at 0 with each document, which keeps the documents apart. The first token of a document is no
        target: its label is -100.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        epoch, slot = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            random = np.random.Generator(np.random.Philox([self.seed, epoch]))
            self._epoch, self._order = epoch, random.permutation(len(self.documents))
            self._ends = np.cumsum([len(self.documents[document]) for document in self._order])
        at, end = slot * self.length, (slot + 1) * self.length
        pieces = []
        for place in range(int(np.searchsorted(self._ends, at, side="right")), len(self._order)):
            document = self.documents[self._order[place]]
            begin = self._ends[place] - len(document)
            pieces.append(begun(document[max(at - begin, 0) : end - begin], self.bos))
            if self._ends[place] >= end:
                break
        labels = [np.concatenate([[-100], piece[1:]]) for piece in pieces if len(piece)]
        positions = [np.arange(len(piece)) for piece in pieces]
        return {
            name: torch.from_numpy(np.concatenate(parts).astype(np.int64))
            for name, parts in (("input_ids", pieces), ("labels", labels), ("position_ids", positions))
        }


class EvenSequences(torch.utils.data.Dataset):
    """``count`` sequences of ``length`` tokens, evenly spread over the documents in their order, none overlapping.

    Args:
        documents: token ids ``(N_d,)``; those shorter than ``length`` are not used.
        length: tokens per sequence.
        count: number of items; fewer where the documents do not hold so many.
        bos: as of ``Sequences``.

    Raises:
        ValueError: no document is long enough.
    """

    def __init__(self, documents: Sequence[np.ndarray], length: int, count: int, bos: int | None = None) -> None:
        pieces = [
            document[start : start + length]
            for document in documents
            for start in range(0, len(document) - length + 1, length)
        ]
        if not pieces:
            raise ValueError(f"no validation text has {length} tokens; give longer texts.")
        count = min(count, len(pieces))
        self.pieces = [begun(pieces[index * len(pieces) // count], bos) for index in range(count)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 ``(length,)``."""
        ids = torch.from_numpy(self.pieces[index])
        return {"input_ids": ids, "labels": ids}
