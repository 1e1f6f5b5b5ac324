"""Every long command, stopped in the middle: what is its exit code, what does it keep, and does the same command go on?

    python scripts/stop_check.py --out stops.json [--only train sweep] [--stops SIGKILL disk]

Each command runs whole once. Then it runs again for each sort of stop, about half-way: by SIGINT, SIGTERM or SIGKILL,
with a reader of its standard output that goes away, and on a disk that has room for half of what it writes. Each time
the same command is given once more, and must end with what the whole run made. Prints a table, and ends with 1 if a
command did otherwise. Disks are small ones in memory, which only root can make; without that they are left out.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import checkout  # noqa: F401

from specdec.__main__ import COMMANDS
from specdec.cli.errors import one_sentence_errors
from specdec.cli.reading import read_text
from specdec.engine.trace_files import read_trace
from specdec.lab.output import write_json
from specdec.model.checkpoint import read_json
from specdec.training.loop.log import read_log

SIGNALS = {"SIGINT": (130,), "SIGTERM": (143,), "SIGKILL": (-9,)}
STOPS = (*SIGNALS, "reader", "disk")
TIMES = ("seconds", "rollout_seconds")
ASKED = ("What is a tree?", "Name three colours.", "Why is the sky blue?", "How do I boil an egg?", "What is rain?",
         "Write a line about the sea.", "Who was the first on the moon?", "What do bees eat?")  # fmt: skip
SMALL = ("drafter.draft_vocab_size=200", "objective.steps=2", "data.heldout=8", "data.max_length=128",
         "trainer.batch_tokens=256", "trainer.steps=24", "trainer.save_every=3", "trainer.log_every=1",
         "trainer.eval_batches=1", "trainer.prompts=null")  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command line, and what of its output must not depend on a stop. `out/` is where it writes."""

    words: tuple[str, ...]
    made: Callable[[Path], object]


@dataclass
class Run:
    """How a run ended."""

    code: int
    said: str  # the last line of standard error
    seconds: float
    kept: list[str]  # files in out/


# What a command made


def contents(*patterns: str) -> Callable[[Path], object]:
    """The bytes of the files that match."""
    return lambda out: {str(p.relative_to(out)): p.read_bytes() for g in patterns for p in sorted(out.rglob(g))}


def names(out: Path) -> object:
    """Which files there are: what is in them was timed."""
    return listing(out)


def trained(out: Path) -> object:
    """Weights and log of a training run."""
    log = [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(out / "log.jsonl")]
    return log, (out / "draft" / "model.safetensors").read_bytes()


def results(out: Path) -> object:
    return [(p.parent.name, read_json(p)) for p in sorted(out.glob("points/*/result.json"))]


def compared(out: Path) -> object:
    """The first columns of a comparison's table: name, tau, and whether texts are the same, but no time."""
    lines = (out / "table.csv").read_text(encoding="utf-8").splitlines()
    columns = [i for i, name in enumerate(lines[0].split(",")) if not re.search("second|ratio|ms|low|high", name)]
    return [[line.split(",")[i] for i in columns] for line in lines]


COMMANDS_TRIED = {
    "generate": Command(
        ("generate", "--prompt-file", "asked.txt", "--tree", "1/3/4", "--trace", "out/trace", "--max-new-tokens", "96"),
        lambda out: [row.tokens for row in read_trace(out / "trace").rows],
    ),
    "regenerate": Command(
        ("regenerate", "--prompts", "asked.jsonl", "--samples", "8", "--temperature", "1", "--batch-size", "8",
         "--max-new-tokens", "64", "--out", "out/answers.jsonl"), contents("answers.jsonl"),
    ),
    "train": Command(("train", "data.path=learnt.jsonl", "out=out", "resume=auto", *SMALL), trained),
    "cache": Command(
        ("cache", "data.path=learnt.jsonl", "out=out", "shard_tokens=512", "trainer.batch_tokens=256",
         "drafter.draft_vocab_size=200"), contents("*.safetensors"),
    ),
    "sweep": Command(
        ("sweep", "benchmark.path=asked.jsonl", "draft=ngram", "topk=1", "steps=[2,3,4]", "num_draft_tokens=16",
         "max_new_tokens=24", "probe=0", "best_tree=null", "out=out"), results,
    ),
    "compare": Command(
        ("compare", "prompts=asked.txt", "drafts=[demo/mtp,ngram]", "topk=1", "steps=3", "out=out"), compared
    ),
    "tree": Command(("tree", "--prompt-file", "asked.txt", "--out", "out/tree.yaml"), contents("tree.yaml")),
    "tune": Command(
        ("tune", "--prompt-file", "asked.txt", "--limit", "4", "--max-new-tokens", "32", "--topk", "1", "--tries", "1",
         "--num-draft-tokens", "2,4", "--remeasure", "--out", "out/best.yaml"), names,
    ),
    "prove": Command(
        ("prove", "--draft", "ngram", "--limit", "2", "--draws", "4000", "--max-new-tokens", "24", "--out",
         "out/proof.md"), names,
    ),
    "bench": Command(
        ("bench", "suite.configurations=[tg128]", "suite.contenders=[plain,speculative]", "prompts=asked.txt",
         "out=out/bench.json"), names,
    ),
    "estimate": Command(("estimate", "data.path=learnt.jsonl", *SMALL), names),
}  # fmt: skip


