"""Positional LSH attention for Hugging Face Transformers."""

__version__ = "0.1.0"

from hf_poslsh.adapters import load_adapter
from hf_poslsh.config import PosLSHConfig
from hf_poslsh.hashing import PositionalHash
from hf_poslsh.hub import push_to_hub
from hf_poslsh.models.families import register_family
from hf_poslsh.ops.blocks import merge_attention
from hf_poslsh.ops.functional import alibi_attention, positional_lsh_attention
from hf_poslsh.ops.rotary import Rotary
from hf_poslsh.patching import StepCallback, patch_model, poslsh, set_step, unpatch_model
from hf_poslsh.slopes import alibi_slopes

__all__ = [
    "PosLSHConfig",
    "PositionalHash",
    "Rotary",
    "StepCallback",
    "alibi_attention",
    "alibi_slopes",
    "load_adapter",
    "merge_attention",
    "patch_model",
    "positional_lsh_attention",
    "poslsh",
    "push_to_hub",
    "register_family",
    "set_step",
    "unpatch_model",
]
