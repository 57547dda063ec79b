"""``output_attentions=True``: the weights that were used, by token, against the host's eager attention."""

import pytest
import torch
from conftest import random_ids
from oracles import SIGMA
from test_cache import left_padded
from test_models import LIMITED

from hf_poslsh import patch_model
from hf_poslsh.models import checks
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model

CLOSE = {"atol": 1e-5, "rtol": 0}
METHODS = {
    "plsh": {},
    "bounded distances": {"max_distance": 5},
    "full heads": {"max_distance": 5, "full_heads": [[1], []]},
    "true full heads": {"full_heads": [[0, 1], [0]]},
    "mean": {"estimator": "mean"},
    "one layer": {"layers": [1]},
}


def patched(family, overrides=None, **fields):
    fields = {"sigma": SIGMA, "num_samples": 6, "sink_tokens": 2, **fields}
    return patch_model(tiny_model(family, **(overrides or {})), **fields)


def outputs(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, output_attentions=True, **kwargs)


def values_of(model, layer, ids, **kwargs):
    """Values of a layer by query head ``(B, H, N, D)``, and what its output projection is given ``(B, N, H D)``."""
    found = {}
    attention = model.model.layers[layer].self_attn
    hooks = [
        attention.v_proj.register_forward_hook(lambda m, args, out: found.update(values=out)),
        attention.o_proj.register_forward_pre_hook(lambda m, args: found.update(mixed=args[0])),
    ]
    with torch.no_grad():
        model(ids, use_cache=False, **kwargs)
    for hook in hooks:
        hook.remove()
    values = found["values"].unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1)
    return values, found["mixed"]


@pytest.mark.parametrize("fields", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
def test_the_weights_make_the_output_and_rows_sum_to_1(family, fields, limited):
    model = patched(family, LIMITED[family] if limited else None, **fields)
    ids, mask = left_padded((40, 9, 23))
    attentions = outputs(model, ids, attention_mask=mask).attentions
    assert len(attentions) == 2
    for layer, weights in enumerate(attentions):
        assert weights.shape == (3, 4, 40, 40)
        assert weights.triu(1).eq(0).all()
        real = mask.bool()
        torch.testing.assert_close(weights.sum(-1), real[:, None].float().expand(3, 4, 40), **CLOSE)
        assert weights.masked_select(~real[:, None, None]).eq(0).all()
        values, mixed = values_of(model, layer, ids, attention_mask=mask)
        torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2)[real], mixed[real], **CLOSE)


def test_weight_1_everywhere_gives_the_hosts_own(family, ids):
    host = tiny_model(family, attn_implementation="eager")
    with torch.no_grad():
        expected = host(ids, output_attentions=True).attentions
    for fields in ({"bias": "none"}, {"full_heads": [[0, 1], [0, 1]]}):
        got = outputs(patch_model(tiny_model(family), **fields), ids).attentions
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("fields", METHODS.values(), ids=METHODS)
def test_decoding_gives_the_last_rows_by_token(family, fields):
    model, ids = patched(family, **{**fields, "sigma": (0.4, 0.8, 1.2, 2.0)}), random_ids(1, 60)
    whole = outputs(model, ids).attentions
    cache = None
    for start, end in ((0, 45), (45, 50), *((at, at + 1) for at in range(50, 60))):
        out = outputs(model, ids[:, start:end], use_cache=True, **{CACHE_NAME: cache})
        cache = out.past_key_values
        for got, expected in zip(out.attentions, whole, strict=True):
            torch.testing.assert_close(got, expected[:, :, start:end, :end], **CLOSE)


def test_a_text_that_would_take_too_much_memory_is_refused(monkeypatch, ids):
    monkeypatch.setattr(checks, "_WEIGHTS_LIMIT", 2 * 4 * 2 * 24 * 24 * 4)
    model = patched("qwen3")
    outputs(model, ids)
    with pytest.raises(ValueError, match=r"GiB of attention weights \(25 queries of 2 rows by 25 tokens"):
        outputs(model, random_ids(2, 25))


def test_a_static_cache_has_no_tokens_to_show():
    model = patched("qwen3", sigma=(0.4, 0.8, 1.2, 2.0))
    with pytest.raises(ValueError, match="does not go with a static cache"):
        model.generate(
            random_ids(1, 20), max_new_tokens=3, cache_implementation="static", output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip
