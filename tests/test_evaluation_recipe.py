"""recipes/evaluate.py: several checkpoints and seeds in one call, on any number of processes."""

import csv
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from evaluate import main
from experiment.corpus import train_tokenizer
from experiment.evaluating import evaluate_checkpoint
from experiment.settings import EvaluationSettings
from experiment.sources import Text, read_texts
from rich.console import Console

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.testing import tiny_model

ROOT = Path(__file__).parent.parent
TEXT = "austen-northanger-abbey.txt"
REQUEST = {"lengths": [64, 100], "targets": 2560, "targets_per_window": 32}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Two arms by two seeds of tiny models with random weights, as recipes/train.py leaves them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    text = read_texts([TEXT], None)[0]
    tokenizer = train_tokenizer([text], 300)
    paths = []
    for seed in range(2):
        for arm in ("plsh", "rope"):
            model = tiny_model("qwen3", seed=seed, vocab_size=300, max_position_embeddings=2048, bos_token_id=None)
            method = {"num_samples": 4, "sigma": 16.0, "rope": "drop"} if arm == "plsh" else None
            if method is not None:
                patch_model(model, PosLSHConfig(**method))
            path = folder / f"seed{seed}" / arm
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            held_out = [{"name": TEXT, "sha256": text.sha256}]
            recipe = {"arm": arm, "seed": seed, "poslsh": method, "evaluation": REQUEST, "held_out": held_out}
            (path / "recipe.json").write_text(json.dumps(recipe))
            paths.append(path)
        (folder / f"seed{seed}/settings.json").write_text('{"training": {"length": 64}}')
    return paths


