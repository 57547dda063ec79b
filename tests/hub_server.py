"""A Hugging Face Hub of a few kilobytes: the endpoints that huggingface_hub uses, over real HTTP, on loopback.

It keeps commits in memory, stores large files apart (LFS, no Xet), and can be told to fail. What it refuses, it
refuses because the real Hub does: wrong tokens, metadata that is not valid, objects that were never uploaded.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants, hf_api

TOKEN, USER = "hf_of_the_tests", "user"
LARGE = (".safetensors", ".png", ".bin")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
LICENSES = {"apache-2.0", "mit", "other"}


class Refused(Exception):
    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def not_found(what):
    """``Repo``, ``Revision`` or ``Entry``."""
    return Refused(404, f"{what} not found", f"{what}NotFound")


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def metadata_of(readme):
    """The head of a card, None where there is none that is YAML."""
    match = re.match(r"---\n(.*?)\n---\n", readme, re.DOTALL)
    try:
        return yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return None


class Repo:
    """Commits, oldest first, each the whole content: path to bytes, or to the sha256 of a large file."""

    def __init__(self, private):
        self.private, self.commits, self.branches = private, [], {}
        self.commit("main", {".gitattributes": b""})

    def commit(self, branch, files):
        digest = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(files)}".encode()).hexdigest()
        self.commits.append((digest, files))
        self.branches[branch] = digest
        return digest

    def at(self, revision):
        """The commit's name and files."""
        oid = self.branches.get(revision, revision)
        for digest, files in self.commits:
            if digest == oid:
                return digest, files
        raise not_found("Revision")


