"""The table of model families: host classes, our subclasses of them, and their registration with transformers.

A family is a row of ``_TABLE``, or what ``register_family`` is given; everything else follows from it. Classes are
made by ``_subclass``, because they differ in nothing but their host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import transformers
from peft.utils import constants as peft_constants
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto import image_processing_auto, modeling_auto, processing_auto, tokenization_auto
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.models.attention import PosLSHAttentionMixin
from hf_poslsh.models.compat import register_output_recorders, sub_configs_of
from hf_poslsh.models.configuration import PosLSHCompositeConfigMixin, PosLSHConfigMixin
from hf_poslsh.models.modeling import PosLSHBaseModelMixin, PosLSHCompositeMixin, PosLSHModelMixin, method_of
from hf_poslsh.models.rope import ROTARY_KINDS, check_max_distance
from hf_poslsh.ops.bias import bias_from_config

# model type, config, attention, base model, heads by the Auto class that loads them, pairs of rotated dimensions
_TABLE: tuple[tuple[str, type, type, type, dict[str, type], str], ...] = (
    (
        "mistral",
        transformers.MistralConfig,
        MistralAttention,
        transformers.MistralModel,
        {
            "AutoModelForCausalLM": transformers.MistralForCausalLM,
            "AutoModelForSequenceClassification": transformers.MistralForSequenceClassification,
            "AutoModelForTokenClassification": transformers.MistralForTokenClassification,
            "AutoModelForQuestionAnswering": transformers.MistralForQuestionAnswering,
        },
        "half",
    ),
    (
        "qwen3",
        transformers.Qwen3Config,
        Qwen3Attention,
        transformers.Qwen3Model,
        {
            "AutoModelForCausalLM": transformers.Qwen3ForCausalLM,
            "AutoModelForSequenceClassification": transformers.Qwen3ForSequenceClassification,
            "AutoModelForTokenClassification": transformers.Qwen3ForTokenClassification,
            "AutoModelForQuestionAnswering": transformers.Qwen3ForQuestionAnswering,
        },
        "half",
    ),
    (
        "llama4_text",
        transformers.Llama4TextConfig,
        Llama4TextAttention,
        transformers.Llama4TextModel,
        {"AutoModelForCausalLM": transformers.Llama4ForCausalLM},
        "interleaved",
    ),
)

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table: host class to our class, for every class of a model type.

    Args:
        model_type: the host's ``model_type``.
        config: our config class.
        attention: our attention class.
        base: our base model class.
        classes: host class to our class: config, attention, base model and heads.
        rotary: how pairs of dimensions are rotated, ``"half"`` or ``"interleaved"``; None: not known.
    """

    model_type: str
    config: type
    attention: type
    base: type
    classes: dict[type, type]
    rotary: str | None = None


def _subclass(host: type, *mixins: type, **attributes: Any) -> type:
    name = f"PosLSH{host.__name__}"
    made = type(
        name, (*mixins, host), {"__module__": __name__, "__doc__": f"{host.__name__}, patched.", **attributes}
    )
    globals()[name] = made  # pickle looks classes up by module and name
    __all__.append(name)
    return made


def register_family(
    model_type: str, config: type, attention: type, base: type, heads: Mapping[str, type], rotary: str | None = None
) -> Family:
    """Makes a model type patchable, saved checkpoints of it loadable, for this process.

    It must be called before ``patch_model`` and before a patched checkpoint of the type is loaded.

    Args:
        model_type: the host's ``model_type``.
        config: the host's config class.
        attention: its attention module: ``forward(hidden_states, position_embeddings, attention_mask, ...)`` ends in
            one of transformers' attention functions with scores of its own ``scaling`` and nothing else in them
            (no soft cap, no bias, no sinks), and hands its keyword arguments on.
        base: its base model, whose ``layers[i].self_attn`` are of class ``attention``.
        heads: model classes by the name of the Auto class that loads them.
        rotary: which dimensions its rotary embedding turns together: ``"half"``, (m, m + pairs), which most models
            do, or ``"interleaved"``, (2 m, 2 m + 1). Without it the family has no ``max_distance``. Only for families
            whose attention modules all rotate, or say by an attribute ``use_rope`` that they don't.

    Returns:
        The family.

    Raises:
        ValueError: ``model_type`` is registered already, ``rotary`` is unknown, or checkpoints of the type are
            converted while they are loaded, as those of mixtures of experts are: transformers does that for its own
            classes only.
    """
    if any(family.model_type == model_type for family in FAMILIES):
        raise ValueError(f"the model type {model_type!r} is registered already.")
    if rotary not in (None, *ROTARY_KINDS):
        raise ValueError(f"rotary is {rotary!r}; choose {' or '.join(ROTARY_KINDS)}, or None if it is not known.")
    if any(get_checkpoint_conversion_mapping(name) for name in (model_type, *(h.__name__ for h in heads.values()))):
        raise ValueError(
            f"checkpoints of {model_type!r} are converted while they are loaded (a mixture of experts?), which "
            "transformers does for its own classes only: the family can't be registered."
        )
    our_config = _subclass(config, PosLSHConfigMixin, model_type=f"poslsh_{model_type}")
    our_attention = _subclass(attention, PosLSHAttentionMixin)
    our_base = _subclass(base, PosLSHBaseModelMixin, config_class=our_config, _poslsh_rotary=rotary)
    models = {"AutoModel": our_base}
    for auto_class, host in heads.items():
        models[auto_class] = _subclass(host, PosLSHModelMixin, config_class=our_config)
    _register(model_type, our_config, models)
    classes = {host: models[auto_class] for auto_class, host in heads.items()}
    classes |= {config: our_config, attention: our_attention, base: our_base}
    family = Family(model_type, our_config, our_attention, our_base, classes, rotary)
    FAMILIES.append(family)
    HOSTS.update({ours: host for host, ours in classes.items()})
    return family


