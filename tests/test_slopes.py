"""ALiBi slopes against numbers written down by hand and against BLOOM's bias in transformers."""

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from hf_poslsh import alibi_slopes
from hf_poslsh.slopes import resolve_sigma


def test_powers_of_two_by_hand():
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(2).tolist() == [2.0**-4, 2.0**-8]
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 9, 12, 16, 24, 32, 40, 71])
def test_against_bloom(heads):
    bias = build_alibi_tensor(torch.ones(1, 4, dtype=torch.long), heads, torch.float64)  # slope * position
    np.testing.assert_allclose(alibi_slopes(heads), bias[:, 0, 1].numpy(), rtol=1e-6)


def test_forty_heads_as_in_llama4():
    sigma = 1 / alibi_slopes(40)
    np.testing.assert_allclose(sigma[:32], 2.0 ** (8 * np.arange(1, 33) / 32), rtol=1e-12)
    np.testing.assert_allclose(sigma[32:], [1.09, 1.30, 1.54, 1.83, 2.18, 2.59, 3.08, 3.67], atol=5e-3)


@pytest.mark.parametrize("heads", [0, -1, 2.0, True, "8"])
def test_bad_head_counts(heads):
    with pytest.raises(ValueError, match="num_heads"):
        alibi_slopes(heads)


def test_resolve_sigma():
    np.testing.assert_allclose(resolve_sigma("alibi", 4), 1 / alibi_slopes(4))
    assert resolve_sigma(256, 3).tolist() == [256.0] * 3
    assert resolve_sigma((1.0, 2.0), 2).tolist() == [1.0, 2.0]
    for bad in ((1.0, 2.0, 3.0), "bloom", (0.0, 1.0)):
        with pytest.raises(ValueError, match="sigma"):
            resolve_sigma(bad, 2)
