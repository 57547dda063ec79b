"""What patched models compute: against the unpatched model under dense masks, and against single rows."""

import numpy as np
import pytest
import torch
from conftest import random_ids
from oracles import SIGMA, NoRotation, causal, dense_logits, lsh_weights

from hf_poslsh import PosLSHConfig, alibi_slopes, patch_model, poslsh, set_step
from hf_poslsh.models.compat import CACHE_NAME
from hf_poslsh.testing import tiny_model

CLOSE = {"atol": 1e-5, "rtol": 0}


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def patched(family, *, overrides=None, **fields):
    fields = {"sigma": SIGMA, "num_samples": 6, **fields}
    return patch_model(tiny_model(family, **(overrides or {})), **fields)


def test_masks_are_those_of_the_hashes_of_each_layer_and_head(family, ids):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, seed=3)
    expected = dense_logits(tiny_model(family), ids, lsh_weights(config, 24))
    model = patch_model(tiny_model(family), config)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    assert (expected - logits(tiny_model(family), ids)).abs().max() > 0.1


def test_sink_tokens_keep_weight_one(family, ids):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=2)
    expected = dense_logits(tiny_model(family), ids, lsh_weights(config, 24))
    torch.testing.assert_close(logits(patch_model(tiny_model(family), config), ids), expected, **CLOSE)


def test_exact_alibi_has_one_slope_per_query_head(family, ids):
    distance = np.arange(24)[:, None] - np.arange(24)
    weight = np.exp(-alibi_slopes(4)[:, None, None] * distance.clip(0)) * causal(24)
    expected = dense_logits(tiny_model(family), ids, [weight] * 2)
    model = patched(family, bias="alibi", sigma="alibi", tolerance=1e-9)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)


def test_no_bias_is_the_host(family, ids):
    expected = logits(tiny_model(family), ids)
    torch.testing.assert_close(logits(patched(family, bias="none"), ids), expected, **CLOSE)
    torch.testing.assert_close(logits(patched(family, sigma=1e9), ids), expected, **CLOSE)


def test_rope_drop_is_the_host_without_rotation(family, ids):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, rope="drop")
    host = tiny_model(family)
    host.model.rotary_emb = NoRotation(host.model.rotary_emb)
    expected = dense_logits(host, ids, lsh_weights(config, 24))
    model = patch_model(tiny_model(family), config)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    assert (expected - logits(patch_model(tiny_model(family), config.replace(rope="keep")), ids)).abs().max() > 0.1


def test_rope_drop_keeps_llama4_norm_and_temperature(ids):
    overrides = {"no_rope_layers": [1, 0], "use_qk_norm": True, "floor_scale": 4, "attn_scale": 2.0}
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, rope="drop")
    host = tiny_model("llama4", **overrides)
    host.model.rotary_emb = NoRotation(host.model.rotary_emb)
    expected = dense_logits(host, ids, lsh_weights(config, 24))
    model = patched("llama4", overrides=overrides, rope="drop")
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    plain = patched("llama4", overrides={**overrides, "attn_temperature_tuning": False}, rope="drop")
    assert (logits(plain, ids) - expected).abs().max() > 0.1


@pytest.mark.parametrize("rope", ["keep", "drop"])
def test_layers_patches_only_those(family, ids, rope):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, layers=[1], rope=rope)
    host = tiny_model(family)
    weights = [causal(24), lsh_weights(config, 24)[1]]
    if rope == "drop":
        rotation = NoRotation(host.model.rotary_emb)

        def drop(module, args, kwargs):
            kwargs["position_embeddings"] = rotation(torch.zeros(1), torch.arange(24)[None])
            return args, kwargs

        host.model.layers[1].self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    expected = dense_logits(host, ids, weights)
    unpatched_class = type(host.model.layers[0].self_attn)
    model = patch_model(tiny_model(family), config)
    assert type(model.model.layers[0].self_attn) is unpatched_class
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)


def test_a_layer_of_the_host_is_computed_some_rows_at_a_time(family, ids, monkeypatch):
    """And its rows that see nothing give 0, as those of a patched layer do."""
    model = patched(family, layers=[1], overrides=LIMITED[family])
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0
    outs = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: outs.append(out[0]))
    expected = logits(model, ids, attention_mask=mask)
    monkeypatch.setattr("hf_poslsh.models.attention._HOST_ROWS", 5)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask), expected, **CLOSE)
    torch.testing.assert_close(outs[1], outs[0], **CLOSE)
    assert (outs[0][0, :9] == 0).all()
    assert outs[0][0, 9:].abs().min(-1).values.max() > 0


