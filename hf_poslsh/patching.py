"""patch_model, unpatch_model and the context manager: how a model in memory becomes ours and is given back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers import TrainerCallback

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.attention import ATTENTION_NAME
from hf_poslsh.models.families import (
    HOSTS,
    check_method,
    family_of,
    is_part,
    set_class,
    supported_models,
    swap_classes,
)
from hf_poslsh.models.modeling import (
    MODEL_TAGS,
    PosLSHBaseModelMixin,
    PosLSHCompositeMixin,
    PosLSHModelMixin,
    check_whole,
    method_of,
)
from hf_poslsh.models.rope import auto_max_distance

Model = TypeVar("Model", bound=nn.Module)
_UNDO = "_poslsh_undo"


@dataclasses.dataclass
class _Undo:
    """What a patch replaced besides classes."""

    config: Any
    patched_fields: list[dict[str, Any]]
    name_or_path: str
    model_tags: list[str] | None
    adapter_bases: dict[str, str | None]


def patch_model(model: Model, config: PosLSHConfig | None = None, **fields: Any) -> Model:
    """Replaces a model's attention by Positional LSH attention, in place.

    Modules stay the same objects with the same names, parameters, buffers and hooks; only their classes change.
    The model gets a config of its own that describes the method, so that ``save_pretrained`` writes a checkpoint
    which loads as the patched model or not at all.

    Args:
        model: a Mistral, Qwen3 or Llama-4 text model of transformers, base model or with a head, or a PEFT model
            around one. Patch before wrapping (compile, DDP, FSDP, ``Accelerator.prepare``).
        config: the method; ``PosLSHConfig(**fields)`` if None.
        **fields: fields of ``PosLSHConfig``, instead of ``config``.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is patched already, is of an unknown class, is wrapped or is part of another model, has
            an unknown attention class, or the method does not fit it. The model is unchanged then.

    Example:
        >>> model = patch_model(AutoModelForCausalLM.from_pretrained(name), PosLSHConfig.pretrained())
    """
    if config is not None and fields:
        raise ValueError(f"give a config or fields, not both; got a config and {sorted(fields)}.")
    method = PosLSHConfig(**fields) if config is None else config
    if not isinstance(method, PosLSHConfig):
        raise ValueError(f"config is a {type(method).__name__}; it must be a PosLSHConfig.")
    target = _unwrap(model)
    if isinstance(target, (PosLSHModelMixin, PosLSHCompositeMixin)):
        raise ValueError(f"this {type(target).__name__} is patched already; call unpatch_model(model) first.")
    family = family_of(target)
    if family is None:
        raise ValueError(
            f"cannot patch a {type(target).__name__}; supported are exactly {supported_models()}. Patch before "
            "torch.compile, DistributedDataParallel, FSDP or other wrappers; hf_poslsh.register_family adds a model "
            "type."
        )
    if any(module.__dict__.get("_compiled_call_impl") for module in target.modules()):
        raise ValueError(f"this {type(target).__name__} is compiled (model.compile()); patch it first, then compile.")

    if is_part(target):
        check_whole(target)
    host, name = target.config, target.name_or_path
    ours = patched_config(host, method)
    swap_classes(target, ours.get_text_config())
    for old, new in zip(_parts(host), _parts(ours), strict=True):
        _replace_config(model, old, new)

    adapters = getattr(model, "peft_config", {}) if model is not target else {}
    undo = _Undo(
        host,
        [],
        name,
        copy.copy(target.__dict__.get("model_tags")),
        {name: adapter.base_model_name_or_path for name, adapter in adapters.items()},
    )
    setattr(target, _UNDO, undo)
    # An adapter that is saved now must not name the original as its base: it would load on the unpatched model.
    marked = target.name_or_path = marked_name(undo.name_or_path, method_of(ours.get_text_config()))
    undo.patched_fields = [copy.deepcopy(vars(part)) for part in _parts(ours)]
    for adapter in adapters.values():
        adapter.base_model_name_or_path = marked
    target.add_model_tags(MODEL_TAGS)
    return model


def unpatch_model(model: Model) -> Model:
    """Gives the host model back: classes, config and name as they were before ``patch_model``.

    What was changed in the patched model's config meanwhile, such as the vocabulary size, is kept.

    Args:
        model: a patched model, or a PEFT model around one. A model that was loaded from a patched checkpoint
            becomes the host's model with the host's default attention.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is not patched.
    """
    target = _unwrap(model)
    if not isinstance(target, (PosLSHModelMixin, PosLSHCompositeMixin)) or type(target) not in HOSTS:
        raise ValueError(f"this {type(target).__name__} is not patched (or wrapped: unwrap it first).")
    ours, undo = target.config, target.__dict__.pop(_UNDO, None)
    wrapper: Any = model
    for module in target.modules():
        if type(module) in HOSTS:
            set_class(module, HOSTS[type(module)])
            module.__dict__.pop("_poslsh_step", None)
            module.__dict__.pop("_poslsh_warned", None)
            if tags := module.__dict__.get("model_tags"):
                module.__dict__["model_tags"] = [tag for tag in tags if tag not in MODEL_TAGS] or None
    host = host_config(ours) if undo is None else _with_changes(undo, ours)
    for old, new in zip(_parts(ours), _parts(host), strict=True):
        _replace_config(model, old, new)
    if undo is None:
        return model
    target.name_or_path = undo.name_or_path
    target.model_tags = undo.model_tags
    if undo.model_tags is None:
        del target.model_tags  # the class has None
    for name, base in undo.adapter_bases.items():
        wrapper.peft_config[name].base_model_name_or_path = base
    return model


def patched_config(host: Any, method: PosLSHConfig) -> Any:
    """The config that a model of config ``host`` has when it is patched, without a model.

    Args:
        host: config of a supported model; it is left as it is.
        method: the method.

    Raises:
        ValueError: the config is not exactly of a supported class, or the method does not fit it.
    """
    family = family_of(host)
    if family is None or type(host) in HOSTS:
        patched = "patched already" if type(host) in HOSTS else f"supported are exactly {supported_models()}"
        raise ValueError(f"cannot patch a {type(host).__name__}: {patched}.")
    ours = copy.deepcopy(host)
    for part in _parts(ours):
        part.__class__ = family.classes[type(part)]
    text = ours.get_text_config()
    if method.max_distance == "auto":
        method = method.replace(max_distance=auto_max_distance(text))
    text.poslsh = method.to_dict()
    text._attn_implementation = ATTENTION_NAME
    check_method(text)
    return ours


@contextlib.contextmanager
def poslsh(model: Model, config: PosLSHConfig | None = None, **fields: Any) -> Iterator[Model]:
    """Patches ``model`` inside a ``with`` block and restores it at the end, also after an error.

    Args:
        model: as for ``patch_model``.
        config: as for ``patch_model``.
        **fields: as for ``patch_model``.

    Yields:
        ``model``, patched.
    """
    patch_model(model, config, **fields)
    try:
        yield model
    finally:
        unpatch_model(model)


def set_step(model: nn.Module, step: int) -> None:
    """Tells a model with ``resample="step"`` the number of the coming training step, which keys its draws.

    Args:
        model: a patched model, wrapped or not.
        step: the same number for all forwards of one optimizer step, on all ranks; at least 0.

    Raises:
        ValueError: ``step`` is no such number, or nothing in ``model`` is patched.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; it must be an integer of at least 0.")
    bases = [module for module in model.modules() if isinstance(module, PosLSHBaseModelMixin)]
    if not bases:
        raise ValueError(f"nothing in this {type(model).__name__} is patched; call patch_model first.")
    for base in bases:
        base._poslsh_step = step


