"""The shim: a thin module in every checkpoint that points ``trust_remote_code=True`` to this package."""

from __future__ import annotations

import os
from collections.abc import Iterable

_SHIM = "modeling_poslsh"
SHIM_FILE = f"{_SHIM}.py"
_SHIM_TEXT = '''"""This checkpoint needs the package hf-poslsh: pip install hf-poslsh"""

from hf_poslsh.models.families import *  # noqa: F403
'''


def auto_map(config_class: str, architectures: Iterable[str] | None) -> dict[str, str]:
    """The ``auto_map`` of a config.json: which class of the shim each Auto class loads."""
    classes = {"AutoConfig": f"{_SHIM}.{config_class}"}
    for name in architectures or ():
        suffix = name.rpartition("For")[2] if "For" in name else ""
        suffix = "ImageTextToText" if suffix == "ConditionalGeneration" else suffix
        classes[f"AutoModelFor{suffix}" if suffix else "AutoModel"] = f"{_SHIM}.{name}"
    return classes


def write_shim(directory: str | os.PathLike[str]) -> None:
    """Writes the shim into a checkpoint's folder."""
    with open(os.path.join(directory, SHIM_FILE), "w", encoding="utf-8") as file:
        file.write(_SHIM_TEXT)
