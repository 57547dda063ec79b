"""Scores of heads against eager attention and a head that is built to copy; the model stays as it was."""

import json

import numpy as np
import pytest
import torch
from command_line import LIMITS
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_poslsh import patch_model, probes
from hf_poslsh.probes import Probe, natural_probes, planted_probes, probe_masses
from hf_poslsh.retrieval import RetrievalScores, heads_for_share, retrieval_scores
from hf_poslsh.testing import tiny_model

LENGTH = 240
FULL = {"mistral": {"sliding_window": LENGTH}, "qwen3": LIMITS["qwen3"], "llama4": LIMITS["llama4"]}
SCORES = RetrievalScores(
    np.array([[0.1, 0.5], [0.5, 0.2], [0.9, 0.1]]), np.array([[0.6, 0.5], [0.4, 0.3], [0.2, 0.1]]), {"seed": 3}
)


def model_of(family, **overrides):
    return tiny_model(family, vocab_size=260, **overrides)


def eager_masses(model, probe):
    """From the n x n weights of the host's own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.tensor(probe.ids)[None], output_attentions=True).attentions
    model.set_attn_implementation(before)
    masses = np.zeros((2, 2))
    for layer, weights in enumerate(attentions):
        by_head = [
            np.mean([w[row, targets].sum() for row, targets in zip(probe.rows, probe.targets, strict=True)])
            for w in weights[0].double().numpy()
        ]
        masses[layer] = [max(by_head[:2]), max(by_head[2:])]  # of 4 query heads, 2 share a KV head
    return masses


@pytest.mark.parametrize("limits", [FULL, {family: {} for family in FULL}], ids=["limits", "full"])
def test_scores_are_the_masses_of_eager_attention(family, limits, tokenizer):
    model = model_of(family, **limits[family])
    scores = retrieval_scores(model, tokenizer, length=LENGTH, prompts=2, seed=1)
    for kind, make in (("planted", planted_probes), ("natural", natural_probes)):
        expected = np.mean([eager_masses(model, probe) for probe in make(tokenizer, LENGTH, 2, 1)], 0)
        assert (expected[1] > 1e-4).all()  # the second layer sees all
        assert scores.of(kind).dtype == np.float64
        np.testing.assert_allclose(scores.of(kind), expected, atol=2e-6)


def test_rows_under_windows_and_chunks_and_the_model_s_output(family, tokenizer, monkeypatch):
    monkeypatch.setattr(probes, "_ROWS", 16)
    model = model_of(family, **LIMITS[family])
    ids = np.random.default_rng(0).integers(1, 260, 100)
    rows = np.array([3, 45, 61, 79, 99])
    outputs = []
    with torch.no_grad():
        outputs.append(model.model(torch.tensor(ids)[None]).last_hidden_state)
    model.model.register_forward_hook(lambda module, args, output: outputs.append(output.last_hidden_state))
    probe = Probe(ids, rows, np.stack([rows - 2, np.maximum(rows - 50, 0)], 1))
    np.testing.assert_allclose(probe_masses(model.model, probe), eager_masses(model, probe), atol=2e-6)
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-4)
    beyond = Probe(ids, rows[-1:], np.array([[10]]))
    assert (probe_masses(model.model, beyond)[0] == 0).all()


def test_a_head_that_copies_is_ranked_first(tokenizer):
    """In the second layer of Llama-4, without RoPE, head 1's keys say a token and its query the token to come."""
    model = model_of("llama4")
    codes = torch.nn.functional.normalize(torch.randn(260, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    seen = {}
    attention = model.model.layers[1].self_attn
    model.model.register_forward_pre_hook(lambda m, a, k: seen.update(ids=k["input_ids"][0]), with_kwargs=True)

    def ask(module, args, output):
        output[0, :, 16:24] = 100 * codes[seen["ids"].roll(-1)]  # query head 2, which reads KV head 1
        return output

    def say(module, args, output):
        output[0, :, 8:16] = codes[seen["ids"]]
        return output

    attention.q_proj.register_forward_hook(ask)
    attention.k_proj.register_forward_hook(say)
    scores = retrieval_scores(model, tokenizer, length=LENGTH, prompts=3)
    for kind in ("planted", "natural"):
        (layer, head, best), (_, _, second), *_ = scores.ranking(kind)
        assert (layer, head) == (1, 1)
        assert best > 0.4 > 2 * second


def test_planted_rows_predict_the_planted_digits(tokenizer):
    found = planted_probes(tokenizer, LENGTH, 4, 7)
    starts = []
    for probe, key in zip(found, np.random.default_rng(7).integers(10_000, 100_000, 4), strict=True):
        assert len(probe.ids) == LENGTH - 1
        assert probe.rows[-1] == LENGTH - 2
        assert tokenizer.decode(probe.ids[probe.rows[1:]]) == str(key)[:-1]  # a row's own token is the digit before
        assert probe.targets.shape == (5, 5)
        assert {tokenizer.decode(probe.ids[row]) for row in probe.targets} == {str(key)}
        starts.append(probe.targets[0, 0])
    assert np.ptp(np.diff(starts)) <= 2  # the depths are evenly spread
    assert starts[0] < LENGTH / 4 < LENGTH / 2 < starts[3]


def test_natural_rows_repeat_what_stands_before_their_targets(tokenizer):
    text = "".join(chr(33 + (7 * i * i + i // 9) % 90) for i in range(400))
    random = natural_probes(tokenizer, LENGTH, 3, 0)
    told = natural_probes(tokenizer, LENGTH, 3, 0, [text[:150], text[150:]])
    for probe in (*random, *told):
        assert len(probe.ids) == LENGTH
        assert probe.ids[0] == tokenizer.bos_token_id
        assert (probe.ids[probe.rows] == probe.ids[probe.targets[:, 0] - 1]).all()
        assert (probe.rows - probe.targets[:, 0] == LENGTH - 30 - 2).all()
        assert len(probe.rows) == 29
        assert probe.rows[-1] == LENGTH - 2  # the last position's successor is not in the passage
    assert not set(random[0].ids[1:]) & set(tokenizer.all_special_ids)
    assert (random[0].ids != random[1].ids).any()
    body = LENGTH - 1 - 30
    places = [0, (400 - body + 1) // 2, 400 - body]
    assert [tokenizer.decode(probe.ids[1 : 1 + body]) for probe in told] == [text[p : p + body] for p in places]
    assert len(natural_probes(tokenizer, 4000, 1, 0)[0].rows) == 64


def test_the_same_seed_gives_the_same_scores_and_another_another(tokenizer):
    model = model_of("qwen3")
    first, again, other = (retrieval_scores(model, tokenizer, length=LENGTH, seed=s).to_dict() for s in (0, 0, 1))
    assert first == again
    assert first["planted"] != other["planted"]
    assert first["natural"] != other["natural"]
    text = retrieval_scores(model, tokenizer, length=LENGTH, texts=["What is it? " * 60]).to_dict()
    assert text["planted"] == first["planted"]
    assert text["natural"] != first["natural"]
    assert first["settings"] == {
        "model": "", "dtype": "float32", "length": LENGTH, "prompts": 4, "seed": 0, "texts": None
    }  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(family, tokenizer, fails):
    model = model_of(family).train()
    model.lm_head.eval()
    model.set_attn_implementation("eager")

    def state():
        functions = dict(ALL_ATTENTION_FUNCTIONS)
        random = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
        training = [module.training for module in model.modules()]
        return functions, model.config._attn_implementation, model.config.to_dict(), random, training

    def stop(done, total):
        calls.append((done, total))
        if fails and done == 2:
            raise KeyboardInterrupt

    calls, before = [], state()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            retrieval_scores(model, tokenizer, length=LENGTH, on_prompt=stop)
    else:
        retrieval_scores(model, tokenizer, length=LENGTH, prompts=2, on_prompt=stop)
        assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert state() == before


def test_an_error_inside_of_a_layer_leaves_nothing_behind(tokenizer, monkeypatch):
    model, names = model_of("mistral"), list(ALL_ATTENTION_FUNCTIONS)
    monkeypatch.setattr(probes, "_attend", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retrieval_scores(model, tokenizer, length=LENGTH)
    assert list(ALL_ATTENTION_FUNCTIONS) == names
    assert model.config._attn_implementation == "sdpa"


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most numbers in any tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_memory_grows_linearly(family, tokenizer):
    model = model_of(family, max_position_embeddings=8192, **LIMITS[family])
    largest = []
    for length in (2048, 4096):
        (probe,) = natural_probes(tokenizer, length, 1, 0)
        with Largest() as mode:
            probe_masses(model.model, probe)
        largest.append(mode.numbers)
        assert mode.numbers < length**2 / 2
    assert largest[1] <= 2 * largest[0]


def test_parts_and_adapters_of_a_model_have_its_scores(tokenizer):
    from peft import LoraConfig, get_peft_model

    model = model_of("mistral")
    scores = retrieval_scores(model, tokenizer, length=LENGTH, prompts=1).to_dict()
    assert retrieval_scores(model.model, tokenizer, length=LENGTH, prompts=1).to_dict() == scores
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    assert retrieval_scores(adapted, tokenizer, length=LENGTH, prompts=1).planted.tolist() == scores["planted"]


def test_ranking_breaks_ties_by_layer_and_head():
    assert SCORES.ranking() == [(2, 0, 0.9), (0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.2), (0, 0, 0.1), (2, 1, 0.1)]
    assert SCORES.ranking("natural")[0] == (0, 0, 0.6)


def test_scores_survive_json():
    again = RetrievalScores.from_dict(json.loads(json.dumps(SCORES.to_dict())))
    assert again.to_dict() == SCORES.to_dict()
    assert again.ranking() == SCORES.ranking()
    assert again.settings == {"seed": 3}


def test_heads_for_share_are_the_best_by_layer():
    assert heads_for_share(SCORES, 0.1) == ((), (), (0,))
    assert heads_for_share(SCORES, 0.5) == ((1,), (0,), (0,))
    assert heads_for_share(SCORES, 0.5, "natural") == ((0, 1), (0,), ())
    assert heads_for_share(SCORES, 1) == ((0, 1),) * 3


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=8, n_layer=1, n_head=2))


def replaced():
    model = model_of("qwen3")
    model.model.layers[1].self_attn = torch.nn.Identity()
    return model


def overflowing():
    model = model_of("qwen3")
    model.model.layers[1].self_attn.q_norm.weight.data.fill_(torch.inf)
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: patch_model(model_of("qwen3")), {}, "Qwen3ForCausalLM is patched.*call unpatch_model"),
        (lambda: patch_model(model_of("qwen3").model), {}, "Qwen3Model is patched"),
        (gpt2, {}, "heads of a GPT2LMHeadModel; supported are exactly MistralForCausalLM"),
        (replaced, {}, "layer 1 has attention Identity.* exactly Qwen3Attention: undo"),
        (overflowing, {}, "layer 1 is not finite in torch.float32; load the model in"),
        (lambda: model_of("mistral", sliding_window=100), {}, "length is 240.* more than 100 tokens.* at most 100"),
        (
            lambda: model_of("llama4", attention_chunk_size=90, layer_types=["chunked_attention"] * 2),
            {},
            "no layer of this llama4_text model sees more than 90 tokens",
        ),
        (model_of, {"length": 60}, "length is 60; with this tokenizer a passkey prompt needs at least 69"),
        (model_of, {"length": 600}, "length is 600, but the positions of this qwen3 model cover 512 tokens"),
        (model_of, {"length": 2.5}, "length is 2.5; give a whole number, 2 or larger"),
        (model_of, {"prompts": 0}, "prompts is 0; give a whole number, 1 or larger"),
        (model_of, {"prompts": True}, "prompts is True"),
        (model_of, {"seed": -1}, "seed is -1; give a whole number, 0 or larger"),
        (model_of, {"texts": ["too", " short"]}, "the texts have 9 tokens; prompts of length 240 need at least 209"),
        (model_of, {"texts": []}, "the texts have 0 tokens"),
        (model_of, {"texts": "a string"}, "texts is one string; give a list"),
    ],
)
def test_what_cannot_be_scored_is_named(tokenizer, model, arguments, message):
    subject = model("qwen3") if model is model_of else model()
    with pytest.raises(ValueError, match=message):
        retrieval_scores(subject, tokenizer, **{"length": LENGTH, **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SCORES.ranking("best"), "kind is 'best'; choose 'planted' or 'natural'"),
        (lambda: heads_for_share(SCORES, 0), "share is 0; it must be above 0 and at most 1"),
        (lambda: heads_for_share(SCORES, 1.5), "share is 1.5; it must be"),
        (lambda: heads_for_share(SCORES, float("nan")), "share is nan"),
        (lambda: heads_for_share(SCORES, True), "share is True"),
        (lambda: heads_for_share(SCORES, 0.05), "less than one of the model's 6 KV heads; give at least 0.167"),
        (lambda: RetrievalScores(np.zeros((2, 2)), np.zeros((2, 3))), r"shapes \(2, 2\) and \(2, 3\)"),
        (lambda: RetrievalScores(np.zeros(2), np.zeros(2)), r"shape \(layers, kv_heads\)"),
        (lambda: RetrievalScores.from_dict({"planted": [[1]]}), "no natural; give what RetrievalScores.to_dict"),
    ],
)
def test_bad_scores_and_shares_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
