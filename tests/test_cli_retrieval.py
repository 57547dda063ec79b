"""``hf-poslsh retrieval-heads`` against the library, and the files that it writes."""

import json
import sys

import numpy as np
import pytest
import torch
from command_line import data_of, error_of, run
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_poslsh.cli import retrieval as command
from hf_poslsh.retrieval import RetrievalScores, heads_for_share, retrieval_scores
from hf_poslsh.testing import tiny_model

ARGUMENTS = ("--length", 200, "--prompts", 2, "--seed", 3, "--dtype", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """Folder of a stock checkpoint with a tokenizer; tests only read it."""
    folder = tmp_path_factory.mktemp("retrieval") / "qwen3"
    tiny_model("qwen3", vocab_size=260).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_command_says_what_the_library_does(checkpoint, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("A mill by the river. " * 8)
    (tmp_path / "b.txt").write_text("Snow lies on the hills. " * 8)
    texts = [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    scores = retrieval_scores(model, tokenizer, length=200, prompts=2, seed=3, texts=texts)
    files = ("--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt")
    result = data_of(
        "retrieval-heads", checkpoint, *ARGUMENTS, *files, "--share", 0.5, "--kind", "natural", "--output-dir",
        tmp_path / "new/heads",
    )  # fmt: skip
    assert {**scores.to_dict(), "settings": None} == {**result["scores"], "settings": None}
    assert [(head["layer"], head["head"], head["natural"]) for head in result["ranking"]] == scores.ranking("natural")
    assert result["full_heads"] == [list(heads) for heads in heads_for_share(scores, 0.5, "natural")]
    assert (result["chosen"], result["not_drawn"]) == (2, None)

    folder = tmp_path / "new/heads"
    assert sorted(map(str, folder.iterdir())) == sorted(result["files"])
    written = RetrievalScores.from_dict(json.loads((folder / "scores.json").read_text()))
    assert written.ranking() == scores.ranking()
    assert written.settings == result["scores"]["settings"]
    assert written.settings["texts"] == 2
    assert json.loads((folder / "poslsh.json").read_text()) == {"full_heads": result["full_heads"]}


def test_the_command_in_words(checkpoint):
    text = run("retrieval-heads", checkpoint, *ARGUMENTS).stdout
    scores = data_of("retrieval-heads", checkpoint, *ARGUMENTS)
    best = scores["ranking"][0]
    assert f"{checkpoint}: the 1 best of 4 KV heads by planted scores, in 1 of 2 layers" in text
    line = next(line for line in text.splitlines() if line.startswith("1 "))
    numbers = [f"{best[kind]:.3f}" for kind in ("planted", "natural")]
    assert line.split() == ["1", str(best["layer"]), str(best["head"]), *numbers]
    assert "2 prompts of 200 tokens each, float32" in text
    assert "files" not in text
    assert scores["files"] == []


def test_the_picture_shows_scores_and_the_chosen(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    scores = RetrievalScores(np.eye(4, 3), np.eye(4, 3)[::-1])
    command.draw_scores(scores, [[], [], [], []], tmp_path / "a.png")
    command.draw_scores(scores, [[0], [], [2], []], tmp_path / "b.png")
    plain, framed = (imread(tmp_path / name) for name in ("a.png", "b.png"))
    assert plain.shape == framed.shape
    assert plain.std() > 0.1
    orange = (np.abs(framed[..., :3] - [0xD5 / 255, 0x5E / 255, 0]) < 0.1).all(-1)
    assert orange.sum() > 100


def test_without_matplotlib_the_picture_is_missing_and_said_to_be(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = run("retrieval-heads", checkpoint, *ARGUMENTS, "--output-dir", tmp_path).stdout
    assert "heads.png was not drawn: pictures need matplotlib: pip install 'hf-poslsh[plots]'" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["poslsh.json", "scores.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{checkpoint}", "--share", "0"], "share is 0.0; it must be above 0"),
        (["{checkpoint}", "--share", "0.1"], "share is 0.1, which is less than one of the model's 4 KV heads"),
        (["{checkpoint}", "--length", "2048"], "cover 512 tokens"),
        (["{checkpoint}", "--length", "64"], "needs at least 69"),
        (["{checkpoint}", "--length", "200", "--text", "none.txt"], "none.txt"),
        (["{checkpoint}", "--kind", "best"], "natural"),
        (["{patched}"], "is patched, so that its heads no longer see what is far away; give the original"),
        (["{tmp}/adapter"], "is an adapter; give its base model"),
        (["{tmp}/llama"], "heads of a llama model; supported are MistralForCausalLM"),
        (["no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_the_command_refuses(checkpoint, patched, tmp_path, monkeypatch, arguments, message):
    LlamaConfig().save_pretrained(tmp_path / "llama")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(checkpoint)}))
    monkeypatch.chdir(tmp_path)
    places = {"checkpoint": checkpoint, "patched": patched, "tmp": tmp_path}
    assert message in error_of("retrieval-heads", *(argument.format(**places) for argument in arguments))
