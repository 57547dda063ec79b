import gc
import os
import socket
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_HERE = {"", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname()}


def refuse_network(event, arguments):
    """Audit hook: no test may leave this machine, nor learn of it by an error that a library swallows."""
    if event not in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        return
    address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
    host = address[0] if isinstance(address, tuple) else address
    local = event != "socket.getaddrinfo" and not isinstance(address, tuple)  # a Unix socket's path
    if local or host is None:
        return
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name not in _HERE and not name.startswith("127."):
        raise RuntimeError(f"a test wants the network: {event} to {name!r}.")


sys.addaudithook(refuse_network)


def drop_stale_compiled_code():
    """Numba dates compiled code by the file of the function alone, not by those of the functions that it calls."""
    package = Path(__file__).parent.parent / "hf_poslsh"
    compiled = [*package.rglob("*.nbi"), *package.rglob("*.nbc")]
    sources = [path for path in package.rglob("*.py") if "jit" in path.read_text(encoding="utf-8")]
    newest = max(path.stat().st_mtime for path in sources)
    if compiled and min(path.stat().st_mtime for path in compiled) < newest:
        for path in compiled:
            path.unlink(missing_ok=True)


if "PYTEST_XDIST_WORKER" not in os.environ:
    drop_stale_compiled_code()


import pytest  # noqa: E402
import torch  # noqa: E402
from command_line import run  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from hf_poslsh.testing import FAMILIES, tiny_model  # noqa: E402


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def settle():
    """What is alive now is left alone by the garbage collector.

    A collection takes a second per half a million objects, which torch and transformers have after their import;
    Trainer and accelerate ask for one again and again.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    settle()


def pytest_runtest_logfinish():
    settle()


@pytest.fixture
def ids():
    """Two rows of 24 tokens; 0 is the padding token and does not occur."""
    return random_ids(2, 24)


def random_ids(rows, length, seed=0):
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """Folder of a stock checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3"
    tiny_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def patched(host):
    """Folder of the same, patched by the command line."""
    folder = host.parent / "patched"
    run("patch", host, folder, "--set", "sigma=8", "--set", "num_samples=6", "--set", "layers=[1]")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Characters, after a beginning of sequence; 257 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("."), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")
