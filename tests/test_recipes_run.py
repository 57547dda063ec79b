"""The recipes as they are started: accelerate launch in a subprocess, on a config of seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiment.publishing import publish
from experiment.settings import Settings, build
from hub_server import Hub, connected
from rich.console import Console
from test_evaluation_recipe import evaluate

ROOT = Path(__file__).parent.parent

SMOKE = "recipes/configs/smoke.yaml"
TWO_PROCESSES = ["--config_file", "recipes/accelerate/cpu_2_processes.yaml", "--main_process_port", "0"]


def python(*arguments, timeout=300, env=None):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def launch(*arguments):
    return succeed("-m", "accelerate.commands.launch", *arguments)


def succeed(*arguments):
    done = python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def strictly_parsed(path):
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture(scope="session")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes") / "smoke"
    done = launch("recipes/train.py", "--config", SMOKE, "--output_dir", folder)
    assert "train plsh  10/10  loss" in done.stdout
    assert "tokens/s" in done.stdout
    return folder


def test_it_leaves_checkpoints_results_plot_and_card_and_nothing_else(output):
    assert sorted(path.name for path in output.iterdir()) == [
        "README.md",
        "perplexity.png",
        "plsh",
        "report.md",
        "results.csv",
        "results.json",
        "rope",
        "settings.json",
        "tokenizer",
    ]
    for arm in ("plsh", "rope"):
        names = {path.name for path in (output / arm).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "recipe.json", "evaluation.json"} <= names
    assert (output / "perplexity.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_complete_and_consistent(output):
    results = strictly_parsed(output / "results.json")
    assert set(results) == {"name", "seed", "versions", "protocol", "arms", "settings"}
    assert {"python", "hf_poslsh", "torch", "transformers", "accelerate", "device"} <= set(results["versions"])
    assert results["protocol"]["name"] == "same-targets"
    assert results["protocol"]["tokens_scored"] == 320
    assert results["protocol"]["texts"][0]["name"] == "austen-northanger-abbey.txt"
    assert results["settings"]["evaluation"]["lengths"] == [64, 100, 128]
    assert list(results["arms"]) == ["plsh", "rope"]
    assert results["arms"]["rope"]["poslsh"] is None
    for arm in results["arms"].values():
        assert arm["training"]["tokens"] == 10 * 4 * 64
        assert list(arm["lengths"]) == ["64", "100", "128"]
        for length, summary in arm["lengths"].items():
            assert summary["tokens_scored"] == 320
            assert summary["context"] == [int(length) - 31, int(length)]
            assert 100 < summary["perplexity"] < 512
            assert 0 <= summary["top_1_accuracy"] <= summary["top_10_accuracy"] <= 1
    assert results["arms"]["plsh"]["lengths"] != results["arms"]["rope"]["lengths"]


def test_the_card_shows_the_numbers_of_the_results(output):
    card = (output / "README.md").read_text()
    for name, arm in strictly_parsed(output / "results.json")["arms"].items():
        row = " | ".join(f"{summary['perplexity']:.1f}" for summary in arm["lengths"].values())
        assert f"| {name} | {row} |" in card


def test_evaluating_checkpoints_again_gives_the_same_numbers(output, tmp_path):
    launch("recipes/evaluate.py", output / "plsh", output / "rope", "--output_dir", tmp_path / "again")
    again, results = strictly_parsed(tmp_path / "again/results.json"), strictly_parsed(output / "results.json")
    assert again["protocol"] == results["protocol"]
    assert list(again["arms"]) == ["plsh", "rope"]
    for arm, content in again["arms"].items():
        assert content["lengths"] == results["arms"][arm]["lengths"]


def test_two_processes_train_and_evaluate_as_one_does(output, tmp_path):
    folder = tmp_path / "two"
    launch(*TWO_PROCESSES, "recipes/train.py", "--config", SMOKE, "--output_dir", folder)
    one, two = (strictly_parsed(path / "results.json") for path in (output, folder))
    assert two["protocol"] == one["protocol"]
    for name, arm in two["arms"].items():
        assert arm["training"]["processes"] == 2
        assert arm["training"]["tokens"] == one["arms"][name]["training"]["tokens"]
        assert arm["training"]["final_loss"] == pytest.approx(one["arms"][name]["training"]["final_loss"], rel=1e-4)
        for length, summary in arm["lengths"].items():
            assert summary["loss"] == pytest.approx(one["arms"][name]["lengths"][length]["loss"], rel=1e-4)


def test_finished_arms_are_skipped_and_missing_ones_are_made(output, tmp_path):
    folder = tmp_path / "partly"
    shutil.copytree(output, folder)
    for path in (folder / "rope", folder / "plsh/evaluation.json", folder / "results.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = succeed("recipes/train.py", "--config", SMOKE, "--output_dir", folder, "--resume")
    assert "train rope" in done.stdout
    assert "train plsh" not in done.stdout
    before, after = (strictly_parsed(path / "results.json")["arms"] for path in (output, folder))
    assert after["plsh"] == before["plsh"]
    assert after["rope"]["lengths"] == before["rope"]["lengths"]


def test_a_launched_run_that_is_terminated_continues_to_the_same_end(tmp_path):
    """SIGTERM to the launcher, in the middle of an arm that has kept a checkpoint; then --resume."""
    changes = (
        "training.steps=300",
        "training.validate_every=50",
        "data.validation=[sotu-1912-taft.txt]",
        "arms=[{name: plsh, poslsh: {sigma: 16}}]",
    )
    overrides = [text for change in changes for text in ("--set", change)]
    command = ["-m", "accelerate.commands.launch", "--quiet", "recipes/train.py", "--config", SMOKE, *overrides]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    succeed(*command, "--output_dir", whole)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *command, "--output_dir", stopped],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        for line in launcher.stdout:
            if "after step 50" in line:
                launcher.terminate()
                break
        rest = launcher.stdout.read()  # until the last process that writes there has ended
    assert "--resume continues from there" in rest
    (state,) = (stopped / "state/plsh").glob("[0-9]*")
    assert 50 <= int(state.name) < 300
    assert (stopped / "state/plsh/best/kept.json").exists()
    done = succeed(*command, "--output_dir", stopped, "--resume")
    assert f"continuing after step {state.name}" in done.stdout
    one, two = (strictly_parsed(folder / "results.json")["arms"]["plsh"] for folder in (whole, stopped))
    assert two["lengths"] == one["lengths"]
    for name in ("kept", "final_loss", "tokens", "steps"):
        assert two["training"][name] == one["training"][name]


@pytest.fixture(scope="session")
def adapted(output, tmp_path_factory):
    """A fine-tune of an arm of the smoke test: as it is, and with an adapter on a patched model."""
    folder = tmp_path_factory.mktemp("recipes") / "adapted"
    changes = (
        f"model={{pretrained: {output / 'rope'}}}",
        "peft={r: 2, target_modules: [q_proj, v_proj]}",
        "data.validation=[sotu-1912-taft.txt]",
        "training.validate_every=4",
        "arms=[{name: as-is, train: false, poslsh: null}, {name: plsh, poslsh: {sigma: 16, sink_tokens: 1}}]",
    )
    overrides = [text for change in changes for text in ("--set", change)]
    succeed("recipes/train.py", "--config", SMOKE, "--output_dir", folder, *overrides)
    return folder


def test_a_pretrained_model_is_evaluated_as_it_is_and_adapted(output, adapted):
    results = strictly_parsed(adapted / "results.json")["arms"]
    assert results["as-is"]["lengths"] == strictly_parsed(output / "results.json")["arms"]["rope"]["lengths"]
    assert results["as-is"]["training"]["steps"] == 0
    assert results["plsh"]["lengths"] != results["as-is"]["lengths"]
    training = results["plsh"]["training"]
    assert training["kept"]["step"] in (4, 8, 10)
    assert 0 < training["trained_parameters"] < training["parameters"] / 10
    assert (adapted / "plsh" / "adapter_model.safetensors").exists()
    for arm in ("as-is", "plsh"):
        assert not (adapted / arm / "model.safetensors").exists()
    card = (adapted / "README.md").read_text()
    assert "not trained" in card
    assert "LoRA with `r=2`" in card


@pytest.mark.parametrize("device_map", ["null", "auto"])
def test_evaluating_an_adapter_again_gives_the_same_numbers(adapted, tmp_path, device_map):
    evaluate(adapted / "plsh", "--output_dir", tmp_path / "again", "--set", f"device_map={device_map}")
    results = strictly_parsed(adapted / "results.json")["arms"]["plsh"]
    assert strictly_parsed(tmp_path / "again/results.json")["arms"]["plsh"]["lengths"] == results["lengths"]


def test_of_a_fine_tune_only_the_adapters_are_published(adapted, tmp_path):
    recipe = strictly_parsed(adapted / "plsh/recipe.json")
    settings = build(Settings, {**recipe["settings"], "card": {"base_model": "org/base"}}, "")
    with connected(tmp_path / "cache") as hub:
        console = Console(record=True, quiet=True)
        publish(console, adapted, settings, "user/tuned")
        assert set(hub.repos) == {"user/tuned-plsh"}
        config = json.loads(hub.files("user/tuned-plsh")["adapter_config.json"])
    assert config["base_model_name_or_path"].startswith("poslsh:org/base (patched")


def test_every_arm_is_published_with_the_results_of_all(output, tmp_path):
    folder = tmp_path / "published"
    shutil.copytree(output, folder)
    command = ("recipes/train.py", "--config", SMOKE, "--output_dir", folder, "--resume", "--push_to_hub")
    with Hub() as hub:
        hub.fail("POST", "/commit/", 500)
        failed = python(*command, "user/smoke", env=hub.environment(tmp_path))
        assert failed.returncode == 2
        assert "repeat the command with --resume to publish it" in failed.stderr
        hub.failures.clear()
        done = python(*command, "user/smoke", env=hub.environment(tmp_path))
        assert done.returncode == 0, done.stderr
        assert sorted(hub.repos) == ["user/smoke-plsh", "user/smoke-rope"]
        for arm in ("plsh", "rope"):
            assert f"{arm}: {hub.url}/user/smoke-{arm}/commit/" in done.stdout
            files = hub.files(f"user/smoke-{arm}")
            for name in ("results.json", "results.csv", "report.md", "perplexity.png"):
                assert files[name] == (folder / name).read_bytes()
            for name in ("model.safetensors", "tokenizer.json", "recipe.json", "evaluation.json"):
                assert files[name] == (folder / arm / name).read_bytes()
            card = files["README.md"].decode()
            assert "license: apache-2.0" in card
            for other, content in strictly_parsed(folder / "results.json")["arms"].items():
                row = " | ".join(f"{summary['perplexity']:.1f}" for summary in content["lengths"].values())
                assert f"| {other} | {row} |" in card
        assert "modeling_poslsh.py" in hub.files("user/smoke-plsh")
        assert "base_model" not in card
        assert "poslsh" not in json.loads(hub.files("user/smoke-rope")["config.json"])["model_type"]


def test_a_bad_config_ends_with_one_clear_line_before_any_training(tmp_path):
    bad = "arms=[{name: a, poslsh: null}, {name: b, poslsh: {bias: alibbi}}]"
    done = python("recipes/train.py", "--config", SMOKE, "--output_dir", tmp_path / "out", "--set", bad)
    assert done.returncode == 2
    assert "error: arm 'b': bias is 'alibbi'" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "train" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_bad_config_fails_under_the_launcher_too(tmp_path):
    bad = ("--output_dir", tmp_path / "out", "--set", "speed=3")
    done = python("-m", "accelerate.commands.launch", "--quiet", "recipes/train.py", "--config", SMOKE, *bad)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: unknown keys in the config: speed;")
    assert "Traceback" not in done.stderr


def test_evaluation_on_another_text_must_be_asked_for(output, tmp_path, capsys):
    (tmp_path / "austen-northanger-abbey.txt").write_text("It was a dark and stormy night. " * 200)
    with pytest.raises(SystemExit) as stopped:
        evaluate(output / "rope", "--data_dir", tmp_path)
    assert stopped.value.code == 2
    assert "is not the text this checkpoint was evaluated on" in capsys.readouterr().err
    evaluate(
        output / "rope",
        *("--data_dir", tmp_path, "--text", "austen-northanger-abbey.txt"),
        *("--set", "lengths=[32,48]", "--set", "targets_per_window=16", "--set", "targets=64"),
        *("--output_dir", tmp_path / "other"),
    )
    other = strictly_parsed(tmp_path / "other/results.json")
    assert list(other["arms"]["rope"]["lengths"]) == ["32", "48"]
    assert other["protocol"]["tokens_scored"] == 64


UNEVEN = """
import sys
sys.path.insert(0, "recipes")
from experiment.arms import build_model, model_config
from experiment.console import start_run
from experiment.settings import TrainingSettings, load_settings
from experiment.training import train
from pathlib import Path
import torch

