"""How property tests are run: a few examples by default, the same ones every time, and many if marked slow."""

import pytest
from hypothesis import HealthCheck, settings


def amounts(few, many):
    """A parameter ``amount``: ``few`` by default, ``many`` by ``pytest -m slow``."""
    return pytest.mark.parametrize("amount", [few, pytest.param(many, marks=pytest.mark.slow)])


def examine(holds, amount):
    """Runs what ``given`` has decorated on ``amount`` examples."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run = settings(max_examples=amount, derandomize=True, deadline=None, database=None, suppress_health_check=checks)(
        holds
    )
    run()
