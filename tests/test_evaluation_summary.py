"""What is made of the scores: bytes, measures, intervals, seeds, differences, tables, by hand counts."""

import csv
import io
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_poslsh.evaluation import (
    TokenScores,
    bootstrap_interval,
    by_position,
    encode_document,
    loss_difference,
    markdown_report,
    measures,
    position_edges,
    require_same_targets,
    resampling_units,
    rows_by_length,
    rows_by_position,
    student_interval,
    summarize,
)


def scores_of(nll, rank=None, document=None, target=None, sizes=None, context=None):
    nll = np.array(nll, dtype=np.float64)
    count = np.arange(len(nll))
    return TokenScores(
        document=0 * count if document is None else np.array(document),
        target=count + 1 if target is None else np.array(target),
        context=count + 1 if context is None else np.array(context),
        bytes=0 * count + 1 if sizes is None else np.array(sizes),
        nll=nll,
        rank=0 * count if rank is None else np.array(rank),
    )


# --- texts


def byte_level(bos=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{name: index + 1 for index, name in enumerate([*alphabet, "ab"])}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_bytes_of_byte_level_tokens_are_exact():
    document = encode_document(byte_level(), "ab é ab世<s>")
    #                                         ab␣ é  ␣ ab 世    <s>, written in the text
    assert document.bytes.tolist() == [2, 1, 1, 1, 1, 2, 1, 1, 1, 3]
    assert document.bos is None


def test_bytes_of_other_tokens_reach_from_the_token_before():
    tokenizer = Tokenizer(models.WordLevel({"ab": 0, "é": 1, "c": 2}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = "ab  é c "
    document = encode_document(PreTrainedTokenizerFast(tokenizer_object=tokenizer), text)
    assert document.ids.tolist() == [0, 1, 2]
    assert document.bytes.tolist() == [2, 2 + 2, 1 + 1 + 1]
    assert document.bytes.sum() == len(text.encode())


def test_a_changed_text_falls_back_to_where_tokens_stand():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    document = encode_document(tokenizer, "abé")  # read as " abé"
    assert len(document) == 4
    assert document.bytes.sum() == 4


def test_a_beginning_of_sequence_is_used_where_the_tokenizer_uses_it():
    document = encode_document(byte_level(bos=True), "ab")
    assert document.bos == 0
    assert document.ids.tolist() == [0, byte_level().convert_tokens_to_ids("ab")]
    assert document.bytes.tolist() == [0, 2]


def test_texts_without_tokens_and_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="no tokens"):
        encode_document(byte_level(), "")

    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="SlowTokenizer is a slow tokenizer"):
        encode_document(SlowTokenizer(), "a")


# --- scores and measures


def test_different_targets_are_refused():
    with pytest.raises(ValueError, match="8 and 16 scored different targets"):
        require_same_targets({8: scores_of([1, 2]), 16: scores_of([1, 2], target=[0, 2])})
    with pytest.raises(ValueError, match="checkpoints a and b scored different targets"):
        require_same_targets({"a": scores_of([1, 2]), "b": scores_of([1, 2], sizes=[1, 2])}, "checkpoints")


def test_a_target_scored_twice_is_refused():
    with pytest.raises(ValueError, match="1 targets were scored twice, the first at token 3"):
        TokenScores.concatenate([scores_of([1.0], target=[3]), scores_of([1.0], target=[3])])
    with pytest.raises(ValueError, match="no scores"):
        TokenScores.concatenate([TokenScores.empty()])
    with pytest.raises(ValueError, match="no scores"):
        summarize([TokenScores.empty()])
    with pytest.raises(ValueError, match="k is 0"):
        measures([0])
    with pytest.raises(ValueError, match="no bytes"):
        summarize([scores_of([1.0], sizes=[0])])
    with pytest.raises(ValueError, match="share one shape"):
        scores_of([1.0, 2.0], rank=[0])


def test_aggregates_weight_tokens_not_parts():
    parts = [
        scores_of([2.0], rank=[0], sizes=[4]),
        scores_of([4.0, 6.0, 8.0], rank=[1, 4, 9], target=[5, 6, 7], sizes=[0, 3, 3]),
    ]
    summary = summarize([TokenScores.concatenate(parts)], [1, 5, 10])
    assert {name: summary[name] for name in measures([1, 5, 10])} == {
        "loss": 5.0,
        "perplexity": pytest.approx(math.exp(5.0)),
        "bits_per_token": pytest.approx(5.0 / math.log(2)),
        "bits_per_byte": pytest.approx(20.0 / math.log(2) / 10),
        "top_1_accuracy": 0.25,
        "top_5_accuracy": 0.75,
        "top_10_accuracy": 1.0,
    }
    assert (summary["tokens_scored"], summary["bytes_scored"], summary["context"]) == (4, 10, [1, 3])
    assert summary["intervals"]["loss"] is None
    assert summary["intervals"]["units"] == 1
    assert summary["runs"]["loss"] == [5.0]
    assert summary["runs_std"]["loss"] is None
    assert json.loads(json.dumps(summary)) == summary


def test_overflowing_perplexity_is_infinite():
    assert summarize([scores_of([1000.0])])["perplexity"] == math.inf


# --- intervals


def test_documents_are_resampled_and_few_documents_as_blocks():
    many = resampling_units(scores_of(np.zeros(10), document=[3, 3, 5, 6, 7, 8, 9, 10, 11, 11]))
    assert (many.name, many.count) == ("documents", 8)
    assert many.index.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 7]
    few = resampling_units(scores_of(np.zeros(1310), document=[0] * 1000 + [1] * 10 + [2] * 300))
    assert few.name == "blocks of 256 targets"
    assert np.bincount(few.index).tolist() == [256, 256, 256, 232, 10, 300]
    assert few.count == 6


