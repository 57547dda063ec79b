"""The models of an experiment: one architecture with random weights, patched as each arm says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from experiment.settings import ArmSettings, Settings
from hf_poslsh import PosLSHConfig, patch_model


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


def model_config(settings: Settings, end_of_text: int) -> PreTrainedConfig:
    """The architecture, before any patch.

    Raises:
        ValueError: the model type or a field of its configuration is unknown, or the model is too short.
    """
    kind, fields = settings.model.type, settings.model.config
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"model.type is {kind!r}, which this transformers does not know; e.g. qwen3 or mistral.")
    known = set(CONFIG_MAPPING[kind]().to_dict())
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"unknown keys in model.config: {', '.join(unknown)}; {kind} knows {', '.join(sorted(known))}."
        )
    try:
        config = CONFIG_MAPPING[kind](
            **{**fields, "vocab_size": settings.data.vocab_size, "bos_token_id": None, "eos_token_id": end_of_text}
        )
    except Exception as error:
        raise ValueError(f"model.config does not make a {kind} configuration: {error}") from error
    longest = max(settings.training.length, *settings.evaluation.lengths)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"length {longest} exceeds model.config.max_position_embeddings, "
            f"{config.max_position_embeddings}; raise that."
        )
    return config


def build_model(config: PreTrainedConfig, arm: ArmSettings, seed: int) -> Any:
    """A model with weights drawn from the seed alone: equal for all arms.

    Raises:
        ValueError: the arm does not fit the model; the message names the arm.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()), dtype=torch.float32)
    poslsh = poslsh_config(arm)
    if poslsh is None:
        return model
    try:
        return patch_model(model, poslsh)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error


def check_arms(config: PreTrainedConfig, settings: Settings) -> int:
    """Builds every arm without memory for its weights.

    Returns:
        The number of parameters.

    Raises:
        ValueError: an arm, or the model itself, can't be built.
    """
    for arm in settings.arms:
        poslsh_config(arm)
    for arm in settings.arms:
        try:
            with torch.device("meta"):
                model = build_model(config, arm, settings.seed)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"arm {arm.name!r}: the model can't be built: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())
