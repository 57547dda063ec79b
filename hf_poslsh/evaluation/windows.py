"""Which tokens a model reads and which of its predictions count. A protocol is a function that returns windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """A contiguous piece of one document, read from position 0, of which the last predictions count.

    The model reads the tokens ``start .. end - 1`` of the document. Its output at token i predicts token i + 1,
    so that the last ``scored`` outputs predict the targets ``end - scored + 1 .. end``.

    Args:
        document: index of the document.
        start: first token read.
        end: one past the last token read; also the last target.
        scored: how many of the last predictions count.
    """

    document: int
    start: int
    end: int
    scored: int

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return self.end - self.start

    @property
    def targets(self) -> range:
        """The document's token indices that are scored."""
        return range(self.end - self.scored + 1, self.end + 1)

    @property
    def contexts(self) -> range:
        """For each target the number of tokens read before it."""
        return range(self.length - self.scored + 1, self.length + 1)


def same_target_windows(
    document_lengths: Sequence[int], lengths: Sequence[int], targets: int, targets_per_window: int
) -> dict[int, list[Window]]:
    """The same target tokens at every length, each with at least ``length - targets_per_window + 1`` of context.

    Every document is cut into contiguous runs of ``targets_per_window`` targets, from the first that the longest
    length can reach to the end. ``targets // targets_per_window`` of the runs, evenly spaced, are scored: at each
    length by the window of that length which ends with the run. No target is scored twice at a length. Only what
    stands before a target differs between lengths, so differences of the loss come from the context alone.

    Args:
        document_lengths: number of tokens of each document.
        lengths: window lengths in tokens.
        targets: how many targets to score; fewer if the documents hold fewer.
        targets_per_window: targets per window; at most the smallest length. Smaller values give every target a
            context closer to the length, at the price of more windows.

    Returns:
        For each length, ascending, its windows in document order.

    Raises:
        ValueError: a number is out of range, or no document is long enough for the longest length.
    """
    if not lengths or min(lengths) < 1 or len(set(lengths)) != len(lengths):
        raise ValueError(f"lengths is {list(lengths)}; give distinct window lengths of at least 1 token.")
    if not 1 <= targets_per_window <= min(lengths):
        raise ValueError(
            f"targets_per_window is {targets_per_window}; choose 1 up to the smallest length, {min(lengths)}."
        )
    if targets < targets_per_window:
        raise ValueError(f"targets is {targets}; it must be at least targets_per_window, {targets_per_window}.")
    longest = max(lengths)
    ends = [
        (document, end)
        for document, tokens in enumerate(document_lengths)
        for end in range(longest, tokens, targets_per_window)
    ]
    if not ends:
        raise ValueError(
            f"the longest document has {max(document_lengths, default=0)} tokens; length {longest} needs "
            f"{longest + 1}. Give longer documents or shorter lengths."
        )
    count = min(targets // targets_per_window, len(ends))
    chosen = [ends[index * len(ends) // count] for index in range(count)]
    return {
        length: [Window(document, end - length, end, targets_per_window) for document, end in chosen]
        for length in sorted(lengths)
    }
