"""What holds for all inputs: bins, draws, the operator, places of tokens and slopes, against slow or plain models."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import amounts, examine
from scipy import stats

from hf_poslsh import PositionalHash, alibi_slopes
from hf_poslsh.models.context import place_tokens
from hf_poslsh.ops.bias import Layout, PositionBias
from hf_poslsh.ops.functional import biased_attention

SAMPLERS = st.sampled_from(["staggered", "iid"])
SCOPES = st.sampled_from(["head", "layer", "model"])
SIGMAS = st.floats(0.05, 1e5)

# Bins ------------------------------------------------------------------------------------------------------------


@st.composite
def one_hash(draw):
    width = draw(
        st.one_of(st.floats(1e-3, 1e7), st.integers(1, 400).map(float), st.integers(2, 64).map(lambda k: 1 / k))
    )
    shift = draw(st.one_of(st.just(0.0), st.floats(0, 1, exclude_max=True).map(lambda u: u * width)))
    return PositionalHash(np.array([[width]]), np.array([[min(shift, np.nextafter(width, 0))]]))


def bins_of(hashes, positions):
    return np.floor((positions + hashes.shifts[0, 0]) / hashes.widths[0, 0])


@amounts(40, 2000)
def test_bins_are_runs_of_positions_that_rise(amount):
    @given(one_hash(), st.sampled_from([0, 1, 1000, 10**6, 2**31 - 200]), st.randoms(use_true_random=False))
    def holds(hashes, start, random):
        positions = np.arange(start, start + 150)
        left, right = hashes.left_edges(positions)[0, 0], hashes.right_edges(positions)[0, 0]
        bins = bins_of(hashes, positions)
        assert (left <= positions).all()
        assert (positions <= right).all()
        assert (np.diff(left) >= 0).all()
        assert (np.diff(right) >= 0).all()
        assert (bins_of(hashes, left) == bins).all()
        assert (bins_of(hashes, right) == bins).all()
        assert ((bins_of(hashes, left - 1) < bins) | (left == 0)).all()
        assert (bins_of(hashes, right + 1) > bins).all()
        same = bins[:-1] == bins[1:]
        assert (same == (left[:-1] == left[1:])).all()
        assert (left[1:][~same] == right[:-1][~same] + 1).all()  # the next bin starts where the last one ended
        assert (right - left < hashes.reach[0]).all()
        order = list(range(150))
        random.shuffle(order)
        assert (hashes.left_edges(positions[order])[0, 0] == left[order]).all()

    examine(holds, amount)


# Draws -----------------------------------------------------------------------------------------------------------


@amounts(25, 500)
def test_draws_are_a_function_of_their_key(amount):
    @given(
        st.lists(SIGMAS, min_size=2, max_size=5),
        st.integers(1, 30),
        st.integers(0, 2**63 - 1),
        st.integers(0, 99),
        SAMPLERS,
        SCOPES,
        st.one_of(st.none(), st.integers(0, 10**6)),
    )
    def holds(sigma, samples, seed, layer, sampler, scope, step):
        def draw(sigma=sigma, **other):
            fields = {"seed": seed, "layer": layer, "sampler": sampler, "scope": scope, "step": step, **other}
            return PositionalHash.sample(sigma, samples, **fields)

        hashes = draw()
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        before = np.random.get_state()[1].copy(), torch.get_rng_state()
        draw(layer=layer + 1)
        again = draw()
        assert (before[0] == np.random.get_state()[1]).all()
        assert torch.equal(before[1], torch.get_rng_state())
        fewer = draw(sigma[:-1])
        for name in ("widths", "shifts"):
            assert (getattr(hashes, name) == getattr(again, name)).all()
            assert (getattr(hashes, name)[:-1] == getattr(fewer, name)).all()  # a head's draws don't know of others
        units = hashes.widths / np.array(sigma)[:, None]
        shared = np.allclose(units, units[0], rtol=1e-12)
        assert shared == (scope != "head")
        same_layer = np.array_equal(hashes.widths, draw(layer=layer + 1).widths)
        assert same_layer == (scope == "model")
        assert not np.array_equal(hashes.widths, draw(seed=(seed + 1) % 2**63).widths)
        assert not np.array_equal(hashes.widths, draw(step=0 if step is None else step + 1).widths)
        n = 12
        assert (hashes.mask_mean(2 * n)[:, :n, :n] == hashes.mask_mean(n)).all()

    examine(holds, amount)


@amounts(8, 100)
def test_widths_are_gamma_and_shifts_uniform(amount):
    @given(SIGMAS, st.sampled_from([1, 4, 20, 36]), st.integers(0, 2**62), SAMPLERS)
    def holds(sigma, samples, seed, sampler):
        hashes = PositionalHash.sample([sigma] * (4000 // samples), samples, seed=seed, sampler=sampler)
        copies = {1: 1, 4: 1, 20: 2, 36: 3}[samples] if sampler == "staggered" else 1
        widths, shifts = hashes.widths[:, ::copies], hashes.shifts[:, ::copies]
        level = 1e-6  # of a false alarm, for fixed seeds: never
        assert stats.kstest(widths.ravel() / sigma, stats.gamma(2).cdf).pvalue > level
        assert stats.kstest((shifts / widths).ravel(), "uniform").pvalue > level
        count = samples // copies
        if sampler == "staggered":  # one width from each of K strata of equal chance
            strata = np.floor(stats.gamma(2).cdf(widths / sigma) * count * (1 - 1e-9))
            assert (np.sort(strata) == np.arange(count)).all()
            turns = (hashes.shifts / hashes.widths).reshape(-1, count, copies)
            steps = (turns - turns[..., :1] - np.arange(copies) / copies) % 1.0
            assert (np.minimum(steps, 1 - steps) < 1e-9).all()

    examine(holds, amount)


# The operator ----------------------------------------------------------------------------------------------------


@st.composite
def row(draw, length, documents):
    """Positions and segments of one row: documents one after the other, positions rise, some tokens are padding."""
    padding = (
        draw(st.lists(st.booleans(), min_size=length, max_size=length)) if draw(st.booleans()) else [False] * length
    )
    borders = draw(st.lists(st.booleans(), min_size=length, max_size=length)) if documents else [False] * length
    leaps = draw(st.booleans())
    position, segment, positions, segments = draw(st.integers(0, 40)), draw(st.integers(0, 3)), [], []
    for is_padding, border in zip(padding, borders, strict=True):
        if border:
            position, segment = 0, segment + draw(st.integers(1, 3))
        positions.append(-1 if is_padding else position)
        segments.append(segment)
        if not is_padding:
            position += draw(st.integers(1, 30)) if leaps else 1
    return positions, segments


@st.composite
def problems(draw):
    batch, kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 60))
    queries = draw(st.integers(1, keys))
    documents = draw(st.booleans())
    rows = [draw(row(keys, documents)) for _ in range(draw(st.sampled_from([1, batch])))]
    positions, segments = (torch.tensor([part[k] for part in rows]) for k in range(2))
    layout = Layout(
        positions[:, keys - queries :],
        positions,
        segments[:, keys - queries :] if documents else None,
        segments if documents else None,
        draw(st.booleans()),
        draw(st.one_of(st.none(), st.integers(1, 30))),
        draw(st.one_of(st.none(), st.integers(1, 30))),
    )
    heads = kv_heads * groups
    sigma = draw(st.lists(st.floats(0.2, 200), min_size=heads, max_size=heads))
    sinks = draw(st.sampled_from([0, 0, 1, 4]))
    kind = draw(st.sampled_from(["poslsh", "poslsh", "poslsh", "alibi", "window"]))
    if kind == "poslsh":
        samples = draw(st.integers(1, 24))
        bias = PositionBias.from_hashes(PositionalHash.sample(sigma, samples, seed=draw(st.integers(0, 99))), sinks)
    elif kind == "alibi":
        bias = PositionBias.alibi(np.array(sigma), None, sinks)
    else:
        bias = PositionBias.window(heads, draw(st.integers(1, 50)), sinks)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    depth = draw(st.sampled_from([1, 3, 8, 16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    sizes = [(batch, heads, queries, depth), (batch, kv_heads, keys, depth), (batch, kv_heads, keys, depth)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return tensors, bias, layout, draw(st.sampled_from([None, 0.1, 2.0]))


def solve(tensors, bias, layout, scale, impl):
    """Output, log-sum-exp and three gradients, in float64; inputs stay in their dtype."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out, lse = biased_attention(*leaves, bias, layout, scale, "pooled", impl, True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out.double() * weights).sum().backward()
    return [part.detach().double() for part in (out, lse, *(leaf.grad for leaf in leaves))]


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize("impl", ["banded", "blocks"])
@amounts(40, 1500)
def test_implementations_agree_with_float64_on_every_layout(impl, amount):
    @given(problems())
    def holds(problem):
        tensors, bias, layout, scale = problem
        if impl == "blocks" and bias.hashes.num_samples == 1:
            return  # the other biases are no blocks
        expected = solve([tensor.double() for tensor in tensors], bias, layout, scale, "reference")
        missing = (layout.key_positions < 0)[:, None, :, None]
        hidden = [tensors[0], *(torch.where(missing, torch.nan, tensor) for tensor in tensors[1:])]
        actual = solve(hidden, bias, layout, scale, impl)
        tolerance = TOLERANCE[tensors[0].dtype]
        for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
            size = 1 + theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 1
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance * size, msg=lambda text, name=name: f"{name}: {text}"
            )

    examine(holds, amount)


