"""Passkey retrieval: prompts exact in tokens; models that know the answer, do not, or look near only."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluate import main

from hf_poslsh.evaluation import (
    answered_by_generation,
    answered_by_score,
    passkey_prompt,
    passkey_prompts,
    question_windows,
    retrieval_accuracy,
    score_windows,
)
from hf_poslsh.testing import tiny_model

SIZE = 260


class Reader(torch.nn.Module):
    """Answers with what stood after the last mention of "key is" within reach, or with nothing of use."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, reach):
        super().__init__()
        self.head = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight.data = torch.eye(SIZE)
        self.cue = tokenizer("key is", add_special_tokens=False)["input_ids"]
        self.reach = reach

    def get_output_embeddings(self):
        return self.head

    def next_token(self, ids):
        ids, cue = ids.tolist(), self.cue
        places = [i for i in range(len(ids) - len(cue) + 1) if ids[i : i + len(cue)] == cue]
        if len(places) < 2 or places[-1] - places[-2] > self.reach:
            return 1
        return ids[places[-2] + len(ids) - places[-1]]  # as far after that mention as we are after this one

    def forward(self, input_ids, use_cache=False):
        hidden = torch.zeros(*input_ids.shape, SIZE)
        for row, ids in enumerate(input_ids):
            for place in range(max(0, len(ids) - 12), len(ids)):  # only answers are looked at
                hidden[row, place, self.next_token(ids[: place + 1])] = 1
        return SimpleNamespace(logits=self.head(hidden))

    def generate(self, prompt, max_new_tokens, **ignored):
        for _ in range(max_new_tokens):
            prompt = torch.cat([prompt, torch.tensor([[self.next_token(prompt[0])]])], 1)
        return prompt


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_prompts_are_exact_in_tokens(tokenizer, depth):
    passkey = passkey_prompt(tokenizer, "40312", 200, depth, filler=" abc")
    assert len(passkey.prompt) + len(passkey.answer) == passkey.length == 200
    text, statement, question = (
        tokenizer.decode(passkey.prompt),
        " The pass key is 40312.",
        " What is the pass key? The pass key is",
    )
    filler = 200 - 1 - len(statement) - len(question) - len(" 40312")
    before = round(depth * filler)
    repeated = (" abc" * 200)[:filler]
    assert text == "<s>" + repeated[:before] + statement + repeated[before:] + question
    assert tokenizer.decode(passkey.answer) == " 40312"


def test_the_key_is_stated_in_the_tokens_of_the_answer(tokenizer):
    passkey = passkey_prompt(tokenizer, "40312", 200, 0.5)
    prompt, answer = passkey.prompt.tolist(), passkey.answer.tolist()
    assert sum(prompt[i : i + len(answer)] == answer for i in range(len(prompt))) == 1


