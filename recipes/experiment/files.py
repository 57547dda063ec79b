"""Files that are either complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a text file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Writes or replaces a JSON file in one step. NaN and infinity are errors: they are no JSON."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: it is not there or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def partial_folder(path: Path) -> Path:
    """Where to build the folder ``path`` before ``finish_folder`` puts it in place."""
    return path.with_name(f".{path.name}.partial")


def finish_folder(path: Path) -> None:
    """Puts the folder that was built in ``partial_folder(path)`` in its place; an older one goes away."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(partial_folder(path), path)
    shutil.rmtree(old, ignore_errors=True)


def lock_folder(path: Path) -> None:
    """Makes the folder and keeps every other process out that calls this, until the program ends.

    Raises:
        ValueError: another process is in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":
        return  # a folder can't be locked elsewhere
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)  # stays open: closing it gives the lock back
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f"{path} is in use by another run; wait for its end, or stop it.") from error


def sha256(content: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(content).hexdigest()
