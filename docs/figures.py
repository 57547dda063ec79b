"""Draws the figures of the documentation from the package itself: python docs/figures.py [FOLDER]."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from hf_poslsh import PositionalHash, alibi_attention, positional_lsh_attention, theory
from hf_poslsh.evaluation import plot_by_position
from hf_poslsh.theory import comparison

POSITIONS = Path(__file__).parent.parent / "model_cards/mistral_smollm2_beyond/positions/results.json"
BEYOND = {
    "plsh-s20-true-as-is": "PLSH, true distances",
    "plsh-s20-as-is": "PLSH",
    "plsh-s20-4-sinks-as-is": "PLSH, four sinks",
    "window-as-is": "window of 1024",
    "window-4-sinks-as-is": "window, four sinks",
    "fixed-blocks-as-is": "fixed blocks",
}  # one sink unless it says four
SIGMA = 16.0
LENGTH = 96  # positions in a picture of masks
# Told apart by all eyes, and by their markers.
COLOURS = {
    "iid": "#D55E00",
    "staggered": "#0072B2",
    "mean": "#555555",
    "window": "#009E73",
}


def main() -> None:
    """Writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=Path(__file__).parent / "images", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (("masks.png", draw_masks()), ("errors.png", draw_errors())):
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    draw_beyond(folder / "beyond.png")


def draw_beyond(path: Path) -> None:
    """Loss by position far beyond the trained context length, from the committed results."""
    arms = json.loads(POSITIONS.read_text(encoding="utf-8"))["arms"]
    plot_by_position(
        {label: arms[arm]["positions"] for arm, label in BEYOND.items()},
        path,
        training_length=8192,
        title="SmolLM2-135M, one pass over a held-out novel, not trained further",
    )


def draw_masks() -> Figure:
    """Four single masks, the mean of growing numbers of them, and what the mean tends to."""
    figure = Figure(figsize=(10.5, 5.6), layout="constrained")
    rows = figure.subplots(2, 4)
    hashes = PositionalHash.sample(SIGMA, 20)
    singles = [PositionalHash(hashes.widths[:, [r]], hashes.shifts[:, [r]]) for r in (0, 6, 12, 18)]
    for axis, one in zip(rows[0], singles, strict=True):
        _matrix(axis, one.mask_mean(LENGTH)[0], f"one mask: blocks of {one.widths[0, 0]:.0f}")
    for axis, samples in zip(rows[1], (4, 20, 256), strict=False):
        mean = PositionalHash.sample(SIGMA, samples).mask_mean(LENGTH)[0]
        _matrix(axis, mean, f"mean of {samples} masks")
    image = _matrix(rows[1, 3], comparison.kernel_matrix(LENGTH, SIGMA), r"ALiBi: $e^{-|i-j|/\sigma}$")
    figure.colorbar(image, ax=rows, shrink=0.7, label="weight of a pair")
    figure.supxlabel("key position j", fontsize=10)
    figure.supylabel("query position i", fontsize=10)
    return figure


def _matrix(axis, matrix: np.ndarray, title: str):
    axis.set_title(title, fontsize=10)
    axis.set_xticks([0, LENGTH // 2, LENGTH - 1])
    axis.set_yticks([0, LENGTH // 2, LENGTH - 1])
    axis.tick_params(labelsize=8)
    axis.set_facecolor("#e0e0e0")  # what causality hides
    return axis.imshow(np.where(np.tri(LENGTH, dtype=bool), matrix, np.nan), vmin=0, vmax=1, cmap="Blues")


def draw_errors() -> Figure:
    """Root-mean-square error of the mask's entries and of attention outputs, by the number of masks."""
    samples = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    length, sigma = 256, SIGMA
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for sampler, marker in (("iid", "s"), ("staggered", "o")):
        pairs = length * (length - 1)
        law = [(theory.expected_square_error(length, sigma, s, sampler) / pairs) ** 0.5 for s in samples]
        left.plot(samples, law, marker=marker, color=COLOURS[sampler], label=f"{sampler} draws")
        errors = [output_error(s, sampler, "pooled") for s in samples]
        right.plot(samples, errors, marker=marker, color=COLOURS[sampler], label=f"pooled, {sampler} draws")
    few = [s for s in samples if s <= 128]
    errors = [output_error(s, "iid", "mean") for s in few]
    right.plot(few, errors, marker="^", linestyle="--", color=COLOURS["mean"], label="mean, iid draws")
    right.plot(
        samples, [window_error(s) for s in samples], marker="D", linestyle=":", color=COLOURS["window"],
        label="exact ALiBi in a window of as many keys",
    )  # fmt: skip
    right.set_ylim(bottom=1.2e-4)  # room for the legend
    left.set_title(r"entries of $\tilde M - L$, all distances", fontsize=10)
    left.set_ylabel("root-mean-square error over draws")
    right.set_title("attention output against exact ALiBi", fontsize=10)
    right.set_ylabel("relative error, mean of 4 draws")
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", xlabel="s, number of masks")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


@functools.cache
def _problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 256, 32, generator=generator, dtype=torch.float64)
    return query, key, value, alibi_attention(query, key, value, [SIGMA], impl="reference")


def output_error(samples: int, sampler: str, estimator: str) -> float:
    """Relative Frobenius error of one head's output, random normal inputs, mean of four seeds."""
    query, key, value, exact = _problem()
    errors = []
    for seed in range(4):
        hashes = PositionalHash.sample(SIGMA, samples, seed=seed, sampler=sampler)
        out = positional_lsh_attention(query, key, value, hashes, estimator=estimator)
        errors.append(float((out - exact).norm() / exact.norm()))
    return float(np.mean(errors))


def window_error(samples: int) -> float:
    """The same error of exact ALiBi that sees no more keys than the banded pass over staggered masks."""
    query, key, value, exact = _problem()
    keys = theory.expected_keys(query.shape[2], SIGMA, samples)
    window = comparison.equal_window(keys, query.shape[2])
    out = alibi_attention(query, key, value, [SIGMA], impl="reference", window=window)
    return float((out - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
