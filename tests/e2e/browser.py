"""A real Chromium without a window, spoken to over its debugging pipe: what a page shows, asks for and complains of."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


@dataclass
class Visit:
    """What was seen of a page.

    Attributes:
        complaints: errors in its console, and exceptions.
        requests: addresses that it asked for, its own left out.
    """

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """One Chromium with one page; a context manager."""

    def __enter__(self) -> Browser:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = _pipe()
        self._from, to_write = _pipe()
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
        self._process = os.posix_spawn(
            str(CHROMIUM),
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._home.name}"],
            os.environ,
            # The debugging pipe's numbers are fixed: commands are read from 3, answers written to 4.
            file_actions=[*quiet, (os.POSIX_SPAWN_DUP2, to_read, 3), (os.POSIX_SPAWN_DUP2, to_write, 4)],
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session, self.seen = b"", 0, None, Visit()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> Visit:
        """Show a page at a width, light or dark."""
        self.seen = Visit()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.as_uri())
        while self._take().get("method") != "Page.loadEventFired":
            pass
        self.seen.requests.remove(page.as_uri())
        return self.seen

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value on the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        return base64.b64decode(picture)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._take()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _take(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = dict(json.loads(text))
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, what: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.seen.requests.append(what["request"]["url"])
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.seen.complaints.append(what["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.seen.complaints.append(str(what["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.seen.complaints.append(str(what["args"]))


def _pipe() -> list[int]:
    """A pipe whose ends have large numbers, clear of those that the browser is given."""
    ends = os.pipe()
    try:
        return [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    finally:
        for end in ends:
            os.close(end)