# Running and stopping


def start(command: Command, place: Path, reader: bool) -> tuple[int, int]:
    """Start a command in a child process with standard error in a file. Returns its number and the end of a pipe that
    reads its standard output; without `reader` that goes to a file too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    out = writing if reader else os.open(place / "stdout.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(os.open(place / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1 if n == 2 else -1) for n in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    code = 0
    try:
        sys.argv = [f"specdec {command.words[0]}", *command.words[1:]]
        import_module(COMMANDS[command.words[0]][0]).main()
        sys.stdout.flush()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run(command: Command, place: Path, stop: str | None = None, after: float = 0.0) -> Run:
    """Run a command to its end, or to a stop that comes after so many seconds."""
    begun = time.monotonic()
    child, reading = start(command, place, stop == "reader")
    if stop in SIGNALS or stop == "reader":
        time.sleep(after)
    if stop in SIGNALS:
        os.kill(child, getattr(signal, stop))
    os.close(reading)
    _, status = os.waitpid(child, 0)
    said = (place / "stderr.txt").read_text(errors="replace").replace("\r", "\n").strip().splitlines()
    left = listing(place / "out")
    return Run(os.waitstatus_to_exitcode(status), said[-1] if said else "", time.monotonic() - begun, left)


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at `place`, at least the 4096 of a page, of which a file takes all but `size`."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={max(size, 4096)}", "none", str(place)], check=True)
    try:
        if size < 4096:
            (place / "filler").write_bytes(b"0" * 4096)
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def enlarge(place: Path) -> None:
    (place / "filler").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=256m", str(place)], check=True)


def a_place(work: Path, name: str) -> Path:
    """A fresh folder with what the commands read."""
    place = work / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "asked.txt").write_text("\n".join(ASKED) + "\n")
    (place / "asked.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ASKED))
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": " ".join(ASKED) * 2}] for text in ASKED * 8
    ]
    (place / "learnt.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return place


def tried(name: str, stop: str, whole: tuple[Run, object, int], work: Path) -> dict:
    """Stop a command, and give it again. Returns the row of the table."""
    command, (there, made, size) = COMMANDS_TRIED[name], whole
    share = 0.5
    while True:
        place = a_place(work, f"{name}-{stop}")
        with small_disk(place / "out", size // 2) if stop == "disk" else _folder(place / "out"):
            first = run(command, place, stop, share * there.seconds)
            if stop == "disk":
                enlarge(place / "out")
            again = run(command, place)
            same = again.code == 0 and command.made(place / "out") == made
        if first.code or stop in ("reader", "disk") or share < 0.1:
            break
        share /= 2  # it had come to its end before
    right = first.code in {"reader": (0,), "disk": (2,)}.get(stop, SIGNALS.get(stop))
    if stop == "disk" and not size:
        right = first.code == 0  # it writes nothing
    told = stop == "SIGKILL" or first.code == 0 or "Traceback" not in first.said
    row = {"command": name, "stop": stop, "code": first.code, "said": first.said, "kept": len(first.kept)}
    return row | {"seconds": first.seconds, "again_seconds": again.seconds, "again": again.code, "same": same,
                  "right": right and told and same}  # fmt: skip


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    yield path


def whole_run(name: str, work: Path) -> tuple[Run, object, int]:
    """The run that is not stopped, what it made, and how many bytes it wrote."""
    place = a_place(work, f"{name}-whole")
    (place / "out").mkdir()
    ended = run(COMMANDS_TRIED[name], place)
    if ended.code:
        raise ValueError(f"{name} failed without a stop: {read_text(place / 'stderr.txt', 'standard error')[-500:]}")
    size = sum(p.stat().st_size for p in (place / "out").rglob("*") if p.is_file())
    return ended, COMMANDS_TRIED[name].made(place / "out"), size


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=COMMANDS_TRIED, default=list(COMMANDS_TRIED))
    parser.add_argument("--stops", nargs="+", choices=STOPS, default=list(STOPS))
    args = parser.parse_args()
    for module, _ in COMMANDS.values():  # before the children are made, which have them then
        import_module(module)
    stops = [stop for stop in args.stops if stop != "disk" or os.geteuid() == 0]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for name in args.only:
            whole = whole_run(name, Path(work))
            for stop in stops:
                rows.append(tried(name, stop, whole, Path(work)))
                print(
                    "{right!s:5} {command:10} {stop:7} {code:4} kept {kept:3} again {again} {said:.90}".format(
                        **rows[-1]
                    ),
                    flush=True,
                )
    if args.out is not None:
        write_json(args.out, {"rows": rows, "left_out": sorted(set(args.stops) - set(stops))})
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    main()
