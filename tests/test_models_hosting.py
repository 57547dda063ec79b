"""Weights that are elsewhere or quantised: accelerate's hooks and quantised linears under a patch."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from conftest import random_ids
from oracles import SIGMA
from test_models import CLOSE
from torch import nn
from transformers import AutoModelForCausalLM, QuantoConfig

from hf_poslsh import PosLSHConfig, patch_model, unpatch_model
from hf_poslsh.testing import tiny_model

METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=1, max_distance=5)
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def outputs(model):
    """Logits of a left-padded batch, and what is generated after it."""
    ids = random_ids(2, 20)
    ids[0, :6] = 0
    mask = (ids != 0).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
    new = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return logits, new


def check_equal(got, expected):
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


def dispatched(model, tmp_path):
    return dispatch_model(model, PLACES, main_device="cpu", offload_dir=str(tmp_path / "offload"), force_hooks=True)


@pytest.mark.parametrize("first", ["patch", "dispatch"])
def test_offloaded_weights_change_nothing(family, tmp_path, first):
    host, expected = outputs(tiny_model(family)), outputs(patch_model(tiny_model(family), METHOD))
    model = tiny_model(family)
    if first == "patch":
        model = dispatched(patch_model(model, METHOD), tmp_path)
    else:
        model = patch_model(dispatched(model, tmp_path), METHOD)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.device.type == "meta"
    check_equal(outputs(model), expected)
    assert attention.q_proj.weight.device.type == "meta"
    check_equal(outputs(unpatch_model(model)), host)


@pytest.mark.parametrize("patch_at", ["before", "hooked", "after"])
def test_hooks_that_are_taken_off_leave_the_right_forward(family, patch_at):
    host, expected = outputs(tiny_model(family)), outputs(patch_model(tiny_model(family), METHOD))
    model = tiny_model(family)
    if patch_at == "before":
        patch_model(model, METHOD)
    dispatch_model(model, dict.fromkeys(PLACES, "cpu"), main_device="cpu", force_hooks=True)
    if patch_at == "hooked":
        patch_model(model, METHOD)
    remove_hook_from_submodules(model)
    if patch_at == "after":
        patch_model(model, METHOD)
    check_equal(outputs(model), expected)
    check_equal(outputs(unpatch_model(model)), host)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])  # accelerate loses the rotary buffer of the stock Llama-4
def test_cpu_offload(family):
    expected = outputs(patch_model(tiny_model(family), METHOD))
    check_equal(outputs(patch_model(cpu_offload(tiny_model(family), "cpu"), METHOD)), expected)


def test_a_checkpoint_loads_with_a_device_map(family, tmp_path):
    model = patch_model(tiny_model(family), METHOD)
    expected = outputs(model)
    model.save_pretrained(tmp_path / "one")
    options = {"device_map": PLACES, "offload_folder": str(tmp_path / "offload")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", **options)
    assert loaded.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    check_equal(outputs(loaded), expected)
    loaded.save_pretrained(tmp_path / "two")
    check_equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "two")), expected)
    check_equal(outputs(unpatch_model(loaded)), outputs(tiny_model(family)))


def with_quanto(model):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def with_dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
@pytest.mark.parametrize("quantised", [with_quanto, with_dynamic])
def test_quantised_linears_are_left_alone(family, quantised):
    """The biased model has the host's very weights: with bias 'none' it gives the host's logits."""
    model = quantised(tiny_model(family))
    before = {name: module for name, module in model.named_modules() if "proj" in name}
    types = {name: type(module) for name, module in before.items()}
    assert nn.Linear not in types.values()
    host = outputs(model)
    patch_model(model, bias="none")
    after = dict(model.named_modules())
    assert all(after[name] is module and type(module) is types[name] for name, module in before.items())
    torch.testing.assert_close(outputs(model)[0], host[0], **CLOSE)
    patch_model(unpatch_model(model), METHOD)
    exact = outputs(patch_model(tiny_model(family), METHOD))[0]
    assert 0 < (outputs(model)[0] - exact).abs().mean() < 0.1 * exact.abs().mean()  # int8 weights, the same masks
    check_equal(outputs(unpatch_model(model)), host)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_patched_checkpoint_is_quantised_while_it_loads(family, tmp_path):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    patch_model(tiny_model(family), METHOD).save_pretrained(tmp_path / "patched")
    tiny_model(family).save_pretrained(tmp_path / "host")
    options = {"quantization_config": QuantoConfig(weights="int8")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", **options)
    assert type(loaded.model.layers[0].self_attn.q_proj).__name__ == "QLinear"
    other = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "host", **options), METHOD)
    check_equal(outputs(loaded), outputs(other))
    with pytest.raises(ValueError, match="not serializable"):  # the host's word on quanto
        loaded.save_pretrained(tmp_path / "again")
