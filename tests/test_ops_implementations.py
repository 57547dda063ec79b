"""The other implementations of the operator, exact ALiBi, the choice between them, and compilation."""

import math
import shutil

import numpy as np
import pytest
import torch
from test_ops import F32, F64, assert_same, by_hand, hashes_for, inputs, run

from hf_poslsh import PositionalHash, PosLSHConfig, positional_lsh_attention
from hf_poslsh.ops import flex, functional, rectangles
from hf_poslsh.ops.bias import bias_from_config
from hf_poslsh.ops.blocks import merge_attention
from hf_poslsh.ops.functional import alibi_attention, biased_attention, certified_reach, choose_impl, make_layout


def test_merge_by_hand():
    parts = [
        (torch.tensor([[1.0], [0.0]]), torch.tensor([math.log(1.0), -math.inf])),
        (torch.tensor([[4.0], [0.0]]), torch.tensor([math.log(3.0), -math.inf])),
        (torch.tensor([[0.0], [0.0]]), torch.tensor([-math.inf, -math.inf])),
    ]
    out, lse = merge_attention(parts)
    torch.testing.assert_close(out, torch.tensor([[3.25], [0.0]]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0), -math.inf]))
    with pytest.raises(ValueError, match="no parts"):
        merge_attention([])


def test_merge_of_disjoint_keys_is_attention_over_all():
    q, k, v = inputs(queries=30)
    everything = PositionalHash.sample(np.full(4, 1e9), 1)
    halves = [
        positional_lsh_attention(
            q, k[:, :, part], v[:, :, part], everything, return_lse=True,
            query_positions=torch.arange(30), key_positions=torch.arange(30)[part],
        )
        for part in (slice(0, 11), slice(11, 30))
    ]  # fmt: skip
    out, lse = merge_attention(halves)
    expected = positional_lsh_attention(q, k, v, everything, return_lse=True)
    torch.testing.assert_close((out, lse), expected, **F64)


@pytest.mark.parametrize("estimator", ["pooled", "mean"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sinks", [0, 2])
def test_blocks_is_the_oracle(estimator, is_causal, sinks):
    tensors = inputs(queries=90)
    options = {"estimator": estimator, "is_causal": is_causal, "sink_tokens": sinks}
    actual = run(tensors, hashes_for(4, 6), impl="blocks", **options)
    assert_same(actual, run(tensors, hashes_for(4, 6), impl="reference", **options), **F64)


def test_blocks_with_empty_rows():
    tensors = inputs(queries=30)
    options = {"key_positions": torch.stack([torch.arange(30), torch.arange(30) - 9])}
    for estimator in ("pooled", "mean"):
        actual = run(tensors, hashes_for(4, 6), impl="blocks", estimator=estimator, **options)
        expected = run(tensors, hashes_for(4, 6), impl="reference", estimator=estimator, **options)
        assert_same(actual, expected, **F64)


def test_the_cut_of_alibi_keeps_its_promise():
    q, k, v = inputs(batch=1, queries=900, dtype=torch.float64)
    sigma = np.array([1.0, 2.0, 4.0, 6.0])
    distance = np.abs(np.subtract.outer(np.arange(900), np.arange(900)))
    weight = np.tril(np.exp(-distance / sigma[:, None, None]))
    exact = by_hand(q, k, v, weight)
    for tolerance in (1e-2, 1e-6, 1e-12):
        out, lse = alibi_attention(q, k, v, sigma, tolerance=tolerance, return_lse=True)
        _, full = alibi_attention(q, k, v, sigma, impl="reference", return_lse=True)
        assert (full - lse).max() <= tolerance * 1.001 + 1e-12  # log of the share that is left
        assert (out - exact).abs().max() <= 2 * v.abs().max() * tolerance + 1e-12
    # A bound that is given instead of measured is used: the smaller it is, the more is dropped.
    reach = certified_reach(1 / sigma, np.zeros(4), 900, 1e-2)
    out, _ = alibi_attention(q, k, v, sigma, tolerance=1e-2, max_score=0.0, return_lse=True)
    cut = by_hand(q, k, v, weight * (distance < reach[:, None, None]))
    torch.testing.assert_close(out, cut, **F64)


def test_certified_reach_by_hand():
    # sigma = 1: the series is 1 / (1 - 1/e); 2 U = 6.
    expected = math.ceil(6 + math.log(1 / (1 - math.exp(-1))) + math.log(2 / 1e-3))
    assert certified_reach(np.array([1.0]), np.array([3.0]), 10**6, 1e-3).tolist() == [expected]
    assert certified_reach(np.array([1.0]), np.array([np.nan]), 10, 1e-3)[0] == 2**62


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_torch_rectangles_are_the_oracle(sinks, is_causal, monkeypatch):
    monkeypatch.setattr(rectangles, "_ROWS", 32)
    hashes = PositionalHash.sample([1.0, 2.0, 4.0, 9.0], 8)
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 1, 109]))
    packed = torch.cat([torch.arange(40), torch.arange(1), torch.arange(109)])
    for options in (
        {},
        {"key_positions": packed, "key_segments": segments},
        {"key_positions": torch.stack([torch.arange(150), torch.arange(150) - 70])},
        {"window": 20, "chunk": 64},
    ):
        options = {"sink_tokens": sinks, "is_causal": is_causal, **options}
        tensors = inputs(queries=150)
        expected = run(tensors, hashes, impl="reference", **options)
        with monkeypatch.context() as patch:
            patch.setattr(functional, "banded_attention", rectangles.rectangles_attention)
            assert_same(run(tensors, hashes, impl="banded", **options), expected, **F64)


