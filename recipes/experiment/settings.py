"""The settings of an experiment: dataclasses read from YAML, every key and type checked. Nothing else."""

import dataclasses
import os
import types
from pathlib import Path
from typing import Any, get_args

import yaml
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

RECIPES = Path(__file__).resolve().parent.parent


@strict
@dataclasses.dataclass
class SourceSettings:
    """A dataset, as ``datasets.load_dataset`` reads it.

    Args:
        path: name on the Hub, or ``json``, ``parquet``, ``csv`` or ``text`` for ``files``.
        name: its configuration.
        split: which split.
        revision: of the dataset on the Hub.
        files: local files, in ``data.folder``.
        column: holds the text.
        heading: regular expression. None: every row is a document. Else rows are joined, and a new document begins
            at each row that the expression matches from its start; what is before the first is one, too.
        limit: read so many rows alone, from the beginning.
        streaming: read rows as they are needed, not the whole dataset first; needs a ``limit``.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    files: list[str] = dataclasses.field(default_factory=list)
    column: str = "text"
    heading: str | None = None
    limit: int | None = None
    streaming: bool = False


@strict
@dataclasses.dataclass
class DataSettings:
    """The texts and their tokenizer. No text may be in two of the splits.

    Args:
        train: what to train on: names of text files, each one document, and datasets.
        held_out: names of the files to evaluate on.
        validation: chooses the best checkpoint; as ``train``.
        folder: where the files are; relative paths start at the YAML file. None: ``recipes/data``.
        tokenizer: folder or Hub name. None: that of ``model.pretrained``; without one, a byte-level BPE is trained
            on the training texts.
        vocab_size: entries of the BPE.
    """

    train: list[str | SourceSettings]
    held_out: list[str]
    validation: list[str | SourceSettings] = dataclasses.field(default_factory=list)
    folder: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096


@strict
@dataclasses.dataclass
class ModelSettings:
    """A model, with random weights (``type``) or pretrained ones (``pretrained``).

    Args:
        type: for random weights: the ``model_type`` of transformers, e.g. ``qwen3``, ``mistral``, ``llama4_text``.
        pretrained: folder or Hub name of a checkpoint.
        revision: of the checkpoint on the Hub.
        config: fields of the model's configuration; with random weights the vocabulary is filled in.
        dtype: of the weights, ``float32`` or ``bfloat16``. Adapters are always trained in float32.
    """

    type: str | None = None
    pretrained: str | None = None
    revision: str | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"


@strict
@dataclasses.dataclass
class TrainingSettings:
    """Optimisation, the same for all arms.

    Args:
        steps: optimiser steps.
        length: tokens per sequence.
        batch_size: sequences per step, over all processes.
        learning_rate: peak of AdamW's learning rate.
        micro_batch_size: sequences that a process reads at once; gradients are summed until the step. None: all.
        packing: fill the sequences with whole documents in random order, none of which sees another; what does not
            fit goes on in the next sequence. Without it a sequence is a piece of one document, and documents
            shorter than ``length`` are not used.
        schedule: ``cosine`` or ``linear``, to 0.
        warmup_steps: steps of linear warm-up.
        warmup_ratio: the same as a share of the steps; give one of them.
        weight_decay: AdamW's.
        max_grad_norm: gradients are clipped to this norm.
        gradient_checkpointing: compute activations again in the backward pass, for less memory.
        compile: compile the model.
        save_every: steps between checkpoints that ``--resume`` continues from; None: only where SIGTERM stops a run.
        validate_every: steps between losses on ``data.validation``; the checkpoint with the lowest is kept. None:
            the last is kept.
        validation_sequences: how many sequences of ``length`` tokens, evenly spread, are read for that.
    """

    steps: int
    length: int
    batch_size: int
    learning_rate: float
    micro_batch_size: int | None = None
    packing: bool = False
    schedule: str = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    compile: bool = False
    save_every: int | None = None
    validate_every: int | None = None
    validation_sequences: int = 16


@strict
@dataclasses.dataclass
class EvaluationSettings:
    """How checkpoints are evaluated, see ``hf_poslsh.evaluation``.

    Args:
        lengths: context lengths in tokens.
        protocol: ``same-targets``, ``sliding-window`` or ``non-overlapping``.
        targets: of ``same-targets``: how many tokens of the held-out texts are scored, the same at every length.
        targets_per_window: of ``same-targets``: targets per window, the last of each. More are cheaper.
        stride: of ``sliding-window``: targets per window; at least ``length - stride`` tokens are their context.
        top_k: each k for which top-k accuracy is reported.
        batch_tokens: tokens read at once.
        dtype: of the model: ``auto`` (as it was saved), ``float32``, ``bfloat16`` or ``float16``. Losses are computed
            in float32.
        device_map: None: every process holds the model and reads its share. ``auto``: the main process alone reads,
            with one copy that transformers spreads over all devices of the machine; for a model that one can't hold.
        position_length: also report the loss by position within single passes of so many tokens; None: don't.
        position_passes: such passes per text, evenly spaced.
        position_edges: of the buckets of positions; None: 0, 1/16, 1/8, 1/4, 1/2, 3/4 and all of ``position_length``.
        retrieval_tasks: ``passkey``, ``multi-key``, ``variable-tracking``; asked where ``passkey_lengths`` is given.
        retrieval_text: name of the held-out text around what is to be found; None: a few sentences, repeated.
        passkey_lengths: also ask for passkeys, or whatever the tasks are, in prompts of so many tokens; empty: don't.
        passkey_depths: where the key stands, from 0 (start) to 1 (end).
        passkey_trials: keys per task, length and depth.
        passkey_generate: let the model write the key; False: score it token by token, in one pass.
    """

    lengths: list[int]
    protocol: str = "same-targets"
    targets: int = 8192
    targets_per_window: int = 128
    stride: int | None = None
    top_k: list[int] = dataclasses.field(default_factory=lambda: [1, 10, 100])
    batch_tokens: int = 8192
    dtype: str = "auto"
    device_map: str | None = None
    position_length: int | None = None
    position_passes: int = 1
    position_edges: list[int] | None = None
    retrieval_tasks: list[str] = dataclasses.field(default_factory=lambda: ["passkey"])
    retrieval_text: str | None = None
    passkey_lengths: list[int] = dataclasses.field(default_factory=list)
    passkey_depths: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    passkey_trials: int = 10
    passkey_generate: bool = False


@strict
@dataclasses.dataclass
class ArmSettings:
    """One of the models to compare.

    Args:
        name: names the checkpoint's folder and the line in tables and plots.
        poslsh: fields of ``PosLSHConfig``, or None (``null``) for the original model.
        train: false evaluates the model as it is.
        config: fields of the model's configuration, for this arm alone.
    """

    name: str
    poslsh: dict[str, Any] | None
    train: bool = True
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@strict
@dataclasses.dataclass
class Settings:
    """A whole experiment.

    Args:
        name: title of the report.
        output_dir: where everything goes.
        seed: of initial weights and batches, the same for all arms.
        data: see ``DataSettings``.
        model: see ``ModelSettings``.
        training: see ``TrainingSettings``.
        evaluation: see ``EvaluationSettings``.
        arms: see ``ArmSettings``.
        peft: fields of ``peft.LoraConfig``: the weights stay as they are and an adapter is trained. None: all
            weights are trained.
        card: fields for the head of the model cards, e.g. ``{license: mit, language: en, datasets: [user/name]}``;
            ``base_model`` is the Hub name of ``model.pretrained``, where that is a folder.
        trackers: where the losses go besides the console: ``tensorboard``, ``trackio``, ``wandb`` and whatever else
            accelerate knows and is installed.
    """

    name: str
    output_dir: str
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    arms: list[ArmSettings]
    peft: dict[str, Any] | None = None
    trackers: list[str] = dataclasses.field(default_factory=list)
    seed: int = 0
    card: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON types."""
        return dataclasses.asdict(self)


