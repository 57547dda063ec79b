"""The paper's theorems and this package's own, on numbers: matrices as operators, exact norms, laws and bounds.

``operators`` and ``norms`` measure given draws, ``entries`` and ``work`` hold what is exact over draws, ``bounds``
and ``outputs`` what is proved, and ``describe`` puts a config's figures in a table. Nothing here runs in a model.
"""

from hf_poslsh.theory.bounds import (
    frobenius_tail,
    kernel_norm_limit,
    max_norm_bound,
    max_norm_tail,
    paper_spectral_mean,
    paper_spectral_tail,
    psi,
    required_samples,
    spectral_mean,
    spectral_tail,
)
from hf_poslsh.theory.describe import Description, HeadReport, describe
from hf_poslsh.theory.entries import (
    entry_variance,
    expected_square_error,
    hidden_probability,
    staggered_variance_bound,
)
from hf_poslsh.theory.norms import ErrorNorms, error_norms
from hf_poslsh.theory.operators import (
    BiasOperator,
    error_operator,
    kernel_norm,
    kernel_operator,
    mask_operator,
    spectral_norm,
)
from hf_poslsh.theory.outputs import RowSums, output_frobenius_bound, output_row_bound, row_sums
from hf_poslsh.theory.work import (
    DrawnKeys,
    drawn_keys,
    expected_keys,
    expected_widest_bin,
    full_attention_keys,
    multiply_adds,
    wider_probability,
    widest_bin,
)

__all__ = [
    "BiasOperator",
    "Description",
    "DrawnKeys",
    "ErrorNorms",
    "HeadReport",
    "RowSums",
    "describe",
    "drawn_keys",
    "entry_variance",
    "error_norms",
    "error_operator",
    "expected_keys",
    "expected_square_error",
    "expected_widest_bin",
    "frobenius_tail",
    "full_attention_keys",
    "hidden_probability",
    "kernel_norm",
    "kernel_norm_limit",
    "kernel_operator",
    "mask_operator",
    "max_norm_bound",
    "max_norm_tail",
    "multiply_adds",
    "output_frobenius_bound",
    "output_row_bound",
    "paper_spectral_mean",
    "paper_spectral_tail",
    "psi",
    "required_samples",
    "row_sums",
    "spectral_mean",
    "spectral_norm",
    "spectral_tail",
    "staggered_variance_bound",
    "wider_probability",
    "widest_bin",
]
