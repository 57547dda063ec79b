"""Evaluates saved checkpoints: loads them as a user would, scores the held-out texts, gathers the processes."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from transformers import AutoTokenizer

from experiment.arms import load_checkpoint, whole_models
from experiment.console import Meter, progress
from experiment.settings import EvaluationSettings
from experiment.sources import Text
from hf_poslsh.evaluation import (
    Document,
    Question,
    TokenScores,
    Window,
    answered_by_generation,
    answered_by_score,
    by_position,
    check_edges,
    encode_document,
    position_edges,
    protocol_windows,
    question_windows,
    require_same_targets,
    retrieval_prompts,
    score_windows,
    single_pass_windows,
    summarize,
    summarize_retrieval,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """What is read and scored.

    Args:
        lengths: the protocol's windows at each length.
        single_pass: the windows of the loss by position; none if it is not asked for.
    """

    lengths: dict[int, list[Window]]
    single_pass: list[Window]


def plan(settings: EvaluationSettings, documents: Sequence[Sized]) -> Plan:
    """The windows. Raises ValueError if the settings name none, or the documents can't hold them."""
    if settings.dtype not in DTYPES:
        raise ValueError(f"evaluation.dtype is {settings.dtype!r}; choose one of {', '.join(DTYPES)}.")
    if settings.device_map not in (None, "auto"):
        raise ValueError(f"evaluation.device_map is {settings.device_map!r}; choose auto or null.")
    document_lengths = [len(document) for document in documents]
    lengths = protocol_windows(
        settings.protocol,
        document_lengths,
        settings.lengths,
        targets=settings.targets,
        targets_per_window=settings.targets_per_window,
        stride=settings.stride,
    )
    single_pass = []
    if settings.position_length is not None:
        single_pass = single_pass_windows(document_lengths, settings.position_length, settings.position_passes)
        check_edges(settings.position_edges or position_edges(settings.position_length), settings.position_length)
    return Plan(lengths, single_pass)


def questions(settings: EvaluationSettings, tokenizer: Any, texts: Sequence[Text]) -> list[Question]:
    """What is to be retrieved; nothing if the settings name no length. Raises ValueError if it can't be asked."""
    if not settings.passkey_lengths:
        return []
    text = None
    if settings.retrieval_text is not None:
        contents = {each.name: each.content for each in texts}
        if settings.retrieval_text not in contents:
            raise ValueError(
                f"evaluation.retrieval_text is {settings.retrieval_text!r}; name one of the held-out texts, "
                f"{', '.join(contents)}, or null for the repeated filler."
            )
        text = contents[settings.retrieval_text]
    return retrieval_prompts(
        tokenizer,
        settings.retrieval_tasks,
        settings.passkey_lengths,
        settings.passkey_depths,
        settings.passkey_trials,
        text=text,
    )


@dataclass(frozen=True)
class Scored:
    """The scores of one checkpoint.

    Args:
        protocol: its name, parameters and texts, as JSON types.
        lengths: at each length.
        single_pass: of the passes for the loss by position; None if it was not asked for.
        questions: of retrieval; none if they were not asked for.
        answered: which of them were, bool.
    """

    protocol: dict[str, Any]
    lengths: dict[int, TokenScores]
    single_pass: TokenScores | None
    questions: list[Question]
    answered: np.ndarray

    def parts(self) -> dict[str, TokenScores]:
        """All of them by name: the length, and ``single_pass``."""
        single_pass = {} if self.single_pass is None else {"single_pass": self.single_pass}
        return {**{str(length): scores for length, scores in self.lengths.items()}, **single_pass}


