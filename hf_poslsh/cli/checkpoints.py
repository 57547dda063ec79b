"""``patch`` and ``unpatch``: from a checkpoint on disk to another, without a model in memory.

Patching changes no weight and no name of a weight, only the config, so the weight files are copied or linked as they
are. The config is made by the very functions that ``patch_model`` and ``unpatch_model`` use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_poslsh.cli.source import read_config
from hf_poslsh.cli.text import size
from hf_poslsh.cli.weights import is_weights, weight_files
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models import shim
from hf_poslsh.models.families import HOSTS, check_method, family_of, supported_models
from hf_poslsh.patching import host_config, patched_config

_FOLDERS = ("additional_chat_templates",)  # what a tokenizer saves besides files


def patch_checkpoint(
    source: Path, target: Path, method: PosLSHConfig, *, overwrite: bool = False, link: bool = False
) -> dict[str, Any]:
    """Writes the checkpoint that ``patch_model`` and ``save_pretrained`` would write.

    Tokenizer, generation config and other files travel along; weights in other formats, hidden files and README.md,
    which describe or hold the unpatched model, do not.

    Args:
        source: folder of a checkpoint with safetensors weights.
        target: folder to make.
        method: the method.
        overwrite: replace a checkpoint that is there.
        link: hard links to the weight files instead of copies.

    Returns:
        ``files`` carried, ``left_behind``, ``bytes`` of weights, and ``method``, as JSON types.

    Raises:
        ValueError: the source is no whole checkpoint of a supported model or is patched, the method does not fit it,
            or the target is there.
        OSError: reading or writing failed.
    """
    host = _read_config(source)
    if type(host) in HOSTS:
        raise ValueError(f"{source} is patched already; `hf-poslsh unpatch` gives the original back.")
    if family_of(host) is None:
        raise ValueError(f"{source} is a {type(host).__name__}; supported are {supported_models()}.")
    ours = patched_config(host, method)
    classes = {host_class.__name__: ours_class for host_class, ours_class in family_of(host).classes.items()}  # type: ignore[union-attr]
    ours.architectures = _renamed(source, host.architectures, classes)
    return {**_write(source, target, ours, overwrite, link), "method": method.to_dict()}


def unpatch_checkpoint(source: Path, target: Path, *, overwrite: bool = False, link: bool = False) -> dict[str, Any]:
    """The reverse of ``patch_checkpoint``: the same weights under the host's config.

    Args, result and errors: as ``patch_checkpoint``; the source must be patched.
    """
    ours = _read_config(source)
    if type(ours) not in HOSTS:
        raise ValueError(f"{source} is a {type(ours).__name__}, which is not patched.")
    check_method(ours.get_text_config())
    host = host_config(ours)
    classes = {ours_class.__name__: host_class for ours_class, host_class in HOSTS.items()}
    host.architectures = _renamed(source, ours.architectures, classes)
    return _write(source, target, host, overwrite, link)


def _read_config(source: Path) -> Any:
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}. A model of the Hub: `hf download NAME --local-dir {source}`.")
    if (source / "adapter_config.json").is_file():
        raise ValueError(f"{source} holds an adapter; its base model decides whether it is patched.")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: it is no checkpoint.")
    return read_config(str(source))


def _renamed(source: Path, names: list[str] | None, classes: dict[str, type]) -> list[str]:
    if not names:
        raise ValueError(
            f'{source / "config.json"} names no architectures, such as ["MistralForCausalLM"]; add them.'
        )
    for name in names:
        if name not in classes:
            raise ValueError(
                f"{source / 'config.json'} has architectures {names}; known are {', '.join(sorted(classes))}."
            )
    return [classes[name].__name__ for name in names]


def _write(source: Path, target: Path, config: Any, overwrite: bool, link: bool) -> dict[str, Any]:
    _check_target(source, target, overwrite)
    weights = weight_files(source)
    others, left = _other_files(source, weights)
    bytes_ = sum((source / name).stat().st_size for name in weights)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if not link and bytes_ > free:
        raise ValueError(
            f"the weights have {bytes_:,} bytes, {target.parent} has {free:,} free; use --link, or make room."
        )
    partial.mkdir()
    try:
        for name in others:
            _carry(source / name, partial / name, shutil.copyfile)
        config.save_pretrained(partial)
        for name in weights:
            _carry(source / name, partial / name, _link if link else shutil.copyfile)
        _put_in_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {
        "source": str(source),
        "target": str(target),
        "architectures": config.architectures,
        "files": sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()),
        "left_behind": left,
        "weight_bytes": bytes_,
        "linked": link,
    }


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    inner, outer = target.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"{target} and {source} lie in each other; give another folder to write to.")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(f"{target} is there already; give another folder, or --overwrite.")
    if (
        target.is_symlink()
        or not target.is_dir()
        or (any(target.iterdir()) and not (target / "config.json").is_file())
    ):
        raise ValueError(f"{target} is no checkpoint, so it is not overwritten; remove it yourself.")


def _other_files(source: Path, weights: list[str]) -> tuple[list[str], list[str]]:
    """Files that travel along, and entries that do not."""
    made = {"config.json", shim.SHIM_FILE}
    carried, left = [], []
    for path in sorted(source.iterdir()):
        name = path.name
        if name in made or name in weights or name.startswith("."):
            continue
        if path.is_dir() and name in _FOLDERS:
            carried += [file.relative_to(source).as_posix() for file in sorted(path.rglob("*")) if file.is_file()]
        elif path.is_dir() or name == "README.md" or is_weights(name):
            left.append(name)
        else:
            carried.append(name)
    return carried, left


def _carry(source: Path, target: Path, how: Callable[[Path, Path], Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    how(source, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)  # the Hub's cache holds symbolic links
    except OSError as error:
        raise OSError(f"cannot link {target} to {source} ({error.strerror}); leave out --link to copy.") from error


def _put_in_place(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def describe(result: dict[str, Any]) -> str:
    """The result of ``patch_checkpoint`` or ``unpatch_checkpoint`` in words."""
    how = "linked" if result["linked"] else "copied"
    left = f"\nleft behind: {', '.join(result['left_behind'])}" if result["left_behind"] else ""
    loads = "\nload it after `import hf_poslsh`, by an Auto class of transformers"
    return (
        f"{result['target']}: {', '.join(result['architectures'])}, {size(result['weight_bytes'])} of weights {how}\n"
        f"files: {', '.join(result['files'])}{left}{loads if 'method' in result else ''}"
    )
