"""``hf-poslsh patch`` and ``unpatch`` against patch_model and save_pretrained."""

import copy
import json
import re

import pytest
import torch
from command_line import LIMITS, contents, data_of, error_of, run
from conftest import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.testing import tiny_model


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ([], PosLSHConfig()),
        (["--preset", "paper", "--set", "num_samples=10"], PosLSHConfig.paper(num_samples=10)),
        (
            ["--preset", "pretrained", "--set", "sigma=[1.5,4,9,40]", "--set", "layers=[1]", "--set", "seed=7"],
            PosLSHConfig.pretrained(sigma=[1.5, 4, 9, 40], layers=[1], seed=7),
        ),
        (["--set", "bias=window", "--set", "window=9"], PosLSHConfig(bias="window", window=9)),
    ],
)
def test_patch_writes_what_patch_model_and_save_pretrained_write(family, arguments, method, tmp_path):
    model = tiny_model(family, **LIMITS[family])
    if family == "qwen3":
        model.bfloat16()
    shards = {"max_shard_size": "40KB"} if family == "mistral" else {}
    model.save_pretrained(tmp_path / "host", **shards)
    # A loaded model has its tensors in another order, and would be cut into other shards.
    loaded = copy.deepcopy(model) if shards else AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    patch_model(loaded, method).save_pretrained(tmp_path / "by hand", **shards)
    result = data_of("patch", tmp_path / "host", tmp_path / "patched", *arguments)
    assert result["method"] == method.to_dict()
    assert contents(tmp_path / "patched") == contents(tmp_path / "by hand")
    assert result["files"] == sorted(contents(tmp_path / "patched"))
    assert len(list((tmp_path / "patched").glob("*.safetensors"))) == (3 if shards else 1)
    run("unpatch", tmp_path / "patched", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "host")


def test_a_patched_checkpoint_loads_and_generates_the_same_without_a_generation_config(tmp_path):
    tiny_model("mistral").save_pretrained(tmp_path / "host")
    (tmp_path / "host/generation_config.json").unlink()
    run("patch", tmp_path / "host", tmp_path / "patched", "--set", "sigma=3")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    ids = random_ids(1, 12)
    expected = patch_model(tiny_model("mistral"), sigma=3.0).generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(ours.generate(ids, max_new_tokens=9, do_sample=False), expected)


def test_files_travel_along_and_what_belongs_to_the_original_does_not(host, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in host.iterdir():
        (source / path.name).symlink_to(path)  # as in the Hub's cache
    travels = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "vocab.txt"]
    stays = ["README.md", "consolidated.safetensors", "pytorch_model.bin", "model-q4.gguf", ".gitattributes"]
    for name in [*travels, *stays]:
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool.jinja").write_text("tool")
    (source / "original").mkdir()
    result = data_of("patch", source, tmp_path / "patched")
    written = contents(tmp_path / "patched")
    assert {*travels, "additional_chat_templates/tool.jinja", "generation_config.json"} < set(written)
    assert not set(stays) & set(written)
    assert result["left_behind"] == sorted({*stays, "original"} - {".gitattributes"})
    assert not (tmp_path / "patched/model.safetensors").is_symlink()
    run("unpatch", tmp_path / "patched", tmp_path / "again")
    assert set(contents(tmp_path / "again")) == set(written) - {"modeling_poslsh.py"}


def test_a_multimodal_checkpoint(tmp_path):
    from test_models_multimodal import tiny

    tiny().save_pretrained(tmp_path / "host")
    run("patch", tmp_path / "host", tmp_path / "patched", "--set", "sigma=5", "--set", "sink_tokens=1")
    patch_model(tiny(), sigma=5.0, sink_tokens=1).save_pretrained(tmp_path / "by hand")
    assert contents(tmp_path / "patched") == contents(tmp_path / "by hand")
    assert data_of("info", tmp_path / "patched")["family"] == "llama4"
    run("unpatch", tmp_path / "patched", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "host")


def test_another_head(tmp_path):
    from transformers import Qwen3ForSequenceClassification

    def model():
        return tiny_model("qwen3", model_class=Qwen3ForSequenceClassification, num_labels=3)

    model().save_pretrained(tmp_path / "host")
    patch_model(model(), sigma=5.0).save_pretrained(tmp_path / "by hand")
    run("patch", tmp_path / "host", tmp_path / "patched", "--set", "sigma=5")
    written, wanted = contents(tmp_path / "patched"), contents(tmp_path / "by hand")
    assert json.loads(written["config.json"]) == json.loads(wanted["config.json"])
    assert written["model.safetensors"] == wanted["model.safetensors"]


