"""Everything that needs a GPU, in parts of less than ten minutes (docs/gpu.md):

    python scripts/gpu_proof.py --stages tests
    python scripts/gpu_proof.py --stages shape
    python scripts/gpu_proof.py --stages train --conversations conversations.jsonl.xz

The parts, in the order in which they matter. tests: those marked gpu. shape: random weights in the shapes of real
models; plain decoding against the bandwidth, a round by part, the speed with a simulated tau. train: a target of 100 M
parameters from the conversations, its answers, an EAGLE-3 head for it; tau and the ratio of times. kernels: each
against PyTorch. transformers: our engine against transformers'.

Every stage is a command with a time limit; what it measures is on disk after each case. --out then holds
results.tar.gz, all results so far, and gpu_proof.json, how each stage ended. A stage that fails or runs out of time is
recorded, and the next one runs. What an earlier call left under --work is not made again. `--device cpu --tiny`
rehearses everything on small models. Nothing here needs git, the network, or specdec to be installed.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from checkout import ROOT
from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.cli.terminal import console
from specdec.lab.bench.gpu_stages import TINY, Proof, Sizes
from specdec.lab.bench.stages import Stage, packer, run_stages
from specdec.lab.machine import provenance
from specdec.lab.output import write_json
from specdec.model.checkpoint import check_device


def choose(by_part: dict[str, list[Stage]], wanted: str | None) -> list[Stage]:
    """The stages that a comma-separated list of parts and stages names; None: all of them."""
    every = [stage for stages in by_part.values() for stage in stages]
    if wanted is None:
        return every
    names = wanted.split(",")
    if unknown := set(names) - set(by_part) - {stage.name for stage in every}:
        parts = "; ".join(f"{part}: {', '.join(stage.name for stage in stages)}" for part, stages in by_part.items())
        raise ValueError(f"there is no part and no stage {min(unknown)!r}: there are {parts}")
    return [s for part, stages in by_part.items() for s in stages if part in names or s.name in names]


def print_records(records: list[dict]) -> None:
    table = Table(title="stages")
    for column in ("stage", "outcome", "seconds", ""):
        table.add_column(column)
    for r in records:
        last = (r.get("output_tail", "").strip().splitlines() or [""])[-1]
        remark = r.get("reason") or (last[:100] if r["outcome"] != "done" else "")
        table.add_row(r["stage"], r["outcome"], str(r.get("seconds", "")), remark)
    console(160).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", help="parts, and stages of them, with commas between; default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything that this call runs (default 9)")
    parser.add_argument("--conversations", type=Path, help="to train from: .json, .jsonl or .jsonl.xz")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens: a rehearsal, no measurement")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_proof", help="for data and weights")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_proof" / "out", help="for the results")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # then the running stage is ended too


@one_sentence_errors
def main() -> None:
    args = arguments()
    device, results = check_device(args.device), args.work / "results"
    proof = Proof(args.device, args.work, results, args.conversations, TINY if args.tiny else Sizes())
    stages = choose(proof.parts(), args.stages)
    output_folder(results)
    pack = packer(results, output_folder(args.out) / "results.tar.gz")
    head = provenance(device) | {"tiny": args.tiny, "cuda_device": args.device.startswith("cuda")}
    records: list[dict] = []

    def done(record: dict) -> None:
        records.append(record)
        print(f"{record['stage']}: {record['outcome']}, {record.get('seconds', 0)} s", file=sys.stderr, flush=True)
        write_json(results / f"stage_{record['stage'].replace(' ', '_')}.json", head | record)
        # The result itself is a file of the stage's own, or short.
        brief = [{key: r[key] for key in r if key not in ("output_tail", "result")} for r in records]
        write_json(args.out / "gpu_proof.json", head | {"stages": brief})
        pack()

    set_environment(args.work)
    run_stages(stages, 60 * args.minutes, done, results, cwd=ROOT, tick=pack)
    print_records(records)
    outcomes = {r["stage"]: r["outcome"] for r in records}
    print(json.dumps({"out": str(args.out), "outcomes": outcomes, "torch": torch.__version__}))
    if "failed" in outcomes.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