def _register(model_type: str, config: type, models: dict[str, type]) -> None:
    ours = config.model_type  # type: ignore[attr-defined]
    transformers.AutoConfig.register(ours, config, exist_ok=True)
    for auto_class, model in models.items():
        getattr(transformers, auto_class).register(config, model, exist_ok=True)
        register_output_recorders(model)
    if "AutoModelForCausalLM" in models:
        # The Trainer shifts smoothed labels only for the classes that it finds in this table.
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ours] = models["AutoModelForCausalLM"].__name__
    tables: tuple[dict[str, Any], ...] = (
        tokenization_auto.TOKENIZER_MAPPING_NAMES,
        processing_auto.PROCESSOR_MAPPING_NAMES,
        image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        peft_constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    )
    for names in tables:
        if model_type in names:
            names[ours] = names[model_type]


def _add_multimodal(
    text: Family, model_type: str, host_config: type, host_model: type, text_auto_classes: dict[str, type]
) -> None:
    """Adds the class that holds a family's text model beside a vision tower, which is left alone."""
    sub_configs = sub_configs_of(host_config, text_config=text.config)
    config = _subclass(
        host_config,
        PosLSHCompositeConfigMixin,
        model_type=f"poslsh_{model_type}",
        text_class=text.config,
        **sub_configs,
    )
    model = _subclass(host_model, PosLSHCompositeMixin, config_class=config)
    _register(model_type, config, {"AutoModel": model, "AutoModelForImageTextToText": model})
    for auto_class, text_model in text_auto_classes.items():
        # As in the host, a text class loads the text part of the whole checkpoint.
        getattr(transformers, auto_class)._model_mapping.register(config, text_model, exist_ok=True)
    ours = {host_config: config, host_model: model}
    text.classes.update(ours)
    HOSTS.update({patched: host for host, patched in ours.items()})


FAMILIES: list[Family] = []
HOSTS: dict[type, type] = {}
"""Our class to its host class: configs, attention, base models and heads."""

for _row in _TABLE:
    register_family(*_row)
_llama4 = FAMILIES[-1]
_add_multimodal(
    _llama4,
    "llama4",
    transformers.Llama4Config,
    transformers.Llama4ForConditionalGeneration,
    {"AutoModelForCausalLM": _llama4.classes[transformers.Llama4ForCausalLM]},
)


def family_of(model: nn.Module | PreTrainedConfig) -> Family | None:
    """The family of a model or config that is exactly of a known class, the host's or ours."""
    kind = HOSTS.get(type(model), type(model))
    return next((family for family in FAMILIES if kind in family.classes), None)


def is_part(model: nn.Module) -> bool:
    """Whether there are models of transformers that hold one of this known class."""
    family = family_of(model)
    assert family is not None
    composite = any(issubclass(ours, PosLSHCompositeMixin) for ours in family.classes.values())
    return composite or type(model) in (family.base, HOSTS[family.base])


def supported_models() -> str:
    """The host model classes that can be patched, for messages."""
    return ", ".join(
        host.__name__
        for family in FAMILIES
        for host, ours in family.classes.items()
        if issubclass(ours, (PosLSHModelMixin, PosLSHCompositeMixin))
    )


