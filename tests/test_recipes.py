"""The parts of the recipes: settings, texts, batches, files, checks before the start, resuming, model card."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from experiment import preparing
from experiment.arms import adapt, build_model, check_arms, load_checkpoint, model_config, poslsh_config, whole_models
from experiment.corpus import train_tokenizer
from experiment.files import finish_folder, lock_folder, partial_folder, read_json, write_json, write_text
from experiment.publishing import check_names
from experiment.report import model_card
from experiment.settings import ArmSettings, ModelSettings, SourceSettings, load_settings
from experiment.sources import read_splits, read_texts
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.testing import tiny_model

RECIPES = Path(__file__).parent.parent / "recipes"
SMOKE = RECIPES / "configs" / "smoke.yaml"
CONFIGS = sorted(p for p in (RECIPES / "configs").glob("*.yaml") if not p.stem.startswith("convergence"))


@pytest.fixture
def smoke(tmp_path):
    settings = load_settings(SMOKE)
    settings.output_dir = str(tmp_path / "out")
    return settings


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """A checkpoint of a Mistral with random weights."""
    folder = tmp_path_factory.mktemp("pretrained")
    tiny_model("mistral", max_position_embeddings=32768).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))


# --- settings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_is_valid(path, pretrained):
    settings = load_settings(path)
    if any(isinstance(source, SourceSettings) and not source.files for source in settings.data.train):
        read_texts(settings.data.held_out, None)  # there is no Hub here
    else:
        read_splits(settings.data)
    if settings.model.pretrained is not None:
        settings.model.pretrained = pretrained
    check_arms(model_config(settings.model, 512, 0), settings)


def test_demo_has_the_two_arms_and_demo_all_every_baseline():
    assert {arm.name for arm in load_settings(RECIPES / "configs/demo.yaml").arms} == {"plsh", "rope"}
    arms = {arm.name: poslsh_config(arm) for arm in load_settings(RECIPES / "configs/demo_all.yaml").arms}
    assert {None if arm is None else arm.bias for arm in arms.values()} == {
        "poslsh",
        None,
        "alibi",
        "fixed_blocks",
        "none",
    }
    assert all(arm.rope == "drop" for arm in arms.values() if arm is not None)


def test_demo_evaluates_at_lengths_that_its_fixed_blocks_do_not_divide():
    lengths = load_settings(RECIPES / "configs/demo_all.yaml").evaluation.lengths
    assert {512, 1024, 2048, 4096} < set(lengths)
    assert any(length % 32 for length in lengths)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainning.steps=3", "unknown keys in the config: trainning"),
        ("seed.steps=3", "'seed' is 0, which has no keys"),
        ("training.stepps=3", "unknown keys in training: stepps; the known ones are steps, length"),
        ("speed=3", "unknown keys in the config: speed; the known ones are name, output_dir"),
        ("training={steps: 3}", "missing keys in training: batch_size, learning_rate, length"),
        ("training=3", "training is 3; it must be a mapping"),
        ("training.steps=many", "training: .*'steps' expected int, got str"),
        ("training.steps=0", "training.steps is 0; it must be .* at least 1"),
        ("training.steps=true", "expected int, got bool"),
        ("training.learning_rate=fast", "expected float, got str"),
        ("training.learning_rate=.nan", "learning_rate is nan"),
        ("evaluation.lengths=[64, x]", "lengths"),
        ("evaluation.top_k=[0]", "top_k is 0"),
        ("data.vocab_size=10", "data.vocab_size is 10; it must be .* at least 257"),
        ("seed=-1", "seed is -1"),
        ("model.pretrained=x", "either model.type .* or model.pretrained"),
        ("model={}", "either model.type .* or model.pretrained"),
        ("model.dtype=float64", "model.dtype is 'float64'; choose float32 or bfloat16"),
        ("training.schedule=step", "training.schedule is 'step'; choose cosine or linear"),
        ("training.warmup_ratio=0.1", "warmup_ratio is 0.1 and training.warmup_steps is 2; give one"),
        ("training.micro_batch_size=0", "micro_batch_size is 0"),
        ("data.train=[{path: json, split: 3}]", r"data.train\[0\]: .*'split' expected str"),
        ("data.train=[{path: json, colum: a}]", r"unknown keys in data.train\[0\]: colum"),
        ("data.train=[{path: c4, streaming: true}]", "'c4' is streamed without an end"),
        ("data.train=[3]", r"data.train\[0\] is 3; it must be a mapping"),
        ("peft={r: 2}", "peft .* need model.pretrained"),
        ("arms=[{name: a, poslsh: null, train: false}]", "arm 'a' is not trained"),
        ("training.validate_every=3", "validate_every and data.validation belong together"),
        ("data.validation=[x.txt]", "validate_every and data.validation belong together"),
        ("arms=[]", "give at least one"),
        ("arms=[{name: a, poslsh: null}, {name: a, poslsh: null}]", "every one its own name"),
        ("arms=[{name: ../a, poslsh: null}]", "'../a' can't name a folder"),
        ("arms=[{name: tokenizer, poslsh: null}]", "can't name a folder"),
        ("arms=[{name: a}]", r"missing keys in arms\[0\]: poslsh"),
        ("steps", "has no '='"),
        ("seed=[", "no YAML value"),
    ],
)
def test_wrong_settings_name_the_key_and_what_is_known(override, message):
    with pytest.raises(ValueError, match=message):
        load_settings(SMOKE, [override])


def test_numbers_in_scientific_notation_are_numbers():
    settings = load_settings(SMOKE, ["training.learning_rate=2e-3", "training.weight_decay=0"])
    assert (settings.training.learning_rate, settings.training.weight_decay) == (0.002, 0.0)


@pytest.mark.parametrize(("text", "message"), [("a: [", "cannot read"), ("- a", "no mapping"), (None, "cannot read")])
def test_unreadable_configs_are_refused(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_settings(path)


def test_a_data_folder_starts_at_the_config_file(tmp_path):
    fields = yaml.safe_load(SMOKE.read_text())
    fields["data"] = {"train": ["a.txt"], "held_out": ["b.txt"], "folder": "texts"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(fields))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("one")
    (tmp_path / "texts/b.txt").write_text("two")
    texts = read_splits(load_settings(path).data)
    assert [text.content for split in texts.values() for text in split] == ["one", "two"]


# --- models


def test_all_arms_begin_with_the_same_weights(smoke):
    config = model_config(smoke.model, 512, 0)
    states = [build_model(config, smoke, arm).state_dict() for arm in smoke.arms]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    smoke.seed = 1
    other = build_model(config, smoke, smoke.arms[1]).state_dict()
    assert not torch.equal(other["lm_head.weight"], states[1]["lm_head.weight"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias": "alibbi"}, "arm 'bad': bias is 'alibbi'"),
        ({"numsamples": 3}, "arm 'bad': unknown PosLSHConfig fields"),
        ({"sigma": [1.0, 2.0]}, "arm 'bad': "),
        ({"layers": [99]}, "arm 'bad': "),
    ],
)
def test_bad_arms_are_found_before_training(smoke, fields, message):
    smoke.arms.append(ArmSettings(name="bad", poslsh=fields))
    with pytest.raises(ValueError, match=message):
        check_arms(model_config(smoke.model, 512, 0), smoke)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.type=qwen33", "model.type is 'qwen33'"),
        ("model.config.hiden_size=3", "unknown keys in model.config: hiden_size; qwen3 knows .*hidden_size"),
        ("model.config.hidden_size=wide", "does not make a qwen3 configuration"),
    ],
)
def test_bad_architectures_are_found_before_training(override, message):
    with pytest.raises(ValueError, match=message):
        model_config(load_settings(SMOKE, [override]).model, 512, 0)


def test_a_model_too_short_for_a_length_is_found_before_training(smoke):
    smoke.model.config["max_position_embeddings"] = 100
    with pytest.raises(ValueError, match="length 128 exceeds"):
        check_arms(model_config(smoke.model, 512, 0), smoke)


@pytest.fixture
def adapting(smoke, pretrained):
    """Settings that train an adapter of a pretrained model."""
    smoke.model = ModelSettings(pretrained=pretrained)
    smoke.peft = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    return smoke


def test_pretrained_weights_are_loaded_and_only_an_adapter_is_trained(adapting, pretrained):
    config = model_config(adapting.model, 0, None)
    expected = AutoModelForCausalLM.from_pretrained(pretrained)
    first, second = (adapt(build_model(config, adapting, arm), adapting) for arm in adapting.arms)
    assert type(first.get_base_model()).__name__.startswith("PosLSH")
    for model in (first, second):
        base = {
            name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()
        }
        assert all(torch.equal(base[name], tensor) for name, tensor in expected.state_dict().items())
    trained = [{name: p for name, p in model.named_parameters() if p.requires_grad} for model in (first, second)]
    assert {name.split(".")[-3] for name in trained[0]} == {"lora_A", "lora_B"}
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[1])
    total, adapters = check_arms(config, adapting)
    assert adapters == sum(p.numel() for p in trained[0].values())
    assert total == adapters + sum(p.numel() for p in expected.parameters())


def test_adapters_stay_in_float32_where_the_weights_are_bfloat16(adapting):
    adapting.model.dtype = "bfloat16"
    model = adapt(build_model(model_config(adapting.model, 0, None), adapting, adapting.arms[0]), adapting)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }


def test_an_arm_may_change_the_configuration_of_its_model(adapting):
    fields = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    adapting.arms.append(ArmSettings(name="yarn", poslsh=None, train=False, config={"rope_parameters": fields}))
    config = model_config(adapting.model, 0, None)
    check_arms(config, adapting)
    frequencies = [build_model(config, adapting, arm).model.rotary_emb.inv_freq.cpu() for arm in adapting.arms[1:]]
    plain, yarn = frequencies
    assert yarn[0] == plain[0]  # YaRN leaves the fastest rotation and divides the slowest by the factor
    assert yarn[-1] == pytest.approx(plain[-1] / 2)
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.model.config.update(hiden_size=3), "unknown keys in model.config: hiden_size; mistral knows"),
        (
            lambda s: setattr(s.model, "pretrained", "no/such-model"),
            "is 'no/such-model', which can't",
        ),
        (lambda s: s.peft.update(rank=2), "peft: .*rank"),
        (lambda s: s.peft.update(target_modules=["nowhere"]), "peft: .*nowhere"),
        (lambda s: s.arms[0].config.update(rope="yarn"), "unknown keys in arm 'plsh': config: rope"),
    ],
)
def test_bad_pretrained_models_and_adapters_are_found_before_training(adapting, change, message):
    change(adapting)
    with pytest.raises(ValueError, match=message):
        check_arms(model_config(adapting.model, 0, None), adapting)


@pytest.mark.parametrize("method", [None, PosLSHConfig(num_samples=5, sigma=4)])
def test_adapters_of_any_origin_are_evaluated(pretrained, tmp_path, method):
    """Saved by PEFT, without a recipe: on a patched model or on one as it is."""
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    if method is not None:
        patch_model(base, method)
    options = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, options).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        assert torch.equal(load_checkpoint(tmp_path)(ids).logits, model(ids).logits)


def test_models_are_made_whole_where_zero3_shares_out_what_is_made():
    """The state of transformers that DeepSpeed's config object sets, which needs no DeepSpeed."""
    config = Mock(is_zero3=lambda: True)
    plugin = SimpleNamespace(set_deepspeed_weakref=lambda: set_hf_deepspeed_config(config))
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    set_hf_deepspeed_config(config)
    try:
        with whole_models(accelerator):
            assert not is_deepspeed_zero3_enabled()
        assert is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()
    with whole_models(accelerator):
        pass
    assert not is_deepspeed_zero3_enabled()  # what was off stays off


