"""``benchmark.py --decode`` on a problem of seconds."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import torch
from decode import Recorder

ROOT = Path(__file__).parent.parent


def test_decode_recipe(tmp_path):
    command = [sys.executable, "recipes/benchmark.py", "--output_dir", tmp_path, "--decode", "--decode_layers", "1"]
    command += ["--decode_positions", "64", "1700", "1800", "--decode_tokens", "1000", "--repeats", "2"]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "decode.csv").open() as file:
        rows = list(csv.DictReader(file))
    sizes = {(row["run"], row["model"], int(row["position"])): int(row["cache_bytes"]) for row in rows}
    assert len(sizes) == len(rows) == 2 * 3 + 2 * 2
    token = 2 * 8 * 128 * 4  # keys and values of 8 heads of 128 in float32
    for position in (64, 1700, 1800):
        assert sizes["step", "original", position] == (position + 3) * token
    assert sizes["step", "patched", 1800] <= 1.01 * sizes["step", "patched", 1700] < sizes["step", "original", 1700]
    assert sizes["stream", "original", 1000] == 2 * sizes["stream", "original", 500]
    assert all(float(row["step"]) > 0 for row in rows)
    assert all(float(row["attention"]) < float(row["step"]) for row in rows if row["run"] == "step")
    assert (tmp_path / "decode.md").read_text().count("\n| ") == 4
    assert (tmp_path / "decode.png").stat().st_size > 10_000


def test_a_line_of_the_stream_ends(capsys):
    """A streamer decodes the line at hand for every token: one that never ended would look like a slow model."""
    recorder = Recorder(64)
    for token in range(1, 64):
        recorder.put(torch.tensor([token]))
        assert len(recorder.token_cache) <= 17  # a release may keep the last token of the line before
    recorder.end()
    assert len(recorder.times) == 63
    assert recorder.characters == len("".join(f"w{token} " for token in range(1, 64)))
    assert capsys.readouterr().out == ""