@pytest.fixture(scope="session")
def report(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    settings = ["--set", "position_length=256", "--set", "position_passes=16"]
    evaluate(*checkpoints, "--output_dir", folder, "--reference", "plsh", "--reference", "rope", *settings)
    return folder


def evaluate(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
        main()


def test_arms_are_compared_over_their_seeds(report):
    results = json.loads((report / "results.json").read_text())
    assert results["protocol"]["name"] == "same-targets"
    assert results["protocol"]["tokens_scored"] == 2560
    assert results["protocol"]["begins_with"] is None
    assert results["protocol"]["texts"][0]["tokens_scored"] == 2560
    assert results["protocol"]["texts"][0]["bytes"] == len(read_texts([TEXT], None)[0].content.encode())
    assert results["settings"]["evaluation"]["lengths"] == [64, 100]
    assert {"torch", "transformers", "hf_poslsh"} <= set(results["versions"])
    assert list(results["arms"]) == ["plsh", "rope"]
    for arm, content in results["arms"].items():
        assert content["seeds"] == [0, 1]
        assert (content["poslsh"] is None) == (arm == "rope")
        summary = content["lengths"]["100"]
        values = summary["runs"]["loss"]
        assert summary["loss"] == pytest.approx(np.mean(values))
        assert summary["runs_std"]["loss"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert summary["intervals"]["resampled"] == "blocks of 256 targets"
        low, high = summary["intervals"]["perplexity"]
        assert low < summary["perplexity"] < high
        assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
        assert [(bucket["from"], bucket["to"]) for bucket in content["positions"]][-1] == (192, 256)
        assert sum(bucket["tokens_scored"] for bucket in content["positions"]) == 16 * 256
    losses = {arm: content["lengths"]["100"]["loss"] for arm, content in results["arms"].items()}
    differences = results["differences"]
    assert {arm: list(others) for arm, others in differences.items()} == {"plsh": ["rope"], "rope": ["plsh"]}
    assert differences["plsh"]["rope"]["100"]["loss"] == pytest.approx(losses["rope"] - losses["plsh"])
    assert differences["rope"]["plsh"]["100"]["loss"] == pytest.approx(losses["plsh"] - losses["rope"])


def test_the_report_has_tables_plots_and_every_score(report, checkpoints):
    results = json.loads((report / "results.json").read_text())
    with (report / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    (row,) = [r for r in rows if (r["arm"], r["length"], r["measure"]) == ("rope", "64", "bits_per_byte")]
    assert float(row["value"]) == results["arms"]["rope"]["lengths"]["64"]["bits_per_byte"]
    assert (report / "positions.csv").exists()
    assert "## Loss minus that of plsh" in (report / "report.md").read_text()
    for name in ("perplexity.png", "positions.png"):
        assert (report / name).read_bytes().startswith(b"\x89PNG")
    kept = np.load(report / "scores/plsh-seed1.npz")
    assert kept["64/nll"].mean() == pytest.approx(results["arms"]["plsh"]["lengths"]["64"]["runs"]["loss"][1])


def test_scores_are_those_of_the_model_itself(report, checkpoints):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoints[0])
    ids = torch.tensor(
        AutoTokenizer.from_pretrained(checkpoints[0])(read_texts([TEXT], None)[0].content)["input_ids"]
    )
    kept = np.load(report / "scores/plsh-seed0.npz")
    for index in (0, 31, 32, 2000):  # window of 100 tokens that ends with the 32 targets
        last = int(kept["100/target"][index // 32 * 32 + 31])
        window = ids[last - 100 : last]
        logits = model(window[None]).logits[0].double()
        target = int(kept["100/target"][index])
        nll = -torch.log_softmax(logits[target - last - 1], -1)[ids[target]]
        assert kept["100/nll"][index] == pytest.approx(nll.item(), rel=1e-5)


PROTOCOLS = {
    "same-targets": {"targets": 640, "targets_per_window": 32},
    "sliding-window": {"stride": 50},
    "non-overlapping": {"position_length": 300, "position_passes": 3},
    "by one process": {
        **{"protocol": "same-targets", "targets": 640, "targets_per_window": 32},
        **{"device_map": "auto", "passkey_lengths": [200], "passkey_trials": 2},
    },
}
TWO_PROCESSES = """
import json, sys
sys.path[:0] = ["recipes", "tests"]
from experiment.console import start_run
from test_evaluation_recipe import every_protocol

accelerator, console = start_run()
results = every_protocol(accelerator, console, *sys.argv[1:3])
if accelerator.is_main_process:
    json.dump([accelerator.num_processes, results], open(sys.argv[3], "w"))
accelerator.end_training()
"""


def every_protocol(accelerator, console, checkpoint, text):
    texts = [Text("t", Path(text).read_text())]
    return {
        name: evaluate_checkpoint(
            accelerator,
            console,
            "t",
            checkpoint,
            texts,
            EvaluationSettings(**{"lengths": [64, 100], "protocol": name, "batch_tokens": 700, **fields}),
        )
        for name, fields in PROTOCOLS.items()
    }


@pytest.mark.slow
def test_two_processes_give_exactly_the_numbers_of_one(checkpoints, tmp_path):
    """Slow for the start of two processes; test_recipes_run.py compares two with one by default, less exactly."""
    text, output = tmp_path / "text.txt", tmp_path / "two.json"
    text.write_text(read_texts([TEXT], None)[0].content[:6000])
    one = every_protocol(Accelerator(cpu=True), Console(quiet=True), checkpoints[0], text)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        # As many in every process as here: how a matrix product is split over threads may change its last bit.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, checkpoints[0], text, output],
            cwd=ROOT,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    for process in running:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    processes, two = json.loads(output.read_text())
    assert processes == 2
    assert list(two) == list(PROTOCOLS)
    for name, evaluation in one.items():
        assert evaluation["protocol"]["name"] == PROTOCOLS[name].get("protocol", name)
        assert json.loads(json.dumps(evaluation)) == two[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda paths: (paths[0], paths[0]), "are all arm 'plsh', with the seeds [0, 0]"),
        (lambda paths: (*paths, "--reference", "ropee"), "--reference is 'ropee'"),
        (lambda paths: (*paths, "--set", "protocol=strided"), "protocol is 'strided'; choose one of same-targets"),
        (lambda paths: (*paths, "--set", "dtype=int8"), "dtype is 'int8'; choose one of auto, float32"),
        (lambda paths: (paths[0].parent, "--set", "lengths=[8]"), "records no held-out text"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(checkpoints, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        evaluate(*arguments(checkpoints))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
