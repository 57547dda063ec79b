"""A patched part of a model that is not patched: refused, because what the whole saves would say nothing of it."""

import pytest
import torch
import transformers
from test_patching import snapshot
from torch import nn

from hf_poslsh import patch_model
from hf_poslsh.testing import tiny_model

HEADS = [
    transformers.MistralForCausalLM,
    transformers.MistralForSequenceClassification,
    transformers.Qwen3ForCausalLM,
    transformers.Qwen3ForTokenClassification,
    transformers.Llama4ForCausalLM,
]


def tiny(host):
    family = next(name for name in ("mistral", "qwen3", "llama4") if name in host.__name__.lower())
    return tiny_model(family, model_class=host)


@pytest.mark.parametrize("host", HEADS, ids=lambda host: host.__name__)
def test_the_base_model_inside_another_is_not_patched(host):
    model = tiny(host)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"part of a {host.__name__}.*patch_model on the {host.__name__}"):
        patch_model(model.model)
    assert snapshot(model) == before


@pytest.mark.parametrize("host", HEADS, ids=lambda host: host.__name__)
def test_a_stock_model_around_a_patched_one_saves_nothing(host, tmp_path):
    model, base = tiny(host), patch_model(tiny(type(tiny(host).model)))
    assert base.state_dict().keys() == model.model.state_dict().keys()
    model.model = base
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path / "all")):
        with pytest.raises(ValueError, match=rf"part of a {host.__name__}.*unpatched"):
            save()
    assert not list(tmp_path.rglob("*.safetensors"))
    base.save_pretrained(tmp_path / "base")
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "base")) is type(base)


def test_a_text_model_inside_a_multimodal_one_is_not_patched():
    config = transformers.Llama4Config(text_config=tiny_model("llama4").config.to_dict())
    with torch.device("meta"):
        model = transformers.Llama4ForConditionalGeneration(config)
    for part in (model.language_model, model.language_model.model):
        with pytest.raises(ValueError, match="part of a Llama4For"):
            patch_model(part)


class Embedder(nn.Module):
    """A user's own module, which has nothing to do with checkpoints of transformers."""

    def __init__(self):
        super().__init__()
        self.encoder = tiny(transformers.MistralModel)


def test_a_base_model_in_a_module_of_the_users_is_patched():
    module = Embedder()
    patch_model(module.encoder)
    assert "encoder.norm.weight" in module.state_dict()


def test_a_base_model_that_was_taken_out_of_its_head_is_patched():
    base = tiny(transformers.MistralForCausalLM).model
    assert type(patch_model(base)).__name__ == "PosLSHMistralModel"
