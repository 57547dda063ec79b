"""Rotary distances that stop growing: the operator and the models, against explicit rotations of every pair."""

import json

import numpy as np
import pytest
import torch
from conftest import random_ids
from oracles import SIGMA, bounded_logits, causal, lsh_weights
from test_models import LIMITED
from test_ops import F32, F64, assert_same, by_hand, inputs, run
from test_ops_implementations import LAYOUTS
from transformers import Gemma3TextConfig

from hf_poslsh import (
    PositionalHash,
    PosLSHConfig,
    alibi_attention,
    patch_model,
    positional_lsh_attention,
    unpatch_model,
)
from hf_poslsh.models import modeling
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.models.rope import check_max_distance
from hf_poslsh.ops import flex, functional, rectangles
from hf_poslsh.ops.rotary import Rotary, turn
from hf_poslsh.testing import tiny_model

CLOSE = {"atol": 1e-5, "rtol": 0}
ROTARIES = {
    "half": Rotary(10.0 ** -torch.linspace(0, 2, 8, dtype=torch.float64)),
    "interleaved": Rotary(10.0 ** -torch.linspace(0, 2, 8, dtype=torch.float64), interleaved=True),
    "a part of the head": Rotary(10.0 ** -torch.linspace(0, 2, 5, dtype=torch.float64)),
}


def rotated(states, positions, rotary):
    """States ``(..., N, D)`` rotated by their positions, as complex numbers."""
    pairs = len(rotary.frequencies)
    first = torch.arange(pairs) * (2 if rotary.interleaved else 1)
    second = first + (1 if rotary.interleaved else pairs)
    turned = torch.complex(states[..., first], states[..., second])
    turned = turned * torch.polar(torch.ones(()).double(), positions[:, None] * rotary.frequencies)
    out = states.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def far_by_hand(q, k, v, mask, rotary, sinks, distance):
    """Attention of unrotated q and k, every pair rotated on its own, in NumPy."""
    n = q.shape[2]
    out = torch.zeros_like(q)
    for i in range(n):
        places = torch.arange(n).double()
        places[:sinks] = places[:sinks].clamp_min(i - distance)
        out[:, :, i] = by_hand(
            rotated(q[:, :, i : i + 1], torch.tensor([float(i)]).double(), rotary), rotated(k, places, rotary), v,
            mask[:, i : i + 1],
        )[:, :, 0]  # fmt: skip
    return out


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("impl", ["reference", "banded", "blocks", "flex"])
def test_every_implementation_is_the_hand_computed_case(impl, rotary, monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: flex.flex_attention)
    n, sinks, distance = 150, 3, 40
    q, k, v = inputs(queries=n)
    hashes = PositionalHash.sample([1.0, 2.0, 4.0, 9.0], 8)
    mask = hashes.mask_mean(n)
    mask[:, :, :sinks] = 1.0
    expected = far_by_hand(q, k, v, np.tril(mask), rotary, sinks, distance)
    places = torch.arange(n).double()
    tensors = rotated(q, places, rotary), rotated(k, places, rotary), v
    dtype, close = (torch.float32, F32) if impl == "flex" else (torch.float64, F64)
    tensors = [tensor.to(dtype) for tensor in tensors]
    options = {"sink_tokens": sinks, "impl": impl}
    actual = positional_lsh_attention(*tensors, hashes, max_distance=distance, rotary=rotary, **options)
    torch.testing.assert_close(actual.double(), expected, **close)
    true = positional_lsh_attention(*tensors, hashes, **options)
    assert (true.double() - expected)[:, :, distance + sinks :].abs().max() > 0.1
    torch.testing.assert_close(true.double()[:, :, : distance + 1], expected[:, :, : distance + 1], **close)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_values_and_gradients_of_the_banded_pass(rotary, is_causal, layout):
    tensors = inputs(queries=300)
    hashes = PositionalHash.sample([1.0, 2.0, 4.0, 30.0], 8)
    for distance in (1, 31, 33, 400):
        options = {"sink_tokens": 5, "max_distance": distance, "rotary": rotary, "is_causal": is_causal}
        options |= LAYOUTS[layout]
        expected = run(tensors, hashes, impl="reference", **options)
        assert_same(run(tensors, hashes, impl="banded", **options), expected, **F64)


