"""A Hub on loopback: what huggingface_hub asks of one, and ways to go wrong.

with FakeHub() as hub:
    hub.add("owner/repo", "model.gguf", data)
    hub.cut["model.gguf"] = [1000]      # the first answer ends after 1000 bytes of its body
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    files: dict[str, bytes] = field(default_factory=dict)
    gated: int = 0  # a status: terms were not accepted
    commit: str = "a" * 40


class FakeHub:
    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.cut: dict[str, list[int]] = {}
        self.etags: dict[str, str] = {}  # lies about hashes
        self.no_range: set[str] = set()  # answers 200 to a Range
        self.status = 0  # of every answer
        self.is_closed = False
        self.redirects = False  # large files lie at another host, as they do
        self.tokens: list[tuple[str, str]] = []  # path, Authorization
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, repo: str, file: str, data: bytes) -> bytes:
        self.repos.setdefault(repo, Repo()).files[file] = data
        return data

    def gets(self, file: str) -> list[str]:
        """The ranges that were asked of a file's bytes, "" for all of it."""
        return [wanted for method, path, wanted in self.asked if method == "GET" and path.endswith(file)]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.is_closed = True  # connections that are kept alive end too
        self.server.shutdown()
        self.server.server_close()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body: bool):
        if self.hub.is_closed:
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path)
        wanted = self.headers.get("Range", "")
        self.hub.asked.append((self.command, path, wanted))
        self.hub.tokens.append((path, self.headers.get("Authorization", "")))
        if self.hub.status:
            return self._refuse(self.hub.status)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if parts[0] == "elsewhere":
            return self._file(self.hub.repos["/".join(parts[1:3])], "/".join(parts[3:]), wanted, with_body)
        repo = self.hub.repos.get("/".join(parts[:2]))
        if repo is None or parts[2:3] != ["resolve"]:
            return self._refuse(404 if "authorization" in self.headers else 401, "RepoNotFound")
        if repo.gated:
            return self._refuse(repo.gated, "GatedRepo")
        revision, file = parts[3], "/".join(parts[4:])
        if revision not in ("main", repo.commit):
            return self._refuse(404, "RevisionNotFound")
        if file not in repo.files:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
        if self.hub.redirects:
            return self._redirect(repo, "/".join(parts[:2]), file)
        self._file(repo, file, wanted, with_body)

    def _redirect(self, repo: Repo, name: str, file: str):
        data, port = repo.files[file], self.server.server_address[1]
        headers = {
            "X-Repo-Commit": repo.commit,
            "X-Linked-ETag": f'"{self.hub.etags.get(file, sha256(data))}"',
            "X-Linked-Size": str(len(data)),
            "ETag": '"of this answer"',
            "Location": f"http://localhost:{port}/elsewhere/{name}/{file}",
        }
        self._send(302, b"", headers, self.command != "HEAD")

    def _api(self, name: str, rest: list[str]):
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": path, "size": len(data), "oid": "b" * 40}
                for path, data in repo.files.items()
            ]
        else:
            listed = {"id": name, "sha": repo.commit, "siblings": [{"rfilename": f} for f in repo.files]}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: Repo, file: str, wanted: str, with_body: bool):
        data = repo.files[file]
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        if file in self.hub.no_range:
            begin = 0
        body = data[begin:]
        headers = {
            "X-Repo-Commit": repo.commit,
            "ETag": f'"{self.hub.etags.get(file, sha256(data))}"',
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cuts = self.hub.cut.get(file)
        cut = cuts.pop(0) if cuts and with_body else None
        self._send(206 if begin else 200, body, headers, with_body, cut)

    def _refuse(self, status: int, code: str = "", headers: dict | None = None):
        known = {"X-Error-Code": code} if code else {}
        self._send(status, b"{}", {**known, **(headers or {})}, self.command != "HEAD")

    def _send(self, status: int, body: bytes, headers: dict, with_body=True, cut: int | None = None):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
