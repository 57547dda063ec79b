"""Everything that can be wrong with an experiment, found before its first arm trains."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiment.arms import check_arms, model_config
from experiment.console import check_trackers
from experiment.corpus import (
    EvenSequences,
    PackedSequences,
    Sequences,
    encode,
    save_tokenizer,
    train_tokenizer,
)
from experiment.evaluating import plan
from experiment.files import read_json, write_json
from experiment.settings import Settings
from experiment.sources import Text, read_splits
from experiment.training import micro_batches

_FLOAT32 = 4
_STATES = 2  # for a moment there are two, each of the weights and two moments of what is trained


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
    if not accelerator.use_distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "several processes were launched, but they don't know of each other; check `accelerate env`."
        )
    check_output(settings, output, resume)
    texts = read_splits(settings.data)
    folder = output / "tokenizer"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder) if folder.exists() else tokenizer_of(settings, texts)
    kind = PackedSequences if training.packing else Sequences
    count = training.steps * training.batch_size
    sequences = kind(encode(tokenizer, texts["train"]), training.length, count, settings.seed)
    validation: EvenSequences | PackedSequences | None = None
    if texts["validation"]:
        documents = encode(tokenizer, texts["validation"])
        count = training.validation_sequences
        if training.packing:
            count = min(count, sum(map(len, documents)) // training.length)
            validation = PackedSequences(documents, training.length, count, settings.seed)
        else:
            validation = EvenSequences(documents, training.length, count)
    plan(settings.evaluation, encode(tokenizer, texts["held_out"]))
    config = model_config(settings.model, len(tokenizer), tokenizer.eos_token_id)
    parameters, trained = check_arms(config, settings)
    check_disk(settings, parameters, trained, output)
    accelerator.wait_for_everyone()  # nobody writes before all have looked
    if accelerator.is_main_process:
        if not folder.exists():
            save_tokenizer(tokenizer, folder)
        write_json(output / "settings.json", settings.to_dict())
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


def check_output(settings: Settings, output: Path, resume: bool) -> None:
    """An output folder is new, or is to be continued with the settings that it was begun with.

    Raises:
        ValueError: it holds other settings, or results and ``resume`` is false, or can't be written.
    """
    recorded = output / "settings.json"
    if recorded.exists():
        if not resume:
            raise ValueError(
                f"{output} already holds an experiment; pass --resume to continue it, or choose another --output_dir."
            )
        before, now = read_json(recorded), settings.to_dict()
        changed = sorted(key for key in {*before, *now} - {"output_dir", "card"} if before.get(key) != now.get(key))
        if changed:
            raise ValueError(
                f"{output} was begun with other settings ({', '.join(changed)}); --resume needs the same ones. "
                "Choose another --output_dir."
            )
    parent = existing_parent(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{output} can't be written; choose another --output_dir.")


def check_disk(settings: Settings, parameters: int, trained: int, output: Path) -> None:
    """Is there room for all checkpoints?

    Args:
        settings: the experiment.
        parameters: of the model.
        trained: how many of them are trained, which is what a checkpoint holds.
        output: folder of the results.

    Raises:
        ValueError: there is not; the message says how much is needed.
    """
    checkpoints = (sum(arm.train for arm in settings.arms) + 1) * trained  # and one that waits to replace another
    states = _STATES * (parameters + 2 * trained) if settings.training.save_every else 0
    needed = (checkpoints + states) * _FLOAT32 + 2**24
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