def test_keys_are_the_same_at_every_length_and_depth(tokenizer):
    passkeys = passkey_prompts(tokenizer, [150, 200], [0, 1], 3, seed=1)
    assert [(p.length, p.depth) for p in passkeys[::3]] == [(150, 0), (150, 1), (200, 0), (200, 1)]
    keys = [p.key for p in passkeys]
    assert keys == keys[:3] * 4
    assert len(set(keys)) == 3
    assert all(len(key) == 5 for key in keys)
    assert keys != [p.key for p in passkey_prompts(tokenizer, [150, 200], [0, 1], 3, seed=2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((60, 0.5), "length is 60; .* needs at least 69"),
        ((200, 1.5), "depth is 1.5"),
        ((200, 0.5, ""), "filler has no"),
    ],
)
def test_impossible_prompts_are_refused(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        passkey_prompt(tokenizer, "40312", *arguments)
    with pytest.raises(ValueError, match="at least 1 trial"):
        passkey_prompts(tokenizer, [200], [0.5], 0)


# How far the statement of the key is from the question, in a prompt of 200 characters: about 177, 111, 45.
@pytest.mark.parametrize(("reach", "expected"), [(10_000, [1, 1, 1]), (0, [0, 0, 0]), (120, [0, 1, 1])])
def test_a_model_that_knows_is_told_from_one_that_does_not(tokenizer, reach, expected):
    passkeys = passkey_prompts(tokenizer, [200], [0.0, 0.5, 1.0], 4)
    model = Reader(tokenizer, reach)
    scores = score_windows(model, *question_windows(passkeys), batch_tokens=500)
    scored = answered_by_score(scores, len(passkeys))
    assert [cell["accuracy"] for cell in retrieval_accuracy(passkeys, [scored])] == expected
    assert np.array_equal(answered_by_generation(model, tokenizer, passkeys), scored)


def test_every_token_of_the_key_counts(tokenizer):
    passkeys = passkey_prompts(tokenizer, [200], [0.5], 2)
    scores = score_windows(Reader(tokenizer, 10_000), *question_windows(passkeys))
    scores.rank[len(passkeys[0].answer) - 1] = 1  # the last digit of the first key
    assert answered_by_score(scores, 2).tolist() == [False, True]


def test_accuracy_by_hand(tokenizer):
    passkeys = passkey_prompts(tokenizer, [150, 200], [0.5], 2)
    runs = [np.array([True, False, False, False]), np.array([True, True, False, True])]
    assert retrieval_accuracy(passkeys, runs) == [
        {"length": 150, "depth": 0.5, "trials": 2, "accuracy": 0.75, "runs": [0.5, 1.0]},
        {"length": 200, "depth": 0.5, "trials": 2, "accuracy": 0.25, "runs": [0.0, 0.5]},
    ]


def test_scoring_agrees_with_generation_of_a_real_model(tokenizer):
    """With random weights: an answer it would write, and keys that it would not."""
    model = tiny_model("qwen3", vocab_size=SIZE)
    passkeys = passkey_prompts(tokenizer, [120], [0.3], 3)
    prompt = torch.from_numpy(passkeys[0].prompt)[None]
    liked = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :].numpy()
    passkeys[0] = type(passkeys[0])(passkeys[0].prompt, liked, "", 120, 0.3)
    scores = score_windows(model, *question_windows(passkeys))
    assert answered_by_score(scores, 3).tolist() == [True, False, False]


@pytest.mark.parametrize("generate", [False, True], ids=["scored", "generated"])
def test_the_recipe_reports_passkeys(tokenizer, tmp_path, monkeypatch, generate):
    tiny_model("qwen3", vocab_size=SIZE).save_pretrained(tmp_path / "arm")
    tokenizer.save_pretrained(tmp_path / "arm")
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 20)
    settings = ("lengths=[32]", "targets=64", "targets_per_window=16", "passkey_lengths=[100, 120]")
    settings = (
        *settings,
        "passkey_depths=[0.0, 1.0]",
        "passkey_trials=2",
        f"passkey_generate={str(generate).lower()}",
    )
    overrides = [part for setting in settings for part in ("--set", setting)]
    words = [
        tmp_path / "arm",
        "--text",
        "text.txt",
        "--data_dir",
        tmp_path,
        "--output_dir",
        tmp_path / "out",
        *overrides,
    ]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    main()
    results = json.loads((tmp_path / "out/results.json").read_text())
    cells = results["arms"]["arm"]["passkeys"]
    assert [(c["length"], c["depth"], c["trials"]) for c in cells] == [
        (n, d, 2) for n in (100, 120) for d in (0.0, 1.0)
    ]
    assert results["protocol"]["begins_with"] == 0
    report = (tmp_path / "out/report.md").read_text()
    assert "answered " + ("in writing" if generate else "token by token") in report
    with (tmp_path / "out/passkeys.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert (tmp_path / "out/passkeys.png").read_bytes().startswith(b"\x89PNG")