accelerator, console = start_run()
settings = load_settings("recipes/configs/smoke.yaml")
model = build_model(model_config(settings.model, 512, 0), settings, settings.arms[0])
random = torch.Generator().manual_seed(0)
items = []
for index in range(12):
    ids = torch.randint(0, 512, (24,), generator=random)
    labels = ids.clone()
    labels[: (20 if index % 4 < 2 else 1)] = -100
    items.append({"input_ids": ids, "labels": labels})
# Plain steps without Adam's division keep the size of a gradient visible.
torch.optim.AdamW = lambda parameters, lr, weight_decay: torch.optim.SGD(parameters, lr=lr)
training = TrainingSettings(steps=3, length=24, batch_size=4, learning_rate=0.5, max_grad_norm=1e9)
result = Path(sys.argv[1])

def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.pt")

report = train(accelerator, console, "t", model, items, training, result.with_suffix(".states"), save)
if accelerator.is_main_process:
    state = torch.load(result.with_suffix(".states") / "best" / "weights.pt")
    torch.save([accelerator.num_processes, report["final_loss"], state], result)
"""


def test_the_loss_weights_tokens_not_processes(tmp_path):
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    succeed(script, tmp_path / "one.pt")
    launch(*TWO_PROCESSES, script, tmp_path / "two.pt")
    (processes_1, loss_1, state_1), (processes_2, loss_2, state_2) = (
        torch.load(tmp_path / name) for name in ("one.pt", "two.pt")
    )
    assert (processes_1, processes_2) == (1, 2)
    assert loss_2 == pytest.approx(loss_1, rel=1e-5)
    for name, tensor in state_1.items():
        assert torch.allclose(tensor, state_2[name], atol=1e-5), name
