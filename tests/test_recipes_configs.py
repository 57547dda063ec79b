"""The large experiments: complete, and equal in their keys to tiny twins, which run here."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import train
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState
from experiment import console
from experiment.files import read_json
from experiment.settings import load_settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
LARGE = ["qwen3_0.6b", "mistral_7b_lora", "mistral_7b_full", "llama4_scout"]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def keys(value):
    """The keys of nested mappings, without their values; of a list all that its items have."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [keys(item) for item in value if isinstance(item, dict)]
    return None


@pytest.mark.parametrize("name", LARGE)
def test_a_config_and_its_twin_have_the_same_keys_and_arms(name):
    large, twin = (yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text()) for stem in (name, f"{name}_cpu"))
    assert keys(large) == keys(twin)
    assert large["arms"] == twin["arms"]


@pytest.mark.parametrize("name", LARGE)
def test_the_experiments_are_the_papers(name):
    settings = load_settings(CONFIGS / f"{name}.yaml")
    assert settings.evaluation.lengths == [8192, 10000, 12288, 16384]
    assert settings.training.length == (8192 if name == "qwen3_0.6b" else 4096)
    assert settings.training.learning_rate == (5e-4 if name == "qwen3_0.6b" else 1e-5)
    assert settings.training.warmup_ratio == 0.1
    assert (settings.peft is not None) == (name in ("mistral_7b_lora", "llama4_scout"))
    assert {"alibi", "fixed-blocks", "original", "plsh-s20"} <= {arm.name for arm in settings.arms}


@pytest.mark.parametrize("path", sorted((CONFIGS.parent / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_accelerate_configs_are_what_their_names_say(path):
    config = load_config_from_file(str(path))
    kinds = {"fsdp2": "FSDP", "zero3": "DEEPSPEED", "one_gpu": "NO", "cpu": "NO"}
    assert config.distributed_type == kinds.get(path.stem, "MULTI_GPU")
    assert config.num_processes == {"one_gpu": 1, "cpu": 1, "cpu_2_processes": 2}.get(path.stem, 8)
    assert config.mixed_precision == ("no" if "cpu" in path.stem else "bf16")
    assert config.use_cpu == ("cpu" in path.stem)
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if path.stem == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3
        every = [load_settings(CONFIGS / f"{name}.yaml").training.max_grad_norm for name in LARGE]
        assert {config.deepspeed_config["gradient_clipping"]} == set(every)


@pytest.mark.parametrize(
    ("name", "arms"),
    [
        ("qwen3_0.6b", ["plsh-s10"]),
        ("llama4_scout", ["fixed-blocks"]),
    ],
)
def test_the_twins_run(name, arms, tmp_path, monkeypatch):
    """Some arms of each: that all of them can be built is checked in test_recipes.py."""
    run_twin(name, arms, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_twins_run_with_all_arms(name, tmp_path, monkeypatch):
    """Slow: two minutes for 24 arms, each with its own evaluation."""
    run_twin(name, [arm.name for arm in load_settings(CONFIGS / f"{name}_cpu.yaml").arms], tmp_path, monkeypatch)


def run_twin(name, arms, tmp_path, monkeypatch):
    fields = yaml.safe_load((CONFIGS / f"{name}_cpu.yaml").read_text())
    fields["arms"] = [arm for arm in fields["arms"] if arm["name"] in arms]
    if "pretrained" in fields["model"]:
        family = fields["model"]["pretrained"].rpartition("tiny_")[2]
        monkeypatch.setattr(sys, "argv", ["tiny.py", family, str(tmp_path / "tiny")])
        tiny.main()
        fields["model"]["pretrained"] = str(tmp_path / "tiny")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**fields, "output_dir": str(tmp_path / "out")}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(config)])
    train.main()
    results = read_json(tmp_path / "out" / "results.json")
    assert list(results["arms"]) == arms
    events = EventAccumulator(str(tmp_path / "out" / "logs" / fields["name"]))
    events.Reload()
    for arm, figures in results["arms"].items():
        training = figures["training"]
        losses = {event.step: event.value for event in events.Scalars(f"train {arm}/loss")}
        assert list(losses) == [1, 2, 3, 4]
        assert losses[4] == pytest.approx(training["final_loss"], rel=1e-6)
        validation = {event.step: event.value for event in events.Scalars(f"train {arm}/validation_loss")}
        assert list(validation) == [2, 4]
        assert validation[training["kept"]["step"]] == pytest.approx(min(validation.values()))
        assert list(figures["lengths"]) == ["64", "80", "96", "128"]
        adapter = (tmp_path / "out" / arm / "adapter_model.safetensors").exists()
        assert adapter == ("peft" in fields)


def test_trackers_get_every_step_of_every_arm(monkeypatch):
    """W&B takes no step twice, and every arm counts from 1: its step is a figure of its own."""
    calls = []
    accelerator = Accelerator()
    accelerator.trackers = [
        SimpleNamespace(name=name, log=lambda values, step=None, name=name: calls.append((name, values, step)))
        for name in ("wandb", "tensorboard")
    ]
    console.log(accelerator, "train plsh", {"loss": 2.5}, 3)
    assert calls == [
        ("wandb", {"train plsh/loss": 2.5, "train plsh/step": 3}, None),
        ("tensorboard", {"train plsh/loss": 2.5}, 3),
    ]


def test_the_files_of_trackers_lie_in_the_output_folder(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(console, "filter_trackers", lambda names, folder: names)
    accelerator = Accelerator()
    monkeypatch.setattr(accelerator, "init_trackers", lambda title, **options: calls.append((title, options)))
    console.start_trackers(accelerator, [], "none", tmp_path / "none", {})
    console.start_trackers(accelerator, ["wandb"], "title", tmp_path / "logs", {"seed": 0})
    settings = {"settings": '{"seed": 0}'}
    assert calls == [("title", {"config": settings, "init_kwargs": {"wandb": {"dir": str(tmp_path / "logs")}}})]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert accelerator.log_with == ["wandb"]
    assert accelerator.project_configuration.logging_dir == str(tmp_path / "logs")
