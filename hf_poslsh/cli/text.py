"""Plain text for people: tables, sizes and shares."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, the first to the left."""
    widths = [max(len(row[k]) for row in [headings, *rows]) for k in range(len(headings))]
    lines = []
    for row in [headings, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def size(number: float, unit: str = "B", step: int = 1024) -> str:
    """``1.5 MiB`` of bytes; ``1.5 M`` with ``step=1000``."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi") if step == 1024 else ("", "k", "M", "G", "T", "P", "E")
    value, index = float(number), 0
    while value >= step and index < len(prefixes) - 1:
        value, index = value / step, index + 1
    digits = f"{value:.0f}" if index == 0 or value >= 100 else f"{value:.1f}"
    return f"{digits} {prefixes[index]}{unit}".rstrip()


def share(part: float, whole: float) -> str:
    """``part`` in percent of ``whole``, to three digits."""
    return f"{100 * part / whole:.3g} %"


def span(numbers: Sequence[int | None]) -> str:
    """The smallest and the largest of some limits; None is no limit."""
    limits = [number for number in numbers if number is not None]
    if not limits:
        return "no limit"
    low, high = min(limits), max(limits)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"
