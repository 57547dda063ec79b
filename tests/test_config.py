"""PosLSHConfig checks every field and survives the way to JSON and back."""

import dataclasses
import json

import pytest

from hf_poslsh import PosLSHConfig


def test_defaults_are_the_documented_ones():
    assert PosLSHConfig().to_dict() == {
        "bias": "poslsh",
        "num_samples": 20,
        "sampler": "staggered",
        "estimator": "pooled",
        "sigma": "alibi",
        "sink_tokens": 0,
        "max_distance": None,
        "full_heads": None,
        "rope": "keep",
        "layers": None,
        "scope": "head",
        "resample": "fixed",
        "seed": 0,
        "impl": "auto",
        "window": None,
        "tolerance": 1e-6,
        "cache": "bounded",
    }


def test_presets():
    paper = PosLSHConfig.paper(num_samples=10)
    assert (paper.sampler, paper.sigma, paper.rope, paper.num_samples) == ("iid", "alibi", "drop", 10)
    pretrained = PosLSHConfig.pretrained()
    assert (pretrained.sigma, pretrained.sink_tokens, pretrained.rope) == (256.0, 1, "keep")
    assert PosLSHConfig.pretrained(sigma=64).sigma == 64.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "rope"),
        ("num_samples", 0),
        ("num_samples", 2.0),
        ("num_samples", True),
        ("sampler", "sobol"),
        ("estimator", "median"),
        ("sigma", 0),
        ("sigma", -1.0),
        ("sigma", float("nan")),
        ("sigma", float("inf")),
        ("sigma", "slopes"),
        ("sigma", []),
        ("sigma", [1.0, -2.0]),
        ("sink_tokens", -1),
        ("max_distance", 0),
        ("max_distance", True),
        ("max_distance", "long"),
        ("rope", None),
        ("layers", []),
        ("layers", [0, 0]),
        ("layers", [-1]),
        ("layers", "all"),
        ("scope", "heads"),
        ("resample", "never"),
        ("seed", -1),
        ("seed", 2**63),
        ("impl", "triton"),
        ("window", 8),
        ("tolerance", 0.0),
        ("tolerance", 1.0),
        ("cache", "sliding"),
    ],
)
def test_a_bad_field_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=field) as error:
        PosLSHConfig(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": "window"},
        {"bias": "alibi", "estimator": "mean"},
        {"estimator": "mean", "impl": "banded"},
        {"bias": "fixed_blocks", "resample": "step"},
    ],
)
def test_contradicting_fields_are_refused(fields):
    with pytest.raises(ValueError, match=r"bias|impl"):
        PosLSHConfig(**fields)


@pytest.mark.parametrize(
    "config",
    [
        PosLSHConfig(),
        PosLSHConfig.paper(),
        PosLSHConfig(sigma=[1.5, 2.0], layers=[3, 1], seed=2**62),
        PosLSHConfig(bias="window", window=128, sink_tokens=4),
    ],
)
def test_json_and_back(config):
    assert PosLSHConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields_are_refused_because_they_may_change_the_model():
    with pytest.raises(ValueError, match=r"\['temperature'\].*pip install -U"):
        PosLSHConfig.from_dict({"temperature": 1.0})


def test_frozen_and_hashable():
    config = PosLSHConfig(sigma=[1.0, 2.0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert hash(config) == hash(PosLSHConfig(sigma=(1.0, 2.0)))
    assert config.replace(seed=3) == PosLSHConfig(sigma=(1.0, 2.0), seed=3)
