"""Operators, norms, work, planner and description against dense matrices and plain counting."""

import json
import math
import time

import numpy as np
import pytest
from scipy import stats

from hf_poslsh import PositionalHash, PosLSHConfig, theory
from hf_poslsh.testing import tiny_config

SIZES = [1, 2, 7, 33, 300]
SIGMAS = [0.05, 1.19, 16.0, 300.0]


def kernel(n, sigma):
    return np.exp(-np.abs(np.subtract.outer(np.arange(n), np.arange(n))) / sigma)


def parts(n, sigma, samples, causal, seed=3, sampler="staggered"):
    hashes = PositionalHash.sample(sigma, samples, seed, sampler=sampler)
    mask, target = hashes.mask_mean(n)[0], kernel(n, sigma)
    return hashes, *((np.tril(mask), np.tril(target)) if causal else (mask, target))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("n", SIZES)
def test_operators_and_norms_are_those_of_the_dense_matrices(n, sigma, causal):
    for samples in (1, 4, 30):
        hashes, mask, target = parts(n, sigma, samples, causal)
        for operator, matrix in (
            (theory.kernel_operator(n, sigma, causal), target),
            (theory.mask_operator(hashes, n, causal=causal), mask),
            (theory.error_operator(hashes, n, sigma, causal=causal), mask - target),
        ):
            np.testing.assert_allclose(operator @ np.eye(n), matrix, atol=1e-11)
            np.testing.assert_allclose(operator.T @ np.eye(n), matrix.T, atol=1e-11)
            assert theory.spectral_norm(operator, 1e-7) == pytest.approx(
                np.linalg.norm(matrix, 2), rel=1e-4, abs=1e-9
            )
        norms = theory.error_norms(hashes, n, sigma, causal=causal)
        error = mask - target
        assert norms.largest == pytest.approx(np.abs(error).max(), abs=1e-12)
        assert norms.frobenius == pytest.approx(np.linalg.norm(error), rel=1e-9, abs=1e-8 * n)
        pairs = max(n * (n - 1) / (2 if causal else 1), 1)
        assert norms.rms == pytest.approx(np.sqrt(np.sum(error**2) / pairs), rel=1e-9, abs=1e-8)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("n", SIZES)
def test_norm_of_the_kernel_in_closed_form(n, sigma):
    exact = np.linalg.norm(kernel(n, sigma), 2)
    assert theory.kernel_norm(n, sigma) == pytest.approx(exact, rel=1e-9)
    assert exact <= theory.kernel_norm_limit(sigma) * (1 + 1e-12)


def test_norm_of_the_kernel_tends_to_its_limit():
    assert theory.kernel_norm(10**6, 256.0) == pytest.approx(theory.kernel_norm_limit(256.0), rel=1e-6)


def test_each_head_is_its_own():
    hashes = PositionalHash.sample([2.0, 9.0], 5)
    masks = hashes.mask_mean(40)
    for head, sigma in enumerate((2.0, 9.0)):
        np.testing.assert_allclose(theory.mask_operator(hashes, 40, head) @ np.eye(40), masks[head], atol=1e-12)
        error = masks[head] - kernel(40, sigma)
        assert theory.error_norms(hashes, 40, sigma, head).frobenius == pytest.approx(np.linalg.norm(error))


def test_bins_narrower_than_a_position_and_a_single_wide_one():
    hashes = PositionalHash(np.array([[0.3, 1.0, 1e12]]), np.array([[0.1, 0.5, 3.0]]))
    mask = hashes.mask_mean(50)[0]
    np.testing.assert_allclose(theory.mask_operator(hashes, 50) @ np.eye(50), mask, atol=1e-12)
    assert theory.error_norms(hashes, 50, 4.0).largest == pytest.approx(np.abs(mask - kernel(50, 4.0)).max())


