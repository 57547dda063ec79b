"""Pictures of evaluation results. matplotlib (``hf-poslsh[plots]``) is imported when a picture is drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any

_MARKERS = "osD^vP*X"
_STYLES = ("-", "--", ":")


def plot_by_length(
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]],
    path: str | os.PathLike[str],
    *,
    protocol: str,
    training_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draws perplexity by context length, one line per arm, and writes it to ``path``.

    A bar is the interval over texts; a small dot is one run (seed) where there are several.

    Args:
        arms: for each arm, what ``summarize`` returned by length (text, as in JSON).
        path: file to write; the suffix (.png, .svg, .pdf) chooses the format.
        protocol: named at the axis.
        training_length: marked by a vertical line.
        title: text above the plot.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    if not any(arms.values()):
        raise ValueError("there are no perplexities to plot; evaluate at least one arm at one length.")
    figure, axes = _figure()
    for index, (arm, lengths) in enumerate(arms.items()):
        summaries = dict(sorted((int(length), summary) for length, summary in lengths.items()))
        places = [length * 2 ** (0.2 * _aside(index, arms)) for length in summaries]
        color = _draw_line(axes, index, arm, places, list(summaries.values()), "perplexity")
        for place, summary in zip(places, summaries.values(), strict=True):
            runs = summary["runs"]["perplexity"]
            if len(runs) > 1:
                axes.plot([place] * len(runs), runs, ".", color=color, markersize=3)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(length) for lengths in arms.values() for length in lengths})
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.minorticks_off()
    values = [summary["perplexity"] for lengths in arms.values() for summary in lengths.values()]
    if max(values) > 5 * min(values):
        axes.set_yscale("log")
    if training_length is not None:
        axes.axvline(training_length, color="0.6", linestyle="--", linewidth=1, label="training length")
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(f"perplexity, {protocol}")
    _save(figure, axes, title, path)


def plot_by_position(
    arms: Mapping[str, Sequence[Mapping[str, Any]]],
    path: str | os.PathLike[str],
    *,
    training_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draws the loss by position within a pass, one line per arm, and writes it to ``path``.

    A bar is the interval over texts. The text differs between positions, so that only arms at one position compare.

    Args:
        arms: for each arm, what ``by_position`` returned; the same buckets for all.
        path: file to write; the suffix chooses the format.
        training_length: marked by a vertical line between the buckets that it separates.
        title: text above the plot.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    if not any(arms.values()):
        raise ValueError("there are no losses to plot; evaluate at least one arm.")
    figure, axes = _figure()
    buckets = next(iter(arms.values()))
    for index, (arm, summaries) in enumerate(arms.items()):
        places = [place + 0.4 * _aside(index, arms) for place in range(len(summaries))]
        _draw_line(axes, index, arm, places, summaries, "loss")
    axes.set_xticks(range(len(buckets)), [f"{bucket['from']}-{bucket['to']}" for bucket in buckets])
    if training_length is not None:
        place = sum(bucket["to"] <= training_length for bucket in buckets) - 0.5
        axes.axvline(place, color="0.6", linestyle="--", linewidth=1, label="training length")
    axes.set_xlabel("position in the pass (tokens)")
    axes.set_ylabel("loss (nats per token)")
    _save(figure, axes, title, path)


def plot_retrieval(
    arms: Mapping[str, Sequence[Mapping[str, Any]]], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draws the accuracy of one task of retrieval, depth by length, one panel per arm, and writes it to ``path``.

    Args:
        arms: for each arm, what ``retrieval_accuracy`` returned; the same questions for all.
        path: file to write; the suffix chooses the format.
        title: text above the plot.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    if not any(arms.values()):
        raise ValueError("there is no retrieval to plot; ask at least one arm.")
    columns = min(len(arms), 4)
    rows = -(-len(arms) // columns)
    figure = _empty_figure((2.5 + 2.5 * columns, 0.7 + 2.6 * rows))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for panel in panels[len(arms) :]:
        panel.set_axis_off()
    for panel, (arm, cells) in zip(panels, arms.items(), strict=False):
        lengths = sorted({cell["length"] for cell in cells})
        depths = sorted({cell["depth"] for cell in cells})
        grid = [[float("nan")] * len(lengths) for _ in depths]
        for cell in cells:
            grid[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["accuracy"]
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        panel.set_title(arm)
    figure.supxlabel("length (tokens)")
    figure.supylabel("depth of what is asked for (0: at the start)")
    figure.colorbar(image, ax=panels.tolist(), label="answers that are right")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _aside(index: int, arms: Sized) -> float:
    """Keeps the bars of different arms apart: from -0.5 to 0.5, by arm."""
    return (index + 0.5) / len(arms) - 0.5


def _draw_line(
    axes: Any, index: int, arm: str, places: Sequence[float], summaries: Sequence[Mapping[str, Any]], measure: str
) -> Any:
    """One arm with its intervals, where it has any; returns the colour."""
    values = [summary[measure] for summary in summaries]
    # Ten colours, then the same ones again in another style.
    color, style = f"C{index % 10}", _STYLES[index // 10 % len(_STYLES)]
    (line,) = axes.plot(places, values, style, color=color, marker=_MARKERS[index % len(_MARKERS)], label=arm)
    for place, summary in zip(places, summaries, strict=True):
        if summary["intervals"][measure] is not None:
            axes.vlines(place, *summary["intervals"][measure], color=line.get_color(), linewidth=1, alpha=0.6)
    return line.get_color()


def _figure() -> tuple[Any, Any]:
    figure = _empty_figure((9.0, 4.5))
    return figure, figure.add_subplot()


def _empty_figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-poslsh[plots]'.") from error
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, axes: Any, title: str | None, path: str | os.PathLike[str]) -> None:
    if title:
        axes.set_title(title)
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")  # beside the lines: no arm is hidden
    figure.savefig(path, dpi=150)
