"""``hf-poslsh plan``, ``draw`` and ``demo`` against the library and by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import data_of, error_of, run
from transformers import LlamaConfig

from hf_poslsh import PositionalHash, alibi_slopes, theory
from hf_poslsh.cli import demo as demo_command

ROOT = Path(__file__).parent.parent


def test_plan_is_what_theory_and_info_say(host, patched):
    result = data_of("plan", patched, "--length", 300, "--samples", 6, "--samples", 16, "--delta", 0.05)
    small, large = result["plans"]
    assert (small["num_samples"], large["num_samples"]) == (6, 16)
    there = data_of("info", patched, "--length", 300)
    assert small["cache_bytes"] == there["cache_bytes"]
    assert small["flops"] == there["flops"]
    assert [head["windows"] for head in small["heads"]] == [[window] for window in there["layers"][1]["windows"]]
    assert small["time"] == "linear in 4 of 8 heads"  # layer 0 is not patched
    for plan in (small, large):
        head, samples = plan["heads"][0], plan["num_samples"]
        variance = max(theory.entry_variance(d, 8.0, samples).item() for d in range(1, 60))
        assert head["rms_error"] == pytest.approx(variance**0.5, rel=1e-2)
        assert theory.max_norm_tail(head["max_error"], 300, 8.0, samples, "staggered") <= 0.05
        assert theory.max_norm_tail(head["max_error"] * 0.99, 300, 8.0, samples, "staggered") > 0.05
        assert head["likely_window"] == theory.widest_bin(8.0, samples, 0.05)
    assert large["heads"][0]["rms_error"] < small["heads"][0]["rms_error"]
    by_slopes = data_of("plan", host, "--length", 60, "--samples", 6)["plans"][0]
    assert [head["sigma"] for head in by_slopes["heads"]] == (1 / alibi_slopes(4)).tolist()
    assert by_slopes["time"] == "linear in 2 of 8 heads"  # sigma 16, 64 and 256 see all of 60 tokens
    text = run("plan", host, "--length", 60, "--samples", 6, "--set", "sigma=4").stdout
    assert re.search(r"\n6 +0\.\d+ .* linear\n", text)
    assert "quadratic" in run("plan", host, "--length", 60, "--samples", 6, "--set", "sigma=400").stdout


def test_plan_refuses(host, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    assert "LlamaConfig; supported are" in error_of("plan", tmp_path, "--length", 9)
    assert "draws no samples" in error_of("plan", host, "--length", 9, "--set", "bias=alibi")
    assert "delta is 2" in error_of("plan", host, "--length", 9, "--delta", "2")
    assert "--length" in error_of("plan", host)


def test_draw_draws_the_masks_of_the_hashes(patched, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    result = data_of(
        "draw", tmp_path / "a.png", "--sigma", 9, "--samples", 7, "--seed", 3, "--sampler", "iid", "--heads", 2
    )
    hashes = PositionalHash.sample([9.0, 9.0], 7, seed=3, sampler="iid")
    error = hashes.mask_mean(128)[0] - np.exp(-np.abs(np.subtract.outer(np.arange(128), np.arange(128))) / 9)
    assert result["rms_error"] == pytest.approx(np.sqrt((error**2).mean()))
    assert result["windows"] == [[reach] for reach in hashes.reach]
    picture = imread(tmp_path / "a.png")
    assert picture.shape[0] > 600
    assert picture.std() > 0.1
    result = data_of("draw", tmp_path / "b.png", patched, "--layer", 1, "--head", 2)
    assert (result["layer"], result["head"], result["sigma"]) == (1, 2, 8.0)
    assert result["windows"] == [[reach] for reach in PositionalHash.sample([8.0] * 4, 6, layer=1).reach]
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jpg"], "choose one of .png"),
        (["none/a.png"], "there is no folder none"),
        (["a.png", "--length", "1"], "length is 1"),
        (["a.png", "--head", "8"], "heads 0 to 7"),
        (["a.png", "--sigma", "wide"], "sigma is 'wide'"),
        (["a.png", "{patched}"], "layer is 0; patched are the layers 1"),
        (["a.png", "{patched}", "--seed", "3"], "seed=3: with a checkpoint"),
        (["a.png", "{host}"], "is not patched"),
    ],
)
def test_draw_refuses(host, patched, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of("draw", *(argument.format(host=host, patched=patched) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_draw_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'hf-poslsh[plots]'" in error_of("draw", tmp_path / "a.png")


def test_demo_measures(monkeypatch):
    result = demo_command.run_demo((64, 96), heads=2, head_dim=8)
    differences = result["largest_difference"]
    assert differences["banded_and_reference"] < 1e-4 < 0.1 < differences["patched_and_original"]
    assert differences["unpatched_and_original"] == 0
    hashes = [PositionalHash.sample([16.0] * 4, 8, layer=layer) for layer in range(2)]
    assert result["cache_tokens"] == {"original": [600] * 2, "patched": [int(h.reach.max()) for h in hashes]}
    assert result["cache_bytes"]["original"] == 2 * 600 * 2 * 2 * 8 * 4
    errors = [row["relative_error"] for row in result["convergence"]]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.03
    assert [row["tokens"] for row in result["seconds"]] == [64, 96]
    monkeypatch.setattr(demo_command, "run_demo", lambda: result)
    assert data_of("demo") == json.loads(json.dumps(result))
    assert "The KV cache stops growing. After 600 tokens it holds" in run("demo").stdout


def test_demo_trains_where_the_recipes_are(tmp_path, monkeypatch):
    calls = []

    def record(command, cwd, check):
        calls.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(demo_command.subprocess, "run", record)
    monkeypatch.chdir(ROOT)
    run("demo", "--train", code=3)
    config = "recipes/configs/demo.yaml"
    assert calls == [(["-m", "accelerate.commands.launch", "recipes/train.py", "--config", config], ROOT)]
    assert (ROOT / config).is_file()
    assert "leave out --json" in error_of("demo", "--train", "--json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_command.hf_poslsh, "__file__", str(tmp_path / "hf_poslsh/__init__.py"))
    assert "in a copy of the repository" in error_of("demo", "--train")
    assert len(calls) == 1
