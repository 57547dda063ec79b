"""The bounded static cache: memory of a fixed size, and nothing can be told from the outputs."""

import pytest
import torch
from conftest import random_ids
from test_cache import CLOSE, METHOD, REACH, both_sinks, full_logits, generate, left_padded, patched, steps
from test_models import LIMITED
from transformers import GenerationConfig, StaticCache

from hf_poslsh import patch_model
from hf_poslsh.cache import Sight
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.static_cache import Ring, RingLayer, make_static_bounded
from hf_poslsh.testing import tiny_model

STATIC = {"cache_implementation": "static"}


def ring_cache(model, length=130):
    """An empty static cache with the rings that generate() would give this model."""
    cache, method = StaticCache(config=model.config, max_cache_len=length), METHOD.replace(**model.config.poslsh)
    sinks = method.sink_tokens
    make_static_bounded(cache, {i: Sight(reach, sinks, 2**62, 2**62) for i, reach in enumerate(REACH)}, length)
    assert [type(layer) for layer in cache.layers] == [RingLayer] * 2
    return cache


@both_sinks
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
def test_generation_equals_the_full_cache(family, sinks, limited, layers):
    overrides = LIMITED[family] if limited else None
    ids, mask = left_padded()
    got = generate(patched(family, sinks, overrides, layers=layers), ids, attention_mask=mask, **STATIC)
    whole = patched(family, sinks, overrides, layers=layers, cache="full")
    expected = generate(whole, ids, attention_mask=mask)
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], **CLOSE)
    for index, layer in enumerate(got[2].layers):
        if layers is None or index in layers:
            assert limited or isinstance(layer, RingLayer)  # the host's own window may be as small
            assert layer.keys.shape[2] == layer.values.shape[2] <= REACH[index] - 1 + sinks + 1
    static = generate(whole, ids, attention_mask=mask, **STATIC)
    torch.testing.assert_close(static[1], expected[1], **CLOSE)
    assert not any(isinstance(layer, RingLayer) for layer in static[2].layers)


def test_a_host_window_wider_than_the_ring_does_not_end_the_text():
    """A static cache of sliding layers alone does not know how long the text will be."""
    ids, window = random_ids(1, 90), {"sliding_window": 40}
    got = generate(patched("mistral", 2, window), ids, **STATIC)
    assert isinstance(got[2].layers[0], RingLayer)
    expected = generate(patched("mistral", 2, window, cache="full"), ids)
    torch.testing.assert_close(got[1], expected[1], **CLOSE)


@both_sinks
def test_beams_and_chunks(family, sinks):
    ids, mask = left_padded()
    options = {"num_beams": 3, "num_return_sequences": 3, "attention_mask": mask, "max_new_tokens": 25}
    bounded, whole = patched(family, sinks), patched(family, sinks, cache="full")
    expected = whole.generate(ids, do_sample=False, **options).tolist()
    assert bounded.generate(ids, do_sample=False, **STATIC, **options).tolist() == expected
    expected = generate(whole, ids, new=8, attention_mask=mask)
    for size in (1, 7, 64):
        got = generate(bounded, ids, new=8, attention_mask=mask, prefill_chunk_size=size, **STATIC)
        torch.testing.assert_close(got[1], expected[1], **CLOSE)


@both_sinks
def test_forwards_of_any_length(family, sinks):
    model, ids = patched(family, sinks), random_ids(2, 120)
    cache = ring_cache(model)
    for _ in range(2):
        got, _ = steps(model, ids, (50, 1, 1, 7, 30, 1, 1, 29), cache)
        torch.testing.assert_close(got, full_logits(model, ids), **CLOSE)
        assert cache.get_seq_length() == 120
        cache.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model, ids = patched(family).to(dtype), random_ids(2, 120)
    expected = full_logits(model, ids)
    rounding = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    for cache in (None, ring_cache(model)):
        got, cache = steps(model, ids, (50, 1, 1, 7, 30, 1, 1, 29), cache)
        assert {layer.keys.dtype for layer in cache.layers} == {got.dtype} == {dtype}
        torch.testing.assert_close(got, expected, atol=rounding, rtol=0)


@both_sinks
def test_holes_in_the_padding_mask_take_no_room(family, sinks):
    ids, mask = random_ids(2, 110), torch.ones(2, 110, dtype=torch.long)
    mask[0, 50:80] = 0
    mask[1, :20] = 0
    mask[1, 60:90] = 0
    model = patched(family, sinks)
    cache, outs, at = ring_cache(model), [], 0
    for length in (15, 40, 10, 20, 1, 1, 23):
        with torch.no_grad():
            part = ids[:, at : at + length]
            outs.append(model(part, attention_mask=mask[:, : at + length], **{CACHE_NAME: cache}).logits)
        at += length
    expected = full_logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(torch.cat(outs, 1)[mask == 1], expected[mask == 1], **CLOSE)


@both_sinks
def test_packed_rows_go_on_in_their_last_document(family, sinks):
    model, ids = patched(family, sinks), random_ids(1, 100)
    positions = torch.cat([torch.arange(30), torch.arange(15), torch.arange(55)])[None]
    cache, at = ring_cache(model), 0
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        for length in (20, 40, 1, 9, 30):
            part = slice(at, at + length)
            out = model(ids[:, part], position_ids=positions[:, part], **{CACHE_NAME: cache}).logits
            torch.testing.assert_close(out, expected[:, part], **CLOSE)
            at += length
        with pytest.raises(ValueError, match="return to an earlier document"):
            model(ids[:, :1], position_ids=torch.tensor([[90]]), **{CACHE_NAME: cache})


