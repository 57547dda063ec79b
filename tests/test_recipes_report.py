"""What an experiment leaves behind: files that are complete or not there, and the model card."""

import json
from pathlib import Path

import pytest
from experiment.files import finish_folder, lock_folder, partial_folder, read_json, write_json, write_text
from experiment.publishing import check_names
from experiment.report import model_card
from experiment.settings import load_settings

RECIPES = Path(__file__).parent.parent / "recipes"
SMOKE = RECIPES / "configs" / "smoke.yaml"
CONFIGS = sorted(p for p in (RECIPES / "configs").glob("*.yaml") if not p.stem.startswith("convergence"))


# --- files


def test_files_are_replaced_in_one_step(tmp_path):
    write_text(tmp_path / "a/b.txt", "one")
    write_text(tmp_path / "a/b.txt", "two")
    assert (tmp_path / "a/b.txt").read_text() == "two"
    write_json(tmp_path / "c.json", {"x": [1, 2.5]})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "c.json", {"x": float("nan")})
    assert read_json(tmp_path / "c.json") == {"x": [1, 2.5]}
    for content in ("new", "newer"):
        write_text(partial_folder(tmp_path / "folder") / "file", content)
        finish_folder(tmp_path / "folder")
        assert (tmp_path / "folder/file").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c.json", "folder"]


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    lock_folder(tmp_path / "out")
    with pytest.raises(ValueError, match="out is in use by another run"):
        lock_folder(tmp_path / "out")
    lock_folder(tmp_path / "other")


# --- model card


def results(steps=(1, 1), **changes):
    """What two arms leave, the first of them patched."""

    def summary(perplexity):
        return {"perplexity": perplexity, "loss": 1.0, "top_1_accuracy": 0.25, "tokens_scored": 8, "context": [1, 2]}

    def training(steps):
        figures = {"final_loss": 5.0, "seconds": 1.0, "tokens_per_second": 64.0} if steps else {}
        return {"parameters": 10, "steps": steps, "tokens": 64 * steps, **figures}

    settings = load_settings(SMOKE).to_dict()
    for name, change in changes.items():
        settings[name] = change if settings[name] is None else settings[name] | change
    content = {
        "name": "an experiment",
        "seed": 7,
        "versions": {"torch": "2"},
        "protocol": {
            "name": "same-targets",
            "tokens_scored": 8,
            "targets_per_window": 4,
            "texts": [{"name": "novel.txt", "sha256": "0", "tokens": 99, "tokens_scored": 8}],
        },
        "settings": settings,
        "arms": {
            "plsh": {"poslsh": {"rope": "drop"}, "training": training(steps[0]), "lengths": {"64": summary(131.25)}},
            "rope": {"poslsh": None, "training": training(steps[1]), "lengths": {"64": summary(188.04)}},
        },
    }
    return json.loads(json.dumps(content))


def test_the_card_holds_every_number_and_valid_metadata():
    card = model_card(results())
    assert "| arm | 64 |\n|---|---:|\n| plsh | 131.2 |\n| rope | 188.0 |\n" in card.content
    assert "| plsh | 25.00 |" in card.content
    assert "seed (7)" in card.content
    assert "between L - 3 and L tokens" in card.content
    assert card.data.library_name == "transformers"
    metrics = [(result.metric_type, result.metric_value, result.metric_name) for result in card.data.eval_results]
    assert ("perplexity", 131.25, "Perplexity at 64 tokens, plsh") in metrics
    assert ("accuracy", 0.25, "Top-1 accuracy at 64 tokens, rope") in metrics
    assert "{{" not in card.content
    assert "{%" not in card.content
    assert [card.data.license, card.data.language] == ["apache-2.0", "en"]


@pytest.mark.parametrize(
    ("steps", "peft", "folder", "loader"),
    [
        ((1, 1), None, "plsh", "AutoModelForCausalLM"),
        ((0, 1), None, "rope", "AutoModelForCausalLM"),
        ((1, 1), {"r": 2}, "plsh", "load_adapter"),
        ((0, 1), {"r": 2}, "rope", "AutoPeftModelForCausalLM"),
        ((0, 0), {"r": 2}, None, None),
    ],
)
def test_the_card_shows_how_to_load_what_was_trained(steps, peft, folder, loader):
    made = {"pretrained": "org/base", "config": {"rope_theta": 5e5}}
    changes = {} if peft is None else {"model": made, "peft": peft}
    content = model_card(results(steps, **changes)).content
    assert ("of no use for writing" in content) == (peft is None)
    assert ("## Use" in content) == (folder is not None)
    if folder is not None:
        code = content.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert f'folder = "{folder}"\n' in code
        options = "" if peft is None else ", rope_theta=500000.0"
        assert f"{loader}{'' if loader == 'load_adapter' else '.from_pretrained'}(folder{options})" in code
        assert f"`python recipes/evaluate.py {folder}` repeats" in content


def test_the_card_shows_positional_lsh_where_other_biases_were_trained_too():
    content = results()
    content["arms"] = {"window": {**content["arms"]["plsh"], "poslsh": {"bias": "window"}}, **content["arms"]}
    assert 'folder = "plsh"' in model_card(content).content


def test_names_that_the_hub_would_refuse_are_found_before_training(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    settings = load_settings(SMOKE, ["arms=[{name: a+b, poslsh: null}]"])
    with pytest.raises(ValueError, match=r"repo_id is 'user/x-a\+b'; write 'user/name'"):
        check_names(settings, "user/x")
    settings = load_settings(SMOKE, ["model={pretrained: recipes}", "peft={r: 2}"])
    with pytest.raises(ValueError, match=r"'recipes' are of no use to others.*--set card.base_model=user/name"):
        check_names(settings, "user/x")
    settings.card["base_model"] = "user/base"
    check_names(settings, "user/x")
