"""The parts of the recipes: settings, and the models of the arms."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from experiment.arms import adapt, build_model, check_arms, load_checkpoint, model_config, poslsh_config, whole_models
from experiment.settings import ArmSettings, ModelSettings, SourceSettings, load_settings
from experiment.sources import read_splits, read_texts
from peft import LoraConfig, get_peft_model
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
    full = [arm.poslsh["full_heads"] for arm in settings.arms if arm.poslsh and arm.poslsh.get("full_heads")]
    if full:  # such lists belong to a model of one shape, SmolLM2's
        assert {len(heads) for heads in full} == {30}
        settings.model.config |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
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


def test_a_section_that_the_file_leaves_out_can_be_set():
    path = RECIPES / "configs" / "qwen3_0.6b_cpu.yaml"
    assert "card" not in yaml.safe_load(path.read_text())
    assert load_settings(str(path), ["card.base_model=user/name"]).card == {"base_model": "user/name"}


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
