"""push_to_hub: a checkpoint or an adapter, what belongs to it and its model card, on the Hub in one commit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCardData,
    get_token,
)
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from torch import nn
from transformers import AutoConfig
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_poslsh.adapters import AUTO_CLASSES, method_of_checkpoint
from hf_poslsh.cards import checkpoint_card, eval_results, merge_card
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.evaluation import PROTOCOLS
from hf_poslsh.models.configuration import PosLSHConfigMixin
from hf_poslsh.models.modeling import PosLSHCompositeMixin, PosLSHModelMixin, method_of
from hf_poslsh.models.shim import SHIM_FILE, auto_map
from hf_poslsh.patching import marked_name, split_marked_name

_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModel": "feature-extraction",
}
_FIGURES = ("report.md", "results.json", "evaluation.json")
_PICKLES = (".pt", ".pth", ".bin", ".pkl")  # optimizer states and the like: a safetensors checkpoint needs none
_OF_CHECKPOINTS = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_config.json", "adapter_model.*", SHIM_FILE),
)


def push_to_hub(
    model: nn.Module | str | os.PathLike[str],
    repo_id: str,
    *,
    tokenizer: Any = None,
    files: Iterable[str | os.PathLike[str]] = (),
    base_model: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Publishes a patched checkpoint, or an adapter of one, with a model card. One commit: all of it or nothing.

    Weights of an earlier push that this one does not have are deleted in the same commit. A card that is there keeps
    its text and metadata; our part of it is rewritten.

    Args:
        model: a patched model, a PEFT model around one, or a folder that their ``save_pretrained`` wrote. Of a folder
            its files are published, but not its subfolders, hidden files and pickles. A folder of the recipes whose
            ``recipe.json`` says that it is an unpatched baseline is published too.
        repo_id: ``"user/name"``; ``"name"`` for the owner of the token. Made if it does not exist.
        tokenizer: saved beside the model.
        files: further files to publish: results, tables, plots. PNG files are shown in the card. ``evaluation.json``,
            ``results.json`` and ``recipe.json`` of the recipes are read for it, here or in the folder.
        base_model: Hub name of the model that this one was made from, where the files don't say so, or name a
            folder of this machine.
        metadata: fields for the head of the card, e.g. ``{"license": "mit", "datasets": ["user/data"]}``. Without a
            ``license`` the base model's is taken over, if its card names one.
        private: as for ``HfApi.create_repo``.
        commit_message: the commit's; the default names the package.
        token: of the Hub; by default ``HF_TOKEN`` or what ``hf auth login`` stored.

    Returns:
        The commit, a string with its URL.

    Raises:
        ValueError: the name is malformed, there is no token, the model is not patched, the folder holds no complete
            checkpoint, an adapter's base model is a folder of this machine, or the existing card can't be read.
    """
    check_push(repo_id, token)
    with TemporaryDirectory() as scratch:
        saved = Path(scratch)
        if isinstance(model, nn.Module):
            base_model = base_model or _original(model)
            model.save_pretrained(saved)  # type: ignore[operator]
            (saved / "README.md").unlink(missing_ok=True)  # PEFT's empty form
            found = _files_of(saved)
        else:
            found = _files_of(Path(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(saved / "tokenizer")
            found |= _files_of(saved / "tokenizer")
        found |= {Path(file).name: Path(file) for file in files}
        where = "the model" if isinstance(model, nn.Module) else os.fspath(model)
        checkpoint = _read_checkpoint(found, where, base_model, token)
        return _commit(HfApi(token=token), repo_id, checkpoint, dict(metadata or {}), private, commit_message)


def check_push(repo_id: str, token: str | None = None) -> None:
    """What can be known of a push before there is anything to push.

    Raises:
        ValueError: the name is malformed or there is no token.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}; write 'user/name'. {error}") from error
    if not (token or get_token()):
        raise ValueError(
            "no token for the Hugging Face Hub: run `hf auth login`, set HF_TOKEN, or pass token=. It needs the "
            "right to write."
        )


@dataclass(frozen=True)
class _Checkpoint:
    """What is published.

    Args:
        files: path in the repository to file or content.
        auto_class: name of the Auto class that loads it.
        host: class, or type, of the model without the patch.
        method: None for an unpatched baseline.
        base: Hub name of the model it was made from, if known.
        adapter: a PEFT adapter.
    """

    files: dict[str, Path | bytes]
    auto_class: str
    host: str
    method: PosLSHConfig | None
    base: str | None
    adapter: bool

    def json(self, name: str) -> Any:
        """The content of one of the files, None without it."""
        file = self.files.get(name)
        return json.loads(file.read_text(encoding="utf-8")) if isinstance(file, Path) else None


def _original(model: Any) -> str | None:
    target = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(target, (PosLSHModelMixin, PosLSHCompositeMixin)):
        raise ValueError(
            f"this {type(target).__name__} is not patched (or wrapped: unwrap it first). Call "
            "hf_poslsh.patch_model(model), or publish it as it is by its own model.push_to_hub."
        )
    if isinstance(model, PeftModel):
        return None  # its adapter_config.json says it
    name: str = target.name_or_path
    return name if _on_hub(name) else None


def _on_hub(name: str) -> bool:
    """Can a name be a Hub's, and is no folder of this machine?"""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not os.path.exists(name)


def _files_of(folder: Path) -> dict[str, Path | bytes]:
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder; give one that save_pretrained wrote, or the model itself.")
    paths = [*folder.iterdir(), *(folder / CHAT_TEMPLATE_DIR).glob("*")]
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(paths)
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _PICKLES
    }


def _read_checkpoint(
    files: dict[str, Path | bytes], where: str, base_model: str | None, token: str | None
) -> _Checkpoint:
    """Checks that the files are a whole checkpoint, and finds what the card says of it."""
    adapter = files.get("adapter_config.json")
    config = files.get("config.json")
    if isinstance(adapter, Path):
        _need(files, where, "adapter_model.safetensors")
        return _read_adapter(files, json.loads(adapter.read_text(encoding="utf-8")), where, base_model, token)
    if not isinstance(config, Path):
        raise ValueError(
            f"{where!r} is no checkpoint: it has neither config.json nor adapter_config.json. Give a folder that "
            "save_pretrained wrote."
        )
    index = files.get("model.safetensors.index.json")
    shards = set(json.loads(index.read_text())["weight_map"].values()) if isinstance(index, Path) else ()
    _need(files, where, *(sorted(shards) or ["model.safetensors"]))
    loaded = AutoConfig.from_pretrained(config.parent)
    text = loaded.get_text_config()
    architectures = loaded.architectures or ["AutoModel"]
    auto_class = next(name for name in auto_map("", architectures) if name != "AutoConfig")
    base = base_model or _recipe(files).get("settings", {}).get("model", {}).get("pretrained")
    base = base if base and _on_hub(base) else None
    if isinstance(text, PosLSHConfigMixin):
        _need(files, where, SHIM_FILE)
        host = architectures[0].removeprefix("PosLSH")
        return _Checkpoint(files, auto_class, host, method_of(text), base, False)
    if not _is_baseline(files):
        raise ValueError(
            f"{where!r} holds a {architectures[0]} that is not patched: call hf_poslsh.patch_model before "
            "save_pretrained, or publish it as it is by its own model.push_to_hub."
        )
    return _Checkpoint(files, auto_class, architectures[0], None, base, False)


def _read_adapter(
    files: dict[str, Path | bytes], config: dict[str, Any], where: str, base_model: str | None, token: str | None
) -> _Checkpoint:
    name = config.get("base_model_name_or_path")
    if not name:
        raise ValueError(
            f"the adapter {where!r} names no base model, so that nobody can load it: publish the base model, and "
            "write its name on the Hub into adapter_config.json as base_model_name_or_path."
        )
    marked = split_marked_name(name)
    original, method = (name, None) if marked is None else marked
    if marked is None and not _is_baseline(files):
        method = method_of_checkpoint(name, token=token)
        if method is None:
            raise ValueError(
                f"the adapter {where!r} names the base model {name!r}, which is not patched; publish it by "
                "PeftModel.push_to_hub."
            )
    if not _on_hub(base_model or original):
        raise ValueError(
            f"the adapter {where!r} names the base model {original!r}, which nobody else can load; pass the name "
            "that this model has on the Hub as base_model='user/name'."
        )
    if base_model is not None and base_model != original:
        original = base_model
        renamed = base_model if marked is None else marked_name(base_model, marked[1])
        content = json.dumps({**config, "base_model_name_or_path": renamed}, indent=2, sort_keys=True)
        files = {**files, "adapter_config.json": content.encode()}
    task = AUTO_CLASSES.get(str(config.get("task_type")))
    auto_class = "AutoModel" if task is None else task.__name__
    return _Checkpoint(files, auto_class, "", method, original, True)


def _need(files: Mapping[str, Any], where: str, *names: str) -> None:
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{where!r} is no complete checkpoint: it lacks {', '.join(missing)}. Save the model again.")


def _recipe(files: Mapping[str, Path | bytes]) -> dict[str, Any]:
    """What ``recipe.json`` of the recipes says; empty without it."""
    file = files.get("recipe.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if isinstance(file, Path) else {}
    return content


def _is_baseline(files: Mapping[str, Path | bytes]) -> bool:
    return _recipe(files).get("poslsh", "unknown") is None


def base_options(recipe: Mapping[str, Any]) -> str:
    """How a recipe changed the base model of an adapter: ``", key=value"``, to be given again when it is loaded.

    Args:
        recipe: ``arm``, ``poslsh`` and ``settings``, as in the ``recipe.json`` that the recipes write.
    """
    settings = recipe.get("settings", {})
    model = settings.get("model", {})
    arm: dict[str, Any] = next((arm for arm in settings.get("arms", []) if arm["name"] == recipe["arm"]), {})
    revision = {"revision": model["revision"]} if model.get("revision") and recipe["poslsh"] is not None else {}
    options = {**revision, **model.get("config", {}), **arm.get("config", {})}
    return "".join(f", {key}={value!r}" for key, value in options.items())


def _commit(
    api: HfApi,
    repo_id: str,
    checkpoint: _Checkpoint,
    metadata: dict[str, Any],
    private: bool | None,
    message: str | None,
) -> CommitInfo:
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    head = api.model_info(repo_id)
    present = [file.rfilename for file in head.siblings or ()]
    card = None
    if "README.md" in present:
        path = api.hf_hub_download(repo_id, "README.md", revision=head.sha)
        card = Path(path).read_bytes().decode("utf-8-sig")
    elif isinstance(readme := checkpoint.files.get("README.md"), Path):
        card = readme.read_bytes().decode("utf-8-sig")
    text = _card(api, repo_id, checkpoint, metadata, card)
    files = {**checkpoint.files, "README.md": text.encode()}
    stale = [
        name for name in present if name not in files and any(fnmatch(name, pattern) for pattern in _OF_CHECKPOINTS)
    ]
    return api.create_commit(
        repo_id,
        [
            *(CommitOperationDelete(name, is_folder=False) for name in stale),
            *(CommitOperationAdd(name, file) for name, file in files.items()),
        ],
        commit_message=message or f"Upload {'adapter' if checkpoint.adapter else 'model'} with hf-poslsh",
        parent_commit=head.sha,  # what was read and merged above is what is replaced
    )


def _card(api: HfApi, repo_id: str, checkpoint: _Checkpoint, metadata: dict[str, Any], existing: str | None) -> str:
    from hf_poslsh import __version__

    evaluation, results, recipe = (checkpoint.json(f"{kind}.json") for kind in ("evaluation", "results", "recipe"))
    base = None if checkpoint.base == repo_id else checkpoint.base
    name = repo_id.rpartition("/")[2]
    url = f"{api.endpoint}/{repo_id}"
    tags = [*(["poslsh", "long-context"] if checkpoint.method else []), *metadata.pop("tags", [])]
    data = ModelCardData(
        **{
            "base_model": base,
            "library_name": "peft" if checkpoint.adapter else "transformers",
            "pipeline_tag": _PIPELINES[checkpoint.auto_class],
            "tags": tags or None,
            "model_name": name if evaluation else None,
            "eval_results": eval_results(evaluation, source_url=url) if evaluation else None,
            **metadata,
        }
    )
    arms: dict[str, Any] = {}
    if evaluation:
        own = recipe["arm"] if recipe else name
        arms = {own: evaluation["lengths"]}
        arms |= {arm: content["lengths"] for arm, content in (results or {}).get("arms", {}).items() if arm != own}
    card = checkpoint_card(
        data,
        title=name,
        repo_id=repo_id,
        method=checkpoint.method and checkpoint.method.to_dict(),
        adapter=checkpoint.adapter,
        host=checkpoint.host,
        auto_class=checkpoint.auto_class,
        base=base,
        version=__version__,
        options=base_options(recipe or {}),
        tokenizer="tokenizer_config.json" in checkpoint.files,
        arms=arms,
        lengths=list(evaluation["lengths"]) if evaluation else [],
        protocol=evaluation and evaluation["protocol"],
        protocols=PROTOCOLS,
        recipe=recipe,
        pictures=[name for name in checkpoint.files if name.endswith(".png")],
        tables=[name for name in checkpoint.files if name in _FIGURES or name.endswith(".csv")],
    )
    if existing is not None:
        card = merge_card(existing, card)
    if base and not card.data.get("license"):
        for key, value in _license_of(api, base).items():
            card.data[key] = value
    return str(card)


def _license_of(api: HfApi, base: str) -> dict[str, Any]:
    try:
        data = api.model_info(base).card_data
    except RepositoryNotFoundError:
        return {}
    return {key: data.get(key) for key in ("license", "license_name", "license_link")} if data else {}
