"""Heads that keep all their keys: against the host with every pair rotated on its own, in all ways of running."""

import copy
import json
import pickle

import pytest
import torch
from conftest import random_ids
from oracles import SIGMA, causal, lsh_weights, split_logits
from test_cache import generate, left_padded, steps
from test_max_distance import BIASES, ROTARIES, bias_weights, check_padding_and_packing, rotated, sinks_of
from test_models import LIMITED
from test_ops import F64, by_hand, inputs
from transformers import DynamicCache

from hf_poslsh import PosLSHConfig, patch_model, unpatch_model
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.ops.full import full_attention
from hf_poslsh.ops.functional import make_layout
from hf_poslsh.ops.rotary import make_turns
from hf_poslsh.split_cache import SplitLayer
from hf_poslsh.testing import tiny_model

CLOSE = {"atol": 1e-5, "rtol": 0}
FULL = ((1,), (0,))
ALL_SIZES = [((1,), (0,)), ((), (1,)), ((0, 1), ())]
distances = pytest.mark.parametrize("distance", [6, None], ids=["bounded", "true"])


def patched(family, overrides=None, **fields):
    fields = {"sigma": SIGMA, "num_samples": 6, "sink_tokens": 2, "max_distance": 6, "full_heads": FULL, **fields}
    return patch_model(tiny_model(family, **(overrides or {})), **fields)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


# --- the operator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize(("keys", "queries"), [(90, 90), (90, 40), (90, 80), (25, 25), (90, 1)])
def test_every_way_to_compute_it_is_the_hand_computed_case(rotary, keys, queries):
    distance = 30
    q, k, v = inputs(queries=keys)
    places = torch.arange(keys).double()
    expected = torch.zeros_like(q)
    for i in range(keys):
        far = torch.maximum(places, torch.tensor(float(i - distance)))
        mask = (torch.arange(keys) <= i).double().numpy()[None, None].repeat(4, 0)
        at_i = rotated(q[:, :, i : i + 1], torch.tensor([float(i)]).double(), rotary)
        expected[:, :, i] = by_hand(at_i, rotated(k, far, rotary), v, mask)[:, :, 0]
    q, k = rotated(q, places, rotary)[:, :, keys - queries :], rotated(k, places, rotary)
    layout = make_layout(q, k)
    turns = make_turns(rotary, layout.query_positions, distance, 0, torch.float64, layout.key_positions)
    results = []
    with torch.no_grad():
        out = full_attention(q, k, v, layout, 0.25, turns, plain=True)
        torch.testing.assert_close(out, expected[:, :, keys - queries :], **F64)
    for impl, plain in [("reference", False), ("auto", False), ("auto", True), ("blocks", False)]:
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = full_attention(*leaves, layout, 0.25, turns, impl=impl, plain=plain)
        torch.testing.assert_close(out, expected[:, :, keys - queries :], **F64)
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **F64)


@pytest.mark.parametrize(("keys", "queries"), [(70, 70), (70, 20), (70, 1)])
def test_true_distances_are_causal_attention(keys, queries):
    q, k, v = inputs(queries=keys)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.25)
    q, expected = q[:, :, keys - queries :], expected[:, :, keys - queries :]
    layout = make_layout(q, k)
    for impl, plain in [("reference", False), ("auto", False), ("auto", True)]:
        torch.testing.assert_close(full_attention(q, k, v, layout, 0.25, impl=impl, plain=plain), expected, **F64)


@pytest.mark.parametrize("plain", [True, False])
def test_the_gradient_is_that_of_finite_differences(plain):
    rotary, tensors = ROTARIES["half"], [tensor.requires_grad_() for tensor in inputs(batch=1, queries=11)]
    layout = make_layout(*tensors[:2])
    turns = make_turns(rotary, layout.query_positions, 4, 0, torch.float64, layout.key_positions)
    assert torch.autograd.gradcheck(lambda *t: full_attention(*t, layout, 0.25, turns, plain=plain), tensors)


LIMITS = {"window": (50, None), "narrow window": (20, None), "chunk": (None, 32), "both": (25, 32)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("packed", [False, True])
def test_host_limits_and_documents(limits, packed):
    rotary, (q, k, v) = ROTARIES["half"], inputs(queries=120)
    kwargs = {"window": limits[0], "chunk": limits[1]}
    if packed:
        lengths = torch.tensor([70, 1, 49])
        kwargs["key_positions"] = torch.cat([torch.arange(n) for n in lengths])
        kwargs["key_segments"] = torch.repeat_interleave(torch.arange(3), lengths)
    layout = make_layout(q, k, **kwargs)
    turns = make_turns(rotary, layout.query_positions, 22, 0, torch.float64, layout.key_positions)
    results = []
    for impl in ("reference", "auto"):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = full_attention(*leaves, layout, 0.25, turns, impl=impl)
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], **F64)


