"""How fast Positional LSH attention converges to exact ALiBi on a model's own queries, keys and values.

accelerate launch recipes/convergence.py --config recipes/configs/convergence.yaml

Attention is measured while the model runs, layer by layer, after RoPE and q/k norm and with the KV head that each
query head uses; no layer's activations are kept, and nothing after the last layer asked for is computed. Leaves
``convergence.csv`` (a row for every input, layer, head, method, s and seed), ``convergence.json`` and two plots.
The measured numbers are those of ``hf_poslsh.theory``.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import gather_object
from experiment.console import start_run, stop
from experiment.files import write_json, write_text
from experiment.report import versions
from experiment.settings import build, override
from experiment.sources import read_texts
from huggingface_hub.dataclasses import strict
from matplotlib.figure import Figure
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_poslsh import PositionalHash, theory
from hf_poslsh.slopes import resolve_sigma
from hf_poslsh.testing import FAMILIES, tiny_model
from hf_poslsh.theory import comparison

CAPTURE = "poslsh_capture"


@strict
@dataclasses.dataclass
class ConvergenceSettings:
    """What to measure.

    Args:
        output_dir: folder of the results.
        model: name or folder of a checkpoint, or ``tiny-qwen3``, ``tiny-mistral``, ``tiny-llama4``: random weights,
            which read a text's bytes as tokens.
        length: tokens per input.
        samples: numbers of hashes, s.
        texts: files of ``recipes/data``; inputs are cut from them in turn.
        inputs: number of inputs.
        seeds: number of draws for every s.
        samplers: ``iid``, ``staggered``.
        estimators: ``pooled``, ``mean``.
        mean_samples: the ``mean`` estimator is measured up to this s.
        sigma: ``alibi``, or one length scale in positions for all heads.
        layers: indices; all if null.
        heads: query heads; all if null.
        rope: ``keep``: queries and keys as attention sees them; ``drop``: before RoPE (a variant of the paper's).
        causal: false: with no causal mask (a variant of the paper's).
        device_map: for checkpoints that one device cannot hold: ``auto``.
        dtype: of the weights, for checkpoints.
    """

    output_dir: str
    model: str
    length: int
    samples: list[int]
    texts: list[str]
    inputs: int = 1
    seeds: int = 2
    samplers: list[str] = dataclasses.field(default_factory=lambda: ["iid", "staggered"])
    estimators: list[str] = dataclasses.field(default_factory=lambda: ["pooled", "mean"])
    mean_samples: int = 64
    sigma: str | float = "alibi"
    layers: list[int] | None = None
    heads: list[int] | None = None
    rope: str = "keep"
    causal: bool = True
    device_map: str | None = None
    dtype: str = "bfloat16"


class LastLayerDone(Exception):
    """Nothing further in the model is needed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file, see ConvergenceSettings")
    parser.add_argument("--output_dir", help="in place of the config's")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, e.g. length=1024")
    arguments = parser.parse_args()
    accelerator, console = start_run()
    try:
        settings = read_settings(arguments)
        model, inputs = load(settings, accelerator.device)
    except (ValueError, OSError) as error:
        stop(accelerator, error)
    rows: list[dict[str, Any]] = []
    with accelerator.split_between_processes(list(enumerate(inputs))) as share:
        for index, tokens in share:
            for row in measure_input(model, tokens, settings, console):
                rows.append({"input": index, **row})
    rows = gather_object(rows)
    if accelerator.is_main_process:
        write_results(Path(settings.output_dir), settings, rows, versions(accelerator.device))
        console.print(f"{len(rows)} rows in {settings.output_dir}")
    accelerator.end_training()


def read_settings(arguments: argparse.Namespace) -> ConvergenceSettings:
    fields = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8"))
    for text in arguments.set or []:
        override(fields, text)
    if arguments.output_dir:
        fields["output_dir"] = arguments.output_dir
    settings = build(ConvergenceSettings, fields, "")
    for name, known in (
        ("samplers", {"iid", "staggered"}),
        ("estimators", {"pooled", "mean"}),
        ("rope", {"keep", "drop"}),
    ):
        value = getattr(settings, name)
        unknown = set([value] if isinstance(value, str) else value) - known
        if unknown:
            raise ValueError(f"{name} is {value!r}; choose from {', '.join(sorted(known))}.")
    if min(settings.length, settings.inputs, settings.seeds, *settings.samples) < 1:
        raise ValueError("length, inputs, seeds and every one of samples must be at least 1.")
    return settings


def load(settings: ConvergenceSettings, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """The model, whose attention calls ``CAPTURE``, and the inputs, each ``(1, length)``."""
    texts = read_texts(settings.texts, None)
    if settings.model.removeprefix("tiny-") in FAMILIES:
        model = tiny_model(settings.model.removeprefix("tiny-"), max_position_embeddings=settings.length).to(device)
        documents = [[byte % 99 for byte in text.content.encode()] for text in texts]
    else:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        documents = [tokenizer(text.content)["input_ids"] for text in texts]
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=settings.dtype, device_map=settings.device_map
        ).eval()
        if settings.device_map is None:
            model.to(device)
    model.set_attn_implementation(CAPTURE)
    inputs = []
    for index in range(settings.inputs):
        document, part = documents[index % len(documents)], index // len(documents)
        tokens = document[part * settings.length : (part + 1) * settings.length]
        if len(tokens) < settings.length:
            raise ValueError(f"the texts are too short for {settings.inputs} inputs of {settings.length} tokens.")
        inputs.append(torch.tensor([tokens], device=device))
    return model, inputs


_capture: dict[str, Any] = {"call": None}


def capture_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The host's SDPA; what it is given goes to the measurement of the run first."""
    if _capture["call"] is not None:
        _capture["call"](module, query, key, value, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(CAPTURE, capture_attention)
AttentionMaskInterface.register(CAPTURE, sdpa_mask)


def measure_input(model: Any, tokens: torch.Tensor, settings: ConvergenceSettings, console: Any) -> list[dict]:
    """All rows of one input, measured while the model runs."""
    text_config = model.config.get_text_config()
    layers = list(range(text_config.num_hidden_layers)) if settings.layers is None else settings.layers
    sigma = resolve_sigma(settings.sigma, text_config.num_attention_heads)
    rows: list[dict[str, Any]] = []

    def measure(module, query, key, value, scaling):
        layer = module.layer_idx
        if layer in layers:
            rows.extend(measure_layer(layer, query, key, value, scaling, sigma, settings))
            console.print(f"layer {layer}: {len(rows)} rows")

    def before_rope(module, args, kwargs):
        _capture["call"] = measure
        embeddings = kwargs["position_embeddings"]
        if isinstance(embeddings, torch.Tensor):  # Llama-4: one complex factor
            still: Any = torch.ones_like(embeddings)
        else:
            still = torch.ones_like(embeddings[0]), torch.zeros_like(embeddings[1])
        module.forward(*args, **{**kwargs, "position_embeddings": still})
        _capture["call"] = None

    def stop_after_last(module, args, output):
        if module.layer_idx == max(layers):
            raise LastLayerDone

    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")]
    hooks = [module.register_forward_hook(stop_after_last) for module in modules]
    if settings.rope == "drop":
        hooks += [module.register_forward_pre_hook(before_rope, with_kwargs=True) for module in modules]
    else:
        _capture["call"] = measure
    try:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    except LastLayerDone:
        pass
    finally:
        _capture["call"] = None
        for hook in hooks:
            hook.remove()
    return rows


def measure_layer(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sigma: np.ndarray,
    settings: ConvergenceSettings,
) -> Iterator[dict[str, Any]]:
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]) if settings.heads is None else settings.heads:
        q, k, v = (
            tensor[0, index].double().cpu().numpy()
            for tensor, index in ((query, head), (key, head // group), (value, head // group))
        )
        weights = comparison.score_weights(q, k, scaling, settings.causal)
        for row in measure_head(weights, v, sigma, layer, head, settings):
            yield {"layer": layer, "head": head, "sigma": float(sigma[head]), **row}


def measure_head(
    weights: np.ndarray, value: np.ndarray, sigma: np.ndarray, layer: int, head: int, settings: ConvergenceSettings
) -> Iterator[dict[str, Any]]:
    n, scale = len(weights), float(sigma[head])
    kernel = comparison.kernel_matrix(n, scale)
    exact = comparison.biased_output(weights, kernel, value)
    seen = np.tri(n) if settings.causal else np.ones((n, n))
    norm = theory.spectral_norm(theory.kernel_operator(n, scale, settings.causal))

    def row(method, sampler, samples, seed, keys, out, bias=None):
        errors = comparison.output_errors(out, exact)._asdict()
        names = ("bias_spectral", "bias_largest", "bias_rms")
        bias = dict(zip(names, bias or (None,) * 3, strict=True))
        known = {"method": method, "sampler": sampler, "samples": samples, "seed": seed, "keys": keys}
        return {**known, **bias, **{f"output_{name}": number for name, number in errors.items()}}

    def bias_errors(mask):
        norms = comparison.matrix_errors(mask * seen, kernel * seen)
        return comparison.matrix_norm((mask - kernel) * seen) / norm, norms.largest, norms.rms

    blocks = PositionalHash.fixed_blocks(sigma)
    mask = comparison.mask_matrix(blocks, n, head)
    keys = theory.drawn_keys(blocks, n, head).banded
    yield row("fixed_blocks", None, 1, None, keys, comparison.biased_output(weights, mask, value), bias_errors(mask))
    for sampler in settings.samplers:
        for samples in settings.samples:
            for seed in range(settings.seeds):
                hashes = PositionalHash.sample(sigma, samples, seed, layer, sampler)
                mask = comparison.mask_matrix(hashes, n, head)
                keys = np.count_nonzero(np.tril(mask)) / n
                if "pooled" in settings.estimators:
                    out = comparison.biased_output(weights, mask, value)
                    yield row("pooled", sampler, samples, seed, keys, out, bias_errors(mask))
                if "mean" in settings.estimators and samples <= settings.mean_samples:
                    out = comparison.mean_estimator_output(weights, hashes, value, head)
                    yield row("mean", sampler, samples, seed, keys, out)
                window = comparison.equal_window(keys, n)
                out = comparison.biased_output(weights, comparison.kernel_matrix(n, scale, window), value)
                yield row("windowed_alibi", sampler, samples, seed, keys, out)


def write_results(
    folder: Path, settings: ConvergenceSettings, rows: list[dict[str, Any]], made_by: dict[str, str]
) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "convergence.csv", text.getvalue())
    curves = {name: mean_curves(rows, name) for name in ("bias_spectral", "output_frobenius")}
    content = {"settings": dataclasses.asdict(settings), "versions": made_by, "means": curves, "rows": rows}
    write_json(folder / "convergence.json", content)
    laws = bias_laws(settings, rows)
    titles = {"bias_spectral": "bias matrix, relative spectral error", "output_frobenius": "output, relative error"}
    for name, title in titles.items():
        plot(folder / f"{name}.png", curves[name], laws if name == "bias_spectral" else {}, title)


def mean_curves(rows: list[dict[str, Any]], name: str) -> dict[str, dict[int, float]]:
    """Means over inputs, layers, heads and seeds, by method and s."""
    groups: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row[name] is not None:
            label = " ".join(filter(None, (row["method"], row["sampler"])))
            groups.setdefault(label, {}).setdefault(row["samples"], []).append(row[name])
    return {label: {s: float(np.mean(values)) for s, values in curve.items()} for label, curve in groups.items()}


def bias_laws(settings: ConvergenceSettings, rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The two bounds on the mean spectral error of independent draws, relative, averaged as the measured ones.

    They are those of the symmetric matrices, beside measured causal ones.
    """
    sigmas = [row["sigma"] for row in rows if row["method"] == "fixed_blocks"]
    bounds = {"bound, proved (iid)": theory.spectral_mean, "paper's form (iid)": theory.paper_spectral_mean}
    return {
        label: {
            s: float(np.mean([bound(settings.length, x, s) / theory.kernel_norm(settings.length, x) for x in sigmas]))
            for s in settings.samples
        }
        for label, bound in bounds.items()
    }


def plot(path: Path, curves: dict[str, dict[int, float]], laws: dict[str, dict[int, float]], title: str) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in curves.items():
        if label == "fixed_blocks":
            axes.axhline(curve[1], color="0.5", linestyle=":", label="fixed blocks")
        else:
            axes.plot(list(curve), list(curve.values()), marker="o", label=label)
    for label, curve in laws.items():
        axes.plot(list(curve), list(curve.values()), linestyle="--", label=label)
    if "pooled iid" in curves:
        first, error = next(iter(curves["pooled iid"].items()))
        samples = np.array(list(curves["pooled iid"]))
        axes.plot(samples, error * np.sqrt(first / samples), color="0.7", label="s^(-1/2)")
    axes.set(xscale="log", yscale="log", xlabel="hashes per head, s", ylabel=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
