"""Retrieval beside passkeys: prompts by hand, models that know the answers and such that fall for the distractors."""

import csv
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluate import main
from experiment.corpus import train_tokenizer
from experiment.sources import Text
from scipy.stats import binomtest

from hf_poslsh.evaluation import (
    TASKS,
    accuracy_by_length,
    answered_by_generation,
    answered_by_score,
    passkey_prompts,
    question_windows,
    retrieval_prompts,
    score_windows,
    summarize_retrieval,
    wilson_interval,
)
from hf_poslsh.evaluation.tasks import multi_key_riddle, plant, variable_riddle
from hf_poslsh.testing import tiny_model

SIZE = 128
STORY = "".join(f" Chapter {number} has no more to say than the one before it." for number in range(200))


class Characters:
    """A tokenizer of ASCII characters, after a beginning of sequence."""

    bos_token_id = eos_token_id = 0

    def __call__(self, text, add_special_tokens=True, **ignored):
        return {"input_ids": [0] * add_special_tokens + [ord(character) for character in text]}

    def decode(self, ids):
        return "".join(chr(token) for token in ids if token)


TOKENIZER = Characters()


def solve_multi_key(text):
    """The code of what is asked for."""
    thing = re.findall(r"What is the code of the (\w+)\?", text)[0]
    return dict(re.findall(r"The code of the (\w+) is (\d{5})\.", text))[thing]


def first_code(text):
    """Whatever code comes first."""
    return re.findall(r"The code of the \w+ is (\d{5})\.", text)[0]


def solve_variables(text):
    """The names that hold the number, link by link."""
    text, question = text.split(" For example")
    number = re.findall(r"The variables that hold (\d{5}) are", question)[0]
    held, links = [number], {value: name for name, value in re.findall(r"Let (\w+) = (\w+)\.", text)}
    while held[-1] in links:
        held.append(links[held[-1]])
    return ", ".join(held[1:])


def first_variable(text):
    """The name that was given the number itself, and then nothing of use."""
    return solve_variables(text).split(",")[0].ljust(40, "?")


class Solver(torch.nn.Module):
    """Answers as the rule says, and goes on from whatever part of the answer stands there."""

    device = torch.device("cpu")

    def __init__(self, rule):
        super().__init__()
        self.head = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight.data = torch.eye(SIZE)
        self.rule = rule

    def get_output_embeddings(self):
        return self.head

    def next_token(self, ids):
        text = TOKENIZER.decode(ids.tolist())
        cue = re.match(r".*(\?.* is|The variables that hold \d{5} are)", text)
        return 0 if cue is None else ord(f" {self.rule(cue.group())}?????????"[len(text) - cue.end()])

    def forward(self, input_ids, use_cache=False):
        hidden = torch.zeros(*input_ids.shape, SIZE)
        for row, ids in enumerate(input_ids):
            for place in range(len(ids) - 36, len(ids)):  # only answers are looked at
                hidden[row, place, self.next_token(ids[: place + 1])] = 1
        return SimpleNamespace(logits=self.head(hidden))

    def generate(self, prompt, max_new_tokens, **ignored):
        for _ in range(max_new_tokens):
            prompt = torch.cat([prompt, torch.tensor([[self.next_token(prompt[0])]])], 1)
        return prompt


# --- prompts


def ids_of(text):
    return np.array([ord(character) for character in text])


def test_multi_key_prompts_by_hand():
    riddle = multi_key_riddle([("anchor", "11111"), ("needle", "22222")], [0.25])
    asked, other = " The code of the anchor is 11111.", " The code of the needle is 22222."
    question = " What is the code of the anchor? The code of the anchor is"
    length = 1 + len(asked + other + question + " 11111") + 40
    made = plant(TOKENIZER, riddle, length, 0.5, ids_of("abcdefg"), None)
    filler = "abcdefg" * 6
    assert TOKENIZER.decode(made.prompt) == filler[:10] + other + filler[10:20] + asked + filler[20:40] + question
    assert (made.prompt[0], TOKENIZER.decode(made.answer), made.key) == (0, " 11111", "11111")
    assert (made.task, made.length, made.depth) == ("multi-key", length, 0.5)
    assert len(made.prompt) + len(made.answer) == length