# Places of tokens ------------------------------------------------------------------------------------------------


@st.composite
def forwards(draw):
    """The arguments of ``place_tokens`` for one forward, some tokens of which may be cached already."""
    seen, queries = draw(st.sampled_from([0, 0, 1, 7])), draw(st.integers(1, 14))
    future = draw(st.sampled_from([0, 3]))
    rows = draw(st.integers(1, 3))
    length = seen + queries

    def table(width, values):
        line = st.lists(values, min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(line, min_size=rows, max_size=rows)))

    mask = table(length, st.sampled_from([0, 1, 1, 1])) if draw(st.booleans()) else None
    ids = table(queries, st.integers(0, 5)) if draw(st.booleans()) else None
    if ids is not None and draw(st.booleans()):  # as people give them: documents that count from 0
        ids = torch.arange(queries).repeat(rows, 1) % draw(st.integers(1, queries))
    documents = table(queries, st.integers(0, 2)).cummax(-1).values if draw(st.booleans()) else None
    ends = None
    if rows == 1 and seen == 0 and draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, queries), max_size=4))
        ends = torch.tensor([0, *sorted(inner), queries])
    return queries, length + future, seen, mask, ids, documents, ends


def place_slowly(queries, slots, seen, mask, ids, documents, ends, row):
    """Position and document of every slot of one row, token by token; None for what nobody sees."""
    real = [slot < seen + queries and (mask is None or bool(mask[row, slot])) for slot in range(slots)]
    start, rank, last_id, places = 0, 0, None, [None] * slots
    cached = [slot for slot in range(seen) if real[slot]]
    first_start = None
    rank = len(cached)
    for query in range(queries):
        slot = seen + query
        if query > 0 and documents is not None and documents[row, query] != documents[row, query - 1]:
            start = rank
        if ends is not None and query in ends.tolist():
            start = rank
        if real[slot]:
            if ids is not None:
                this = int(ids[row % len(ids), query])
                if last_id is None:
                    start = max(start, rank - this)  # the first id tells how far back its document reaches
                elif this <= last_id:
                    start = rank
                last_id = this
            if first_start is None:
                first_start = start
            places[slot] = (rank - start, start)
            rank += 1
    start = 0 if first_start is None else first_start
    for number, slot in enumerate(cached):
        if number >= start:
            places[slot] = (number - start, start)
    return places


