"""A plugin of pytest that writes outcomes as they come:  pytest -p specdec.lab.bench.outcomes --outcomes FILE.json

The file holds how many tests ended how, the whole text of every failure, and the slowest tests. It is written after a
failure, every second, and at the end, when `complete` becomes true.

A faulty kernel can leave a process in which every later call to the device fails. Under pytest-xdist such a process
ends itself after the test, and another takes its place: one mistake is one failure.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec.lab.output import write_json

EVERY = 1.0  # seconds between two writings
SLOWEST = 25
LOST = 70  # exit code of a process that has lost its device


class Outcomes:
    """Collects the reports of all tests."""

    def __init__(self, path: Path):
        self.path, self.began, self.written = path, time.time(), 0.0
        self.outcomes: dict[str, str] = {}
        self.seconds: Any = Counter()  # of floats
        self.failures: list[dict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self._fail(report, str(report.when))
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)
        if report.failed or time.time() - self.written > EVERY:
            self.write(complete=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report, "collect")

    def _fail(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        self.outcomes[report.nodeid] = "failed"
        captured = {name: text for name, text in report.sections if text.strip()}
        self.failures.append({"test": report.nodeid, "when": when, "text": report.longreprtext} | captured)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.write(complete=True)

    def write(self, *, complete: bool) -> None:
        self.written = time.time()
        content = {
            "complete": complete,
            "counts": dict(Counter(self.outcomes.values())),
            "seconds": round(self.written - self.began, 1),
            "failures": self.failures,
            "slowest": {test: round(seconds, 2) for test, seconds in self.seconds.most_common(SLOWEST)},
        }
        write_json(self.path, content)


class Leaver:
    """Ends a worker process whose device is lost."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self.failed = False
        done = yield
        torch = sys.modules.get("torch")
        if self.failed and torch is not None and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception:  # whatever it is, a device that is well only waits
                os._exit(LOST)  # the reports have been sent; an orderly end would ask the device again
        return done


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="JSON of the outcomes of tests, written as they end")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Leaver())
    elif path is not None:
        config.pluginmanager.register(Outcomes(Path(path)))