# --- checks before the start


def test_prepare_writes_nothing_unless_everything_fits(smoke, accelerator, monkeypatch):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            preparing.prepare(smoke, accelerator, resume=False)
        assert not Path(smoke.output_dir).exists()

    smoke.evaluation.lengths = [64, 10_000_000]
    refused("length 10000000 needs 10000001")
    smoke.evaluation.lengths = [64]
    smoke.training.length = 10_000_000
    refused("no training text has 10000000 tokens")
    smoke.training.length = 64
    smoke.arms.append(ArmSettings(name="bad", poslsh={"sigma": 0}))
    refused("arm 'bad': sigma is 0")
    smoke.arms.pop()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    refused("MiB for its checkpoints, but 1 MiB are free")


def test_an_output_folder_is_continued_only_on_request_and_with_the_same_settings(smoke, accelerator, monkeypatch):
    output = Path(smoke.output_dir)
    preparing.prepare(smoke, accelerator, resume=True)
    with pytest.raises(ValueError, match="already holds an experiment; pass --resume"):
        preparing.prepare(smoke, accelerator, resume=False)
    preparing.prepare(smoke, accelerator, resume=True)

    def refused(message, settings=smoke):
        with pytest.raises(ValueError, match=message):
            preparing.prepare(settings, accelerator, resume=True)

    changed = copy.deepcopy(smoke)
    changed.training.steps += 1
    changed.evaluation.lengths = [64]
    refused(r"other settings \(evaluation.lengths, training.steps\)", changed)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "mixed_precision", "bf16")
        refused(r"other settings \(mixed_precision\)")
    folder = output.parent / "texts"
    folder.mkdir()
    for path in (RECIPES / "data").glob("*.txt"):
        (folder / path.name).write_text(path.read_text())
    smoke.data.folder = str(folder)
    recorded = read_json(output / "settings.json")
    write_json(output / "settings.json", {**recorded, "data": smoke.to_dict()["data"]})
    preparing.prepare(smoke, accelerator, resume=True)
    edited = folder / smoke.data.train[0]
    edited.write_text(edited.read_text() + "The end.")
    refused(r"other settings \(texts.train\)")
    (output / "settings.json").write_text("{")
    refused("cannot read")