LIMITED = {
    "mistral": {"sliding_window": 7},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "llama4": {"attention_chunk_size": 7},
}


def limited_masks(family, n):
    """The host's own window or chunk of each layer as a mask."""
    i, j = np.arange(n)[:, None], np.arange(n)
    window, chunk = (i - j < 7) * 1.0, (i // 7 == j // 7) * 1.0
    return {"mistral": [window, window], "qwen3": [1.0, window], "llama4": [chunk, 1.0]}[family]


def test_the_hosts_window_or_chunk_is_intersected(family, ids):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6, sink_tokens=1)
    masks = limited_masks(family, 24)
    weights = [w * mask for w, mask in zip(lsh_weights(config, 24), masks, strict=True)]
    expected = dense_logits(tiny_model(family), ids, weights)
    model = patch_model(tiny_model(family, **LIMITED[family]), config)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    with poslsh(tiny_model(family, **LIMITED[family]), bias="none") as model:
        host = tiny_model(family, **LIMITED[family])
        torch.testing.assert_close(logits(model, ids), logits(host, ids), **CLOSE)


@pytest.mark.parametrize("overrides", [False, True], ids=["full", "limited"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
def test_left_padding_changes_nothing(family, ids, layers, overrides):
    model = patched(family, layers=layers, overrides=LIMITED[family] if overrides else None)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0
    padded = ids * mask
    out = logits(model, padded, attention_mask=mask)
    torch.testing.assert_close(out[0, 9:], logits(model, ids[:1, 9:])[0], **CLOSE)
    torch.testing.assert_close(out[1], logits(model, ids[1:])[0], **CLOSE)
    assert out.isfinite().all()


def test_padding_content_has_no_influence(family, ids):
    model = patched(family)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[:, :5] = 0
    mask[:, 20:] = 0
    other = torch.where(mask == 0, 7, ids)
    one, two = logits(model, ids, attention_mask=mask), logits(model, other, attention_mask=mask)
    assert torch.equal(one[:, 5:20], two[:, 5:20])


@pytest.mark.parametrize("steps", [[1] * 12, [5, 1, 6]], ids=["single", "uneven"])
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
@pytest.mark.parametrize("overrides", [False, True], ids=["full", "limited"])
def test_prefill_and_decode_equal_the_full_forward(family, ids, steps, layers, overrides):
    model = patched(family, layers=layers, overrides=LIMITED[family] if overrides else None, sink_tokens=1)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :4] = 0
    expected = logits(model, ids, attention_mask=mask, use_cache=False)
    parts, cache, at = [], None, 0
    for step in [12, *steps]:
        with torch.no_grad():
            out = model(
                ids[:, at : at + step], attention_mask=mask[:, : at + step], use_cache=True, **{CACHE_NAME: cache}
            )
        at, cache = at + step, out.past_key_values
        parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], **CLOSE)


DOCUMENTS = (7, 1, 10, 6)


def packing(form):
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    ends = torch.tensor([0, *np.cumsum(DOCUMENTS)], dtype=torch.int32)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(DOCUMENTS))[None].int()
    cu_seq_lens = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 10, "max_length_k": 10}
    return {
        "position_ids": {"position_ids": positions},
        "position_ids from 2": {"position_ids": positions + 2},
        "position_ids and ones": {"position_ids": positions, "attention_mask": torch.ones(1, 24)},
        "cu_seq_lens": cu_seq_lens,
        "seq_idx": {"seq_idx": documents},
        "all": {"position_ids": positions, "seq_idx": documents, **cu_seq_lens},
    }[form]


@pytest.mark.parametrize(
    "form", ["position_ids", "position_ids from 2", "position_ids and ones", "cu_seq_lens", "seq_idx", "all"]
)
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "hybrid"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_packed_documents_equal_single_rows(family, form, layers, train):
    model = patched(family, layers=layers, overrides=LIMITED[family]).train(train)
    row = random_ids(1, 24)
    out = logits(model, row, **packing(form))
    for part, document in zip(out[0].split(DOCUMENTS), row[0].split(DOCUMENTS), strict=True):
        torch.testing.assert_close(part, logits(model, document[None])[0], **CLOSE)
    row[0, :7] = 50  # other text in the first document
    assert torch.equal(logits(model, row, **packing(form))[0, 7:], out[0, 7:])


