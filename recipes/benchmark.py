"""Times attention operators side by side in one run: ``python recipes/benchmark.py --output_dir DIR``.

Every repeat runs all operators once, so that a slow moment of the machine meets them all; medians are reported.
All mask work is inside the timed call and nothing is kept from an earlier one (compiled code aside). Leaves
``benchmark.csv`` (columns: see ``Row``), ``benchmark.md`` and ``benchmark.png`` in the output folder. With
``--decode`` it measures decoding with a KV cache instead, see ``decode.py``.
"""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import datetime
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import decode
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm
from transformers import HfArgumentParser

from hf_poslsh import PositionalHash, alibi_attention, alibi_slopes, positional_lsh_attention

SHAPES = {"base": (16, 16, 64), "qwen3-0.6b": (16, 8, 128), "mistral-7b": (32, 8, 128)}  # heads, KV heads, dim
MIB = 2**20


@dataclasses.dataclass
class Options:
    """What to measure, and where to put it."""

    output_dir: str = dataclasses.field(metadata={"help": "folder for the CSV, the table and the plot"})
    lengths: list[int] = dataclasses.field(
        default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
        metadata={"help": "sequence lengths of the base shape (16 heads of 64)"},
    )
    shape_lengths: list[int] = dataclasses.field(
        default_factory=lambda: [2048, 8192, 16384], metadata={"help": "sequence lengths of the models' shapes"}
    )
    samples: int = dataclasses.field(default=20, metadata={"help": "hashes per head"})
    repeats: int = dataclasses.field(default=5, metadata={"help": "timed runs of every operator"})
    max_seconds: float = dataclasses.field(
        default=20.0, metadata={"help": "leave out an operator at lengths where one run would take longer"}
    )
    max_mask_mib: int = dataclasses.field(
        default=4096, metadata={"help": "leave out dense masks that would take more memory"}
    )
    flex: bool = dataclasses.field(default=True, metadata={"help": "measure compiled FlexAttention (needs g++)"})
    decode: bool = dataclasses.field(default=False, metadata={"help": "measure decoding steps instead of operators"})
    decode_positions: list[int] = dataclasses.field(
        default_factory=lambda: [1024, 4096, 16384, 32768, 65536], metadata={"help": "lengths of the cache"}
    )
    decode_layers: int = dataclasses.field(default=2, metadata={"help": "layers of Qwen3-0.6B's shape"})
    decode_tokens: int = dataclasses.field(default=20000, metadata={"help": "tokens that the small model generates"})


@dataclasses.dataclass
class Row:
    """One measurement. Times in seconds, memory in MiB; an empty memory field was not measured."""

    date: str
    machine: str
    torch: str
    threads: int
    shape: str
    heads: int
    kv_heads: int
    dim: int
    length: int
    samples: int
    operator: str
    mode: str  # forward, or forward+backward
    median: float
    fastest: float
    repeats: int
    tokens_per_second: float
    extra_memory: float | None  # peak beyond inputs, output and gradients
    floor_share: float | None  # time of the visible pairs' multiply-adds at the matmul rate, over the median


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if options.decode:
        decode.run(
            folder,
            options.decode_positions,
            options.decode_layers,
            options.decode_tokens,
            options.samples,
            options.repeats,
        )
        return
    rate = matmul_rate()
    rows: list[Row] = []
    cases = [("base", length) for length in options.lengths]
    cases += [(shape, length) for shape in list(SHAPES)[1:] for length in options.shape_lengths]
    for shape, length in tqdm(cases, desc="benchmark"):
        for mode in ("forward", "forward+backward"):
            rows += measure(shape, length, mode, options, rate, rows)
            write(folder, rows, rate)


def matmul_rate() -> float:
    """Multiply-adds a second of a large float32 product on this machine."""
    a, b = torch.randn(2, 2048, 2048)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2048**3 / statistics.median(times[2:])


