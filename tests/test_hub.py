"""push_to_hub against a Hub on loopback: what is published, how cards are merged, and what interruptions leave."""

import json
import re
import warnings

import pytest
import torch
import yaml
from hub_server import LARGE, TOKEN, connected
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, get_peft_model
from test_saving import tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_poslsh import PosLSHConfig, load_adapter, patch_model, push_to_hub
from hf_poslsh.cards import END, START
from hf_poslsh.testing import tiny_model

METHOD = PosLSHConfig(sigma=8.0, num_samples=4, seed=3)
IDS = torch.arange(1, 33)[None]


@pytest.fixture
def hub(tmp_path):
    with connected(tmp_path / "cache") as server:
        yield server


@pytest.fixture
def saved(tmp_path):
    patch_model(tiny_model("mistral"), METHOD).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def card_of(hub, repo_id):
    """Metadata and text."""
    _, head, text = hub.files(repo_id)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(head), text


def evaluation(perplexity, *lengths):
    protocol = {"name": "same-targets", "tokens_scored": 320, "texts": [{"name": "emma.txt", "tokens_scored": 320}]}
    summary = {"perplexity": perplexity, "loss": 1.0, "top_1_accuracy": 0.25}
    return {"protocol": protocol, "lengths": {str(length): summary for length in lengths}}


def adapter_on(base):
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))


def test_a_folder_becomes_a_repository_in_one_commit(hub, saved, tmp_path):
    (saved / "optimizer.pt").write_bytes(b"pickle")
    (saved / ".partial").write_bytes(b"hidden")
    (saved / "checkpoint-5").mkdir()
    (saved / "checkpoint-5/model.safetensors").write_bytes(b"other")
    commit = push_to_hub(saved, "user/name")
    assert commit == f"{hub.url}/user/name/commit/{hub.repos['user/name'].branches['main']}"
    assert [len(hub.repos["user/name"].commits), hub.repos["user/name"].private] == [2, False]
    files = hub.files("user/name")
    names = {"config.json", "generation_config.json", "model.safetensors", "modeling_poslsh.py"}
    assert set(files) == {*names, "tokenizer.json", "tokenizer_config.json", "README.md", ".gitattributes"}
    for name in names:
        assert files[name] == (saved / name).read_bytes()
    data, text = card_of(hub, "user/name")
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["poslsh", "long-context"],
    }
    assert 'AutoModelForCausalLM.from_pretrained("user/name")' in text
    assert "| sigma | `8.0` |" in text
    assert "arxiv.org/abs/2605.09472" in text


def test_pushing_the_same_again_makes_no_commit(hub, saved):
    (saved / "evaluation.json").write_text(json.dumps(evaluation(20.0, 64)))
    first = push_to_hub(saved, "user/name", metadata={"license": "mit"})
    assert push_to_hub(saved, "user/name", metadata={"license": "mit"}).oid == first.oid


def test_a_model_in_memory_names_what_it_was_made_from_and_its_licence(hub):
    hub.put("org/base", {"README.md": "---\nlicense: other\nlicense_name: wild\nlicense_link: LICENSE\n---\n"})
    model = tiny_model("qwen3")
    model.name_or_path = model.config.name_or_path = "org/base"
    push_to_hub(patch_model(model, METHOD), "name", tokenizer=tiny_tokenizer(), private=True)
    data, text = card_of(hub, "user/name")
    assert data["base_model"] == "org/base"
    assert [data["license"], data["license_name"]] == ["other", "wild"]
    assert hub.repos["user/name"].private
    assert {"tokenizer.json", "modeling_poslsh.py"} <= set(hub.files("user/name"))
    assert "A `Qwen3ForCausalLM` with another attention, made from [org/base]" in text


