"""What a name on the command line stands for: a model's config, patched or not, or an adapter. Reads no weights."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import find_adapter_config_file

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.families import HOSTS, family_of
from hf_poslsh.models.modeling import method_of
from hf_poslsh.patching import split_marked_name


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint as far as its configs describe it.

    Args:
        name: folder or Hub name.
        config: the transformers config of the model, or of the adapter's base model; None where an adapter's base
            cannot be read.
        method: the method, or None if nothing is patched.
        base: of an adapter, the name of its base model; None for a model.
        problem: why ``config`` is None.
    """

    name: str
    config: Any
    method: PosLSHConfig | None
    base: str | None = None
    problem: str | None = None

    @property
    def family(self) -> str | None:
        """The host's model type if it can be patched."""
        if self.config is None or family_of(self.config) is None:
            return None
        return HOSTS.get(type(self.config), type(self.config)).model_type  # type: ignore[attr-defined]


def read_source(name: str) -> Source:
    """Reads the configs of a checkpoint or adapter.

    Args:
        name: folder or Hub name.

    Raises:
        ValueError: there is no such folder, it holds no config, or the config makes no sense.
    """
    folder = check_name(name)
    adapter = _adapter_file(name, folder)
    if adapter is None:
        if folder is not None and not (folder / "config.json").is_file():
            raise ValueError(f"{name} holds neither config.json nor adapter_config.json: it is no checkpoint.")
        config = read_config(name)
        return Source(name, config, _method_in(config))
    base = _adapter_base(adapter)
    marked = split_marked_name(base)
    method, original = (None, base) if marked is None else (marked[1], marked[0])
    try:
        config = read_config(original)
    except ValueError as error:
        if marked is None:
            raise
        return Source(name, None, method, original, str(error).splitlines()[0])
    return Source(name, config, _method_in(config) if method is None else method, original)


def read_config(name: str) -> Any:
    """A transformers config.

    Args:
        name: folder or Hub name.

    Raises:
        ValueError: there is none, or it cannot be understood.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many kinds, where a field has a wrong type
        raise ValueError(f"the config.json of {name} cannot be read: {error}") from error
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise ValueError(f"the config.json of {name} has architectures={names!r}; it must be a list of class names.")
    return config


def check_name(name: str) -> Path | None:
    """The folder that ``name`` is, or None if it can only be a name on the Hub.

    Raises:
        ValueError: it can be neither.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder of the checkpoint.")
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"there is no folder {name}.")
    return None


def _adapter_file(name: str, folder: Path | None) -> Path | None:
    if folder is not None:
        file = folder / "adapter_config.json"
        return file if file.is_file() else None
    found = find_adapter_config_file(name)
    return None if found is None else Path(found)


def _adapter_base(file: Path) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON file: {error}.") from error
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str):
        raise ValueError(f"{file} has base_model_name_or_path={base!r}; it must name the base model.")
    return base


def _method_in(config: Any) -> PosLSHConfig | None:
    return method_of(config.get_text_config()) if type(config) in HOSTS else None


def read_method(
    settings: Sequence[str], preset: str | None = None, base: PosLSHConfig | None = None, **fields: Any
) -> PosLSHConfig:
    """The method that ``--preset`` and ``--set`` describe.

    Args:
        settings: ``key=value`` of ``PosLSHConfig`` fields; a value is JSON, or else a word.
        preset: ``"paper"``, ``"pretrained"`` or None.
        base: the method to start from if there is no preset; the defaults if None.
        **fields: more fields, over all others.

    Raises:
        ValueError: an unknown key, or a value that is not supported.
    """
    known = [field.name for field in dataclasses.fields(PosLSHConfig)]
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" (did you mean {near[0]}?)" if near and near[0] != key else ""
            raise ValueError(f"--set {setting!r}: give key=value, the key one of {', '.join(known)}{hint}.")
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    given |= fields
    presets = {"paper": PosLSHConfig.paper, "pretrained": PosLSHConfig.pretrained}
    if preset is not None:
        return presets[preset](**given)
    return (base or PosLSHConfig()).replace(**given)
