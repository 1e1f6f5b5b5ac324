"""A plugin of pytest that keeps outcomes as they come:  pytest -p specdec.lab.bench.outcomes --outcomes FILE.json

The file holds how many tests ended how, the whole text of every failure, and the slowest tests. It is written whole
after a failure, every second, and at the end; `complete` tells that the end was reached.

A kernel that goes wrong can leave a process in which every later call to the device fails. Under pytest-xdist such a
process therefore ends itself behind the test that did it, and another takes its place: one mistake is one failure.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from specdec.lab.output import write_json

EVERY = 1.0  # seconds between two writings
SLOWEST = 25
LOST = 70  # exit code of a process that has lost its device


def device_is_lost() -> bool:
    """Does every call to the GPU fail in this process from now on?"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever it is, a device that is well waits for nothing and says nothing
        return True
    return False


class Outcomes:
    """What the process that collects reports keeps of them."""

    def __init__(self, path: Path):
        self.path, self.began, self.written = path, time.time(), 0.0
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.failures: list[dict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.seconds[test] += report.duration
        if report.failed:
            self.outcomes[test] = "failed"
            captured = {name: text for name, text in report.sections if text.strip()}
            self.failures.append({"test": test, "when": report.when, "text": report.longreprtext} | captured)
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(test, report.outcome)
        if report.failed or time.time() - self.written > EVERY:
            self.write(complete=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.failures.append({"test": report.nodeid, "when": "collect", "text": report.longreprtext})

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
    """What a process that runs tests for another does: it goes when its device is lost."""

    def __init__(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self.failed = False
        done = yield
        if self.failed and device_is_lost():
            os._exit(LOST)  # the reports have been sent; an orderly end would ask the device again
        return done


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="JSON of what became of the tests, written as they end")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Leaver())
    elif path is not None:
        config.pluginmanager.register(Outcomes(Path(path)))
