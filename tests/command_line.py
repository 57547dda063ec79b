"""The command line as tests call it, within this process, and what its tests share."""

import json

from typer.testing import CliRunner

import hf_poslsh_cli

LIMITS = {
    "mistral": {"sliding_window": 30},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {"attention_chunk_size": 40, "layer_types": ["chunked_attention", "full_attention"]},
}


def run(*arguments, code=0):
    """Runs ``hf-poslsh`` with these arguments; its exit status must be ``code``."""
    result = CliRunner().invoke(hf_poslsh_cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def data_of(*arguments):
    """What the command prints with ``--json``."""
    return json.loads(run(*arguments, "--json").stdout)


def error_of(*arguments):
    """What the command says of a user's mistake."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def contents(folder):
    """All files below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
