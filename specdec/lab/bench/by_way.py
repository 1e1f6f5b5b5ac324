"""Peak memory of several ways to do one thing: a process for each, as a process's peak never falls."""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence


def peak_gib() -> float:
    """The most memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def by_way(
    parser: argparse.ArgumentParser, ways: Sequence[str], measure: Callable[[argparse.Namespace], dict], module: str
) -> None:
    """The command `module`: print what `measure` finds, a JSON line for each way, or for the one of --way."""
    parser.add_argument("--way", choices=ways, help="this one only, in this process")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    for way in ways:
        subprocess.run([sys.executable, "-m", module, *sys.argv[1:], "--way", way], check=True)