def test_a_continued_run_may_change_what_does_not_change_results(smoke, accelerator):
    preparing.prepare(smoke, accelerator, resume=False)
    smoke.training.micro_batch_size, smoke.training.save_every, smoke.training.gradient_checkpointing = 1, 2, True
    smoke.evaluation.batch_tokens, smoke.card = 128, {"license": "mit"}
    preparing.prepare(smoke, accelerator, resume=True)


def test_a_continued_run_needs_room_for_what_is_missing_alone(smoke, tmp_path, monkeypatch):
    smoke.training.save_every = 5
    whole = 10 * 2**20  # parameters, all trained: 40 MiB of float32

    def needed():
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(ValueError, match="are free") as refusal:
            preparing.check_disk(smoke, whole, whole, tmp_path)
        return int(str(refusal.value).split("about ")[1].split(" MiB")[0].replace(",", ""))

    states = [3 * 40, 3 * 40]  # weights and two moments, two of them at a time
    assert len(smoke.arms) == 2
    assert needed() == 16 + 3 * 40 + sum(states)
    (tmp_path / "state" / smoke.arms[0].name / "5").mkdir(parents=True)
    assert needed() == 16 + 3 * 40 + states[0]
    (tmp_path / smoke.arms[0].name).mkdir()
    assert needed() == 16 + 2 * 40 + states[0]
    (tmp_path / smoke.arms[1].name).mkdir()
    assert needed() == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passkey_lengths": [5]}, "5"),
        ({"passkey_lengths": [256], "passkey_depths": [2.0]}, "2.0"),
        ({"position_length": 100_000_000}, "100000000"),
        ({"passkey_lengths": [100_000_000]}, "100000000"),
    ],
)
def test_what_only_the_evaluation_needs_is_checked_before_training(smoke, accelerator, change, message):
    for name, value in change.items():
        setattr(smoke.evaluation, name, value)
    with pytest.raises(ValueError, match=message):
        preparing.prepare(smoke, accelerator, resume=False)
    assert not Path(smoke.output_dir).exists()


