"""Run everything that needs a GPU, in parts of less than ten minutes (docs/gpu.md).

    python scripts/gpu_proof.py --stages tests
    python scripts/gpu_proof.py --stages shape
    python scripts/gpu_proof.py --stages train --conversations conversations.jsonl.xz

The parts, in the order in which they matter. tests: those marked gpu. shape: random weights in the shapes of real
models; plain decoding against the bandwidth, the speed with a simulated tau. train: a target of 100 M parameters from
the conversations, its answers, an EAGLE-3 head for it; tau and the ratio of times. kernels: each against PyTorch.
transformers: our engine against transformers'.

Every stage is a command with a time limit. --out holds its log, its result, and gpu_proof.json, which says how each
stage ended. A stage that fails or runs out of time is recorded, and the next one runs. What an earlier call left under
--work is not made again. `--device cpu --tiny` rehearses everything on small models. Nothing here needs git, the
network, or specdec to be installed.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from checkout import ROOT
from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.cli.terminal import console
from specdec.lab.output import provenance, write_json
from specdec.model.checkpoint import check_device

GRACE = 20  # seconds from being interrupted to being killed
OUT_OF_TIME = (124, -signal.SIGKILL)  # of `timeout`: the command ended after the interrupt, or was killed
TREE = "topk=10 steps=8 num_draft_tokens=60 simulate_tau=3"
OURS = "suite.contenders=[plain,speculative]"
COMPILED = "suite.contenders=[plain,speculative,compiled-plain,compiled-speculative]"
ALL = "suite.contenders=[plain,speculative,sdpa,eager,prompt-lookup,static-compile]"

# Further words of the commands: the real ones, and those of a rehearsal.
SIZES = {
    "tests": "-n 8",  # processes: compiling kernels takes most of the time, and the GPU holds many small models
    "target": "",
    "answers": "--limit 10000 --batch-size 512 --max-new-tokens 256 --shard-size 1024",
    # The rate is constant and the average of the weights is exported: the run ends when its time does, at any step.
    "drafter": "trainer.steps=100000 trainer.schedule=constant trainer.ema=0.99 trainer.batch_tokens=16384 "
    "trainer.lr=1e-3 trainer.muon_lr=0.02 trainer.autocast=bf16 trainer.save_every=100000 data.max_length=512 "
    "data.heldout=64 objective.steps=5",
    "tau": "--max-new-tokens 128",
    "pair": "suite.configurations=[medium,short,sampled,tg128,pp512] suite.warmups=1 questions=2",
    "shape": "suite.configurations=[short,tg128] suite.warmups=1",
    "kernels": "",
}
SHAPES = ("llama_3_1_8b", "llama_3_2_1b", "qwen3_1_7b", "gemma3_1b")
TINY = {
    "tests": "-n 2 tests/engine/test_gpu_graphs.py",
    "target": "--vocab-size 320 --hidden-size 64 --layers 4 --length 256 --batch-tokens 1024 --heldout 2 "
    "--tokens 40000",
    "answers": "--limit 24 --batch-size 8 --max-new-tokens 16 --shard-size 8",
    "drafter": "trainer.steps=3 trainer.schedule=constant trainer.ema=0.99 trainer.batch_tokens=256 "
    "trainer.muon_lr=0.02 trainer.autocast=bf16 data.heldout=2 objective.steps=2",
    "tau": "--max-new-tokens 16",
    "pair": "suite.configurations=[short] suite.warmups=1 suite.trials=1",
    "shape": "suite.configurations=[short] suite.warmups=1 suite.trials=1",
    "kernels": "--tiny --nodes 8 --context 64",
}


@dataclass(frozen=True)
class Stage:
    """A command with a time limit.

    The words of the command may hold the fields {device}, {work}, {out}, {conversations}, {result} (the stage's file in
    `out`), {limit} (the time limit in seconds) and {budget} (three quarters of the limit).
    """

    name: str
    seconds: float  # on one H100, estimated before any of this has run on a GPU; a call shares its time out by this
    command: str  # arguments of Python
    needs: tuple[Path | None, ...] = ()  # files without which it is skipped; None: an option that was not given
    makes: Path | None = None  # if it is there beforehand, the stage is not run; if it is missing afterwards, it failed
    ends_itself: bool = True  # False: it is meant to run until its time is over


def bench(args: argparse.Namespace, name: str, seconds: float, contenders: str, shape: str | None = None) -> Stage:
    """The benchmark of a shape with a simulated tau, or of the trained pair."""
    sizes, needs = TINY if args.tiny else SIZES, ()
    what = f"shape={shape} {TREE} {sizes['shape']}"
    if shape is None:
        what = "target={work}/pair/target draft={work}/training/draft prompts={work}/pair/heldout.jsonl "
        what, needs = what + sizes["pair"], (args.work / "pair/target", args.work / "training/draft")
    command = f"-m specdec lab bench device={{device}} budget_s={{budget}} out={{result}} {contenders} {what}"
    return Stage(f"bench {name}", seconds, command, needs)


def training(args: argparse.Namespace) -> list[Stage]:
    """A target, its answers, its drafter, and both decoding together."""
    sizes = TINY if args.tiny else SIZES
    target, answers, draft = (args.work / name for name in ("pair/target", "answers", "training/draft"))
    pretrain = "scripts/pretrain_target.py --device {device} --seconds {limit} --data {conversations} --out {work}/pair"
    regenerate = "-m specdec data regenerate --device {device} --target {work}/pair/target "
    regenerate += "--prompts {work}/pair/prompts.jsonl --out {work}/answers/answers.jsonl"
    learn = "-m specdec train device={device} target={work}/pair/target out={work}/training "
    learn += "'data={work}/answers/answers*.jsonl' drafter=eagle3_1 drafter.draft_vocab_size=null "
    learn += "drafter.train_head=false data.bad=skip 'objective.terms={{tokens: 1.0}}'"  # as the demo's
    generate = "-m specdec generate --compare --json --device {device} --target {work}/pair/target "
    generate += "--draft {work}/training/draft --prompts {work}/pair/heldout.jsonl"
    chain = f"{generate} --topk 1 --steps 3"
    return [
        Stage("target", 220, f"{pretrain} {sizes['target']}", (args.conversations,), makes=target),
        # If the time is over, the shards that are whole serve.
        Stage("answers", 60, f"{regenerate} {sizes['answers']}", (target,), ends_itself=False),
        Stage("drafter", 100, f"{learn} {sizes['drafter']}", (target, answers), makes=draft, ends_itself=False),
        Stage("tau", 40, f"{generate} {sizes['tau']}", (target, draft)),
        Stage("tau of a chain", 40, f"{chain} {sizes['tau']}", (target, draft)),
        bench(args, "pair", 60, OURS),
    ]


def parts(args: argparse.Namespace) -> dict[str, list[Stage]]:
    """The stages by part, both in the order in which they matter."""
    sizes, shapes = (TINY, ("tiny",)) if args.tiny else (SIZES, SHAPES)
    against = shapes[:2]  # these are compared with transformers too
    tests = "-m pytest -m gpu --no-header -p no:cacheprovider --dist worksteal --max-worker-restart 100 "
    tests += "--durations 25 --junitxml {out}/tests.xml"
    if find_spec("pytest_timeout"):  # a kernel that never ends costs its process, and not the whole time
        tests += " --timeout 180 --timeout-method thread"
    kernels = f"tests/kernels/kernel_speed.py --device {{device}} --out {{result}} {sizes['kernels']}"
    return {
        "tests": [Stage("tests", 240, f"{tests} {sizes['tests']}")],
        "shape": [bench(args, shape, 60 if i else 90, OURS, shape) for i, shape in enumerate(shapes)],
        "train": training(args),
        "kernels": [Stage("kernels", 180, kernels), bench(args, f"compiled {against[-1]}", 240, COMPILED, against[-1])],
        "transformers": [
            *(bench(args, f"transformers {s}", 120 if i else 180, ALL, s) for i, s in enumerate(against)),
            bench(args, "transformers pair", 100, ALL),
        ],
    }


def choose(by_part: dict[str, list[Stage]], wanted: str | None) -> list[Stage]:
    """The stages that a comma-separated list of parts and stages names; None: all of them."""
    every = [stage for stages in by_part.values() for stage in stages]
    if wanted is None:
        return every
    names = wanted.split(",")
    if unknown := set(names) - set(by_part) - {stage.name for stage in every}:
        known = "; ".join(f"{part}: {', '.join(stage.name for stage in stages)}" for part, stages in by_part.items())
        raise ValueError(f"there is no part and no stage {min(unknown)!r}: there are {known}")
    return [s for part, stages in by_part.items() for s in stages if part in names or s.name in names]


def run_stage(stage: Stage, limit: float, args: argparse.Namespace) -> dict:
    """Run a stage and return its record. `outcome` is done, failed, out of time, skipped or kept (made before).

    When the time is over, `timeout` interrupts the command and its children, as Ctrl-C does, and kills them later.
    """
    result, log = (args.out / f"{stage.name.replace(' ', '_')}.{ending}" for ending in ("json", "log"))
    fields = vars(args) | {"result": result, "limit": round(limit), "budget": round(0.75 * limit)}
    command = [sys.executable, *(word.format(**fields) for word in shlex.split(stage.command))]
    record = {"stage": stage.name, "command": shlex.join(command), "limit_seconds": round(limit, 1)}
    if stage.makes is not None and stage.makes.exists():
        return record | {"outcome": "kept", "reason": f"{stage.makes} is there already"}
    if None in stage.needs:
        return record | {"outcome": "skipped", "reason": "no --conversations were given"}
    missing = [f"{path} is missing" for path in stage.needs if not path.exists()]
    if missing or limit < 1:
        return record | {"outcome": "skipped", "reason": (missing or ["no time is left"])[0]}
    start, limited = time.monotonic(), ["timeout", "--signal=INT", f"--kill-after={GRACE}", f"{limit:.0f}", *command]
    with log.open("wb") as output:
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        code = subprocess.run(limited, cwd=ROOT, **how, check=False).returncode
    stopped = code in OUT_OF_TIME
    well = (code == 0 or (stopped and not stage.ends_itself)) and (stage.makes is None or stage.makes.exists())
    record |= {"outcome": "done" if well else "out of time" if stopped else "failed", "exit_code": code}
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
    return record | {"seconds": round(time.monotonic() - start, 1), "last_line": last}


def run_stages(stages: list[Stage], head: dict, args: argparse.Namespace) -> list[dict]:
    """Run all stages, each within its share of the time that is left; returns their records."""
    deadline, records = time.monotonic() + 60 * args.minutes, []
    for i, stage in enumerate(stages):
        left = deadline - time.monotonic()
        later = sum(s.seconds for s in stages[i:] if s.makes is None or not s.makes.exists())
        record = run_stage(stage, left * stage.seconds / max(later, stage.seconds), args)
        print(f"{stage.name}: {record['outcome']}, {record.get('seconds', 0)} s", file=sys.stderr, flush=True)
        records.append(record)
        write_json(args.out / "gpu_proof.json", head | {"stages": records})
    return records


def arguments() -> argparse.Namespace:
    """Return the parsed flags, with absolute paths. Raises ValueError for bad values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", help="parts, and stages of them, with commas between; default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything that this call runs (default 9)")
    parser.add_argument("--conversations", type=Path, help="to train from: .json, .jsonl or .jsonl.xz")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens: a rehearsal, no measurement")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_proof", help="for data and weights")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_proof" / "out", help="for logs and results")
    args = parser.parse_args()
    if args.minutes <= 0:
        raise ValueError(f"--minutes must be positive, got {args.minutes}")
    if args.conversations is not None and not args.conversations.is_file():
        raise ValueError(f"no such data file: {args.conversations}")
    for name in ("conversations", "work", "out"):  # the stages run in the repository's root
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path.absolute())
    return args


def set_environment(work: Path) -> None:
    """What all stages share: kernels once compiled serve every process, and nothing waits for a network."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(work / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work / "inductor"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"  # so that a log holds what was done before a kill
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it


@one_sentence_errors
def main() -> None:
    """Run the chosen stages. Exits with 1 if one failed."""
    args = arguments()
    head = provenance(check_device(args.device)) | {"tiny": args.tiny, "cuda_device": args.device.startswith("cuda")}
    stages = choose(parts(args), args.stages)
    output_folder(args.out)
    set_environment(output_folder(args.work))
    records = run_stages(stages, head, args)
    table = Table("stage", "outcome", "seconds", "", title="stages")
    for record in records:
        remark = record.get("reason") or ("" if record["outcome"] == "done" else record["last_line"][:100])
        table.add_row(record["stage"], record["outcome"], str(record.get("seconds", "")), remark)
    console(160).print(table)
    outcomes = {record["stage"]: record["outcome"] for record in records}
    print(json.dumps({"out": str(args.out), "outcomes": outcomes}))
    if "failed" in outcomes.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
