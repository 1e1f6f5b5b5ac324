"""Run a case of wrong input in this process, on copies of the demo's checkpoints in a scratch folder, and judge it."""

import contextlib
import gc
import re
import shutil
import time
from pathlib import Path

from helpers import run_here
from wrong_cases import Case

from specdec.__main__ import main
from specdec.api import DEMO_DRAFTER, DEMO_TARGET

SECONDS, MEBIBYTES = 20, 1000  # a case may take: processor time, and memory in addition to that of the process


def run(case: Case, scratch: Path) -> str:
    """Run a case in `scratch`, which is made anew. Returns what is wrong with its outcome, empty if nothing is."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, source in (("target", DEMO_TARGET), ("draft", DEMO_DRAFTER)):
        if case.prepare is not None or name in case.words:
            # Cases change the other files in place; they replace the weights.
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("*.safetensors"))
            (scratch / name / "model.safetensors").symlink_to(source / "model.safetensors")
    (scratch / "prompts.txt").write_text("What is a tree?\n")
    if case.prepare is not None:
        case.prepare(scratch)
    gc.collect()  # models that the traceback of the previous case holds
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, there, start = memory("VmRSS"), set(scratch.rglob("*")), time.process_time()
    code, err = call(case.words, scratch)
    seconds, mebibytes = time.process_time() - start, memory("VmHWM") - before
    if fault := judge(case, code, err):
        return fault
    if seconds > SECONDS or mebibytes > MEBIBYTES:
        return f"took {seconds:.0f} s and {mebibytes:.0f} MiB"
    return "".join(f"left {path}" for path in sorted(set(scratch.rglob("*")) - there)[:1])


def memory(what: str) -> float:
    """Return resident MiB of this process: now (VmRSS), or the peak (VmHWM)."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def call(words: tuple[str, ...], folder: Path) -> tuple[object, str]:
    """Run a command in this process. Returns its exit code, or the exception that it raised, and standard error."""
    with contextlib.chdir(folder):
        try:
            done = run_here(main, *words)
        except BaseException as error:
            return f"{type(error).__name__}: {error}", ""
    return done.returncode, done.stderr


def judge(case: Case, code: object, err: str) -> str:
    if code not in case.codes:
        return f"ended with {code!r:.200}"
    if code == 0:
        return ""
    messages = [line for line in err.splitlines() if "error: " in line]
    if len(messages) != 1 or "Traceback" in err:
        return f"not one sentence: {err[-200:]!r}"
    if not all(name.lstrip("-").replace("-", "_") in messages[0].replace("-", "_") for name in case.named):
        return f"does not name {case.named}: {messages[0]}"
    return ""
