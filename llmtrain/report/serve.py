"""Serves the page of active runs on the loopback interface."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmtrain.report.page import page
from llmtrain.report.run import RunReader

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
"""Hosts that requests may name. Another name may be a foreign site's that resolves to this machine."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class LivePage:
    """The page of runs, which is rendered again when the runs have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises RecipeError if a folder holds no run."""
        self._readers = [RunReader(folder) for folder in folders]
        self._lock = threading.Lock()
        self._revision, self._page = "", b""

    def now(self) -> tuple[str, bytes]:
        """Returns an identifier of the page's content, and the page."""
        with self._lock:
            runs = [reader.read() for reader in self._readers]
            stamps = [(reader.stamp, run.status) for reader, run in zip(self._readers, runs, strict=True)]
            revision = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
            if revision != self._revision:
                self._revision, self._page = revision, page(runs, revision).encode()
            return self._revision, self._page


class PageServer(ThreadingHTTPServer):
    """Answers requests for one page on the loopback interface."""

    daemon_threads = True

    def __init__(self, live: LivePage, port: int = 0) -> None:
        """port: 0 chooses a free port. Raises OSError if the port is taken."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.live = live

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports an error in the answer to a request, unless a browser has closed the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "llmtrain", ""
    timeout = 30

    def do_GET(self) -> None:
        if not HOST.fullmatch(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"this page is for 127.0.0.1 and localhost only\n")
        elif urlsplit(self.path).path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page, /\n")
        else:
            revision, content = self.server.live.now()
            is_known = self.headers.get("If-None-Match") == f'"{revision}"'
            self._answer(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK, b"" if is_known else content)

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing, because a live page sends a request every two seconds."""
