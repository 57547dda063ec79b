"""What is read and scored: windows against hand-computed cases, models whose every probability is known."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_ids

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.evaluation import (
    PROTOCOLS,
    Document,
    TokenScores,
    Window,
    non_overlapping_windows,
    protocol_windows,
    require_same_targets,
    same_target_windows,
    score_logits,
    score_windows,
    scoring,
    single_pass_windows,
    sliding_windows,
)
from hf_poslsh.evaluation.windows import even_shares
from hf_poslsh.testing import tiny_model


class TableModel(torch.nn.Module):
    """A language model by definition: the next token's logits are a row of a table, chosen by the last token."""

    def __init__(self, table):
        super().__init__()
        self.head = torch.nn.Linear(len(table), len(table), bias=False)
        self.head.weight.data = table.T.contiguous()
        self.batches = []
        self.train()

    @property
    def device(self):
        return self.head.weight.device

    def get_output_embeddings(self):
        return self.head

    def hidden(self, ids):
        return torch.nn.functional.one_hot(ids, self.head.in_features).to(self.head.weight.dtype)

    def forward(self, input_ids, use_cache):
        assert not self.training
        assert not use_cache
        self.batches.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.head(self.hidden(input_ids)))


class CountingModel(TableModel):
    """Rates every token by how often it occurred so far in its window: its loss depends on the context."""

    def __init__(self, vocabulary):
        super().__init__(torch.eye(vocabulary))

    def hidden(self, ids):
        return super().hidden(ids).cumsum(1)


def document_of(ids, bos=None):
    ids = np.array(ids, dtype=np.int64)
    return Document(ids, np.ones_like(ids), bos)


def random_document(seed, vocabulary, length, bos=None):
    return document_of(np.random.default_rng(seed).integers(0, vocabulary, length), bos)


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
    shares = Counter(document for document, _ in sets[0])
    assert sum(shares.values()) == 400 // per_window * per_window
    assert shares[1] == 0  # too short
    assert shares[3] == per_window  # one run is all it holds
    assert abs(shares[0] - shares[2]) <= per_window


def test_every_text_gives_as_many_targets_as_any_other():
    windows = same_target_windows([50_000, 900, 2_000, 300], [512], targets=2048, targets_per_window=128)[512]
    assert [w.document for w in windows] == [0] * 6 + [1] * 4 + [2] * 6  # 16 runs; the second holds four: 512..896
    assert [w.end for w in windows if w.document == 1] == [512, 640, 768, 896]


@pytest.mark.parametrize(
    ("count", "room", "shares"),
    [
        (4, [9, 2, 9, 9], [1, 1, 1, 1]),
        (2, [9, 9, 9, 9], [1, 0, 1, 0]),
        (9, [9, 2, 0, 9], [4, 2, 0, 3]),
        (99, [9, 2], [9, 2]),
        (5, [0, 7], [0, 5]),
    ],
)
def test_even_shares_by_hand(count, room, shares):
    assert even_shares(count, room) == shares


def test_targets_spread_over_the_document():
    windows = same_target_windows([100_001], [1000], targets=800, targets_per_window=100)[1000]
    ends = [w.end for w in windows]
    assert len(ends) == 8
    assert ends[0] == 1000
    assert ends[-1] > 85_000
    assert np.ptp(np.diff(ends)) <= 100


def test_sliding_windows_by_hand():
    assert sliding_windows([11, 1, 4], 4, 3) == [
        Window(0, 0, 4, 4),
        Window(0, 3, 7, 3),
        Window(0, 6, 10, 3),
        Window(2, 0, 3, 3),
    ]
    assert sliding_windows([8], 4, 2)[-1] == Window(0, 3, 7, 1)


def test_non_overlapping_windows_by_hand():
    assert non_overlapping_windows([10, 1, 5], 4) == [
        Window(0, 0, 4, 4),
        Window(0, 4, 8, 4),
        Window(0, 8, 9, 1),
        Window(2, 0, 4, 4),
    ]


def test_single_passes_by_hand():
    assert single_pass_windows([10, 4, 5], 4) == [Window(0, 0, 4, 4), Window(2, 0, 4, 4)]
    assert single_pass_windows([21, 9], 4, 3) == [
        *(Window(0, start, start + 4, 4) for start in (0, 4, 12)),
        *(Window(1, start, start + 4, 4) for start in (0, 4)),
    ]