def test_the_gradient_is_that_of_finite_differences():
    tensors = [tensor.requires_grad_() for tensor in inputs(batch=1, queries=12, depth=16)]
    hashes = PositionalHash.sample([1.0, 2.0, 3.0, 4.0], 4)

    def attention(q, k, v):
        return positional_lsh_attention(
            q, k, v, hashes, sink_tokens=2, max_distance=4, rotary=ROTARIES["interleaved"], return_lse=True
        )

    assert torch.autograd.gradcheck(attention, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rectangles_and_flex(layout, monkeypatch):
    monkeypatch.setattr(rectangles, "_ROWS", 32)
    monkeypatch.setattr(flex, "_compiled", lambda: flex.flex_attention)
    tensors, hashes = inputs(queries=300), PositionalHash.sample([1.0, 2.0, 4.0, 30.0], 8)
    options = {"sink_tokens": 3, "max_distance": 20, "rotary": ROTARIES["half"], **LAYOUTS[layout]}
    expected = run(tensors, hashes, impl="reference", **options)
    halves = [tensor.float() for tensor in tensors]
    actual = positional_lsh_attention(*halves, hashes, impl="flex", **options)
    torch.testing.assert_close(actual.double(), expected[0], **F32)
    monkeypatch.setattr(functional, "banded_attention", rectangles.rectangles_attention)
    assert_same(run(tensors, hashes, impl="banded", **options), expected, **F64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_turns_in_float32(dtype):
    tensors = [tensor.to(dtype) for tensor in inputs(queries=200)]
    hashes = PositionalHash.sample([1.0, 2.0, 4.0, 30.0], 8)
    options = {"sink_tokens": 3, "max_distance": 20, "rotary": Rotary(ROTARIES["half"].frequencies.float())}
    out = positional_lsh_attention(*tensors, hashes, **options)
    expected = positional_lsh_attention(*[tensor.double() for tensor in tensors], hashes, **options)
    assert (out.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_a_common_offset_of_positions_changes_nothing():
    """As left padding gives, where a host rotates by slots."""
    n, rotary = 90, ROTARIES["half"]
    q, k, v = inputs(queries=n)
    hashes = PositionalHash.sample([1.0, 2.0, 4.0, 9.0], 8)
    outs = []
    for offset in (0.0, 17.0):
        places = torch.arange(n).double() + offset
        tensors = rotated(q, places, rotary), rotated(k, places, rotary), v
        outs.append(positional_lsh_attention(*tensors, hashes, sink_tokens=3, max_distance=20, rotary=rotary))
    torch.testing.assert_close(*outs, **F64)


def test_exact_alibi_has_it_too():
    n, rotary, sigma = 120, ROTARIES["half"], np.array([1.0, 2.0, 4.0, 9.0])
    q, k, v = inputs(queries=n)
    distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    weight = np.exp(-distance / sigma[:, None, None])
    weight[:, :, :2] = 1.0
    places = torch.arange(n).double()
    tensors = rotated(q, places, rotary), rotated(k, places, rotary), v
    out = alibi_attention(*tensors, sigma, tolerance=1e-12, sink_tokens=2, max_distance=30, rotary=rotary)
    expected = far_by_hand(q, k, v, np.tril(weight), rotary, 2, 30)
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_distance": 4}, "go together"),
        ({"rotary": ROTARIES["half"]}, "go together"),
        ({"max_distance": 0, "rotary": ROTARIES["half"]}, "max_distance is 0"),
        ({"max_distance": 4, "rotary": ROTARIES["half"], "sink_tokens": 0}, "sink_tokens is 0"),
        ({"max_distance": 4, "rotary": Rotary(torch.ones(9))}, "from 1 to 8"),
        ({"max_distance": 4, "rotary": Rotary(torch.ones(2, dtype=torch.int64))}, "floating"),
    ],
)
def test_bad_arguments_of_the_operator(options, message):
    hashes = PositionalHash.sample([1.0, 2.0, 3.0, 4.0], 4)
    with pytest.raises(ValueError, match=message):
        positional_lsh_attention(*inputs(), hashes, **{"sink_tokens": 1, **options})


def test_turning_there_and_back_is_nothing():
    states, angles = inputs(queries=20)[0], torch.randn(1, 20, 6, dtype=torch.float64)
    there, back = (torch.stack([angles.cos(), sign * angles.sin()], -2) for sign in (1, -1))
    for interleaved in (False, True):
        again = turn(turn(states, there, interleaved), back, interleaved)
        torch.testing.assert_close(again, states, **F64)
        assert (turn(states, there, interleaved) - states).abs().max() > 0.1


# --- models -----------------------------------------------------------------------------------------------


def patched(family, overrides=None, **fields):
    fields = {"sigma": SIGMA, "num_samples": 6, "sink_tokens": 2, "max_distance": 6, **fields}
    return patch_model(tiny_model(family, **(overrides or {})), **fields)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def sinks_of(n, sinks=2):
    return torch.arange(n) < sinks


def bias_weights(fields, n):
    """The weights of every pair in both layers, and 0 for later keys."""
    distance = (np.arange(n)[:, None] - np.arange(n)).clip(0)
    if fields.get("bias") == "alibi":
        weight = np.exp(-distance / np.array(SIGMA)[:, None, None])
    elif fields.get("bias") == "window":
        weight = np.repeat((distance < fields["window"])[None], 4, 0).astype(float)
    elif fields.get("bias") == "fixed_blocks":
        blocks = np.arange(n) // (2 * np.array(SIGMA)[:, None])
        weight = (blocks[:, :, None] == blocks[:, None]).astype(float)
    else:
        return lsh_weights(PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=2), n)
    weight[:, :, :2] = 1.0
    return [weight * causal(n)] * 2