def test_a_returned_cache_is_continued(family):
    model, row = patched(family), random_ids(1, 60)
    cache = ring_cache(model, 120)
    first = model.generate(row, max_new_tokens=20, do_sample=False, **{CACHE_NAME: cache})
    longer = torch.cat([first, random_ids(1, 9, seed=3)], 1)
    got = model.generate(longer, max_new_tokens=12, do_sample=False, **{CACHE_NAME: cache})[:, 89:].tolist()
    assert got == generate(patched(family, cache="full"), longer, new=12)[0].tolist()


def test_what_a_ring_cannot_do_is_refused():
    model, ids = patched("mistral"), random_ids(1, 60)
    cache = ring_cache(model)
    mask = (torch.arange(60) >= 8).long()[None]
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE_NAME: cache})
        with pytest.raises(ValueError, match="padding mask of earlier tokens"):
            model(ids[:, :1], **{CACHE_NAME: cache})
        with pytest.raises(ValueError, match="cannot take tokens back"):
            cache.layers[0].crop(-1)
        wider = patch_model(tiny_model("mistral"), METHOD.replace(sigma=8.0, sink_tokens=2))
        with pytest.raises(ValueError, match="the static cache of layer 0 holds"):
            wider(ids, **{CACHE_NAME: ring_cache(model)})
        with pytest.raises(ValueError, match="not patched"):
            tiny_model("mistral")(ids, **{CACHE_NAME: ring_cache(model)})


def test_a_ring_that_saves_nothing_is_not_made():
    got = generate(patched("mistral"), random_ids(1, 5), new=4, **STATIC)[2]
    assert not any(isinstance(layer, RingLayer) for layer in got.layers)


def test_assisted_decoding_keeps_all_tokens(family):
    model, row = patched(family), torch.cat([random_ids(1, 25)] * 3, 1)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 1000}
    if hasattr(GenerationConfig(), "max_cache_len"):
        options["max_cache_len"] = 120  # room for tokens that are taken back
    try:
        tiny_model(family).generate(row, prompt_lookup_num_tokens=4, **STATIC, **options)
    except (ValueError, IndexError, RuntimeError) as error:
        pytest.skip(f"in this release the host itself cannot: {error}")
    got = model.generate(row, prompt_lookup_num_tokens=4, **STATIC, **options)[:, 75:].tolist()
    assert got == generate(patched(family, cache="full"), row, new=20)[0].tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_compiled_without_a_graph_break(family, padded):
    """For batches of two sizes, so that the graph has symbols for sizes."""
    torch._dynamo.reset()  # what other tests compiled counts against the limit of recompilations
    model, (ids, mask) = patched(family), left_padded()
    decode = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = full_logits(model, ids, **({"attention_mask": mask} if padded else {}))
    with torch.no_grad():
        for rows in (2, 3):
            cache, kwargs = ring_cache(model), {}
            for at, end in ((0, 60), *((i, i + 1) for i in range(60, 66))):
                if padded:
                    kwargs["attention_mask"] = mask[:rows, :end]
                out = (model if at == 0 else decode)(ids[:rows, at:end], **{CACHE_NAME: cache}, **kwargs).logits
                real = mask[:rows, at:end] == 1
                torch.testing.assert_close(out[real], expected[:rows, at:end][real], **CLOSE)
        if padded:
            kwargs["attention_mask"] = mask[:, :68]
        decode(ids[:, :1], position_ids=torch.tensor([[0]]), **{CACHE_NAME: cache}, **kwargs)
        with pytest.raises(RuntimeError, match="return to an earlier document"):
            decode(ids[:, :1], position_ids=torch.tensor([[9]]), **{CACHE_NAME: cache}, **kwargs)


@pytest.mark.slow
def test_generation_compiled_to_machine_code():
    """Inductor takes a minute. The prefill and the decoding step are compiled, and nothing is compiled again."""
    model, (ids, mask) = patched("qwen3"), left_padded()
    expected = generate(model, ids, new=20, attention_mask=mask)[0].tolist()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, fullgraph=True)
    got = generate(model, ids, new=20, attention_mask=mask, disable_compile=True, **STATIC)
    assert isinstance(got[2].layers[0], RingLayer)
    assert got[0].tolist() == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_mask_that_ends_before_the_new_tokens_is_refused():
    model, ids = patched("qwen3"), random_ids(1, 9)
    for cache in (ring_cache(model), StaticCache(config=model.config, max_cache_len=20)):
        with torch.no_grad():
            model(ids, **{CACHE_NAME: cache})
            with pytest.raises(ValueError, match="attention_mask is shorter"):
                model(ids[:, :1], attention_mask=torch.ones(1, 9), **{CACHE_NAME: cache})


def test_columns_of_a_ring_by_hand():
    ring = Ring(sinks=2, window=3, before=torch.tensor([0, 1, 4, 9]))
    assert ring.positions().tolist() == [
        [-1, -1, -1, -1, -1],
        [0, -1, -1, -1, -1],
        [0, 1, -1, 2, 3],
        [0, 1, 6, 7, 8],
    ]
    assert ring.columns(torch.arange(9)).tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2]
