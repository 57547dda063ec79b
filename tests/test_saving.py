"""Checkpoints load as the patched model through every public door, or not at all."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from oracles import SIGMA
from test_models import LIMITED, logits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

from hf_poslsh import PosLSHConfig, patch_model, poslsh, unpatch_model
from hf_poslsh.models import families
from hf_poslsh.testing import FAMILIES, tiny_model

METHOD = PosLSHConfig(sigma=SIGMA, num_samples=6, layers=[1], rope="drop", sink_tokens=1, seed=4)
HOST = {"mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama4": "Llama4ForCausalLM"}
IDS = torch.arange(1, 49).reshape(2, 24)

_LOAD = """
import json, sys, warnings
import torch
checkpoints, codes, plugin = json.loads(sys.argv[1])
if plugin:
    import hf_poslsh
import transformers
from transformers import AutoModelForCausalLM
ids = torch.arange(1, 49).reshape(2, 24)
answers = [{} for code in codes]
for code, answer in zip(codes, answers):
    for name, checkpoint in checkpoints.items():
        try:
            model = eval(code, {**globals(), "ck": checkpoint, "host": getattr(transformers, name)})
            with torch.no_grad():
                answer[name] = model.eval()(ids).logits.tolist()
        except Exception as error:
            answer[name] = f"{type(error).__name__}: {error}"
