"""The command line: the real program where its start counts, and its commands against the library and by hand."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import hf_poslsh_cli
from hf_poslsh import PositionalHash, PosLSHConfig, alibi_slopes, patch_model, theory
from hf_poslsh.cli import demo as demo_command
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_config, tiny_model

ROOT = Path(__file__).parent.parent
COMMANDS = ("info", "patch", "unpatch", "plan", "draw", "demo")
LIMITS = {
    "mistral": {"sliding_window": 30},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {"attention_chunk_size": 40, "layer_types": ["chunked_attention", "full_attention"]},
}


def run(*arguments, code=0):
    result = CliRunner().invoke(hf_poslsh_cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def data_of(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def error_of(*arguments):
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def program(*arguments, **options):
    command = [sys.executable, "-m", "hf_poslsh_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **options)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host") / "qwen3"
    tiny_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def patched(host):
    folder = host.parent / "patched"
    run("patch", host, folder, "--set", "sigma=8", "--set", "num_samples=6", "--set", "layers=[1]")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The start ------------------------------------------------------------------------------------------------------


def test_help_does_not_import_torch():
    code = (
        "import sys; from typer.testing import CliRunner; import hf_poslsh_cli as cli\n"
        f"for command in {[[], *([name] for name in COMMANDS)]}:\n"
        "    assert CliRunner().invoke(cli.app, [*command, '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'hf_poslsh', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_program_says_a_mistake_on_stderr_and_returns_2(tmp_path):
    done = program("info", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: there is no folder {tmp_path / 'nothing'}." in done.stderr
    assert "Traceback" not in done.stderr
    usage = program("patch", "only-one")
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "DST" in usage.stderr


def test_an_error_of_the_programs_own_returns_1(monkeypatch, host):
    monkeypatch.setattr("hf_poslsh.cli.info.inspect", lambda *arguments: 1 / 0)
    result = CliRunner().invoke(hf_poslsh_cli.app, ["info", str(host)])
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command):
    text = run(command, "--help").stdout
    assert f"  $ hf-poslsh {command}" in text
    assert "Exit status: 0 done, 2 a mistake" in text
    assert "--json" in text


def test_the_entry_point_is_the_app():
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].splitlines()[1]
    assert scripts == 'hf-poslsh = "hf_poslsh_cli:app"'
    assert hf_poslsh_cli.app.registered_commands[0].callback is hf_poslsh_cli.info


@pytest.mark.slow
def test_an_installed_wheel(tmp_path, host):
    """Builds and installs the package, which takes a minute."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=300)
    script = tmp_path / "site/bin/hf-poslsh"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HF_HUB_OFFLINE": "1"}

    def installed(*arguments):
        command = [sys.executable, script, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert installed("--help").returncode == 0
    assert installed("patch", host, "patched").returncode == 0
    assert json.loads(installed("info", "patched", "--json").stdout)["patched"] is True
    trained = installed("demo", "--train")
    assert trained.returncode == 2
    assert "repository" in trained.stderr


# patch and unpatch ----------------------------------------------------------------------------------------------


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


# info -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"sigma": 4.0, "num_samples": 4, "sink_tokens": 2},
        {"sigma": 40.0, "num_samples": 4, "sink_tokens": 2, "layers": [1]},
        {"bias": "window", "window": 12, "sink_tokens": 3},
        {"bias": "alibi"},
        {"sigma": 4.0, "cache": "full"},
        None,
    ],
)
def test_cache_bytes_are_those_of_generate_and_flops_those_of_the_masks(family, fields, tmp_path):
    model = tiny_model(family, **LIMITS[family])
    text = model.config
    n, heads = 93, 4
    if fields is not None:
        patch_model(model, **fields)
    model.config.save_pretrained(tmp_path)
    result = data_of("info", tmp_path, "--length", n, "--batch", 2, "--dtype", "float32")

    held = np.zeros((n, 2), dtype=int)
    ids = random_ids(2, 20)
    with torch.no_grad():
        cache = getattr(model(ids, use_cache=True), CACHE_NAME)
        for length in range(21, n + 1):
            model(ids[:, :1], use_cache=True, **{CACHE_NAME: cache})
            held[length - 1] = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert [layer["cache_bytes"] for layer in result["layers"]] == held.max(0).tolist()
    assert result["cache_bytes"] == sum(layer["cache_bytes"] for layer in result["layers"])
    assert result["full_cache_bytes"] == 2 * 2 * (2 * 8 * 4) * n * 2  # batch, k and v, KV heads x dim x bytes, layers

    i, j = np.mgrid[:n, :n]
    for layer in result["layers"]:
        kind = text.layer_types[layer["layer"]] if getattr(text, "layer_types", None) else "sliding_attention"
        seen = np.broadcast_to(j <= i, (heads, n, n)).copy()
        if kind == "sliding_attention":
            seen &= i - j < 30
        if kind == "chunked_attention":
            seen &= i // 40 == j // 40
        if fields is not None and layer["layer"] in fields.get("layers", [0, 1]):
            sinks = j < fields.get("sink_tokens", 0)
            if fields.get("bias") == "window":
                seen &= (i - j < 12) | sinks
            elif "bias" not in fields:
                hashes = PositionalHash.sample(
                    [fields["sigma"]] * 4, fields.get("num_samples", 20), layer=layer["layer"]
                )
                seen &= (hashes.mask_mean(n) > 0) | sinks
                assert layer["windows"] == np.ceil(hashes.widths.max(1)).tolist()
        assert layer["flops"] == 2 * seen.sum() * (8 + 8) * 2  # a multiply and an add, q . k and values, batch
        assert layer["keys_per_query"] == pytest.approx(seen.sum() / (heads * n))
    assert result["full_flops"] == 2 * (8 + 8) * heads * (n * (n + 1) // 2) * 2 * 2


def test_info_in_words(patched, host):
    text = run("info", patched).stdout
    assert f"{patched}: patched. PosLSHQwen3ForCausalLM" in text
    assert re.search(r"num_samples +6\n", text)
    assert "0 (not patched)  no limit" in text
    assert "512 tokens, batch 1, float32" in text
    assert "not patched. Qwen3ForCausalLM; `hf-poslsh patch" in run("info", host).stdout


def test_info_of_other_models(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    result = data_of("info", tmp_path)
    assert (result["patched"], result["family"]) == (False, None)
    assert "llama is not supported; supported are MistralForCausalLM" in run("info", tmp_path).stdout


@pytest.mark.parametrize("known", [True, False])
def test_info_of_an_adapter(host, tmp_path, known):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(host)
    if not known:
        model.name_or_path = "nobody/no-model"
    patch_model(model, sigma=6.0, num_samples=5)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path)
    result = data_of("info", tmp_path, "--length", "100")
    assert (result["kind"], result["patched"]) == ("adapter", True)
    assert result["method"] == PosLSHConfig(sigma=6.0, num_samples=5).to_dict()
    assert ("layers" in result) == known
    if known:
        assert result["base"] == str(host)
        assert result["layers"][0]["windows"] == PositionalHash.sample([6.0] * 4, 5).reach.tolist()
    else:
        assert "could not be read" in run("info", tmp_path).stdout


def test_info_of_an_adapter_of_a_stock_model(host, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(host)}))
    assert data_of("info", tmp_path)["patched"] is False
    assert f"not patched. An adapter on {host}" in run("info", tmp_path).stdout


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_a_bad_adapter_config_is_named(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    assert "adapter_config.json" in error_of("info", tmp_path)


def test_a_name_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch, patched):
    snapshot = tmp_path / "models--somebody--a-model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((patched / "config.json").read_bytes())
    (tmp_path / "models--somebody--a-model/refs").mkdir()
    (tmp_path / "models--somebody--a-model/refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert data_of("info", "somebody/a-model")["patched"] is True
    assert "somebody/no-model" in error_of("info", "somebody/no-model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "there is no folder no/such/folder"),
        (["{host}/config.json"], "is a file"),
        (["{host}/.."], "neither config.json nor adapter_config.json"),
        (["{host}", "--length", "0"], "length"),
        (["{host}", "--dtype", "int8"], "bfloat16"),
    ],
)
def test_info_refuses(host, arguments, message):
    assert message in error_of("info", *(argument.format(host=host) for argument in arguments))