def visible_pairs(hashes: PositionalHash, length: int) -> int:
    """Causal pairs of positions that share a bin under some hash, summed over heads."""
    positions = np.arange(length)
    total = 0
    for widths, shifts in zip(hashes.widths, hashes.shifts, strict=True):
        edges = PositionalHash(widths[None], shifts[None]).left_edges(positions)[0]
        total += int((positions - edges.min(axis=0) + 1).sum())
    return total


def measure(shape: str, length: int, mode: str, options: Options, rate: float, before: list[Row]) -> list[Row]:
    heads, kv_heads, dim = SHAPES[shape]
    with_gradients = mode != "forward"
    query, key, value = (
        torch.randn(1, h, length, dim, requires_grad=with_gradients) for h in (heads, kv_heads, kv_heads)
    )
    out_grad = torch.randn_like(query)
    operators = build_operators(heads, kv_heads, length, with_gradients, options)
    operators = {
        name: run
        for name, run in operators.items()
        if expected(name, shape, length, mode, before) < options.max_seconds
    }
    tensors = (query, key, value)

    def once(run: Callable) -> None:
        if with_gradients:
            for tensor in tensors:
                tensor.grad = None
            run(*tensors).backward(out_grad)
        else:
            with torch.no_grad():
                run(*tensors)

    times: dict[str, list[float]] = {name: [] for name in operators}
    for run in operators.values():
        once(run)
    for _ in range(options.repeats):
        for name, run in operators.items():
            start = time.perf_counter()
            once(run)
            times[name].append(time.perf_counter() - start)

    hashes = PositionalHash.sample(1 / alibi_slopes(heads), options.samples)
    products = 7 if with_gradients else 2  # forward: q k, p v; backward: q k again, dout v, and dq, dk, dv
    floor = products * dim * visible_pairs(hashes, length) / rate
    results = query.nbytes + (2 * query.nbytes + 2 * key.nbytes - query.nbytes if with_gradients else 0)
    return [
        Row(
            date=datetime.date.today().isoformat(),
            machine=machine(),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            shape=shape,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            length=length,
            samples=options.samples,
            operator=name,
            mode=mode,
            median=statistics.median(times[name]),
            fastest=min(times[name]),
            repeats=options.repeats,
            tokens_per_second=length / statistics.median(times[name]),
            extra_memory=extra_memory(lambda run=run: once(run), tensors, results),
            floor_share=floor / statistics.median(times[name]) if name == "banded" else None,
        )
        for name, run in operators.items()
    ]


def build_operators(
    heads: int, kv_heads: int, length: int, with_gradients: bool, options: Options
) -> dict[str, Callable]:
    """The operators by name; each takes query, key and value and draws or builds its masks itself."""
    gqa = heads != kv_heads
    sigma = 1 / alibi_slopes(heads)

    def hashes() -> PositionalHash:
        return PositionalHash.sample(sigma, options.samples)

    def masked(query, key, value):
        positions = torch.arange(length)
        distance = (positions[:, None] - positions[None, :]).float()
        mask = torch.where(distance < 0, -torch.inf, -distance * torch.tensor(1 / sigma[:, None, None]).float())
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=gqa)

    operators: dict[str, Callable] = {
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
        "alibi": lambda q, k, v: alibi_attention(q, k, v, sigma),
        "blocks": lambda q, k, v: positional_lsh_attention(q, k, v, hashes(), impl="blocks"),
        "banded": lambda q, k, v: positional_lsh_attention(q, k, v, hashes(), impl="banded"),
    }
    if 4 * heads * length**2 <= options.max_mask_mib * MIB:
        operators["sdpa+mask"] = masked
    if options.flex and not with_gradients:
        operators["flex windowed alibi"] = windowed_alibi(sigma, length, options.samples, gqa)
    return operators


_compiled_flex = torch.compile(flex_attention, dynamic=False)