def test_variable_prompts_by_hand():
    riddle = variable_riddle(["AB", "CD", "EF"], "12345", [0.5, 1.0])
    links = " Let AB = 12345.", " Let CD = AB.", " Let EF = CD."
    question = (
        " For example, after Let QUQUA = 00000. Let TRTRI = QUQUA. the variables that hold 00000 are QUQUA, TRTRI."
        " The variables that hold 12345 are"
    )
    length = 1 + len("".join(links) + question + " AB, CD, EF") + 40
    made = plant(TOKENIZER, riddle, length, 0.5, ids_of("abcdefgh"), None)
    filler = "abcdefgh" * 5
    stated = filler[:20] + links[0] + filler[20:30] + links[1] + filler[30:] + links[2]
    assert TOKENIZER.decode(made.prompt) == stated + question
    assert (TOKENIZER.decode(made.answer), made.key) == (" AB, CD, EF", "AB, CD, EF")
    assert (made.task, len(made.prompt) + len(made.answer)) == ("variable-tracking", length)


@pytest.fixture(scope="session")
def merging():
    """A tokenizer that merges, where a word's tokens depend on what stands before it in the same text."""
    return train_tokenizer([Text("t", STORY + " The code of the anchor is 10000. Let ABABA = 10000." * 9)], 400)


@pytest.mark.parametrize("text", [None, STORY * 2], ids=["filler", "text"])
def test_all_prompts_are_exact_and_state_their_answers_in_the_same_tokens(merging, text):
    questions = retrieval_prompts(merging, TASKS, [400, 701], [0.0, 0.3, 1.0], 2, text=text)
    assert [(q.task, q.length, q.depth) for q in questions[::2]] == [
        (task, length, depth) for task in TASKS for length in (400, 701) for depth in (0.0, 0.3, 1.0)
    ]
    for question in questions:
        assert len(question.prompt) + len(question.answer) == question.length
        words = question.key.split(", ")
        assert len(words) == (5 if question.task == "variable-tracking" else 1)
        prompt = " ".join(map(str, question.prompt))
        for word in words:
            tokens = merging(f" {word}", add_special_tokens=False)["input_ids"]
            assert " ".join(map(str, tokens)) in prompt
        assert merging.decode(question.answer) == f" {question.key}"


def test_a_trial_is_the_same_question_everywhere():
    lengths, depths = [600, 900], [0.0, 1.0]
    questions = retrieval_prompts(TOKENIZER, TASKS, lengths, depths, 3, seed=1)
    for task in TASKS:
        keys = [q.key for q in questions if q.task == task]
        assert keys == keys[:3] * 4
        assert len(set(keys)) == 3
        alone = retrieval_prompts(TOKENIZER, [task], [600], [0.0], 2, seed=1)
        assert [q.key for q in alone] == keys[:2]
        assert keys != [q.key for q in retrieval_prompts(TOKENIZER, [task], lengths, depths, 3, seed=2)]
    passkeys = passkey_prompts(TOKENIZER, lengths, depths, 3, seed=1)
    for one, other in zip(passkeys, questions, strict=False):
        assert np.array_equal(one.prompt, other.prompt)


def test_things_numbers_and_names_are_different_and_as_many_as_asked_for():
    text = TOKENIZER.decode(retrieval_prompts(TOKENIZER, ["multi-key"], [2000], [0.5], 1, keys=20)[0].prompt)
    codes = re.findall(r"The code of the (\w+) is (\d{5})\.", text)
    assert len(dict(codes)) == len({number for _, number in codes}) == 20
    made = retrieval_prompts(TOKENIZER, ["variable-tracking"], [2000], [0.5], 1, hops=9)[0]
    text = TOKENIZER.decode(made.prompt).split(" For example")[0]
    links = re.findall(r"Let ([A-Z]{5}) = (\w+)\.", text)
    assert made.key == ", ".join(name for name, _ in links)
    assert [value for _, value in links[1:]] == [name for name, _ in links[:-1]]
    assert len(dict(links)) == 10