def load_settings(path: str | Path, overrides: list[str] | None = None) -> Settings:
    """Reads a YAML file.

    Args:
        path: the file. A relative ``data.folder`` in it starts at the file's own folder.
        overrides: ``section.key=value`` each, the value in YAML, in place of what the file says.

    Raises:
        ValueError: the file is no such YAML, a key is unknown or missing, or a value has the wrong type or range.
    """
    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the config {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the config {path} holds no mapping; its keys are {_names(Settings)}.")
    for text in overrides or []:
        override(fields, text)
    settings = build(Settings, fields, "")
    if settings.data.folder is not None:
        settings.data.folder = os.path.relpath(Path(path).parent / settings.data.folder)
    _check_ranges(settings)
    return settings


def build(kind: type, fields: Any, where: str) -> Any:
    """A settings object from a mapping, with nested settings, every key and type checked.

    Args:
        kind: one of the dataclasses above.
        fields: what YAML or JSON held.
        where: the place of the mapping in the whole, for messages: ``"training."``.

    Raises:
        ValueError: a key is unknown or missing, or a value has the wrong type; the message names it.
    """
    place = where.rstrip(".") or "the config"
    if not isinstance(fields, dict):
        raise ValueError(f"{place} is {fields!r}; it must be a mapping with the keys {_names(kind)}.")
    hints = {field.name: field.type for field in dataclasses.fields(kind)}
    unknown = sorted(str(key) for key in set(fields) - set(hints))
    if unknown:
        raise ValueError(f"unknown keys in {place}: {', '.join(unknown)}; the known ones are {_names(kind)}.")
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    missing = sorted(required - set(fields))
    if missing:
        raise ValueError(f"missing keys in {place}: {', '.join(missing)}; the keys are {_names(kind)}.")
    values = {key: _convert(hints[key], value, f"{where}{key}") for key, value in fields.items()}
    try:
        return kind(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {' '.join(str(error).split())}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")
    inner = get_args(hint)
    if isinstance(hint, types.GenericAlias) and isinstance(value, list):
        kinds = [kind for kind in (inner[0], *get_args(inner[0])) if dataclasses.is_dataclass(kind)]
        also_text = str in get_args(inner[0])
        return [
            build(kinds[0], item, f"{where}[{index}].")
            if kinds and not (also_text and isinstance(item, str))
            else item
            for index, item in enumerate(value)
        ]
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 2e-3 as text
        except ValueError:
            return value
    return value


def _names(kind: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(kind))


def override(fields: dict[str, Any], text: str) -> None:
    """Applies ``section.key=value``, the value in YAML, to a nested mapping in place.

    Raises:
        ValueError: the text has no such form, or what it calls a section is none.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} has no '='; write --set training.steps=10.")
    *sections, key = path.split(".")
    for section in sections:
        inner = fields.setdefault(section, {})  # one that the file leaves out is complete by its defaults
        if not isinstance(inner, dict):
            raise ValueError(f"--set {text!r}: {section!r} is {inner!r}, which has no keys.")
        fields = inner
    try:
        fields[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {text!r}: {value!r} is no YAML value.") from error


def _check_ranges(settings: Settings) -> None:
    training, evaluation = settings.training, settings.evaluation
    for where, value, low in (
        ("data.vocab_size", settings.data.vocab_size, 257),
        ("training.steps", training.steps, 1),
        ("training.length", training.length, 2),
        ("training.batch_size", training.batch_size, 1),
        ("training.learning_rate", training.learning_rate, 0.0),
        ("training.micro_batch_size", 1 if training.micro_batch_size is None else training.micro_batch_size, 1),
        ("training.warmup_steps", training.warmup_steps, 0),
        ("training.warmup_ratio", training.warmup_ratio, 0.0),
        ("training.weight_decay", training.weight_decay, 0.0),
        ("training.max_grad_norm", training.max_grad_norm, 0.0),
        ("training.save_every", 1 if training.save_every is None else training.save_every, 1),
        ("training.validate_every", 1 if training.validate_every is None else training.validate_every, 1),
        ("training.validation_sequences", training.validation_sequences, 1),
        ("evaluation.batch_tokens", evaluation.batch_tokens, 1),
        ("the smallest of evaluation.top_k", min(evaluation.top_k, default=1), 1),
        ("seed", settings.seed, 0),
    ):
        if not low <= value < float("inf"):
            raise ValueError(f"{where} is {value}; it must be a finite number of at least {low}.")
    if training.schedule not in ("cosine", "linear"):
        raise ValueError(f"training.schedule is {training.schedule!r}; choose cosine or linear.")
    if training.warmup_ratio > 1 or (training.warmup_ratio and training.warmup_steps):
        raise ValueError(
            f"training.warmup_ratio is {training.warmup_ratio} and training.warmup_steps is {training.warmup_steps}; "
            "give one of them, the ratio as a share of 1."
        )
    for source in (*settings.data.train, *settings.data.validation):
        if isinstance(source, SourceSettings) and source.streaming and source.limit is None:
            raise ValueError(f"the dataset {source.path!r} is streamed without an end; say how many rows: limit.")
    model = settings.model
    if (model.type is None) == (model.pretrained is None):
        raise ValueError("give either model.type (random weights) or model.pretrained (a checkpoint).")
    if model.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"model.dtype is {model.dtype!r}; choose float32 or bfloat16.")
    if model.pretrained is None and (settings.peft is not None or model.revision is not None):
        raise ValueError("peft and model.revision need model.pretrained: random weights have nothing to adapt.")
    for arm in settings.arms:
        if model.pretrained is None and not arm.train:
            raise ValueError(f"arm {arm.name!r} is not trained, but its weights are random; set model.pretrained.")
    if (training.validate_every is None) != (not settings.data.validation):
        raise ValueError("training.validate_every and data.validation belong together; give both or neither.")
    names = [arm.name for arm in settings.arms]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"the arms are named {names}; give at least one, and every one its own name.")
    reserved = {"tokenizer", "state", "logs"}
    for name in names:
        plain = name and all(character.isalnum() or character in "-_.+" for character in name)
        if not plain or name.startswith(".") or name in reserved:
            raise ValueError(
                f"arm name {name!r} can't name a folder; use letters, digits and -_.+ (not {', '.join(reserved)})."
            )