def test_clipping_is_what_deepspeed_does(smoke):
    def accelerator(clipping):
        plugin = SimpleNamespace(deepspeed_config={"gradient_clipping": clipping})
        return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))

    preparing.check_clipping(smoke, accelerator(smoke.training.max_grad_norm))
    preparing.check_clipping(smoke, accelerator("auto"))
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0, but gradient_clipping .* is 0.5"):
        preparing.check_clipping(smoke, accelerator(0.5))


def test_a_batch_that_the_processes_cannot_share_is_refused(smoke):
    with pytest.raises(ValueError, match="batch_size is 4, which 3 processes can't share"):
        preparing.prepare(smoke, SimpleNamespace(num_processes=3, use_distributed=True), resume=False)


def test_processes_that_do_not_know_of_each_other_are_refused(smoke, accelerator, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes were launched"):
        preparing.prepare(smoke, accelerator, resume=False)


def test_training_begins_every_sequence_as_the_tokenizer_does(smoke, accelerator, tmp_path):
    """Evaluation does so too: what is read there has to be what was trained."""
    tokenizer = train_tokenizer(read_texts(smoke.data.train, None), smoke.data.vocab_size)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = tokenizer.bos_token_id
    pair = [("<s>", start)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=pair)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    smoke.data.tokenizer = str(tmp_path / "tokenizer")
    smoke.data.validation, smoke.training.validate_every = ["sotu-1912-taft.txt"], 5
    for packing in (False, True):
        smoke.training.packing, smoke.output_dir = packing, str(tmp_path / str(packing))
        experiment = preparing.prepare(smoke, accelerator, resume=False)
        for sequences in (experiment.sequences, experiment.validation):
            assert {int(sequences[index]["input_ids"][0]) for index in range(4)} == {start}


# --- files


def test_files_are_replaced_in_one_step(tmp_path):
    write_text(tmp_path / "a/b.txt", "one")
    write_text(tmp_path / "a/b.txt", "two")
    assert (tmp_path / "a/b.txt").read_text() == "two"
    write_json(tmp_path / "c.json", {"x": [1, 2.5]})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "c.json", {"x": float("nan")})
    assert read_json(tmp_path / "c.json") == {"x": [1, 2.5]}
    for content in ("new", "newer"):
        write_text(partial_folder(tmp_path / "folder") / "file", content)
        finish_folder(tmp_path / "folder")
        assert (tmp_path / "folder/file").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c.json", "folder"]


