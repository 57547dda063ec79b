"""Where the recipes' texts come from, their tokenizer, and the sequences that are cut from them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from experiment.corpus import EvenSequences, PackedSequences, Sequences, encode, train_tokenizer
from experiment.settings import DataSettings, SourceSettings
from experiment.sources import Text, read_splits, read_texts
from torch.utils.data import DataLoader

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.testing import tiny_model

RECIPES = Path(__file__).parent.parent / "recipes"

# --- texts and tokenizer


def test_texts_that_ship_are_small_described_and_whole():
    files = sorted((RECIPES / "data").glob("*.txt"))
    assert sum(file.stat().st_size for file in files) < 7_000_000
    readme = (RECIPES / "data/README.md").read_text()
    assert all(f"`{file.name}`" in readme for file in files)


@pytest.mark.parametrize(
    ("train_names", "held_out", "message"),
    [
        (["a.txt"], ["none.txt"], "cannot read the text 'none.txt'"),
        (["a.txt"], ["empty.txt"], "'empty.txt' .* is empty"),
        (["a.txt"], ["latin.txt"], "cannot read the text 'latin.txt'"),
        ([], ["a.txt"], "name at least one file"),
        (["a.txt", "a.txt"], ["b.txt"], "each once"),
        (["a.txt", "b.txt"], ["b.txt"], "'b.txt' of data.held_out is also in data.train, as 'b.txt'"),
        (["a.txt"], ["copy-of-a.txt"], "'copy-of-a.txt' of data.held_out is also in data.train, as 'a.txt'"),
    ],
)
def test_wrong_texts_are_refused(tmp_path, train_names, held_out, message):
    for name, content in {"a.txt": "one", "b.txt": "two", "copy-of-a.txt": "one", "empty.txt": " \n"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_splits(DataSettings(train=train_names, held_out=held_out, folder=str(tmp_path)))


def test_the_tokenizer_is_lossless_deterministic_and_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    texts = read_texts(["austen-northanger-abbey.txt"], None)
    first, second = (train_tokenizer(texts, 600) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 600
    strange = Text("strange", "Grüße,\n\n  naïve\t世界 <|end|>\x00 don't")
    (ids,) = encode(first, [strange])
    assert first.decode(ids) == strange.content
    first.save_pretrained(tmp_path)
    assert np.array_equal(encode(AutoTokenizer.from_pretrained(tmp_path), texts)[0], encode(first, texts)[0])


def test_too_little_text_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"data\.vocab_size is 4096, but the training texts give"):
        train_tokenizer([Text("short", "a short text")], 4096)


# --- training sequences


def documents_of(*lengths):
    """Documents in which every token is its own index, documents apart by 10000."""
    return [np.arange(length) + 10_000 * index for index, length in enumerate(lengths)]


def test_sequences_are_contiguous_pieces_of_one_document():
    sequences = Sequences(documents_of(103, 57, 9), length=10, count=40, seed=0)
    assert len(sequences) == 40
    for item in (sequences[i] for i in range(40)):
        ids = item["input_ids"]
        assert torch.equal(ids, ids[0] + torch.arange(10))
        assert torch.equal(ids, item["labels"])


def test_an_epoch_visits_every_piece_once_and_epochs_differ():
    sequences = Sequences(documents_of(103, 57, 9), length=10, count=60, seed=0)
    assert sequences.per_epoch == 15
    epochs = [[int(sequences[15 * epoch + i]["input_ids"][0]) for i in range(15)] for epoch in range(4)]
    for starts in epochs:
        tokens = np.concatenate([np.arange(start, start + 10) for start in starts])
        assert len(set(tokens.tolist())) == 150
    assert len({tuple(starts) for starts in epochs}) == 4
    assert len({tuple(sorted(starts)) for starts in epochs}) > 1


def test_sequences_depend_on_seed_and_index_alone():
    torch.manual_seed(0)
    one = Sequences(documents_of(500), length=8, count=100, seed=3)
    forward = [one[i]["input_ids"] for i in range(100)]
    torch.manual_seed(1)
    other = Sequences(documents_of(500), length=8, count=100, seed=3)
    assert all(torch.equal(other[i]["input_ids"], forward[i]) for i in reversed(range(100)))
    different = Sequences(documents_of(500), length=8, count=100, seed=4)
    assert any(not torch.equal(different[i]["input_ids"], forward[i]) for i in range(100))


def test_validation_sequences_are_spread_evenly_and_do_not_overlap():
    sequences = EvenSequences(documents_of(103, 57, 9), length=10, count=5)
    starts = [int(sequences[i]["input_ids"][0]) for i in range(len(sequences))]
    assert starts == [0, 30, 60, 90, 10_020]  # 10 pieces of the first and 5 of the second: every third of 15
    assert torch.equal(sequences[4]["labels"], 10_020 + torch.arange(10))
    assert len(EvenSequences(documents_of(25), length=10, count=5)) == 2
    with pytest.raises(ValueError, match="no validation text has 200 tokens"):
        EvenSequences(documents_of(103), length=200, count=1)


def test_sequences_begin_as_the_windows_of_an_evaluation_do():
    """A tokenizer's own beginning of sequence stands in place of the first token, which is no target anyway."""
    documents = documents_of(103, 57, 9)
    for with_bos, without in (
        (Sequences(documents, 10, 4, 0, bos=7), Sequences(documents, 10, 4, 0)),
        (EvenSequences(documents, 10, 4, bos=7), EvenSequences(documents, 10, 4)),
    ):
        for item, plain in ((with_bos[i], without[i]) for i in range(4)):
            assert item["input_ids"].tolist() == [7, *plain["input_ids"][1:].tolist()]
            assert torch.equal(item["labels"][1:], plain["labels"][1:])
    packed, plain = (PackedSequences(documents_of(23, 4, 9, 31), 10, 6, 0, bos=bos) for bos in (7, None))
    for item, other in ((packed[i], plain[i]) for i in range(6)):
        begins = item["position_ids"] == 0
        assert torch.equal(item["input_ids"], other["input_ids"].masked_fill(begins, 7))
        assert torch.equal(item["labels"], other["labels"])
    assert documents[0][0] == 0


