"""Dense outputs of one head against the operators' own oracle."""

import math

import numpy as np
import pytest
import torch

from hf_poslsh import PositionalHash, alibi_attention, positional_lsh_attention
from hf_poslsh.theory import comparison, error_norms, error_operator, spectral_norm

N, DIM, SIGMA = 70, 6, (3.0, 11.0)


@pytest.fixture
def activations():
    return np.random.default_rng(1).standard_normal((3, N, DIM))


def tensors(activations):
    return (torch.from_numpy(x).expand(1, 2, N, DIM) for x in activations)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("estimator", ["pooled", "mean"])
def test_outputs_of_both_estimators(activations, estimator, causal):
    hashes = PositionalHash.sample(SIGMA, 9)
    query, key, value = activations
    weights = comparison.score_weights(query, key, 1 / math.sqrt(DIM), causal)
    expected = positional_lsh_attention(
        *tensors(activations), hashes, is_causal=causal, estimator=estimator, impl="reference"
    )
    for head in range(2):
        if estimator == "pooled":
            mask = comparison.mask_matrix(hashes, N, head)
            np.testing.assert_allclose(mask, hashes.mask_mean(N)[head], atol=1e-12)
            out = comparison.biased_output(weights, mask, value)
        else:
            out = comparison.mean_estimator_output(weights, hashes, value, head)
        np.testing.assert_allclose(out, expected[0, head].numpy(), atol=1e-10)


def test_output_of_exact_alibi(activations):
    query, key, value = activations
    expected = alibi_attention(*tensors(activations), SIGMA, impl="reference")[0, 1].numpy()
    weights = comparison.score_weights(query, key, 1 / math.sqrt(DIM))
    out = comparison.biased_output(weights, comparison.kernel_matrix(N, SIGMA[1]), value)
    np.testing.assert_allclose(out, expected, atol=1e-10)


def test_a_window_hides_what_is_further():
    matrix = comparison.kernel_matrix(6, 2.0, window=3)
    assert (matrix[0] > 0).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(("keys", "window"), [(1.0, 1), (1.9, 2), (5.5, 10), (5.45, 9)])
def test_equal_window(keys, window):
    assert comparison.equal_window(keys, 10) == window


def test_output_errors():
    exact = np.array([[3.0, 4.0], [0.0, 2.0]])
    errors = comparison.output_errors(np.array([[3.0, 4.0], [2.0, 0.0]]), exact)
    assert errors.frobenius == pytest.approx(math.sqrt(8 / 29))
    assert errors.largest == 2
    assert errors.row_median == pytest.approx(math.sqrt(2) / 2)
    assert errors.cosine == pytest.approx(0.5)
    assert comparison.output_errors(exact, exact) == (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_dense_norms_are_those_of_the_operators(causal):
    hashes = PositionalHash.sample(SIGMA, 9)
    seen = np.tri(N) if causal else np.ones((N, N))
    mask, kernel = comparison.mask_matrix(hashes, N, 1) * seen, comparison.kernel_matrix(N, SIGMA[1]) * seen
    expected = error_norms(hashes, N, SIGMA[1], 1, causal)
    np.testing.assert_allclose(comparison.matrix_errors(mask, kernel), expected, rtol=1e-9)
    operator = error_operator(hashes, N, SIGMA[1], 1, causal)
    assert comparison.matrix_norm(mask - kernel) == pytest.approx(spectral_norm(operator, 1e-6), rel=1e-3)
