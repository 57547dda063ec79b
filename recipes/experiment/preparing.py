"""Everything that can be wrong with an experiment, found before its first arm trains."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiment.arms import check_arms, model_config, whole_models
from experiment.console import check_trackers
from experiment.corpus import (
    EvenSequences,
    PackedSequences,
    Sequences,
    encode,
    save_tokenizer,
    train_tokenizer,
)
from experiment.evaluating import plan, questions
from experiment.files import read_json, write_json
from experiment.settings import EvaluationSettings, Settings
from experiment.sources import Text, digest, read_splits
from experiment.training import micro_batches
from hf_poslsh.evaluation.documents import begins_with

_FLOAT32 = 4
_STATES = 2  # for a moment there are two, each of the weights and two moments of what is trained
# What a continued run may change: it does not change the results beyond rounding.
_FREE = {
    "output_dir",
    "card",
    "trackers",
    "training.micro_batch_size",
    "training.gradient_checkpointing",
    "training.save_every",
    "evaluation.batch_tokens",
    "evaluation.device_map",
}


@dataclass(frozen=True)
class Experiment:
    """A checked experiment, ready to run.

    Args:
        settings: what was asked for.
        output: folder of the results.
        config: the architecture.
        parameters: of the model.
        tokenizer: saved in ``output / "tokenizer"``.
        sequences: the training sequences.
        validation: the sequences that choose the checkpoint, or None.
        held_out: the texts to evaluate on.
    """

    settings: Settings
    output: Path
    config: PreTrainedConfig
    parameters: int
    tokenizer: PreTrainedTokenizerBase
    sequences: Sequences | PackedSequences
    validation: EvenSequences | PackedSequences | None
    held_out: list[Text]


def prepare(settings: Settings, accelerator: Accelerator, resume: bool) -> Experiment:
    """Checks settings, texts, lengths, arms, output folder and disk; trains the tokenizer.

    Args:
        settings: the experiment.
        accelerator: the processes that will run it.
        resume: continue in an output folder that holds part of the same experiment.

    Raises:
        ValueError: something does not fit; the message says what and how to mend it.
    """
    training, output = settings.training, Path(settings.output_dir)
    micro_batches(training, accelerator.num_processes)
    check_trackers(settings.trackers)
    check_clipping(settings, accelerator)
    if not accelerator.use_distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "several processes were launched, but they don't know of each other; check `accelerate env`."
        )
    record = {**settings.to_dict(), "mixed_precision": accelerator.mixed_precision}
    check_output(record, output, resume)
    texts = read_splits(settings.data)
    record["texts"] = {split: digest(of_split) for split, of_split in texts.items()}
    check_output(record, output, resume)
    folder = output / "tokenizer"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder) if folder.exists() else tokenizer_of(settings, texts)
    kind, bos = PackedSequences if training.packing else Sequences, begins_with(tokenizer)
    count = training.steps * training.batch_size
    sequences = kind(encode(tokenizer, texts["train"]), training.length, count, settings.seed, bos)
    validation: EvenSequences | PackedSequences | None = None
    if texts["validation"]:
        documents = encode(tokenizer, texts["validation"])
        count = training.validation_sequences
        if training.packing:
            count = min(count, sum(map(len, documents)) // training.length)
            validation = PackedSequences(documents, training.length, count, settings.seed, bos)
        else:
            validation = EvenSequences(documents, training.length, count, bos)
    plan(settings.evaluation, encode(tokenizer, texts["held_out"]))
    config = model_config(settings.model, len(tokenizer), tokenizer.eos_token_id)
    with whole_models(accelerator):
        parameters, trained = check_arms(config, settings)
    questions(settings.evaluation, tokenizer, texts["held_out"])
    check_disk(settings, parameters, trained, output)
    accelerator.wait_for_everyone()  # nobody writes before all have looked
    if accelerator.is_main_process:
        if not folder.exists():
            save_tokenizer(tokenizer, folder)
        write_json(output / "settings.json", record)
    accelerator.wait_for_everyone()
    return Experiment(settings, output, config, parameters, tokenizer, sequences, validation, texts["held_out"])


def tokenizer_of(settings: Settings, texts: dict[str, list[Text]]) -> PreTrainedTokenizerBase:
    """The tokenizer that the settings name, or one trained on the training texts.

    Raises:
        ValueError: it can't be loaded, or the texts are too short to train one.
    """
    name, revision = settings.data.tokenizer, None
    if name is None:
        name, revision = settings.model.pretrained, settings.model.revision
    if name is None:
        return train_tokenizer(texts["train"], settings.data.vocab_size)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer {name!r} can't be loaded: {error}") from error


def check_clipping(settings: Settings, accelerator: Accelerator) -> None:
    """DeepSpeed clips gradients itself, as the accelerate config says: that must be what the experiment says.

    Raises:
        ValueError: it is not.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    clipping = None if plugin is None else plugin.deepspeed_config.get("gradient_clipping", 0.0)
    if clipping not in (None, "auto", settings.training.max_grad_norm):
        raise ValueError(
            f"training.max_grad_norm is {settings.training.max_grad_norm}, but gradient_clipping in the accelerate "
            f"config is {clipping}; DeepSpeed follows the latter: make them equal."
        )


