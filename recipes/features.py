"""What two options cost: ``python recipes/features.py --output_dir DIR`` writes ``features.md`` and ``features.csv``.

``max_distance`` against true distances, and full heads against what they are made of (a fifth of causal SDPA and the
method for the other heads). Every repeat runs both sides one after the other, so that a slow moment of the machine
meets both; medians and the median of the paired ratios are reported.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmark import machine
from tqdm import tqdm
from transformers import HfArgumentParser, Qwen3Config, Qwen3ForCausalLM

from hf_poslsh import PositionalHash, Rotary, alibi_slopes, patch_model, positional_lsh_attention
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.ops.bias import PositionBias
from hf_poslsh.ops.full import full_attention
from hf_poslsh.ops.functional import biased_attention, make_layout
from hf_poslsh.ops.rotary import make_turns

HEADS, DIM, SAMPLES, SINKS, DISTANCE = 16, 64, 20, 4, 1024


@dataclasses.dataclass
class Options:
    """What to measure, and where to put it."""

    output_dir: str = dataclasses.field(metadata={"help": "folder for the CSV and the table"})
    length: int = dataclasses.field(default=16384, metadata={"help": "tokens"})
    repeats: int = dataclasses.field(default=9, metadata={"help": "timed pairs of every case"})
    cases: list[str] = dataclasses.field(default_factory=list, metadata={"help": "only these; all by default"})


@dataclasses.dataclass
class Case:
    """Two sides to compare; each is called with nothing and does its work."""

    name: str
    without: Callable[[], object]
    with_it: Callable[[], object]


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    rows = []
    cases = {
        "max_distance, forward": lambda: distance_case(options.length, False),
        "max_distance, forward+backward": lambda: distance_case(options.length, True),
        "max_distance, decoding step": lambda: decoding_case(options.length),
        "full heads, forward, float32": lambda: full_case(options.length, torch.float32),
        "full heads, forward, bfloat16": lambda: full_case(options.length, torch.bfloat16),
    }
    for name in tqdm([name for name in cases if name in options.cases or not options.cases]):
        rows.append(measure(cases[name](), name, options.repeats))
    write(Path(options.output_dir), rows, options)


def measure(case: Case, name: str, repeats: int) -> dict[str, object]:
    """Medians in seconds, and of the ratios."""
    times: tuple[list[float], list[float]] = ([], [])
    for side in (case.without, case.with_it):
        side()
    for _ in range(repeats):
        for side, taken in zip((case.without, case.with_it), times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return {
        "case": name,
        "against": case.name,
        "seconds_without": statistics.median(times[0]),
        "seconds_with": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "repeats": repeats,
    }


def distance_case(length: int, backward: bool) -> Case:
    """The operator with four sinks, at true and at bounded rotary distances."""
    tensors = [torch.randn(1, HEADS, length, DIM) for _ in range(3)]
    hashes = PositionalHash.sample(1 / alibi_slopes(HEADS), SAMPLES)
    rotary = Rotary(10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2)))

    def run(**fields: object) -> None:
        leaves = [tensor.detach().requires_grad_(backward) for tensor in tensors]
        out = positional_lsh_attention(*leaves, hashes, sink_tokens=SINKS, **fields)
        if backward:
            out.sum().backward()

    return Case("true distances", run, lambda: run(max_distance=DISTANCE, rotary=rotary))


def decoding_case(length: int) -> Case:
    """Ten decoding steps of a model of 4 layers of 192 after ``length`` tokens."""
    config = Qwen3Config(
        vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=6, head_dim=32, max_position_embeddings=length + 100_000,
    )  # fmt: skip
    sides = []
    for distance in (None, DISTANCE):
        model = Qwen3ForCausalLM(config).eval()
        patch_model(model, sigma=256.0, sink_tokens=SINKS, max_distance=distance)
        with torch.no_grad():
            cache = getattr(
                model(torch.ones(1, length, dtype=torch.long), use_cache=True, logits_to_keep=1), CACHE_NAME
            )

        @torch.no_grad()
        def steps(model=model, cache=cache):
            for _ in range(10):
                model(torch.ones(1, 1, dtype=torch.long), use_cache=True, **{CACHE_NAME: cache})

        sides.append(steps)
    return Case("true distances", *sides)


def full_case(length: int, dtype: torch.dtype) -> Case:
    """A layer of 15 heads of which 3 (one KV head) are full, against its parts at their own best."""
    heads, full = 15, 3
    query = torch.randn(1, heads, length, DIM, dtype=dtype)
    key, value = (torch.randn(1, heads // 3, length, DIM, dtype=dtype) for _ in range(2))
    bias = PositionBias.from_hashes(PositionalHash.sample([256.0] * heads, SAMPLES), 1).of_heads(slice(full, heads))
    layout = make_layout(query, key)
    rotary = Rotary(10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2)))
    scale = DIM**-0.5

    def rest() -> torch.Tensor:
        return biased_attention(query[:, full:], key[:, 1:], value[:, 1:], bias, layout, scale)[0]

    @torch.no_grad()
    def parts() -> None:
        F.scaled_dot_product_attention(query[:, :full], key[:, :1], value[:, :1], is_causal=True, enable_gqa=True)
        rest()

    @torch.no_grad()
    def layer() -> torch.Tensor:
        turns = make_turns(rotary, layout.query_positions, DISTANCE, 1, torch.float32, layout.key_positions)
        out = full_attention(query[:, :full], key[:, :1], value[:, :1], layout, scale, turns, plain=True)
        return torch.cat([out, rest()], dim=1)

    return Case("causal SDPA for a fifth of the heads and PLSH for the others", parts, layer)


def write(folder: Path, rows: list[dict[str, object]], options: Options) -> None:
    """Writes the CSV and the table, each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{machine()}; {torch.get_num_threads()} threads; torch {torch.__version__}"
    about += f"; {datetime.date.today().isoformat()}; {options.length} tokens; medians of {options.repeats} pairs. "
    about += f"max_distance: {HEADS} heads of {DIM}, s = {SAMPLES}, {SINKS} sinks, ALiBi slopes. "
    about += "Full heads: 3 of 15, sigma 256."
    lines = [about, "", "| case | against | seconds without | seconds with | ratio |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {row['case']} | {row['against']} | {row['seconds_without']:.4f} | {row['seconds_with']:.4f} "
        f"| {row['ratio']:.3f} |"
        for row in rows
    ]
    partial = folder / "partial"
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["machine", "date", "length", *rows[0]])
        writer.writeheader()
        extra = {"machine": machine(), "date": datetime.date.today().isoformat(), "length": options.length}
        writer.writerows({**extra, **row} for row in rows)
    partial.replace(folder / "features.csv")
    partial.write_text("\n".join(lines) + "\n")
    partial.replace(folder / "features.md")


if __name__ == "__main__":
    main()
