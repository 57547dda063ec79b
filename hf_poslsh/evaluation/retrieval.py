"""Retrieval from long prompts: questions whose answers stand somewhere in a text of no interest, and their accuracy.

What the questions are about is in ``tasks.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_poslsh.evaluation.documents import Document
from hf_poslsh.evaluation.intervals import wilson_interval
from hf_poslsh.evaluation.scores import TokenScores
from hf_poslsh.evaluation.windows import Window


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        prompt: int64 ``(P,)``: beginning of sequence (where the tokenizer uses one), a text with the statements that
            are to be found, the question.
        answer: int64 ``(A,)``: the answer, in the very tokens in which the prompt states it.
        key: the answer as text: a number, or names separated by commas.
        length: ``P + A`` tokens.
        depth: where the statement that is asked for stands, or the first of them: from 0, before all of the text, to
            1, after it.
        task: what kind of question it is.
    """

    prompt: np.ndarray
    answer: np.ndarray
    key: str
    length: int
    depth: float
    task: str = "passkey"


def question_windows(questions: Sequence[Question]) -> tuple[list[Document], list[Window]]:
    """What ``score_windows`` takes: a document and a window for each question, with the answer as targets."""
    documents, windows = [], []
    for index, question in enumerate(questions):
        ids = np.concatenate([question.prompt, question.answer])
        # Nothing here is counted in bytes (so one zero stands for all); the prompt already begins as it should.
        documents.append(Document(ids, np.broadcast_to(np.int64(0), ids.shape)))
        windows.append(Window(index, 0, question.length - 1, len(question.answer)))
    return documents, windows


def answered_by_score(scores: TokenScores, questions: int) -> np.ndarray:
    """Which answers are the model's first choice token by token, given the answer's earlier tokens.

    That is what greedy decoding would write, at the price of one pass.

    Args:
        scores: of the windows of ``question_windows``, from all processes.
        questions: how many there are.

    Returns:
        bool ``(questions,)``.
    """
    misses = np.bincount(scores.document, scores.rank > 0, questions)
    return misses == 0


@torch.no_grad()
def answered_by_generation(model: Any, tokenizer: Any, questions: Sequence[Question]) -> np.ndarray:
    """Which answers the model writes when it goes on greedily from the prompt, one question at a time.

    It writes as many tokens as the answer has. A number is right if it is the first run of digits in their text,
    names if they are its first words.

    Returns:
        bool ``(len(questions),)``.
    """
    right = []
    for question in questions:
        prompt = torch.from_numpy(question.prompt)[None].to(model.device)
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(question.answer),
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.eos_token_id,
        )
        words = r"\d+" if question.key.isdigit() else r"\w+"
        expected = re.findall(words, question.key)
        found = re.findall(words, tokenizer.decode(written[0, prompt.shape[1] :]))
        right.append(found[: len(expected)] == expected)
    return np.array(right)


def retrieval_accuracy(questions: Sequence[Question], answered: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Accuracy by length and depth.

    Args:
        questions: of one task.
        answered: for each run (seed) of an arm, which were answered, bool ``(len(questions),)``.

    Returns:
        In the order of the questions, ``length``, ``depth``, ``trials``, ``accuracy`` (mean over the runs) and
        ``runs``, each run's accuracy.
    """
    cells: dict[tuple[int, float], list[int]] = {}
    for index, question in enumerate(questions):
        cells.setdefault((question.length, question.depth), []).append(index)
    rows = []
    for (length, depth), members in cells.items():
        runs = [float(run[members].mean()) for run in answered]
        accuracy = float(np.mean(runs))
        rows.append({"length": length, "depth": depth, "trials": len(members), "accuracy": accuracy, "runs": runs})
    return rows


def accuracy_by_length(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy by length, over all depths, with its Wilson interval.

    Args:
        cells: what ``retrieval_accuracy`` returned.

    Returns:
        In the order of the cells, ``length``, ``questions`` (how many, over all depths), ``accuracy`` (mean over the
        runs), ``interval`` (``wilson_interval`` of it) and ``runs``, each run's accuracy.
    """
    rows = []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        members = [cell for cell in cells if cell["length"] == length]
        trials = [cell["trials"] for cell in members]
        runs = [float(share) for share in np.average([cell["runs"] for cell in members], axis=0, weights=trials)]
        accuracy, questions = float(np.mean(runs)), sum(trials)
        rows.append(
            {
                "length": length,
                "questions": questions,
                "accuracy": accuracy,
                "interval": wilson_interval(accuracy, questions),
                "runs": runs,
            }
        )
    return rows


def summarize_retrieval(
    questions: Sequence[Question], answered: Sequence[np.ndarray]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Accuracies of each task.

    Args:
        questions: of any tasks.
        answered: as of ``retrieval_accuracy``.

    Returns:
        For each task, in the order of the questions: ``lengths``, what ``accuracy_by_length`` returns, and ``cells``,
        what ``retrieval_accuracy`` returns.
    """
    tasks = {}
    for task in dict.fromkeys(question.task for question in questions):
        mine = [index for index, question in enumerate(questions) if question.task == task]
        cells = retrieval_accuracy([questions[index] for index in mine], [run[mine] for run in answered])
        tasks[task] = {"lengths": accuracy_by_length(cells), "cells": cells}
    return tasks