def check_output(record: dict[str, Any], output: Path, resume: bool) -> None:
    """An output folder is new, or is to be continued with the settings that it was begun with.

    Args:
        record: what ``settings.json`` holds; all or some of its keys.
        output: folder of the results.
        resume: as of ``prepare``.

    Raises:
        ValueError: it holds other settings, or results and ``resume`` is false, or can't be written.
    """
    recorded = output / "settings.json"
    if recorded.exists():
        if not resume:
            raise ValueError(
                f"{output} already holds an experiment; pass --resume to continue it, or choose another --output_dir."
            )
        # What an earlier version could not ask for was not asked for.
        defaults = asdict(EvaluationSettings(lengths=[]))
        before, now = _flat({"evaluation": defaults}) | _flat(read_json(recorded)), _flat(record)
        changed = sorted(key for key in set(now) - _FREE if key not in before or before[key] != now[key])
        if changed:
            raise ValueError(
                f"{output} was begun with other settings ({', '.join(changed)}); --resume needs the same ones "
                f"(all but {', '.join(sorted(_FREE))}). Choose another --output_dir."
            )
    parent = existing_parent(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{output} can't be written; choose another --output_dir.")


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    sections = ("data", "model", "training", "evaluation", "texts")
    flat = {key: value for key, value in record.items() if key not in sections}
    for section in sections:
        flat |= {f"{section}.{key}": value for key, value in record.get(section, {}).items()}
    return flat


def check_disk(settings: Settings, parameters: int, trained: int, output: Path) -> None:
    """Is there room for all checkpoints that are not there yet?

    Args:
        settings: the experiment.
        parameters: of the model.
        trained: how many of them are trained, which is what a checkpoint holds.
        output: folder of the results.

    Raises:
        ValueError: there is not; the message says how much is needed.
    """
    missing = sum(arm.train and not (output / arm.name).exists() for arm in settings.arms)
    needed = 2**24
    if missing:
        states = _STATES if settings.training.save_every else 0
        states -= bool(states) and any((output / "state").glob("*/[0-9]*"))
        # and one checkpoint that waits to replace another
        needed += ((missing + 1) * trained + states * (parameters + 2 * trained)) * _FLOAT32
    free = shutil.disk_usage(existing_parent(output)).free
    if free < needed:
        raise ValueError(
            f"{output} needs about {needed >> 20:,} MiB for its checkpoints, but {free >> 20:,} MiB are free; "
            "make room or choose another --output_dir."
        )


def existing_parent(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
