"""Positional LSH attention for Hugging Face Transformers."""

from hf_poslsh.config import PosLSHConfig
from hf_poslsh.hashing import PositionalHash
from hf_poslsh.ops.functional import positional_lsh_attention
from hf_poslsh.slopes import alibi_slopes

__version__ = "0.1.0"

__all__ = [
    "PosLSHConfig",
    "PositionalHash",
    "alibi_slopes",
    "positional_lsh_attention",
]
