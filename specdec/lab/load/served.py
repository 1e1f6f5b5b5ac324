"""`specdec serve` in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The address, without a path, of a server with these flags at a free port, while it runs.

    Raises ValueError if it ends before it serves. Its last line on standard error then says why."""
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://[^/\s]*", process.stdout.readline())
        if address is None:
            raise ValueError(f"{' '.join(command[2:])} ended before it served: its last line says why")
        yield address[0]
    finally:
        process.terminate()
        process.wait()
