"""What a decoding step costs, by position, the original model beside the patched one: ``benchmark.py --decode``.

``step``: a few layers of Qwen3-0.6B's shape with random weights take single steps from caches of growing length. The
original's cache is filled with random keys, because its prefill is quadratic; ours by prefill in chunks. ``stream``:
a small model generates one long text through a ``TextStreamer``. Leaves ``decode.csv`` (columns: see ``Row``),
``decode.md``, ``decode.png``.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TextStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_poslsh import patch_model
from hf_poslsh.models.compat import CACHE_NAME

MIB = 2**20
STRIDE = 500  # tokens of a stream that make one row
CHUNK = 2048  # tokens of a prefill chunk


@dataclasses.dataclass
class Row:
    """Median cost of a decoding step near one position. Times in seconds."""

    run: str  # step or stream
    model: str  # original or patched
    layers: int
    samples: int
    threads: int
    position: int
    step: float  # the whole forward
    attention: float | None  # planning, cache update and attention function of all layers; not measured in a stream
    cache_bytes: int  # memory of all keys and values, spare room included
    resident: float | None  # MiB of the process, where the system tells


def run(folder: Path, positions: list[int], layers: int, tokens: int, samples: int, repeats: int) -> None:
    """Measures both runs and writes the results; see ``benchmark.Options`` for the arguments."""
    rows: list[Row] = []
    models = {name: shape_model(layers, samples, name == "patched") for name in ("original", "patched")}
    cache = None
    for position in tqdm(sorted(positions), desc="step"):
        caches = {"original": random_cache(models["original"], position)}
        caches["patched"] = cache = prefill(models["patched"], cache, position)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for _ in range(repeats + 1):
            for name, model in models.items():
                times[name].append(timed_step(model, caches[name]))
        for name in models:
            step, attention = (statistics.median(column) for column in zip(*times[name][1:], strict=True))
            row = (layers, samples, torch.get_num_threads(), position, step, attention)
            rows.append(Row("step", name, *row, cache_bytes(caches[name]), resident()))
        write(folder, rows)
    del models, caches, cache
    for name in ("original", "patched"):
        rows += stream(name, tokens, samples)
        write(folder, rows)


def shape_model(layers: int, samples: int, patched: bool) -> Any:
    """Layers of Qwen3-0.6B's shape under a small vocabulary."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    return make_model(layers, samples, patched, num_attention_heads=16, num_key_value_heads=8, **shape)


def make_model(layers: int, samples: int, patched: bool, **shape: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=1024, num_hidden_layers=layers, max_position_embeddings=2**20, **shape)
    model = Qwen3ForCausalLM(config).eval()
    return patch_model(model, num_samples=samples) if patched else model


def random_cache(model: Any, length: int) -> DynamicCache:
    """A cache of the original model that holds ``length`` random keys and values."""
    cache, config = DynamicCache(config=model.config), model.config
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, length, config.head_dim)
        cache.update(keys, values, layer)
    return cache


@torch.no_grad()
def prefill(model: Any, cache: Any, length: int) -> Any:
    """Feeds random tokens in chunks until the cache has seen ``length``."""
    seen = 0 if cache is None else cache.get_seq_length()
    for start in range(seen, length, CHUNK):
        ids = torch.randint(model.config.vocab_size, (1, min(CHUNK, length - start)))
        out = model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        cache = out.past_key_values
    return cache


@torch.no_grad()
def timed_step(model: Any, cache: Any) -> tuple[float, float]:
    """Seconds of one step, and of its attention."""
    with stopwatch(model, cache) as spent:
        start = time.perf_counter()
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{CACHE_NAME: cache})
        return time.perf_counter() - start, sum(spent)