BIASES = [{}, {"bias": "alibi", "tolerance": 1e-9}, {"bias": "window", "window": 5}, {"bias": "fixed_blocks"}]


@pytest.mark.parametrize("fields", BIASES, ids=["plsh", "alibi", "window", "fixed_blocks"])
def test_the_model_is_the_host_with_every_pair_rotated_on_its_own(family, ids, fields):
    expected = bounded_logits(tiny_model(family), ids, bias_weights(fields, 24), sinks_of(24), 6)
    torch.testing.assert_close(logits(patched(family, **fields), ids), expected, **CLOSE)
    assert (logits(patched(family, max_distance=None, **fields), ids) - expected).abs().max() > 0.1


SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 1e4,
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED)
def test_rescaled_frequencies_and_their_attention_scaling(family, ids, scaling):
    overrides = {"rope_parameters": dict(SCALED[scaling])}
    expected = bounded_logits(tiny_model(family, **overrides), ids, bias_weights({}, 24), sinks_of(24), 6)
    model = patched(family, overrides)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    if scaling == "yarn":
        assert model.model.rotary_emb.attention_scaling > 1.05


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(kind):
    parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = tiny_model("mistral", rope_parameters=parameters)
    with pytest.raises(ValueError, match=f"does not go with rope_type='{kind}'"):
        patch_model(model, sink_tokens=1, max_distance="auto")
    assert type(model).__name__ == "MistralForCausalLM"
    patch_model(model, sink_tokens=1)


def test_rotary_embeddings_of_several_kinds_are_refused():
    config = Gemma3TextConfig(num_hidden_layers=2)
    with pytest.raises(ValueError, match="rotary embeddings of different kinds"):
        check_max_distance(PosLSHConfig(sink_tokens=1, max_distance=8), config, "half")


def test_llama4_norm_after_the_rotation_and_layers_without_rope(ids):
    overrides = {"no_rope_layers": [1, 0], "use_qk_norm": True, "floor_scale": 4, "attn_scale": 2.0}
    expected = bounded_logits(tiny_model("llama4", **overrides), ids, bias_weights({}, 24), sinks_of(24), 6)
    torch.testing.assert_close(logits(patched("llama4", overrides), ids), expected, **CLOSE)


@pytest.mark.parametrize("layers", [[0], [1]])
def test_layers_that_are_not_patched_keep_their_distances(ids, layers):
    weights = [bias_weights({}, 24)[i] if i in layers else causal(24) for i in range(2)]
    host = tiny_model("qwen3")
    model = patched("qwen3", layers=layers)
    # The other layer is the host's: no key of it stands elsewhere.
    for index in range(2):
        if index not in layers:
            host.model.layers[index].self_attn.forward = _at_true_distances(host, index)
    expected = bounded_logits(host, ids, weights, sinks_of(24), 6)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)


def _at_true_distances(host, index):
    forward = host.model.layers[index].self_attn.forward

    def attention(hidden_states, position_embeddings=None, **kwargs):
        n = hidden_states.shape[1]
        return forward(
            hidden_states, position_embeddings=host.model.rotary_emb(hidden_states, torch.arange(n)[None]), **kwargs
        )

    return attention


def test_padding_and_packing(family):
    check_padding_and_packing(patched(family, LIMITED[family]))


def check_padding_and_packing(model):
    """Rows that are padded together, and packed into one, are each what they are alone; the first, and its logits."""
    rows = [random_ids(1, length, seed=length) for length in (40, 9, 23)]
    alone = [logits(model, row, use_cache=False) for row in rows]
    padded, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, 40 - row.shape[1] :], mask[index, 40 - row.shape[1] :] = row, 1
    together = logits(model, padded, attention_mask=mask)
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = logits(model, torch.cat(rows, 1), position_ids=places, use_cache=False)
    start = 0
    for index, row in enumerate(rows):
        length = row.shape[1]
        torch.testing.assert_close(together[index : index + 1, 40 - length :], alone[index], **CLOSE)
        torch.testing.assert_close(packed[:, start : start + length], alone[index], **CLOSE)
        start += length
    return rows[0], alone[0]


