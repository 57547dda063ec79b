"""The evaluation arithmetic against hand-computed cases."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_poslsh.evaluation import (
    TokenScores,
    Window,
    plot_perplexity_by_length,
    require_same_targets,
    same_target_windows,
    score_logits,
    score_windows,
)


class TableModel(torch.nn.Module):
    """A language model by definition: the next token's logits are a row of a table, chosen by the last token."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)
        self.batches = []
        self.train()

    @property
    def device(self):
        return self.table.device

    def forward(self, input_ids, use_cache, logits_to_keep):
        assert not self.training
        assert not use_cache
        self.batches.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


class CountingModel(TableModel):
    """Rates every token by how often it occurred so far in its window: its loss depends on the context."""

    def forward(self, input_ids, use_cache, logits_to_keep):
        seen = torch.nn.functional.one_hot(input_ids, self.table.shape[1]).cumsum(1).float()
        return SimpleNamespace(logits=seen[:, -logits_to_keep:])


def scores_of(nll, rank=None, document=None, target=None):
    nll = np.array(nll, dtype=np.float64)
    zeros = np.zeros(len(nll), dtype=np.int64)
    return TokenScores(
        document=zeros if document is None else np.array(document),
        target=np.arange(len(nll)) if target is None else np.array(target),
        context=np.arange(len(nll)) + 1,
        nll=nll,
        rank=zeros if rank is None else np.array(rank),
    )


def test_a_window_names_its_targets_and_their_contexts():
    window = Window(document=0, start=2, end=6, scored=3)
    assert window.length == 4
    assert list(window.targets) == [4, 5, 6]
    assert list(window.contexts) == [2, 3, 4]


def test_same_targets_by_hand():
    windows = same_target_windows([10], [2, 4], targets=100, targets_per_window=2)
    assert windows == {
        2: [Window(0, 2, 4, 2), Window(0, 4, 6, 2), Window(0, 6, 8, 2)],
        4: [Window(0, 0, 4, 2), Window(0, 2, 6, 2), Window(0, 4, 8, 2)],
    }


@pytest.mark.parametrize("per_window", [1, 7, 64])
def test_every_length_scores_the_same_targets_once_with_enough_context(per_window):
    document_lengths, lengths = [1000, 80, 701, 257], [64, 100, 256]
    windows = same_target_windows(document_lengths, lengths, targets=400, targets_per_window=per_window)
    sets = []
    for length in lengths:
        targets = [(w.document, t) for w in windows[length] for t in w.targets]
        assert len(targets) == len(set(targets)) == 400 // per_window * per_window
        assert all(
            w.length == length and w.start >= 0 and w.end < document_lengths[w.document] for w in windows[length]
        )
        assert min(min(w.contexts) for w in windows[length]) == length - per_window + 1
        sets.append(targets)
    assert sets[0] == sets[1] == sets[2]
    assert {0, 2} <= {document for document, _ in sets[0]} <= {0, 2, 3}


def test_targets_spread_over_the_document():
    windows = same_target_windows([100_001], [1000], targets=800, targets_per_window=100)[1000]
    ends = [w.end for w in windows]
    assert len(ends) == 8
    assert ends[0] == 1000
    assert ends[-1] > 85_000
    assert np.ptp(np.diff(ends)) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([100], [], 10, 1), "lengths is"),
        (([100], [8, 8], 10, 1), "distinct"),
        (([100], [8], 10, 9), "targets_per_window is 9"),
        (([100], [8], 2, 4), "targets is 2"),
        (([8, 5], [8], 4, 4), "longest document has 8 tokens; length 8 needs 9"),
        (([], [8], 4, 4), "longest document has 0 tokens"),
    ],
)
def test_impossible_windows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        same_target_windows(*arguments)


def test_nll_and_rank_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)], [1.0, 1.0, 1.0], [3.0, -math.inf, 3.0]])
    nll, rank = score_logits(logits.double(), torch.tensor([1, 1, 2]))
    assert nll.tolist() == pytest.approx([math.log(8 / 2), math.log(3), math.log(2)])
    assert rank.tolist() == [1, 1, 1]
    assert score_logits(logits[1], torch.tensor(0))[1].item() == 0


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.arange(5)
    exact = -torch.log_softmax(logits.double(), -1)[torch.arange(5), targets]
    assert torch.allclose(score_logits(logits, targets)[0].double(), exact, atol=1e-5)


def test_nan_logits_are_refused():
    with pytest.raises(FloatingPointError, match="1 of 2"):
        score_logits(torch.tensor([[0.0, 1.0], [math.nan, 1.0]]), torch.tensor([0, 0]))


def test_uniform_model_has_the_vocabulary_as_perplexity():
    model = TableModel(torch.zeros(50, 50))
    document = np.random.default_rng(0).integers(0, 50, 300)
    scores = score_windows(model, [document], same_target_windows([300], [32], 200, 8)[32])
    assert len(scores) == 200
    assert scores.perplexity() == pytest.approx(50, rel=1e-6)
    assert scores.accuracy(50) == 1.0
    assert scores.accuracy(1) == (document[scores.target] == 0).mean()


