"""What a Hub repository gives in a fresh process, with the plugin and without it: the patched model or an error."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hub_server import connected
from test_hub import IDS, METHOD, adapter_on, logits, put_checkpoint
from test_saving import tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_poslsh import patch_model, push_to_hub
from hf_poslsh.testing import tiny_model

_RUN = """
import json, sys
import torch, transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, MistralForCausalLM, pipeline
codes = json.loads(sys.argv[1])
ids = torch.arange(1, 33)[None]
def logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits.tolist()
def said(generator):
    return generator("w5 w7 w9", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
answers = []
for code in codes:
    try:
        answers.append(eval(code))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print("ANSWERS" + json.dumps(answers))
"""
PLUGIN = "__import__('hf_poslsh') and None"


def in_fresh_process(hub, home, *codes):
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(codes)],
        env={**os.environ, **hub.environment(home)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert "ANSWERS" in done.stdout, done.stderr
    return json.loads(done.stdout.split("ANSWERS")[1])


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, expected):
    """``user/plsh``; ``user/inner``, an adapter of it; ``user/adapter``, of ``org/base`` patched in memory."""
    folder = tmp_path_factory.mktemp("hub")
    with connected(folder / "cache") as server:
        model = patch_model(tiny_model("mistral"), METHOD)
        expected["plsh"] = logits(model)
        push_to_hub(model, "user/plsh", tokenizer=tiny_tokenizer())
        inner = adapter_on(AutoModelForCausalLM.from_pretrained("user/plsh"))
        expected["inner"] = logits(inner)
        push_to_hub(inner, "user/inner")
        tiny_model("mistral", seed=1).save_pretrained(folder / "base")
        put_checkpoint(server, "org/base", folder / "base")
        outer = adapter_on(patch_model(AutoModelForCausalLM.from_pretrained("org/base"), METHOD))
        expected["adapter"] = logits(outer)
        push_to_hub(outer, "user/adapter")
        yield server


def check_equal(answer, expected):
    assert isinstance(answer, list), answer
    assert torch.equal(torch.tensor(answer), expected)


def check_refused(answers, *messages):
    for answer, message in zip(answers, messages, strict=True):
        assert isinstance(answer, str)
        assert "Error" in answer
        assert message in answer


AUTO = "logits(AutoModelForCausalLM.from_pretrained('user/{}'))"
PEFT = "logits(AutoPeftModelForCausalLM.from_pretrained('user/{}'))"
OURS = "logits(__import__('hf_poslsh').load_adapter('user/{}'))"


def test_with_the_plugin_everything_loads_by_name_and_adapters_never_on_a_stock_model(hub, expected, tmp_path):
    plain = "MistralForCausalLM.from_pretrained('org/base')"
    pushed = f"model.save_pretrained({str(tmp_path / 'saved')!r}, push_to_hub=True, repo_id='user/saved')"
    _, model, inner, ours, theirs, text, *refused, inherited, saved = in_fresh_process(
        hub,
        tmp_path,
        PLUGIN,
        AUTO.format("plsh"),
        PEFT.format("inner"),
        OURS.format("inner"),
        OURS.format("adapter"),
        "said(pipeline('text-generation', model='user/plsh', device='cpu'))",
        AUTO.format("plsh").replace("')", "', attn_implementation='sdpa')"),
        AUTO.format("adapter"),
        PEFT.format("adapter"),
        f"logits(__import__('hf_poslsh').load_adapter('user/adapter', {plain}))",
        "[model := AutoModelForCausalLM.from_pretrained('user/plsh'), model.push_to_hub('user/inherited')][1]",
        f"[model := AutoModelForCausalLM.from_pretrained('user/plsh'), {pushed}][1]",
    )
    check_equal(model, expected["plsh"])
    check_equal(inner, expected["inner"])
    check_equal(ours, expected["inner"])
    check_equal(theirs, expected["adapter"])
    model = AutoModelForCausalLM.from_pretrained("user/plsh")
    answer = model.generate(torch.tensor([[5, 7, 9]]), max_new_tokens=8, do_sample=False)[0, 3:]
    assert text.split() == [f"w{token}" for token in answer]
    check_refused(refused, "sdpa", "poslsh:", "poslsh:", "patch_model")
    assert inherited.startswith(f"{hub.url}/user/inherited/commit/")
    assert saved is None
    for name in ("user/inherited", "user/saved"):
        assert {"config.json", "model.safetensors", "modeling_poslsh.py"} <= set(hub.files(name)), name
        config = json.loads(hub.files(name)["config.json"])
        assert config["model_type"] == "poslsh_mistral"
        assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_poslsh.PosLSHMistralForCausalLM"
        assert "- poslsh\n" in hub.files(name)["README.md"].decode()


def test_without_the_plugin_only_trusted_code_loads_it_and_the_rest_are_errors(hub, expected, tmp_path):
    trusted = AUTO.format("plsh").replace("')", "', trust_remote_code=True)")
    missing = "sys.modules.__setitem__('hf_poslsh', None)"
    *refused, _, without, _, loaded, text = in_fresh_process(
        hub,
        tmp_path,
        AUTO.format("plsh"),
        "logits(MistralForCausalLM.from_pretrained('user/plsh'))",
        "logits(MistralForCausalLM.from_pretrained('user/plsh', attn_implementation='sdpa'))",
        "said(pipeline('text-generation', model='user/plsh', device='cpu'))",
        PEFT.format("inner"),
        AUTO.format("inner"),
        PEFT.format("adapter"),
        AUTO.format("adapter"),
        missing,
        trusted,
        missing.replace("__setitem__('hf_poslsh', None)", "pop('hf_poslsh') and None"),
        trusted,
        "said(pipeline('text-generation', model='user/plsh', device='cpu', trust_remote_code=True))",
    )
    unknown = ["trust_remote_code", "poslsh", "pip install hf-poslsh"] + 3 * ["trust_remote_code"]
    check_refused(refused, *unknown, "poslsh:", "poslsh:")
    check_refused([without], "hf_poslsh")
    check_equal(loaded, expected["plsh"])
    assert len(text.split()) == 8


def test_the_ids_of_the_script_are_those_of_the_tests():
    assert "ids = torch.arange(1, 33)[None]" in _RUN
    assert torch.equal(IDS, torch.arange(1, 33)[None])