def test_rows_that_see_nothing_are_0_and_masked_keys_are_not_read():
    rotary, (q, k, v) = ROTARIES["half"], inputs(queries=60)
    layout = make_layout(q, k, key_positions=torch.stack([torch.arange(60), torch.arange(60) - 40]))
    turns = make_turns(rotary, layout.query_positions, 9, 0, torch.float64, layout.key_positions)
    expected = full_attention(q, k, v, layout, 0.25, turns)
    assert expected[1, :, :40].eq(0).all()
    k[1, :, :40] = v[1, :, :40] = torch.nan
    for impl in ("auto", "reference"):
        torch.testing.assert_close(full_attention(q, k, v, layout, 0.25, turns, impl=impl), expected, **F64)
    last = make_layout(q[:, :, -1:], k, key_positions=layout.key_positions)
    turns = make_turns(rotary, last.query_positions, 9, 0, torch.float64, last.key_positions)
    one = full_attention(q[:, :, -1:], k, v, last, 0.25, turns)
    torch.testing.assert_close(one, expected[:, :, -1:], **F64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "plain"), [(150, True), (150, False), (1, False), (1, True)])
def test_half_precision(dtype, queries, plain):
    rotary = ROTARIES["half"]
    q, k, v = (tensor.to(dtype) for tensor in inputs(queries=150))
    q = q[:, :, 150 - queries :]
    layout = make_layout(q, k)
    turns = make_turns(rotary, layout.query_positions, 22, 0, torch.float32, layout.key_positions)
    out = full_attention(q, k, v, layout, 0.25, turns, plain=plain)
    expected = full_attention(q, k, v, layout, 0.25, turns, impl="reference")
    assert out.dtype == dtype
    assert (out.double() - expected.double()).abs().max() <= 8 * torch.finfo(dtype).eps


# --- models -----------------------------------------------------------------------------------------------


@distances
@pytest.mark.parametrize("full", ALL_SIZES)
def test_the_model_is_the_host_with_every_pair_rotated_on_its_own(family, ids, full, distance):
    expected = split_logits(tiny_model(family), ids, bias_weights({}, 24), sinks_of(24), distance, full)
    got = logits(patched(family, full_heads=full, max_distance=distance), ids)
    torch.testing.assert_close(got, expected, **CLOSE)
    without = patched(family, full_heads=None, max_distance=distance)
    assert (logits(without, ids) - expected).abs().max() > 0.1


def test_layers_without_full_heads_by_the_dense_reference(family, ids):
    expected = split_logits(tiny_model(family), ids, bias_weights({}, 24), sinks_of(24), 6, ((), (1,)))
    got = logits(patched(family, full_heads=[[], [1]], impl="reference"), ids)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_distances_of_full_heads_are_bounded_without_sinks(family, ids, impl):
    weights = lsh_weights(PosLSHConfig(sigma=SIGMA, num_samples=6), 24)
    expected = split_logits(tiny_model(family), ids, weights, sinks_of(24, 0), 6, FULL)
    model = patched(family, sink_tokens=0, impl=impl)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    pieces, _ = steps(model, ids, [9, 1, 1, 8, 5])
    torch.testing.assert_close(pieces, expected, **CLOSE)


@pytest.mark.parametrize("fields", BIASES, ids=["plsh", "alibi", "window", "fixed_blocks"])
def test_every_bias_in_the_other_heads(family, ids, fields):
    expected = split_logits(tiny_model(family), ids, bias_weights(fields, 24), sinks_of(24), 6, FULL)
    torch.testing.assert_close(logits(patched(family, **fields), ids), expected, **CLOSE)


def test_with_layers_that_are_not_patched(family, ids):
    weights = [causal(24), lsh_weights(PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=2), 24)[1]]
    expected = split_logits(tiny_model(family), ids, weights, sinks_of(24), None, ((), (0,)))
    got = logits(patched(family, layers=[1], full_heads=[[], [0]], max_distance=None), ids)
    torch.testing.assert_close(got, expected, **CLOSE)


def test_all_heads_full_at_true_distances_are_the_host(family, ids):
    for overrides in (None, LIMITED[family]):
        model = patched(family, overrides, full_heads=[[0, 1], [0, 1]], max_distance=None)
        expected = logits(tiny_model(family, **(overrides or {})), ids)
        torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
        padded, mask = left_padded()
        got, whole = (
            logits(model, padded, attention_mask=mask),
            logits(tiny_model(family, **(overrides or {})), padded, attention_mask=mask),
        )
        real = mask.bool()
        torch.testing.assert_close(got[real], whole[real], **CLOSE)


