import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from hf_poslsh.testing import FAMILIES


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def ids():
    """Two rows of 24 tokens; 0 is the padding token and does not occur."""
    return random_ids(2, 24)


def random_ids(rows, length, seed=0):
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(seed))
