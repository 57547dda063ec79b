"""TRL's SFTTrainer on patched models: what it feeds them, what it computes, what it saves.

Without Llama-4: TRL cannot train the stock Llama4ForCausalLM either, whose output has no last_hidden_state.
"""

import pytest
import torch
from conftest import random_ids
from datasets import Dataset
from oracles import SIGMA
from peft import LoraConfig
from test_models import CLOSE, logits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_poslsh import PosLSHConfig, load_adapter, patch_model
from hf_poslsh.testing import tiny_model

trl = pytest.importorskip("trl", reason="trl is not installed")

METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=1, max_distance=5)
LENGTHS = (5, 9, 14, 7, 11, 3, 8, 12)


@pytest.fixture(params=["mistral", "qwen3"])
def family(request):
    return request.param


def documents():
    """Texts without special tokens."""
    return [random_ids(1, length, seed=index)[0].clamp(min=END + 1) for index, length in enumerate(LENGTHS)]


WORDS = ["<pad>", "<s>", "<unk>", "</s>", *(f"w{i}" for i in range(4, 99))]
END = 3


def tiny_tokenizer():
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": WORDS[0], "bos_token": WORDS[1], "unk_token": WORDS[2], "eos_token": WORDS[END]}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def text(ids):
    return " ".join(WORDS[token] for token in ids.tolist())


def trainer_of(model, tmp_path, *, rows=None, peft_config=None, **arguments):
    rows = [{"input_ids": row.tolist()} for row in documents()] if rows is None else rows
    arguments = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "max_length": 16,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        **arguments,
    }
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def patched(family):
    return patch_model(tiny_model(family), METHOD)


def loss_by_hand(model, rows):
    """Mean over the tokens that ``rows`` of (ids, first target) ask for, each row alone."""
    nll = []
    for ids, first in rows:
        log_probs = logits(model, ids[None])[0].log_softmax(-1)
        nll.append(-log_probs[first - 1 : -1].gather(1, ids[first:, None])[:, 0])
    return torch.cat(nll).mean().item()


def check_loss(got, expected, rows):
    """Older Trainers divide by the number of labels: with the first token of each row, which is no target."""
    targets = sum(len(row) - 1 for row in rows)
    assert min(abs(got - expected), abs(got - expected * targets / (targets + len(rows)))) < 2e-4


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"packing": True, "packing_strategy": "bfd"},
        {"packing": True, "packing_strategy": "bfd_split"},
        {"padding_free": True, "max_length": None},
    ],
    ids=["plain", "bfd", "bfd_split", "padding_free"],
)
def test_the_loss_is_that_of_the_documents_alone(family, tmp_path, arguments):
    model = patched(family)
    expected = loss_by_hand(model, [(row, 1) for row in documents()])
    check_loss(losses(trainer_of(model, tmp_path, **arguments))[0], expected, documents())


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packed_documents_do_not_see_each_other(family, tmp_path, strategy):
    model = patched(family)
    trainer = trainer_of(model, tmp_path, packing=True, packing_strategy=strategy)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in batch
    ids = batch.pop("input_ids")
    del batch["labels"]
    out = logits(model, ids, **batch)
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert sorted(lengths) == sorted(LENGTHS)
    for part, row in zip(out[0].split(lengths), ids[0].split(lengths), strict=True):
        torch.testing.assert_close(part, logits(model, row[None])[0], **CLOSE)


def test_wrapped_packing_has_no_documents(tmp_path):
    """TRL cuts the joined text here, and marks no borders: the rows are plain rows."""
    model = patched("mistral")
    trainer = trainer_of(model, tmp_path, packing=True, packing_strategy="wrapped", max_length=23)
    rows = next(iter(trainer.get_train_dataloader()))["input_ids"]
    assert rows.shape == (3, 23)
    expected = loss_by_hand(model, [(row, 1) for row in rows])
    check_loss(losses(trainer)[0], expected, rows)


def test_completions_only(family, tmp_path):
    model, rows = patched(family), documents()
    pairs = [{"prompt": text(row[:2]) + " ", "completion": text(row[2:])} for row in rows]
    ended = [torch.cat([row, torch.tensor([END])]) for row in rows]  # as TRL does
    expected = loss_by_hand(model, [(row, 2) for row in ended])
    assert losses(trainer_of(model, tmp_path, rows=pairs)) == pytest.approx([expected], abs=2e-4)


def test_training_learns_and_saves_a_patched_model(family, tmp_path):
    model = patched(family)
    trainer = trainer_of(model, tmp_path, max_steps=12, packing=True)
    curve = losses(trainer)
    assert curve[-1] < 0.8 * curve[0]
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(model)
    ids = random_ids(2, 24)
    torch.testing.assert_close(logits(loaded.eval(), ids), logits(model.eval(), ids), **CLOSE)
    (again,) = losses(trainer_of(str(tmp_path / "saved"), tmp_path, packing=True))  # by its name
    assert again < curve[-2]
    with pytest.raises(ValueError, match="poslsh"):
        trainer_of(str(tmp_path / "saved"), tmp_path, model_init_kwargs={"attn_implementation": "sdpa"})


def test_an_adapter_is_trained_and_says_what_it_needs(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "original")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "original"), METHOD)
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(model, tmp_path, peft_config=lora, max_steps=4, learning_rate=0.1)
    curve = losses(trainer)
    assert curve[-1] < curve[0]
    trainer.save_model(tmp_path / "adapter")
    ids = random_ids(2, 24)
    expected = logits(trainer.model.eval(), ids)
    torch.testing.assert_close(logits(load_adapter(tmp_path / "adapter").eval(), ids), expected, **CLOSE)
    with pytest.raises(OSError, match=r"load by hf_poslsh\.load_adapter"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
