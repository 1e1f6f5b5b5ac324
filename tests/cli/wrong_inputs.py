"""Wrong inputs to every command, generated from the schemas:  python scripts/wrong_inputs.py --out wrong.json

Every case runs in this process, with the demo's checkpoints damaged in a scratch folder. It passes if the command ends
with exit code 2 and one sentence that names what is wrong, quickly, with little memory, and leaves nothing behind.
Values that a schema allows are no cases. Where one place of a file is changed (scripts/wrong_files.py) the command may
also take it, and end with 0.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import checkout  # noqa: F401
from wrong_cases import Case, all_cases
from wrong_files import file_cases

from specdec.__main__ import COMMANDS
from specdec.api import DEMO_DRAFTER, DEMO_TARGET

# Of a case: seconds of the processor, as others may use it too, and memory beyond what the process takes already.
SECONDS, MEGABYTES = 20, 1000


@dataclass(frozen=True)
class Outcome:
    case: str
    code: object
    said: str
    seconds: float
    megabytes: float
    fault: str  # empty if the case passed


def run(case: Case, scratch: Path) -> Outcome:
    """Run a case in `scratch`, which is made anew, and judge it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, source in (("target", DEMO_TARGET), ("draft", DEMO_DRAFTER)):
        (scratch / name).mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, scratch / name / file.name)  # a link would let a case damage the demo
    (scratch / "prompts.txt").write_text("What is a tree?\n")
    if case.prepare is not None:
        case.prepare(scratch)
    gc.collect()  # models that the case before left in a traceback
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, there = memory("VmRSS"), listing(scratch)
    start = time.process_time()
    code, err = call(case.words, scratch)
    seconds = time.process_time() - start
    megabytes = memory("VmHWM") - before
    said = err.strip().splitlines()[-1] if err.strip() else ""
    fault = judge(case, code, err, seconds, megabytes)
    left = sorted(listing(scratch) - there)
    return Outcome(case.name, code, said, seconds, megabytes, fault or (f"left {left[0]}" if left else ""))


def memory(what: str) -> float:
    """MiB that this process takes now (VmRSS), or has taken at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def call(words: tuple[str, ...], folder: Path) -> tuple[object, str]:
    """Exit code and standard error of a command, run here."""
    err, argv, here = io.StringIO(), sys.argv, os.getcwd()
    code: object = 0
    os.chdir(folder)
    try:
        sys.argv = [f"specdec {words[0]}", *words[1:]]
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            import_module(COMMANDS[words[0]][0]).main()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        sys.argv = argv
        os.chdir(here)
    return code, err.getvalue()


def judge(case: Case, code: object, err: str, seconds: float, megabytes: float) -> str:
    code = code or 0
    if code not in case.codes:
        return f"ended with {code!r:.200}"
    if code == 0:
        return _too_much(seconds, megabytes)
    told = [line for line in err.splitlines() if "error: " in line]
    if len(told) != 1 or "Traceback" in err:
        return f"not one sentence: {err[-200:]!r}"
    if not all(name.lstrip("-").replace("-", "_") in told[0].replace("-", "_") for name in case.named):
        return f"does not name {case.named}: {told[0]}"
    return _too_much(seconds, megabytes)


def _too_much(seconds: float, megabytes: float) -> str:
    return f"took {seconds:.0f} s and {megabytes:.0f} MB" if seconds > SECONDS or megabytes > MEGABYTES else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sample", type=int, help="only so many, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = [*all_cases(), *file_cases()]
    if args.sample is not None:
        cases = random.Random(args.seed).sample(cases, min(args.sample, len(cases)))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            outcomes.append(run(case, Path(folder) / "case"))
            if outcomes[-1].fault:
                print(f"{case.name}: {outcomes[-1].fault}", flush=True)
    wrong = [o for o in outcomes if o.fault]
    slowest, largest = max(o.seconds for o in outcomes), max(o.megabytes for o in outcomes)
    print(f"{len(outcomes)} cases, {len(wrong)} not told; slowest {slowest:.1f} s, most memory {largest:.0f} MB")
    if args.out is not None:
        args.out.write_text(json.dumps([vars(o) for o in outcomes], indent=1, default=str) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
