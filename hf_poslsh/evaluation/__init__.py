"""Perplexity and extrapolation: which tokens are scored, how, and what is made of the scores.

The arithmetic of the recipes lives here, tested against hand-computed cases; files, tokenizers and progress bars
do not.
"""

from hf_poslsh.evaluation.plots import plot_perplexity_by_length
from hf_poslsh.evaluation.scores import TokenScores, require_same_targets, score_logits
from hf_poslsh.evaluation.scoring import score_windows
from hf_poslsh.evaluation.windows import Window, same_target_windows

__all__ = [
    "TokenScores",
    "Window",
    "plot_perplexity_by_length",
    "require_same_targets",
    "same_target_windows",
    "score_logits",
    "score_windows",
]