class StepCallback(TrainerCallback):
    """Calls ``set_step`` before every step of a ``Trainer``, for ``resample="step"``."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Hands on the Trainer's ``global_step``."""
        set_step(model, state.global_step)


_REMEDY = " (patched; load by hf_poslsh.load_adapter) "


def marked_name(name: str, method: PosLSHConfig) -> str:
    """The name of a model that was patched in memory: its original's and the method."""
    # No file or repository has such a name: whoever loads it reads it in the error.
    return f"{ATTENTION_NAME}:{name}{_REMEDY}{json.dumps(method.to_dict())}"


def split_marked_name(name: str) -> tuple[str, PosLSHConfig] | None:
    """The original's name and the method from the name of a model that was patched in memory; None for others."""
    if not name.startswith(f"{ATTENTION_NAME}:"):
        return None
    original, _, method = name.removeprefix(f"{ATTENTION_NAME}:").partition(_REMEDY)
    return original, PosLSHConfig.from_dict(json.loads(method))


def _unwrap(model: nn.Module) -> Any:
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def _replace_config(model: nn.Module, old: Any, new: Any) -> None:
    # The old object may belong to other models too: it is replaced here, never changed.
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def _parts(config: Any) -> list[Any]:
    """A config and, where it has one apart, its text config."""
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _with_changes(undo: _Undo, ours: Any) -> Any:
    missing, changes = object(), []
    for part, fields in zip(_parts(ours), undo.patched_fields, strict=True):
        changed = {name: value for name, value in vars(part).items() if fields.get(name, missing) != value}
        changed.pop("text_config", None)  # compared on its own
        changes.append(changed)
    if not any(changes):
        return undo.config
    config = copy.deepcopy(undo.config)
    for part, changed in zip(_parts(config), changes, strict=True):
        vars(part).update(changed)
    return config


def host_config(ours: Any) -> Any:
    """The host's config from that of a patched model: what ``patched_config`` was given."""
    host = copy.deepcopy(ours)
    for part in _parts(host):
        part.__class__ = HOSTS[type(part)]
    text = host.get_text_config()
    del text.poslsh
    text._attn_implementation = "sdpa"
    return host
