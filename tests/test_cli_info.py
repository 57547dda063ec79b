"""``hf-poslsh info`` against what generate() holds and what the masks let through."""

import json
import re

import numpy as np
import pytest
import torch
from command_line import LIMITS, data_of, error_of, run
from conftest import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_poslsh import PositionalHash, PosLSHConfig, patch_model
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_config, tiny_model


@pytest.mark.parametrize(
    "fields",
    [
        {"sigma": 4.0, "num_samples": 4, "sink_tokens": 2},
        {"sigma": 40.0, "num_samples": 4, "sink_tokens": 2, "layers": [1]},
        {"bias": "window", "window": 12, "sink_tokens": 3},
        {"sigma": 4.0, "num_samples": 4, "sink_tokens": 2, "full_heads": [[1], []]},
        {"bias": "alibi"},
        {"sigma": 4.0, "cache": "full"},
        None,
    ],
)
def test_cache_bytes_are_those_of_generate_and_flops_those_of_the_masks(family, fields, tmp_path):
    model = tiny_model(family, **LIMITS[family])
    text = model.config
    n, heads = 93, 4
    if fields is not None:
        patch_model(model, **fields)
    model.config.save_pretrained(tmp_path)
    result = data_of("info", tmp_path, "--length", n, "--batch", 2, "--dtype", "float32")

    held = np.zeros((n, 2), dtype=int)
    ids = random_ids(2, 20)
    with torch.no_grad():
        cache = getattr(model(ids, use_cache=True), CACHE_NAME)
        for length in range(21, n + 1):
            model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
            held[length - 1] = [
                sum(
                    getattr(layer, name).nbytes
                    for name in ("keys", "values", "full_keys", "full_values")
                    if hasattr(layer, name)
                )
                for layer in cache.layers
            ]
    assert [layer["cache_bytes"] for layer in result["layers"]] == held.max(0).tolist()
    assert result["cache_bytes"] == sum(layer["cache_bytes"] for layer in result["layers"])
    assert result["full_cache_bytes"] == 2 * 2 * (2 * 8 * 4) * n * 2  # batch, k and v, KV heads x dim x bytes, layers

    i, j = np.mgrid[:n, :n]
    for layer in result["layers"]:
        kind = text.layer_types[layer["layer"]] if getattr(text, "layer_types", None) else "sliding_attention"
        seen = np.broadcast_to(j <= i, (heads, n, n)).copy()
        if kind == "sliding_attention":
            seen &= i - j < 30
        if kind == "chunked_attention":
            seen &= i // 40 == j // 40
        if fields is not None and layer["layer"] in fields.get("layers", [0, 1]):
            sinks = j < fields.get("sink_tokens", 0)
            if fields.get("bias") == "window":
                seen &= (i - j < 12) | sinks
            elif "bias" not in fields:
                hashes = PositionalHash.sample(
                    [fields["sigma"]] * 4, fields.get("num_samples", 20), layer=layer["layer"]
                )
                near, windows = (hashes.mask_mean(n) > 0) | sinks, np.ceil(hashes.widths.max(1)).tolist()
                if 1 in layer["full_heads"]:  # the query heads 2 and 3
                    near[2:], windows[2:] = True, [None, None]
                seen &= near
                assert layer["windows"] == windows
        assert layer["flops"] == 2 * seen.sum() * (8 + 8) * 2  # a multiply and an add, q . k and values, batch
        assert layer["keys_per_query"] == pytest.approx(seen.sum() / (heads * n))
    assert result["full_flops"] == 2 * (8 + 8) * heads * (n * (n + 1) // 2) * 2 * 2


def test_info_in_words(patched, host):
    text = run("info", patched).stdout
    assert f"{patched}: patched. PosLSHQwen3ForCausalLM" in text
    assert re.search(r"num_samples +6\n", text)
    assert "0 (not patched)  no limit" in text
    assert "512 tokens, batch 1, float32" in text
    assert "not patched. Qwen3ForCausalLM; `hf-poslsh patch" in run("info", host).stdout


def test_info_says_what_lies_beyond_the_trained_length(tmp_path, host):
    assert "trained context length: 512 tokens\n" in run("info", host).stdout
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    for index, (parameters, fields, words) in enumerate(
        [
            (
                None,
                {"sink_tokens": 1},
                "512 tokens; beyond, the rotary distance of sink tokens is untrained: patch with",
            ),
            (
                None,
                {"sink_tokens": 1, "max_distance": "auto"},
                "sink tokens stay within 64 positions of rotary distance",
            ),
            (None, {"sink_tokens": 0}, "trained context length: 512 tokens\n"),
            (scaled, {"sink_tokens": 0}, "256 tokens, 512 with its rescaled RoPE frequencies\n"),
        ]
    ):
        model = tiny_model("qwen3", **({} if parameters is None else {"rope_parameters": parameters}))
        patch_model(model, sigma=4.0, **fields).save_pretrained(tmp_path / str(index))
        assert words in run("info", tmp_path / str(index)).stdout


def test_info_of_other_models(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    result = data_of("info", tmp_path)
    assert (result["patched"], result["family"]) == (False, None)
    assert "llama is not supported; supported are MistralForCausalLM" in run("info", tmp_path).stdout


@pytest.mark.parametrize("known", [True, False])
def test_info_of_an_adapter(host, tmp_path, known):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(host)
    if not known:
        model.name_or_path = "nobody/no-model"
    patch_model(model, sigma=6.0, num_samples=5)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path)
    result = data_of("info", tmp_path, "--length", "100")
    assert (result["kind"], result["patched"]) == ("adapter", True)
    assert result["method"] == PosLSHConfig(sigma=6.0, num_samples=5).to_dict()
    assert ("layers" in result) == known
    if known:
        assert result["base"] == str(host)
        assert result["layers"][0]["windows"] == PositionalHash.sample([6.0] * 4, 5).reach.tolist()
    else:
        assert "could not be read" in run("info", tmp_path).stdout


def test_info_of_an_adapter_of_a_stock_model(host, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(host)}))
    assert data_of("info", tmp_path)["patched"] is False
    assert f"not patched. An adapter on {host}" in run("info", tmp_path).stdout


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_a_bad_adapter_config_is_named(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    assert "adapter_config.json" in error_of("info", tmp_path)


def test_a_name_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch, patched):
    snapshot = tmp_path / "models--somebody--a-model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((patched / "config.json").read_bytes())
    (tmp_path / "models--somebody--a-model/refs").mkdir()
    (tmp_path / "models--somebody--a-model/refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert data_of("info", "somebody/a-model")["patched"] is True
    assert "somebody/no-model" in error_of("info", "somebody/no-model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "there is no folder no/such/folder"),
        (["{host}/config.json"], "is a file"),
        (["{host}/.."], "neither config.json nor adapter_config.json"),
        (["{host}", "--length", "0"], "length"),
        (["{host}", "--dtype", "int8"], "bfloat16"),
    ],
)
def test_info_refuses(host, arguments, message):
    assert message in error_of("info", *(argument.format(host=host) for argument in arguments))


def test_tiny_config_of_the_tests_has_the_limits():
    assert tiny_config("llama4", **LIMITS["llama4"]).layer_types == ["chunked_attention", "full_attention"]