def test_results_tables_and_plots_are_published_and_shown(hub, saved, tmp_path):
    (saved / "evaluation.json").write_text(json.dumps(evaluation(20.125, 64, 128)))
    recipe = {"arm": "plsh", "poslsh": METHOD.to_dict(), "seed": 7, "training": {"steps": 10, "tokens": 2560}}
    (saved / "recipe.json").write_text(json.dumps(recipe))
    results = {"arms": {"plsh": evaluation(20.125, 64, 128), "rope": evaluation(31.5, 64, 128)}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "perplexity.png").write_bytes(b"\x89PNG")
    (tmp_path / "scores.csv").write_text("length,perplexity\n")
    extra = [tmp_path / name for name in ("results.json", "perplexity.png", "scores.csv")]
    push_to_hub(
        saved, "user/name", files=extra, metadata={"datasets": ["user/novels"], "license": "mit", "tags": ["x"]}
    )
    files = hub.files("user/name")
    for file in extra:
        assert files[file.name] == file.read_bytes()
    data, text = card_of(hub, "user/name")
    assert [data["datasets"], data["license"]] == [["user/novels"], "mit"]
    assert data["tags"] == ["poslsh", "long-context", "x"]
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"]["name"] == "emma.txt"
    assert [(metric["name"], metric["value"]) for metric in result["metrics"]] == [
        ("Perplexity at 64 tokens", 20.125),
        ("Top-1 accuracy at 64 tokens", 0.25),
        ("Perplexity at 128 tokens", 20.125),
        ("Top-1 accuracy at 128 tokens", 0.25),
    ]
    assert re.search(r"\| plsh \| 20.1 \| 20.1 \|\n\| rope \| 31.5 \| 31.5 \|", text)
    assert "![perplexity.png](perplexity.png)" in text
    assert "[scores.csv](scores.csv)" in text
    assert "- tokens: 2560" in text
    assert "- seed: 7" in text


def test_an_existing_card_keeps_what_its_owner_wrote(hub, saved):
    mine = "---\nlanguage: de\nlicense: mit\ntags:\n- mine\nwidget:\n- text: Ahoi\n---\n# My title\n\nMy words.\n"
    hub.put("user/name", {"README.md": mine})
    (saved / "evaluation.json").write_text(json.dumps(evaluation(20.0, 64, 128)))
    push_to_hub(saved, "user/name")
    data, text = card_of(hub, "user/name")
    assert text.startswith("# My title\n\nMy words.\n\n" + START)
    assert [data["language"], data["license"], data["widget"]] == ["de", "mit", [{"text": "Ahoi"}]]
    assert data["tags"] == ["mine", "poslsh", "long-context"]

    edited = hub.files("user/name")["README.md"].decode() + "\n## Below\n"
    edited = edited.replace("with another attention", "OVERWRITTEN")
    own = "model-index:\n- name: Mine\n  results:\n  - task:\n      type: qa\n    dataset:\n      name: d\n"
    own += "      type: d\n    metrics:\n    - type: f1\n      value: 0.5\n  - task"
    hub.put("user/name", {"README.md": re.sub(r"model-index:\n- name: name\n  results:\n  - task", own, edited)})
    (saved / "evaluation.json").write_text(json.dumps(evaluation(10.0, 64)))
    push_to_hub(saved, "user/name", metadata={"license": "apache-2.0"})
    data, text = card_of(hub, "user/name")
    assert text.startswith("# My title\n\nMy words.\n")
    assert text.endswith(END + "\n\n## Below\n")
    assert text.count(START) == text.count(END) == 1
    assert "OVERWRITTEN" not in text
    assert data["license"] == "apache-2.0"
    assert data["tags"] == ["mine", "poslsh", "long-context"]
    assert data["model-index"][0]["name"] == "Mine"
    theirs, ours = data["model-index"][0]["results"]
    assert theirs["metrics"] == [{"type": "f1", "value": 0.5}]
    assert "source" not in theirs
    assert [metric["value"] for metric in ours["metrics"]] == [10.0, 0.25]


def test_the_folders_own_card_starts_a_new_repository_and_no_more(hub, saved):
    (saved / "README.md").write_text("---\nlicense: mit\n---\n# From the folder\n")
    push_to_hub(saved, "user/name")
    assert card_of(hub, "user/name")[1].startswith("# From the folder\n\n" + START)
    hub.put("user/name", {"README.md": hub.files("user/name")["README.md"].decode().replace("the folder", "the Hub")})
    push_to_hub(saved, "user/name")
    assert card_of(hub, "user/name")[1].startswith("# From the Hub\n")


@pytest.mark.parametrize("text", ["---\n: : [\n---\n", f"{START}\nno end\n", f"{END}\nno start\n"])
def test_a_card_that_cannot_be_merged_is_left_alone(hub, saved, text):
    hub.put("user/name", {"README.md": text})
    with pytest.raises(ValueError, match=r"the existing README.md"):
        push_to_hub(saved, "user/name")
    assert set(hub.files("user/name")) == {".gitattributes", "README.md"}