@pytest.mark.parametrize("length", [2, 7, 64, 100, 1000])
@pytest.mark.parametrize("stride", [1, 3, None])
def test_sliding_and_non_overlapping_windows_score_every_token_but_the_first_once(length, stride):
    documents = [1, 2, 3, 8, 65, 257]
    if stride is None:
        windows = non_overlapping_windows(documents, length)
        read = [(w.document, i) for w in windows for i in range(w.start, w.end)]
        assert len(read) == len(set(read))
    else:
        windows = sliding_windows(documents, length, min(stride, length))
        for window in windows:
            assert window.start == 0 or window.contexts[0] > length - stride
    targets = [(w.document, t) for w in windows for t in w.targets]
    assert sorted(targets) == [(d, t) for d, tokens in enumerate(documents) for t in range(1, tokens)]
    assert all(1 <= w.length <= length and w.end < documents[w.document] for w in windows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_scores_the_same_targets_at_every_length(protocol):
    documents = [random_document(seed, 3, 50) for seed in range(2)]
    numbers = {"targets": 40, "targets_per_window": 4, "stride": 3}
    windows = protocol_windows(protocol, [50, 50], [20, 7], **numbers)
    assert list(windows) == [7, 20]
    assert max(w.length for w in windows[20]) == 20
    require_same_targets({n: score_windows(CountingModel(3), documents, w) for n, w in windows.items()})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sliding_windows([10], 4, 5), "stride is 5; choose 1 up to the length, 4"),
        (lambda: sliding_windows([1], 4, 2), "longest document has 1 tokens"),
        (lambda: non_overlapping_windows([10], 0), "lengths is"),
        (lambda: non_overlapping_windows([1, 1], 4), "longest document has 1 tokens"),
        (lambda: single_pass_windows([10], 4, 0), "passes is 0"),
        (lambda: single_pass_windows([10], 10), "length 10 needs 11"),
        (
            lambda: protocol_windows("strided", [9], [4], targets=4, targets_per_window=4, stride=None),
            "protocol is 'strided'; choose one of same-targets, sliding-window, non-overlapping",
        ),
        (
            lambda: protocol_windows("sliding-window", [9], [4, 6], targets=4, targets_per_window=4, stride=None),
            "needs a stride; choose 1 up to 4",
        ),
    ],
)
def test_impossible_protocols_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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


@pytest.mark.parametrize("logits_at_once", [1, 50, 2**24])
def test_known_logits_give_the_known_loss_of_exactly_the_targets(monkeypatch, logits_at_once):
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", logits_at_once)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    documents = [random_document(2, 9, n) for n in (57, 91)]
    windows = [Window(1, 10, 30, 5), Window(0, 0, 20, 5), Window(0, 50, 56, 6), Window(1, 0, 20, 20)]
    model = TableModel(table)
    scores = score_windows(model, documents, windows, batch_tokens=40)
    assert model.batches == [(2, 20), (2, 20)]  # the window of 6 tokens is padded
    assert model.training
    expected = [(0, t) for t in (*range(16, 21), *range(51, 57))] + [(1, t) for t in (*range(1, 21), *range(26, 31))]
    assert list(zip(scores.document.tolist(), scores.target.tolist(), strict=True)) == expected
    log_p = torch.log_softmax(table.double(), -1).numpy()
    nll = [-log_p[documents[d].ids[t - 1], documents[d].ids[t]] for d, t in expected]
    assert scores.nll == pytest.approx(nll, rel=1e-5)
    assert scores.context.tolist() == [*range(16, 21), *range(1, 7), *range(1, 21), *range(16, 21)]
    order = (-log_p).argsort(1).tolist()
    assert scores.rank.tolist() == [order[documents[d].ids[t - 1]].index(documents[d].ids[t]) for d, t in expected]


def test_every_window_begins_with_the_beginning_of_sequence():
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(6))
    log_p = torch.log_softmax(table.double(), -1).numpy()
    document = document_of([4, 1, 2, 3, 1, 2, 3], bos=4)
    scores = score_windows(TableModel(table), [document], [Window(0, 0, 3, 3), Window(0, 3, 6, 3)])
    reads = [4, 1, 2, 4, 1, 2]  # in place of the 3 that stands where the second window begins
    assert scores.target.tolist() == [1, 2, 3, 4, 5, 6]
    assert scores.nll == pytest.approx([-log_p[a, b] for a, b in zip(reads, document.ids[1:], strict=True)], rel=1e-5)