def test_weights_are_linked_and_not_read(host, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**36], "data_offsets": [0, 2**38]}}).encode()
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((host / "config.json").read_bytes())
    with (source / "model.safetensors").open("wb") as file:  # 256 GiB, of which nothing is on the disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**38)
    run("patch", source, tmp_path / "patched", "--link")
    assert (tmp_path / "patched/model.safetensors").samefile(source / "model.safetensors")
    message = error_of("patch", source, tmp_path / "copied")
    assert "--link, or make room" in message
    assert not (tmp_path / "copied").exists()


def test_overwrite_replaces_a_checkpoint_and_nothing_else(host, patched, tmp_path):
    target = tmp_path / "target"
    run("patch", host, target)
    (target / "old.txt").write_text("of the checkpoint before")
    assert "is there already" in error_of("unpatch", patched, target)
    assert (target / "old.txt").exists()
    run("unpatch", patched, target, "--overwrite")
    assert contents(target) == contents(host)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("mine")
    for other in (home, home / "letter.txt"):
        assert "not overwritten" in error_of("patch", host, other, "--overwrite")
    assert (home / "letter.txt").read_text() == "mine"


def test_a_failed_write_leaves_the_old_checkpoint(host, patched, tmp_path, monkeypatch):
    target = tmp_path / "target"
    run("unpatch", patched, target)
    before = contents(target)

    def fail(source, to):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_poslsh.cli.checkpoints.shutil.copyfile", fail)
    assert "No space left" in error_of("patch", host, target, "--overwrite")
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def bad_index(weight_map):
    def write(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def with_config(**fields):
    def write(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return write


def write_file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model\.safetensors has \d+ bytes, its header says \d+: it is cut off"),
        (write_file("model.safetensors", b""), "its header does not fit into 0 bytes"),
        (write_file("model.safetensors", b"\xff" * 40), "its header does not fit into 40 bytes"),
        (write_file("model.safetensors", b"\x02" + b"\0" * 7 + b"[]"), "header makes no sense"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (bad_index({"w": "b.safetensors"}), r"b\.safetensors is missing"),
        (bad_index({"w": "a.safetensors"}), "has no tensor 'w'"),
        (bad_index({"w": "../a.safetensors"}), "no weight_map"),
        (bad_index([]), "no weight_map"),
        (write_file("config.json", b"{"), r"config\.json"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (with_config(architectures=None), "names no architectures"),
        (with_config(architectures=["LlamaForCausalLM"]), r"architectures \['LlamaForCausalLM'\]"),
        (
            write_file("config.json", json.dumps(LlamaConfig().to_dict()).encode()),
            "LlamaConfig; supported are Mistral",
        ),
        (write_file("config.json", b'{"model_type": "novel"}'), "novel"),
        (write_file("adapter_config.json", b"{}"), "holds an adapter"),
    ],
)
def test_bad_sources_are_refused(host, tmp_path, damage, message):
    source = tmp_path / "source"
    source.mkdir()
    for path in host.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    damage(source)
    assert re.search(message, error_of("patch", source, tmp_path / "patched"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "sigm=4"], "did you mean sigma?"),
        (["--set", "sigma"], "give key=value"),
        (["--set", "sigma=-1"], r"sigma is -1"),
        (["--set", "sigma=[1,2]"], "4 query heads"),
        (["--set", "num_samples=2.5"], r"num_samples is 2\.5"),
        (["--set", "layers=[9]"], r"layers is \[9\]"),
        (["--set", "bias=window"], "needs window"),
        (["--preset", "best"], "paper"),
    ],
)
def test_bad_methods_are_refused(host, tmp_path, arguments, message):
    assert re.search(message, error_of("patch", host, tmp_path / "patched", *arguments))
    assert list(tmp_path.iterdir()) == []


def test_wrong_ways_round_are_refused(host, patched, tmp_path):
    assert "is patched already" in error_of("patch", patched, tmp_path / "a")
    assert "which is not patched" in error_of("unpatch", host, tmp_path / "a")
    assert "lie in each other" in error_of("patch", host, host / "inside")
    assert "lie in each other" in error_of("patch", host, host, "--overwrite")
    assert "hf download" in error_of("patch", "Qwen/Qwen3-0.6B", tmp_path / "a")
