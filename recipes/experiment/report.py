"""What an experiment leaves behind: results.json, the plot and the model card. All from one dictionary."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import accelerate
import numpy
import tokenizers
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import hf_poslsh
from experiment.files import write_json, write_text
from experiment.settings import RECIPES
from hf_poslsh.evaluation import plot_perplexity_by_length

TEMPLATE = RECIPES.parent / "model_cards" / "experiment.md"


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
    """Writes ``results.json``, ``perplexity.png`` and ``README.md`` (the model card).

    Args:
        output: folder of the experiment.
        results: ``name``, ``settings``, ``seed``, ``versions``, ``protocol``, and ``arms``: for each its ``poslsh``
            fields (None: the original), ``training`` and ``lengths``.
    """
    write_json(output / "results.json", results)
    curves = {
        name: {int(length): summary["perplexity"] for length, summary in arm["lengths"].items()}
        for name, arm in results["arms"].items()
    }
    picture = output / ".partial.perplexity.png"
    plot_perplexity_by_length(
        curves, picture, training_length=results["settings"]["training"]["length"], title=results["name"]
    )
    os.replace(picture, output / "perplexity.png")
    write_text(output / "README.md", str(model_card(results)))


def model_card(results: dict[str, Any]) -> ModelCard:
    """The card of the experiment, rendered from ``model_cards/experiment.md``."""
    texts = ", ".join(text["name"] for text in results["protocol"]["texts"])
    metrics = [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=texts,
            metric_type=kind,
            metric_name=f"{label} at {length} tokens, {name}",
            metric_value=round(summary[key], 4),
        )
        for name, arm in results["arms"].items()
        for length, summary in arm["lengths"].items()
        for kind, label, key in _metrics(summary)
    ]
    data = ModelCardData(
        model_name=results["name"],
        eval_results=metrics,
        language="en",
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["poslsh", "alibi", "long-context", results["settings"]["model"]["type"]],
    )
    lengths = list(next(iter(results["arms"].values()))["lengths"])
    return ModelCard.from_template(data, template_path=str(TEMPLATE), lengths=lengths, **results)


def _metrics(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    accuracies = [key for key in summary if key.endswith("_accuracy")]
    return [
        ("perplexity", "Perplexity", "perplexity"),
        *(
            ("accuracy", key.replace("_", "-").replace("-accuracy", " accuracy").capitalize(), key)
            for key in accuracies
        ),
    ]