LAYOUTS = {
    "plain": {},
    "left padded": {"key_positions": torch.stack([torch.arange(300), torch.arange(300) - 170])},
    "packed": {
        "key_positions": torch.cat([torch.arange(140), torch.arange(1), torch.arange(159)]),
        "key_segments": torch.repeat_interleave(torch.arange(3), torch.tensor([140, 1, 159])),
    },
    "host window and chunk": {"window": 20, "chunk": 64},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_forward_is_the_oracle(layout, is_causal, sinks, monkeypatch):
    # FlexAttention as it defines itself, uncompiled; the block mask, which is ours, is obeyed there as well.
    monkeypatch.setattr(flex, "_compiled", lambda: flex.flex_attention)
    q, k, v = inputs(queries=300, dtype=torch.float32)
    options = {"is_causal": is_causal, "sink_tokens": sinks, **LAYOUTS[layout]}
    hashes = PositionalHash.sample([1.0, 3.0, 9.0, 27.0], 20)
    actual = positional_lsh_attention(q, k, v, hashes, impl="flex", **options)
    expected = positional_lsh_attention(q, k, v, hashes, impl="reference", **options)
    torch.testing.assert_close(actual, expected, **F32)


def test_the_block_mask_of_flex_leaves_out_what_no_hash_reaches(monkeypatch):
    made = []
    monkeypatch.setattr(flex, "_block_mask", lambda *a, make=flex._block_mask: made.append(make(*a)) or made[-1])
    monkeypatch.setattr(flex, "_compiled", lambda: flex.flex_attention)
    q, k, v = inputs(batch=1, heads=2, kv_heads=1, queries=4096, depth=4, dtype=torch.float32)
    positional_lsh_attention(q, k, v, PositionalHash.sample([1.0, 60.0], 20), impl="flex")
    counts = made[0].kv_num_blocks[0]  # of 128 keys each, for every block of 128 queries
    assert counts[0].max() <= 2
    assert 3 <= counts[1].max() <= 8


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_flex_compiled_and_its_missing_backward():
    q, k, v = inputs(batch=1, heads=2, kv_heads=1, queries=300, dtype=torch.float32)
    hashes = hashes_for(2, 4)
    out = positional_lsh_attention(q, k, v, hashes, impl="flex")
    torch.testing.assert_close(out, positional_lsh_attention(q, k, v, hashes, impl="reference"), **F32)
    with pytest.raises(ValueError, match="no log-sum-exp on the CPU"):
        positional_lsh_attention(q, k, v, hashes, impl="flex", return_lse=True)
    with pytest.raises(ValueError, match="no backward pass on the CPU"):
        positional_lsh_attention(q.requires_grad_(), k, v, hashes, impl="flex")


def test_auto_is_decided_by_device_and_estimator():
    assert choose_impl("auto", "pooled", "cpu", torch.bfloat16) == "banded"
    assert choose_impl("auto", "pooled", "cuda", torch.bfloat16) == "flex"
    assert choose_impl("auto", "pooled", "cuda", torch.float64) == "banded"
    assert choose_impl("auto", "pooled", "mps", torch.float32) == "banded"
    assert choose_impl("auto", "mean", "cuda", torch.float32) == "blocks"
    assert choose_impl("reference", "mean", "cuda", torch.float32) == "reference"


def test_compiles_without_a_graph_break():
    hashes, config = hashes_for(4), PosLSHConfig(sink_tokens=1)

    def by_hashes(q, k, v):
        return positional_lsh_attention(q * 1.0, k, v, hashes, sink_tokens=1)

    def by_config(q, k, v):
        bias = bias_from_config(config, 4, layer=0)
        return biased_attention(q * 1.0, k, v, bias, make_layout(q, k))[0]

    for attend in (by_hashes, by_config):
        plain = [tensor.requires_grad_() for tensor in inputs(queries=50)]
        compiled = [tensor.detach().clone().requires_grad_() for tensor in plain]
        expected = attend(*plain)
        actual = torch.compile(attend, fullgraph=True, backend="aot_eager")(*compiled)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        for out in (expected, actual):
            out.square().sum().backward()
        for a, b in zip(plain, compiled, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_a_bias_first_made_under_another_ambient_device_is_whole():
    config = PosLSHConfig(seed=77, bias="poslsh", sink_tokens=1)
    with torch.device("meta"):  # as in from_pretrained
        bias_from_config(config, 4, layer=5)
    q, k, v = inputs(queries=60)
    hashes = hashes_for(4, seed=77, layer=5)
    for impl in ("banded", "blocks", "reference"):
        out, _ = biased_attention(q, k, v, bias_from_config(config, 4, layer=5), make_layout(q, k), impl=impl)
        expected = positional_lsh_attention(q, k, v, hashes, sink_tokens=1, impl="reference")
        torch.testing.assert_close(out, expected, **F64)