def test_an_adapter_says_what_it_needs_and_loads_by_name(hub, tmp_path):
    tiny_model("mistral").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapter_on(patch_model(base, METHOD))
    with pytest.raises(ValueError, match=r"base_model='user/name'"):
        push_to_hub(model, "user/adapter")
    assert "user/adapter" not in hub.repos
    put_checkpoint(hub, "org/base", tmp_path / "base")
    push_to_hub(model, "user/adapter", base_model="org/base")
    files = hub.files("user/adapter")
    assert set(files) == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"].startswith("poslsh:org/base (patched")
    data, text = card_of(hub, "user/adapter")
    assert [data["base_model"], data["library_name"]] == ["org/base", "peft"]
    assert 'load_adapter("user/adapter")' in text
    assert "| sigma | `8.0` |" in text
    assert "More Information Needed" not in text
    assert torch.equal(logits(load_adapter("user/adapter")), logits(model))
    with pytest.raises(ValueError, match="patch_model"):
        load_adapter("user/adapter", tiny_model("mistral"))


def put_checkpoint(hub, repo_id, folder):
    """Publishes a folder as it is, without the code under test."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo_id.replace("org/", "team/"))
    HfApi().upload_folder(repo_id=repo_id.replace("org/", "team/"), folder_path=folder)
    hub.repos[repo_id] = hub.repos.pop(repo_id.replace("org/", "team/"))


def test_an_adapter_of_a_published_patched_model(hub, saved, tmp_path):
    push_to_hub(saved, "user/base")
    model = adapter_on(AutoModelForCausalLM.from_pretrained("user/base"))
    model.save_pretrained(tmp_path / "adapter")
    push_to_hub(tmp_path / "adapter", "user/adapter", metadata={"license": "mit"})
    data, text = card_of(hub, "user/adapter")
    assert [data["base_model"], data["library_name"], data["license"]] == ["user/base", "peft", "mit"]
    assert "More Information Needed" not in text  # PEFT's empty form
    assert "### Framework versions" in text
    assert torch.equal(logits(load_adapter("user/adapter")), logits(model))


@pytest.mark.parametrize("patched", [True, False])
def test_the_card_of_a_recipes_adapter_says_how_the_base_was_changed(hub, tmp_path, patched):
    base = tiny_model("mistral")
    base.name_or_path = base.config.name_or_path = "org/base"
    model = adapter_on(patch_model(base, METHOD) if patched else base)
    model.save_pretrained(tmp_path)
    arm = {"name": "lora", "config": {"sliding_window": None}}
    made = {"pretrained": "org/base", "revision": "v2", "config": {"rope_theta": 5e5}}
    recipe = {"arm": "lora", "poslsh": METHOD.to_dict() if patched else None, "seed": 0, "training": {"steps": 0}}
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "settings": {"model": made, "arms": [arm]}}))
    push_to_hub(tmp_path, "user/adapter")
    data, text = card_of(hub, "user/adapter")
    assert [data["base_model"], data["library_name"]] == ["org/base", "peft"]
    changed = "rope_theta=500000.0, sliding_window=None)"
    if patched:
        assert f"load_adapter(\"user/adapter\", revision='v2', {changed}" in text
    else:
        assert f'AutoPeftModelForCausalLM.from_pretrained("user/adapter", {changed}' in text
    assert "## Training" not in text


def test_a_recipes_checkpoint_names_the_model_that_it_began_with(hub, saved):
    recipe = {"arm": "a", "poslsh": METHOD.to_dict(), "seed": 0, "training": {"steps": 3}}
    made = {"model": {"pretrained": "org/base"}, "arms": []}
    (saved / "recipe.json").write_text(json.dumps({**recipe, "settings": made}))
    push_to_hub(saved, "user/name")
    assert card_of(hub, "user/name")[0]["base_model"] == "org/base"


def test_weights_of_an_earlier_push_do_not_shadow_the_new_ones(hub, saved, tmp_path):
    push_to_hub(saved, "user/name", files=[saved / "config.json"])
    hub.put("user/name", {"notes.md": "mine", "extra/model.safetensors": "mine"})
    model = patch_model(tiny_model("mistral", seed=1), METHOD)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert not (tmp_path / "sharded/model.safetensors").exists()
    push_to_hub(tmp_path / "sharded", "user/name")
    assert {"notes.md", "extra/model.safetensors"} <= set(hub.files("user/name"))
    assert "model.safetensors" not in hub.files("user/name")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("user/name")), logits(model))


INTERRUPTIONS = [
    ("PUT", "/storage/", 500),
    ("PUT", "/storage/", 403),
    ("POST", "/commit/", 500),
    ("POST", "/batch", 403),
]


@pytest.mark.parametrize(("method", "pattern", "status"), INTERRUPTIONS)
def test_an_interrupted_push_publishes_nothing_and_a_retry_succeeds(hub, saved, method, pattern, status):
    hub.fail(method, pattern, status)
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        push_to_hub(saved, "user/name")
    assert set(hub.files("user/name")) == {".gitattributes"}
    with pytest.raises((OSError, ValueError), match="user/name"):
        AutoModelForCausalLM.from_pretrained("user/name")
    hub.failures.clear()
    push_to_hub(saved, "user/name")
    expected = logits(AutoModelForCausalLM.from_pretrained(saved))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("user/name")), expected)


def test_an_interrupted_second_push_leaves_the_first(hub, saved):
    push_to_hub(saved, "user/name")
    before = hub.files("user/name")
    hub.fail("POST", "/commit/", 500)
    with pytest.raises(HfHubHTTPError):
        push_to_hub(patch_model(tiny_model("mistral", seed=1), METHOD.replace(seed=9)), "user/name")
    assert hub.files("user/name") == before


def test_a_short_failure_of_the_storage_is_retried(hub, saved):
    hub.fail("PUT", "/storage/", 500, times=1)
    push_to_hub(saved, "user/name")
    assert [path for method, path in hub.requests if method == "PUT"] == 2 * [f"/storage/{next(iter(hub.objects))}"]


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(hub, saved, monkeypatch):
    hub.put("user/name", {"README.md": "# old\n"})
    monkeypatch.setattr(
        "hf_poslsh.hub.merge_card", lambda existing, card: hub.put("user/name", {"README.md": "# newer\n"}) or card
    )
    with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
        push_to_hub(saved, "user/name")
    assert hub.files("user/name")["README.md"] == b"# newer\n"


@pytest.mark.parametrize("repo_id", ["a/b/c", "user/na me", "user/", "--", "x" * 97])
def test_malformed_names_are_refused_before_any_request(hub, saved, repo_id):
    with pytest.raises(ValueError, match=r"repo_id is .*write 'user/name'"):
        push_to_hub(saved, repo_id)
    assert hub.requests == []


def test_a_missing_token_is_said_before_any_request(hub, saved, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nowhere")
    with pytest.raises(ValueError, match="hf auth login"):
        push_to_hub(saved, "user/name")
    assert hub.requests == []
    push_to_hub(saved, "user/name", token=TOKEN)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        push_to_hub(saved, "user/name", token="hf_wrong")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "neither config.json nor adapter_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
        (lambda folder: (folder / "modeling_poslsh.py").unlink(), "lacks modeling_poslsh.py"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "lacks adapter_model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "s-2", "b": "s-1"}}'
            ),
            "lacks s-1, s-2",
        ),
    ],
)
def test_folders_that_are_no_checkpoints_are_refused_before_any_request(hub, saved, spoil, message):
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        push_to_hub(saved, "user/name")
    assert hub.requests == []


def test_missing_folders_are_refused(hub, tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        push_to_hub(tmp_path / "nothing", "user/name")


def test_unpatched_models_are_refused_unless_a_recipe_says_so(hub, tmp_path):
    model = tiny_model("mistral")
    with pytest.raises(ValueError, match=r"MistralForCausalLM is not patched.*patch_model"):
        push_to_hub(model, "user/name")
    with pytest.raises(ValueError, match="Linear is not patched"):
        push_to_hub(torch.nn.Linear(2, 2), "user/name")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"MistralForCausalLM that is not patched.*patch_model"):
        push_to_hub(tmp_path, "user/name")
    assert hub.requests == []
    (tmp_path / "recipe.json").write_text(json.dumps({"arm": "rope", "poslsh": None, "seed": 0, "training": {}}))
    push_to_hub(tmp_path, "user/name")
    data, text = card_of(hub, "user/name")
    assert "tags" not in data
    assert "stock model" in text
    assert "hf_poslsh" not in text
    adapter_on(tiny_model("mistral")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="names no base model"):
        push_to_hub(tmp_path / "adapter", "user/name")
    model.name_or_path = str(tmp_path)
    adapter_on(model).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"which is not patched; publish it by PeftModel.push_to_hub"):
        push_to_hub(tmp_path / "adapter", "user/name")


def test_no_warning_of_the_hub_about_the_metadata(hub, saved):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Warnings while validating metadata")
        push_to_hub(saved, "user/name")
    assert ("POST", "/api/validate-yaml") in hub.requests


def test_large_files_go_to_the_storage(hub, saved):
    push_to_hub(saved, "user/name")
    stored = hub.repos["user/name"].at("main")[1]
    assert {name for name, file in stored.items() if isinstance(file, str)} == {"model.safetensors"}
    assert "model.safetensors".endswith(LARGE)
