"""The GGUF file of a tiny Llama, written here as llama.cpp's converter does, read back as a Mistral."""

import json
import sys

import gguf
import pytest
import smollm2
import torch
from experiment.corpus import train_tokenizer
from experiment.sources import Text
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="session")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).eval()


@pytest.fixture(scope="session")
def tokenizer():
    text = "It is a truth universally acknowledged, in 1813 as in 2026.\n" * 3
    words = " ".join(f"{first}{second}ing" for first in "bcdfghjk" for second in ("a", "ee", "oo"))
    return train_tokenizer([Text("text", text + words)], 300)


@pytest.fixture(scope="session")
def file(llama, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config, writer = llama.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    special = [gguf.TokenType.CONTROL if index == 0 else gguf.TokenType.NORMAL for _, index in vocabulary]
    writer.add_token_types(special)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    state = llama.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"].numpy()
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            if heads is not None:  # the two halves of each head interleaved
                weight = weight.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_model_of_a_gguf_file_computes_what_the_original_does(llama, file):
    model, _ = smollm2.read(file)
    assert type(model).__name__ == "MistralForCausalLM"
    assert model.config.sliding_window is None
    ids = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, llama(ids).logits, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_its_tokenizer_splits_digits_and_is_lossless(tokenizer, file, tmp_path):
    smollm2.read(file)[1].save_pretrained(tmp_path)
    read = type(tokenizer).from_pretrained(tmp_path)
    text = "a truth acknowledged  in 1813,\n\n café 世界"
    ids = read(text)["input_ids"]
    assert read.decode(ids) == text
    tokens = read.convert_ids_to_tokens(ids)
    assert [token for token in tokens if any(letter.isdigit() for letter in token)] == ["1", "8", "1", "3"]
    assert read("a truth acknowledged")["input_ids"] == tokenizer("a truth acknowledged")["input_ids"]
    assert read.eos_token == "<|endoftext|>"


def test_the_command_writes_a_checkpoint_or_says_what_is_missing(llama, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path / "out"), "--gguf", str(file)])
    smollm2.main()
    saved = smollm2.MistralForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(saved.lm_head.weight, llama.lm_head.weight)
    with pytest.raises(SystemExit):
        smollm2.main()
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path / "other"), "--gguf", "nowhere"])
    with pytest.raises(SystemExit):
        smollm2.main()
    assert "pip install" in capsys.readouterr().err