def test_known_logits_give_the_known_loss_of_exactly_the_targets():
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    documents = [np.random.default_rng(2).integers(0, 9, n) for n in (57, 91)]
    windows = [Window(1, 10, 30, 5), Window(0, 0, 20, 5), Window(0, 50, 56, 6), Window(1, 0, 20, 20)]
    model = TableModel(table)
    scores = score_windows(model, documents, windows, batch_tokens=40)
    assert model.batches == [(2, 20), (1, 6), (1, 20)]
    assert model.training
    expected = [(0, t) for t in (*range(16, 21), *range(51, 57))] + [(1, t) for t in (*range(1, 21), *range(26, 31))]
    assert list(zip(scores.document.tolist(), scores.target.tolist(), strict=True)) == expected
    log_p = torch.log_softmax(table.double(), -1).numpy()
    nll = [-log_p[documents[d][t - 1], documents[d][t]] for d, t in expected]
    assert scores.nll == pytest.approx(nll, rel=1e-5)
    assert scores.loss() == pytest.approx(np.mean(nll), rel=1e-5)
    assert scores.context.tolist() == [*range(16, 21), *range(1, 7), *range(1, 21), *range(16, 21)]
    best = [table[documents[d][t - 1]].argmax().item() == documents[d][t] for d, t in expected]
    assert scores.accuracy(1) == np.mean(best)


def test_batch_size_and_split_over_processes_change_nothing():
    model = CountingModel(torch.zeros(4, 4))
    documents = [np.random.default_rng(3).integers(0, 4, n) for n in (200, 300)]
    windows = same_target_windows([200, 300], [24], 120, 6)[24]
    one = score_windows(model, documents, windows, batch_tokens=24)
    many = score_windows(model, documents, windows, batch_tokens=10_000)
    split = TokenScores.concatenate([score_windows(model, documents, windows[rank::3]) for rank in (2, 0, 1)])
    for other in (many, split):
        assert np.array_equal(one.target, other.target)
        assert np.array_equal(one.context, other.context)
        assert np.array_equal(one.nll, other.nll)
        assert one.summary([1, 2]) == other.summary([1, 2])


def test_only_the_context_differs_between_lengths():
    document = np.random.default_rng(4).integers(0, 4, 400)
    windows = same_target_windows([400], [8, 16, 60], 100, 4)
    scores = {n: score_windows(TableModel(torch.randn(4, 4)), [document], w) for n, w in windows.items()}
    require_same_targets(scores)
    table = TableModel(torch.randn(4, 4))
    blind = [score_windows(table, [document], w).loss() for w in windows.values()]
    assert blind[0] == blind[1] == blind[2]
    counting = CountingModel(torch.zeros(4, 4))
    sighted = {n: score_windows(counting, [document], w).loss() for n, w in windows.items()}
    assert len(set(sighted.values())) == 3


def test_different_targets_are_refused():
    with pytest.raises(ValueError, match="8 and 16 scored different targets"):
        require_same_targets({8: scores_of([1, 2]), 16: scores_of([1, 2], target=[0, 2])})


def test_aggregates_weight_tokens_not_parts():
    parts = [scores_of([2.0], rank=[0]), scores_of([4.0, 6.0, 8.0], rank=[1, 4, 9], target=[5, 6, 7])]
    scores = TokenScores.concatenate(parts)
    assert scores.loss() == 5.0
    assert scores.perplexity() == pytest.approx(math.exp(5.0))
    assert scores.summary([1, 5, 10]) == {
        "perplexity": pytest.approx(math.exp(5.0)),
        "loss": 5.0,
        "top_1_accuracy": 0.25,
        "top_5_accuracy": 0.75,
        "top_10_accuracy": 1.0,
        "tokens_scored": 4,
        "context": [1, 3],
    }


def test_overflowing_perplexity_is_infinite():
    assert scores_of([1000.0]).perplexity() == math.inf


def test_a_target_scored_twice_is_refused():
    with pytest.raises(ValueError, match="1 targets were scored twice, the first at token 3"):
        TokenScores.concatenate([scores_of([1.0], target=[3]), scores_of([1.0], target=[3])])
    with pytest.raises(ValueError, match="no scores"):
        TokenScores.concatenate([])
    with pytest.raises(ValueError, match="k is 0"):
        scores_of([1.0]).accuracy(0)
    with pytest.raises(ValueError, match="share one shape"):
        scores_of([1.0, 2.0], rank=[0])


@pytest.mark.parametrize("window", [Window(0, 0, 10, 2), Window(0, -1, 5, 2), Window(0, 5, 9, 5), Window(0, 5, 9, 0)])
def test_windows_outside_their_document_are_refused(window):
    with pytest.raises(ValueError, match="does not fit its document of 10 tokens"):
        score_windows(TableModel(torch.zeros(2, 2)), [np.zeros(10, dtype=np.int64)], [window])


def test_mode_is_restored_after_an_error():
    model = TableModel(torch.full((2, 2), math.nan))
    with pytest.raises(FloatingPointError):
        score_windows(model, [np.zeros(10, dtype=np.int64)], [Window(0, 0, 4, 2)])
    assert model.training
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        score_windows(model, [np.zeros(10, dtype=np.int64)], [Window(0, 0, 4, 2)], batch_tokens=0)


def test_a_transformers_model_scores_as_its_own_loss():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    )
    document = np.random.default_rng(5).integers(0, 64, 21)
    loss = model(torch.tensor(document)[None], labels=torch.tensor(document)[None]).loss
    assert score_windows(model, [document], [Window(0, 0, 20, 20)]).loss() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_is_written(tmp_path, suffix):
    path = tmp_path / f"perplexity.{suffix}"
    plot_perplexity_by_length({"a": {512: 10.0, 1024: 11.0}, "b": {512: 9.0}}, path, training_length=512, title="t")
    head = path.read_bytes()[:100]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    with pytest.raises(ValueError, match="no perplexities"):
        plot_perplexity_by_length({"a": {}}, path)