def uneven_documents(seed, count=30):
    """Documents of different sizes, each with a level of its own about the mean 2."""
    random = np.random.default_rng(seed)
    sizes = random.integers(5, 60, count)
    document = np.repeat(np.arange(count), sizes)
    return scores_of(2 + random.normal(size=count)[document] + random.normal(size=len(document)), document=document)


def test_the_interval_is_the_percentile_bootstrap_over_documents():
    scores = uneven_documents(0)
    units = resampling_units(scores)
    low, high = bootstrap_interval(scores.nll, np.ones(len(scores)), units)
    sums, sizes = (np.bincount(scores.document, weights) for weights in (scores.nll, None))
    expected = scipy.stats.bootstrap(
        (sums, sizes),
        lambda sums, sizes, axis: sums.sum(axis) / sizes.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
    ).confidence_interval
    width = expected.high - expected.low
    assert low == pytest.approx(expected.low, abs=0.08 * width)
    assert high == pytest.approx(expected.high, abs=0.08 * width)
    # Tokens taken as independent would claim far too much.
    assert width > 3 * 2 * 1.96 * scores.nll.std() / len(scores) ** 0.5 * 0.9
    assert (low, high) == bootstrap_interval(scores.nll, np.ones(len(scores)), units)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered = 0
    for seed in range(150):
        scores = uneven_documents(seed)
        low, high = bootstrap_interval(scores.nll, np.ones(len(scores)), resampling_units(scores))
        covered += low <= 2 <= high
    assert 0.87 <= covered / 150 <= 0.99


def test_intervals_of_all_measures_belong_to_the_same_resamples():
    scores = uneven_documents(1)
    intervals = summarize([scores])["intervals"]
    low, high = intervals["loss"]
    assert intervals["perplexity"] == pytest.approx([math.exp(low), math.exp(high)])
    assert intervals["bits_per_byte"] == pytest.approx([low / math.log(2), high / math.log(2)])  # 1 byte per token
    assert intervals["resampled"] == "documents"


def test_too_few_units_have_no_interval():
    scores = scores_of(np.arange(7 * 256))
    assert bootstrap_interval(scores.nll, np.ones(len(scores)), resampling_units(scores)) is None
    scores = scores_of(np.arange(8 * 256))
    assert bootstrap_interval(scores.nll, np.ones(len(scores)), resampling_units(scores)) is not None


# --- seeds and differences