def test_a_natural_text_is_read_once_from_another_place_in_every_trial():
    questions = retrieval_prompts(TOKENIZER, ["passkey"], [900], [0.0, 0.5], 3, text=STORY)
    runs = []
    for question in questions:
        text = TOKENIZER.decode(question.prompt)
        text = text.replace(f" The pass key is {question.key}.", "", 1)
        runs.append(text.removesuffix(" What is the pass key? The pass key is"))
        assert runs[-1] in STORY
    assert runs[:3] == runs[3:]  # at both depths
    assert len({run[:30] for run in runs}) == 3
    whole = len(STORY) + len(questions[0].prompt) + 6 - len(runs[0])
    assert len(retrieval_prompts(TOKENIZER, ["passkey"], [whole], [0.5], 1, text=STORY)) == 1
    with pytest.raises(ValueError, match=rf"text has {len(STORY)} tokens.* of {whole + 1} reads {len(STORY) + 1}"):
        retrieval_prompts(TOKENIZER, ["passkey"], [whole + 1], [0.5], 1, text=STORY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["needle"]}, r"tasks are \['needle'\]; name some of passkey, multi-key, variable-tracking"),
        ({"tasks": []}, "name some of"),
        ({"tasks": ["passkey", "passkey"]}, "each once"),
        ({"keys": 21}, "keys is 21 and hops 4; give 1 to 20"),
        ({"hops": -1}, "hops -1"),
        ({"trials": 0}, "at least 1 trial"),
        ({"lengths": [100]}, "length is 100; with this tokenizer a multi-key prompt needs at least [12]"),
        ({"depths": [-0.1]}, "depth is -0.1"),
        ({"text": ""}, "filler has no tokens"),
    ],
)
def test_impossible_requests_are_refused(change, message):
    request = {"tasks": ["multi-key"], "lengths": [600], "depths": [0.5], "trials": 1, **change}
    with pytest.raises(ValueError, match=message):
        retrieval_prompts(TOKENIZER, **request)


# --- answers


@pytest.mark.parametrize(
    ("task", "rule", "right"),
    [
        ("multi-key", solve_multi_key, lambda text, key: True),
        ("multi-key", first_code, lambda text, key: first_code(text) == key),
        ("variable-tracking", solve_variables, lambda text, key: True),
        ("variable-tracking", first_variable, lambda text, key: False),
    ],
)
def test_a_model_that_knows_is_told_from_one_that_does_not(task, rule, right):
    questions = retrieval_prompts(TOKENIZER, [task], [520, 600], [0.1, 0.5], 4, seed=3)
    expected = [right(TOKENIZER.decode(q.prompt), q.key) for q in questions]
    model = Solver(rule)
    scores = score_windows(model, *question_windows(questions), batch_tokens=1300)
    assert answered_by_score(scores, len(questions)).tolist() == expected
    assert answered_by_generation(model, TOKENIZER, questions).tolist() == expected
    if rule is first_code:
        assert 0 < sum(expected) < len(expected)  # at some depths a distractor is first


def test_long_questions_share_the_zeros_that_stand_for_their_bytes():
    questions = retrieval_prompts(TOKENIZER, ["passkey"], [65536], [0.5], 2)
    documents, windows = question_windows(questions)
    assert [(w.start, w.end, w.scored) for w in windows] == [(0, 65535, 6)] * 2
    assert all(document.bytes.strides == (0,) for document in documents)


# --- accuracies


