"""``draw``: a picture of the method: the kernel, the mean mask, single masks, and the windows by head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_poslsh.cli.costs import Shape
from hf_poslsh.cli.source import read_source
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.ops.bias import Layout, PositionBias, bias_from_config
from hf_poslsh.ops.reference import pair_weights
from hf_poslsh.slopes import resolve_sigma

_FORMATS = (".png", ".svg", ".pdf")
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "0.45"  # told apart by every kind of colour vision
_LARGEST = 4096


class Subject(NamedTuple):
    """What is drawn: a method on a model of so many query heads and layers."""

    method: PosLSHConfig
    heads: int
    layers: int
    title: str

    @classmethod
    def of(cls, checkpoint: str) -> Subject:
        """The method of a patched checkpoint or adapter.

        Raises:
            ValueError: nothing is patched, or the model's config cannot be read.
        """
        source = read_source(checkpoint)
        if source.method is None:
            raise ValueError(f"{checkpoint} is not patched, so it has no masks to draw.")
        if source.config is None:
            raise ValueError(f"the base model of {checkpoint} could not be read: {source.problem}")
        shape = Shape.of(source.config)
        return cls(source.method, shape.heads, shape.layers, Path(checkpoint).name)


def draw(path: Path, subject: Subject, n: int, layer: int = 0, head: int | None = None) -> dict[str, Any]:
    """Draws a method with ``bias="poslsh"`` or ``"fixed_blocks"``.

    Args:
        path: file to write; .png, .svg or .pdf.
        subject: the method and the model; the windows are those of the layers that the method patches.
        n: number of positions.
        layer: layer whose masks are drawn.
        head: head whose masks are drawn; the one whose sigma is nearest to n / 8 if None.

    Returns:
        What was drawn, as JSON types.

    Raises:
        ValueError: an argument is out of range.
        ImportError: matplotlib is not installed.
    """
    method, heads, layers, title = subject
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} ends in {path.suffix!r}; choose one of {', '.join(_FORMATS)}.")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to.")
    if method.bias not in ("poslsh", "fixed_blocks"):
        raise ValueError(f"bias={method.bias!r} has no masks to draw; supported are 'poslsh' and 'fixed_blocks'.")
    if not 2 <= n <= _LARGEST:
        raise ValueError(f"length is {n}; a picture shows from 2 to {_LARGEST} positions.")
    patched = tuple(range(layers)) if method.layers is None else method.layers
    if layer not in patched:
        raise ValueError(f"layer is {layer}; patched are the layers {', '.join(map(str, patched))}.")
    sigma = resolve_sigma(method.sigma, heads)
    if head is None:
        head = int(np.abs(np.log(sigma * 8 / n)).argmin())
    if not 0 <= head < heads:
        raise ValueError(f"head is {head}; there are heads 0 to {heads - 1}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("pictures need matplotlib: pip install 'hf-poslsh[plots]'.") from missing

    bias = bias_from_config(method, heads, layer).of_heads(slice(head, head + 1))
    reach = np.array([bias_from_config(method, heads, index).reach for index in patched])
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    figure.suptitle(f"{title} (a causal model uses the lower triangles)")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.2)))
    error = _draw_matrices(top, bias, float(sigma[head]), n)
    left, right = np.asarray(bottom.subfigures(1, 2))
    _draw_masks(left, bias, n)
    _draw_windows(right.add_subplot(), sigma, reach, head)
    figure.savefig(path, dpi=130)
    return {
        "file": str(path),
        "layer": layer,
        "head": head,
        "sigma": float(sigma[head]),
        "length": n,
        "rms_error": float(np.sqrt((error**2).mean())),
        "largest_error": float(np.abs(error).max()),
        "windows": reach.T.tolist(),
        "method": method.to_dict(),
    }


def _weights(bias: PositionBias, n: int, sample: int | None = None) -> np.ndarray:
    positions = torch.arange(n)[None]
    return pair_weights(bias, Layout(positions, positions), sample)[0, 0].numpy()


def _draw_matrices(figure: Any, bias: PositionBias, sigma: float, n: int) -> np.ndarray:
    position = np.arange(n)
    kernel = np.exp(-np.abs(np.subtract.outer(position, position)) / sigma)
    mask = _weights(bias, n)
    error = _weights(dataclasses.replace(bias, sink_tokens=0), n) - kernel
    largest = float(np.abs(error).max()) or 1.0
    axes = figure.subplots(1, 3)
    samples = bias.hashes.num_samples
    sinks = f", sinks: {bias.sink_tokens}" if bias.sink_tokens else ""
    weights = {"vmin": 0, "vmax": 1, "cmap": "cividis"}
    errors = {"vmin": -largest, "vmax": largest, "cmap": "PuOr"}
    for ax, matrix, name, colours in (
        (axes[0], kernel, f"L: ALiBi, sigma = {sigma:.4g}", weights),
        (axes[1], mask, f"M~: mean of {samples} masks{sinks}", weights),
        (
            axes[2],
            error,
            f"M~ - L{' without sinks' if bias.sink_tokens else ''}: rms {np.sqrt((error**2).mean()):.2g}",
            errors,
        ),
    ):
        image = ax.imshow(matrix, interpolation="nearest", **colours)
        figure.colorbar(image, ax=ax, shrink=0.75)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    return error


def _draw_masks(figure: Any, bias: PositionBias, n: int) -> None:
    shown = np.unique(np.linspace(0, bias.hashes.num_samples - 1, 4).round().astype(int))
    axes = figure.subplots(2, 2, sharex=True, sharey=True).reshape(-1)
    figure.suptitle(f"{len(shown)} of the {bias.hashes.num_samples} masks: 1 where both lie in one bin", fontsize=10)
    for ax, sample in zip(axes, shown, strict=False):
        ax.imshow(_weights(bias, n, int(sample)), interpolation="nearest", vmin=0, vmax=1, cmap="cividis")
        ax.set_title(f"mask {sample}, bins of {bias.hashes.widths[0, sample]:.4g}", fontsize=8)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    figure.supxlabel("key position", fontsize=9)
    figure.supylabel("query position", fontsize=9)


def _draw_windows(ax: Any, sigma: np.ndarray, reach: np.ndarray, head: int) -> None:
    heads = np.arange(len(sigma))
    ax.plot(heads, sigma, color=_GREY, linestyle="--", marker="_", label="sigma")
    if len(reach) > 1:
        ax.fill_between(heads, reach.min(0), reach.max(0), color=_BLUE, alpha=0.25, label=f"over {len(reach)} layers")
    ax.plot(heads, np.median(reach, 0), color=_BLUE, marker="o", markersize=4, label="window: widest bin")
    ax.axvline(head, color=_ORANGE, linestyle=":", label="head drawn above")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("head")
    ax.set_ylabel("positions")
    ax.set_title("how far a head can see", fontsize=10)
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=8)


def describe(result: dict[str, Any]) -> str:
    """The result of ``draw`` in words."""
    return (
        f"{result['file']}: layer {result['layer']}, head {result['head']} (sigma {result['sigma']:.4g}), "
        f"{result['length']} positions, rms error of M~ {result['rms_error']:.2g}"
    )