def test_sequences_longer_than_every_document_are_refused():
    with pytest.raises(ValueError, match=r"no training text has 200 tokens \(the longest has 103\)"):
        Sequences(documents_of(103, 57), length=200, count=1, seed=0)


# --- packed sequences


def test_packed_sequences_hold_every_token_of_an_epoch_in_document_order():
    documents = documents_of(23, 4, 9, 31)
    sequences = PackedSequences(documents, length=10, count=12, seed=0)
    assert sequences.per_epoch == 6  # 67 tokens
    for epoch in range(2):
        items = [sequences[6 * epoch + slot] for slot in range(6)]
        ids = torch.cat([item["input_ids"] for item in items]).tolist()
        by_document = [[token for token in ids if token // 10_000 == index] for index in range(4)]
        order = list(dict.fromkeys(token // 10_000 for token in ids))
        assert ids == [token for index in order for token in by_document[index]]
        assert sum(len(tokens) for tokens in by_document) == 60
        for index in order[:-1]:  # the last one is cut short by the end of the epoch
            assert by_document[index] == documents[index].tolist()
    first, second = ([sequences[6 * epoch + slot]["input_ids"].tolist() for slot in range(6)] for epoch in range(2))
    assert first != second


def test_positions_and_targets_of_packed_sequences_begin_with_each_document():
    sequences = PackedSequences(documents_of(23, 4, 9, 31), length=10, count=6, seed=0)
    for item in (sequences[i] for i in range(6)):
        ids, labels, positions = (item[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        for at in range(10):
            follows = at > 0 and ids[at] == ids[at - 1] + 1
            assert positions[at] == (positions[at - 1] + 1 if follows else 0)
            assert labels[at] == (ids[at] if follows else -100)


@pytest.mark.parametrize("method", [None, PosLSHConfig(num_samples=5, sigma=4, sink_tokens=1)])
def test_packed_documents_do_not_see_each_other(method):
    """The loss of a packed sequence is that of its pieces, each in a model call of its own."""
    model = tiny_model("mistral")
    if method is not None:
        patch_model(model, method)
    random = np.random.default_rng(0)
    documents = [random.integers(1, 99, length) for length in (23, 9, 31)]
    item = PackedSequences(documents, length=40, count=1, seed=0)[0]
    starts = [*torch.nonzero(item["position_ids"] == 0).flatten().tolist(), 40]
    assert len(starts) > 2
    total = 0.0
    with torch.no_grad():
        for begin, end in itertools.pairwise(starts):
            piece = item["input_ids"][None, begin:end]
            total += (model(input_ids=piece, labels=piece).loss * (end - begin - 1)).item() if end - begin > 1 else 0
        packed = model(**{name: value[None] for name, value in item.items()}, use_cache=False).loss
    targets = int((item["labels"] != -100).sum())
    assert packed.item() == pytest.approx(total / targets, rel=1e-5)


def test_too_little_text_to_pack_is_refused():
    with pytest.raises(ValueError, match="less than 200 tokens"):
        PackedSequences(documents_of(103, 57), length=200, count=1, seed=0)


@pytest.mark.parametrize("kind", [Sequences, PackedSequences])
def test_processes_read_disjoint_samples(kind):
    sequences = kind(documents_of(200, 50), length=10, count=24, seed=0)
    shares = [
        [
            row
            for batch in prepare_data_loader(
                DataLoader(sequences, batch_size=4), num_processes=2, process_index=rank, split_batches=True
            )
            for row in batch["input_ids"].tolist()
        ]
        for rank in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == sorted(sequences[i]["input_ids"].tolist() for i in range(24))


# --- datasets

ROWS = [
    "first line\n",
    " = A heading = \n",
    "its text\n",
    " = = A lower heading = = \n",
    "more\n",
    " = B = \n",
    "end",
]


@pytest.fixture
def tables(tmp_path):
    """The same rows as JSONL and as Parquet."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": row, "n": 1}) + "\n" for row in ROWS))
    Dataset.from_dict({"body": ROWS, "n": [1] * len(ROWS)}).to_parquet(str(tmp_path / "rows.parquet"))
    return tmp_path


def from_table(kind, folder, **fields):
    files = {"json": ["rows.jsonl"], "parquet": ["rows.parquet"]}[kind]
    return read_texts([SourceSettings(path=kind, files=files, **{"column": "body", **fields})], folder)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_each_row_of_a_local_table_is_a_document(kind, tables):
    texts = from_table(kind, tables)
    assert [text.content for text in texts] == ROWS
    assert [text.name for text in texts[:2]] == [f"{kind}/train[0]", f"{kind}/train[1]"]


def test_rows_are_joined_into_documents_at_their_headings(tables):
    texts = from_table("json", tables, heading=" = [^=]")
    assert [text.content for text in texts] == [ROWS[0], "".join(ROWS[1:5]), "".join(ROWS[5:])]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_limit_reads_the_first_rows_alone(tables, streaming):
    assert [text.content for text in from_table("parquet", tables, limit=3, streaming=streaming)] == ROWS[:3]


def test_lines_of_a_text_file_are_rows(tmp_path):
    (tmp_path / "a.txt").write_text("CHAPTER I\none\nCHAPTER II\ntwo\n")
    source = SourceSettings(path="text", files=["a.txt"], heading="CHAPTER")
    assert [text.content for text in read_texts([source], tmp_path)] == ["CHAPTER I\none\n", "CHAPTER II\ntwo\n"]


def test_files_and_datasets_may_be_mixed(tables):
    (tables / "a.txt").write_text("whole")
    texts = read_texts(["a.txt", SourceSettings(path="json", files=["rows.jsonl"], column="body", limit=1)], tables)
    assert [text.content for text in texts] == ["whole", ROWS[0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column": "text"}, "no column 'text', but body, n"),
        ({"column": "n"}, "column 'n' of the dataset 'json' holds 1, which is no text"),
        ({"split": "nowhere"}, "cannot read the dataset 'json': .*nowhere"),
        ({"files": ["missing.jsonl"]}, "cannot read the dataset 'json': .*missing.jsonl"),
        ({"path": "no/such-dataset", "files": []}, "cannot read the dataset 'no/such-dataset'"),
    ],
)
def test_datasets_that_do_not_fit_are_refused(tables, fields, message):
    source = SourceSettings(**{"path": "json", "files": ["rows.jsonl"], "column": "body", **fields})
    with pytest.raises(ValueError, match=message):
        read_texts([source], tables)


def test_a_document_of_a_dataset_in_two_splits_is_refused(tables):
    (tables / "held-out.txt").write_text(ROWS[2])
    source = SourceSettings(path="json", files=["rows.jsonl"], column="body")
    with pytest.raises(
        ValueError, match=r"'held-out.txt' of data.held_out is also in data.train, as 'json/train\[2\]'"
    ):
        read_splits(DataSettings(train=[source], held_out=["held-out.txt"], folder=str(tables)))
