"""``info``: what a checkpoint's config says about its attention. Reads no weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_poslsh.cli.costs import LayerCost, Shape, full_cost, layer_costs, number_format
from hf_poslsh.cli.source import Source, read_source
from hf_poslsh.cli.text import share, size, span, table
from hf_poslsh.models.families import check_method, supported_models
from hf_poslsh.models.rope import covered_length, trained_length
from hf_poslsh.slopes import resolve_sigma


def inspect(name: str, length: int | None, batch: int, dtype: str | None) -> dict[str, Any]:
    """Method, windows, cache and FLOPs of a checkpoint or adapter.

    Args:
        name: folder or Hub name.
        length: number of tokens; the config's ``max_position_embeddings`` if None.
        batch: number of sequences.
        dtype: of the cache, such as ``"bfloat16"``; the checkpoint's if None.

    Returns:
        JSON types.

    Raises:
        ValueError: the config cannot be read or makes no sense.
    """
    source = read_source(name)
    result: dict[str, Any] = {
        "checkpoint": name,
        "kind": "model" if source.base is None else "adapter",
        "patched": source.method is not None,
        "family": source.family,
        "base": source.base,
        "method": None if source.method is None else source.method.to_dict(),
    }
    if source.config is None:
        return {**result, "problem": source.problem}
    result |= {"model_type": source.config.model_type, "architectures": source.config.architectures}
    if source.family is None:
        return result
    text = source.config.get_text_config()
    if source.method is not None and source.base is None:
        check_method(text)
    length = text.max_position_embeddings if length is None else length
    dtype, bytes_per_number = number_format(source.config, dtype)
    result |= {"trained_length": trained_length(text), "covered_length": covered_length(text)}
    return {**result, "dtype": dtype, **_costs(source, length, batch, bytes_per_number)}


def _costs(source: Source, length: int, batch: int, bytes_per_number: int) -> dict[str, Any]:
    shape = Shape.of(source.config)
    layers = layer_costs(source.config, source.method, length, batch, bytes_per_number)
    full_bytes, full_flops = full_cost(shape, length, batch, bytes_per_number)
    return {
        "length": length,
        "batch": batch,
        "shape": dataclasses.asdict(shape),
        "sigma": None if source.method is None else _sigma(source, shape),
        "layers": [dataclasses.asdict(layer) for layer in layers],
        "cache_bytes": sum(layer.cache_bytes for layer in layers),
        "full_cache_bytes": full_bytes * shape.layers,
        "flops": sum(layer.flops for layer in layers),
        "full_flops": full_flops * shape.layers,
    }


def _sigma(source: Source, shape: Shape) -> list[float] | None:
    assert source.method is not None
    if source.method.bias in ("window", "none"):
        return None
    return resolve_sigma(source.method.sigma, shape.heads).tolist()


def describe(result: dict[str, Any]) -> str:
    """The result of ``inspect`` in words."""
    parts = [_heading(result)]
    if result["method"] is not None:
        parts.append("method\n" + table(["  field", "value"], _fields(result["method"])))
    if "problem" in result:
        parts.append(
            f"The config of the base model could not be read, so its sizes are not known: {result['problem']}"
        )
    if "layers" in result:
        parts += [_trained(result), _sizes(result)]
    return "\n\n".join(parts)


def _heading(result: dict[str, Any]) -> str:
    name, base = result["checkpoint"], result["base"]
    on = "" if base is None else f" on {base or 'a model without a name'}"
    if result["patched"]:
        what = ", ".join(result.get("architectures") or []) or "an adapter"
        return f"{name}: patched. {what if base is None else f'An adapter{on}'}"
    if base is not None:
        return f"{name}: not patched. An adapter{on}"
    what = ", ".join(result["architectures"] or []) or result["model_type"]
    if result["family"] is None:
        return f"{name}: not patched. {what} is not supported; supported are {supported_models()}."
    return f"{name}: not patched. {what}; `hf-poslsh patch {name} DST` patches it."


def _fields(method: dict[str, Any]) -> list[list[str]]:
    return [[f"  {key}", str(value)] for key, value in method.items()]


def _trained(result: dict[str, Any]) -> str:
    trained, covered, method = result["trained_length"], result["covered_length"], result["method"]
    scaled = f", {covered:,} with its rescaled RoPE frequencies" if covered > trained else ""
    text = f"trained context length: {trained:,} tokens{scaled}"
    sinks = method is not None and method["sink_tokens"] and method["bias"] != "none"
    full = method is not None and method["full_heads"] is not None
    if method is None or method["rope"] == "drop" or not (sinks or full):
        return text
    far = " and ".join(["sink tokens"] * bool(sinks) + ["keys of full heads"] * full)
    if method["max_distance"] is not None:
        return f"{text}; {far} stay within {method['max_distance']:,} positions of rotary distance at any length"
    return f"{text}; beyond, the rotary distance of {far} is untrained: patch with max_distance='auto'"


def _sizes(result: dict[str, Any]) -> str:
    layers = [LayerCost(**layer) for layer in result["layers"]]
    full_bytes, full_flops = (result[key] // len(layers) for key in ("full_cache_bytes", "full_flops"))
    rows = [
        [
            str(layer.layer) + ("" if layer.patched or not result["patched"] else " (not patched)"),
            span(layer.windows),
            _host(layer),
            f"{layer.keys_per_query:,.1f}",
            f"{layer.cache_tokens:,}",
            size(layer.cache_bytes),
            share(layer.cache_bytes, full_bytes),
            size(layer.flops, "FLOPs", 1000),
            share(layer.flops, full_flops),
        ]
        for layer in layers
    ]
    rows.append(
        [
            "all", "", "", "", "",
            size(result["cache_bytes"]),
            share(result["cache_bytes"], result["full_cache_bytes"]),
            size(result["flops"], "FLOPs", 1000),
            share(result["flops"], result["full_flops"]),
        ]
    )  # fmt: skip
    headings = ["layer", "windows", "own limit", "keys", "cached", "cache", "of full", "attention", "of full"]
    parts = [
        f"{result['length']:,} tokens, batch {result['batch']}, {result['dtype']}\n\n{table(headings, rows)}",
        "windows: keys that the narrowest and the widest head can see. own limit: the model's own window or\n"
        "chunk. keys: seen by a query on average. cached: tokens whose keys and values are kept. attention:\n"
        "q . k and the values, of all tokens. of full: of causal attention that keeps and sees everything.",
    ]
    if result["patched"] and any(window is not None for layer in layers for window in layer.windows):
        parts.insert(1, _heads(layers, result["sigma"]))
    return "\n\n".join(parts)


def _host(layer: LayerCost) -> str:
    if layer.host_window is not None:
        return f"window {layer.host_window:,}"
    return "-" if layer.host_chunk is None else f"chunk {layer.host_chunk:,}"


def _heads(layers: list[LayerCost], sigma: list[float] | None) -> str:
    patched = [layer for layer in layers if layer.patched]
    rows = [
        [str(head), "-" if sigma is None else f"{sigma[head]:.4g}", span([la.windows[head] for la in patched])]
        for head in range(len(patched[0].windows))
    ]
    return table(["head", "sigma", "windows"], rows)
