"""``verl serve``: the report of a run, or of several, live in a browser. Nothing is written into the runs.

The page asks once in a while whether anything has changed and loads itself anew then. Where the address is not this
machine's own, every request must carry a token: the first one in the address (``?token=...``), the next ones in a
cookie that this one set.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking.report import comparison_data, render, report_data, require_run

POLL_SECONDS = 5.0
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
_HEADERS |= {"Referrer-Policy": "no-referrer"}
_COOKIE = "verl_token_{}"  # browsers send the cookies of a machine to all of its ports


class ReportServer(ThreadingHTTPServer):
    """Serves ``/`` (the page of one run, or of several compared) and ``/state`` (a text that changes with the runs).
    ``port``: 0 is any that is free. ``token``: None where ``host`` is a loopback address. Raises VerlError: a folder is
    no run's, or the address cannot be used."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDir], host: str, port: int) -> None:
        self.runs = [require_run(run) for run in runs]
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.host = host
        self._made: tuple[str, str] | None = None  # state, and the page of then
        self._making = Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            fix = "choose another --port (0: any that is free; at most 65535) or --host"
            why = getattr(error, "strerror", None) or error
            raise VerlError("cannot listen at that address", f"{host}:{port} ({why})", fix) from None

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    @property
    def cookie(self) -> str:
        return _COOKIE.format(self.server_port)

    def state(self) -> str:
        """Changes whenever a file that the page is made from does."""
        files = [
            path
            for run in self.runs
            for path in (run.metrics, run.events, run.config, *(run.samples(step) for step in run.sample_steps()[-1:]))
        ]
        stats = [path.stat() for path in files if path.is_file()]
        return "-".join(f"{there.st_mtime_ns:x}.{there.st_size:x}" for there in stats)

    def page(self) -> str:
        """Made once for each state, however many look."""
        with self._making:
            state = self.state()
            if self._made is None or self._made[0] != state:
                data, groups = (comparison_data(self.runs), []) if len(self.runs) > 1 else report_data(self.runs[0])
                self._made = state, render(data | {"live": {"state": state, "seconds": POLL_SECONDS}}, groups)
            return self._made[1]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "verl", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = parse_qs(address.query).get("token", [""])[0]
        if self.server.token is None:
            # Only under a name of this machine: a foreign page must not reach it through a name of its own.
            name = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]")
            if not is_loopback(name):
                self._answer(HTTPStatus.FORBIDDEN, "This address is only for this machine.\n")
                return
        elif not any(
            hmac.compare_digest(given.encode(), self.server.token.encode()) for given in (asked, self._cookie())
        ):
            self._answer(HTTPStatus.FORBIDDEN, "Open the address that verl serve printed, with its token.\n")
            return
        if asked and self.server.token is not None and address.path == "/":
            # On to an address without the token, which would stay in histories and in what is sent as the referrer.
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(HTTPStatus.SEE_OTHER, "", Location="/", **{"Set-Cookie": cookie})
        elif address.path == "/":
            self._answer(HTTPStatus.OK, self.server.page(), "text/html")
        elif address.path == "/state":
            self._answer(HTTPStatus.OK, self.server.state())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.\n")

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain", **headers: str) -> None:
        content = text.encode()
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (_HEADERS | own | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their addresses may hold the token."""


def serve(server: ReportServer) -> None:
    """Until Ctrl-C."""
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
