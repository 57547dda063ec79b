"""What an experiment leaves behind: results, tables, plots and the model card. All from one dictionary."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import numpy
import tokenizers
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

import hf_poslsh
from experiment.files import write_json, write_text
from hf_poslsh.cards import TEMPLATES, eval_results
from hf_poslsh.evaluation import (
    PROTOCOLS,
    markdown_report,
    plot_by_length,
    plot_by_position,
    plot_retrieval,
    rows_by_length,
    rows_by_position,
    rows_of_cells,
    rows_of_retrieval,
)
from hf_poslsh.hub import base_options


def versions(device: torch.device) -> dict[str, str]:
    """What computed the figures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    packages = (hf_poslsh, torch, transformers, accelerate, tokenizers, numpy)
    return {
        "python": platform.python_version(),
        **{package.__name__: package.__version__ for package in packages},
        "device": name,
    }


def write_report(output: Path, results: dict[str, Any]) -> None:
    """Writes what ``write_results`` does, and ``README.md``, the model card.

    Args:
        output: folder of the experiment.
        results: as of ``write_results``, and ``settings``, ``seed``, and for each arm ``training``.
    """
    write_results(output, results, results["settings"]["training"]["length"])
    write_text(output / "README.md", str(model_card(results)))


def write_results(output: Path, results: dict[str, Any], training_length: int | None) -> None:
    """Writes ``results.json``, ``results.csv``, ``report.md``, ``perplexity.png``; also of positions and retrieval.

    Args:
        output: folder to write to.
        results: ``name``, ``versions``, ``protocol``, and ``arms``: for each its ``poslsh`` fields (None: the
            original), ``lengths`` and perhaps ``positions`` and ``retrieval``. Perhaps ``differences``. What they
            hold is said in ``hf_poslsh.evaluation.markdown_report``.
        training_length: marked in the plots.
    """
    write_json(output / "results.json", results)
    write_csv(output / "results.csv", rows_by_length(results))
    write_text(output / "report.md", markdown_report(results))
    arms = results["arms"]
    with replaced(output / "perplexity.png") as picture:
        plot_by_length(
            {name: arm["lengths"] for name, arm in arms.items()},
            picture,
            protocol=results["protocol"]["name"],
            training_length=training_length,
            title=results["name"],
        )
    retrieval = {name: arm["retrieval"] for name, arm in arms.items() if arm.get("retrieval")}
    if retrieval:
        write_csv(output / "retrieval.csv", rows_of_retrieval(results))
    for task in next(iter(retrieval.values()), {}):
        name = "passkeys" if task == "passkey" else task
        write_csv(output / f"{name}.csv", rows_of_cells(results, task))
        with replaced(output / f"{name}.png") as picture:
            cells = {arm: found[task]["cells"] for arm, found in retrieval.items()}
            plot_retrieval(cells, picture, title=f"{results['name']}: {task}")
    positions = {name: arm["positions"] for name, arm in arms.items() if arm.get("positions")}
    if positions:
        write_csv(output / "positions.csv", rows_by_position(results))
        with replaced(output / "positions.png") as picture:
            plot_by_position(positions, picture, training_length=training_length, title=results["name"])


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes or replaces a CSV file in one step; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of ``path`` when it is complete."""
    partial = path.with_name(f".partial.{path.name}")
    yield partial
    os.replace(partial, path)


def model_card(results: dict[str, Any]) -> ModelCard:
    """The card of the experiment, rendered from ``hf_poslsh/templates/experiment.md``."""
    metrics = [
        result
        for name, arm in results["arms"].items()
        for result in eval_results({**arm, "protocol": results["protocol"]}, f", {name}")
    ]
    fields = dict(results["settings"].get("card", {}))
    data = ModelCardData(
        model_name=results["name"],
        eval_results=metrics,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["poslsh", "alibi", "long-context", *fields.pop("tags", [])],
        **fields,
    )
    lengths = list(next(iter(results["arms"].values()))["lengths"])
    settings = results["settings"]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "experiment.md"),
        lengths=lengths,
        protocols=PROTOCOLS,
        options={
            name: base_options({"arm": name, "poslsh": arm["poslsh"], "settings": settings})
            for name, arm in results["arms"].items()
        },
        **results,
    )
