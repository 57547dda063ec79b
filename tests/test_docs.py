"""Every block of code in README and docs runs as printed, or is checked as the tables here say and why."""

import ast
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_server import connected
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_poslsh.testing import tiny_model

try:
    import tomllib
except ImportError:  # Python 3.10: pip's own copy
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
from experiment.arms import poslsh_config  # noqa: E402
from experiment.settings import load_settings  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:```|~~~)(\w*)\n(.*?)^(?:```|~~~)$", re.MULTILINE | re.DOTALL)
# Names of the Hub that the pages use, and the family of the tiny model that lies in a folder of that name here.
STAND_INS = {"mistralai/Mistral-7B-v0.3": "mistral", "Qwen/Qwen3-0.6B": "qwen3"}
# Pages whose blocks change the process for good: they run in one of their own.
OWN_PROCESS = {"docs/families.md": "registers a model family"}
LANGUAGES = {"python", "sh", "text", "yaml", "toml"}


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)) + 1, match.group(2))
        for match in FENCE.finditer(text)
        if match.group(1) == language
    ]


def name_of(page):
    return str(page.relative_to(ROOT))


def pages_with(language):
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks(page, language)]


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A folder in which the Hub's names are folders with tiny checkpoints, so that the real loading code runs."""
    folder = tmp_path_factory.mktemp("hub")
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=2)}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": 1, **letters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")
    for name, family in STAND_INS.items():
        tiny_model(family, vocab_size=len(fast)).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


@pytest.fixture
def workplace(hub, tmp_path, monkeypatch):
    for name in STAND_INS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.symlink(hub / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    """A block without a language, or in an unknown one, would escape the tests below."""
    languages = {match.group(1) for match in FENCE.finditer(page.read_text(encoding="utf-8"))}
    assert languages <= LANGUAGES
    assert not re.search(r"\n\n    \S", FENCE.sub("", page.read_text(encoding="utf-8"))), (
        "an indented block; fence it"
    )


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page, workplace):
    """The blocks of a page tell one story: they run in order and share their names."""
    code = [("\n" * (line - 1)) + block for line, block in blocks(page, "python")]
    if name_of(page) in OWN_PROCESS:
        script = "\n".join(f"exec(compile({part!r}, {name_of(page)!r}, 'exec'))" for part in code)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return
    namespace = {"__name__": "page"}
    with connected(workplace / "cache") if name_of(page) == "docs/hub.md" else nullcontext():
        for part in code:
            exec(compile(part, name_of(page), "exec"), namespace)


# What a shell command of the pages is checked for, by its first words. None is run here, because each takes minutes,
# installs something, or is run by the test that is named.
COMMANDS = {
    "python3 -m venv": "made by .ci/run, which takes the README's own command",
    "pip install": "needs a registry; its extras and files are checked",
    "python -m pytest": "is this; its paths are checked",
    "accelerate launch": "minutes; script, options, config and overrides are checked; test_recipes_run.py runs it",
    "python recipes/": "the same",
    "python docs/figures.py": "test_the_figures_are_those_of_the_script",
    "python -m lm_eval": "another project's, for checkpoints of any name",
    "mkdocs": "run by .ci/run",
    "bash .ci/": "runs the tests",
    "pre-commit": "runs ruff and mypy, as .ci/run does",
    "ruff": "run by .ci/run",
    "mypy": "run by .ci/run",
    "git clone": "needs the repository's address",
    "cd": "a folder",
    "hf-poslsh": "its arguments are checked by test_cli.py",
}


def commands(page):
    for _, block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.partition(" # ")[0].split("&&"):
                words = [word.removeprefix(".venv/bin/") for word in shlex.split(command)]
                if words:
                    yield words


@pytest.mark.parametrize("page", pages_with("sh"))
def test_shell_blocks_name_what_exists(page):
    for words in commands(page):
        line = " ".join(words)
        assert any(line.startswith(known) for known in COMMANDS), f"no check for: {line}"
        if line.startswith("pip install"):
            check_install(words[2:])
        elif line.startswith(("accelerate launch", "python recipes/")):
            check_recipe(words)
        elif line.startswith(("python -m pytest", "bash", "python docs")):
            paths = [word for word in words[1:] if "/" in word]
            assert all((ROOT / path.partition("::")[0]).exists() for path in paths), line


def check_install(words):
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for word in words:
        asked = re.fullmatch(r"(?:\.|hf-poslsh)\[([\w,]+)\]", word)
        if asked:
            assert set(asked.group(1).split(",")) <= set(extras)
        else:
            known = word in {"-q", "-U", "-c", "-e", ".", "hf-poslsh", "pre-commit"}
            assert known or (ROOT / word).exists(), word


def check_recipe(words):
    at = next(index for index, word in enumerate(words) if word.startswith("recipes/") and word.endswith(".py"))
    if "--config_file" in words[:at]:
        assert (ROOT / words[words.index("--config_file") + 1]).exists()
    script = (ROOT / words[at]).read_text(encoding="utf-8")
    options = [word for word in words[at + 1 :] if word.startswith("--")]
    for option in options:
        field = option.removeprefix("--")  # HfArgumentParser makes options of a dataclass's fields
        assert re.search(rf'"{option}"|^    {field}: ', script, re.MULTILINE), f"{words[at]} {option}"
    if "--config" in words:
        assert (ROOT / words[words.index("--config") + 1]).exists()
    settings = script + (ROOT / "recipes" / "experiment" / "settings.py").read_text(encoding="utf-8")
    for option, value in itertools.pairwise(words):
        if option == "--set":
            for key in value.partition("=")[0].split("."):
                assert re.search(rf"^    {key}: ", settings, re.MULTILINE), f"{value} in {' '.join(words)}"


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_blocks_are_settings_of_the_recipes(page, tmp_path):
    """Each block stands in for the keys of the same name of a config that ships."""
    demo = yaml.safe_load((ROOT / "recipes" / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    for _, block in blocks(page, "yaml"):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**demo, **yaml.safe_load(block)}), encoding="utf-8")
        for arm in load_settings(tmp_path / "config.yaml").arms:
            poslsh_config(arm)


def fragments(node):
    """A regular expression for the text of a string or f-string, or None for other expressions."""
    if isinstance(node, ast.Constant):
        return re.escape(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+?" for part in node.values)
    return None


def test_quoted_errors_are_those_of_the_code():
    """An error is found here only if its fixed words are the code's; variable parts may be anything."""
    sources = [*(ROOT / "hf_poslsh").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    patterns = [
        pattern
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (pattern := fragments(node)) and len(re.sub(r"\.\+\?|\\", "", pattern)) > 20
    ]
    quoted = [" ".join(block.split()) for _, block in blocks(ROOT / "docs" / "errors.md", "text")]
    assert len(quoted) > 20
    known = [re.compile(pattern) for pattern in patterns]
    unknown = [message for message in quoted if not any(pattern.fullmatch(message) for pattern in known)]
    assert not unknown


@pytest.mark.parametrize("page", [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")])
def test_links_and_pictures_exist(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert all((page.parent / target).exists() for target in local if target), local


def test_the_figures_are_those_of_the_script(tmp_path, monkeypatch):
    from matplotlib import image

    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path)])
    figures.main()
    committed = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert [path.name for path in committed] == sorted(path.name for path in tmp_path.glob("*.png"))
    for path in committed:
        old, new = image.imread(path), image.imread(tmp_path / path.name)
        assert old.shape == new.shape
        assert np.abs(old - new).mean() < 0.01  # fonts differ between releases of matplotlib
