"""A hub on this machine: as much of the Hugging Face hub's API as its client needs to look up and fetch files.

Small files are answered directly, with Git's checksum as their ETag. Large ones are redirected to another host name, as
the hub redirects to its storage, which must never see a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

LARGE = 4096  # bytes from which a file is stored as the hub stores large ones
CHUNK = 1000  # bytes that the client of a test writes at once
TOKEN = "hf_of_a_person_who_may"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")


@dataclass
class Request:
    """What the client asked for."""

    method: str
    path: str
    range: str | None
    token: str | None
    host: str


@dataclass
class Hub:
    """What the hub holds and how it misbehaves; all of it may be changed while it runs."""

    url: str
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # files are refused without TOKEN
    status: int | None = None  # answers everything with this status
    # file -> bytes after which its next answers end
    breaks: dict[str, list[int]] = field(default_factory=dict)
    stalls: bool = False  # an answer that breaks hangs instead, as a line that went dead does
    altered: set[str] = field(default_factory=set)  # files whose content arrives changed
    ignores_ranges: bool = False
    seen: list[Request] = field(default_factory=list)

    def add(self, name: str, files: Mapping[str, bytes | str | dict[str, Any]]) -> str:
        """Put a repository there; objects become JSON. Returns its commit."""
        self.repositories[name] = {
            file: json.dumps(content).encode()
            if isinstance(content, dict)
            else content.encode()
            if isinstance(content, str)
            else content
            for file, content in files.items()
        }
        return self.commit(name)

    def commit(self, name: str) -> str:
        """Changes with the content."""
        parts = [name, *(f"{file} {checksum(body)}" for file, body in self.repositories[name].items())]
        return hashlib.sha1("\n".join(parts).encode()).hexdigest()

    def asked(self, file: str, method: str = "GET") -> list[Request]:
        """Requests for the content of `file`, on whichever host: a large one is named by its checksum there."""
        names = {file, *(checksum(files[file]) for files in self.repositories.values() if file in files)}
        return [seen for seen in self.seen if seen.method == method and seen.path.rpartition("/")[2] in names]


def checksum(body: bytes) -> str:
    """As the hub declares it."""
    if len(body) >= LARGE:
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body_wanted=False)

    def do_GET(self) -> None:
        self._answer(body_wanted=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body_wanted: bool) -> None:
        path = urlsplit(self.path).path
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
        host = (self.headers.get("host") or "").partition(":")[0]
        self.hub.seen.append(Request(self.command, path, self.headers.get("range"), token, host))
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}", body_wanted)
        elif path.startswith("/storage/"):
            self._storage(path.rpartition("/")[2], body_wanted)
        elif match := _INFO.fullmatch(path):
            self._info(match["repo"], body_wanted)
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(match["repo"], match["file"], token, body_wanted)
        else:
            self._send(404, b"{}", body_wanted)

    def _info(self, name: str, body_wanted: bool) -> None:
        files = self.hub.repositories.get(name)
        if files is None:  # the hub does not tell strangers what is private and what is not there
            self._send(
                401, b'{"error": "Repository not found"}', body_wanted, {"X-Error-Code": "RepoNotFound"}
            )
            return
        siblings = []
        for file, body in files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(body), "blobId": checksum(body)}
            if len(body) >= LARGE:
                entry["lfs"] = {"sha256": checksum(body), "size": len(body), "pointerSize": 134}
            siblings.append(entry)
        data = {"_id": "0", "id": name, "modelId": name, "sha": self.hub.commit(name), "siblings": siblings}
        self._send(200, json.dumps(data).encode(), body_wanted)

    def _resolve(self, name: str, file: str, token: str | None, body_wanted: bool) -> None:
        files = self.hub.repositories.get(name)
        if files is None:
            self._send(401, b"{}", body_wanted, {"X-Error-Code": "RepoNotFound"})
        elif name in self.hub.gated and token != TOKEN:
            self._send(403 if token else 401, b"{}", body_wanted, {"X-Error-Code": "GatedRepo"})
        elif file not in files:
            self._send(404, b"{}", body_wanted, {"X-Error-Code": "EntryNotFound"})
        elif len(files[file]) >= LARGE:
            mark = checksum(files[file])
            self._send(
                302,
                b"",
                body_wanted,
                {
                    "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/storage/{mark}",
                    "X-Repo-Commit": self.hub.commit(name),
                    "X-Linked-Etag": f'"{mark}"',
                    "X-Linked-Size": str(len(files[file])),
                },
            )
        else:
            mark = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{checksum(files[file])}"'}
            self._content(file, files[file], body_wanted, mark)

    def _storage(self, mark: str, body_wanted: bool) -> None:
        every = ((file, body) for files in self.hub.repositories.values() for file, body in files.items())
        file, body = next((file, body) for file, body in every if checksum(body) == mark)
        self._content(file, body, body_wanted, {"ETag": f'"{mark}"'})

    def _content(self, file: str, body: bytes, body_wanted: bool, headers: dict[str, str]) -> None:
        if file in self.hub.altered:
            body = bytes([body[0] ^ 1]) + body[1:]
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")
        if begin is None or self.hub.ignores_ranges:
            self._send(200, body, body_wanted, headers, self._break(file, body_wanted))
            return
        first = int(begin[1])
        headers = {**headers, "Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
        self._send(206, body[first:], body_wanted, headers, self._break(file, body_wanted))

    def _break(self, file: str, body_wanted: bool) -> int | None:
        """Bytes after which this answer ends, None for an answer that is whole."""
        breaks = self.hub.breaks.get(file)
        return breaks.pop(0) if breaks and body_wanted else None

    def _send(
        self,
        status: int,
        body: bytes,
        body_wanted: bool,
        headers: Mapping[str, str] | None = None,
        ends_after: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not body_wanted:
            return
        self.wfile.write(body[:ends_after])
        if ends_after is None:
            return
        self.wfile.flush()
        while self.hub.stalls:
            time.sleep(0.05)
        self.close_connection = True


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub at 127.0.0.1 while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stalls = False
        server.shutdown()
        server.server_close()


def use_hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the hub's client of this process to `hub`, with an empty cache, nobody's token and no waiting on retries."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