@distances
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
def test_padding_packing_and_pieces(family, distance, limited):
    model = patched(family, LIMITED[family] if limited else None, max_distance=distance)
    row, alone = check_padding_and_packing(model)
    pieces, cache = steps(model, row, [7, 13, 1, 1, 1, 5, 1, 11])
    torch.testing.assert_close(pieces, alone, atol=2e-5, rtol=0)
    assert any(isinstance(layer, SplitLayer) for layer in cache.layers)


@distances
@pytest.mark.parametrize("bias", [{}, {"bias": "alibi"}], ids=["plsh", "alibi"])
def test_generation_with_the_split_cache_equals_the_full_one(family, distance, bias):
    ids, mask = left_padded()
    options = [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
    ]
    for option in options:
        rows = slice(0, 1) if "prompt_lookup_num_tokens" in option else slice(None)
        option = {"attention_mask": mask[rows], "new": 25, **option}
        fields = {"sigma": (0.4, 0.8, 1.2, 2.0), "max_distance": distance, **bias}
        got = generate(patched(family, **fields), ids[rows], **option)
        expected = generate(patched(family, cache="full", **fields), ids[rows], **option)
        assert got[0].tolist() == expected[0].tolist()
        torch.testing.assert_close(got[1], expected[1], atol=5e-5, rtol=0)
        assert not any(isinstance(layer, SplitLayer) for layer in expected[2].layers)
        for layer in got[2].layers:
            assert isinstance(layer, SplitLayer)
            assert layer.full_keys.shape[2] == layer.seen
            if not bias and "prompt_lookup_num_tokens" not in option:  # which keeps what may be taken back
                assert layer.keys.shape[2] < layer.seen


def test_static_caches_hold_everything(family):
    ids, mask = left_padded()
    expected = generate(patched(family), ids, attention_mask=mask, new=20)
    got = generate(patched(family), ids, attention_mask=mask, new=20, cache_implementation="static")
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], atol=5e-5, rtol=0)


def test_a_chunk_border_inside_of_the_hosts_cache_is_seen():
    """Llama-4's own cache holds as many keys as a chunk has, across its border."""
    overrides, ids = {"attention_chunk_size": 16}, random_ids(1, 50)
    expected = logits(tiny_model("llama4", **overrides), ids, use_cache=False)
    model = patched("llama4", overrides, full_heads=[[0, 1], [0, 1]], max_distance=None, cache="full")
    got, _ = steps(model, ids, [10, *[1] * 40], DynamicCache(config=model.config))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_pickled_cache_goes_on():
    model, ids = patched("qwen3"), random_ids(2, 40)
    pieces, cache = steps(model, ids, [10, 1, 1, 1, 1])
    again, _ = steps_from(model, ids, 14, pickle.loads(pickle.dumps(cache)))
    torch.testing.assert_close(torch.cat([pieces, again], 1), logits(model, ids, use_cache=False), **CLOSE)


def steps_from(model, ids, start, cache, mask=None, **kwargs):
    """Logits of single tokens from ``start`` on, and the cache."""
    outs = []
    for at in range(start, ids.shape[1]):
        given = {} if mask is None else {"attention_mask": mask[:, : at + 1]}
        with torch.no_grad():
            out = model(ids[:, at : at + 1], use_cache=True, **{CACHE_NAME: cache}, **given, **kwargs)
        outs.append(out.logits)
        cache = out.past_key_values
    return torch.cat(outs, 1), cache


@pytest.mark.parametrize("hidden", [slice(0, 5), slice(5, 10)])
def test_tokens_that_are_hidden_later(hidden):
    """Turned keys go where their new positions say; the bounded heads see everything here, so that none was lost."""
    model, ids = patched("qwen3", sigma=100.0), random_ids(1, 40)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, hidden] = 0
    got = []
    for cache in (None, DynamicCache()):
        _, cache = steps(model, ids, [20, *[1] * 10], cache)
        got.append(steps_from(model, ids, 30, cache, mask)[0])
    torch.testing.assert_close(*got, atol=2e-5, rtol=0)


def test_a_mask_of_every_row_and_then_none():
    model, ids = patched("qwen3"), random_ids(2, 30)
    expected = logits(model, ids, use_cache=False)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        cache = model(ids[:, :10], attention_mask=mask[:, :10], use_cache=True).past_key_values
    first, cache = steps_from(model, ids[:, :15], 10, cache, mask)
    second, _ = steps_from(model, ids, 15, cache)
    torch.testing.assert_close(torch.cat([first, second], 1), expected[:, 10:], atol=2e-5, rtol=0)


def test_a_cache_of_another_method_is_refused():
    ids = random_ids(1, 30)
    for fields, message in (
        ({"full_heads": [[0], [1]]}, r"KV heads \[1\], where full_heads names \[0\]"),
        ({"full_heads": None}, r"names \[\]: it was made for another method"),
        ({"max_distance": None}, "filled at bounded rotary distances"),
    ):
        model = patched("qwen3")
        _, cache = steps(model, ids, [20, 1, 1])
        unpatch_model(model)
        patch_model(model, **{**PosLSHConfig.from_dict(patched("qwen3").config.poslsh).to_dict(), **fields})
        with pytest.raises(ValueError, match=message):
            steps_from(model, ids, 22, cache)