def test_runs_are_averaged_token_by_token_with_their_spread_beside():
    runs = [
        scores_of([1.0, 3.0], rank=[0, 1]),
        scores_of([2.0, 6.0], rank=[0, 0]),
        scores_of([3.0, 9.0], rank=[5, 5]),
    ]
    summary = summarize(runs)
    assert summary["loss"] == 4.0
    assert summary["runs"]["loss"] == [2.0, 4.0, 6.0]
    assert summary["runs_std"]["loss"] == pytest.approx(2.0)
    assert summary["perplexity"] == pytest.approx(math.exp(4))
    assert summary["runs"]["top_1_accuracy"] == [0.5, 1.0, 0.0]
    assert summary["top_1_accuracy"] == pytest.approx(0.5)
    assert summary["runs_std"]["top_1_accuracy"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="runs 0 and 1 scored different targets"):
        summarize([scores_of([1.0]), scores_of([1.0], target=[7])])


def test_the_interval_of_several_runs_is_over_texts_not_over_runs():
    one = uneven_documents(2)
    far = scores_of(one.nll + 5, document=one.document)
    near = summarize([one])["intervals"]["loss"]
    both = summarize([one, far])
    assert both["intervals"]["loss"] == pytest.approx([near[0] + 2.5, near[1] + 2.5])
    assert both["runs_std"]["loss"] == pytest.approx(5 / 2**0.5)


def test_differences_are_paired():
    base = uneven_documents(3)
    better = scores_of(base.nll - 0.125, document=base.document)
    assert loss_difference([better], [base]) == {
        "loss": pytest.approx(-0.125),
        "interval": pytest.approx([-0.125, -0.125]),
        "resampled": "documents",
        "units": 30,
        "runs": [pytest.approx(-0.125)],
        "runs_std": None,
        "runs_interval": None,
        "established": None,
    }
    assert np.diff(summarize([base])["intervals"]["loss"]) > 0.5


def test_differences_between_seeds_are_paired_by_seed():
    a, b = [scores_of([1.0]), scores_of([3.0])], [scores_of([0.5]), scores_of([4.0])]
    difference = loss_difference(a, b)
    assert difference["loss"] == -0.25
    assert difference["runs"] == [0.5, -1.0]
    assert difference["runs_std"] == pytest.approx(1.5 / 2**0.5)
    assert difference["interval"] is None
    assert difference["established"] is None
    uneven = loss_difference(a, b[:1])
    assert (uneven["loss"], uneven["runs"], uneven["runs_std"], uneven["runs_interval"]) == (1.5, None, None, None)
    with pytest.raises(ValueError, match="different targets"):
        loss_difference(a, [scores_of([1.0], document=[1])])


def test_the_interval_over_seeds_is_students():
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))  # t(2)
    assert student_interval([1.0]) is None


@pytest.mark.parametrize(
    ("by_seed", "of_texts", "established"),
    [
        ([0.9, 1.0, 1.1], 0.0, True),
        ([0.1, 1.0, 1.9], 0.0, False),  # 1 -+ 2.24: the seeds differ too much
        ([0.9, 1.0, 1.1], 9.0, False),  # the texts do
        ([-0.9, -1.0, -1.1], 0.0, True),
    ],
)
def test_a_difference_is_established_against_other_texts_and_other_seeds(by_seed, of_texts, established):
    base = uneven_documents(3)
    noise = of_texts * np.random.default_rng(5).standard_normal(base.document.max() + 1)[base.document]
    noise -= noise.mean()
    runs = [scores_of(base.nll + difference + noise, document=base.document) for difference in by_seed]
    difference = loss_difference(runs, [base] * 3)
    assert difference["runs"] == pytest.approx(by_seed)
    half = 4.302653 * abs(by_seed[2] - by_seed[1]) / 3**0.5
    assert difference["runs_interval"] == pytest.approx([by_seed[1] - half, by_seed[1] + half])
    assert difference["established"] is established


# --- positions


