"""What a config does to a model of given shape at a given length: plain numbers per layer and head, and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.ops.bias import bias_from_config
from hf_poslsh.slopes import resolve_sigma
from hf_poslsh.theory import bounds, work
from hf_poslsh.theory.entries import expected_square_error
from hf_poslsh.theory.operators import _checked


@dataclasses.dataclass(frozen=True)
class HeadReport:
    """One query head of one layer. Keys are means over the n queries; errors are of ``M~ - L``; None: does not apply.

    Args:
        layer: layer index.
        head: global query head.
        sigma: length scale in positions.
        expected_keys: visible keys per query, mean over draws.
        drawn_keys: the same for the config's own draws.
        blocks_keys: keys that ``impl="blocks"`` meets, for these draws.
        widest_bin: widest bin drawn, in positions.
        likely_widest_bin: not exceeded with probability 1 - delta.
        rms_error: root-mean-square entry error over pairs of different positions, over draws.
        max_error: entry error not exceeded with probability 1 - delta.
        spectral_error: relative to ||L||, not exceeded with probability 1 - delta (1 is no information).
        multiply_adds: per token, for ``drawn_keys``.
        cache_tokens: keys that decoding at length n may still meet, sinks included.
    """

    layer: int
    head: int
    sigma: float | None
    expected_keys: float
    drawn_keys: float
    blocks_keys: float | None
    widest_bin: float | None
    likely_widest_bin: float | None
    rms_error: float | None
    max_error: float | None
    spectral_error: float | None
    multiply_adds: float
    cache_tokens: int


@dataclasses.dataclass(frozen=True)
class Description:
    """All patched heads, and totals of the whole model (layers that are not patched count as full attention).

    Args:
        heads: one report per patched layer and head.
        n: number of tokens.
        delta: probability with which the likely numbers may be exceeded, for each head.
        multiply_adds: of q . k and of the values, per token, all layers.
        full_multiply_adds: the same for full causal attention.
        cache_bytes: keys and values of one sequence that a cache bounded by the widest bin of each layer holds.
        full_cache_bytes: the same without a bound.
    """

    heads: list[HeadReport]
    n: int
    delta: float
    multiply_adds: float
    full_multiply_adds: float
    cache_bytes: int
    full_cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        columns = [field.name for field in dataclasses.fields(HeadReport)]
        cells = [[_cell(getattr(row, name)) for name in columns] for row in self.heads]
        widths = [max(len(row[k]) for row in [columns, *cells]) for k in range(len(columns))]
        lines = [
            "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [columns, *cells]
        ]
        share = self.multiply_adds / self.full_multiply_adds
        kept = self.cache_bytes / self.full_cache_bytes
        lines.append(
            f"{self.n} tokens: {self.multiply_adds:,.0f} multiply-adds per token, {share:.2%} of full attention's; "
            f"cache {self.cache_bytes:,} bytes, {kept:.2%} of the full one (probability {1 - self.delta:g} per head)"
        )
        return "\n".join(lines)


def describe(
    config: PosLSHConfig, model_config: Any, n: int, delta: float = 0.01, bytes_per_number: int = 2
) -> Description:
    """Windows, bins, error bounds, work and cache of every patched head, against full attention.

    Args:
        config: the method and its knobs; ``num_samples`` up to some thousands is quick.
        model_config: a transformers config, or anything with ``num_hidden_layers``, ``num_attention_heads`` and, if
            they differ from the defaults, ``num_key_value_heads`` and ``head_dim``; a multimodal one is asked for
            its text part. The model's own windows are not looked at.
        n: number of tokens.
        delta: probability with which the likely numbers may be exceeded.
        bytes_per_number: of a cached number, 2 for bfloat16.

    Returns:
        Plain data; ``print`` shows a table.

    Raises:
        ValueError: ``config`` does not fit the model.
    """
    _checked(n, 1.0)
    work._check_delta(delta)
    model = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    layers, heads = model.num_hidden_layers, model.num_attention_heads
    kv_heads = getattr(model, "num_key_value_heads", None) or heads
    dim = getattr(model, "head_dim", None) or model.hidden_size // heads
    patched = tuple(range(layers)) if config.layers is None else config.layers
    if patched[-1] >= layers:
        raise ValueError(f"config.layers has layer {patched[-1]}; the model has layers 0 to {layers - 1}.")
    facts = _head_facts(config, heads, n, delta)
    reports = [_report(config, layer, h, facts[h], heads, n, dim) for layer in patched for h in range(heads)]
    token = 2 * kv_heads * dim * bytes_per_number
    full_adds = work.multiply_adds(work.full_attention_keys(n), dim) * heads
    kept = {layer: max(r.cache_tokens for r in reports if r.layer == layer) for layer in patched}
    return Description(
        reports,
        n,
        delta,
        sum(report.multiply_adds for report in reports) + (layers - len(patched)) * full_adds,
        layers * full_adds,
        token * (sum(kept.values()) + (layers - len(patched)) * n),
        token * n * layers,
    )


def _head_facts(config: PosLSHConfig, heads: int, n: int, delta: float) -> list[dict[str, float | None]]:
    """What does not depend on the draws, computed once for every sigma."""
    if config.bias not in ("poslsh", "alibi", "fixed_blocks"):
        return [{"sigma": None}] * heads
    sigmas = resolve_sigma(config.sigma, heads)
    if config.bias != "poslsh":
        return [{"sigma": float(sigma)} for sigma in sigmas]
    known = {float(sigma): _law(config.num_samples, config.sampler, float(sigma), n, delta) for sigma in set(sigmas)}
    return [known[float(sigma)] for sigma in sigmas]


def _law(samples: int, sampler: str, sigma: float, n: int, delta: float) -> dict[str, float | None]:
    norm = bounds.kernel_norm_limit(sigma)
    pairs = max(n * (n - 1), 1)
    return {
        "sigma": sigma,
        "expected_keys": work.expected_keys(n, sigma, samples, sampler),
        "likely_widest_bin": work.widest_bin(sigma, samples, delta, sampler),
        "rms_error": (expected_square_error(n, sigma, samples, sampler) / pairs) ** 0.5,
        "max_error": _smallest(lambda eps: bounds.max_norm_tail(eps, n, sigma, samples, sampler) <= delta),
        "spectral_error": _smallest(
            lambda eps: bounds.spectral_tail(eps * norm, n, sigma, samples, sampler) <= delta
        ),
    }


def _smallest(enough: Callable[[float], bool]) -> float:
    """Smallest error up to 1 that is not exceeded, to three digits; 1 if there is none."""
    low, high = 0.0, 1.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _report(
    config: PosLSHConfig, layer: int, head: int, law: dict[str, float | None], heads: int, n: int, dim: int
) -> HeadReport:
    bias = bias_from_config(config, heads, layer)
    keys: float
    blocks: float | None = None
    widest: float | None = None
    if config.bias in ("poslsh", "fixed_blocks"):
        keys, blocks = work.drawn_keys(bias.hashes, n, head)
        widest = float(bias.hashes.widths[head].max())
    else:  # ALiBi's cut depends on the scores, so all keys count
        seen = min(n, int(bias.reach[head]))
        keys = seen - seen * (seen - 1) / (2 * n)
    fields: dict[str, Any] = {
        "expected_keys": keys,
        **dict.fromkeys(("likely_widest_bin", "rms_error", "max_error", "spectral_error")),
        **law,
    }
    return HeadReport(
        layer=layer,
        head=head,
        drawn_keys=keys,
        blocks_keys=blocks,
        widest_bin=widest,
        multiply_adds=work.multiply_adds(keys, dim),
        cache_tokens=min(n, int(bias.reach[head]) + config.sink_tokens),
        **fields,
    )


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, np.integer)):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