# --- model card


def results(steps=(1, 1), **changes):
    """What two arms leave, the first of them patched."""

    def summary(perplexity):
        return {"perplexity": perplexity, "loss": 1.0, "top_1_accuracy": 0.25, "tokens_scored": 8, "context": [1, 2]}

    def training(steps):
        figures = {"final_loss": 5.0, "seconds": 1.0, "tokens_per_second": 64.0} if steps else {}
        return {"parameters": 10, "steps": steps, "tokens": 64 * steps, **figures}

    settings = load_settings(SMOKE).to_dict()
    for name, change in changes.items():
        settings[name] = change if settings[name] is None else settings[name] | change
    content = {
        "name": "an experiment",
        "seed": 7,
        "versions": {"torch": "2"},
        "protocol": {
            "name": "same-targets",
            "tokens_scored": 8,
            "targets_per_window": 4,
            "texts": [{"name": "novel.txt", "sha256": "0", "tokens": 99, "tokens_scored": 8}],
        },
        "settings": settings,
        "arms": {
            "plsh": {"poslsh": {"rope": "drop"}, "training": training(steps[0]), "lengths": {"64": summary(131.25)}},
            "rope": {"poslsh": None, "training": training(steps[1]), "lengths": {"64": summary(188.04)}},
        },
    }
    return json.loads(json.dumps(content))


