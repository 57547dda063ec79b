"""Perplexity and extrapolation: which tokens are scored, how, and what is made of the scores.

The arithmetic of the recipes lives here, tested against hand-computed cases; files, checkpoints and progress bars
do not.
"""

from hf_poslsh.evaluation.documents import Document, encode_document
from hf_poslsh.evaluation.intervals import bootstrap_interval, resampling_units, student_interval, wilson_interval
from hf_poslsh.evaluation.plots import plot_by_length, plot_by_position, plot_retrieval
from hf_poslsh.evaluation.retrieval import (
    Question,
    accuracy_by_length,
    answered_by_generation,
    answered_by_score,
    question_windows,
    retrieval_accuracy,
    summarize_retrieval,
)
from hf_poslsh.evaluation.scores import TokenScores, require_same_targets, score_logits
from hf_poslsh.evaluation.scoring import score_windows
from hf_poslsh.evaluation.summary import (
    by_position,
    check_edges,
    loss_difference,
    measures,
    position_edges,
    summarize,
)
from hf_poslsh.evaluation.tables import (
    markdown_report,
    rows_by_length,
    rows_by_position,
    rows_of_cells,
    rows_of_retrieval,
)
from hf_poslsh.evaluation.tasks import TASKS, passkey_prompt, passkey_prompts, retrieval_prompts
from hf_poslsh.evaluation.windows import (
    PROTOCOLS,
    Window,
    non_overlapping_windows,
    protocol_windows,
    same_target_windows,
    single_pass_windows,
    sliding_windows,
)

__all__ = [
    "PROTOCOLS",
    "TASKS",
    "Document",
    "Question",
    "TokenScores",
    "Window",
    "accuracy_by_length",
    "answered_by_generation",
    "answered_by_score",
    "bootstrap_interval",
    "by_position",
    "check_edges",
    "encode_document",
    "loss_difference",
    "markdown_report",
    "measures",
    "non_overlapping_windows",
    "passkey_prompt",
    "passkey_prompts",
    "plot_by_length",
    "plot_by_position",
    "plot_retrieval",
    "position_edges",
    "protocol_windows",
    "question_windows",
    "require_same_targets",
    "resampling_units",
    "retrieval_accuracy",
    "retrieval_prompts",
    "rows_by_length",
    "rows_by_position",
    "rows_of_cells",
    "rows_of_retrieval",
    "same_target_windows",
    "score_logits",
    "score_windows",
    "single_pass_windows",
    "sliding_windows",
    "student_interval",
    "summarize",
    "summarize_retrieval",
    "wilson_interval",
]
