"""EleutherAI's lm-evaluation-harness on a saved checkpoint: it runs our attention and finds our scores."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_poslsh import PosLSHConfig, patch_model
from hf_poslsh.evaluation import Window, encode_document, score_windows
from hf_poslsh.testing import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is not installed (pip install lm-eval); its forty dependencies are not among the tests'",
    ),
]

QUESTIONS = [("It was a", " dark and stormy night"), ("She had", " no money"), ("The end", ".")]
TASK = """
task: local_endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
COMMAND = "python -m lm_eval run --model hf --model_args pretrained=CHECKPOINT,trust_remote_code=True --tasks TASK"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    model = patch_model(tiny_model("mistral", vocab_size=257), PosLSHConfig(num_samples=4, sigma=4.0, rope="drop"))
    model.save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / "local_endings.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    expected = []
    for question, answer in QUESTIONS:
        document = encode_document(tokenizer, question + answer)
        window = Window(0, 0, len(document) - 1, len(answer))
        expected.append(-score_windows(model, [document], [window]).nll.sum())
    return folder, expected


def test_its_command_line_finds_our_log_likelihoods(folder):
    """A process of its own: its start takes most of the time. The package is found by the checkpoint's shim alone."""
    folder, expected = folder
    docs = (Path(__file__).parent.parent / "docs/evaluation.md").read_text()
    assert COMMAND in docs
    words = COMMAND.replace("CHECKPOINT", "checkpoint").replace("TASK", "local_endings").split()[1:]
    options = ["--include_path", folder, "--output_path", folder / "out", "--log_samples", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *words, *map(str, options)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "out").rglob("samples_*.jsonl")
    samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert [float(sample["filtered_resps"][0][0]) for sample in samples] == pytest.approx(expected, rel=1e-4)


def test_it_takes_a_model_patched_in_memory(folder):
    """No shim is needed where the package is imported. Minutes on a busy machine, most of it imports."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, expected = folder
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=question, idx=index)
        for index, question in enumerate(QUESTIONS)
    ]
    scores = [score for score, _ in harness.loglikelihood(requests)]
    assert scores == pytest.approx(expected, rel=1e-4)
