"""Damaged and edited configs and checkpoints: a clear error, or the right model, and never a plain one in silence."""

import json
import shutil

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from properties import amounts, examine
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.cli.weights import tensor_names
from hf_poslsh.testing import FAMILIES, tiny_model
from hf_poslsh_cli import app

METHOD = PosLSHConfig(sigma=3.0, num_samples=5, sink_tokens=1, max_distance=7, seed=2)
IDS = torch.arange(1, 41)[None]
KNOWN = sorted(METHOD.to_dict())
ADDED = {"max_distance", "full_heads"}  # not in files of earlier versions, which meant the default
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([10**400, -(10**400), 2**63, 2**31, 1e308, 5e-324]),
    st.floats(),
    st.booleans(),
)
WORDS = st.sampled_from(["", "alibi", "poslsh", "head", "iid", "mean", "window", "drop", "full", "blocks", "\0", "ß"])
LEAVES = st.one_of(st.none(), NUMBERS, WORDS, st.text(max_size=5))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
SMALL = st.one_of(
    st.none(), st.integers(-3, 70), st.floats(-3, 70), st.booleans(), WORDS, st.lists(st.integers(-3, 70))
)


def attempt(call, *arguments):
    """What a call returns, and the text of its ValueError."""
    try:
        return call(*arguments), None
    except ValueError as error:
        return None, str(error)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        patch_model(tiny_model(family), METHOD).save_pretrained(root / family)
    return root


@pytest.fixture(scope="session")
def right():
    return {family: logits(patch_model(tiny_model(family), METHOD)) for family in FAMILIES}


@pytest.fixture
def edit(checkpoints, tmp_path):
    """Makes a copy of a checkpoint whose config.json a function has changed."""

    def write(family, change):
        target = tmp_path / "checkpoint"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(checkpoints / family, target)
        content = json.loads((target / "config.json").read_text())
        changed = change(content)
        (target / "config.json").write_text(json.dumps(content if changed is None else changed))
        return target

    return write


# The method's fields ---------------------------------------------------------------------------------------------


@amounts(150, 20000)
def test_fields_are_refused_by_name_or_survive_json(amount):
    @given(st.dictionaries(st.one_of(st.sampled_from(KNOWN), st.text(max_size=6)), JSON, max_size=4))
    def holds(fields):
        config, error = attempt(PosLSHConfig.from_dict, fields)
        if config is None:
            assert any(name in error or repr(name) in error for name in fields)
            return
        assert PosLSHConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        hash(config)

    examine(holds, amount)


@amounts(100, 5000)
def test_one_wrong_field_is_named(amount):
    @example("sigma", 10**400)
    @example("tolerance", 10**400)
    @given(st.sampled_from(KNOWN), JSON)
    def holds(name, value):
        config, error = attempt(PosLSHConfig.from_dict, {**METHOD.to_dict(), name: value})
        if config is None:
            assert name in error
            return
        assert config.to_dict() == {**METHOD.to_dict(), name: config.to_dict()[name]}
        assert config.to_dict()[name] == (sorted(value) if name == "layers" and value else value)

    examine(holds, amount)


@amounts(60, 1000)
def test_what_is_no_mapping_of_names_is_refused(amount):
    @given(
        st.one_of(
            JSON.filter(lambda value: not isinstance(value, dict)), st.dictionaries(st.integers(), JSON, min_size=1)
        )
    )
    def holds(value):
        with pytest.raises(ValueError, match=r"PosLSHConfig"):
            PosLSHConfig.from_dict(value)

    examine(holds, amount)


# config.json -----------------------------------------------------------------------------------------------------


@amounts(12, 400)
def test_an_edited_method_in_a_checkpoint_is_refused_or_obeyed(edit, amount):
    @given(st.sampled_from(FAMILIES), st.sampled_from([*KNOWN, "novelty"]), st.booleans(), JSON)
    def holds(family, name, delete, value):
        def change(content):
            if delete:
                content["poslsh"].pop(name, None)
            else:
                content["poslsh"][name] = value

        folder = edit(family, change)
        wanted = json.loads((folder / "config.json").read_text())["poslsh"]
        model, error = attempt(AutoModelForCausalLM.from_pretrained, folder)
        if model is None:
            assert name in error
            return
        obeyed = PosLSHConfig.from_dict(wanted)
        assert METHOD.to_dict().keys() - ADDED <= wanted.keys() <= METHOD.to_dict().keys()
        assert obeyed.impl == "flex" or torch.equal(logits(model), logits(patch_model(tiny_model(family), obeyed)))

    examine(holds, amount)


@pytest.mark.parametrize("entry", [None, [], "poslsh", 3, True, {}, "missing"])
def test_a_method_that_is_none_is_refused(family, edit, entry):
    def change(content):
        content["poslsh"] = entry
        if entry == "missing":
            del content["poslsh"]

    with pytest.raises(ValueError, match=r"'poslsh'|PosLSHConfig"):
        AutoModelForCausalLM.from_pretrained(edit(family, change))