def test_backward_after_the_cache_went_on():
    model, ids = patched("qwen3"), random_ids(2, 30)
    out = model(ids[:, :20], use_cache=True)
    steps_from(model, ids, 20, out.past_key_values)
    out.logits.square().mean().backward()
    embedding = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    model(ids[:, :20], use_cache=False).logits.square().mean().backward()
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, embedding, atol=1e-5, rtol=1e-3)


def test_one_padded_query_in_half_precision_does_not_overflow():
    q = torch.full((1, 1, 1, 64), 40.0).half()
    k = (torch.full((1, 1, 5, 64), 40.0) * torch.tensor([1, 0.9, 0.5, 0.2, 1.0])[:, None]).half()
    v, layout = torch.randn(1, 1, 5, 64).half(), make_layout(q, k)
    expected = full_attention(q, k, v, layout, 0.125, impl="reference")
    for plain in (True, False):
        torch.testing.assert_close(full_attention(q, k, v, layout, 0.125, plain=plain), expected, atol=2e-3, rtol=0)


def test_a_second_derivative_is_refused_by_name():
    model, ids = patched("qwen3"), random_ids(1, 20)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, use_cache=False).logits.square().sum()
    (grad,) = torch.autograd.grad(loss, embeds, create_graph=True)
    with pytest.raises(ValueError, match="no second derivatives"):
        grad.square().sum().backward()


def test_a_key_is_turned_once(monkeypatch):
    from hf_poslsh import split_cache

    turned = []
    monkeypatch.setattr(split_cache, "turn", lambda s, *a, f=split_cache.turn: turned.append(s.shape[2]) or f(s, *a))
    generate(patched("qwen3"), random_ids(1, 20), new=30)
    tokens = 20 + 30 - 1  # the last one written is never read
    # In both layers, those at least 6 behind the last query; position 0 stands where it should from the start.
    assert sum(turned) == 2 * (tokens - 1 - 6)


def test_a_crop_turns_keys_back():
    ids, model = random_ids(1, 50), patched("qwen3")
    expected = logits(model, ids[:, :40])
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).past_key_values
        cache.activate_past_recording()
        for at in range(30, 50):
            cache = model(ids[:, at : at + 1], use_cache=True, **{CACHE_NAME: cache}).past_key_values
        for layer in cache.layers:
            layer.crop(-15)
        out = model(ids[:, 35:40], use_cache=True, **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(out, expected[:, 35:], atol=2e-5, rtol=0)


def test_a_cache_can_be_copied_reset_and_offloaded():
    ids, model = random_ids(2, 40), patched("mistral")
    expected = logits(model, ids, use_cache=False)
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True).past_key_values
        again = copy.deepcopy(cache)
        for layer in again.layers:
            layer.offload()
            layer.prefetch()
        for held in (cache, again):
            out = model(ids[:, 20:], use_cache=True, **{CACHE_NAME: held}).logits
            torch.testing.assert_close(out, expected[:, 20:], atol=2e-5, rtol=0)
        cache.reset()
        out = model(ids, use_cache=True, **{CACHE_NAME: cache}).logits
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@distances
def test_gradients_of_the_weights(family, ids, distance):
    gradients = []
    for impl, checkpointing in (("reference", False), ("auto", False), ("auto", True)):
        model = patched(family, impl=impl, max_distance=distance).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_compiled(family, ids):
    model = patched(family)
    expected = logits(model, ids, use_cache=False)
    torch._dynamo.reset()  # other tests of the process have compiled the same code for other models
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), expected, **CLOSE)


def test_save_and_reload(family, ids, tmp_path):
    model = patched(family)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["poslsh"]["full_heads"] == [[1], [0]]
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, ids), logits(model, ids), **CLOSE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"full_heads": [[0]]}, "lists for 1 layers but the model has 2"),
        ({"full_heads": [[0], [2]]}, "KV head 2 in layer 1, but a layer has KV heads 0 to 1"),
        ({"full_heads": [[0], [1]], "layers": [1]}, r"\[0\] of layer 0, which layers=\[1\]"),
        ({"full_heads": [[], []]}, "names no head"),
        ({"full_heads": [[0, 0], []]}, "named once"),
        ({"full_heads": [0, 1]}, "for every layer a list"),
        ({"full_heads": [[-1], []]}, "for every layer a list"),
        ({"full_heads": "all"}, "for every layer a list"),
    ],
)
def test_bad_heads(fields, message):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny_model("qwen3"), sigma=4.0, **fields)