# plan, draw, demo -----------------------------------------------------------------------------------------------


def test_plan_is_what_theory_and_info_say(host, patched):
    result = data_of("plan", patched, "--length", 300, "--samples", 6, "--samples", 16, "--delta", 0.05)
    small, large = result["plans"]
    assert (small["num_samples"], large["num_samples"]) == (6, 16)
    there = data_of("info", patched, "--length", 300)
    assert small["cache_bytes"] == there["cache_bytes"]
    assert small["flops"] == there["flops"]
    assert [head["windows"] for head in small["heads"]] == [[window] for window in there["layers"][1]["windows"]]
    assert small["time"] == "linear in 4 of 8 heads"  # layer 0 is not patched
    for plan in (small, large):
        head, samples = plan["heads"][0], plan["num_samples"]
        variance = max(theory.entry_variance(d, 8.0, samples).item() for d in range(1, 60))
        assert head["rms_error"] == pytest.approx(variance**0.5, rel=1e-2)
        assert theory.max_norm_tail(head["max_error"], 300, 8.0, samples, "staggered") <= 0.05
        assert theory.max_norm_tail(head["max_error"] * 0.99, 300, 8.0, samples, "staggered") > 0.05
        assert head["likely_window"] == theory.widest_bin(8.0, samples, 0.05)
    assert large["heads"][0]["rms_error"] < small["heads"][0]["rms_error"]
    by_slopes = data_of("plan", host, "--length", 60, "--samples", 6)["plans"][0]
    assert [head["sigma"] for head in by_slopes["heads"]] == (1 / alibi_slopes(4)).tolist()
    assert by_slopes["time"] == "linear in 2 of 8 heads"  # sigma 16, 64 and 256 see all of 60 tokens
    text = run("plan", host, "--length", 60, "--samples", 6, "--set", "sigma=4").stdout
    assert re.search(r"\n6 +0\.\d+ .* linear\n", text)
    assert "quadratic" in run("plan", host, "--length", 60, "--samples", 6, "--set", "sigma=400").stdout


