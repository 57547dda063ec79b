"""Everything that can be wrong with an experiment is found before it begins, or before it is continued."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from experiment import preparing
from experiment.corpus import train_tokenizer
from experiment.files import read_json, write_json
from experiment.settings import ArmSettings, load_settings
from experiment.sources import read_texts
from tokenizers.processors import TemplateProcessing

RECIPES = Path(__file__).parent.parent / "recipes"
SMOKE = RECIPES / "configs" / "smoke.yaml"
CONFIGS = sorted(p for p in (RECIPES / "configs").glob("*.yaml") if not p.stem.startswith("convergence"))


@pytest.fixture
def smoke(tmp_path):
    settings = load_settings(SMOKE)
    settings.output_dir = str(tmp_path / "out")
    return settings


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))


def test_prepare_writes_nothing_unless_everything_fits(smoke, accelerator, monkeypatch):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            preparing.prepare(smoke, accelerator, resume=False)
        assert not Path(smoke.output_dir).exists()

    smoke.evaluation.lengths = [64, 10_000_000]
    refused("length 10000000 needs 10000001")
    smoke.evaluation.lengths = [64]
    smoke.training.length = 10_000_000
    refused("no training text has 10000000 tokens")
    smoke.training.length = 64
    smoke.arms.append(ArmSettings(name="bad", poslsh={"sigma": 0}))
    refused("arm 'bad': sigma is 0")
    smoke.arms.pop()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    refused("MiB for its checkpoints, but 1 MiB are free")


def test_an_output_folder_is_continued_only_on_request_and_with_the_same_settings(smoke, accelerator, monkeypatch):
    output = Path(smoke.output_dir)
    preparing.prepare(smoke, accelerator, resume=True)
    with pytest.raises(ValueError, match="already holds an experiment; pass --resume"):
        preparing.prepare(smoke, accelerator, resume=False)
    preparing.prepare(smoke, accelerator, resume=True)

    def refused(message, settings=smoke):
        with pytest.raises(ValueError, match=message):
            preparing.prepare(settings, accelerator, resume=True)

    changed = copy.deepcopy(smoke)
    changed.training.steps += 1
    changed.evaluation.lengths = [64]
    refused(r"other settings \(evaluation.lengths, training.steps\)", changed)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "mixed_precision", "bf16")
        refused(r"other settings \(mixed_precision\)")
    folder = output.parent / "texts"
    folder.mkdir()
    for path in (RECIPES / "data").glob("*.txt"):
        (folder / path.name).write_text(path.read_text())
    smoke.data.folder = str(folder)
    recorded = read_json(output / "settings.json")
    write_json(output / "settings.json", {**recorded, "data": smoke.to_dict()["data"]})
    preparing.prepare(smoke, accelerator, resume=True)
    edited = folder / smoke.data.train[0]
    edited.write_text(edited.read_text() + "The end.")
    refused(r"other settings \(texts.train\)")
    (output / "settings.json").write_text("{")
    refused("cannot read")


def test_a_continued_run_may_change_what_does_not_change_results(smoke, accelerator):
    preparing.prepare(smoke, accelerator, resume=False)
    smoke.training.micro_batch_size, smoke.training.save_every, smoke.training.gradient_checkpointing = 1, 2, True
    smoke.evaluation.batch_tokens, smoke.card = 128, {"license": "mit"}
    preparing.prepare(smoke, accelerator, resume=True)


def test_what_an_earlier_version_could_not_ask_for_counts_as_not_asked_for(smoke, accelerator):
    preparing.prepare(smoke, accelerator, resume=False)
    path = Path(smoke.output_dir) / "settings.json"
    recorded = read_json(path)
    del recorded["evaluation"]["retrieval_tasks"], recorded["evaluation"]["retrieval_text"]
    write_json(path, recorded)
    preparing.prepare(smoke, accelerator, resume=True)
    write_json(path, recorded)
    smoke.evaluation.retrieval_tasks = ["multi-key"]
    with pytest.raises(ValueError, match=r"other settings \(evaluation.retrieval_tasks\)"):
        preparing.prepare(smoke, accelerator, resume=True)


def test_a_continued_run_needs_room_for_what_is_missing_alone(smoke, tmp_path, monkeypatch):
    smoke.training.save_every = 5
    whole = 10 * 2**20  # parameters, all trained: 40 MiB of float32

    def needed():
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(ValueError, match="are free") as refusal:
            preparing.check_disk(smoke, whole, whole, tmp_path)
        return int(str(refusal.value).split("about ")[1].split(" MiB")[0].replace(",", ""))

    states = [3 * 40, 3 * 40]  # weights and two moments, two of them at a time
    assert len(smoke.arms) == 2
    assert needed() == 16 + 3 * 40 + sum(states)
    (tmp_path / "state" / smoke.arms[0].name / "5").mkdir(parents=True)
    assert needed() == 16 + 3 * 40 + states[0]
    (tmp_path / smoke.arms[0].name).mkdir()
    assert needed() == 16 + 2 * 40 + states[0]
    (tmp_path / smoke.arms[1].name).mkdir()
    assert needed() == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_map": "cuda"}, "device_map is 'cuda'; choose auto or null"),
        ({"passkey_lengths": [5]}, "length is 5; with this tokenizer a passkey prompt needs"),
        ({"passkey_lengths": [256], "passkey_depths": [2.0]}, "depth is 2.0"),
        ({"passkey_lengths": [256], "retrieval_tasks": ["needle"]}, "retrieval tasks are .*; name some of passkey"),
        ({"passkey_lengths": [256], "retrieval_text": "other.txt"}, "retrieval_text is 'other.txt'; name one of"),
        ({"position_length": 40_000}, "length 40000 exceeds model.config.max_position_embeddings"),
        ({"passkey_lengths": [40_000]}, "length 40000 exceeds model.config.max_position_embeddings"),
    ],
)
def test_what_only_the_evaluation_needs_is_checked_before_training(smoke, accelerator, change, message):
    for name, value in change.items():
        setattr(smoke.evaluation, name, value)
    with pytest.raises(ValueError, match=message):
        preparing.prepare(smoke, accelerator, resume=False)
    assert not Path(smoke.output_dir).exists()


def test_clipping_is_what_deepspeed_does(smoke):
    def accelerator(clipping):
        plugin = SimpleNamespace(deepspeed_config={"gradient_clipping": clipping})
        return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))

    preparing.check_clipping(smoke, accelerator(smoke.training.max_grad_norm))
    preparing.check_clipping(smoke, accelerator("auto"))
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0, but gradient_clipping .* is 0.5"):
        preparing.check_clipping(smoke, accelerator(0.5))


def test_a_batch_that_the_processes_cannot_share_is_refused(smoke):
    with pytest.raises(ValueError, match="batch_size is 4, which 3 processes can't share"):
        preparing.prepare(smoke, SimpleNamespace(num_processes=3, use_distributed=True), resume=False)


def test_processes_that_do_not_know_of_each_other_are_refused(smoke, accelerator, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes were launched"):
        preparing.prepare(smoke, accelerator, resume=False)


def test_training_begins_every_sequence_as_the_tokenizer_does(smoke, accelerator, tmp_path):
    """Evaluation does so too: what is read there has to be what was trained."""
    tokenizer = train_tokenizer(read_texts(smoke.data.train, None), smoke.data.vocab_size)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = tokenizer.bos_token_id
    pair = [("<s>", start)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=pair)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    smoke.data.tokenizer = str(tmp_path / "tokenizer")
    smoke.data.validation, smoke.training.validate_every = ["sotu-1912-taft.txt"], 5
    for packing in (False, True):
        smoke.training.packing, smoke.output_dir = packing, str(tmp_path / str(packing))
        experiment = preparing.prepare(smoke, accelerator, resume=False)
        for sequences in (experiment.sequences, experiment.validation):
            assert {int(sequences[index]["input_ids"][0]) for index in range(4)} == {start}
