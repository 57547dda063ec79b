"""The command line as a program: its start, its help, its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from typer.testing import CliRunner

import hf_poslsh_cli

ROOT = Path(__file__).parent.parent
COMMANDS = ("info", "patch", "unpatch", "plan", "draw", "retrieval-heads", "demo")


def program(*arguments, **options):
    command = [sys.executable, "-m", "hf_poslsh_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **options)


def test_help_does_not_import_torch():
    code = (
        "import sys; from typer.testing import CliRunner; import hf_poslsh_cli as cli\n"
        f"for command in {[[], *([name] for name in COMMANDS)]}:\n"
        "    assert CliRunner().invoke(cli.app, [*command, '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'hf_poslsh', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_program_says_a_mistake_on_stderr_and_returns_2(tmp_path):
    done = program("info", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: there is no folder {tmp_path / 'nothing'}." in done.stderr
    assert "Traceback" not in done.stderr
    usage = program("patch", "only-one")
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "DST" in usage.stderr


def test_an_error_of_the_programs_own_returns_1(monkeypatch, host):
    monkeypatch.setattr("hf_poslsh.cli.info.inspect", lambda *arguments: 1 / 0)
    result = CliRunner().invoke(hf_poslsh_cli.app, ["info", str(host)])
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command):
    text = run(command, "--help").stdout
    assert f"  $ hf-poslsh {command}" in text
    assert "Exit status: 0 done, 2 a mistake" in text
    assert "--json" in text


def test_the_entry_point_is_the_app():
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].splitlines()[1]
    assert scripts == 'hf-poslsh = "hf_poslsh_cli:app"'
    assert hf_poslsh_cli.app.registered_commands[0].callback is hf_poslsh_cli.info


@pytest.mark.slow
def test_an_installed_wheel(tmp_path, host):
    """Builds and installs the package, which takes a minute."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=300)
    script = tmp_path / "site/bin/hf-poslsh"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HF_HUB_OFFLINE": "1"}

    def installed(*arguments):
        command = [sys.executable, script, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert installed("--help").returncode == 0
    assert installed("patch", host, "patched").returncode == 0
    assert json.loads(installed("info", "patched", "--json").stdout)["patched"] is True
    trained = installed("demo", "--train")
    assert trained.returncode == 2
    assert "repository" in trained.stderr
