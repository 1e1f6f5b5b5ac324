"""An engine for tests of peers' processes, in a module of its own: the process that imports it needs no torch."""

import os
import time
from pathlib import Path


class Reader:
    """Reads a number and adds to it."""

    def __init__(self, folder: str, name: str):
        self.number = int((Path(folder) / name).read_text())

    def __call__(self, request: dict) -> list[tuple[float, list[int]]]:
        if "exit" in request:
            os._exit(request["exit"])
        return [(time.perf_counter(), [self.number + request["add"]])]
