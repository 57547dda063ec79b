"""The attention operator against dense oracles: values and gradients, every layout, every kind of input."""

import math
import warnings

import numpy as np
import pytest
import torch

from hf_poslsh import PositionalHash, alibi_slopes, positional_lsh_attention
from hf_poslsh.ops.bias import PositionBias
from hf_poslsh.ops.functional import biased_attention, make_layout
from hf_poslsh.ops.rotary import Rotary, make_turns

F64 = {"rtol": 1e-9, "atol": 1e-10}
F32 = {"rtol": 2e-4, "atol": 2e-5}


def inputs(batch=2, heads=4, kv_heads=2, queries=70, keys=None, depth=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = [(batch, heads, queries, depth), (batch, kv_heads, keys, depth), (batch, kv_heads, keys, depth)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def hashes_for(heads, samples=20, **fields):
    return PositionalHash.sample(1 / alibi_slopes(heads), samples, **fields)


def run(tensors, hashes, **options):
    """Output, log-sum-exp, and the gradients of q, k, v under fixed random cotangents of both."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out, lse = positional_lsh_attention(*leaves, hashes, return_lse=True, **options)
    generator = torch.Generator().manual_seed(9)
    out_grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    lse_grad = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    finite = torch.where(lse.isinf(), 0.0, lse)
    ((out.double() * out_grad).sum() + (finite.double() * lse_grad).sum()).backward()
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(actual, expected, **tolerance):
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, e in zip(names, actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def by_hand(q, k, v, mask):
    """Softmax of scores + log(mask), one query head after another, in NumPy."""
    q, k, v = (tensor.double().numpy() for tensor in (q, k, v))
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            weight = mask[h] * np.exp(q[b, h] @ k[b, g].T / math.sqrt(q.shape[-1]))
            out[b, h] = weight @ v[b, g] / weight.sum(1, keepdims=True)
    return torch.from_numpy(out)


@pytest.mark.parametrize("impl", ["reference", "banded"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_value_by_hand_with_grouped_distinct_heads(impl, is_causal):
    q, k, v = inputs()
    hashes = hashes_for(4)
    mask = hashes.mask_mean(70)
    if is_causal:
        mask = np.tril(mask)
    out = positional_lsh_attention(q, k, v, hashes, is_causal=is_causal, impl=impl)
    torch.testing.assert_close(out, by_hand(q, k, v, mask), **F64)


@pytest.mark.parametrize("heads", [9, 12, 32, 40])
def test_many_samples_are_exact_alibi(heads):
    q, k, v = inputs(batch=1, heads=heads, kv_heads=heads, queries=64)
    distance = np.abs(np.subtract.outer(np.arange(64), np.arange(64)))
    alibi = np.tril(np.exp(-alibi_slopes(heads)[:, None, None] * distance))
    errors = {}
    for samples in (16, 4096):
        out = positional_lsh_attention(q, k, v, hashes_for(heads, samples))
        exact = by_hand(q, k, v, alibi)
        errors[samples] = ((out - exact).norm() / exact.norm()).item()
    assert errors[4096] < 0.01
    assert errors[4096] < errors[16] / 5


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sinks", [0, 1, 5, 40])
@pytest.mark.parametrize("length", [1, 2, 33, 257])
def test_banded_is_the_oracle(length, sinks, is_causal):
    tensors = inputs(queries=length)
    options = {"is_causal": is_causal, "sink_tokens": sinks}
    hashes = hashes_for(4)
    assert_same(
        run(tensors, hashes, impl="banded", **options), run(tensors, hashes, impl="reference", **options), **F64
    )


@pytest.mark.parametrize("sigma", [0.01, 0.5, 3.0, 1e9])
def test_bins_narrower_than_a_token_and_wider_than_the_text(sigma):
    tensors = inputs(queries=130)
    hashes = PositionalHash.sample(np.full(4, sigma), 7, sampler="iid")
    actual = run(tensors, hashes, impl="banded")
    assert_same(actual, run(tensors, hashes, impl="reference"), **F64)
    if sigma == 1e9:
        q, k, v = tensors
        full = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(actual[0], full, **F64)
    if sigma == 0.01:  # every token sees itself alone
        torch.testing.assert_close(actual[0], tensors[2].repeat_interleave(2, 1), **F64)


def test_items_and_strips_join_without_a_seam():
    # Longer than two work items; the widest bin reaches over one of them.
    tensors = inputs(batch=1, heads=2, kv_heads=1, queries=2300, depth=8)
    hashes = PositionalHash.sample([2.0, 300.0], 20)
    for options in ({}, {"is_causal": False}, {"sink_tokens": 3}):
        assert_same(
            run(tensors, hashes, impl="banded", **options), run(tensors, hashes, impl="reference", **options), **F64
        )


@pytest.mark.parametrize("depth", [1, 7, 32, 40, 64, 128])
def test_head_dims(depth):
    tensors = inputs(queries=50, depth=depth)
    assert_same(run(tensors, hashes_for(4)), run(tensors, hashes_for(4), impl="reference"), **F64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 2), (9, 3)])
def test_head_groups(heads, kv_heads):
    tensors = inputs(heads=heads, kv_heads=kv_heads, queries=90)
    assert_same(run(tensors, hashes_for(heads)), run(tensors, hashes_for(heads), impl="reference"), **F64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, F32),
        (torch.bfloat16, {"rtol": 2e-2, "atol": 2e-2}),
        (torch.float16, {"rtol": 2e-3, "atol": 2e-3}),
    ],
)
def test_precisions(dtype, tolerance):
    tensors = inputs(queries=300, dtype=dtype)
    actual, expected = run(tensors, hashes_for(4)), run(tensors, hashes_for(4), impl="reference")
    assert [t.dtype for t in actual] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_same(actual, expected, **tolerance)
    # The log-sum-exp is computed in float32 whatever the input.
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)


def test_gradcheck():
    tensors = [tensor.requires_grad_() for tensor in inputs(batch=1, queries=12, depth=3)]
    hashes = hashes_for(4, 5)

    def attend(q, k, v):
        return positional_lsh_attention(q, k, v, hashes, impl="banded", sink_tokens=2, return_lse=True)

    assert torch.autograd.gradcheck(attend, tensors)


def test_strided_and_expanded_tensors():
    q, k, v = inputs()
    expected = run([q, k, v], hashes_for(4), impl="reference")
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    assert_same(run(turned, hashes_for(4)), expected, **F64)
    spread = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (q, k, v)]
    assert spread[0].stride(-1) == 2
    out = positional_lsh_attention(*spread, hashes_for(4))
    torch.testing.assert_close(out, expected[0], **F64)
    one_row = [tensor[:1].expand(2, -1, -1, -1) for tensor in (q, k, v)]
    out = positional_lsh_attention(*one_row, hashes_for(4))
    torch.testing.assert_close(out[0], expected[0][0], **F64)
    torch.testing.assert_close(out[1], expected[0][0], **F64)


def test_left_padding_changes_nothing():
    q, k, v = inputs(queries=60)
    hashes = hashes_for(4)
    positions = torch.stack([torch.arange(60), torch.arange(60) - 23])
    for tensor in (k, v):
        tensor[1, :, :23] = torch.nan  # what a masked key holds must not matter
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = positional_lsh_attention(*leaves, hashes, key_positions=positions, sink_tokens=2)
    alone = positional_lsh_attention(q[1:, :, 23:], k[1:, :, 23:], v[1:, :, 23:], hashes, sink_tokens=2)
    torch.testing.assert_close(out[1:, :, 23:], alone, rtol=0, atol=0)
    assert (out[1, :, :23] == 0).all()
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert (leaf.grad[1, :, :23] == 0).all()
        assert (leaf.grad[1, :, 23:] != 0).any()


def test_holes_right_padding_and_empty_rows_are_the_oracle():
    tensors = inputs(queries=50)
    positions = torch.full((2, 50), -1)
    positions[0, [3, 4, 9, 10, 11, 30, 44]] = torch.arange(7)
    for sinks in (0, 2):
        options = {"key_positions": positions, "sink_tokens": sinks}
        actual = run(tensors, hashes_for(4), impl="banded", **options)
        assert_same(actual, run(tensors, hashes_for(4), impl="reference", **options), **F64)
        assert (actual[0][1] == 0).all()
        assert torch.isneginf(actual[1][1]).all()


def test_packed_documents_do_not_touch():
    lengths = [17, 1, 40, 12]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    q, k, v = inputs(batch=1, queries=70)
    for sinks in (0, 3):
        options = {"key_positions": positions, "key_segments": segments, "sink_tokens": sinks}
        out = positional_lsh_attention(q, k, v, hashes_for(4), **options)
        for part in torch.split(torch.arange(70), lengths):
            alone = positional_lsh_attention(
                q[:, :, part], k[:, :, part], v[:, :, part], hashes_for(4), sink_tokens=sinks
            )
            torch.testing.assert_close(out[:, :, part], alone, rtol=0, atol=0)
        assert_same(
            run((q, k, v), hashes_for(4), impl="banded", **options),
            run((q, k, v), hashes_for(4), impl="reference", **options),
            **F64,
        )


@pytest.mark.parametrize("step", [1, 3, 40])
def test_decoding_in_steps_is_the_full_pass(step):
    q, k, v = inputs(queries=120, dtype=torch.float32)
    hashes = hashes_for(4)
    full = positional_lsh_attention(q, k, v, hashes, sink_tokens=1)
    for start in range(0, 120, step):
        end = start + step
        out = positional_lsh_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], hashes, sink_tokens=1)
        torch.testing.assert_close(out, full[:, :, start:end], rtol=1e-5, atol=1e-6)


def test_a_cache_without_the_keys_that_no_bin_reaches():
    q, k, v = inputs(queries=200)
    hashes = PositionalHash.sample([2.0, 3.0, 4.0, 5.0], 20)
    keep = torch.cat([torch.arange(2), torch.arange(199 - int(hashes.reach.max()), 200)])  # sinks and the reach
    assert len(keep) < 100
    options = {"sink_tokens": 2, "query_positions": torch.tensor([199])}
    out = positional_lsh_attention(q[:, :, -1:], k[:, :, keep], v[:, :, keep], hashes, key_positions=keep, **options)
    full = positional_lsh_attention(q, k, v, hashes, sink_tokens=2)
    torch.testing.assert_close(out, full[:, :, -1:], **F64)


@pytest.mark.parametrize("options", [{"window": 9}, {"chunk": 16}, {"window": 5, "chunk": 7, "sink_tokens": 3}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_hosts_own_window_and_chunk(options, is_causal):
    tensors = inputs(queries=80)
    options = {"is_causal": is_causal, **options}
    hashes = hashes_for(4)
    assert_same(
        run(tensors, hashes, impl="banded", **options), run(tensors, hashes, impl="reference", **options), **F64
    )
    mask = np.tril(hashes.mask_mean(80)) if is_causal else hashes.mask_mean(80)
    if options.get("sink_tokens"):
        mask[:, :, :3] = 1.0 if not is_causal else np.tril(np.ones((80, 80)))[:, :3]
    distance = np.abs(np.subtract.outer(np.arange(80), np.arange(80)))
    mask = mask * (distance < options.get("window", 1000))
    chunks = np.arange(80) // options.get("chunk", 1000)
    mask = mask * (chunks[:, None] == chunks[None, :])
    out = positional_lsh_attention(*tensors, hashes, **options)
    torch.testing.assert_close(out, by_hand(*tensors, mask), **F64)


@pytest.mark.parametrize("impl", ["reference", "banded"])
def test_other_biases_by_hand(impl):
    q, k, v = inputs(queries=100)
    distance = np.abs(np.subtract.outer(np.arange(100), np.arange(100)))
    sigma = 1 / alibi_slopes(4)
    blocks = np.floor(np.arange(100) / (2 * sigma[:, None]))
    cases = [
        (PositionBias.alibi(sigma), np.exp(-distance / sigma[:, None, None])),
        (PositionBias.window(4, 13), np.broadcast_to(distance < 13, (4, 100, 100)) * 1.0),
        (PositionBias.window(4, None), np.ones((4, 100, 100))),
        (
            PositionBias.from_hashes(PositionalHash.fixed_blocks(sigma)),
            (blocks[:, :, None] == blocks[:, None, :]) * 1.0,
        ),
    ]
    for bias, mask in cases:
        for sinks in (0, 2):
            mask = mask.copy()
            mask[:, :, :sinks] = 1.0
            bias = PositionBias(bias.hashes, bias.slopes, bias.reach, sinks)
            out, _ = biased_attention(q, k, v, bias, make_layout(q, k), impl=impl)
            torch.testing.assert_close(out, by_hand(q, k, v, np.tril(mask)), **F64)


def test_the_mean_estimator_by_hand():
    q, k, v = inputs(queries=40)
    hashes = hashes_for(4, 6)
    parts = [
        by_hand(q, k, v, np.tril(PositionalHash(hashes.widths[:, [r]], hashes.shifts[:, [r]]).mask_mean(40)))
        for r in range(6)
    ]
    out = positional_lsh_attention(q, k, v, hashes, estimator="mean")
    torch.testing.assert_close(out, torch.stack(parts).mean(0), **F64)


def test_large_scores_do_not_overflow():
    q, k, v = inputs(dtype=torch.float32)
    tensors = [60 * q, 60 * k, v]
    out, lse = positional_lsh_attention(*tensors, hashes_for(4), return_lse=True)
    expected, expected_lse = positional_lsh_attention(*tensors, hashes_for(4), return_lse=True, impl="reference")
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-3)


def test_a_nan_that_is_seen_is_not_hidden():
    q, k, v = inputs(queries=40, dtype=torch.float32)
    k[0, 0, 20, 3] = torch.nan
    out = positional_lsh_attention(q, k, v, hashes_for(4))
    assert out[0, :2, 20].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()
    assert out[0, :2, :16].isfinite().all()


def test_threads_do_not_change_a_bit():
    tensors = inputs(batch=1, heads=4, kv_heads=2, queries=3000, depth=8, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(tensors, hashes_for(4))
        torch.set_num_threads(3)
        many = run(tensors, hashes_for(4))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, many, strict=True):
        assert torch.equal(a, b)


def test_memory_is_linear():
    """Scratch memory of the pass does not grow with the length, once that is longer than a work item."""
    from hf_poslsh.ops import _scratch, banded

    sizes = {}
    for length in (4096, 16384):
        q, k, v = inputs(batch=1, heads=1, kv_heads=1, queries=length, depth=4, dtype=torch.float32)
        before, made = _scratch.make_columns, []
        banded.make_columns = lambda *a, made=made, before=before: made.append(before(*a)) or made[-1]
        try:
            positional_lsh_attention(q, k, v, PositionalHash.sample([64.0], 20))
        finally:
            banded.make_columns = before
        sizes[length] = sum(array.nbytes for columns in made for array in columns)
    assert sizes[16384] <= 1.3 * sizes[4096]


def test_empty_inputs():
    q, k, v = inputs(queries=0, keys=5)
    assert positional_lsh_attention(q, k, v, hashes_for(4)).shape == (2, 4, 0, 16)
    q, k, v = inputs(batch=0)
    assert positional_lsh_attention(q, k, v, hashes_for(4)).shape == (0, 4, 70, 16)
    q, k, v = inputs(queries=3, keys=0)
    out, lse = positional_lsh_attention(
        q, k, v, hashes_for(4), query_positions=torch.arange(3), key_positions=torch.empty(0, dtype=torch.long),
        return_lse=True,
    )  # fmt: skip
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def bad(**changes):
    q, k, v = inputs(queries=8)
    arguments = {"query": q, "key": k, "value": v, "hashes": hashes_for(4), **changes}
    return lambda: positional_lsh_attention(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bad(query=torch.zeros(4, 8, 16, dtype=torch.float64))(), "must be .batch, heads"),
        (lambda: bad(key=torch.zeros(2, 2, 9, 16, dtype=torch.float64))(), "shapes do not fit"),
        (lambda: bad(query=torch.zeros(2, 3, 8, 16, dtype=torch.float64))(), "3 query heads do not divide over 2"),
        (lambda: bad(hashes=hashes_for(8))(), "for 8 heads but query has 4"),
        (lambda: bad(query=torch.zeros(2, 4, 8, 16))(), "dtypes torch.float32, torch.float64"),
        (lambda: bad(query=torch.zeros(2, 4, 8, 16, dtype=torch.int64))(), "torch.int64"),
        (lambda: bad(key=torch.zeros(2, 2, 8, 16, dtype=torch.float64, device="meta"))(), "use one device"),
        (lambda: bad(hashes=None)(), "NoneType"),
        (lambda: bad(impl="fast")(), "impl is 'fast'"),
        (lambda: bad(estimator="median")(), "estimator is 'median'"),
        (lambda: bad(estimator="mean", impl="banded")(), "estimator='mean'"),
        (lambda: bad(sink_tokens=-1)(), "sink_tokens is -1"),
        (lambda: bad(window=0)(), "window is 0"),
        (lambda: bad(chunk=2.5)(), r"chunk is 2\.5"),
        (lambda: bad(key_positions=torch.arange(7))(), r"\(7,\) for 8 keys"),
        (lambda: bad(key_positions=torch.arange(8.0))(), "integer tensor"),
        (lambda: bad(key_positions=torch.arange(8).flip(0), impl="banded")(), "_positions do not rise"),
        (lambda: bad(key_positions=torch.zeros(8, dtype=torch.long), impl="banded")(), "do not rise"),
        (lambda: bad(query_segments=torch.zeros(8, dtype=torch.long))(), "give both"),
        (lambda: positional_lsh_attention(*inputs(queries=9, keys=8), hashes_for(4))(), "9 queries but 8 keys"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_saves_only_what_it_must_for_the_backward_pass():
    q, k, v = [tensor.requires_grad_() for tensor in inputs()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        positional_lsh_attention(q, k, v, hashes_for(4))
    large = [tensor for tensor in saved if tensor.numel() >= 2 * 4 * 70]
    assert len(large) == 5  # q, k, v, out, lse


def test_checkpointing_and_autocast():
    tensors = inputs(dtype=torch.float32)
    hashes = hashes_for(4)
    plain = run(tensors, hashes)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = torch.utils.checkpoint.checkpoint(
        lambda *a: positional_lsh_attention(*a, hashes), *leaves, use_reentrant=False
    )
    assert torch.equal(out, plain[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = positional_lsh_attention(*[tensor.bfloat16() for tensor in tensors], hashes)
    torch.testing.assert_close(out.float(), plain[0], rtol=3e-2, atol=3e-2)


def test_operator_contract():
    from hf_poslsh.ops import banded

    q, k, v = [tensor.requires_grad_() for tensor in inputs(queries=20)]
    layout = make_layout(q, k)
    hashes = hashes_for(4)
    turns = make_turns(Rotary(torch.ones(5, dtype=torch.float64)), layout.query_positions, 6, 2, torch.float64)
    arguments = (
        q, k, v, torch.tensor(hashes.widths), torch.tensor(hashes.shifts), torch.zeros(4, dtype=torch.float64),
        torch.tensor(hashes.reach), layout.query_positions, layout.key_positions, None, None, turns.queries,
        turns.sinks, 2, True, 2**62, 2**62, 0.25, 6, False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(banded._banded, arguments)