def score_checkpoint(
    accelerator: Accelerator,
    console: Console,
    title: str,
    checkpoint: str | Path,
    texts: Sequence[Text],
    settings: EvaluationSettings,
) -> Scored:
    """The scores of one checkpoint, on every process the same.

    Args:
        accelerator: the processes that share the windows.
        console: of the main process.
        title: beside the progress bar.
        checkpoint: a folder, or a name on the Hub, that holds model and tokenizer.
        texts: the held-out documents.
        settings: see ``EvaluationSettings``.

    Raises:
        ValueError: the texts are too short for the protocol, or the settings or the checkpoint are not supported.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    documents = [encode_document(tokenizer, text.content) for text in texts]
    planned, asked = plan(settings, documents), questions(settings, tokenizer, texts)
    # How many processes read, each its share. All of them gather what was read.
    readers = accelerator.num_processes if settings.device_map is None else 1
    model = None
    if accelerator.process_index < readers:
        with whole_models(accelerator):
            model = load_checkpoint(checkpoint, settings.dtype, settings.device_map)
        if settings.device_map is None:
            model.to(accelerator.device)
    jobs = {**planned.lengths, **({"single_pass": planned.single_pass} if planned.single_pass else {})}
    scores: dict[Any, TokenScores] = {}
    total = sum(window.length for windows in jobs.values() for window in windows)
    with progress(console, title, total) as meter:
        for name, windows in jobs.items():
            note = f"length {name}" if isinstance(name, int) else f"one pass of {settings.position_length}"
            scores[name] = score_share(accelerator, readers, model, documents, windows, settings, meter, note)
    (dtype, *_) = gather_object([] if model is None else [str(model.dtype).removeprefix("torch.")])
    single_pass = scores.pop("single_pass", None)
    scored = np.bincount(next(iter(scores.values())).document, minlength=len(documents))
    answered = np.empty(0, bool)
    if asked:
        answered = ask(accelerator, readers, console, title, model, tokenizer, asked, settings)
    protocol = {
        "name": settings.protocol,
        "tokens_scored": len(next(iter(scores.values()))),
        **({"targets_per_window": settings.targets_per_window} if settings.protocol == "same-targets" else {}),
        **({"stride": settings.stride} if settings.protocol == "sliding-window" else {}),
        "begins_with": documents[0].bos,
        "dtype": dtype,
        "texts": [
            {
                "name": text.name,
                "sha256": text.sha256,
                "tokens": len(document),
                "bytes": int(document.bytes.sum()),
                "tokens_scored": int(count),
            }
            for text, document, count in zip(texts, documents, scored, strict=True)
        ],
        **(
            {}
            if single_pass is None
            else {"single_pass": {"length": settings.position_length, "tokens_scored": len(single_pass)}}
        ),
    }
    if asked:
        protocol["retrieval"] = {
            "answered": "in writing" if settings.passkey_generate else "token by token",
            "text": settings.retrieval_text,
        }
    require_same_targets(scores)
    return Scored(protocol, scores, single_pass, asked, answered)


def score_share(
    accelerator: Accelerator,
    readers: int,
    model: Any,
    documents: Sequence[Document],
    windows: Sequence[Window],
    settings: EvaluationSettings,
    meter: Meter,
    note: str,
) -> TokenScores:
    """The scores of all windows, on every process; the first ``readers`` processes read a share each."""

    def advance(tokens: int) -> None:  # the others read about as much as the one whose progress is shown
        meter.advance(readers * tokens, note, units=readers * tokens)

    parts = []
    if model is not None:
        share = (accelerator.process_index, readers)
        batch_tokens = settings.batch_tokens
        parts = [score_windows(model, documents, windows, batch_tokens=batch_tokens, share=share, on_batch=advance)]
    return TokenScores.concatenate(gather_object(parts))


def ask(
    accelerator: Accelerator,
    readers: int,
    console: Console,
    title: str,
    model: Any,
    tokenizer: Any,
    asked: list[Question],
    settings: EvaluationSettings,
) -> np.ndarray:
    """Which of the questions are answered, bool ``(len(asked),)``, on every process; as of ``score_share``."""
    if settings.passkey_generate:
        answers = []
        if model is not None:
            mine = list(range(len(asked)))[accelerator.process_index :: readers]
            written = answered_by_generation(model, tokenizer, [asked[index] for index in mine])
            answers = list(zip(mine, written.tolist(), strict=True))
        together = dict(gather_object(answers))
        return np.array([together[index] for index in range(len(asked))])
    answered = np.empty(len(asked), bool)
    with progress(console, title, sum(question.length - 1 for question in asked)) as meter:
        for length in dict.fromkeys(question.length for question in asked):
            of_length = [index for index, question in enumerate(asked) if question.length == length]
            documents, windows = question_windows([asked[index] for index in of_length])
            note = f"retrieval from {length}"
            part = score_share(accelerator, readers, model, documents, windows, settings, meter, note)
            answered[of_length] = answered_by_score(part, len(of_length))
    return answered


def summarize_runs(runs: Sequence[Scored], settings: EvaluationSettings) -> dict[str, Any]:
    """The figures of one arm: ``lengths`` (keys are text), ``positions``, ``passkeys``, ``retrieval`` (None: none).

    ``passkeys`` are the cells of the passkey task, which are in ``retrieval`` as well.
    """
    lengths = {
        str(length): summarize([run.lengths[length] for run in runs], settings.top_k) for length in runs[0].lengths
    }
    positions = None
    if settings.position_length is not None:
        edges = settings.position_edges or position_edges(settings.position_length)
        positions = by_position([run.single_pass for run in runs if run.single_pass], edges, settings.top_k)
    retrieval = summarize_retrieval(runs[0].questions, [run.answered for run in runs]) or None
    passkeys = retrieval["passkey"]["cells"] if retrieval and "passkey" in retrieval else None
    return {"lengths": lengths, "positions": positions, "passkeys": passkeys, "retrieval": retrieval}


def evaluate_checkpoint(
    accelerator: Accelerator,
    console: Console,
    title: str,
    checkpoint: str | Path,
    texts: Sequence[Text],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """The figures of one checkpoint: ``protocol`` as of ``Scored``, and what ``summarize_runs`` returns."""
    scored = score_checkpoint(accelerator, console, title, checkpoint, texts, settings)
    return {"protocol": scored.protocol, **summarize_runs([scored], settings)}
