"""A stand-in of the hub's HTTP interface, as far as `huggingface_hub` asks for it."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

LARGE = 1000  # files from so many bytes on are "LFS" files, which have a SHA-256


class StandIn:
    """Repositories by name: commits by revision, files by commit; and faults to play."""

    def __init__(self):
        self.repos = {}  # name -> {revision: commit}
        self.files = {}  # commit -> {path: bytes}
        self.gated, self.tokens = set(), set()
        self.cut = set()  # files whose next transfer breaks in the middle
        self.damaged = set()  # files that are sent with other bytes
        self.broken = False  # answer everything with 500
        self.asked = []  # (verb, path, range)
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                standin.answer(self, body=True)

            def do_HEAD(self):
                standin.answer(self, body=False)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name, files, revision="main"):
        """Make a commit; returns it."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        self.repos.setdefault(name, {})[revision] = commit
        self.repos[name][commit] = commit
        self.files[commit] = files
        return commit

    def answer(self, request, body):
        path = unquote(urlparse(request.path).path)
        self.asked.append((request.command, path, request.headers.get("Range")))
        if self.broken:
            return self._send(request, 500, b"{}", body)
        words = path.strip("/").split("/")
        api = words[:2] == ["api", "models"]
        name = "/".join(words[2:4] if api else words[:2])
        if name not in self.repos:
            return self._error(request, 401, "RepoNotFound", body)
        if name in self.gated and request.headers.get("Authorization") not in self.tokens:
            return self._error(request, 403, "GatedRepo", body)
        rest = words[4:] if api else words[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.repos[name].get(revision)
        if commit is None:
            return self._error(request, 404, "RevisionNotFound", body)
        files = self.files[commit]
        if not api:
            return self._send_file(request, commit, "/".join(rest[2:]), body)
        if rest[:1] == ["tree"]:
            listed = [self._entry(path, data) for path, data in files.items()]
            return self._send(request, 200, json.dumps(listed).encode(), body)
        siblings = [{"rfilename": p, "size": len(d), **self._lfs(d)} for p, d in files.items()]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
        return self._send(request, 200, json.dumps(info).encode(), body)

    def _lfs(self, data):
        if len(data) < LARGE:
            return {"blobId": hashlib.sha1(data).hexdigest()}
        sha = hashlib.sha256(data).hexdigest()
        return {"blobId": sha[:40], "lfs": {"sha256": sha, "oid": sha, "size": len(data), "pointerSize": 130}}

    def _entry(self, path, data):
        lfs = self._lfs(data)
        return {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": lfs["blobId"],
            **({"lfs": lfs["lfs"]} if "lfs" in lfs else {}),
        }

    def _send_file(self, request, commit, path, body):
        if path not in self.files[commit]:
            return self._error(request, 404, "EntryNotFound", body)
        data = self.files[commit][path]
        lfs = self._lfs(data)
        headers = {"ETag": f'"{lfs["lfs"]["sha256"] if "lfs" in lfs else lfs["blobId"]}"', "X-Repo-Commit": commit}
        status, start = 200, 0
        if body and (wanted := request.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
        sent = data[start:]
        if path in self.damaged:
            sent = sent[:-1] + bytes([sent[-1] ^ 1])
        half = len(sent) // 2 if body and path in self.cut else None
        self.cut -= {path} if body else set()
        return self._send(request, status, sent, body, headers, half)

    def _error(self, request, status, code, body):
        return self._send(request, status, b"{}", body, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, request, status, data, body, headers=None, half=None):
        request.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            request.send_header(name, str(value))
        request.end_headers()
        if body:
            request.wfile.write(data if half is None else data[:half])
        if half is not None:
            request.wfile.flush()
            request.close_connection = True