def test_every_missing_field_is_named(family, edit):
    for name in sorted({*KNOWN} - ADDED):

        def change(content, name=name):
            del content["poslsh"][name]

        with pytest.raises(ValueError, match=f"'poslsh'.* lacks .*'{name}'"):
            AutoModelForCausalLM.from_pretrained(edit(family, change))


def drop(key):
    return lambda content: content.pop(key) and None


def put(key, value):
    return lambda content: content.update({key: value})


def unwrap_rope(content):
    content["rope_parameters"] = content["rope_parameters"]["base"]


HARMLESS = {
    "no auto_map": drop("auto_map"),
    "another auto_map": put("auto_map", {"AutoModelForCausalLM": "somewhere.Else"}),
    "no version": drop("poslsh_version"),
    "a later version": put("poslsh_version", "99.0"),
    "no architectures": drop("architectures"),
    "an unknown architecture": put("architectures", ["NovelForCausalLM"]),
    "an unknown field": put("novelty", {"a": 1}),
    "real RoPE": unwrap_rope,
    "no attention": drop("attn_implementation"),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_edits_that_leave_the_model_type_give_the_right_model(family, edit, right, change):
    model = AutoModelForCausalLM.from_pretrained(edit(family, HARMLESS[change]))
    assert torch.equal(logits(model), right[family])


TYPES = ("mistral", "qwen3", "llama4_text", "llama", "novel")


@pytest.mark.parametrize("also", ["nothing else", "host architectures", "no attention", "real RoPE", "no auto_map"])
@pytest.mark.parametrize("model_type", [*TYPES, *(f"poslsh_{name}" for name in TYPES[:3]), "poslsh_llama4", None])
def test_another_model_type_never_gives_a_plain_model(family, edit, right, model_type, also):
    if model_type == f"poslsh_{ {'llama4': 'llama4_text'}.get(family, family) }":
        return

    def change(content):
        content["model_type"] = model_type
        if also == "host architectures":
            content["architectures"] = [content["architectures"][0].removeprefix("PosLSH")]
        elif also != "nothing else":
            HARMLESS[also](content)

    with pytest.raises((ValueError, OSError, KeyError), match=r"poslsh|novel|model.type|chunked_attention"):
        logits(AutoModelForCausalLM.from_pretrained(edit(family, change)))


@amounts(40, 2000)
def test_a_cut_config_json_is_refused(checkpoints, tmp_path, amount):
    whole = (checkpoints / "qwen3/config.json").read_bytes()

    @given(st.integers(0, len(whole.rstrip()) - 1))
    def holds(length):
        (tmp_path / "config.json").write_bytes(whole[:length])
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            AutoConfig.from_pretrained(tmp_path)

    examine(holds, amount)


@amounts(25, 1000)
def test_info_survives_any_config_json(checkpoints, tmp_path, amount):
    """The command says what is wrong, whatever one field is; it never shows a traceback."""
    whole = json.loads((checkpoints / "mistral/config.json").read_text())

    @given(st.sampled_from(sorted(whole)), SMALL)
    def holds(name, value):
        (tmp_path / "config.json").write_text(json.dumps({**whole, name: value}))
        result = CliRunner().invoke(app, ["info", str(tmp_path), "--length", "64"])
        assert result.exit_code in (0, 2), result.exception
        assert result.exit_code == 0 or result.stderr.startswith("error: ")

    examine(holds, amount)


# Weights ---------------------------------------------------------------------------------------------------------


@amounts(30, 500)
def test_cut_weights_are_refused(checkpoints, tmp_path, amount):
    folder = tmp_path / "cut"
    shutil.copytree(checkpoints / "mistral", folder)
    whole = (folder / "model.safetensors").read_bytes()

    @given(st.one_of(st.integers(0, len(whole) - 1), st.integers(0, 3000)))
    def holds(length):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            tensor_names(folder / "model.safetensors")
        with pytest.raises((SafetensorError, OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(folder)

    examine(holds, amount)


@amounts(60, 5000)
def test_damaged_headers_are_refused_or_name_the_same_tensors(checkpoints, tmp_path, amount):
    whole = (checkpoints / "mistral/model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    end = 8 + int.from_bytes(whole[:8], "little")

    @given(st.integers(0, end - 1), st.binary(min_size=1, max_size=4))
    def holds(at, noise):
        file.write_bytes((whole[:at] + noise + whole[at + len(noise) :])[: len(whole)])
        names, error = attempt(tensor_names, file)
        assert "model.safetensors" in error if names is None else all(isinstance(name, str) for name in names)

    examine(holds, amount)