def test_a_matrix_without_error_has_norm_zero():
    hashes = PositionalHash.sample(1e-4, 4)
    assert theory.spectral_norm(theory.error_operator(hashes, 100, 1e-4)) < 1e-13
    assert theory.spectral_norm(theory.BiasOperator(100, np.zeros_like, np.zeros_like)) == 0
    assert theory.error_norms(hashes, 100, 1e-4) == (0, 0, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_million_positions_take_seconds(causal):
    n, sigma = 1_000_000, 256.0
    hashes = PositionalHash.sample(sigma, 20)
    start = time.process_time()
    operator = theory.error_operator(hashes, n, sigma, causal=causal)
    spectral = theory.spectral_norm(operator, 1e-2)
    norms = theory.error_norms(hashes, n, sigma, causal=causal)
    assert time.process_time() - start < 30
    # The mean over rows of the squared error is below the squared norm, and the norm below the largest column sum.
    assert norms.frobenius / np.sqrt(n) < spectral < 0.5 * theory.kernel_norm_limit(sigma)
    assert norms.largest < 1


@pytest.mark.parametrize("sampler", ["iid", "staggered"])
@pytest.mark.parametrize("sigma", [0.4, 5.0, 200.0])
def test_drawn_keys_are_those_of_the_masks(sampler, sigma):
    hashes = PositionalHash.sample(sigma, 6, sampler=sampler)
    n = 90
    mask = np.tril(hashes.mask_mean(n)[0])
    keys = theory.drawn_keys(hashes, n)
    assert keys.banded == pytest.approx((mask > 0).sum() / n)
    assert keys.blocks == pytest.approx(6 * mask.sum() / n)


@pytest.mark.parametrize(("sinks", "window", "chunk"), [(3, None, None), (3, 12, None), (5, None, 20), (90, 40, 25)])
def test_drawn_keys_under_sinks_and_the_hosts_limits(sinks, window, chunk):
    hashes = PositionalHash.sample([2.0, 9.0], 6)
    i, j = np.mgrid[:90, :90]
    for head in range(2):
        mask = (hashes.mask_mean(90)[head] > 0) | (j < sinks)
        mask &= (j <= i) & (i - j < (window or 90)) & (i // (chunk or 90) == j // (chunk or 90))
        assert theory.drawn_keys(hashes, 90, head, sinks, window, chunk).banded == pytest.approx(mask.sum() / 90)


def test_work_in_closed_form():
    assert theory.multiply_adds(10, 64) == 1280
    assert theory.full_attention_keys(4) == np.mean([1, 2, 3, 4])
    assert theory.expected_keys(10**7, 100.0, 3, algorithm="blocks") == pytest.approx(
        3 / -math.expm1(-0.01), rel=1e-4
    )
    for samples in (1, 20, 1000):
        harmonic = sum(1 / k for k in range(1, samples + 1))
        keys = theory.expected_keys(10**6, 256.0, samples, "iid")
        assert 0.99 * 256 * harmonic < keys <= 1 + 256 * harmonic


def test_bound_of_the_widest_bin():
    for samples, delta in ((1, 0.5), (20, 0.01), (10**5, 1e-6)):
        width = theory.widest_bin(7.0, samples, delta, "iid")
        assert samples * theory.wider_probability(width, 7.0) == pytest.approx(delta)
        assert width <= 7.0 * (2 * math.log(2 * samples / delta) - 1)
    assert theory.wider_probability(30.0, 10.0) == pytest.approx(stats.gamma(2, scale=10.0).sf(30.0))


def test_row_sums_and_output_bounds():
    rng = np.random.default_rng(0)
    n, dim, sigma = 300, 8, 16.0
    loose = []
    for samples in (4, 64):
        hashes = PositionalHash.sample([1.0, sigma], samples)
        query, key, value = rng.standard_normal((3, n, dim))
        scores = np.where(np.tri(n) > 0, query @ key.T / math.sqrt(dim), -np.inf)
        mask, target = np.tril(hashes.mask_mean(n)[1]), np.tril(kernel(n, sigma))
        sums = theory.row_sums(query, key, hashes, sigma, head=1, rows=70)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        for got, matrix in zip(sums, (np.ones((n, n)), target, mask, abs(mask - target)), strict=False):
            np.testing.assert_allclose(got, (matrix * weights).sum(1), rtol=1e-9, atol=1e-12)
        approximate, exact = ((m * weights) @ value / (m * weights).sum(1, keepdims=True) for m in (mask, target))
        difference = approximate - exact
        longest = np.linalg.norm(value, axis=1).max()
        largest = theory.error_norms(hashes, n, sigma, 1, causal=True).largest
        bound = theory.output_row_bound(sums, 2 * longest)
        assert (np.linalg.norm(difference, axis=1) <= bound).all()
        assert (bound <= theory.output_row_bound(sums, 2 * longest, largest) + 1e-12).all()
        spectral = theory.spectral_norm(theory.error_operator(hashes, n, sigma, 1, causal=True), 1e-6)
        most = np.linalg.norm(query, axis=1).max() * np.linalg.norm(key, axis=1).max() / math.sqrt(dim)
        whole = theory.output_frobenius_bound(spectral * 1.001, most, sums, np.linalg.norm(value), longest)
        assert np.linalg.norm(difference) <= whole
        loose.append(np.median(bound[1:] / np.linalg.norm(difference, axis=1)[1:]))
    assert max(loose) < 20


@pytest.mark.parametrize("sampler", ["iid", "staggered"])
@pytest.mark.parametrize(("norm", "eps"), [("max", 0.2), ("frobenius", 40.0)])
def test_required_samples_are_the_fewest_that_the_bound_accepts(norm, eps, sampler):
    tail = {"max": theory.max_norm_tail, "frobenius": theory.frobenius_tail}[norm]
    samples = theory.required_samples(eps, 1000, 16.0, 0.05, norm, sampler)
    assert tail(eps, 1000, 16.0, samples, sampler) <= 0.05
    fewer = samples - 1 if sampler == "iid" else (math.isqrt(samples) - 2) ** 2
    assert tail(eps, 1000, 16.0, fewer, sampler) > 0.05


def test_required_samples_grow_as_the_inverse_square_of_the_error():
    few, many = (
        theory.required_samples(eps * theory.kernel_norm_limit(16.0), 4096, 16.0, 0.01) for eps in (0.1, 0.01)
    )
    assert 90 < many / few <= 101


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.required_samples(0.0, 10, 1.0, 0.1), "eps is 0"),
        (lambda: theory.required_samples(0.1, 10, 1.0, 1.0), "delta is 1"),
        (lambda: theory.required_samples(0.1, 10, 1.0, 0.1, "nuclear"), "spectral, max, frobenius"),
        (lambda: theory.required_samples(0.1, 10, 1.0, 0.1, sampler="halton"), "staggered or iid"),
        (lambda: theory.required_samples(1e-9, 10, 1.0, 0.1), "larger error"),
        (lambda: theory.kernel_operator(0, 1.0), "n is 0"),
        (lambda: theory.kernel_operator(4, -1.0), "sigma is -1"),
        (lambda: theory.mask_operator(PositionalHash.sample(1.0, 2), 4, head=1), "heads 0 to 0"),
        (lambda: theory.expected_keys(4, 1.0, 0), "samples is 0"),
        (lambda: theory.expected_keys(4, 1.0, 2, algorithm="full"), "banded or blocks"),
        (lambda: theory.describe(PosLSHConfig(layers=(5,)), tiny_config("qwen3"), 64), "layers 0 to 1"),
        (lambda: theory.describe(PosLSHConfig(), tiny_config("qwen3"), 64, delta=0.0), "delta is 0"),
    ],
)
def test_errors_name_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_description_of_a_model():
    n = 600
    config = PosLSHConfig(num_samples=8, sigma=(2.0, 4.0, 4.0, 8.0), sink_tokens=1)
    report = theory.describe(config, tiny_config("qwen3"), n)
    assert [(row.layer, row.head, row.sigma) for row in report.heads] == [
        (layer, head, sigma) for layer in range(2) for head, sigma in enumerate(config.sigma)
    ]
    for row in report.heads:
        hashes = PositionalHash.sample(config.sigma, 8, layer=row.layer)
        assert row.drawn_keys == pytest.approx((np.tril(hashes.mask_mean(n)[row.head]) > 0).sum() / n)
        assert row.widest_bin == hashes.widths[row.head].max()
        assert row.multiply_adds == pytest.approx(2 * 8 * row.drawn_keys)
        assert row.cache_tokens == hashes.reach[row.head] + 1
        error = theory.error_norms(hashes, n, row.sigma, row.head)
        assert error.largest < row.max_error
        assert 0.5 < error.rms / row.rms_error < 2
    assert report.full_cache_bytes == 2 * 2 * 8 * 2 * n * 2  # k and v, KV heads, head dim, bytes, tokens, layers
    kept = sum(max(row.cache_tokens for row in report.heads if row.layer == layer) for layer in range(2))
    assert report.cache_bytes == 2 * 2 * 8 * 2 * kept
    assert report.full_multiply_adds == 2 * 4 * 2 * 8 * (n + 1) / 2
    assert json.loads(json.dumps(report.to_dict()))["heads"][0]["sigma"] == 2.0
    lines = str(report).splitlines()
    assert len(lines) == 1 + 8 + 1
    assert "% of full attention's" in lines[-1]


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"bias": "window", "window": 3}, (1 + 2 + 3 * 8) / 10),
        ({"bias": "none"}, 5.5),
        ({"bias": "alibi"}, 5.5),
        ({"bias": "fixed_blocks", "sigma": 2.5}, (1 + 2 + 3 + 4 + 5) * 2 / 10),
    ],
)
def test_description_of_the_baselines(fields, keys):
    report = theory.describe(PosLSHConfig(layers=(1,), **fields), tiny_config("mistral"), 10)
    assert {row.layer for row in report.heads} == {1}
    assert all(row.drawn_keys == pytest.approx(keys) and row.max_error is None for row in report.heads)
    assert report.multiply_adds == pytest.approx(4 * 2 * 8 * (keys + 5.5))