def test_wilson_intervals_by_hand_and_by_scipy():
    assert wilson_interval(0.8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    for right, count in ((0, 7), (7, 7), (1, 50), (33, 50), (1, 1)):
        expected = binomtest(right, count).proportion_ci(method="wilson")
        assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_accuracies_by_hand():
    questions = retrieval_prompts(TOKENIZER, ["multi-key", "passkey"], [600], [0.0, 1.0], 2)
    runs = [np.array([1, 1, 0, 1, 0, 0, 0, 0], bool), np.array([0, 1, 0, 0, 0, 0, 0, 1], bool)]
    tasks = summarize_retrieval(questions, runs)
    assert list(tasks) == ["multi-key", "passkey"]
    assert tasks["multi-key"]["cells"] == [
        {"length": 600, "depth": 0.0, "trials": 2, "accuracy": 0.75, "runs": [1.0, 0.5]},
        {"length": 600, "depth": 1.0, "trials": 2, "accuracy": 0.25, "runs": [0.5, 0.0]},
    ]
    (row,) = tasks["multi-key"]["lengths"]
    assert row == {
        "length": 600,
        "questions": 4,
        "accuracy": 0.5,
        "interval": wilson_interval(0.5, 4),
        "runs": [0.75, 0.25],
    }
    (row,) = accuracy_by_length(tasks["passkey"]["cells"])
    assert (row["accuracy"], row["runs"]) == (0.125, [0.0, 0.25])


@pytest.fixture(scope="session")
def checkpoint(merging, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    tiny_model("qwen3", vocab_size=len(merging), bos_token_id=None).save_pretrained(folder / "arm")
    merging.save_pretrained(folder / "arm")
    (folder / "story.txt").write_text(STORY)
    return folder


def evaluate(folder, monkeypatch, *settings):
    settings = ("lengths=[32]", "targets=64", "targets_per_window=16", *settings)
    overrides = [part for setting in settings for part in ("--set", setting)]
    words = [folder / "arm", "--text", "story.txt", "--data_dir", folder, "--output_dir", folder / "out", *overrides]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    main()


def test_the_recipe_reports_every_task(checkpoint, monkeypatch):
    settings = ("passkey_lengths=[400, 500]", "passkey_depths=[0.0, 1.0]", "passkey_trials=2")
    tasks = f"retrieval_tasks=[{', '.join(TASKS)}]"
    evaluate(checkpoint, monkeypatch, *settings, tasks, "retrieval_text=story.txt")
    results = json.loads((checkpoint / "out/results.json").read_text())
    assert results["protocol"]["retrieval"] == {"answered": "token by token", "text": "story.txt"}
    arm = results["arms"]["arm"]
    assert list(arm["retrieval"]) == list(TASKS)
    assert arm["passkeys"] == arm["retrieval"]["passkey"]["cells"]
    with (checkpoint / "out/retrieval.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["length"]) for row in rows] == [
        (task, length) for task in TASKS for length in ("400", "500")
    ]
    for row in rows:
        interval = binomtest(round(4 * float(row["accuracy"])), 4).proportion_ci(method="wilson")
        assert (float(row["low"]), float(row["high"])) == pytest.approx((interval.low, interval.high), abs=1e-12)
    report = (checkpoint / "out/report.md").read_text()
    for task, name in zip(TASKS, ("passkeys", "multi-key", "variable-tracking"), strict=True):
        assert f"## Retrieval, {task}: answers that are right (%), by length\n\n4 questions per length" in report
        assert f"## Retrieval, {task}: answers that are right (%), by depth and length\n\n2 questions" in report
        assert (checkpoint / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
        with (checkpoint / f"out/{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 4
    assert "| arm | 0 [0, 49] |" in report  # Wilson's upper end of none in four: 3.8415 / (4 + 3.8415)
    assert "in `story.txt`" in report


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "retrieval_text=novel.txt",
            "retrieval_text is 'novel.txt'; name one of the held-out texts, story.txt, or null",
        ),
        ("retrieval_tasks=[needles]", "the retrieval tasks are ['needles']; name some of passkey, multi-key"),
    ],
)
def test_the_recipe_refuses_what_it_does_not_know(checkpoint, monkeypatch, capsys, setting, message):
    with pytest.raises(SystemExit):
        evaluate(checkpoint, monkeypatch, "passkey_lengths=[400]", setting)
    assert message in capsys.readouterr().err