def test_packed_rows_continue_from_the_cache_in_the_last_document(family):
    model = patched(family, overrides=LIMITED[family])
    row = random_ids(1, 24)
    positions = packing("position_ids")["position_ids"]
    expected = logits(model, row, position_ids=positions)
    for split in (21, 12, 18):
        with torch.no_grad():
            out = model(row[:, :split], position_ids=positions[:, :split], use_cache=True)
            cache = {CACHE_NAME: out.past_key_values}
            rest = model(row[:, split:], position_ids=positions[:, split:], **cache).logits
        torch.testing.assert_close(rest, expected[:, split:], **CLOSE)


def test_gradients_are_those_of_the_dense_host(family, ids):
    config = PosLSHConfig(sigma=SIGMA, num_samples=6)
    host, model = tiny_model(family), patch_model(tiny_model(family), config)
    weights = lsh_weights(config, 24)
    for index, layer in enumerate(host.model.layers):

        def biased(module, args, kwargs, weight=weights[index]):
            kwargs["attention_mask"] = torch.as_tensor(weight).log().float()[None]
            return args, kwargs

        layer.self_attn.register_forward_pre_hook(biased, with_kwargs=True)
    for each in (host, model):
        loss = each(ids, labels=ids, use_cache=False).loss
        loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_fresh_masks_every_step_in_training_only(family, ids):
    model = patched(family, resample="step")
    fixed = patched(family)
    assert torch.equal(logits(model, ids), logits(fixed, ids))
    model.train()
    with pytest.raises(ValueError, match="set_step"):
        logits(model, ids)
    outs = []
    for step in (0, 1, 0):
        set_step(model, step)
        outs.append(logits(model, ids))
    assert torch.equal(outs[0], outs[2])
    assert (outs[0] - outs[1]).abs().max() > 0.01
    assert torch.equal(logits(model.eval(), ids), logits(fixed, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sees_the_same_masks(family, ids, dtype):
    model = patched(family)
    expected = logits(model, ids)
    got = logits(model.to(dtype), ids).float()
    assert (got - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_hidden_states_are_returned(family, ids):
    model = patched(family)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    torch.testing.assert_close(model.lm_head(states[-1]), logits(model, ids), **CLOSE)


@pytest.mark.parametrize(
    ("overrides", "train", "kwargs", "message"),
    [
        ({}, False, {"attention_mask": torch.ones(2, 1, 24, 24)}, "4-D"),
        ({}, False, {"attention_mask": {"full_attention": None}}, "dict"),
        ({}, False, {"attention_mask": torch.ones(2, 20)}, "24 tokens"),
        ({}, False, {"attention_mask": torch.ones(3, 24)}, "2 rows"),
        ({}, False, {"is_causal": False}, "is_causal"),
        ({}, False, {"cu_seq_lens_q": torch.tensor([0, 24])}, "one packed row"),
        ({}, False, {"cu_seq_lens_k": torch.tensor([0, 24])}, "cu_seq_lens_q"),
        ({"attention_dropout": 0.1}, True, {}, "attention_dropout"),
    ],
)
def test_what_would_be_ignored_is_refused(family, ids, overrides, train, kwargs, message):
    model = patched(family, overrides=overrides).train(train)
    with pytest.raises(ValueError, match=message):
        logits(model, ids, **kwargs)


def test_dropout_is_no_obstacle_in_evaluation(family, ids):
    model = patched(family, overrides={"attention_dropout": 0.1})
    assert torch.equal(logits(model, ids), logits(patched(family), ids))


def test_modules_that_are_made_bidirectional_are_refused(family, ids):
    model = patched(family)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        logits(model, ids)
    model = patched(family)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        logits(model, ids)


def test_a_share_of_the_heads_is_refused(family, ids):
    model = patched(family)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.data = attention.q_proj.weight.data[:16]
        attention.k_proj.weight.data = attention.k_proj.weight.data[:8]
        attention.v_proj.weight.data = attention.v_proj.weight.data[:8]
        attention.o_proj.weight.data = attention.o_proj.weight.data[:, :16]
    with pytest.raises(ValueError, match="2 of the model's 4 query heads"):
        logits(model, ids)


def test_no_square_tensor_is_made(family):
    model = patched(family, overrides={"max_position_embeddings": 4096}, rope="drop")
    n = 1536
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append(
                max((t.numel() for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t)), default=0)
            )
            return out

    with Watch():
        logits(model, random_ids(1, n), attention_mask=torch.ones(1, n), logits_to_keep=1)
    assert 0 < max(seen) < n * n / 8
