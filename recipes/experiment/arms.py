"""The models of an experiment: the same weights in every arm, patched as the arm says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config
from transformers.utils import find_adapter_config_file

from experiment.files import read_json
from experiment.settings import ArmSettings, ModelSettings, Settings, build
from hf_poslsh import PosLSHConfig, load_adapter, patch_model
from hf_poslsh.patching import split_marked_name


def poslsh_config(arm: ArmSettings) -> PosLSHConfig | None:
    """The arm's attention; None for the original.

    Raises:
        ValueError: a field is unknown or has a value that is not supported; the message names the arm.
    """
    if arm.poslsh is None:
        return None
    try:
        return PosLSHConfig.from_dict(arm.poslsh)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error


def model_config(model: ModelSettings, vocab_size: int, end_of_text: int | None) -> PreTrainedConfig:
    """The architecture, before any patch.

    Args:
        model: type or checkpoint, and fields of the configuration.
        vocab_size: of the tokenizer. Like ``end_of_text``, its end token, for random weights alone.
        end_of_text: see there.

    Raises:
        ValueError: the model type, the checkpoint or a field of its configuration is unknown.
    """
    if model.pretrained is not None:
        try:
            config = AutoConfig.from_pretrained(model.pretrained, revision=model.revision).get_text_config()
        except (OSError, ValueError) as error:
            raise ValueError(f"model.pretrained is {model.pretrained!r}, which can't be loaded: {error}") from error
        return with_fields(config, model.config, "model.config")
    if model.type not in CONFIG_MAPPING:
        raise ValueError(
            f"model.type is {model.type!r}, which this transformers does not know; e.g. qwen3 or mistral."
        )
    own = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": end_of_text}
    return _configuration(CONFIG_MAPPING[model.type], {}, {**model.config, **own}, "model.config")


def with_fields(config: PreTrainedConfig, fields: dict[str, Any], where: str) -> PreTrainedConfig:
    """A copy of a configuration with some fields replaced.

    Raises:
        ValueError: a field is unknown or has a wrong value; the message begins with ``where``.
    """
    return _configuration(type(config), config.to_dict(), fields, where)


def _configuration(kind: Any, base: dict[str, Any], fields: dict[str, Any], where: str) -> PreTrainedConfig:
    known = set(kind().to_dict())
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"unknown keys in {where}: {', '.join(unknown)}; {kind.model_type} knows {', '.join(sorted(known))}."
        )
    try:
        return kind.from_dict({**base, **fields})
    except Exception as error:
        raise ValueError(f"{where} does not make a {kind.model_type} configuration: {error}") from error


def build_model(config: PreTrainedConfig, settings: Settings, arm: ArmSettings, device_map: str | None = None) -> Any:
    """The arm's model as its training begins: weights from the checkpoint or drawn from the seed alone.

    Args:
        config: what ``model_config`` returned.
        settings: the experiment.
        arm: of it.
        device_map: of ``from_pretrained``, for a checkpoint's weights.

    Raises:
        ValueError: the arm does not fit the model; the message names the arm.
    """
    model = settings.model
    config = with_fields(config, arm.config, f"arm {arm.name!r}: config")
    dtype = getattr(torch, model.dtype)
    if model.pretrained is None:
        torch.manual_seed(settings.seed)
        return _patched(AutoModelForCausalLM.from_config(config, dtype=dtype), arm)
    weights = AutoModelForCausalLM.from_pretrained(
        model.pretrained, revision=model.revision, config=config, dtype=dtype, device_map=device_map
    )
    return _patched(weights, arm)


def _patched(model: Any, arm: ArmSettings) -> Any:
    poslsh = poslsh_config(arm)
    if poslsh is None:
        return model
    try:
        return patch_model(model, poslsh)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error


def adapt(model: Any, settings: Settings) -> Any:
    """The model with a fresh adapter, equal for all arms, or as it is where all weights are trained.

    Raises:
        ValueError: ``peft`` has an unknown field or does not fit the model.
    """
    if settings.peft is None:
        return model
    torch.manual_seed(settings.seed)
    try:
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **settings.peft}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"peft: {error}") from error


@contextmanager
def whole_models(accelerator: Accelerator) -> Iterator[None]:
    """Within it, models are made whole on every process, also where DeepSpeed ZeRO-3 shares out what is made."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None or not is_deepspeed_zero3_enabled():
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def check_arms(config: PreTrainedConfig, settings: Settings) -> tuple[int, int]:
    """Builds every arm without memory for its weights.

    Returns:
        The number of parameters, and of those that are trained.

    Raises:
        ValueError: an arm, or the model itself, can't be built or is too short for a length.
    """
    evaluation = settings.evaluation
    longest = max(
        settings.training.length,
        *evaluation.lengths,
        *evaluation.passkey_lengths,
        evaluation.position_length or 0,
    )
    for arm in settings.arms:
        poslsh_config(arm)
    for arm in settings.arms:
        own = with_fields(config, arm.config, f"arm {arm.name!r}: config")
        if longest > own.max_position_embeddings:
            raise ValueError(
                f"length {longest} exceeds model.config.max_position_embeddings, "
                f"{own.max_position_embeddings}; raise that."
            )
        try:
            with torch.device("meta"):
                model = adapt(_patched(AutoModelForCausalLM.from_config(own), arm), settings)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"arm {arm.name!r}: the model can't be built: {error}") from error
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def load_checkpoint(checkpoint: str | Path, dtype: str = "auto", device_map: str | None = None) -> Any:
    """The model of a folder that ``recipes/train.py`` wrote, or any checkpoint or adapter.

    The folder of an adapter, or of an arm that was not trained, holds no base weights: its ``recipe.json`` says how
    the model is made.

    Args:
        checkpoint: a folder, or a name on the Hub.
        dtype: of the weights, by name; ``"auto"``: as they were saved.
        device_map: of ``from_pretrained``.

    Raises:
        ValueError: ``recipe.json`` can't be read, or the base model is not there.
    """
    folder = Path(checkpoint)
    adapted = (folder / "adapter_config.json").exists()
    if not (folder / "recipe.json").exists() or (folder / "config.json").exists():
        if find_adapter_config_file(str(checkpoint)) is None:
            return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map=device_map)
        base = PeftConfig.from_pretrained(str(checkpoint)).base_model_name_or_path
        load = AutoPeftModelForCausalLM.from_pretrained if split_marked_name(str(base)) is None else load_adapter
        return load(str(checkpoint), dtype=dtype, device_map=device_map)
    recipe = read_json(folder / "recipe.json")
    settings = build(Settings, recipe["settings"], "settings.")
    if dtype != "auto":
        settings.model.dtype = dtype
    (arm,) = [arm for arm in settings.arms if arm.name == recipe["arm"]]
    model = build_model(model_config(settings.model, 0, None), settings, arm, device_map)
    return PeftModel.from_pretrained(model, str(folder)) if adapted else model
