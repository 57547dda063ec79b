"""Makes a tiny checkpoint with random weights and a tokenizer: a stand-in for a pretrained model.

python recipes/tiny.py mistral outputs/tiny_mistral
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiment.corpus import train_tokenizer
from experiment.files import finish_folder, partial_folder
from experiment.sources import read_texts

from hf_poslsh.testing import FAMILIES, tiny_model

VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("output", help="folder to write")
    arguments = parser.parse_args()
    output = Path(arguments.output)
    partial = partial_folder(output)
    partial.mkdir(parents=True, exist_ok=True)
    train_tokenizer(read_texts(["sotu-1848-polk.txt"], None), VOCABULARY).save_pretrained(partial)
    tiny_model(arguments.family, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=0).save_pretrained(partial)
    finish_folder(output)


if __name__ == "__main__":
    main()
