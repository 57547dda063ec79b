"""PEFT adapters of patched models: how their files name the method, and a loader that insists on it."""

from __future__ import annotations

import json
import os
from typing import Any

import transformers
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoConfig

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.configuration import PosLSHConfigMixin
from hf_poslsh.models.modeling import PosLSHModelMixin, method_of
from hf_poslsh.patching import patch_model, split_marked_name

AUTO_CLASSES = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "QUESTION_ANS": transformers.AutoModelForQuestionAnswering,
}


def load_adapter(
    adapter: str | os.PathLike[str], model: nn.Module | None = None, *, is_trainable: bool = False, **kwargs: Any
) -> PeftModel:
    """Loads an adapter that was trained on a patched model, on the model that it needs and on no other.

    Args:
        adapter: folder or Hub name of the adapter.
        model: the patched base model; if None it is loaded, and patched where the adapter's files say so.
        is_trainable: as for ``PeftModel.from_pretrained``.
        **kwargs: for the ``from_pretrained`` that loads the base model.

    Returns:
        The PEFT model.

    Raises:
        ValueError: the adapter does not belong to a patched model, ``model`` is not patched, or its method is
            another than the adapter's.
    """
    config = PeftConfig.from_pretrained(os.fspath(adapter))
    base = str(config.base_model_name_or_path)
    marked = split_marked_name(base)
    method = marked[1] if marked is not None else method_of_checkpoint(base)
    if method is None:
        raise ValueError(
            f"the adapter {os.fspath(adapter)!r} names the base model {base!r}, which is not patched; "
            "load it by peft.PeftModel.from_pretrained."
        )
    if model is None:
        auto_class = AUTO_CLASSES.get(
            str(getattr(config.task_type, "value", config.task_type)), transformers.AutoModel
        )
        if marked is None:
            model = auto_class.from_pretrained(base, **kwargs)
        else:
            model = patch_model(auto_class.from_pretrained(marked[0], **kwargs), method)
    _check_method(model, method)
    return PeftModel.from_pretrained(model, os.fspath(adapter), is_trainable=is_trainable)  # type: ignore[arg-type]


def method_of_checkpoint(name: str | os.PathLike[str], **kwargs: Any) -> PosLSHConfig | None:
    """The method of a checkpoint, a folder or a Hub name; None where the model is not patched."""
    text = AutoConfig.from_pretrained(name, **kwargs).get_text_config()
    return method_of(text) if isinstance(text, PosLSHConfigMixin) else None


def _check_method(model: Any, method: PosLSHConfig) -> None:
    needed = f"patch_model(model, PosLSHConfig.from_dict({json.dumps(method.to_dict())}))"
    if not isinstance(model, PosLSHModelMixin):
        raise ValueError(
            f"the adapter was trained on a patched model, this {type(model).__name__} is not; first call {needed}."
        )
    ours, theirs = method_of(model.config).to_dict(), method.to_dict()
    different = [name for name in theirs if name != "impl" and ours[name] != theirs[name]]
    if different:
        wanted, got = ({name: fields[name] for name in different} for fields in (theirs, ours))
        raise ValueError(f"the adapter was trained with {wanted}, but this model has {got}. Use {needed}.")