class Hub:
    """The server: ``with Hub() as hub``.

    ``hub.repos`` holds what was pushed; ``hub.requests`` is a list of (method, path); ``hub.fail(method, pattern,
    status, times)`` makes the next matching requests fail.
    """

    def __init__(self):
        self.repos, self.objects, self.requests, self.failures = {}, {}, [], []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.storage_url = f"http://localhost:{self._server.server_port}/storage"  # another host, as the real one's

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def fail(self, method, pattern, status, times=1000):
        self.failures.append([method, re.compile(pattern), status, times])

    def files(self, repo_id, revision="main"):
        """Path to bytes, large files included."""
        files = self.repos[repo_id].at(revision)[1]
        return {path: self.objects[f] if isinstance(f, str) else f for path, f in files.items()}

    def put(self, repo_id, files, deleted=()):
        """Edits a repository as a person would in the browser."""
        repo = self.repos.setdefault(repo_id, Repo(private=False))
        kept = {path: f for path, f in repo.at("main")[1].items() if path not in deleted}
        repo.commit("main", {**kept, **{path: text.encode() for path, text in files.items()}})

    def environment(self, home, token=TOKEN):
        """Variables for a process that shall see this Hub and nothing else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


@contextmanager
def connected(cache):
    """A Hub that this process talks to, as if it had been started with ``environment``."""
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(hf_api.api, "endpoint", hub.url)
        patch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made on first use
        patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?(?P<path>.*)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/storage/(?P<oid>\w+)", "store"),
        ("POST", r"/verify", "verify"),
        ("HEAD|GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("HEAD|GET", r"/storage/(?P<oid>\w+)", "fetch"),
    )

    def handle_request(self):
        path = urlsplit(self.path).path
        body = self._body()
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            try:
                self._fail_if_told(path)
                for methods, pattern, name in self.ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in methods.split("|"):
                        groups = {key: unquote(value or "") for key, value in match.groupdict().items()}
                        status, headers, content = getattr(self, name)(body, **groups)
                        break
                else:
                    raise not_found("Entry")
            except Refused as refused:
                headers = {"X-Error-Message": refused.message}
                if refused.code:
                    headers["X-Error-Code"] = refused.code
                status, content = refused.status, {"error": refused.message}
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def log_message(self, *_):
        pass

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _fail_if_told(self, path):
        for failure in self.hub.failures:
            method, pattern, status, times = failure
            if times and method == self.command and pattern.search(path):
                failure[3] -= 1
                raise Refused(status, f"told to fail with {status}")

    def _check_token(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid credentials in Authorization header")

    def _repo(self, name, write=False):
        repo = self.hub.repos.get(name)
        if write:
            self._check_token()
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            raise not_found("Repo")
        return repo

    def whoami(self, body):
        self._check_token()
        return 200, {}, {"type": "user", "name": USER, "orgs": [{"name": "team"}], "auth": {}}

    def validate_yaml(self, body):
        data = metadata_of(json.loads(body)["content"]) or {}
        bases = data.get("base_model", [])
        wrong = [
            f'"{key}" with value "{value}" is not valid.'
            for key, values, good in (
                ("base_model", bases, REPO_ID.fullmatch),
                ("license", data.get("license", []), LICENSES.__contains__),
                ("datasets", data.get("datasets", []), REPO_ID.fullmatch),
                ("tags", data.get("tags", []), lambda tag: isinstance(tag, str) and len(tag) < 100),
            )
            for value in ([values] if isinstance(values, str) else values)
            if not good(value)
        ]
        for model in data.get("model-index", []):
            for result in model["results"]:
                if not {"task", "dataset", "metrics"} <= set(result) or not {"type", "name"} <= set(
                    result["dataset"]
                ):
                    wrong.append('"model-index" is not valid.')
        warnings = [] if data else [{"message": "empty or missing yaml metadata in repo card"}]
        return (400 if wrong else 200), {}, {"errors": [{"message": text} for text in wrong], "warnings": warnings}

    def create(self, body):
        self._check_token()
        wanted = json.loads(body)
        owner = wanted.get("organization") or USER
        if owner not in (USER, "team"):
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}.")
        name = f"{owner}/{wanted['name']}"
        status = 409 if name in self.hub.repos else 200
        self.hub.repos.setdefault(name, Repo(wanted.get("visibility") == "private"))
        return status, {}, {"url": f"{self.hub.url}/{name}", "name": name}

    def preupload(self, body, repo, revision):
        files = self._repo(repo, write=True).at(revision)[1]
        answers = []
        for file in json.loads(body)["files"]:
            known = files.get(file["path"])
            oid = git_hash(known) if isinstance(known, bytes) else known
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {}, {"files": answers}

    def batch(self, body, repo):
        self._repo(repo, write=True)
        objects = json.loads(body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.hub.objects:
                upload, verify = f"{self.hub.storage_url}/{entry['oid']}", f"{self.hub.url}/verify"
                entry["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        return 200, {}, {"transfer": "basic", "objects": objects}

    def store(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content is not what its hash says")
        self.hub.objects[oid] = body
        return 200, {"ETag": f'"{oid}"'}, b""

    def verify(self, body):
        self._check_token()
        wanted = json.loads(body)
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refused(422, "the size is wrong")
        return 200, {}, {}

    def commit(self, body, repo, revision):
        repository = self._repo(repo, write=True)
        head, files = repository.at(revision)
        files = dict(files)
        header, *operations = (json.loads(line) for line in body.splitlines())
        if header["value"].get("parentCommit", head) != head:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile" and value["oid"] in self.hub.objects:
                files[value["path"]] = value["oid"]
            elif kind == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            else:
                raise Refused(400, f"{kind} {value['path']!r}: no such object or file")
        oid = repository.commit(revision, files)
        return 200, {}, {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid}

    def branch(self, body, repo, revision):
        repository = self._repo(repo, write=True)
        if revision in repository.branches:
            raise Refused(409, "the branch exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[revision] = repository.at(start)[0]
        return 200, {}, {}

    def info(self, body, repo, revision):
        repository = self._repo(repo)
        oid, files = repository.at(revision or "main")
        data = metadata_of(files.get("README.md", b"").decode())
        answer = {
            "id": repo,
            "modelId": repo,
            "sha": oid,
            "private": repository.private,
            "tags": (data or {}).get("tags", []),
            "pipeline_tag": (data or {}).get("pipeline_tag"),
            "siblings": [{"rfilename": path} for path in files],
        }
        return 200, {}, {**answer, **({"cardData": data} if data else {})}

    def tree(self, body, repo, revision, path):
        files = self._repo(repo).at(revision)[1]
        inside = {name: f for name, f in files.items() if name.startswith(f"{path}/" if path else "")}
        if not inside:
            raise not_found("Entry")
        entries = []
        for name, file in inside.items():
            large = isinstance(file, str)
            content = self.hub.objects[file] if large else file
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            entries.append(
                {**entry, **({"lfs": {"oid": file, "size": len(content), "pointerSize": 134}} if large else {})}
            )
        return 200, {}, entries

    def resolve(self, body, repo, revision, path):
        oid, files = self._repo(repo).at(revision)
        if path not in files:
            error = not_found("Entry")
            return 404, {"X-Error-Code": error.code, "X-Error-Message": error.message, "X-Repo-Commit": oid}, b""
        file = files[path]
        if isinstance(file, bytes):
            return 200, {"X-Repo-Commit": oid, "ETag": f'"{git_hash(file)}"'}, file
        headers = {"X-Repo-Commit": oid, "X-Linked-Etag": f'"{file}"', "Location": f"{self.hub.storage_url}/{file}"}
        return 302, {**headers, "X-Linked-Size": str(len(self.hub.objects[file]))}, b""

    def fetch(self, body, oid):
        if oid not in self.hub.objects:
            raise not_found("Entry")
        return 200, {"ETag": f'"{oid}"'}, self.hub.objects[oid]