def test_gradients_of_the_weights_with_and_without_checkpointing(family, ids):
    """Against autograd through the dense reference."""
    gradients = []
    for impl, checkpointing in (("reference", False), ("banded", False), ("banded", True)):
        model = patched(family, impl=impl).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_prefill_in_chunks_and_decoding_equal_one_pass(family):
    ids = random_ids(1, 60)
    for fields in ({}, {"cache": "full"}):
        model = patched(family, **fields)
        whole, parts, cache, at = logits(model, ids), [], None, 0
        for length in (7, 20, 1, 1, 5, 1, 25):
            with torch.no_grad():
                out = model(ids[:, at : at + length], use_cache=True, **{CACHE_NAME: cache})
            parts.append(out.logits)
            at, cache = at + length, out.past_key_values
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=0)


# --- configuration ----------------------------------------------------------------------------------------


def test_auto_is_a_number_of_the_model_that_the_checkpoint_holds(tmp_path):
    model = patch_model(tiny_model("qwen3"), PosLSHConfig.pretrained())
    assert model.config.poslsh["max_distance"] == 512 // 8
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["poslsh"]
    assert saved["max_distance"] == 64
    again = type(model).from_pretrained(tmp_path)
    assert again.config.poslsh == model.config.poslsh
    scaled = tiny_model("qwen3", rope_parameters=dict(SCALED["yarn"]))
    assert patch_model(scaled, PosLSHConfig.pretrained()).config.poslsh["max_distance"] == 128 // 8


def test_a_checkpoint_saved_before_keeps_its_true_distances(tmp_path, ids):
    model = patched("qwen3", max_distance=None)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["poslsh"]["max_distance"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path), ids), logits(model, ids), **CLOSE)


def test_pretrained_bounds_the_distance_where_there_is_one():
    assert PosLSHConfig.pretrained().max_distance == "auto"
    assert PosLSHConfig.pretrained(bias="window", window=64).max_distance == "auto"
    assert PosLSHConfig.pretrained(max_distance=7).max_distance == 7
    for fields in ({"sink_tokens": 0}, {"rope": "drop"}, {"bias": "none"}):
        assert PosLSHConfig.pretrained(**fields).max_distance is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sink_tokens": 0}, "sink_tokens=0"),
        ({"bias": "none"}, "bias='none'"),
        ({"rope": "drop"}, "rope='drop' has none"),
        ({"max_distance": 0}, "from 1 to"),
        ({"max_distance": "far"}, "'far'"),
    ],
)
def test_where_it_can_mean_nothing(fields, message):
    with pytest.raises(ValueError, match=message):
        PosLSHConfig(**{"sink_tokens": 1, "max_distance": 8, **fields})


def test_unresolved_auto_in_a_config_is_refused():
    config = patched("mistral").config
    config.poslsh = {**config.poslsh, "max_distance": "auto"}
    with pytest.raises(ValueError, match="'auto' in a model's config"):
        type(patched("mistral"))(config)


# --- the warning ------------------------------------------------------------------------------------------

LONG = {"max_position_embeddings": 32}


@pytest.fixture
def warnings_of(monkeypatch):
    texts = []
    monkeypatch.setattr(modeling.logger, "warning", lambda text, *args: texts.append(text))
    return texts


def test_a_true_distance_beyond_the_trained_length_warns_once(family, warnings_of):
    model = patched(family, LONG, max_distance=None)
    logits(model, random_ids(1, 32))
    assert not warnings_of
    logits(model, random_ids(1, 33))
    logits(model, random_ids(1, 40))
    (text,) = warnings_of
    assert "33 tokens" in text
    assert "32" in text
    assert "max_distance='auto'" in text
    unpatch_model(model)
    assert not any("warned" in name for module in model.modules() for name in vars(module))


def test_decoding_past_the_trained_length_warns(warnings_of):
    model = patched("qwen3", LONG, max_distance=None)
    model.generate(random_ids(1, 30), max_new_tokens=2, do_sample=False)
    assert not warnings_of
    model.generate(random_ids(1, 30), max_new_tokens=5, do_sample=False)
    assert len(warnings_of) == 1


def test_what_is_no_untrained_distance_does_not_warn(warnings_of):
    long = random_ids(1, 60)
    for fields in ({}, {"sink_tokens": 0, "max_distance": None}, {"max_distance": None, "rope": "drop"}):
        logits(patched("qwen3", LONG, **fields), long)
    logits(patched("mistral", {**LONG, "sliding_window": 20}, max_distance=None), long)
    logits(patched("llama4", {**LONG, "no_rope_layers": [0, 0]}, max_distance=None), long)
    model = patched("qwen3", LONG, max_distance=None)
    logits(model, long, position_ids=torch.arange(60)[None] % 30)
    logits(model, long, attention_mask=(torch.arange(60)[None] >= 30).long())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    logits(patched("qwen3", {**LONG, "rope_parameters": yarn}, max_distance=None), long)
    assert not warnings_of
    logits(model, long)
    assert len(warnings_of) == 1
