"""Caches that generate() is asked for by name, and limits of the host that meet bounded caches and padding."""

import re

import pytest
import torch
from conftest import random_ids
from test_cache import CLOSE, both_sinks, full_logits, generate, left_padded, patched
from test_models import LIMITED
from transformers import cache_utils

from hf_poslsh import patch_model
from hf_poslsh.cache import BoundedLayer
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model


class Stream:
    """Stands in for a CUDA stream, which the host's offloading wants, on the CPU."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


@pytest.fixture
def offloading(monkeypatch):
    """Lets layers be moved away and back without a GPU: what comes back are other tensors. Counts the moves."""
    moves = []

    def offload(layer):
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            moves.append(layer)

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    monkeypatch.setattr(cache_utils.CacheLayerMixin, "offload", offload)
    return moves


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
def test_offloaded_caches_equal_the_full_one(family, name, limited, offloading):
    if (family, name, limited) == ("mistral", "offloaded_static", True):
        pytest.skip("the stock model fails too: where all layers slide, the host finds none to offload")
    overrides = LIMITED[family] if limited else None
    ids, mask = left_padded()
    got = generate(patched(family, overrides=overrides), ids, attention_mask=mask, cache_implementation=name)
    expected = generate(patched(family, overrides=overrides, cache="full"), ids, attention_mask=mask)
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], **CLOSE)
    assert limited or offloading
    rooms = [room for layer in offloading if isinstance(layer, BoundedLayer) for room in layer._rooms]
    assert bool(rooms) is (name == "offloaded")
    assert all(room._store is None for room in rooms)  # nothing stays behind on the device


QUANTISED = {
    "cache_implementation": "quantized",
    "cache_config": {"backend": "quanto", "q_group_size": 8, "residual_length": 5, "nbits": 4},
}
FULL_LAYERS = {"mistral": {}, "qwen3": {}, "llama4": {"layer_types": ["full_attention"] * 2}}


def test_a_quantised_cache_is_given_the_right_masks(family, monkeypatch):
    """Where quantising loses nothing, all keys are there and the outputs are those of the full cache."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    layer = cache_utils.QuantoQuantizedLayer
    monkeypatch.setattr(layer, "_quantize", lambda self, tensor, axis: tensor.clone())
    monkeypatch.setattr(layer, "_dequantize", lambda self, tensor: tensor)
    ids, mask = left_padded()
    got = generate(patched(family, overrides=FULL_LAYERS[family]), ids, attention_mask=mask, **QUANTISED)
    whole = patched(family, overrides=FULL_LAYERS[family], cache="full")
    torch.testing.assert_close(got[1], generate(whole, ids, attention_mask=mask)[1], **CLOSE)


def test_a_quantised_cache_loses_what_the_hosts_loses(family):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    ids, mask = left_padded((20, 9))
    host = tiny_model(family, **FULL_LAYERS[family])
    expected = generate(host, ids, attention_mask=mask, **QUANTISED)
    got = generate(patch_model(host, bias="none"), ids, attention_mask=mask, **QUANTISED)
    assert got[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=0)
    assert (got[1] - generate(host, ids, attention_mask=mask)[1]).abs().max() > 0.1


def test_a_quantised_cache_for_chunked_layers_is_refused_by_the_host():
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    try:
        generate(tiny_model("llama4"), random_ids(1, 9), **QUANTISED)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            generate(patched("llama4"), random_ids(1, 9), **QUANTISED)
    else:
        pytest.skip("this release quantises the cache of chunked layers")


@both_sinks
def test_holes_under_the_hosts_window_or_chunk(family, sinks):
    """Padding takes no room in a window, in no layer."""
    ids = random_ids(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    mask[0, 40:60] = 0
    mask[1, 20:24] = 0
    mask[1, 44:60] = 0
    model = patched(family, sinks, LIMITED[family], layers=[1])  # one layer is the host's alone
    every = patched(family, sinks, LIMITED[family])
    for each in (every, model):
        expected, outs, cache, at = full_logits(each, ids, attention_mask=mask), [], None, 0
        for length in (45, 10, 10, 1, 1, 33):
            with torch.no_grad():
                out = each(ids[:, at : at + length], attention_mask=mask[:, : at + length], **{CACHE_NAME: cache})
            outs.append(out.logits)
            at, cache = at + length, out.past_key_values
        torch.testing.assert_close(torch.cat(outs, 1)[mask == 1], expected[mask == 1], **CLOSE)