@contextlib.contextmanager
def stopwatch(model: Any, cache: Any) -> Iterator[list[float]]:
    """Collects the seconds spent in the attention function, the cache's update and what prepares them."""
    spent: list[float] = []

    def timed(function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return wrapper

    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = timed(function)
    cache.update = timed(cache.update)
    if hasattr(model.model, "_context"):
        model.model._context = timed(model.model._context)
    try:
        yield spent
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = function
        del cache.update
        model.model.__dict__.pop("_context", None)


class Recorder(TextStreamer):
    """Notes when each token came, and what the process held then; the text itself goes nowhere."""

    def __init__(self, vocab_size: int) -> None:
        # A streamer decodes the line at hand again for every token, and a line ends with a token that ends with "\n".
        words = {f"w{i}" + ("\n" if i % 16 == 0 else " "): i for i in range(vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1 "))
        tokenizer.decoder = decoders.Fuse()
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        self.times: list[float] = []
        self.held: list[float | None] = []
        self.characters = 0

    def put(self, value: torch.Tensor) -> None:
        """Called for the prompt and for every token."""
        super().put(value)
        self.times.append(time.perf_counter())
        if len(self.times) % STRIDE == 1:
            self.held.append(resident())

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with every piece of text."""
        self.characters += len(text)


def stream(name: str, tokens: int, samples: int) -> list[Row]:
    """Generates ``tokens`` tokens with a small model of 4/2 heads of 64."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, recorder = make_model(2, samples, name == "patched", head_dim=64, **shape), Recorder(1024)
    cache = prefill(model, None, 1)
    sizes: list[int] = []
    cache.update = counting(cache, sizes)
    prompt = torch.zeros(1, 2, dtype=torch.long)  # its first token is in the cache
    options = {"do_sample": True, "max_new_tokens": tokens, "eos_token_id": None, "streamer": recorder}
    model.generate(prompt, **{CACHE_NAME: cache}, **options)
    steps = torch.tensor(recorder.times, dtype=torch.float64).diff().tolist()
    return [
        Row(
            "stream", name, 2, samples, torch.get_num_threads(), at + STRIDE,
            statistics.median(steps[at : at + STRIDE]), None, sizes[at // STRIDE], recorder.held[at // STRIDE],
        )
        for at in range(0, tokens - STRIDE + 1, STRIDE)
    ]  # fmt: skip


def counting(cache: Any, sizes: list[int]) -> Callable:
    """``cache.update`` that notes the size of the cache now and then."""
    update, last = cache.update, len(cache.layers) - 1

    def wrapper(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        result = update(keys, values, layer, *args, **kwargs)
        if layer == last and cache.get_seq_length() % STRIDE == 0:
            sizes.append(cache_bytes(cache))
        return result

    return wrapper


def cache_bytes(cache: Any) -> int:
    """Memory of all keys and values, counted once where tensors share it."""
    storages = [t.untyped_storage() for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident() -> float | None:
    """Resident memory of this process in MiB (Linux)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def write(folder: Path, rows: list[Row]) -> None:
    """Writes the CSV, the table and the plot, each in one step."""
    partial = folder / "partial"
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    partial.replace(folder / "decode.csv")
    partial.write_text(table(rows))
    partial.replace(folder / "decode.md")
    plot(rows, partial)
    partial.replace(folder / "decode.png")


def table(rows: list[Row]) -> str:
    """Markdown: the steps of both models and their ratios."""
    first = rows[0]
    lines = [
        f"{first.layers} layers of Qwen3-0.6B's shape, float32, s = {first.samples}, ALiBi slopes, {first.threads} "
        "threads. Medians; ratios are original to patched.",
        "",
        "| position | original step, ms | patched | ratio | original attention, ms | patched | ratio "
        "| original cache, MiB | patched | share |",
        "|" + "---|" * 10,
    ]
    steps = {(row.model, row.position): row for row in rows if row.run == "step"}
    for (name, position), ours in steps.items():
        if name == "original":
            continue
        host = steps["original", position]
        assert host.attention is not None
        assert ours.attention is not None
        lines.append(
            f"| {position} | {1e3 * host.step:.1f} | {1e3 * ours.step:.1f} | {host.step / ours.step:.1f} "
            f"| {1e3 * host.attention:.2f} | {1e3 * ours.attention:.2f} | {host.attention / ours.attention:.1f} "
            f"| {host.cache_bytes / MIB:.1f} | {ours.cache_bytes / MIB:.1f} "
            f"| {100 * ours.cache_bytes / host.cache_bytes:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Latency and cache by position: the steps above, the stream below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    panels = (
        ("step", "attention", "attention of a step, ms", 1e3),
        ("step", "cache_bytes", "cache, MiB", 1 / MIB),
        ("stream", "step", "time per token of one long text, ms", 1e3),
        ("stream", "cache_bytes", "cache of that text, MiB", 1 / MIB),
    )
    for axis, (run_, field, label, unit) in zip(axes.flat, panels, strict=True):
        for name in ("original", "patched"):
            chosen = [row for row in rows if (row.run, row.model) == (run_, name)]
            axis.plot([row.position for row in chosen], [unit * getattr(row, field) for row in chosen], label=name)
        axis.set(title=label, xlabel="position", ylim=(0, None))
        axis.grid(True, alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
