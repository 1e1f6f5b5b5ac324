"""Chromium without a window, driven through a pipe: tests of pages need nothing but the program."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """One tab, by the DevTools protocol."""

    def __init__(self, writes: int, reads: int):
        self.writes, self.reads = writes, os.fdopen(reads, "rb", buffering=0)
        self.number, self.rest, self.session = 0, b"", None
        self.errors: list[str] = []  # exceptions of scripts, and what the page's policy blocked
        (tab,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["source"] == "security":
                self.errors.append(answer["params"]["entry"]["text"])
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            got = self.reads.read(1 << 16)
            assert got, "Chromium has ended"
            self.rest += got
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 120) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script}: {self.run('document.body.innerText')}"
            time.sleep(0.02)
        return value


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a new folder."""
    to, writes = os.pipe()
    reads, out = os.pipe()

    def place() -> None:  # the protocol's numbers; both may be in use
        first, second = os.dup(to), os.dup(out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
    os.close(to), os.close(out)
    try:
        yield Browser(writes, reads)
    finally:
        process.kill()
        process.wait()
        os.close(writes)
