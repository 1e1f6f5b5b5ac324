"""Kill a small training run (SIGKILL) at random moments, resume it each time, and compare it with one left alone.

    python scripts/kill_test.py --data conversations.jsonl --work kills [--kills 20] [trainer.steps=30 ...]

Every other kill comes in the middle of writing a checkpoint, at a random byte of it. The others come after a random
time. Prints one line, and ends with 1 unless weights, moments and log are the same, bit for bit.
"""

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import checkout  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch
import torch._dynamo  # this and matplotlib are needed by each run: so kills do not fall into their imports
from hydra import compose, initialize_config_dir

import specdec.training.train
from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.cli.hydra_entry import CONF
from specdec.training.loop.checkpoint import read_newest
from specdec.training.loop.log import read_log

TIMES = ("seconds", "rollout_seconds")
SMALL = ["drafter.draft_vocab_size=200", "objective.steps=2", "data.heldout=8", "data.limit=200", "data.max_length=128",
         "trainer.batch_tokens=256", "trainer.steps=24", "trainer.save_every=3", "trainer.log_every=1",
         "trainer.eval_batches=1", "trainer.prompts=null"]  # fmt: skip


def attempt(overrides: list[str], out: Path, seconds: float | None = None, share: float | None = None) -> bool:
    """Run, or resume, in a child process. It is killed after `seconds`, or in its second checkpoint when this share of
    the bytes is written. Returns True if it ended before."""
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = (out.parent / f"{out.name}.txt").open("a")
        if share is not None:
            die_while_saving(share)
        specdec.training.train.run(compose("train", [*SMALL, *overrides, f"out={out}", "resume=auto"]))
        sys.stderr.flush()
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise ValueError(f"the run failed; see {out}.txt")
    return True


def die_while_saving(share: float) -> None:
    """Make the second `torch.save` of this process write this share of the file, and kill the process."""
    save, calls = torch.save, []

    def save_and_die(state, file) -> None:
        calls.append(1)
        if len(calls) < 2:
            return save(state, file)
        buffer = io.BytesIO()
        save(state, buffer)
        file.write(buffer.getvalue()[: int(share * buffer.tell())])
        file.flush()
        return os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_and_die


def differences(one: Path, other: Path) -> list[str]:
    """What differs between the last checkpoints, the logs and the drafters of two runs, but for times."""
    (_, a), (_, b) = read_newest(one), read_newest(other)
    found = [key for key in a if key not in TIMES and not same(a[key], b[key])]
    logs = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(o / "log.jsonl")] for o in (one, other)
    ]
    exported = [(o / "draft" / "model.safetensors").read_bytes() for o in (one, other)]
    return found + ["log"] * (logs[0] != logs[1]) + ["draft"] * (exported[0] != exported[1])


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as of data.path")
    parser.add_argument("--work", type=Path, required=True, help="folder for both runs; must not exist")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="settings of python -m specdec.training.train")
    args = parser.parse_args()
    if args.work.exists():
        raise ValueError(f"{args.work} exists; give a folder that does not")
    args.work.mkdir(parents=True)
    rng, killed, in_writing = random.Random(args.seed), 0, 0
    overrides = [f"target.path={args.target}", f"data.path={args.data}", *args.overrides]
    whole, cut = args.work / "whole", args.work / "cut"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        start = time.monotonic()
        attempt(overrides, whole)
        seconds = round(time.monotonic() - start, 1)
        while killed < args.kills:
            saving = killed % 2 == 1
            how = {"share": rng.random()} if saving else {"seconds": rng.uniform(0.2, 1.0) * seconds}
            if attempt(overrides, cut, **how):  # it came to its end before: begin anew
                shutil.rmtree(cut)
            else:
                killed, in_writing = killed + 1, in_writing + saving
        attempt(overrides, cut)
    found = differences(whole, cut)
    print(json.dumps({"killed": killed, "while_writing": in_writing, "run_seconds": seconds, "differences": found}))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
