"""Patching in place, giving back, and what is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from oracles import SIGMA
from test_models import CLOSE, logits, patched
from torch import nn

from hf_poslsh import PosLSHConfig, patch_model, poslsh, register_family, set_step, unpatch_model
from hf_poslsh.testing import tiny_config, tiny_model

HEADS = [
    transformers.MistralModel,
    transformers.MistralForSequenceClassification,
    transformers.MistralForTokenClassification,
    transformers.MistralForQuestionAnswering,
    transformers.Qwen3Model,
    transformers.Qwen3ForSequenceClassification,
    transformers.Qwen3ForTokenClassification,
    transformers.Qwen3ForQuestionAnswering,
    transformers.Llama4TextModel,
]


def tiny(host):
    name = host.__name__.lower()
    family = next(f for f in ("mistral", "qwen3", "llama4") if name.startswith(f))
    return tiny_model(family, model_class=host, num_labels=3)


def test_modules_parameters_names_and_hooks_stay(family, ids):
    model = tiny_model(family)
    modules, state = dict(model.named_modules()), {k: v.data_ptr() for k, v in model.state_dict().items()}
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    assert patch_model(model, sigma=SIGMA) is model
    assert dict(model.named_modules()).keys() == modules.keys()
    assert all(module is modules[name] for name, module in model.named_modules())
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == state
    assert {name for name, _ in model.named_buffers()} == {name for name, _ in tiny_model(family).named_buffers()}
    logits(model, ids)
    assert calls
    for layer in model.model.layers:
        assert type(layer.self_attn).__name__.startswith("PosLSH")
        assert not any(isinstance(value, torch.Tensor) for value in vars(layer.self_attn).values())


def snapshot(model):
    return (
        {name: type(module) for name, module in model.named_modules()},
        {name: dict(vars(module)) for name, module in model.named_modules()},
        dict(vars(model.config)),
        type(model.config),
    )


def test_unpatch_restores_everything(family, ids):
    model = tiny_model(family)
    config, expected = model.config, logits(model, ids)
    before = snapshot(model)
    patch_model(model, sigma=SIGMA, rope="drop", layers=[0], resample="step")
    set_step(model, 1)
    assert (logits(model, ids) - expected).abs().max() > 0.1
    assert unpatch_model(model) is model
    assert model.config is config
    for part, expected_part in zip(snapshot(model), before, strict=True):
        assert part == expected_part
    assert torch.equal(logits(model, ids), expected)


def test_context_manager_restores_after_an_error(family, ids):
    model = tiny_model(family)
    expected = logits(model, ids)
    with pytest.raises(RuntimeError, match="inside"), poslsh(model, PosLSHConfig(sigma=SIGMA)) as inside:  # noqa: PT012
        assert inside is model
        assert (logits(model, ids) - expected).abs().max() > 0.1
        raise RuntimeError("inside")
    assert torch.equal(logits(model, ids), expected)
    assert type(model) is type(tiny_model(family))


def test_a_second_model_is_never_touched(family, ids):
    first = tiny_model(family)
    second = type(first)(first.config).eval()  # shares the config object itself
    expected = logits(second, ids)
    patch_model(first, sigma=SIGMA)
    assert second.config._attn_implementation == "sdpa"
    assert type(second.config) is type(tiny_config(family))
    assert torch.equal(logits(second, ids), expected)


def test_a_model_can_be_patched_again_after_unpatching(family, ids):
    model = tiny_model(family)
    first = logits(patch_model(model, sigma=SIGMA), ids)
    unpatch_model(model)
    patch_model(model, sigma=SIGMA, seed=9)
    assert not torch.equal(logits(model, ids), first)
    unpatch_model(model)
    assert torch.equal(logits(patch_model(model, sigma=SIGMA), ids), first)


def test_copies_and_pickles_are_patched_and_can_be_restored(family, ids):
    model = patched(family)
    expected, host = logits(model, ids), logits(tiny_model(family), ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), expected)
        assert torch.equal(logits(unpatch_model(other), ids), host)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("host", HEADS, ids=lambda host: host.__name__)
def test_every_head(host, ids):
    model = tiny(host)
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = (ids != 0).long()

    def output(ids, mask):
        with torch.no_grad():
            return model(ids, attention_mask=mask)[0]

    before = output(ids, mask)
    patch_model(model, sigma=SIGMA, num_samples=6)
    assert type(model).__name__ == f"PosLSH{host.__name__}"
    out = output(ids, mask)
    assert (out - before).abs().max() > 0.01
    per_token = out.shape[:2] == ids.shape
    torch.testing.assert_close(out[:, 3:] if per_token else out, output(ids[:, 3:], None), **CLOSE)
    with poslsh(unpatch_model(model), bias="none"):
        full = output(ids[:, 3:], None)
    torch.testing.assert_close(full, before[:, 3:] if per_token else before, **CLOSE)
    assert torch.equal(output(ids, mask), before)


def test_classes_can_be_built_from_a_config(family, ids):
    model = patched(family)
    built = type(model)(model.config).eval()
    built.load_state_dict(model.state_dict())
    assert torch.equal(logits(built, ids), logits(model, ids))
    with pytest.raises(ValueError, match="patch_model"):
        type(model)(tiny_config(family))


def test_other_attention_is_refused(family):
    model = patched(family)
    for name in ("sdpa", "eager", "flash_attention_2", "flex_attention"):
        with pytest.raises(ValueError, match=name):
            model.set_attn_implementation(name)
        with pytest.raises(ValueError, match=name):
            model.config._attn_implementation = name
        with pytest.raises(ValueError, match=name):
            model.model.set_attn_implementation({"": name})
    model.set_attn_implementation("poslsh")


def test_a_stock_model_told_to_use_poslsh_does_not_run(family, ids):
    model = tiny_model(family)
    model.set_attn_implementation("poslsh")
    with pytest.raises(ValueError, match="patch_model"):
        logits(model, ids)


def test_patching_twice(family):
    with pytest.raises(ValueError, match="patched already"):
        patch_model(patched(family))


def test_unpatching_a_stock_model(family):
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(tiny_model(family))
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(nn.Linear(2, 2))


class OtherAttention(transformers.models.mistral.modeling_mistral.MistralAttention):
    pass


def test_an_unknown_attention_class_changes_nothing():
    model = tiny_model("mistral")
    model.model.layers[1].self_attn.__class__ = OtherAttention
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layer 1 .*OtherAttention.*MistralAttention"):
        patch_model(model)
    assert snapshot(model) == before


def test_a_replaced_forward_is_refused(family):
    model = tiny_model(family)
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="replaced on the instance"):
        patch_model(model)


class FSDPMistralForCausalLM(transformers.MistralForCausalLM):
    """The kind of class that FSDP2 makes of a model."""


def other_family():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_key_value_heads=2, **sizes))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (other_family, "LlamaForCausalLM"),
        (lambda: FSDPMistralForCausalLM(tiny_config("mistral")), "FSDPMistralForCausalLM"),
        (lambda: torch.compile(tiny_model("mistral")), "OptimizedModule"),
        (lambda: nn.DataParallel(tiny_model("mistral")), "DataParallel"),
        (lambda: nn.Linear(2, 2), "Linear"),
    ],
)
def test_other_models_are_refused_by_name(make, name):
    with pytest.raises(ValueError, match=rf"{name}.*MistralForCausalLM.*Qwen3ForCausalLM.*Llama4ForCausalLM"):
        patch_model(make())


def test_a_model_compiled_in_place_is_refused():
    model = tiny_model("mistral")
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compile"):
        patch_model(model)


@pytest.mark.parametrize(
    ("args", "fields", "message"),
    [
        ((PosLSHConfig(),), {"seed": 1}, "not both"),
        (({"seed": 1},), {}, "PosLSHConfig"),
        ((), {"layers": [2]}, "layers 0 to 1"),
        ((), {"sigma": [1.0, 2.0]}, "4 query heads"),
        ((), {"sigma": -1}, "sigma"),
    ],
)
def test_a_method_that_does_not_fit_changes_nothing(family, args, fields, message):
    model = tiny_model(family)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        patch_model(model, *args, **fields)
    assert snapshot(model) == before


def test_set_step_checks_its_arguments(family):
    with pytest.raises(ValueError, match="step"):
        set_step(patched(family, resample="step"), -1)
    with pytest.raises(ValueError, match="patched"):
        set_step(tiny_model(family), 1)


def test_accelerate_hooks_are_kept(family, ids):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    expected, host = logits(patched(family), ids), logits(tiny_model(family), ids)
    model = tiny_model(family)
    for module in (model, model.model, *model.model.layers, *(layer.self_attn for layer in model.model.layers)):
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    patch_model(model, sigma=SIGMA, num_samples=6)
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(unpatch_model(model), ids), host)


def test_compiled_forward_and_backward(family, ids):
    model = patched(family).train()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    got = compiled(ids, labels=ids, use_cache=False).loss
    got.backward()
    torch.testing.assert_close(got, loss, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_gradient_checkpointing_is_bit_equal(family, ids):
    grads = []
    for reentrant in (None, False, True):
        model = patched(family, resample="step").train()
        set_step(model, 3)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model(ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other, strict=True))


def test_tiny_models_are_deterministic_and_leave_the_generator_alone(family):
    state = torch.get_rng_state()
    one, two = tiny_model(family), tiny_model(family)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with pytest.raises(ValueError, match="llama4"):
        tiny_model("gpt2")


def test_the_generator_is_never_read(family, ids):
    model = patched(family)
    state = torch.get_rng_state()
    logits(model, ids)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_family_whose_checkpoints_are_converted_is_refused():
    """transformers would leave the experts of our subclass at random values, with a warning."""
    from transformers.models.mixtral import modeling_mixtral as mixtral

    heads = {"AutoModelForCausalLM": mixtral.MixtralForCausalLM}
    with pytest.raises(ValueError, match="'mixtral' are converted while they are loaded"):
        register_family("mixtral", mixtral.MixtralConfig, mixtral.MixtralAttention, mixtral.MixtralModel, heads)


def test_the_name_of_the_model_is_kept():
    """PEFT reads it from the instance; a name given by hand counts as much as that of a checkpoint."""
    model = tiny_model("qwen3")
    model.name_or_path = "user/model"
    patch_model(model)
    assert vars(model)["name_or_path"].startswith("poslsh:user/model ")
    unpatch_model(model)
    assert model.name_or_path == "user/model"