def test_the_card_holds_every_number_and_valid_metadata():
    card = model_card(results())
    assert "| arm | 64 |\n|---|---:|\n| plsh | 131.2 |\n| rope | 188.0 |\n" in card.content
    assert "| plsh | 25.00 |" in card.content
    assert "seed (7)" in card.content
    assert "between L - 3 and L tokens" in card.content
    assert card.data.library_name == "transformers"
    metrics = [(result.metric_type, result.metric_value, result.metric_name) for result in card.data.eval_results]
    assert ("perplexity", 131.25, "Perplexity at 64 tokens, plsh") in metrics
    assert ("accuracy", 0.25, "Top-1 accuracy at 64 tokens, rope") in metrics
    assert "{{" not in card.content
    assert "{%" not in card.content
    assert [card.data.license, card.data.language] == ["apache-2.0", "en"]


@pytest.mark.parametrize(
    ("steps", "peft", "folder", "loader"),
    [
        ((1, 1), None, "plsh", "AutoModelForCausalLM"),
        ((0, 1), None, "rope", "AutoModelForCausalLM"),
        ((1, 1), {"r": 2}, "plsh", "load_adapter"),
        ((0, 1), {"r": 2}, "rope", "AutoPeftModelForCausalLM"),
        ((0, 0), {"r": 2}, None, None),
    ],
)
def test_the_card_shows_how_to_load_what_was_trained(steps, peft, folder, loader):
    made = {"pretrained": "org/base", "config": {"rope_theta": 5e5}}
    changes = {} if peft is None else {"model": made, "peft": peft}
    content = model_card(results(steps, **changes)).content
    assert ("of no use for writing" in content) == (peft is None)
    assert ("## Use" in content) == (folder is not None)
    if folder is not None:
        code = content.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert f'folder = "{folder}"\n' in code
        options = "" if peft is None else ", rope_theta=500000.0"
        assert f"{loader}{'' if loader == 'load_adapter' else '.from_pretrained'}(folder{options})" in code
        assert f"`python recipes/evaluate.py {folder}` repeats" in content


def test_the_card_shows_positional_lsh_where_other_biases_were_trained_too():
    content = results()
    content["arms"] = {"window": {**content["arms"]["plsh"], "poslsh": {"bias": "window"}}, **content["arms"]}
    assert 'folder = "plsh"' in model_card(content).content


def test_a_section_that_the_file_leaves_out_can_be_set():
    path = RECIPES / "configs" / "qwen3_0.6b_cpu.yaml"
    assert "card" not in yaml.safe_load(path.read_text())
    assert load_settings(str(path), ["card.base_model=user/name"]).card == {"base_model": "user/name"}


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    lock_folder(tmp_path / "out")
    with pytest.raises(ValueError, match="out is in use by another run"):
        lock_folder(tmp_path / "out")
    lock_folder(tmp_path / "other")


def test_names_that_the_hub_would_refuse_are_found_before_training(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    settings = load_settings(SMOKE, ["arms=[{name: a+b, poslsh: null}]"])
    with pytest.raises(ValueError, match=r"repo_id is 'user/x-a\+b'; write 'user/name'"):
        check_names(settings, "user/x")
    settings = load_settings(SMOKE, ["model={pretrained: recipes}", "peft={r: 2}"])
    with pytest.raises(ValueError, match=r"'recipes' are of no use to others.*--set card.base_model=user/name"):
        check_names(settings, "user/x")
    settings.card["base_model"] = "user/base"
    check_names(settings, "user/x")