@amounts(100, 5000)
def test_tokens_are_placed_as_token_by_token(amount):
    @given(forwards())
    def holds(forward):
        queries, slots, seen, mask, ids, documents, ends = forward
        positions, segments = place_tokens(queries, slots, seen, torch.device("cpu"), mask, ids, documents, ends)
        rows = max((len(part) for part in (mask, ids, documents) if part is not None), default=1)
        positions = positions.expand(rows, slots)
        segments = torch.zeros_like(positions) if segments is None else segments.expand(rows, slots)
        for row_index in range(rows):
            places = place_slowly(*forward, row_index)
            expected = [-1 if place is None else place[0] for place in places]
            actual, own = positions[row_index].tolist(), segments[row_index].tolist()
            read = {own[slot] for slot in range(seen, slots) if places[slot]}  # documents that new tokens belong to
            actual[:seen] = [place if own[slot] in read else -1 for slot, place in enumerate(actual[:seen])]
            if not read:
                expected[:seen] = [-1] * seen
            assert actual == expected
            if queries > 1:
                there = [(place[1], int(s)) for place, s in zip(places, segments[row_index], strict=True) if place]
                assert all((a[0] == b[0]) == (a[1] == b[1]) for a in there for b in there)
                assert (segments[row_index].diff() >= 0).all()

    examine(holds, amount)


# Slopes ----------------------------------------------------------------------------------------------------------


def slopes_slowly(heads):
    """The rule of the published models, by recursion."""
    if math.log2(heads).is_integer():
        first = 2 ** (-8 / heads)
        return [first ** (h + 1) for h in range(heads)]
    nearest = 2 ** math.floor(math.log2(heads))
    return slopes_slowly(nearest) + slopes_slowly(2 * nearest)[0::2][: heads - nearest]


@pytest.mark.parametrize("heads", range(1, 130))
def test_slopes_of_all_head_counts(heads):
    slopes = alibi_slopes(heads)
    np.testing.assert_allclose(slopes, slopes_slowly(heads), rtol=1e-12)
    assert slopes.shape == (heads,)
    assert ((slopes > 0) & (slopes < 1)).all()
    assert len(set(slopes.tolist())) == heads
