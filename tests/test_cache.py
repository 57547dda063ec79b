"""The bounded cache drops keys, and nothing can be told from the outputs."""

import copy

import pytest
import torch
from conftest import random_ids
from test_models import LIMITED
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_poslsh import PosLSHConfig, patch_model, set_step
from hf_poslsh.cache import BoundedLayer, Sight, sight_of_layer
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model

SIGMA = (0.4, 0.8, 1.2, 2.0)
METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6)
REACH = [sight_of_layer(METHOD, 4, layer, None, None, None).reach for layer in range(2)]
CLOSE = {"atol": 2e-5, "rtol": 0}
both_sinks = pytest.mark.parametrize("sinks", [0, 2])


def patched(family, sinks=2, overrides=None, **fields):
    return patch_model(
        tiny_model(family, **(overrides or {})),
        METHOD.replace(sink_tokens=sinks, max_distance=5 if sinks else None, **fields),
    )


def generate(model, ids, new=40, **kwargs):
    """New tokens, and their scores."""
    options = {"do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True, "output_scores": True}
    out = model.generate(ids, **{**options, **kwargs})
    return out.sequences[:, ids.shape[1] :], torch.stack(out.scores, 1), out.past_key_values


def left_padded(rows=(70, 12, 41)):
    ids = torch.zeros(len(rows), max(rows), dtype=torch.long)
    for index, length in enumerate(rows):
        ids[index, -length:] = random_ids(1, length, seed=index)
    return ids, (ids != 0).long()


def steps(model, ids, lengths, cache=None, **kwargs):
    """Logits of a row fed in pieces, and the cache."""
    outs, at = [], 0
    for length in lengths:
        with torch.no_grad():
            out = model(ids[:, at : at + length], use_cache=True, **{CACHE_NAME: cache}, **kwargs)
        outs.append(out.logits)
        at, cache = at + length, out.past_key_values
    return torch.cat(outs, 1), cache


def full_logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


def test_the_reach_is_short_enough_for_these_tests_to_mean_something():
    assert 5 < min(REACH) <= max(REACH) < 30


@both_sinks
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
def test_generation_equals_the_full_cache_and_full_forwards(family, sinks, limited, layers):
    overrides = LIMITED[family] if limited else None
    ids, mask = left_padded()
    got = generate(patched(family, sinks, overrides, layers=layers), ids, attention_mask=mask)
    whole = patched(family, sinks, overrides, layers=layers, cache="full")
    expected = generate(whole, ids, attention_mask=mask)
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], **CLOSE)
    text, seen = torch.cat([ids, got[0]], 1), torch.cat([mask, torch.ones_like(got[0])], 1)
    torch.testing.assert_close(got[1], full_logits(whole, text, attention_mask=seen)[:, 69:-1], **CLOSE)
    for index, layer in enumerate(got[2].layers):
        if layers is None or index in layers:
            assert isinstance(layer, BoundedLayer)
            assert layer.keys.shape[2] <= REACH[index] + 3 * sinks  # three rows, whose sinks stand apart
        else:
            host = expected[2].layers[index]
            assert type(layer) is (BoundedLayer if host.is_sliding else type(host))
    assert not any(isinstance(layer, BoundedLayer) for layer in expected[2].layers)


@both_sinks
def test_forwards_of_any_length_equal_one_without_a_cache(family, sinks):
    model, ids = patched(family, sinks), random_ids(2, 120)
    got, cache = steps(model, ids, (50, 1, 1, 7, 30, 1, 1, 29))
    torch.testing.assert_close(got, full_logits(model, ids), **CLOSE)
    assert cache.get_seq_length() == 120
    assert [layer.keys.shape[2] for layer in cache.layers] == [reach - 1 + sinks for reach in REACH]


@both_sinks
def test_one_row_at_a_time_the_cache_does_not_grow(family, sinks):
    model, ids = patched(family, sinks), random_ids(1, 90)
    cache, held = None, set()
    for at in range(90):
        _, cache = steps(model, ids[:, at : at + 1], (1,), cache)
        if at > max(REACH) + sinks:
            held.add(sum(layer.keys.numel() for layer in cache.layers))
    assert len(held) == 1


@both_sinks
def test_beams(family, sinks):
    ids, mask = left_padded()
    options = {"num_beams": 3, "num_return_sequences": 3, "attention_mask": mask, "max_new_tokens": 25}
    for do_sample in (False, True):
        outs = []
        for model in (patched(family, sinks), patched(family, sinks, cache="full")):
            torch.manual_seed(0)
            outs.append(model.generate(ids, do_sample=do_sample, **options).tolist())
        assert outs[0] == outs[1]


