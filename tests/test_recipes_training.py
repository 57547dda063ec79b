"""The training loop of the recipes: sums over passes, schedules, what is kept, stopping and resuming."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

from experiment.arms import adapt, build_model, model_config
from experiment.corpus import EvenSequences, Sequences
from experiment.settings import ModelSettings, TrainingSettings, load_settings
from experiment.training import latest_state, micro_batches, train

from hf_poslsh.testing import tiny_model

SMOKE = Path(__file__).parent.parent / "recipes" / "configs" / "smoke.yaml"


@pytest.fixture
def smoke():
    return load_settings(SMOKE)


@pytest.fixture
def accelerator():
    return new_accelerator()


def new_accelerator():
    return Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
    )


def documents_of(*lengths):
    """Documents in which every token is its own index."""
    return [np.arange(length) % 512 for length in lengths]


def run(smoke, states, settings, sequences=None, on_step=None, model=None):
    """Trains a model of the smoke test: what was kept, the report, and what the trackers got, by step."""
    accelerator, logged = new_accelerator(), {}

    def keep(values, step):
        logged[step] = {name.partition("/")[2]: value for name, value in values.items()}

    accelerator.trackers = [SimpleNamespace(name="dictionary", log=keep, finish=lambda: None)]
    model = model or build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[0])
    sequences = sequences or Sequences(documents_of(400), settings.length, settings.steps * settings.batch_size, 0)
    try:
        report = train(
            accelerator, Console(quiet=True), "t", model, sequences, settings, states, save, on_step=on_step
        )
        return torch.load(states / "best" / "weights.pt"), report, logged
    finally:
        accelerator.free_memory()
        run.logged = logged


# --- resuming within an arm


def test_an_interrupted_run_continues_as_if_it_had_not_been(smoke, tmp_path):
    settings = TrainingSettings(steps=10, length=16, batch_size=4, learning_rate=0.01, warmup_steps=2, save_every=4)

    whole, report, _ = run(smoke, tmp_path / "whole", settings)
    assert report["steps"] == 10
    assert report["tokens"] == 640
    assert report["kept"] == {"step": 10, "validation_loss": None}

    def interrupt(model, step):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(smoke, tmp_path / "states", settings, on_step=interrupt)
    assert latest_state(tmp_path / "states") == 4
    steps = []
    continued, report_again, _ = run(
        smoke, tmp_path / "states", settings, on_step=lambda model, step: steps.append(step)
    )
    assert steps == [4, 5, 6, 7, 8, 9]
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["8", "best"]
    assert report_again["final_loss"] == report["final_loss"]
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def save(model, folder):
    """What train() calls to keep a model."""
    folder.mkdir(parents=True)
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "weights.pt")


def test_the_model_with_the_lowest_validation_loss_is_kept(smoke, tmp_path, accelerator):
    """Half of the tokens for validation do not occur in training: the loss falls first, then rises."""
    random = np.random.default_rng(0)
    sequences = Sequences([random.integers(0, 40, 200)], length=16, count=40, seed=0)
    validation = EvenSequences([random.integers(0, 80, 200)], length=16, count=5)
    model = build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[1])
    settings = TrainingSettings(steps=10, length=16, batch_size=4, learning_rate=0.1, validate_every=1)
    losses = []

    def save_and_look(model, folder):
        save(model, folder)
        losses.append(loss_of(model))

    def loss_of(model):
        ids = torch.stack([item["input_ids"] for item in (validation[i] for i in range(5))])
        with torch.no_grad():
            logits = model.eval()(ids).logits[:, :-1]
        model.train()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()

    report = train(
        accelerator, Console(quiet=True), "t", model, sequences, settings, tmp_path, save_and_look, validation
    )
    assert losses == sorted(losses, reverse=True)
    assert loss_of(model) > losses[-1]
    assert 1 < report["kept"]["step"] < 10
    assert report["kept"]["validation_loss"] == pytest.approx(losses[-1], rel=1e-5)
    model.load_state_dict(torch.load(tmp_path / "best" / "weights.pt"))
    assert loss_of(model) == pytest.approx(losses[-1], rel=1e-6)


def test_training_stops_when_the_loss_is_not_finite(smoke, tmp_path, accelerator):
    model = build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[1])
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    sequences = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    settings = TrainingSettings(steps=2, length=8, batch_size=2, learning_rate=0.01)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        train(accelerator, Console(quiet=True), "t", model, sequences, settings, tmp_path, save)


# --- micro-batches


def uneven(count):
    """Sequences of which some have many targets and some have few."""
    random = torch.Generator().manual_seed(0)
    items = []
    for index in range(count):
        ids = torch.randint(0, 512, (24,), generator=random)
        labels = ids.clone()
        labels[: (20 if index % 4 < 2 else 1)] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_train_as_one_large_batch_does(smoke, tmp_path, monkeypatch, size):
    # Plain steps without Adam's division keep the size of a gradient visible.
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, lr, weight_decay: torch.optim.SGD(parameters, lr=lr))
    settings = TrainingSettings(steps=3, length=24, batch_size=4, learning_rate=0.5, max_grad_norm=1e9)
    whole, report, _ = run(smoke, tmp_path / "whole", settings, uneven(12))
    settings.micro_batch_size = size
    parts, report_of_parts, _ = run(smoke, tmp_path / "parts", settings, uneven(12))
    assert report_of_parts["final_loss"] == pytest.approx(report["final_loss"], rel=5e-5)
    initial = build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[0]).state_dict()
    assert any(not torch.allclose(initial[name], whole[name], atol=1e-3) for name in whole)
    for name, tensor in whole.items():
        assert torch.allclose(tensor, parts[name], atol=1e-5), name


def test_the_loss_is_the_mean_over_all_targets_of_the_step(smoke, tmp_path):
    items = uneven(4)
    model = build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[0])
    with torch.no_grad():
        logits = torch.stack([model(item["input_ids"][None]).logits[0, :-1] for item in items])
    labels = torch.stack([item["labels"][1:] for item in items])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    settings = TrainingSettings(steps=1, length=24, batch_size=4, learning_rate=0.0, micro_batch_size=1)
    assert run(smoke, tmp_path, settings, items)[1]["final_loss"] == pytest.approx(expected, rel=1e-6)


def test_batches_that_cannot_be_shared_out_are_refused():
    settings = TrainingSettings(steps=1, length=8, batch_size=12, learning_rate=0.1)
    assert micro_batches(settings, 3) == 1
    settings.micro_batch_size = 2
    assert micro_batches(settings, 3) == 2
    with pytest.raises(ValueError, match="batch_size is 12, which 5 processes can't share"):
        micro_batches(settings, 5)
    settings.micro_batch_size = 3
    with pytest.raises(ValueError, match="micro_batch_size is 3, which does not divide the 4 sequences"):
        micro_batches(settings, 3)


# --- schedules and options


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"schedule": "linear", "warmup_ratio": 0.4}, [0.0, 0.5, 1.0, 2 / 3, 1 / 3]),
        ({"schedule": "cosine", "warmup_steps": 1}, [0.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_follows_its_schedule(smoke, tmp_path, fields, rates):
    settings = TrainingSettings(steps=5, length=16, batch_size=2, learning_rate=0.01, **fields)
    logged = run(smoke, tmp_path, settings)[2]
    assert [logged[step]["learning_rate"] / 0.01 for step in range(1, 6)] == pytest.approx(rates, abs=1e-6)


def test_gradients_are_clipped(smoke, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, lr, weight_decay: torch.optim.SGD(parameters, lr=lr))
    settings = TrainingSettings(steps=1, length=24, batch_size=4, learning_rate=1.0, max_grad_norm=0.001)
    initial = build_model(model_config(smoke.model, 512, 0), smoke, smoke.arms[0])
    before = {name: p.detach().clone() for name, p in initial.named_parameters()}
    after = run(smoke, tmp_path, settings, uneven(4))[0]
    moved = sum(((after[name] - tensor) ** 2).sum() for name, tensor in before.items()) ** 0.5
    assert moved.item() == pytest.approx(0.001, rel=1e-3)


def test_gradient_checkpointing_changes_no_number_and_reaches_adapters(smoke, tmp_path):
    tiny_model("mistral").save_pretrained(tmp_path / "base")
    smoke.model = ModelSettings(pretrained=str(tmp_path / "base"))
    smoke.peft = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    settings = TrainingSettings(steps=3, length=16, batch_size=2, learning_rate=0.01)
    sequences = Sequences([np.arange(90)], 16, 6, 0)
    results, passes = [], []
    for settings.gradient_checkpointing in (False, True):
        model = adapt(build_model(model_config(smoke.model, 0, None), smoke, smoke.arms[0]), smoke)
        layer, count = model.get_base_model().model.layers[0].mlp, []
        layer.register_forward_pre_hook(lambda *args, count=count: count.append(1))
        states = tmp_path / str(settings.gradient_checkpointing)
        results.append(run(smoke, states, settings, sequences, model=model))
        passes.append(len(count))
    (plain, report, _), (again, report_again, _) = results
    assert passes == [3, 6]  # the forward pass once more in each backward pass
    assert report_again["final_loss"] == pytest.approx(report["final_loss"], rel=1e-6)
    assert all(torch.allclose(plain[name], again[name], atol=1e-6) for name in plain)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one(smoke, tmp_path):
    """Slow: compiling takes a minute."""
    settings = TrainingSettings(steps=3, length=16, batch_size=2, learning_rate=0.01)
    plain = run(smoke, tmp_path / "plain", settings)[1]
    settings.compile = True
    assert run(smoke, tmp_path / "compiled", settings)[1]["final_loss"] == pytest.approx(
        plain["final_loss"], rel=1e-4
    )


# --- SIGTERM


def test_a_run_that_is_terminated_saves_its_state_and_continues_with_the_same_losses(smoke, tmp_path):
    settings = TrainingSettings(steps=8, length=16, batch_size=4, learning_rate=0.01, warmup_steps=2)
    whole, _, losses = run(smoke, tmp_path / "whole", settings)

    def terminate(model, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run(smoke, tmp_path / "states", settings, on_step=terminate)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert latest_state(tmp_path / "states") == 5  # the step that was under way is finished
    first = run.logged
    continued, _, rest = run(smoke, tmp_path / "states", settings)
    assert list(first) == [1, 2, 3, 4, 5]
    assert list(rest) == [6, 7, 8]
    assert [{**first, **rest}[step]["loss"] for step in range(1, 9)] == [losses[step]["loss"] for step in range(1, 9)]
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
