"""generate() with every cache and strategy equals greedy decoding by full forwards."""

import pytest
import torch
from conftest import random_ids
from oracles import SIGMA
from test_models import LIMITED
from transformers import DynamicCache, StaticCache

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model

NEW = 12
METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=1, max_distance=5)
full_heads: list = []  # of each layer, for the test at hand


@pytest.fixture(autouse=True, params=[[[], []], [[1], [0]]], ids=["bounded", "full heads"])
def heads(request):
    """Every test runs twice: all heads bounded, and some of them full."""
    full_heads[:] = request.param


def patched(family, limited=True, layers=None):
    overrides = LIMITED[family] if limited else {}
    full = [heads if layers is None or layer in layers else [] for layer, heads in enumerate(full_heads)]
    method = METHOD.replace(layers=layers, full_heads=full if any(full) else None)
    return patch_model(tiny_model(family, **overrides), method)


def greedy(model, row, new=NEW):
    """By one full forward a token, without a cache or padding."""
    for _ in range(new):
        with torch.no_grad():
            scores = model(row, use_cache=False).logits[:, -1]
        row = torch.cat([row, scores.argmax(-1, keepdim=True)], 1)
    return row[0, -new:]


def left_padded():
    """A batch of a short and a long prompt, its mask, and the rows alone."""
    short, long = random_ids(1, 9, seed=1), random_ids(1, 15, seed=2)
    ids = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1), long])
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, :6] = 0
    return ids, mask, (short, long)


def check(model, new=NEW, **kwargs):
    ids, mask, rows = left_padded()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **kwargs)
    for got, row in zip(out[:, -new:], rows, strict=True):
        assert got.tolist() == greedy(model, row, new).tolist()


@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
@pytest.mark.parametrize("cache", [None, "dynamic", "static", "no cache"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
def test_left_padded_greedy(family, cache, limited, layers):
    kwargs = {"use_cache": False} if cache == "no cache" else {"cache_implementation": cache}
    check(patched(family, limited, layers=layers), **kwargs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_chunks(family, cache):
    check(patched(family), prefill_chunk_size=4, cache_implementation=cache)


def test_prompt_lookup(family):
    model = patched(family)
    row = torch.cat([random_ids(1, 8)] * 3, 1)
    never = {"eos_token_id": 1000}  # older transformers need some end token here
    out = model.generate(row, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=4, **never)
    assert out[0, -NEW:].tolist() == greedy(model, row).tolist()


def test_assisted_decoding(family):
    model, row = patched(family), random_ids(1, 11)
    for assistant in (patched(family), tiny_model(family, seed=5)):
        out = model.generate(row, max_new_tokens=NEW, do_sample=False, assistant_model=assistant)
        assert out[0, -NEW:].tolist() == greedy(model, row).tolist()


def test_beams_are_scored_as_by_full_forwards(family):
    model = patched(family)
    ids, mask, rows = left_padded()
    kwargs = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW, "length_penalty": 0.0}
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **kwargs)
    for index, sequence in enumerate(out.sequences):
        row = rows[index // 3]
        full = torch.cat([row, sequence[None, -NEW:]], 1)
        with torch.no_grad():
            log_probs = model(full, use_cache=False).logits.log_softmax(-1)[0, row.shape[1] - 1 : -1]
        expected = log_probs.gather(1, full[0, -NEW:, None]).sum()
        torch.testing.assert_close(out.sequences_scores[index], expected, atol=1e-4, rtol=0)


def test_sampling_does_not_depend_on_padding(family):
    model = patched(family)
    _, _, rows = left_padded()
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), rows[0]], 1)
    outs = []
    for ids in (rows[0], padded):
        torch.manual_seed(0)
        out = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=NEW, do_sample=True, top_k=20)
        outs.append(out[0, -NEW:].tolist())
    assert outs[0] == outs[1]


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_returned_cache_is_continued(family, kind):
    model, row = patched(family), random_ids(1, 10)
    cache = kind(config=model.config, **({"max_cache_len": 40} if kind is StaticCache else {}))
    options = {"do_sample": False, "return_dict_in_generate": True, CACHE_NAME: cache}
    first = model.generate(row, max_new_tokens=5, **options)
    longer = torch.cat([first.sequences, random_ids(1, 4, seed=3)], 1)
    second = model.generate(longer, max_new_tokens=6, **options).sequences
    assert second[0, -6:].tolist() == greedy(model, longer, 6).tolist()