def test_bytes_follow_their_targets():
    document = Document(np.array([0, 1, 0, 1]), np.array([7, 5, 3, 2]))
    assert score_windows(TableModel(torch.zeros(2, 2)), [document], [Window(0, 1, 3, 2)]).bytes.tolist() == [3, 2]
    with pytest.raises(ValueError, match="must share one shape"):
        Document(np.array([0, 1]), np.array([1]))


def test_a_split_over_processes_changes_nothing_at_all():
    model = CountingModel(4)
    documents = [random_document(3, 4, n) for n in (200, 300)]
    windows = sliding_windows([200, 300], 24, 7)
    one = score_windows(model, documents, windows, batch_tokens=100)
    for processes in (2, 3, 1000):
        parts = [
            score_windows(model, documents, windows, batch_tokens=100, share=(rank, processes))
            for rank in reversed(range(min(processes, 200)))
        ]
        together = TokenScores.concatenate(parts)
        for name, array in one.arrays().items():
            assert np.array_equal(array, together.arrays()[name]), name


@pytest.mark.parametrize("patched", [False, True], ids=["host", "poslsh"])
def test_batches_with_padding_score_as_single_windows(family, patched):
    model = tiny_model(family)
    if patched:
        patch_model(model, PosLSHConfig(num_samples=4, sigma=8.0))
    documents = [document_of(row, bos=1) for row in random_ids(4, 90)]
    windows = [Window(d, 3 * d, 20 + 17 * d, 5 + d) for d in range(4)]
    read = []
    padded = score_windows(model, documents, windows, batch_tokens=10_000, on_batch=read.append)
    single = score_windows(model, documents, windows, batch_tokens=1)
    assert read == [sum(window.length for window in windows)]
    assert padded.nll == pytest.approx(single.nll, rel=1e-5)
    for window in windows:
        ids = torch.from_numpy(documents[window.document].ids[window.start :].copy())
        ids[0] = 1
        logits = model(ids[None, : window.length]).logits[0, -window.scored :].double()
        nll = -torch.log_softmax(logits, -1).gather(
            -1, ids[window.length - window.scored + 1 : window.length + 1, None]
        )
        mine = single[(single.document == window.document)]
        assert mine.nll == pytest.approx(nll[:, 0].tolist(), rel=1e-4)


def test_half_precision_models_are_scored(family):
    model = tiny_model(family)
    document = document_of(random_ids(1, 60)[0])
    exact = score_windows(model, [document], [Window(0, 0, 59, 40)])
    half = score_windows(model.to(torch.bfloat16), [document], [Window(0, 0, 59, 40)])
    assert half.nll.mean() == pytest.approx(exact.nll.mean(), rel=2e-2)
    assert not np.array_equal(half.nll, exact.nll)


class Capped(CountingModel):
    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=torch.tanh(super().forward(input_ids, use_cache).logits))


class Cropped(CountingModel):
    def forward(self, input_ids, use_cache):
        return super().forward(input_ids[:, 1:], use_cache)


@pytest.mark.parametrize(("kind", "message"), [(Capped, "changes its logits"), (Cropped, "otherwise than once")])
def test_models_that_do_more_than_embed_the_output_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        score_windows(kind(3), [random_document(0, 3, 10)], [Window(0, 0, 9, 9)])


def test_only_the_context_differs_between_lengths():
    document = random_document(4, 4, 400)
    windows = same_target_windows([400], [8, 16, 60], 100, 4)
    table = TableModel(torch.randn(4, 4))
    blind = {n: score_windows(table, [document], w) for n, w in windows.items()}
    require_same_targets(blind)
    assert blind[8].nll.mean() == blind[16].nll.mean() == blind[60].nll.mean()
    sighted = {n: score_windows(CountingModel(4), [document], w).nll.mean() for n, w in windows.items()}
    assert len(set(sighted.values())) == 3


@pytest.mark.parametrize("window", [Window(0, 0, 10, 2), Window(0, -1, 5, 2), Window(0, 5, 9, 5), Window(0, 5, 9, 0)])
def test_windows_outside_their_document_are_refused(window):
    with pytest.raises(ValueError, match="does not fit its document of 10 tokens"):
        score_windows(TableModel(torch.zeros(2, 2)), [document_of([0] * 10)], [window])


def test_mode_is_restored_after_an_error():
    model = TableModel(torch.full((2, 2), math.nan))
    with pytest.raises(FloatingPointError):
        score_windows(model, [document_of([0] * 10)], [Window(0, 0, 4, 2)])
    assert model.training
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        score_windows(model, [document_of([0] * 10)], [Window(0, 0, 4, 2)], batch_tokens=0)
