"""Llama-4 with a vision tower: the text part is patched, the tower is not touched."""

import json

import pytest
import torch
import transformers
from oracles import SIGMA
from test_models import CLOSE, logits
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_poslsh import PosLSHConfig, patch_model, unpatch_model
from hf_poslsh.testing import tiny_config, tiny_model

METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=1, max_distance=5)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vision_output_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "pixel_shuffle_ratio": 0.5,
}


def tiny():
    torch.manual_seed(0)
    config = transformers.Llama4Config(
        text_config=tiny_config("llama4").to_dict(),
        vision_config=VISION,
        image_token_index=98,
    )
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(tiny_model("llama4").state_dict())
    return model


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


def test_the_text_part_is_patched_and_the_tower_is_not(ids):
    model = patch_model(tiny(), METHOD)
    expected = logits(patch_model(tiny_model("llama4"), METHOD), ids)
    assert torch.equal(logits(model.language_model, ids), expected)
    assert model.config.text_config is model.language_model.config
    assert model.config.text_config is model.language_model.model.config
    assert classes(model.vision_model) == classes(tiny().vision_model)
    assert model.config.vision_config._attn_implementation == "sdpa"
    pixels = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        ours, theirs = model.vision_model(pixels)[0], tiny().vision_model(pixels)[0]
    assert torch.equal(ours, theirs)


def test_unpatching_restores_all_parts(ids):
    model = tiny()
    config, before, expected = model.config, classes(model), logits(model.language_model, ids)
    fields = (config.to_dict(), type(config.text_config))
    unpatch_model(patch_model(model, METHOD))
    assert model.config is config
    assert model.language_model.config is config.text_config
    assert (config.to_dict(), type(config.text_config)) == fields
    assert classes(model) == before
    assert torch.equal(logits(model.language_model, ids), expected)


def test_another_attention_for_the_text_is_refused():
    model = patch_model(tiny(), METHOD)
    for request in ("sdpa", {"text_config": "eager"}):
        with pytest.raises(ValueError, match="poslsh"):
            model.set_attn_implementation(request)
    model.set_attn_implementation({"vision_config": "eager"})
    assert model.config.vision_config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model)


def test_saving_and_loading(ids, tmp_path):
    model = patch_model(tiny(), METHOD)
    expected = logits(model.language_model, ids)
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "one")
    assert classes(loaded) == classes(model)
    assert torch.equal(logits(loaded.language_model, ids), expected)
    loaded.save_pretrained(tmp_path / "two")  # the host notes the dtype of the parts at the first loading
    AutoModelForImageTextToText.from_pretrained(tmp_path / "two").save_pretrained(tmp_path / "three")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(text) is type(model.language_model)
    assert torch.equal(logits(text, ids), expected)
    for kwargs in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": {"text_config": "sdpa"}}):
        with pytest.raises((KeyError, ValueError), match="poslsh"):
            transformers.Llama4ForConditionalGeneration.from_pretrained(tmp_path / "one", **kwargs)
    host = unpatch_model(loaded)
    assert classes(host) == classes(tiny())
    assert torch.equal(logits(host.language_model, ids), logits(tiny_model("llama4"), ids))
    assert json.loads((tmp_path / "one/config.json").read_text())["model_type"] == "poslsh_llama4"


def test_the_whole_model_generates(ids):
    model = tiny()
    try:
        logits(model, ids)
    except AttributeError as error:
        pytest.skip(f"the installed transformers' own class is broken: {error}")
    patch_model(model, METHOD)
    text = patch_model(tiny_model("llama4"), METHOD)
    torch.testing.assert_close(logits(model, ids), logits(text, ids), **CLOSE)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = text.generate(ids, **options)[:, -5:]
    for cache in ("dynamic", "static"):
        out = model.generate(padded, attention_mask=(padded != 0).long(), cache_implementation=cache, **options)
        assert torch.equal(out[:, -5:], expected)
