"""``retrieval-heads``: which KV heads of a model fetch from afar, as a table, a picture and a method's field."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_poslsh.cli.source import read_source
from hf_poslsh.cli.text import table
from hf_poslsh.models.families import supported_models
from hf_poslsh.retrieval import KINDS, RetrievalScores, check_length, heads_for_share, retrieval_scores

_PICTURE = "heads.png"


class Prompts(NamedTuple):
    """Prompts of ``retrieval_scores``; ``texts`` are files."""

    length: int
    number: int
    seed: int
    texts: list[Path] | None


def find_heads(
    name: str, share: float, prompts: Prompts, kind: str, dtype: str, folder: Path | None
) -> dict[str, Any]:
    """Scores the heads of a checkpoint and chooses the best.

    Args:
        name: folder or Hub name of an unpatched model with its tokenizer.
        share: of all KV heads, how many are chosen.
        prompts: what the scores are made with.
        kind: the ranking.
        dtype: of the weights, such as ``"bfloat16"``.
        folder: where files are written, or None.

    Returns:
        JSON types.

    Raises:
        ValueError: the checkpoint is patched, an adapter or not supported, or an argument is out of range.
        OSError: a file cannot be read or written.
    """
    _check_arguments(name, share, prompts.length, kind)
    texts = None if prompts.texts is None else [path.read_text(encoding="utf-8") for path in prompts.texts]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(name)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    model.to(device)
    start = time.perf_counter()
    with tqdm(total=len(KINDS) * prompts.number, desc="prompts", disable=None) as bar:
        scores = retrieval_scores(
            model,
            tokenizer,
            length=prompts.length,
            prompts=prompts.number,
            seed=prompts.seed,
            texts=texts,
            on_prompt=lambda done, total: bar.update(done - bar.n),
        )
    seconds = time.perf_counter() - start
    chosen = heads_for_share(scores, share, kind)
    result = {
        "checkpoint": name,
        "kind": kind,
        "share": share,
        "chosen": sum(map(len, chosen)),
        "full_heads": [list(heads) for heads in chosen],
        "ranking": [
            {"layer": layer, "head": head, **{each: float(scores.of(each)[layer, head]) for each in KINDS}}
            for layer, head, _ in scores.ranking(kind)
        ],
        "scores": scores.to_dict(),
        "seconds": seconds,
    }
    return result | ({"files": [], "not_drawn": None} if folder is None else _write(folder, scores, result))


def _check_arguments(name: str, share: float, length: int, kind: str) -> None:
    """Says what can be said against them before the weights are read."""
    source = read_source(name)
    if source.method is not None:
        raise ValueError(
            f"{name} is patched, so that its heads no longer see what is far away; give the original, or what "
            f"`hf-poslsh unpatch {name} DST` makes."
        )
    if source.base is not None:
        raise ValueError(
            f"{name} is an adapter; give its base model {source.base}, or a checkpoint that the adapter is merged "
            "into."
        )
    if source.family is None:
        raise ValueError(
            f"cannot score the heads of a {source.config.model_type} model; supported are {supported_models()}."
        )
    config = source.config.get_text_config()
    none = np.zeros((config.num_hidden_layers, config.num_key_value_heads))
    heads_for_share(RetrievalScores(none, none), share, kind)
    check_length(config, length)


def _write(folder: Path, scores: RetrievalScores, result: dict[str, Any]) -> dict[str, Any]:
    files = {"scores.json": scores.to_dict(), "poslsh.json": {"full_heads": result["full_heads"]}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    written = [str(folder / name) for name in files]
    try:
        draw_scores(scores, result["full_heads"], folder / _PICTURE)
    except ImportError as missing:
        return {"files": written, "not_drawn": f"{_PICTURE} was not drawn: {missing}"}
    return {"files": [*written, str(folder / _PICTURE)], "not_drawn": None}


def draw_scores(scores: RetrievalScores, full_heads: list[list[int]], path: Path) -> None:
    """Draws both kinds of scores, layers by KV heads, with a frame around the chosen heads.

    Args:
        scores: what to draw.
        full_heads: the chosen heads by layer.
        path: file to write; the suffix chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as missing:
        raise ImportError("pictures need matplotlib: pip install 'hf-poslsh[plots]'.") from missing

    layers, heads = scores.planted.shape
    figure = Figure(figsize=(min(2.2 + 0.16 * layers, 18), min(2.4 + 0.4 * heads, 14)), layout="constrained")
    axes = figure.subplots(len(KINDS), 1, sharex=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        image = ax.imshow(scores.of(kind).T, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
        for layer, chosen in enumerate(full_heads):
            for head in chosen:
                ax.add_patch(
                    Rectangle((layer - 0.5, head - 0.5), 1, 1, fill=False, edgecolor="#D55E00", linewidth=1.5)
                )
        ax.set_title(f"{kind} (framed: chosen)", fontsize=10)
        ax.set_ylabel("KV head")
        for axis in (ax.xaxis, ax.yaxis):
            axis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("layer")
    figure.colorbar(image, ax=axes, label="attention mass")
    figure.savefig(path, dpi=130)


def describe(result: dict[str, Any]) -> str:
    """The result of ``find_heads`` in words."""
    settings, count = result["scores"]["settings"], result["chosen"]
    rows = [
        [str(place), str(head["layer"]), str(head["head"]), *(f"{head[kind]:.3f}" for kind in KINDS)]
        for place, head in enumerate(result["ranking"][:count], 1)
    ]
    layers = sum(map(bool, result["full_heads"]))
    parts = [
        f"{result['checkpoint']}: the {count} best of {len(result['ranking'])} KV heads by {result['kind']} scores, "
        f"in {layers} of {len(result['full_heads'])} layers",
        table(["rank", "layer", "KV head", *KINDS], rows),
        f"planted: attention mass from an answer to the planted number; natural: from a repeated passage to\n"
        f"what came next in the first copy. {settings['prompts']} prompts of {settings['length']:,} tokens each, "
        f"{settings['dtype']}, {result['seconds']:.1f} seconds.",
    ]
    if result["files"]:
        parts.append(f"files: {', '.join(result['files'])}")
    if result["not_drawn"]:
        parts.append(result["not_drawn"])
    return "\n\n".join(parts)
