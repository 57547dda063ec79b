"""From scores to the figures of a report: measures, intervals, spread between seeds, differences between arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from hf_poslsh.evaluation.intervals import bootstrap_interval, resampling_units, student_interval
from hf_poslsh.evaluation.scores import TokenScores, require_same_targets


@dataclass(frozen=True)
class Measure:
    """``finish(sum(numerators) / sum(denominators))`` over all targets: every token weighs the same.

    Args:
        numerators: of the scores, float64 ``(T,)``.
        denominators: of the scores, ``(T,)``.
        finish: increasing, so that the ends of an interval may be put through it.
    """

    numerators: Callable[[TokenScores], np.ndarray]
    denominators: Callable[[TokenScores], np.ndarray]
    finish: Callable[[float], float] = float


def measures(top_k: Sequence[int] = (1,)) -> dict[str, Measure]:
    """The measures by name.

    ``loss``: nats per token. ``perplexity``: ``exp(loss)``, inf where that overflows. ``bits_per_token``:
    ``loss / ln 2``. ``bits_per_byte``: bits of all targets per UTF-8 byte of the text that they stand for; comparable
    between tokenizers. ``top_<k>_accuracy``: share of targets among the model's k best tokens.

    Raises:
        ValueError: a k is below 1.
    """
    for k in top_k:
        if k < 1:
            raise ValueError(f"k is {k}; top-k accuracy needs k of at least 1.")
    return {
        "perplexity": Measure(_nll, _ones, lambda loss: math.exp(loss) if loss < 700 else math.inf),
        "loss": Measure(_nll, _ones),
        "bits_per_token": Measure(_nll, _ones, lambda loss: loss / math.log(2)),
        "bits_per_byte": Measure(_nll, lambda scores: scores.bytes, lambda loss: loss / math.log(2)),
        **{f"top_{k}_accuracy": Measure(partial(_hits, k), _ones) for k in top_k},
    }


def _hits(k: int, scores: TokenScores) -> np.ndarray:
    return (scores.rank < k).astype(np.float64)


def _nll(scores: TokenScores) -> np.ndarray:
    return scores.nll


def _ones(scores: TokenScores) -> np.ndarray:
    return np.ones(len(scores))


def summarize(runs: Sequence[TokenScores], top_k: Sequence[int] = (1,)) -> dict[str, Any]:
    """The figures of one arm at one length.

    Over several runs (seeds of training) each token's score is the mean over the runs. For perplexity that is
    ``exp`` of the mean loss, the geometric mean of the runs' perplexities; for every other measure it is the mean of
    the runs' figures. An interval is over texts, for these runs; the spread between the runs stands beside it and
    is not in it.

    Args:
        runs: the scores of the same targets by each run.
        top_k: each k for which top-k accuracy is reported.

    Returns:
        Each of ``measures``; ``tokens_scored``; ``bytes_scored``; ``context``, the smallest and the largest;
        ``intervals``: ``resampled`` (what), ``units`` (how many) and for each measure ``[low, high]``, or None where
        there is none; ``runs``: for each measure the figure of every run; ``runs_std``: for each measure their sample
        standard deviation, or None for a single run.

    Raises:
        ValueError: there are no scores, the runs scored different targets, or the targets stand for no text.
    """
    first = _first(runs)
    if not first.bytes.any():
        raise ValueError("the targets stand for no bytes of text; bits per byte are undefined.")
    units = resampling_units(first)
    summary: dict[str, Any] = {}
    intervals: dict[str, Any] = {"resampled": units.name, "units": units.count}
    by_run, spread = {}, {}
    for name, measure in measures(top_k).items():
        below = measure.denominators(first)
        above = [measure.numerators(run) for run in runs]
        mean = np.mean(above, axis=0)
        summary[name] = measure.finish(mean.sum() / below.sum())
        interval = bootstrap_interval(mean, below, units)
        intervals[name] = None if interval is None else [measure.finish(end) for end in interval]
        by_run[name] = [measure.finish(one.sum() / below.sum()) for one in above]
        spread[name] = float(np.std(by_run[name], ddof=1)) if len(runs) > 1 else None
    return {
        **summary,
        "tokens_scored": len(first),
        "bytes_scored": int(first.bytes.sum()),
        "context": [int(first.context.min()), int(first.context.max())],
        "intervals": intervals,
        "runs": by_run,
        "runs_std": spread,
    }


def loss_difference(runs: Sequence[TokenScores], reference: Sequence[TokenScores]) -> dict[str, Any]:
    """Loss of one arm minus that of another, in nats per token, paired: token by token, and run by run.

    What makes a passage hard is hard for both arms, and drops out: the interval of the difference is far narrower
    than the two arms' own suggest.

    Args:
        runs: the scores of an arm's runs.
        reference: the scores of the other arm's runs, as many and in the same order (of seeds) where they are to
            be compared run by run.

    Returns:
        ``loss`` (the difference of the mean losses), ``interval`` (over texts, ``[low, high]`` or None),
        ``resampled``, ``units``, ``runs`` (each run's difference, None if the arms differ in the number of runs),
        ``runs_std`` and ``runs_interval`` (over runs of training, Student's; None for fewer than two).
        ``established``: neither interval holds 0; None where one of them is missing.

    Raises:
        ValueError: the arms scored different targets.
    """
    first = _first([*runs, *reference])
    units = resampling_units(first)
    difference = np.mean([run.nll for run in runs], axis=0) - np.mean([run.nll for run in reference], axis=0)
    interval = bootstrap_interval(difference, np.ones(len(first)), units)
    by_run = None
    if len(runs) == len(reference):
        by_run = [float((a.nll - b.nll).mean()) for a, b in zip(runs, reference, strict=True)]
    over_runs = None if by_run is None else student_interval(by_run)
    established = None
    if interval is not None and over_runs is not None:
        established = not any(low <= 0 <= high for low, high in (interval, over_runs))
    return {
        "loss": float(difference.mean()),
        "interval": None if interval is None else list(interval),
        "resampled": units.name,
        "units": units.count,
        "runs": by_run,
        "runs_std": None if by_run is None or over_runs is None else float(np.std(by_run, ddof=1)),
        "runs_interval": None if over_runs is None else list(over_runs),
        "established": established,
    }


def by_position(
    runs: Sequence[TokenScores], edges: Sequence[int], top_k: Sequence[int] = (1,)
) -> list[dict[str, Any]]:
    """The figures of the targets in each bucket of positions.

    Args:
        runs: as of ``summarize``.
        edges: ascending. A target with c tokens of context belongs to the bucket with ``low < c <= high``; one
            outside all buckets is left out.
        top_k: as of ``summarize``.

    Returns:
        For each bucket ``from``, ``to``, and what ``summarize`` returns.

    Raises:
        ValueError: the edges do not ascend, or a bucket is empty.
    """
    first = _first(runs)
    check_edges(edges, int(first.context.max()))
    buckets = []
    for low, high in pairwise(edges):
        inside = (first.context > low) & (first.context <= high)
        if not inside.any():
            raise ValueError(f"no target has more than {low} and up to {high} tokens of context; drop that bucket.")
        buckets.append({"from": low, "to": high, **summarize([run[inside] for run in runs], top_k)})
    return buckets


def check_edges(edges: Sequence[int], length: int) -> None:
    """Checks the edges of buckets of positions in passes of ``length`` tokens.

    Raises:
        ValueError: there are fewer than two, they do not ascend, or they leave the range from 0 to ``length``.
    """
    ascending = all(low < high for low, high in pairwise(edges))
    if len(edges) < 2 or not ascending or edges[0] < 0 or edges[-1] > length:
        raise ValueError(f"the edges are {list(edges)}; give at least two, ascending, from 0 up to {length}.")


def position_edges(length: int) -> list[int]:
    """Edges for passes of ``length`` tokens: 1/16, 1/8, 1/4, 1/2, 3/4 and all of it, rounded down; 0 before."""
    return sorted({0, *(length * sixteenths // 16 for sixteenths in (1, 2, 4, 8, 12, 16))})


def _first(runs: Sequence[TokenScores]) -> TokenScores:
    if not runs or not len(runs[0]):
        raise ValueError("there are no scores; score at least one window.")
    require_same_targets(dict(enumerate(runs)), "runs")
    return runs[0]