print("ANSWERS" + json.dumps(answers))
"""


def in_fresh_process(checkpoints, plugin, *codes):
    """Logits, or the error, of what each of ``codes`` loads from each checkpoint ``ck``, by family."""
    request = json.dumps([{HOST[family]: str(path) for family, path in checkpoints.items()}, codes, plugin])
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, request], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert "ANSWERS" in done.stdout, done.stderr
    answers = json.loads(done.stdout.split("ANSWERS")[1])
    return [{family: answer[HOST[family]] for family in checkpoints} for answer in answers]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        patch_model(tiny_model(family, **LIMITED[family]), METHOD).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def expected():
    return {family: logits(patch_model(tiny_model(family, **LIMITED[family]), METHOD), IDS) for family in FAMILIES}


def check_equal(answers, expected):
    for family, answer in answers.items():
        assert isinstance(answer, list), answer
        assert torch.equal(torch.tensor(answer), expected[family])


def check_refused(answers, message):
    for answer in answers.values():
        assert isinstance(answer, str)
        assert message in answer


AUTO = "AutoModelForCausalLM.from_pretrained(ck)"
TRUSTED = "AutoModelForCausalLM.from_pretrained(ck, trust_remote_code=True)"
STOCK = ("host.from_pretrained(ck)", "host.from_pretrained(ck, attn_implementation='sdpa')")


def test_a_fresh_process_with_the_plugin_gives_identical_logits(checkpoints, expected):
    loaded, *stock = in_fresh_process(checkpoints, True, AUTO, *STOCK)
    check_equal(loaded, expected)
    for answers in stock:
        check_refused(answers, "pip install hf-poslsh")


def test_a_fresh_process_without_the_plugin_refuses(checkpoints):
    auto, named, poisoned = in_fresh_process(checkpoints, False, AUTO, *STOCK)
    check_refused(auto, "Error")
    check_refused(named, "poslsh")
    check_refused(poisoned, "pip install hf-poslsh")


def test_trusted_code_loads_the_installed_package(checkpoints, expected):
    (loaded,) = in_fresh_process(checkpoints, False, TRUSTED)
    check_equal(loaded, expected)


def test_trusted_code_names_the_package_where_it_is_missing(checkpoints):
    (answers,) = in_fresh_process(checkpoints, False, f"(sys.modules.__setitem__('hf_poslsh', None), {TRUSTED})[1]")
    check_refused(answers, "hf_poslsh")


@pytest.mark.parametrize("guard", ["attn_implementation", "rope_parameters"])
def test_each_guard_of_a_checkpoint_is_enough_for_stock_classes(family, checkpoints, tmp_path, guard):
    content = json.loads((checkpoints[family] / "config.json").read_text())
    stock = tiny_model(family)
    content["model_type"] = stock.config.model_type
    if guard == "attn_implementation":
        content["rope_parameters"] = content["rope_parameters"]["base"]
    else:
        del content["attn_implementation"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes((checkpoints[family] / "model.safetensors").read_bytes())
    with pytest.raises((KeyError, ValueError), match="poslsh"):
        logits(type(stock).from_pretrained(tmp_path), IDS)


def test_auto_classes_refuse_another_attention(checkpoints):
    for path in checkpoints.values():
        with pytest.raises(ValueError, match="sdpa"):
            AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")


def test_save_load_save_is_stable(family, checkpoints, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoints[family]).save_pretrained(tmp_path)
    names = {path.name for path in checkpoints[family].iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (checkpoints[family] / name).read_bytes(), name


def test_the_host_config_survives(family, checkpoints):
    host = tiny_model(family, **LIMITED[family]).config.to_dict()
    loaded = AutoConfig.from_pretrained(checkpoints[family])
    ours = loaded.to_dict()
    assert PosLSHConfig.from_dict(ours.pop("poslsh")) == METHOD
    assert ours.pop("model_type") == f"poslsh_{host.pop('model_type')}"
    for fields in (host, ours):
        for name in ("architectures", "_name_or_path", "dtype", "attn_implementation"):
            fields.pop(name, None)
    assert ours == host


def test_a_loaded_model_can_be_unpatched(family, checkpoints):
    model = unpatch_model(AutoModelForCausalLM.from_pretrained(checkpoints[family]))
    host = tiny_model(family, **LIMITED[family])
    assert type(model) is type(host)
    assert type(model.config) is type(host.config)
    assert not hasattr(model.config, "poslsh")
    assert torch.equal(logits(model, IDS), logits(host, IDS))


def test_an_unpatched_model_saves_a_stock_checkpoint(family, tmp_path):
    model = tiny_model(family)
    expected = logits(model, IDS)
    with poslsh(model, METHOD):
        pass
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, HOST[family]).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, IDS), expected)
    assert "poslsh" not in (tmp_path / "config.json").read_text()


def test_fields_of_a_newer_version_are_refused(family, checkpoints, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoints[family]).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["poslsh"]["novelty"] = 1
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="novelty"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_in_another_dtype_keeps_the_masks(family, checkpoints, expected, dtype):
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=dtype)
    assert model.dtype is dtype
    error = (logits(model, IDS).float() - expected[family]).abs().mean()
    assert error < 0.05 * expected[family].abs().mean()


HEADS = [
    (family, auto)
    for family in ("mistral", "qwen3")
    for auto in (
        "AutoModel",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
    )
] + [("llama4", "AutoModel")]


@pytest.mark.parametrize(("family", "auto"), HEADS)
def test_every_head_saves_and_loads(family, auto, tmp_path):
    auto_class = getattr(transformers, auto)
    config = tiny_model(family, num_labels=3).config
    torch.manual_seed(0)
    model = patch_model(auto_class.from_config(config).eval(), sigma=SIGMA)
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(IDS)[0], model(IDS)[0])
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"].keys() == {"AutoConfig", auto}


def test_tied_embeddings_stay_tied(family, tmp_path):
    model = patch_model(tiny_model(family, tie_word_embeddings=True), sigma=SIGMA)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def tiny_tokenizer():
    words = {f"w{i}": i for i in range(99)}
    core = Tokenizer(WordLevel(words, unk_token="w2"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", bos_token="w1", unk_token="w2")


def test_pipeline_and_tokenizer_of_a_checkpoint(family, checkpoints, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoints[family])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    texts = ["w5 w7 w9", "w11 w4 w8 w30 w12 w6"]
    options = {"max_new_tokens": 8, "do_sample": False}
    batched = generator(texts, batch_size=2, return_full_text=False, **options)
    for text, answer in zip(texts, batched, strict=True):
        row = torch.tensor([tokenizer(text)["input_ids"]])
        expected = model.generate(row, **options)[0, row.shape[1] :]
        assert answer[0]["generated_text"].split() == tokenizer.decode(expected).split()


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_auto_tables_know_what_the_host_has(family):
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as tokenizers

    for names in (lora, tokenizers):
        assert names[f"poslsh_{family}"] == names[family]


def test_no_class_bears_a_name_of_transformers():
    """transformers finds tokenizers, heads and quantizers by ``__name__``: an equal name would get the stock ones."""
    ours = [made for family in families.FAMILIES for made in family.classes.values()]
    assert len(ours) > 12
    for made in ours:
        assert not hasattr(transformers, made.__name__)
        assert made.__module__ == "hf_poslsh.models.families"


def test_layer_types_do_not_turn_a_mistral_into_something_else(tmp_path):
    """Of a config.json of "mistral" that has layer_types, transformers makes another model, which obeys them."""
    model = tiny_model("mistral", sliding_window=5, layer_types=["full_attention", "sliding_attention"])
    before = logits(model, IDS)
    model.save_pretrained(tmp_path / "stock")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(converted).__name__ == "MinistralForCausalLM"
    assert not torch.allclose(logits(converted, IDS), before, atol=1e-3)
    with pytest.raises(ValueError, match=r"MinistralForCausalLM; supported .* MistralForCausalLM"):
        patch_model(converted)
    patch_model(model, bias="none")
    torch.testing.assert_close(logits(model, IDS), before)
    model.save_pretrained(tmp_path / "patched")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
