"""Commands that run one after the other, each within its time limit, and a record of how each ended."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TAIL = 4000  # characters of output kept
GRACE = 20.0  # seconds from being asked to stop to being killed


@dataclass(frozen=True)
class Stage:
    """A command with a time limit.

    In its words {limit} becomes the seconds that it has, and {budget} three quarters of them, for commands that keep to
    a budget themselves."""

    name: str
    command: list[str]
    share: float | None = None  # of the whole time, at most; None: an equal part of what is left
    needs: tuple[Path, ...] = ()  # files without which it is skipped
    makes: Path | None = None  # if it is there beforehand, the stage is not run; if it is missing afterwards, it failed
    result: Path | None = None  # a JSON file for the record; None: the last line of output, if it is a JSON object
    ends_itself: bool = True  # False: to be stopped when the time is over is how it is meant to end
    void: str | None = None  # why it cannot run here


def run_stages(stages: list[Stage], seconds: float, done: Callable[[dict], None], cwd: Path | None = None) -> None:
    """Run all stages that can run. done: called with the record of each as soon as it is over."""
    deadline = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        left = deadline - time.monotonic()
        open_ended = sum(later.share is None for later in stages[i:])
        limit = min(left, stage.share * seconds) if stage.share is not None else left / open_ended
        done(run_stage(stage, limit, cwd))


def run_stage(stage: Stage, limit: float, cwd: Path | None = None) -> dict:
    """Run a stage and return its record. `outcome` is done, failed, out of time, skipped or kept (made before)."""
    times = {"{limit}": f"{max(limit, 1):.0f}", "{budget}": f"{max(0.75 * limit, 1):.0f}"}
    command = [_fill(word, times) for word in stage.command]
    record = {"stage": stage.name, "command": shlex.join(command), "limit_seconds": round(limit, 1)}
    if stage.makes is not None and stage.makes.exists():
        return record | {"outcome": "kept", "reason": f"{stage.makes} is there already"}
    missing = [path for path in stage.needs if not path.exists()]
    reason = stage.void or (f"{missing[0]} is missing" if missing else "no time is left" if limit <= 0 else None)
    if reason is not None:
        return record | {"outcome": "skipped", "reason": reason}
    if stage.result is not None:
        stage.result.unlink(missing_ok=True)  # an older run's must not pass for this one's
    start = time.monotonic()
    output, code, stopped = _run(command, limit, cwd)
    well = code == 0 or (stopped and not stage.ends_itself)
    if well and stage.makes is not None and not stage.makes.exists():
        well = False
    outcome = "done" if well else "out of time" if stopped else "failed"
    record |= {"outcome": outcome, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    return record | {"result": _result(stage, output), "output_tail": output[-TAIL:]}


def _fill(word: str, values: dict[str, str]) -> str:
    for place, value in values.items():
        word = word.replace(place, value)
    return word


def _run(command: list[str], limit: float, cwd: Path | None) -> tuple[str, int, bool]:
    """Output, exit code, and whether the time was over. Then the command and its children are interrupted, as by
    Ctrl-C, and killed after some more time."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )
    stopped, output = False, ""
    for number, wait in ((signal.SIGINT, limit), (signal.SIGKILL, GRACE), (None, None)):
        try:
            output, _ = process.communicate(timeout=wait)
            break
        except subprocess.TimeoutExpired:
            stopped = True
            os.killpg(process.pid, number)
    return output, process.returncode, stopped


def _result(stage: Stage, output: str):
    """The JSON that the stage wrote or printed, or None."""
    try:
        if stage.result is not None:
            return json.loads(stage.result.read_text(encoding="utf-8"))
        lines = output.strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None
