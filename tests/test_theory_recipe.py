"""The convergence recipe as it is started, and what it captures."""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = "recipes/configs/convergence.yaml"


def launch(*arguments, launcher=("-m", "accelerate.commands.launch")):
    command = [sys.executable, *launcher, "recipes/convergence.py", "--config", CONFIG, *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_it_measures_every_head_and_writes_csv_json_and_plots(tmp_path):
    settings = ["--set", "length=64", "--set", "samples=[1,64]", "--set", "heads=[0,3]", "--set", "layers=[1]"]
    done = launch("--output_dir", tmp_path, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "convergence.csv",
        "convergence.json",
        "bias_spectral.png",
        "output_frobenius.png",
    }
    content = json.loads((tmp_path / "convergence.json").read_text())
    rows = list(csv.DictReader((tmp_path / "convergence.csv").open()))
    # For 2 heads: fixed blocks; and for 2 samplers, 2 s, 2 seeds: both estimators and windowed ALiBi.
    assert len(rows) == len(content["rows"]) == 2 * (1 + 2 * 2 * 2 * 3)
    assert {(row["layer"], row["head"]) for row in rows} == {("1", "0"), ("1", "3")}
    for sampler in ("iid", "staggered"):
        for name in ("bias_spectral", "output_frobenius"):
            curve = content["means"][name][f"pooled {sampler}"]
            assert curve["64"] < 0.4 * curve["1"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "configs").glob("convergence*.yaml")), ids=lambda p: p.stem
)
def test_every_config_that_ships_is_valid(path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import convergence

    arguments = argparse.Namespace(config=str(path), output_dir=None, set=None)
    settings = convergence.read_settings(arguments)
    assert settings.samples
    assert settings.output_dir


def test_wrong_settings_end_with_a_message(tmp_path):
    done = launch("--output_dir", tmp_path, "--set", "samplers=[halton]", launcher=())
    assert done.returncode != 0
    assert "choose from iid, staggered" in done.stderr


@pytest.mark.parametrize("rope", ["keep", "drop"])
def test_what_is_measured_is_what_attention_sees(rope, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import convergence

    settings = convergence.ConvergenceSettings("", "tiny-qwen3", 40, [1], ["austen-emma.txt"], rope=rope, layers=[0])
    model, (tokens,) = convergence.load(settings, torch.device("cpu"))
    seen = []
    monkeypatch.setattr(
        convergence, "measure_layer", lambda layer, q, k, v, *rest: seen.append((layer, q, k, v)) or []
    )
    convergence.measure_input(model, tokens, settings, type("Quiet", (), {"print": lambda self, text: None})())
    ((layer, query, key, value),) = seen
    assert layer == 0
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
    plain = attention.q_norm(attention.q_proj(hidden).view(1, 40, 4, 8)).transpose(1, 2)
    assert torch.allclose(query, plain, atol=1e-6) == (rope == "drop")
    torch.testing.assert_close(query.norm(dim=-1), plain.norm(dim=-1))  # a rotation keeps lengths
    torch.testing.assert_close(query[:, :, 0], plain[:, :, 0])  # and position 0
    torch.testing.assert_close(value, attention.v_proj(hidden).view(1, 40, 2, 8).transpose(1, 2))
    assert key.shape == (1, 2, 40, 8)
