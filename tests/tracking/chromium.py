"""A headless Chromium for the tests, driven with the DevTools protocol over a pipe; standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def _runs(binary: str) -> bool:
    """Not so: a half-installed one, and the stand-in of some distributions that only names another package."""
    try:
        return subprocess.run([binary, "--version"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


BINARY = next((found for name in NAMES if (found := shutil.which(name)) and _runs(found)), None)

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync
    --disable-component-update --disable-default-apps --disable-extensions --disable-dev-shm-usage
    --remote-debugging-pipe
"""


class Chromium:
    """One browser with one page. Everything it logs and asks the network for is kept.

    Attributes:
        console: messages, errors and uncaught exceptions of the page since the last :meth:`open`.
        requests: addresses that the page asked for since then.
    """

    def __init__(self, profile: Path, timeout: float = 60.0) -> None:
        assert BINARY is not None
        self._timeout = timeout
        self._buffer, self._number, self._session = b"", 0, ""
        self.console: list[str] = []
        self.requests: list[str] = []
        self._loaded: set[str] = set()
        # The browser reads commands from descriptor 3 and answers on 4.
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in (command_read, answer_write)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [BINARY, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            pass_fds=(3, 4),
            start_new_session=True,
        )
        for descriptor in (command_read, answer_write, *high):
            os.close(descriptor)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(f"{method}: no answer")
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path | str, width: int = 1280, height: int = 900, **media: str) -> None:
        """Opens a file or an address and waits until it is loaded.

        ``media``: features such as ``prefers_color_scheme="dark"``.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 700)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        self.call("Page.navigate", url="about:blank")
        self.console, self.requests = [], []
        url = page if isinstance(page, str) else page.as_uri()
        loader = self.call("Page.navigate", url=url)["loaderId"]
        while loader not in self._loaded:
            self._next(f"{page} did not load")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited) in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **KEY_CODES.get(key, {}))

    def _next(self, waiting: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, f"{waiting} ({'the browser ended' if ready else 'timed out'})"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


KEY_CODES: dict[str, dict[str, Any]] = {
    "ArrowLeft": {"windowsVirtualKeyCode": 37},
    "Escape": {"windowsVirtualKeyCode": 27},
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
    " ": {"windowsVirtualKeyCode": 32, "text": " "},
}