def windowed_alibi(sigma: np.ndarray, length: int, samples: int, gqa: bool) -> Callable:
    """FlexAttention on ALiBi cut at the mean window of the banded pass, sigma times the harmonic number of s."""
    windows = torch.tensor(np.ceil(sigma * sum(1 / r for r in range(1, samples + 1))), dtype=torch.long)
    slopes = torch.tensor(1 / sigma, dtype=torch.float32)
    size = 128

    def score_mod(score, b, h, i, j):
        return score - slopes[h] * (i - j)

    def mask_mod(b, h, i, j):
        return (j <= i) & (i - j < windows[h])

    def run(query, key, value):
        starts = torch.arange(0, length, size)
        first = (starts[None, :] - windows[:, None] + 1).clamp(min=0) // size
        last = starts // size
        counts = (last - first + 1).to(torch.int32)
        indices = first[..., None] + torch.arange(len(starts))
        indices = torch.where(indices < len(starts), indices, 0).to(torch.int32)
        mask = BlockMask.from_kv_blocks(
            counts[None], indices[None], BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(length, length)
        )
        return _compiled_flex(query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=gqa)

    return run


def expected(name: str, shape: str, length: int, mode: str, rows: list[Row]) -> float:
    """Seconds of one run, guessed from the longest length measured: quadratic for SDPA, linear for the others."""
    known = [row for row in rows if (row.operator, row.shape, row.mode) == (name, shape, mode)]
    if not known:
        return 0.0
    ratio = length / known[-1].length
    return known[-1].median * (ratio**2 if name.startswith("sdpa") else ratio)


def extra_memory(run: Callable, tensors: tuple[torch.Tensor, ...], results: int) -> float | None:
    """Peak resident memory of a run beyond its inputs and results, in MiB, where the system tells (Linux, glibc)."""
    status = Path("/proc/self/status")
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    for tensor in tensors:
        tensor.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not pass for memory that a run did not need
    reset.write_text("5")

    def read(field: str) -> int:
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))

    start = read("VmRSS")
    run()
    return max(0, read("VmHWM") - start - results) / MIB


def machine() -> str:
    """Processor and core count."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def write(folder: Path, rows: list[Row], rate: float) -> None:
    """Writes the CSV, the table and the plot, each in one step."""
    partial = folder / "partial"
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    partial.replace(folder / "benchmark.csv")
    partial.write_text(table(rows, rate))
    partial.replace(folder / "benchmark.md")
    plot(rows, partial)
    partial.replace(folder / "benchmark.png")


def table(rows: list[Row], rate: float) -> str:
    """Markdown: medians by shape, mode, length and operator, and the ratio to causal SDPA."""
    first = rows[0]
    lines = [
        f"{first.machine}; {first.threads} threads; torch {first.torch}; {first.date}; float32; s = {first.samples}; "
        f"ALiBi slopes; matmul {2 * rate / 1e9:.0f} GFLOP/s. Medians of {first.repeats}.",
        "",
        "| shape | mode | length | operator | seconds | against SDPA | extra MiB | share of floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sdpa = {(row.shape, row.mode, row.length): row.median for row in rows if row.operator == "sdpa"}
    for row in rows:
        base = sdpa.get((row.shape, row.mode, row.length))
        against = f"{base / row.median:.2f} x" if base else ""
        memory = "" if row.extra_memory is None else f"{row.extra_memory:.0f}"
        share = "" if row.floor_share is None else f"{row.floor_share:.2f}"
        lines.append(
            f"| {row.shape} | {row.mode} | {row.length} | {row.operator} | {row.median:.4f} | {against} | {memory} "
            f"| {share} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Seconds by length, one panel a mode, for the base shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, mode in zip(axes, ("forward", "forward+backward"), strict=True):
        for name in dict.fromkeys(row.operator for row in rows):
            points = [(r.length, r.median) for r in rows if (r.operator, r.mode, r.shape) == (name, mode, "base")]
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=mode, xlabel="tokens")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