def test_loss_by_position_by_hand():
    scores = scores_of([1.0, 2.0, 3.0, 10.0, 20.0, 5.0], context=[1, 2, 3, 4, 5, 1], target=[1, 2, 3, 4, 5, 9])
    buckets = by_position([scores], [0, 1, 4])
    assert [(b["from"], b["to"], b["tokens_scored"], b["loss"]) for b in buckets] == [(0, 1, 2, 3.0), (1, 4, 3, 5.0)]
    assert by_position([scores, scores], [2, 5])[0]["loss"] == 11.0


def test_position_edges_of_a_long_pass():
    assert position_edges(16384) == [0, 1024, 2048, 4096, 8192, 12288, 16384]
    assert position_edges(5) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    ("edges", "message"),
    [([0], "at least two"), ([0, 2, 2], "ascending"), ([-1, 2], "from 0"), ([0, 9], "up to 2")],
)
def test_impossible_buckets_are_refused(edges, message):
    with pytest.raises(ValueError, match=message):
        by_position([scores_of([1.0, 1.0])], edges)


# --- tables


@pytest.fixture
def results():
    runs = {arm: [uneven_documents(4), uneven_documents(4)] for arm in ("plsh", "rope")}
    runs["rope"] = [scores_of(run.nll + 1, document=run.document) for run in runs["rope"]]
    return {
        "name": "A study",
        "protocol": {
            "name": "same-targets",
            "texts": [{"name": "a.txt", "tokens_scored": 9}],
            "single_pass": {"length": 60},
        },
        "arms": {
            arm: {
                "lengths": {"512": summarize(of_arm), "700": summarize(of_arm)},
                "positions": by_position(of_arm, [0, 9, 60]),
            }
            for arm, of_arm in runs.items()
        },
        "differences": {
            "plsh": {"rope": {length: loss_difference(runs["rope"], runs["plsh"]) for length in ("512", "700")}},
            "rope": {"plsh": {length: loss_difference(runs["plsh"][:1], runs["rope"]) for length in ("512", "700")}},
        },
    }


def test_rows_hold_every_figure_once(results):
    rows = rows_by_length(results)
    assert len(rows) == 2 * 2 * 5 + 2 * 2
    assert {len(row) for row in rows} == {12}
    (row,) = [row for row in rows if (row["arm"], row["length"], row["measure"]) == ("rope", 700, "loss")]
    summary = results["arms"]["rope"]["lengths"]["700"]
    assert (row["value"], [row["low"], row["high"]]) == (summary["loss"], summary["intervals"]["loss"])
    assert (row["protocol"], row["resampled"], row["units"], row["runs"]) == ("same-targets", "documents", 30, 2)
    (difference,) = [row for row in rows if row["measure"] == "loss_minus_plsh" and row["length"] == 512]
    assert difference["value"] == pytest.approx(1.0)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writerows(rows)  # refuses unknown columns
    positions = rows_by_position(results)
    assert len(positions) == 2 * 2 * 5
    assert {(row["from"], row["to"]) for row in positions} == {(0, 9), (9, 60)}


def test_the_report_shows_figure_interval_and_spread(results):
    report = markdown_report(results)
    summary = results["arms"]["rope"]["lengths"]["700"]
    low, high = summary["intervals"]["perplexity"]
    assert f"{summary['perplexity']:.1f} [{low:.1f}, {high:.1f}] ± 0.0 |" in report
    assert "| rope | **+1.000 [+1.000, +1.000] ± 0.000** | **+1.000" in report
    assert "Bold: neither the interval over texts nor the 95% interval over the runs" in report
    assert "| plsh | -1.000 [-1.000, -1.000] | -1.000" in report  # one run against two: no word on seeds
    assert "what other seeds would give is not known" in report
    assert "95% interval by bootstrap over 30 documents" in report
    assert "standard deviation between 2 runs" in report
    assert "tokens are scored, all of the same weight: `a.txt` (9)." in report
    assert "Protocol `same-targets`: the same tokens are scored at every length" in report
    assert "## Loss by position in one pass of 60 tokens" in report
    rows = [line for line in report.splitlines() if line.startswith("|")]
    for head, line in pairwise(rows):
        if line.startswith("| ---"):
            assert head.count("|") == line.count("|")
