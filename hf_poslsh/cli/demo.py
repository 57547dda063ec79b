"""``demo``: the method at work on this machine in seconds, on a tiny model of random weights; no file, no network.

It checks what can be checked without training: that the fast pass computes what it should, what the cache keeps, and
how long attention takes. ``train`` runs the demo that trains, where the repository is at hand.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_poslsh
from hf_poslsh import PositionalHash, PosLSHConfig, alibi_slopes, patch_model, positional_lsh_attention, unpatch_model
from hf_poslsh.cli.text import size, table
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model

_TOKENS = 600
_SIGMA = 16.0
_RECIPE = "recipes/train.py"


def run_demo(lengths: tuple[int, ...] = (1024, 4096, 8192), heads: int = 8, head_dim: int = 64) -> dict[str, Any]:
    """Patches a tiny model, compares three ways to compute it, measures its cache, and times the operator.

    Args:
        lengths: numbers of tokens to time attention at.
        heads: query heads of the timed operator.
        head_dim: size of a head of the timed operator.

    Returns:
        JSON types.
    """
    method = PosLSHConfig(sigma=_SIGMA, num_samples=8, sink_tokens=1, rope="drop")
    ids = torch.randint(1, 99, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    logits, cached = {}, {}
    for name, change in (
        ("host", None),
        ("banded", method),
        ("reference", method.replace(impl="reference")),
    ):
        model = tiny_model("qwen3")
        if change is not None:
            patch_model(model, change)
        with torch.no_grad():
            out = model(ids, use_cache=True)
        logits[name] = out.logits
        cached[name] = [layer.keys.shape[2] for layer in getattr(out, CACHE_NAME).layers]
        if name == "banded":
            with torch.no_grad():
                logits["unpatched again"] = unpatch_model(model)(ids, use_cache=False).logits
    token = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    return {
        "tokens": _TOKENS,
        "method": method.to_dict(),
        "largest_difference": {
            "banded_and_reference": _difference(logits["banded"], logits["reference"]),
            "unpatched_and_original": _difference(logits["unpatched again"], logits["host"]),
            "patched_and_original": _difference(logits["banded"], logits["host"]),
        },
        "largest_logit": logits["host"].abs().max().item(),
        "cache_tokens": {"original": cached["host"], "patched": cached["banded"]},
        "cache_bytes": {"original": sum(cached["host"]) * token, "patched": sum(cached["banded"]) * token},
        "convergence": _convergence(),
        "threads": torch.get_num_threads(),
        "heads": heads,
        "head_dim": head_dim,
        "seconds": [_times(length, heads, head_dim) for length in lengths],
    }


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def _convergence(n: int = 256) -> list[dict[str, float]]:
    """Relative error of the output against exact ALiBi, made here from its formula, for rising s."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 1, n, 32, generator=generator, dtype=torch.float64)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    bias = torch.where(distance >= 0, -distance / _SIGMA, -torch.inf).double()
    exact = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(32) + bias, -1) @ v
    errors = []
    for samples in (4, 16, 64, 256):
        ours = positional_lsh_attention(q, k, v, PositionalHash.sample(_SIGMA, samples))
        assert isinstance(ours, torch.Tensor)
        errors.append({"num_samples": samples, "relative_error": ((ours - exact).norm() / exact.norm()).item()})
    return errors


def _times(length: int, heads: int, head_dim: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, heads, length, head_dim, generator=generator)
    hashes = PositionalHash.sample(1 / alibi_slopes(heads), 20)
    return {
        "tokens": length,
        "full": _seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True)),
        "patched": _seconds(lambda: positional_lsh_attention(q, k, v, hashes)),
    }


def _seconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def describe(result: dict[str, Any]) -> str:
    """The result of ``run_demo`` in words."""
    differences, cached = result["largest_difference"], result["cache_bytes"]
    method = result["method"]
    times = [
        [f"{row['tokens']:,}", f"{row['full']:.4f}", f"{row['patched']:.4f}", f"{row['full'] / row['patched']:.1f} x"]
        for row in result["seconds"]
    ]
    errors = [[str(row["num_samples"]), f"{row['relative_error']:.3f}"] for row in result["convergence"]]
    return "\n\n".join(
        [
            f"A tiny Qwen3 of random weights, {result['tokens']:,} tokens, patched with s = {method['num_samples']}, "
            f"sigma = {method['sigma']:g}, one sink token.",
            "1. The fast pass computes the documented formula. Largest difference between logits (the largest is "
            f"{result['largest_logit']:.1f}):\n"
            + table(
                ["", "difference"],
                [
                    ["   one banded pass, float32, and dense float64", f"{differences['banded_and_reference']:.1e}"],
                    ["   the model after unpatch_model, and before", f"{differences['unpatched_and_original']:.1e}"],
                    ["   patched and original: another function", f"{differences['patched_and_original']:.1e}"],
                ],
            ),
            f"2. The KV cache stops growing. After {result['tokens']:,} tokens it holds {size(cached['patched'])} "
            f"({np.mean(result['cache_tokens']['patched']):,.0f} tokens a layer); the original holds "
            f"{size(cached['original'])}.",
            "3. More samples come closer to exact ALiBi. Relative error of an attention output, random inputs:\n"
            + table(["   s", "error"], [["   " + row[0], row[1]] for row in errors]),
            f"4. Time of causal attention, forward, {result['heads']} heads of {result['head_dim']}, s = 20, "
            f"{result['threads']} threads, seconds, medians of three:\n"
            + table(["   tokens", "full (SDPA)", "banded", ""], [["   " + row[0], *row[1:]] for row in times]),
            "What a model learns under this bias random weights cannot show: `hf-poslsh demo --train` trains one.",
        ]
    )


def train() -> int:
    """Runs the demo of the recipes, which trains, where they are at hand: its exit status.

    Raises:
        ValueError: the recipes are not there.
    """
    for root in (Path.cwd(), Path(hf_poslsh.__file__).parent.parent):
        if (root / _RECIPE).is_file():
            launch = [sys.executable, "-m", "accelerate.commands.launch", _RECIPE]
            return subprocess.run(
                [*launch, "--config", "recipes/configs/demo.yaml"], cwd=root, check=False
            ).returncode
    raise ValueError(
        "the demo that trains is in the repository, not in the installed package: run this in a copy of the "
        "repository, after `pip install -e '.[recipes]'` there. `hf-poslsh demo` needs neither."
    )