def test_plan_refuses(host, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    assert "LlamaConfig; supported are" in error_of("plan", tmp_path, "--length", 9)
    assert "draws no samples" in error_of("plan", host, "--length", 9, "--set", "bias=alibi")
    assert "delta is 2" in error_of("plan", host, "--length", 9, "--delta", "2")
    assert "--length" in error_of("plan", host)


def test_draw_draws_the_masks_of_the_hashes(patched, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    result = data_of(
        "draw", tmp_path / "a.png", "--sigma", 9, "--samples", 7, "--seed", 3, "--sampler", "iid", "--heads", 2
    )
    hashes = PositionalHash.sample([9.0, 9.0], 7, seed=3, sampler="iid")
    error = hashes.mask_mean(128)[0] - np.exp(-np.abs(np.subtract.outer(np.arange(128), np.arange(128))) / 9)
    assert result["rms_error"] == pytest.approx(np.sqrt((error**2).mean()))
    assert result["windows"] == [[reach] for reach in hashes.reach]
    picture = imread(tmp_path / "a.png")
    assert picture.shape[0] > 600
    assert picture.std() > 0.1
    result = data_of("draw", tmp_path / "b.png", patched, "--layer", 1, "--head", 2)
    assert (result["layer"], result["head"], result["sigma"]) == (1, 2, 8.0)
    assert result["windows"] == [[reach] for reach in PositionalHash.sample([8.0] * 4, 6, layer=1).reach]
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jpg"], "choose one of .png"),
        (["none/a.png"], "there is no folder none"),
        (["a.png", "--length", "1"], "length is 1"),
        (["a.png", "--head", "8"], "heads 0 to 7"),
        (["a.png", "--sigma", "wide"], "sigma is 'wide'"),
        (["a.png", "{patched}"], "layer is 0; patched are the layers 1"),
        (["a.png", "{patched}", "--seed", "3"], "seed=3: with a checkpoint"),
        (["a.png", "{host}"], "is not patched"),
    ],
)
def test_draw_refuses(host, patched, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of("draw", *(argument.format(host=host, patched=patched) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_draw_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'hf-poslsh[plots]'" in error_of("draw", tmp_path / "a.png")


def test_demo_measures(monkeypatch):
    result = demo_command.run_demo((64, 96), heads=2, head_dim=8)
    differences = result["largest_difference"]
    assert differences["banded_and_reference"] < 1e-4 < 0.1 < differences["patched_and_original"]
    assert differences["unpatched_and_original"] == 0
    hashes = [PositionalHash.sample([16.0] * 4, 8, layer=layer) for layer in range(2)]
    assert result["cache_tokens"] == {"original": [600] * 2, "patched": [int(h.reach.max()) for h in hashes]}
    assert result["cache_bytes"]["original"] == 2 * 600 * 2 * 2 * 8 * 4
    errors = [row["relative_error"] for row in result["convergence"]]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.03
    assert [row["tokens"] for row in result["seconds"]] == [64, 96]
    monkeypatch.setattr(demo_command, "run_demo", lambda: result)
    assert data_of("demo") == json.loads(json.dumps(result))
    assert "The KV cache stops growing. After 600 tokens it holds" in run("demo").stdout


def test_demo_trains_where_the_recipes_are(tmp_path, monkeypatch):
    calls = []

    def record(command, cwd, check):
        calls.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(demo_command.subprocess, "run", record)
    monkeypatch.chdir(ROOT)
    run("demo", "--train", code=3)
    config = "recipes/configs/demo.yaml"
    assert calls == [(["-m", "accelerate.commands.launch", "recipes/train.py", "--config", config], ROOT)]
    assert (ROOT / config).is_file()
    assert "leave out --json" in error_of("demo", "--train", "--json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_command.hf_poslsh, "__file__", str(tmp_path / "hf_poslsh/__init__.py"))
    assert "in a copy of the repository" in error_of("demo", "--train")
    assert len(calls) == 1


def test_tiny_config_of_the_tests_has_the_limits():
    assert tiny_config("llama4", **LIMITS["llama4"]).layer_types == ["chunked_attention", "full_attention"]
