"""What a user of the package relies on besides the code: versions, types, names in the reference, no network."""

import importlib.metadata
import re
import socket
from pathlib import Path

import pytest
import yaml

import hf_poslsh

ROOT = Path(__file__).parent.parent


def test_the_version_has_one_home():
    """CITATION.cff cannot read it, so it is compared."""
    version = hf_poslsh.__version__
    assert importlib.metadata.version("hf-poslsh") == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def test_type_checkers_read_the_annotations():
    assert (Path(hf_poslsh.__file__).parent / "py.typed").exists()


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    missing = [name for name in hf_poslsh.__all__ if f"hf_poslsh.{name}" not in documented]
    assert not missing


def test_tests_cannot_leave_this_machine():
    with socket.socket() as connection, pytest.raises(RuntimeError, match="wants the network"):
        connection.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match="wants the network"):
        socket.getaddrinfo("example.org", 80)


def test_tests_can_talk_to_servers_of_their_own():
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
