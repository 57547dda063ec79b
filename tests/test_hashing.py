"""Positional hashes: their law, their determinism, their edges."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from hf_poslsh import PositionalHash
from hf_poslsh.hashing import staggered_copies

SAMPLERS = ["iid", "staggered"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_widths_are_gamma_and_shifts_uniform(sampler):
    hashes = PositionalHash.sample(np.full(2000, 3.0), 4, seed=5, sampler=sampler)
    # One hash of each head: the heads are independent under both samplers.
    pick = np.random.default_rng(0).integers(0, 4, 2000)
    widths = hashes.widths[np.arange(2000), pick]
    shifts = hashes.shifts[np.arange(2000), pick] / widths
    assert stats.kstest(widths, stats.gamma(2, scale=3.0).cdf).pvalue > 1e-3
    assert stats.kstest(shifts, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("sigma", [1.19, 7.0])
def test_expected_mask_is_the_laplacian_kernel(sampler, sigma):
    heads, n = 4000, 24
    mean = PositionalHash.sample(np.full(heads, sigma), 4, sampler=sampler).mask_mean(n)
    kernel = np.exp(-np.abs(np.subtract.outer(np.arange(n), np.arange(n))) / sigma)
    # Means over 4000 independent heads, each of a variance of at most L (1 - L): five standard errors.
    standard_error = np.sqrt(kernel * (1 - kernel) / heads)
    assert (np.abs(mean.mean(axis=0) - kernel) <= 5 * standard_error).all()


def test_the_staggered_sampler_has_the_smaller_error():
    n, sigma = 512, 16.0
    kernel = np.exp(-np.abs(np.subtract.outer(np.arange(n), np.arange(n))) / sigma)
    errors = {
        sampler: np.mean(
            [
                np.sqrt(
                    np.mean((PositionalHash.sample(sigma, 64, seed, sampler=sampler).mask_mean(n)[0] - kernel) ** 2)
                )
                for seed in range(6)
            ]
        )
        for sampler in SAMPLERS
    }
    assert errors["staggered"] < 0.6 * errors["iid"]


def test_divisor_rule():
    assert [staggered_copies(s) for s in (1, 7, 8, 16, 20, 64, 256, 1024)] == [1, 1, 1, 2, 2, 4, 8, 16]


def test_draws_never_touch_global_random_state():
    before = np.random.get_state()[1].copy()
    PositionalHash.sample([4.0], 8)
    assert (np.random.get_state()[1] == before).all()


def test_the_same_in_another_process_and_pinned_for_ever():
    code = (
        "from hf_poslsh import PositionalHash as P;"
        "print(*[x.hex() for s in ('iid', 'staggered')"
        " for x in P.sample([2.0, 3.0], 4, seed=7, layer=2, sampler=s).widths[1]])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    here = [
        float(x).hex()
        for s in SAMPLERS
        for x in PositionalHash.sample([2.0, 3.0], 4, seed=7, layer=2, sampler=s).widths[1]
    ]
    assert there == here
    # A changed generator would give published checkpoints other masks.
    np.testing.assert_allclose([float.fromhex(x) for x in here], PINNED, rtol=1e-9)


PINNED = [6.822759777, 3.31476978, 3.24415279, 4.807710849, 1.950300151, 3.649926824, 6.508041681, 11.73909754]


def test_what_a_draw_depends_on():
    def widths(**fields):
        return PositionalHash.sample([1.0, 1.0], 6, **fields).widths

    base = widths(seed=1, layer=2)
    assert (widths(seed=1, layer=2) == base).all()
    for other in ({"seed": 2, "layer": 2}, {"seed": 1, "layer": 3}, {"seed": 1, "layer": 2, "step": 0}):
        assert (widths(**other) != base).all()
    assert (widths(seed=1, layer=2, step=4) != widths(seed=1, layer=2, step=5)).all()
    assert (base[0] != base[1]).all()
    shared = widths(seed=1, layer=2, scope="layer")
    assert (shared[0] == shared[1]).all()
    assert (shared != widths(seed=1, layer=3, scope="layer")).all()
    assert (widths(seed=1, layer=2, scope="model") == widths(seed=1, layer=3, scope="model")).all()


def test_draws_of_a_head_do_not_depend_on_the_other_heads():
    few, many = (PositionalHash.sample(np.full(h, 5.0), 8) for h in (2, 9))
    assert (few.widths == many.widths[:2]).all()
    assert (few.shifts == many.shifts[:2]).all()


@pytest.mark.parametrize("sigma", [0.05, 1.19, 40.0, 1e9])
def test_edges_are_those_of_the_bins(sigma):
    hashes = PositionalHash.sample([sigma], 12)
    n = 400
    bins = np.floor((np.arange(n) + hashes.shifts[..., None]) / hashes.widths[..., None])[0]
    left, right = hashes.left_edges(range(n))[0], hashes.right_edges(range(n))[0]
    for r in range(12):
        for i in range(n):
            mates = np.flatnonzero(bins[r] == bins[r, i])
            assert left[r, i] == mates[0]
            assert min(right[r, i], n - 1) == mates[-1]


def test_edges_where_rounding_decides():
    # Widths whose multiples fall on, or within rounding of, integers, and far positions.
    widths = np.array([[3.0, 0.1, 1 / 3, 7.0 * (1 + 2e-16), 1e-9]])
    hashes = PositionalHash(widths, np.array([[0.0, 0.0, 1 / 7, 0.0, 0.0]]))
    positions = np.concatenate([np.arange(50), 10**9 + np.arange(50)])
    bins = np.floor((positions + hashes.shifts[..., None]) / hashes.widths[..., None])[0]
    for edges, step in ((hashes.left_edges(positions)[0], -1), (hashes.right_edges(positions)[0], 1)):
        at = np.floor((edges + hashes.shifts[0, :, None]) / widths[0, :, None])
        beyond = np.floor((edges + step + hashes.shifts[0, :, None]) / widths[0, :, None])
        assert (at == bins).all()
        assert ((beyond != bins) | (edges == 0)).all()


def test_reach_bounds_every_bin_and_is_tight():
    hashes = PositionalHash.sample([0.3, 2.0, 33.3], 10)
    positions = np.arange(3000)
    longest = (hashes.right_edges(positions) - hashes.left_edges(positions)).max(axis=(1, 2))
    assert (longest < hashes.reach).all()
    assert (longest >= hashes.reach - 2).all()


@pytest.mark.parametrize(
    ("widths", "shifts", "message"),
    [
        ([[np.nan]], [[0.0]], "width is nan"),
        ([[-1.0]], [[0.0]], r"width is -1\.0"),
        ([[np.inf]], [[0.0]], "width is inf"),
        ([[2.0]], [[2.0]], r"shift is 2\.0"),
        ([[2.0]], [[-0.5]], r"shift is -0\.5"),
        ([[2.0]], [[0.0, 0.1]], "shape"),
        ([2.0], [0.0], "shape"),
    ],
)
def test_bad_hashes(widths, shifts, message):
    with pytest.raises(ValueError, match=message):
        PositionalHash(np.array(widths), np.array(shifts))


@pytest.mark.parametrize(
    "fields",
    [
        {"sigma": -1.0},
        {"sigma": [1.0, np.nan]},
        {"num_samples": 0},
        {"seed": -1},
        {"layer": -1},
        {"step": -1},
        {"sampler": "halton"},
        {"scope": "batch"},
    ],
)
def test_bad_draws(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        PositionalHash.sample(**{"sigma": 1.0, "num_samples": 4, **fields})


@pytest.mark.parametrize("positions", [[-1], [0.5], [[0, 1]], [2**31]])
def test_bad_positions(positions):
    with pytest.raises(ValueError, match="positions"):
        PositionalHash.sample(1.0, 4).left_edges(positions)