@both_sinks
def test_prompt_lookup_and_assisted_decoding(family, sinks):
    model, whole = patched(family, sinks), patched(family, sinks, cache="full")
    row = torch.cat([random_ids(1, 25)] * 3, 1)
    expected = generate(whole, row, new=40)[0].tolist()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 1000}
    assert model.generate(row, prompt_lookup_num_tokens=4, **options)[:, 75:115].tolist() == expected
    other = patch_model(tiny_model(family, seed=5), METHOD)
    for assistant in (patched(family, sinks), other, tiny_model(family, seed=5)):
        assert model.generate(row, assistant_model=assistant, **options)[:, 75:115].tolist() == expected


def test_memory_is_bounded_in_assisted_decoding_too():
    model = patched("mistral")
    if not hasattr(Cache, "activate_past_recording"):
        pytest.skip("this release does not tell a cache that tokens will be taken back: it keeps all of them")
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(random_ids(1, 80), prompt_lookup_num_tokens=4, **options)
    assert all(layer.keys.shape[2] < max(REACH) + 20 for layer in out.past_key_values.layers)


@both_sinks
@pytest.mark.parametrize("size", [1, 7, 64])
def test_prefill_in_chunks(family, sinks, size):
    ids, mask = left_padded()
    got = generate(patched(family, sinks), ids, new=8, attention_mask=mask, prefill_chunk_size=size)
    expected = generate(patched(family, sinks, cache="full"), ids, new=8, attention_mask=mask)
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], **CLOSE)


@both_sinks
def test_a_returned_cache_is_continued(family, sinks):
    model, row = patched(family, sinks), random_ids(1, 60)
    first = model.generate(row, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, random_ids(1, 9, seed=3)], 1)
    branch = copy.deepcopy(first.past_key_values)
    for cache in (first.past_key_values, branch):
        got = model.generate(longer, max_new_tokens=12, do_sample=False, **{CACHE_NAME: cache})
        assert got[:, 89:].tolist() == generate(patched(family, sinks, cache="full"), longer, new=12)[0].tolist()


@both_sinks
def test_holes_in_the_padding_mask_take_no_room(family, sinks):
    """A right-padded turn, then another: the keys that a query sees are spread over more slots than its reach."""
    ids = random_ids(2, 110)
    mask = torch.ones_like(ids)
    mask[0, 50:80] = 0
    mask[1, 10:20] = 0
    mask[1, 60:90] = 0
    model = patched(family, sinks)
    outs, cache, at = [], None, 0
    for length in (55, 10, 20, 1, 1, 23):
        with torch.no_grad():
            out = model(ids[:, at : at + length], attention_mask=mask[:, : at + length], **{CACHE_NAME: cache})
        outs.append(out.logits)
        at, cache = at + length, out.past_key_values
    expected = full_logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(torch.cat(outs, 1)[mask == 1], expected[mask == 1], **CLOSE)


def test_packed_rows_go_on_in_their_last_document(family):
    model = patched(family)
    ids, positions = random_ids(1, 100), torch.cat([torch.arange(30), torch.arange(70)])[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        cache, at = None, 0
        for length in (60, 1, 9, 30):
            part = slice(at, at + length)
            out = model(ids[:, part], position_ids=positions[:, part], **{CACHE_NAME: cache})
            torch.testing.assert_close(out.logits, expected[:, part], **CLOSE)
            at, cache = at + length, out.past_key_values
        with pytest.raises(ValueError, match="return to an earlier document"):
            model(ids[:, :1], position_ids=torch.tensor([[95]]), **{CACHE_NAME: cache})


def test_cropping_is_exact_or_refused(family):
    model, ids = patched(family), random_ids(1, 80)
    _, cache = steps(model, ids[:, :60], (60,))
    cache.crop(-1)
    with pytest.raises(ValueError, match=r"holds .* of the .* earlier tokens that row 0 sees.*cache='full'"):
        steps(model, ids[:, 59:], (1,), cache)
    _, cache = steps(model, ids[:, :5], (5,))
    cache.crop(-2)
    got, _ = steps(model, ids[:, 3:], (70,), cache)
    torch.testing.assert_close(got, full_logits(model, ids[:, :73])[:, 3:], **CLOSE)
    cache.reset()
    got, _ = steps(model, ids, (40, 40), cache)
    torch.testing.assert_close(got, full_logits(model, ids), **CLOSE)


def test_rows_can_be_repeated_and_selected():
    model, ids = patched("qwen3"), random_ids(2, 80)
    _, cache = steps(model, ids[:, :60], (60,))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    got, _ = steps(model, ids[[1, 0], 60:], (20,), cache)
    torch.testing.assert_close(got, full_logits(model, ids[[1, 0]])[:, 60:], **CLOSE)


def test_a_mask_that_uncovers_dropped_tokens_is_refused():
    model, ids = patched("mistral"), random_ids(1, 60)
    mask = (torch.arange(60) >= 8).long()[None]
    with torch.no_grad():
        cache = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(ValueError, match="padding mask of earlier tokens"):
            model(ids[:, :1], **{CACHE_NAME: cache})


@both_sinks
def test_a_cache_of_the_users_own_is_exact_or_refused(family, sinks):
    model, ids = patched(family, sinks), random_ids(1, 90)
    expected = full_logits(model, ids)
    for make in (DynamicCache, lambda: StaticCache(config=model.config, max_cache_len=90)):
        cache = make()
        got, after = steps(model, ids, (60, 1, 29), cache)
        assert after is cache
        torch.testing.assert_close(got, expected, **CLOSE)

    def windows(spare):
        return Cache(layers=[DynamicSlidingWindowLayer(sliding_window=reach + spare) for reach in REACH])

    if sinks == 0:
        torch.testing.assert_close(steps(model, ids, (60, 1, 29), windows(0))[0], expected, **CLOSE)
    short = windows(-1 if sinks == 0 else 0)
    with pytest.raises(ValueError, match=r"the cache of layer 0 holds .* larger window"):
        steps(model, ids, (60, 1), short)
    mixed = Cache(layers=[DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4)])
    with pytest.raises(ValueError, match="the cache of layer 1"):
        steps(model, ids, (60, 1), mixed)


