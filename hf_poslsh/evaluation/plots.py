"""Pictures of evaluation results. matplotlib (``hf-poslsh[plots]``) is imported when a picture is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MARKERS = "osD^vP"
_LINES = len(_MARKERS)  # in one panel; more could not be told apart
_COLUMNS = 2


def plot_by_length(
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]],
    path: str | os.PathLike[str],
    *,
    protocol: str,
    training_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draws perplexity by context length, one line per arm, and writes it to ``path``.

    A bar is the interval over texts; a small dot is one run (seed) where there are several. More than six arms are
    drawn in several panels with the same axes, the first arm in grey in each of them.

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
    figure, panels = _panels(list(arms))
    values = [summary["perplexity"] for lengths in arms.values() for summary in lengths.values()]
    ticks = sorted({int(length) for lengths in arms.values() for length in lengths})
    for axes, names in panels:
        for arm, color, marker, aside in _lines(names, grouped=len(panels) > 1):
            summaries = dict(sorted((int(length), summary) for length, summary in arms[arm].items()))
            places = [length * 2 ** (0.2 * aside) for length in summaries]
            _draw_line(axes, arm, color, marker, places, list(summaries.values()), "perplexity")
            for place, summary in zip(places, summaries.values(), strict=True):
                runs = summary["runs"]["perplexity"]
                if len(runs) > 1:
                    axes.plot([place] * len(runs), runs, ".", color=color, markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(length) for length in ticks])
        axes.minorticks_off()
        if max(values) > 5 * min(values):
            axes.set_yscale("log")
        if training_length is not None:
            axes.axvline(training_length, color="0.6", linestyle="--", linewidth=1, label="training length")
    _save(figure, panels, ("context length (tokens)", f"perplexity, {protocol}"), title, path)


def plot_by_position(
    arms: Mapping[str, Sequence[Mapping[str, Any]]],
    path: str | os.PathLike[str],
    *,
    training_length: int | None = None,
    title: str | None = None,
) -> None:
    """Draws the loss by position within a pass, one line per arm, and writes it to ``path``.

    A bar is the interval over texts. The text differs between positions, so that only arms at one position compare.
    More than six arms are drawn in several panels, as by ``plot_by_length``.

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
    figure, panels = _panels(list(arms))
    buckets = next(summaries for summaries in arms.values() if summaries)
    for axes, names in panels:
        for arm, color, marker, aside in _lines(names, grouped=len(panels) > 1):
            places = [place + 0.4 * aside for place in range(len(arms[arm]))]
            _draw_line(axes, arm, color, marker, places, arms[arm], "loss")
        names = [f"{bucket['from']}-{bucket['to']}" for bucket in buckets]
        axes.set_xticks(range(len(buckets)), names, **({"rotation": 30, "ha": "right"} if len(names) > 6 else {}))
        if training_length is not None:
            place = sum(bucket["to"] <= training_length for bucket in buckets) - 0.5
            axes.axvline(place, color="0.6", linestyle="--", linewidth=1, label="training length")
    _save(figure, panels, ("position in the pass (tokens)", "loss (nats per token)"), title, path)


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
    figure.supxlabel("length (tokens)", fontsize="medium")
    figure.supylabel("depth (0: at the start)", fontsize="medium")
    figure.colorbar(image, ax=panels.tolist(), label="answers that are right")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _groups(arms: Sequence[str]) -> list[list[str]]:
    """The arms of each panel: all in one, or the first in each with an even share of the others, six at most."""
    if len(arms) <= _LINES:
        return [list(arms)]
    first, *others = arms
    count = -(-len(others) // (_LINES - 1))
    ends = [len(others) * panel // count for panel in range(count + 1)]
    return [[first, *others[ends[panel] : ends[panel + 1]]] for panel in range(count)]


def _panels(arms: Sequence[str]) -> tuple[Any, list[tuple[Any, list[str]]]]:
    """A figure, and its panels with the arms of each."""
    groups = _groups(arms)
    if len(groups) == 1:
        figure = _empty_figure((9.0, 4.5))
        return figure, [(figure.add_subplot(), groups[0])]
    rows = -(-len(groups) // _COLUMNS)
    figure = _empty_figure((11.0, 0.8 + 3.6 * rows))
    axes = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True, sharey=True).ravel()
    for empty in axes[len(groups) :]:
        empty.set_axis_off()
    for last in axes[len(groups) - _COLUMNS : len(groups)]:
        last.tick_params(labelbottom=True)  # also above an empty place
    return figure, list(zip(axes, groups, strict=False))


def _lines(names: Sequence[str], *, grouped: bool) -> Iterator[tuple[str, str, str, float]]:
    """The arms of a panel with colour, marker, and how far aside each is drawn, from -0.5 to 0.5."""
    for index, name in enumerate(names):
        color = "0.5" if grouped and index == 0 else f"C{index}"
        yield name, color, _MARKERS[index], (index + 0.5) / len(names) - 0.5


def _draw_line(
    axes: Any,
    arm: str,
    color: str,
    marker: str,
    places: Sequence[float],
    summaries: Sequence[Mapping[str, Any]],
    measure: str,
) -> None:
    """One arm with its intervals, where it has any."""
    axes.plot(places, [summary[measure] for summary in summaries], "-", color=color, marker=marker, label=arm)
    for place, summary in zip(places, summaries, strict=True):
        if summary["intervals"][measure] is not None:
            axes.vlines(place, *summary["intervals"][measure], color=color, linewidth=1, alpha=0.6)


def _empty_figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-poslsh[plots]'.") from error
    return Figure(figsize=size, layout="constrained")


def _save(
    figure: Any,
    panels: Sequence[tuple[Any, list[str]]],
    labels: tuple[str, str],
    title: str | None,
    path: str | os.PathLike[str],
) -> None:
    """Legends stand beside or above the lines, so that no arm is hidden."""
    for axes, _ in panels:
        axes.grid(True, alpha=0.3)
    if len(panels) == 1:
        axes = panels[0][0]
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        if title:
            axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize="small")
    else:
        figure.supxlabel(labels[0], fontsize="medium")
        figure.supylabel(labels[1], fontsize="medium")
        for axes, _ in panels:
            axes.tick_params(labelsize="small")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", frameon=False)
        if title:
            figure.suptitle(title)
    figure.savefig(path, dpi=150)
