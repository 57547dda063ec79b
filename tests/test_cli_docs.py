"""The commands of docs/cli.md print what the page says. ``python tests/test_cli_docs.py`` writes the page anew."""

import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.image import imread
from typer.testing import CliRunner

import hf_poslsh_cli
from hf_poslsh.testing import tiny_model

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```text\n(\$ hf-poslsh.*?)^```$", re.MULTILINE | re.DOTALL)
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def make_workplace(folder):
    """What the page's commands find: the config of Qwen3-0.6B under its name, a tiny checkpoint, a damaged one."""
    (folder / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    (folder / "Qwen/Qwen3-0.6B/config.json").write_text(json.dumps(QWEN3))
    tiny_model("mistral", num_hidden_layers=3).save_pretrained(folder / "tiny-mistral")
    shutil.copytree(folder / "tiny-mistral", folder / "damaged")
    with (folder / "damaged/model.safetensors").open("r+b") as file:
        file.truncate(100_000)


def output_of(block):
    """The block again, with what its commands print now."""
    parts = []
    for line in block.splitlines():
        if line.startswith("$ hf-poslsh "):
            result = CliRunner().invoke(hf_poslsh_cli.app, shlex.split(line)[2:], prog_name="hf-poslsh")
            assert result.exit_code in (0, 2), result.exception
            printed = result.stdout + "".join(
                row for row in result.stderr.splitlines(True) if row.startswith("error")
            )
            parts.append(f"{line}\n{printed}")
    return "".join(parts)


def shown(block):
    if "$ hf-poslsh demo" in block:  # its times differ: the words must agree, and which numbers there are
        return re.sub(r"[\d.,]+(e[+-]\d+)?", "#", " ".join(block.split()))
    return block


def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_workplace(tmp_path)
    blocks = [match.group(1) for match in BLOCK.finditer((DOCS / "cli.md").read_text())]
    commands = {line.split()[2] for block in blocks for line in block.splitlines() if line.startswith("$ hf-poslsh ")}
    assert commands == {"--help", "info", "patch", "unpatch", "plan", "draw", "retrieval-heads", "demo"}
    for block in blocks:
        assert shown(output_of(block)) == shown(block)
    old, new = imread(DOCS / "draw.png"), imread("masks.png")
    assert old.shape == new.shape
    assert np.abs(old - new).mean() < 0.02  # fonts differ between releases of matplotlib


def write_page():
    page = (DOCS / "cli.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        make_workplace(Path(folder))
        os.chdir(folder)
        page = BLOCK.sub(lambda match: f"```text\n{output_of(match.group(1))}```", page)
        shutil.copyfile("masks.png", DOCS / "draw.png")
    (DOCS / "cli.md").write_text(page)


if __name__ == "__main__":
    write_page()
