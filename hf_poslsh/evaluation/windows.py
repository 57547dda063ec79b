"""Which tokens a model reads and which of its predictions count. A protocol is a function that returns windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PROTOCOLS = {
    "same-targets": "the same tokens are scored at every length; only how much stands before them differs",
    "sliding-window": "every token of the texts is scored once, with at least length - stride tokens of context",
    "non-overlapping": "every token of the texts is scored once, in windows that share nothing: its mean context is "
    "half of the length",
}
"""The protocols by name, each in one sentence."""


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


def protocol_windows(
    protocol: str,
    document_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    targets: int,
    targets_per_window: int,
    stride: int | None,
) -> dict[int, list[Window]]:
    """The windows of a protocol at each length.

    Args:
        protocol: one of ``PROTOCOLS``.
        document_lengths: number of tokens of each document.
        lengths: window lengths in tokens.
        targets: of ``same-targets`` alone, see ``same_target_windows``.
        targets_per_window: of ``same-targets`` alone.
        stride: of ``sliding-window`` alone, which needs it; see ``sliding_windows``.

    Returns:
        For each length, ascending, its windows in document order.

    Raises:
        ValueError: the protocol is unknown, a number is out of range, or the documents are too short.
    """
    _check_lengths(lengths)
    if protocol == "same-targets":
        return same_target_windows(document_lengths, lengths, targets, targets_per_window)
    if protocol == "sliding-window":
        if stride is None:
            raise ValueError(f"the protocol sliding-window needs a stride; choose 1 up to {min(lengths)}.")
        return {length: sliding_windows(document_lengths, length, stride) for length in sorted(lengths)}
    if protocol == "non-overlapping":
        return {length: non_overlapping_windows(document_lengths, length) for length in sorted(lengths)}
    raise ValueError(f"protocol is {protocol!r}; choose one of {', '.join(PROTOCOLS)}.")


def same_target_windows(
    document_lengths: Sequence[int], lengths: Sequence[int], targets: int, targets_per_window: int
) -> dict[int, list[Window]]:
    """The same target tokens at every length, each with at least ``length - targets_per_window + 1`` of context.

    Every document is cut into contiguous runs of ``targets_per_window`` targets, from the first that the longest
    length can reach to the end. ``targets // targets_per_window`` of the runs are scored, as many of every document
    as of any other that is long enough, and evenly spaced within it: at each length by the window of that length
    which ends with the run. No target is scored twice at a length. Only what stands before a target differs between
    lengths, so differences of the loss come from the context alone.

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
    _check_lengths(lengths)
    if not 1 <= targets_per_window <= min(lengths):
        raise ValueError(
            f"targets_per_window is {targets_per_window}; choose 1 up to the smallest length, {min(lengths)}."
        )
    if targets < targets_per_window:
        raise ValueError(f"targets is {targets}; it must be at least targets_per_window, {targets_per_window}.")
    longest = max(lengths)
    ends = [range(longest, tokens, targets_per_window) for tokens in document_lengths]
    if not any(ends):
        raise _too_short(document_lengths, longest)
    shares = even_shares(targets // targets_per_window, [len(of_document) for of_document in ends])
    chosen = [
        (document, of_document[index * len(of_document) // share])
        for document, (of_document, share) in enumerate(zip(ends, shares, strict=True))
        for index in range(share)
    ]
    return {
        length: [Window(document, end - length, end, targets_per_window) for document, end in chosen]
        for length in sorted(lengths)
    }


def even_shares(count: int, room: Sequence[int]) -> list[int]:
    """``count`` spread over places as evenly as their room allows; fewer if there is less room.

    Where the rest is smaller than the number of places, those that get one more are evenly spaced.
    """
    shares = [0] * len(room)
    while open_places := [place for place, most in enumerate(room) if shares[place] < most]:
        takers = min(count, len(open_places))
        if not takers:
            break
        each = count // takers
        for place in (open_places[index * len(open_places) // takers] for index in range(takers)):
            given = min(each, room[place] - shares[place])
            shares[place] += given
            count -= given
    return shares


def sliding_windows(document_lengths: Sequence[int], length: int, stride: int) -> list[Window]:
    """Every token of the documents once, each window ``stride`` tokens further than the one before.

    The first window of a document scores all its targets: they have no more context than the document gives. Each
    later window scores its last ``stride`` targets (the last window what is left), which have between
    ``length - stride + 1`` and ``length`` tokens of context. The first token of a document has nothing before it and
    is never scored.

    Args:
        document_lengths: number of tokens of each document; those of 1 token hold no target.
        length: tokens of a window; shorter documents are read whole.
        stride: targets per later window, 1 up to ``length``.

    Returns:
        The windows in document order.

    Raises:
        ValueError: a number is out of range, or no document has 2 tokens.
    """
    _check_lengths([length])
    if not 1 <= stride <= length:
        raise ValueError(f"stride is {stride}; choose 1 up to the length, {length}.")
    windows = []
    for document, tokens in enumerate(document_lengths):
        end = 0
        while end < tokens - 1:
            last, end = end, min(end + stride if end else length, tokens - 1)
            windows.append(Window(document, max(end - length, 0), end, end - last))
    if not windows:
        raise _too_short(document_lengths, 1)
    return windows


def non_overlapping_windows(document_lengths: Sequence[int], length: int) -> list[Window]:
    """The documents cut into windows that share nothing; every target is scored once.

    On average a target has half of ``length`` as context, and the first of a window one token: the longer the
    windows, the fewer such targets. Figures of different lengths differ for that reason alone.

    Args:
        document_lengths: number of tokens of each document; those of 1 token hold no target.
        length: tokens of a window; a document's last window may be shorter.

    Returns:
        The windows in document order.

    Raises:
        ValueError: ``length`` is below 1, or no document has 2 tokens.
    """
    _check_lengths([length])
    windows = []
    for document, tokens in enumerate(document_lengths):
        for start in range(0, tokens - 1, length):
            end = min(start + length, tokens - 1)
            windows.append(Window(document, start, end, end - start))
    if not windows:
        raise _too_short(document_lengths, 1)
    return windows


def single_pass_windows(document_lengths: Sequence[int], length: int, passes: int = 1) -> list[Window]:
    """Whole windows of which every target is scored: for the loss by position within one pass.

    Args:
        document_lengths: number of tokens of each document; those too short for a window are left out, so that all
            positions see the same documents.
        length: tokens of a window.
        passes: windows per document at most. They are evenly spaced and share nothing; the first begins with the
            document.

    Returns:
        The windows in document order.

    Raises:
        ValueError: a number is below 1, or no document is long enough.
    """
    _check_lengths([length])
    if passes < 1:
        raise ValueError(f"passes is {passes}; it must be at least 1.")
    windows = []
    for document, tokens in enumerate(document_lengths):
        possible = (tokens - 1) // length
        count = min(passes, possible)
        for index in range(count):
            start = (index * possible // count) * length
            windows.append(Window(document, start, start + length, length))
    if not windows:
        raise _too_short(document_lengths, length)
    return windows


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 1 or len(set(lengths)) != len(lengths):
        raise ValueError(f"lengths is {list(lengths)}; give distinct window lengths of at least 1 token.")


def _too_short(document_lengths: Sequence[int], length: int) -> ValueError:
    return ValueError(
        f"the longest document has {max(document_lengths, default=0)} tokens; length {length} needs {length + 1}. "
        "Give longer documents or shorter lengths."
    )
