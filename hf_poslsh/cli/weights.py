"""The weight files of a checkpoint: which they are, and whether they are whole. Tensors are never read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_LARGEST_HEADER = 100_000_000  # bytes; what the format allows


def weight_files(folder: Path) -> list[str]:
    """The files, the index included, that ``from_pretrained`` reads the weights of a checkpoint from, all checked.

    Raises:
        ValueError: there are none in the safetensors format, one is missing, or one is cut off or damaged.
    """
    if (folder / SINGLE).is_file():
        tensor_names(folder / SINGLE)
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}. Weights in another format are converted by "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)."
        )
    content = _read_json(folder / INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(_is_plain(name) for name in weight_map.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing, though {INDEX} names it.")
        wanted = {tensor for tensor, file in weight_map.items() if file == shard}
        lacking = sorted(wanted - tensor_names(folder / shard))
        if lacking:
            raise ValueError(f"{folder / shard} has no tensor {lacking[0]!r}, though {INDEX} says so.")
    return [INDEX, *shards]


def tensor_names(file: Path) -> set[str]:
    """Names of the tensors of a safetensors file.

    Raises:
        ValueError: the header is damaged, or the file has not the length that the header implies.
    """
    length = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        header_size = struct.unpack("<Q", start)[0] if len(start) == 8 else length
        if header_size > min(_LARGEST_HEADER, length - 8):
            raise ValueError(
                f"{file} is cut off or no safetensors file: its header does not fit into {length} bytes."
            )
        text = stream.read(header_size)
    try:
        header = json.loads(text)
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        data = max(ends.values(), default=0)
        whole = 8 + header_size + int(data)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: its safetensors header makes no sense ({error}).") from error
    if whole != length:
        raise ValueError(
            f"{file} has {length} bytes, its header says {whole}: it is cut off or damaged; get it again."
        )
    return set(ends)


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint holds weights, or training state, in any format."""
    return name.endswith(_SUFFIXES)


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and os.path.basename(name) == name


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON file: {error}.") from error
