"""The questions of retrieval: a passkey, one of several keys, the variables that hold a number.

Passkeys are those of Mohtashami and Jaggi (2023, arXiv 2305.16300), the other two tasks those of RULER (Hsieh et al.,
2024, arXiv 2404.06654: multi-key needles and variable tracking); the wording is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_poslsh.evaluation.documents import begins_with
from hf_poslsh.evaluation.retrieval import Question

TASKS = ("passkey", "multi-key", "variable-tracking")
FILLER = " The river runs past the mill. The wheel turns, the miller sleeps, and the flour settles on the floor."
"""The text of no interest, repeated."""
_DIGITS, _LETTERS = 5, 5
# fmt: off
_THINGS = (
    "anchor", "basket", "candle", "dagger", "engine", "feather", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "mirror", "needle", "orchard", "pocket", "quarry", "ribbon", "saddle", "tunnel",
)
# fmt: on


@dataclass(frozen=True)
class Riddle:
    """What a prompt states and asks, whatever its length. Each piece of text is encoded by itself.

    Args:
        task: one of ``TASKS``.
        statements: for each, its pieces. The first is the one that stands at the depth of the question.
        question: its pieces, the beginning of the answer's sentence last.
        answer: its pieces, which occur in the statements as they are here.
        others: where the statements after the first stand, each from 0 to 1.
        after_first: they stand at these shares of the text that follows the first, not of all text.
    """

    task: str
    statements: tuple[tuple[str, ...], ...]
    question: tuple[str, ...]
    answer: tuple[str, ...]
    others: tuple[float, ...] = ()
    after_first: bool = False

    def depths(self, depth: float) -> list[float]:
        """Of each statement, where the first stands at ``depth``."""
        low = depth if self.after_first else 0.0
        return [depth, *(low + (1 - low) * share for share in self.others)]


def passkey_riddle(key: str) -> Riddle:
    """One number, stated once."""
    cue = " The pass key is"
    return Riddle("passkey", ((cue, f" {key}", "."),), (f" What is the pass key?{cue}",), (f" {key}",))


def multi_key_riddle(codes: Sequence[tuple[str, str]], others: Sequence[float]) -> Riddle:
    """Several things with a number each; one is asked for, the others distract.

    Args:
        codes: thing and number of each; the first is asked for.
        others: where the others stand, each from 0 to 1.
    """
    cues = [f" The code of the {thing} is" for thing, _ in codes]
    statements = tuple((cue, f" {number}", ".") for cue, (_, number) in zip(cues, codes, strict=True))
    question = (f" What is the code of the {codes[0][0]}?", cues[0])
    return Riddle("multi-key", statements, question, (f" {codes[0][1]}",), tuple(others))


def variable_riddle(names: Sequence[str], number: str, others: Sequence[float]) -> Riddle:
    """A chain of assignments: the first variable is given a number, every other one the value of the one before.

    All that hold the number are asked for, in their order. A short example shows order and form of the answer.

    Args:
        names: of the variables, along the chain.
        number: what they hold.
        others: where the assignments after the first stand, each from 0 to 1 and in ascending order, between the
            first and the end of the text.
    """
    values = [number, *names[:-1]]
    statements = tuple(
        (" Let", f" {name}", " =", f" {value}", ".") for name, value in zip(names, values, strict=True)
    )
    question = (
        # Of the same form as what is asked for, which it puts in order, but with a number that no trial has.
        " For example, after Let QUQUA = 00000. Let TRTRI = QUQUA. the variables that hold 00000 are QUQUA, TRTRI.",
        " The variables that hold",
        f" {number}",
        " are",
    )
    answer = tuple(piece for name in names for piece in (",", f" {name}"))[1:]
    return Riddle("variable-tracking", statements, question, answer, tuple(others), after_first=True)


def plant(
    tokenizer: Any, riddle: Riddle, length: int, depth: float, text: np.ndarray, start: float | None
) -> Question:
    """The riddle in a text, so that prompt and answer are together exactly ``length`` tokens.

    The pieces are encoded one by one and joined as tokens. Of ``F`` tokens of text, ``round(depth * F)`` stand before
    the first statement. The text is one run, interrupted by the statements.

    Args:
        tokenizer: of transformers.
        riddle: what is stated and asked.
        length: tokens of prompt and answer.
        depth: 0 to 1, of the first statement.
        text: int64 ``(N,)``, tokens.
        start: None repeats the text as often as needed, from its beginning. A share from 0 to 1 reads it once, from
            that share of the places where a run of it can begin.

    Raises:
        ValueError: ``depth`` is out of range, ``text`` is empty or too short to be read once, or ``length`` leaves no
            room for text; the message says how much is needed.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must be from 0, before all filler, to 1, after it.")
    if not len(text):
        raise ValueError("the filler has no tokens; give some text.")

    def encode(pieces: Sequence[str]) -> list[int]:
        return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]

    statements = [encode(statement) for statement in riddle.statements]
    question, answer = encode(riddle.question), encode(riddle.answer)
    bos = begins_with(tokenizer)
    parts = [[] if bos is None else [bos]]
    room = length - sum(map(len, [*parts, *statements, question, answer]))
    if room < 1:
        raise ValueError(
            f"length is {length}; with this tokenizer a {riddle.task} prompt needs at least {length - room + 1}."
        )
    if start is None:
        run = np.resize(text, room).tolist()
    else:
        if len(text) < room:
            raise ValueError(
                f"the text has {len(text)} tokens, but a {riddle.task} prompt of {length} reads {room} of them; give "
                "a longer text or shorter lengths, or none for the repeated filler."
            )
        first = int(start * (len(text) - room))
        run = text[first : first + room].tolist()
    places = [round(share * room) for share in riddle.depths(depth)]
    done = 0
    for index in sorted(range(len(places)), key=places.__getitem__):
        parts += [run[done : places[index]], statements[index]]
        done = places[index]
    prompt = [token for part in (*parts, run[done:], question) for token in part]
    key = "".join(riddle.answer).strip()
    return Question(np.array(prompt, np.int64), np.array(answer, np.int64), key, length, depth, riddle.task)


