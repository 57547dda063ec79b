"""Where texts come from: local files, and whatever ``datasets`` can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment.files import sha256
from experiment.settings import RECIPES, DataSettings, SourceSettings


@dataclass(frozen=True)
class Text:
    """One document.

    Args:
        name: its file's name, or its dataset's and its number there.
        content: all of it.
    """

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 bytes: tells whether two evaluations read the same text."""
        return sha256(self.content.encode())


def digest(texts: Sequence[Text]) -> str:
    """One digest of all texts in their order."""
    return sha256("".join(text.sha256 for text in texts).encode())


def read_splits(data: DataSettings) -> dict[str, list[Text]]:
    """The texts of an experiment: ``train``, ``validation`` and ``held_out``.

    Raises:
        ValueError: a text can't be read, or is in two of them, by name or by content.
    """
    splits = {
        "train": read_texts(data.train, data.folder),
        "validation": read_texts(data.validation, data.folder) if data.validation else [],
        "held_out": read_texts(data.held_out, data.folder),
    }
    seen: dict[str, tuple[str, str]] = {}
    for split, texts in splits.items():
        for text in texts:
            other_split, name = seen.setdefault(text.sha256, (split, text.name))
            if other_split != split:
                raise ValueError(
                    f"the text {text.name!r} of data.{split} is also in data.{other_split}, as {name!r}; remove one."
                )
    return splits


def read_texts(sources: Sequence[str | SourceSettings], folder: str | Path | None) -> list[Text]:
    """All documents of several sources, in their order.

    Args:
        sources: names of text files, and datasets.
        folder: where the files are; None: ``recipes/data``.

    Raises:
        ValueError: a source can't be read or is empty, or none is named.
    """
    files = [source for source in sources if isinstance(source, str)]
    if not sources or len(set(files)) != len(files):
        raise ValueError(f"the texts are {list(sources)}; name at least one file, and each once.")
    folder = RECIPES / "data" if folder is None else Path(folder)
    texts: list[Text] = []
    for source in sources:
        texts += [_read_file(source, folder)] if isinstance(source, str) else _read_dataset(source, folder)
    return texts


def _read_file(name: str, folder: Path) -> Text:
    try:
        content = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the text {name!r} in {folder}: {error}") from error
    if not content.strip():
        raise ValueError(f"the text {name!r} in {folder} is empty.")
    return Text(name, content)


def _read_dataset(source: SourceSettings, folder: Path) -> list[Text]:
    from datasets import load_dataset  # seconds of imports that local texts don't need

    options = {"keep_linebreaks": True} if source.path == "text" else {}
    if source.files:
        options["data_files"] = [str(folder / name) for name in source.files]
    where = f"the dataset {source.path!r}"
    try:
        rows = load_dataset(
            source.path,
            source.name,
            split=source.split,
            revision=source.revision,
            streaming=source.streaming,
            **options,
        )
        if source.limit is not None:
            rows = rows.take(source.limit)
        if rows.column_names is not None and source.column not in rows.column_names:
            raise ValueError(f"it has no column {source.column!r}, but {', '.join(rows.column_names)}")
        column = source.column
        rows = [row[column] for row in rows] if source.streaming else list(rows[column])
    except Exception as error:  # what load_dataset raises depends on the builder
        raise ValueError(f"cannot read {where}: {error}") from error
    wrong = next((row for row in rows if not isinstance(row, str)), None)
    if wrong is not None:
        raise ValueError(f"the column {source.column!r} of {where} holds {wrong!r}, which is no text.")
    documents = rows if source.heading is None else _joined(rows, re.compile(source.heading))
    name = f"{source.path}/{source.name}" if source.name else source.path
    texts = [Text(f"{name}/{source.split}[{at}]", text) for at, text in enumerate(documents) if text.strip()]
    if not texts:
        raise ValueError(f"{where} holds no text in {source.column!r}.")
    return texts


def _joined(rows: Sequence[str], heading: re.Pattern[str]) -> Iterator[str]:
    document: list[str] = []
    for row in rows:
        if heading.match(row) and document:
            yield "".join(document)
            document = []
        document.append(row)
    if document:
        yield "".join(document)