def check_method(config: Any) -> None:
    """Checks that a config has a method and that the method fits the model.

    Raises:
        ValueError: there is none, or it names layers or heads that the model does not have.
    """
    if getattr(config, "poslsh", None) is None:
        raise ValueError(
            f"{type(config).__name__} has no method (its field 'poslsh' is None). To patch a stock model call "
            "hf_poslsh.patch_model(model)."
        )
    method = method_of(config)
    if method.layers is not None and method.layers[-1] >= config.num_hidden_layers:
        raise ValueError(
            f"layers is {list(method.layers)} but the model has layers 0 to {config.num_hidden_layers - 1}."
        )
    bias_from_config(method, config.num_attention_heads)
    check_full_heads(method, config)
    family = family_of(config)
    check_max_distance(method, config, None if family is None else family.rotary)
    _check_architectures(config)


def check_full_heads(method: PosLSHConfig, config: Any) -> None:
    """Checks that a model has the KV heads that a method leaves full. Raises ValueError if not."""
    if method.full_heads is None:
        return
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    if len(method.full_heads) != layers:
        raise ValueError(
            f"full_heads has lists for {len(method.full_heads)} layers but the model has {layers}; give one for "
            "each, empty where no head is full."
        )
    for layer, full in enumerate(method.full_heads):
        if full and full[-1] >= heads:
            raise ValueError(
                f"full_heads names KV head {full[-1]} in layer {layer}, but a layer has KV heads 0 to {heads - 1} "
                f"(each serves {config.num_attention_heads // heads} query heads); name KV heads, not query heads."
            )
        if full and method.layers is not None and layer not in method.layers:
            raise ValueError(
                f"full_heads names KV heads {list(full)} of layer {layer}, which layers={list(method.layers)} leaves "
                "as it is: all of its heads are full. Give it an empty list, or patch it."
            )


def _check_architectures(config: Any) -> None:
    # Weights of one family load into another's model with nothing but a warning where their shapes agree.
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the config has architectures={names!r}; it must be a list of class names.")
    for name in names:
        owners = [family for family in FAMILIES for pair in family.classes.items() if name in map(_name, pair)]
        if owners and family_of(config) not in owners:
            raise ValueError(
                f"a config.json of model_type {config.model_type!r} has architectures {config.architectures}, which "
                f"belong to {owners[0].model_type!r}: one of the two was edited; put back what was saved."
            )


def _name(kind: type) -> str:
    return kind.__name__


def swap_classes(model: nn.Module, config: Any) -> None:
    """Makes the models and the chosen attention layers inside ``model`` ours, itself included, in place.

    Args:
        model: a model of a known family, ours or the host's.
        config: its patched text config.

    Raises:
        ValueError: an attention layer is of an unknown class, or its ``forward`` was replaced; nothing is changed.
    """
    family = family_of(model)
    assert family is not None
    base = base_of(model)
    method = method_of(config)
    swaps: list[tuple[Any, type]] = [
        (module, family.classes[type(module)])
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and type(module) in family.classes
    ]
    for index, layer in enumerate(base.layers):
        attention = layer.self_attn
        if HOSTS.get(type(attention), type(attention)) not in family.classes:
            known = HOSTS[family.attention].__name__
            raise ValueError(
                f"layer {index} has attention {type(attention).__name__}, supported is exactly {known}; undo what "
                "replaced it, patch, and apply it again."
            )
        if method.layers is None or index in method.layers:
            swaps.append((attention, family.attention))
    for module, ours in swaps:
        if ours in (family.base, family.attention):
            _check_forward(module)
    for module, ours in swaps:
        set_class(module, ours)


def base_of(model: nn.Module) -> Any:
    """The base model of a known model: itself, or the first child that is one."""
    for module in model.modules():
        family = family_of(module)
        if family is not None and HOSTS.get(type(module), type(module)) is HOSTS[family.base]:
            return module
    raise ValueError(f"{type(model).__name__} holds no base model; supported: {supported_models()}.")


def set_class(module: nn.Module, new: type) -> None:
    """Changes a module's class, and what accelerate's hooks keep of its forward, on the module and off it again."""
    for name in ("_old_forward", "forward"):
        if _is_bound(module, name):
            module.__dict__[name] = new.forward.__get__(module)  # type: ignore[attr-defined]
    module.__class__ = new


def _is_bound(module: nn.Module, name: str) -> bool:
    """Whether an attribute of the instance is the forward of its class."""
    return getattr(module.__dict__.get(name), "__func__", None) is type(module).forward


def _check_forward(module: nn.Module) -> None:
    if "forward" in module.__dict__ and not _is_bound(module, "_old_forward") and not _is_bound(module, "forward"):
        raise ValueError(
            f"the forward of this {type(module).__name__} was replaced on the instance, so that a patch would have "
            "no effect; patch the model first, then apply what replaced it."
        )