def passkey_prompt(tokenizer: Any, key: str, length: int, depth: float, filler: str = FILLER) -> Question:
    """A question for a passkey whose prompt and answer are together exactly ``length`` tokens, as of ``plant``.

    Args:
        tokenizer: of transformers.
        key: the digits to be found.
        length: tokens of prompt and answer.
        depth: 0 to 1.
        filler: text that is repeated as often as needed, and cut.

    Raises:
        ValueError: as ``plant``.
    """
    return plant(tokenizer, passkey_riddle(key), length, depth, _encode_text(tokenizer, filler), None)


def passkey_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    *,
    seed: int = 0,
    filler: str = FILLER,
) -> list[Question]:
    """Questions for passkeys alone, as of ``retrieval_prompts``."""
    return retrieval_prompts(tokenizer, ["passkey"], lengths, depths, trials, seed=seed, filler=filler)


def retrieval_prompts(
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    *,
    seed: int = 0,
    filler: str = FILLER,
    text: str | None = None,
    keys: int = 4,
    hops: int = 4,
) -> list[Question]:
    """Questions for every task, length and depth, ``trials`` each, the same ones everywhere.

    A trial has its own numbers, names, places of further statements and run of ``text``: the same at every length
    and depth, and for every model with this tokenizer.

    Args:
        tokenizer: of transformers.
        tasks: some of ``TASKS``: ``passkey``, one number; ``multi-key``, one of several things that have a number
            each; ``variable-tracking``, all variables of a chain of assignments.
        lengths: tokens of prompt and answer.
        depths: 0 to 1, where the statement that is asked for stands; of ``variable-tracking``, the first one.
        trials: questions per task, length and depth.
        seed: of all that is random.
        filler: repeated as often as needed, and cut.
        text: in place of the filler, a natural text that is read once, every trial another run of it.
        keys: of ``multi-key``: how many things have a number, at most 20. The others stand at random depths.
        hops: of ``variable-tracking``: assignments after the first, at random places between it and the end.

    Raises:
        ValueError: a task is not known or named twice, a number is out of range, or as ``plant``.
    """
    if not tasks or len(set(tasks)) != len(tasks) or not set(tasks) <= set(TASKS):
        raise ValueError(f"the retrieval tasks are {list(tasks)}; name some of {', '.join(TASKS)}, each once.")
    if trials < 1 or not lengths or not depths:
        raise ValueError(f"give lengths, depths and at least 1 trial; got {lengths}, {depths}, {trials}.")
    if not 1 <= keys <= len(_THINGS) or hops < 0:
        raise ValueError(f"keys is {keys} and hops {hops}; give 1 to {len(_THINGS)} keys and at least 0 hops.")
    tokens = _encode_text(tokenizer, filler if text is None else text)
    starts: list[float | None] = [None] * trials
    if text is not None:
        starts = np.random.default_rng([seed, 1]).random(trials).tolist()
    riddles = {task: _riddles(task, trials, seed, keys, hops) for task in tasks}
    return [
        plant(tokenizer, riddle, length, depth, tokens, start)
        for task in tasks
        for length in lengths
        for depth in depths
        for riddle, start in zip(riddles[task], starts, strict=True)
    ]


def _riddles(task: str, trials: int, seed: int, keys: int, hops: int) -> list[Riddle]:
    if task == "passkey":
        return [passkey_riddle(number) for number in _numbers(np.random.default_rng(seed), trials, replace=True)]
    riddles = []
    for trial in range(trials):
        # Of its own: what a trial asks depends neither on how many there are nor on the other tasks.
        generator = np.random.default_rng([seed, trial, TASKS.index(task)])
        if task == "multi-key":
            things = [_THINGS[index] for index in generator.permutation(len(_THINGS))[:keys]]
            numbers = _numbers(generator, keys, replace=False)
            others = generator.random(keys - 1).tolist()
            riddles.append(multi_key_riddle(list(zip(things, numbers, strict=True)), others))
        else:
            names = _names(generator, hops + 1)
            (number,) = _numbers(generator, 1, replace=True)
            riddles.append(variable_riddle(names, number, sorted(generator.random(hops).tolist())))
    return riddles


def _numbers(generator: np.random.Generator, count: int, *, replace: bool) -> list[str]:
    low = 10 ** (_DIGITS - 1)
    if replace:
        return [str(number) for number in generator.integers(low, 10 * low, count)]
    return [str(low + number) for number in generator.choice(9 * low, count, replace=False)]


def _names(generator: np.random.Generator, count: int) -> list[str]:
    """Different ones of capital letters."""
    codes = generator.choice(26**_LETTERS, count, replace=False)
    return ["".join(chr(ord("A") + code // 26**place % 26) for place in range(_LETTERS)) for code in codes.tolist()]


def _encode_text(tokenizer: Any, text: str) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return np.array(ids, np.int64)
