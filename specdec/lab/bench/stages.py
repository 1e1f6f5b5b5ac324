"""Commands that run one after the other, each within its time limit, and a record of how each ended."""

import ctypes
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.files import write_whole

TAIL = 4000  # characters of output in the record
LOG_BYTES = 1 << 20  # of a log the end is archived
GRACE = 20.0  # seconds from being asked to stop to being killed
TICK = 2.0  # seconds between two looks at what a running stage has written
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Stage:
    """A command with a time limit.

    In its words {limit} becomes the seconds that it has, and {budget} three quarters of them, for commands that keep to
    a budget themselves.
    """

    name: str
    command: list[str]
    seconds: float = 60.0  # what it should take; of the time that is left it gets its part by this
    needs: tuple[Path, ...] = ()  # files without which it is skipped
    makes: Path | None = None  # if it is there beforehand, the stage is not run; if it is missing afterwards, it failed
    result: Path | None = None  # a JSON file for the record; None: the last line of output, if it is a JSON object
    ends_itself: bool = True  # False: to be stopped when the time is over is how it is meant to end
    void: str | None = None  # why it cannot run here

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")

    @property
    def runs(self) -> bool:
        """Whether it will take time, as far as is known beforehand."""
        return self.void is None and (self.makes is None or not self.makes.exists())


def run_stages(
    stages: list[Stage],
    seconds: float,
    done: Callable[[dict], None],
    logs: Path,
    *,
    cwd: Path | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run all stages that can run. done: called with the record of each as soon as it is over.

    logs: a folder for the whole output of each, NAME.log. tick: called every few seconds while a stage runs.
    """
    deadline = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        left = deadline - time.monotonic()
        all_seconds = sum(later.seconds for later in stages[i:] if later.runs)
        limit = left * stage.seconds / all_seconds if stage.runs else left
        done(run_stage(stage, limit, logs, cwd=cwd, tick=tick))


def run_stage(
    stage: Stage, limit: float, logs: Path, *, cwd: Path | None = None, tick: Callable[[], None] = lambda: None
) -> dict:
    """Run a stage and return its record. `outcome` is done, failed, out of time, skipped or kept (made before)."""
    command = stage.command
    for word, share in (("{limit}", limit), ("{budget}", 0.75 * limit)):
        command = [part.replace(word, f"{max(share, 1):.0f}") for part in command]
    record = {"stage": stage.name, "command": shlex.join(command), "limit_seconds": round(limit, 1)}
    if stage.makes is not None and stage.makes.exists():
        return record | {"outcome": "kept", "reason": f"{stage.makes} is there already"}
    missing = [path for path in stage.needs if not path.exists()]
    reason = stage.void or (f"{missing[0]} is missing" if missing else "no time is left" if limit <= 0 else None)
    if reason is not None:
        return record | {"outcome": "skipped", "reason": reason}
    if stage.result is not None:
        stage.result.unlink(missing_ok=True)  # an older run's must not pass for this one's
    start, log = time.monotonic(), logs / f"{stage.file_name}.log"
    code, stopped = _run(command, limit, cwd, log, tick)
    output = log.read_text(encoding="utf-8", errors="replace")
    well = (code == 0 or (stopped and not stage.ends_itself)) and (stage.makes is None or stage.makes.exists())
    outcome = "done" if well else "out of time" if stopped else "failed"
    record |= {"outcome": outcome, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    return record | {"result": _result(stage, output), "output_tail": output[-TAIL:]}


def _run(command: list[str], limit: float, cwd: Path | None, log: Path, tick: Callable[[], None]) -> tuple[int, bool]:
    """Return the exit code, and whether the time was over: then the command and its children are interrupted, as by
    Ctrl-C, and killed after some more time. Whatever ends this process ends the command.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background ignores it
        if libc is not None:  # even if this process is killed, the next command finds the device idle
            libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)

    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that the log holds what was done before a kill
    with log.open("wb") as output:
        how: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "process_group": 0,
        }
        process = subprocess.Popen(command, cwd=cwd, env=environment, preexec_fn=begin, **how)
        stopped = False
        try:
            for number, wait in ((signal.SIGINT, limit), (signal.SIGKILL, GRACE)):
                if _ends_within(process, wait, tick):
                    break
                stopped = True
                os.killpg(process.pid, number)
        finally:
            with suppress(ProcessLookupError):  # children that outlive it, or all of them after an error here
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, stopped


def _ends_within(process: subprocess.Popen, seconds: float, tick: Callable[[], None]) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left, TICK))
            return True
        tick()
    return process.poll() is not None


def _result(stage: Stage, output: str):
    """Return the JSON that the stage wrote or printed, or None."""
    try:
        if stage.result is not None:
            return json.loads(stage.result.read_text(encoding="utf-8"))
        lines = output.strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None


def packer(folder: Path, path: Path) -> Callable[[], None]:
    """Return a function that packs the JSON files and logs of a folder into a .tar.gz if they have changed. The archive
    is whole at any moment.
    """
    packed: list[tuple] = []

    def fill(staging: Path) -> None:
        with tarfile.open(staging, "w:gz") as archive:
            for name, *_ in packed:
                content = (folder / name).read_bytes()
                if name.endswith(".log"):
                    content = content[-LOG_BYTES:]
                entry = archive.gettarinfo(folder / name, arcname=f"results/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    def pack() -> None:
        files = sorted(f for f in folder.iterdir() if f.suffix in (".json", ".jsonl", ".log"))
        state = [(f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files]
        if state != packed:
            packed[:] = state
            write_whole(path, fill)

    return pack