def test_a_cropped_cache_is_continued(family):
    model, row = patched(family, limited=False), random_ids(1, 20)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
        if not all(hasattr(layer, "crop") for layer in cache.layers):
            continue  # older transformers crop dynamic caches only
        with torch.no_grad():
            model(row, **{CACHE_NAME: cache})
            cache.crop(-8)
            out = model(row[:, 12:].flip(1), **{CACHE_NAME: cache}).logits
            expected = model(torch.cat([row[:, :12], row[:, 12:].flip(1)], 1), use_cache=False).logits
        torch.testing.assert_close(out, expected[:, 12:], atol=1e-5, rtol=0)


def test_compiled_forward_with_a_static_cache():
    model = patched("mistral")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    check(model, new=4, cache_implementation="static")


def test_generation_from_embeddings(family):
    model = patched(family)
    ids, mask, rows = left_padded()
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for got, row in zip(out[:, -NEW:], rows, strict=True):
        assert got.tolist() == greedy(model, row).tolist()


def test_padding_in_the_middle_counts_nothing(family):
    """A right-padded prompt that is continued: generation after a hole equals generation without it."""
    model = patched(family, limited=False)
    row = random_ids(1, 9, seed=1)
    holed = torch.cat([row, torch.zeros(1, 4, dtype=torch.long), random_ids(1, 3, seed=4)], 1)
    joined = torch.cat([row, random_ids(1, 3, seed=4)], 1)
    out = model.generate(holed, attention_mask=(holed != 0).long(), max_new_tokens=NEW, do_sample=False)
    assert out[0, -NEW:].tolist() == greedy(model, joined).tolist()


def test_continuous_batching_is_refused(family):
    model = patched(family)
    with pytest.raises(ValueError, match="poslsh"):
        model.generate_batch([[5, 6, 7]])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Contrastive Search", {"penalty_alpha": 0.6, "top_k": 4}),
        ("Group Beam Search", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
        ("Dola", {"dola_layers": "high"}),
    ],
)
def test_strategies_that_left_transformers_are_refused_by_name(name, options):
    """They are code of a repository on the Hub now, which asks for trust; nothing else is generated silently."""
    model = patched("mistral")
    with pytest.raises(ValueError, match=f"{name}.*trust_remote_code"):
        model.generate(random_ids(1, 9), max_new_tokens=2, **options)


def test_code_that_is_handed_to_generate_runs_on_the_patched_model(family):
    """Two candidates for each token, as contrastive search does: the cache is repeated, one of the rows goes on."""

    def second_best(model, input_ids, **kwargs):
        cache = model(input_ids[:, :-1], use_cache=True).past_key_values
        for _ in range(4):
            inputs = {CACHE_NAME: cache, "use_cache": True}
            scores = model(input_ids[:, -1:], **inputs).logits[0, -1]
            candidates = scores.topk(2).indices[:, None]
            cache.batch_repeat_interleave(2)
            model(candidates, **inputs)
            cache.batch_select_indices(torch.tensor([1]))
            input_ids = torch.cat([input_ids, candidates[1:], random_ids(1, 1)], 1)
        return input_ids

    model, row = patched(family), random_ids(1, 9)
    expected = row
    for _ in range(4):
        with torch.no_grad():
            second = model(expected, use_cache=False).logits[0, -1].topk(2).indices[1:]
        expected = torch.cat([expected, second[None], random_ids(1, 1)], 1)
    assert model.generate(row, custom_generate=second_best, max_new_tokens=8).tolist() == expected.tolist()
