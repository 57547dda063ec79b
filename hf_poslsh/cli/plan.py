"""``plan``: what every number of samples would give a model at a length: error bounds, windows, cache, work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_poslsh.cli.costs import LayerCost, Shape, full_cost, layer_costs, number_format
from hf_poslsh.cli.source import Source
from hf_poslsh.cli.text import share, size, span, table
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.families import check_full_heads, supported_models
from hf_poslsh.theory import describe as describe_method
from hf_poslsh.theory import entry_variance


def plan(
    source: Source,
    method: PosLSHConfig,
    samples: Sequence[int],
    length: int,
    batch: int,
    dtype: str | None,
    delta: float,
) -> dict[str, Any]:
    """Errors, windows, cache and work of a model for several numbers of samples.

    Args:
        source: the model; its weights are not needed.
        method: the method; its ``num_samples`` is replaced.
        samples: numbers of samples.
        length: number of tokens.
        batch: number of sequences.
        dtype: of the cache; the checkpoint's if None.
        delta: chance with which an error may exceed its bound, per head.

    Returns:
        JSON types.

    Raises:
        ValueError: the model is not supported, or an argument is out of range.
    """
    if source.config is None:
        raise ValueError(f"the base model of {source.name} could not be read: {source.problem}")
    if source.family is None:
        raise ValueError(f"{source.name} is a {type(source.config).__name__}; supported are {supported_models()}.")
    if method.bias != "poslsh":
        raise ValueError(f"bias={method.bias!r} draws no samples, so there is nothing to plan; use `hf-poslsh info`.")
    check_full_heads(method, source.config.get_text_config())
    dtype, bytes_per_number = number_format(source.config, dtype)
    shape = Shape.of(source.config)
    full_bytes, full_flops = full_cost(shape, length, batch, bytes_per_number)
    return {
        "model": source.name,
        "family": source.family,
        "method": method.to_dict(),
        "length": length,
        "batch": batch,
        "dtype": dtype,
        "delta": delta,
        "full_cache_bytes": full_bytes * shape.layers,
        "full_flops": full_flops * shape.layers,
        "plans": [
            _one(source, method.replace(num_samples=count), length, batch, bytes_per_number, delta)
            for count in sorted(set(samples))
        ],
    }


def _one(
    source: Source, method: PosLSHConfig, length: int, batch: int, bytes_per_number: int, delta: float
) -> dict[str, Any]:
    layers = layer_costs(source.config, method, length, batch, bytes_per_number)
    patched = [layer for layer in layers if layer.patched]
    first = method.replace(layers=[patched[0].layer])  # the law of the errors is that of every layer
    laws = describe_method(first, source.config, length, delta).heads
    worst = {row.sigma: _rms_error(method, row.sigma, length) for row in laws}
    heads = [
        {
            "head": row.head,
            "sigma": row.sigma,
            "windows": [layer.windows[row.head] for layer in patched],
            "likely_window": row.likely_widest_bin,
            "rms_error": worst[row.sigma],
            "max_error": row.max_error,
            "spectral_error": row.spectral_error,
        }
        for row in laws
    ]
    return {
        "num_samples": method.num_samples,
        "heads": heads,
        "keys_per_query": sum(layer.keys_per_query for layer in patched) / len(patched),
        "cache_bytes": sum(layer.cache_bytes for layer in layers),
        "flops": sum(layer.flops for layer in layers),
        "time": _time_class(layers, length),
    }


def _rms_error(method: PosLSHConfig, sigma: float | None, length: int) -> float:
    """The expected error of an entry of the mean mask, over draws, at the distance where it is largest."""
    assert sigma is not None
    distance = np.unique(np.geomspace(1, max(length - 1, 1), 400).round())
    return float(np.sqrt(entry_variance(distance, sigma, method.num_samples, method.sampler).max()))


def _time_class(layers: list[LayerCost], length: int) -> str:
    def limit(layer: LayerCost, window: int | None) -> int:
        return min(bound for bound in (window, layer.host_window, layer.host_chunk, length) if bound is not None)

    limits = [limit(layer, window) for layer in layers for window in layer.windows]
    linear = sum(bound < length for bound in limits)
    if linear == len(limits):
        return "linear"
    return "quadratic" if linear == 0 else f"linear in {linear} of {len(limits)} heads"


def describe(result: dict[str, Any]) -> str:
    """The result of ``plan`` in words."""
    plans = result["plans"]
    rows = [
        [
            str(plan["num_samples"]),
            _worst(plan, "rms_error"),
            _worst(plan, "max_error"),
            _worst(plan, "spectral_error"),
            span([window for head in plan["heads"] for window in head["windows"]]),
            f"{plan['keys_per_query']:,.0f}",
            size(plan["cache_bytes"]),
            share(plan["flops"], result["full_flops"]),
            plan["time"],
        ]
        for plan in plans
    ]
    headings = ["s", "rms error", "max error", "norm error", "windows", "keys", "cache", "work", "time"]
    by_head = [
        [
            str(head["head"]),
            f"{head['sigma']:.4g}",
            *(span(plan["heads"][head["head"]]["windows"]) for plan in plans),
        ]
        for head in plans[0]["heads"]
    ]
    method = result["method"]
    return "\n\n".join(
        [
            f"{result['model']}: {result['family']}, {result['length']:,} tokens, batch {result['batch']}, "
            f"{result['dtype']}, sampler {method['sampler']}, sigma {method['sigma']}",
            table(headings, rows),
            "rms and max error: of the entries of the mean mask, norm error: of its spectral norm, relative; of the\n"
            "worst head. rms is expected, at the worst distance; the others are bounds that a head exceeds with a\n"
            f"chance of at most {result['delta']:g}; a bound of 1 says nothing. Windows and keys are those of this\n"
            f"seed's draws. The full cache has {size(result['full_cache_bytes'])}; work: of full causal attention.",
            "windows (most keys that a head sees), over the patched layers",
            table(["head", "sigma", *(f"s = {plan['num_samples']}" for plan in plans)], by_head),
        ]
    )


def _worst(plan: dict[str, Any], name: str) -> str:
    return f"{max(head[name] for head in plan['heads']):.3g}"
