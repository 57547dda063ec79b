"""Pictures of evaluation results. matplotlib (``hf-poslsh[plots]``) is imported when a picture is drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping


def plot_perplexity_by_length(
    curves: Mapping[str, Mapping[int, float]],
    path: str | os.PathLike[str],
    *,
    training_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draws one line per arm and writes it to ``path``; the suffix (.png, .svg, .pdf) chooses the format.

    Args:
        curves: for each arm, perplexity by context length in tokens.
        path: file to write.
        training_length: marked by a vertical line.
        title: text above the plot.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    if not any(curves.values()):
        raise ValueError("there are no perplexities to plot; evaluate at least one arm at one length.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-poslsh[plots]'.") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    markers = "osD^vP*X"
    for index, (arm, curve) in enumerate(curves.items()):
        lengths = sorted(curve)
        axes.plot(lengths, [curve[n] for n in lengths], marker=markers[index % len(markers)], label=arm)
    axes.set_xscale("log", base=2)
    ticks = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.minorticks_off()
    values = [value for curve in curves.values() for value in curve.values()]
    if max(values) > 5 * min(values):
        axes.set_yscale("log")
    if training_length is not None:
        axes.axvline(training_length, color="0.6", linestyle="--", linewidth=1, label="training length")
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("perplexity, same targets at every length")
    if title:
        axes.set_title(title)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
