"""Passkey retrieval: can the model repeat a number that stands somewhere in a long text of no interest?

The task is that of Mohtashami and Jaggi (2023, arXiv 2305.16300); the wording is ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_poslsh.evaluation.documents import Document, begins_with
from hf_poslsh.evaluation.scores import TokenScores
from hf_poslsh.evaluation.windows import Window

FILLER = " The river runs past the mill. The wheel turns, the miller sleeps, and the flour settles on the floor."
"""The text of no interest, repeated."""
_STATEMENT, _QUESTION = " The pass key is", " What is the pass key? The pass key is"
_DIGITS = 5


@dataclass(frozen=True)
class Passkey:
    """One question.

    Args:
        prompt: int64 ``(P,)``: beginning of sequence (where the tokenizer uses one), filler, the statement of the
            key, filler, question.
        answer: int64 ``(A,)``: the key, in the very tokens in which the prompt states it.
        key: its digits.
        length: ``P + A`` tokens.
        depth: where the statement stands: from 0, before all filler, to 1, after it.
    """

    prompt: np.ndarray
    answer: np.ndarray
    key: str
    length: int
    depth: float


def passkey_prompt(tokenizer: Any, key: str, length: int, depth: float, filler: str = FILLER) -> Passkey:
    """A question whose prompt and answer are together exactly ``length`` tokens.

    The parts are encoded one by one and joined as tokens. Of ``F`` tokens of filler, ``round(depth * F)`` stand
    before the statement and the others after it; they are one run of the repeated filler, interrupted by the
    statement.

    Args:
        tokenizer: of transformers.
        key: the digits to be found.
        length: tokens of prompt and answer.
        depth: 0 to 1.
        filler: text that is repeated as often as needed, and cut.

    Raises:
        ValueError: ``depth`` is out of range, ``filler`` has no tokens, or ``length`` leaves no room for filler; the
            message says how much is needed.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must be from 0, before all filler, to 1, after it.")
    statement, answer, stop, question, unit = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (_STATEMENT, f" {key}", ".", _QUESTION, filler)
    )
    if not unit:
        raise ValueError("the filler has no tokens; give some text.")
    bos = begins_with(tokenizer)
    start = [] if bos is None else [bos]
    stated = [*statement, *answer, *stop]
    room = length - len(start) - len(stated) - len(question) - len(answer)
    if room < 1:
        raise ValueError(
            f"length is {length}; with this tokenizer a passkey prompt needs at least {length - room + 1}."
        )
    text = np.resize(unit, room).tolist()
    before = round(depth * room)
    prompt = [*start, *text[:before], *stated, *text[before:], *question]
    return Passkey(np.array(prompt, np.int64), np.array(answer, np.int64), key, length, depth)


def passkey_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    *,
    seed: int = 0,
    filler: str = FILLER,
) -> list[Passkey]:
    """Questions for every length and depth, ``trials`` each, with the same random keys of five digits everywhere.

    Raises:
        ValueError: as ``passkey_prompt``, or ``trials`` is below 1, or no length or depth is given.
    """
    if trials < 1 or not lengths or not depths:
        raise ValueError(f"give lengths, depths and at least 1 trial; got {lengths}, {depths}, {trials}.")
    low = 10 ** (_DIGITS - 1)
    keys = np.random.default_rng(seed).integers(low, 10 * low, trials)
    return [
        passkey_prompt(tokenizer, str(key), length, depth, filler)
        for length in lengths
        for depth in depths
        for key in keys
    ]


def passkey_windows(passkeys: Sequence[Passkey]) -> tuple[list[Document], list[Window]]:
    """What ``score_windows`` takes: a document and a window for each question, with the answer as targets."""
    documents, windows = [], []
    for index, passkey in enumerate(passkeys):
        ids = np.concatenate([passkey.prompt, passkey.answer])
        # Nothing here is counted in bytes; the prompt already begins as it should.
        documents.append(Document(ids, np.zeros_like(ids)))
        windows.append(Window(index, 0, passkey.length - 1, len(passkey.answer)))
    return documents, windows


def answered_by_score(scores: TokenScores, questions: int) -> np.ndarray:
    """Which answers are the model's first choice token by token, given the answer's earlier tokens.

    That is what greedy decoding would write, at the price of one pass.

    Args:
        scores: of the windows of ``passkey_windows``, from all processes.
        questions: how many there are.

    Returns:
        bool ``(questions,)``.
    """
    misses = np.bincount(scores.document, scores.rank > 0, questions)
    return misses == 0


@torch.no_grad()
def answered_by_generation(model: Any, tokenizer: Any, passkeys: Sequence[Passkey]) -> np.ndarray:
    """Which keys the model writes when it goes on greedily from the prompt, one question at a time.

    It writes as many tokens as the answer has, and is right if the first run of digits in their text is the key.

    Returns:
        bool ``(len(passkeys),)``.
    """
    right = []
    for passkey in passkeys:
        prompt = torch.from_numpy(passkey.prompt)[None].to(model.device)
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(passkey.answer),
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.eos_token_id,
        )
        digits = re.search(r"\d+", tokenizer.decode(written[0, prompt.shape[1] :]))
        right.append(digits is not None and digits.group() == passkey.key)
    return np.array(right)


def passkey_accuracy(passkeys: Sequence[Passkey], answered: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Accuracy by length and depth.

    Args:
        passkeys: the questions.
        answered: for each run (seed) of an arm, which were answered, bool ``(len(passkeys),)``.

    Returns:
        In the order of the questions, ``length``, ``depth``, ``trials``, ``accuracy`` (mean over the runs) and
        ``runs``, each run's accuracy.
    """
    cells: dict[tuple[int, float], list[int]] = {}
    for index, passkey in enumerate(passkeys):
        cells.setdefault((passkey.length, passkey.depth), []).append(index)
    rows = []
    for (length, depth), members in cells.items():
        runs = [float(run[members].mean()) for run in answered]
        accuracy = float(np.mean(runs))
        rows.append({"length": length, "depth": depth, "trials": len(members), "accuracy": accuracy, "runs": runs})
    return rows