def test_other_models_refuse_the_cache():
    _, cache = steps(patched("mistral"), random_ids(1, 30), (30,))
    with pytest.raises(ValueError, match="not patched"):
        steps(tiny_model("mistral"), random_ids(1, 1), (1,), cache)


def test_opt_out_training_and_configs_without_a_bound():
    ids = random_ids(1, 9)
    for model in (
        patched("qwen3", cache="full"),
        patched("qwen3").train(),
        patch_model(tiny_model("qwen3"), bias="none"),
        patch_model(tiny_model("qwen3"), bias="alibi"),
    ):
        cache = model(ids, use_cache=True).past_key_values
        assert not any(isinstance(layer, BoundedLayer) for layer in cache.layers)
    assert model(ids, use_cache=False).past_key_values is None
    window = patch_model(tiny_model("qwen3"), bias="window", window=9, sink_tokens=1)
    got, cache = steps(window, random_ids(1, 60), (30, 1, 29))
    torch.testing.assert_close(got, full_logits(window, random_ids(1, 60)), **CLOSE)
    assert {layer.keys.shape[2] for layer in cache.layers} == {9}


def test_generation_without_a_bound_says_so(monkeypatch):
    said = []
    monkeypatch.setattr("hf_poslsh.models.modeling.logger.warning_once", said.append)
    for bias, cache in (("alibi", "bounded"), ("alibi", "full"), ("none", "bounded"), ("poslsh", "bounded")):
        model = patch_model(tiny_model("mistral"), bias=bias, cache=cache)
        model.generate(random_ids(1, 5), max_new_tokens=2)
    assert [message.split()[0] for message in said] == ["bias='alibi'", "bias='none'"]


def test_draws_of_a_training_step_that_reach_further_than_the_cache_are_refused():
    """With resample='step' every step draws its own bins, and the cache was filled under the fixed ones."""
    model, ids = patched("mistral", resample="step"), random_ids(1, 61)
    method = METHOD.replace(sink_tokens=2, resample="step")
    _, cache = steps(model, ids[:, :60], (60,))
    _, whole = steps(model, ids[:, :60], (60,), DynamicCache())
    model.train()
    outcomes = set()
    for step in range(20):
        set_step(model, step)
        reach = [sight_of_layer(method, 4, layer, step, None, None).reach for layer in range(2)]
        enough = all(new <= old for new, old in zip(reach, REACH, strict=True))
        outcomes.add(enough)
        mine, other = copy.deepcopy(cache), copy.deepcopy(whole)
        if not enough:
            with pytest.raises(ValueError, match="bounded cache"):
                model(ids[:, 60:], **{CACHE_NAME: mine})
            continue
        got, expected = model(ids[:, 60:], **{CACHE_NAME: mine}), model(ids[:, 60:], **{CACHE_NAME: other})
        torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
    assert outcomes == {False, True}


def test_sight_counts_what_it_sees():
    for sight in (
        Sight(5, 0, 2**62, 2**62),
        Sight(5, 3, 2**62, 2**62),
        Sight(5, 3, 4, 2**62),
        Sight(9, 2, 7, 10),
        Sight(2**62, 3, 2**62, 6),
        Sight(2**62, 0, 2**62, 2**62),
    ):
        for query in range(40):
            first = torch.tensor([query]).numpy()
            positions = torch.arange(query)[None].numpy()
            assert sight.sees(positions, first).sum() == sight.number_seen(first)[0]
