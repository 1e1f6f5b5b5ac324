"""Commands run one after the other, each within its time: what ended how is written down after every one."""

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
    """A command. In its words {limit} becomes the seconds that it has, {budget} three quarters of them: what it may
    use if it keeps to time itself.

    share: of the whole time, at most; None: what is left, evenly with the other stages of that kind. needs: files
    without which it is skipped. makes: a file or folder; there beforehand, the stage need not run, and missing
    afterwards, it failed. result: a JSON file that becomes part of the record, else the last line of the output does,
    if it is a JSON object. ends_itself: if false, being stopped when the time is over is how it is meant to end. void:
    why it cannot run here.
    """

    name: str
    command: list[str]
    share: float | None = None
    needs: tuple[Path, ...] = ()
    makes: Path | None = None
    result: Path | None = None
    ends_itself: bool = True
    void: str | None = None


def run_stages(stages: list[Stage], seconds: float, done: Callable[[dict], None], cwd: Path | None = None) -> None:
    """Run what can run, and give `done` the record of each stage as soon as it is over."""
    deadline = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        left = deadline - time.monotonic()
        open_ended = sum(later.share is None for later in stages[i:])
        limit = min(left, stage.share * seconds) if stage.share is not None else left / open_ended
        done(run_stage(stage, limit, cwd))


def run_stage(stage: Stage, limit: float, cwd: Path | None = None) -> dict:
    """outcome: done, failed, out of time, skipped or kept (made before)."""
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
    """Output, exit code, and whether the time was over: then the command and its children are interrupted, as Ctrl-C
    does it, and later killed."""
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
    """The JSON that the stage wrote, or null."""
    try:
        if stage.result is not None:
            return json.loads(stage.result.read_text(encoding="utf-8"))
        lines = output.strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None
