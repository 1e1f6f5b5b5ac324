"""Everything that needs a GPU, in one command of ten minutes:

    python scripts/gpu_proof.py --conversations conversations.jsonl.xz --minutes 10

It runs the tests marked gpu. It trains a target of 100 M parameters from the conversations, lets it answer, and trains
an EAGLE-3 head on the answers. It decodes with both, and measures tau and the ratio of times to plain decoding and to
transformers. It times the kernels against PyTorch, and our engine against transformers at the shapes of real models
with random weights and a simulated tau.

Every stage is a command with a time limit. As soon as it is over its record, with device and versions, is a JSON file
in --out. A stage that fails or runs out of time is recorded, and the next one runs. --stages takes some of them. What
an earlier run left under --work is not made again. `--device cpu --tiny` rehearses everything on small models.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from checkout import ROOT
from rich.table import Table

from lab.bench.stages import Stage, run_stages
from lab.machine import provenance
from lab.output import console, write_json
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.model.checkpoint import check_device

BENCH = ("-m", "lab.bench.bench_command")
TREE = ["topk=8", "steps=6", "num_draft_tokens=32"]  # a GPU verifies many nodes for the price of one
SIMULATED_TAU = 3.0


@dataclass(frozen=True)
class Sizes:
    """Further words of the commands: these are the real ones, and `TINY` those of a rehearsal on a CPU."""

    target: str = "--eager"  # in so short a training compiling costs about what it saves
    answers: str = "--limit 10000 --batch-size 512 --max-new-tokens 256 --shard-size 1024"
    # The rate is constant and the average of the weights is exported: the run ends when its time does, at any step.
    drafter: str = (
        "trainer.steps=100000 trainer.schedule=constant trainer.ema=0.99 trainer.batch_tokens=16384 trainer.lr=1e-3 "
        "trainer.muon_lr=0.02 trainer.autocast=bf16 trainer.save_every=100000 data.max_length=512 data.heldout=64 "
        "objective.steps=5"
    )
    tau: str = "--max-new-tokens 128"
    pair: str = "suite.configurations=[medium,short,sampled,tg128,pp512] suite.warmups=1 questions=2"
    shapes: tuple[str, ...] = ("llama_3_2_1b", "llama_3_1_8b", "qwen3_1_7b", "gemma3_1b")
    shape: str = "suite.configurations=[short,tg128] suite.warmups=1"
    tests: str = ""


TINY = Sizes(
    target="--vocab-size 320 --hidden-size 64 --layers 4 --length 256 --batch-tokens 1024 --heldout 2 --tokens 40000 "
    "--eager",
    answers="--limit 24 --batch-size 8 --max-new-tokens 16 --shard-size 8",
    drafter="trainer.steps=3 trainer.batch_tokens=256 data.heldout=2 objective.steps=2",
    tau="--max-new-tokens 16",
    pair="suite.configurations=[short] suite.warmups=1 suite.trials=1 suite.contenders=[plain,speculative,sdpa]",
    shapes=("tiny",),
    shape="suite.configurations=[short] suite.warmups=1 suite.trials=1 suite.contenders=[plain,speculative]",
    tests="tests/engine/test_gpu.py",
)


def pair_stages(args: argparse.Namespace, sizes: Sizes) -> list[Stage]:
    """What needs training: a target, its answers, its drafter, and both decoding together."""
    work, on_device = args.work, ["--device", args.device]
    pair, answers, draft = work / "pair", work / "answers", work / "draft" / "draft"
    target, heldout, result = pair / "target", pair / "heldout.jsonl", args.out / "bench_pair.json"
    pretrain = ["scripts/pretrain_target.py", "--data", args.conversations, "--out", pair, *on_device]
    regenerate = ["-m", "training.regenerate", "--target", target, "--prompts", pair / "prompts.jsonl", *on_device]
    train = ["-m", "training.train", f"target.path={target}", f"data.path={answers}/answers*.jsonl", "data.bad=skip"]
    train += [f"out={work / 'draft'}", f"device={args.device}", "drafter=eagle3_1", "drafter.draft_vocab_size=null"]
    train += ["drafter.train_head=false", "objective.terms={tokens: 1.0}"]  # as the demo's
    generate = ["-m", "specdec.generate", "--target", target, "--draft", draft, "--prompt-file", heldout, *on_device]
    bench = [*BENCH, f"target.path={target}", f"draft={draft}", f"device={args.device}", f"out={result}"]
    return [
        Stage(
            "target",
            python(*pretrain, "--seconds", "{limit}", *sizes.target.split()),
            share=0.36,
            makes=target,
            void=None if args.conversations else "no --conversations were given",
        ),
        Stage(
            "answers",
            python(*regenerate, "--out", answers / "answers.jsonl", *sizes.answers.split()),
            share=0.07,
            needs=(target,),
            ends_itself=False,  # the shards that are whole serve
        ),
        Stage(
            "drafter",
            python(*train, *sizes.drafter.split()),
            share=0.12,
            needs=(target, answers),
            makes=draft,
            ends_itself=False,
        ),
        Stage("tau", python(*generate, "--compare", "--json", *sizes.tau.split()), share=0.07, needs=(target, draft)),
        Stage(
            "pair",
            python(*bench, f"prompts={heldout}", "budget_s={budget}", *sizes.pair.split()),
            share=0.09,
            needs=(target, draft),
            result=result,
        ),
    ]


def machine_stages(args: argparse.Namespace, sizes: Sizes) -> list[Stage]:
    """What needs no training: kernels, and random weights."""
    gpu = None if args.device.startswith("cuda") else "the kernels' benchmark needs a GPU"
    kernels = args.out / "kernels.json"
    stages = [Stage("kernels", python("-m", "lab.bench.kernels", "--out", kernels), 0.1, result=kernels, void=gpu)]
    for shape in sizes.shapes:
        out = args.out / f"bench_{shape}.json"
        words = [f"shape={shape}", f"device={args.device}", f"simulate_tau={SIMULATED_TAU}", "budget_s={budget}"]
        words += [f"out={out}", *TREE]
        stages.append(Stage(f"bench {shape}", python(*BENCH, *words, *sizes.shape.split()), result=out))
    return stages


def test_stage(sizes: Sizes) -> Stage:
    return Stage("tests", python("-m", "pytest", "-m", "gpu", "--no-header", *sizes.tests.split()), share=0.08)


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def print_records(records: list[dict]) -> None:
    table = Table(title="stages")
    for column in ("stage", "outcome", "seconds", ""):
        table.add_column(column)
    for r in records:
        last = (r.get("output_tail", "").strip().splitlines() or [""])[-1]
        remark = r.get("reason") or (last[:100] if r["outcome"] != "done" else "")
        table.add_row(r["stage"], r["outcome"], str(r.get("seconds", "")), remark)
    console(160).print(table)


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, help="to train from: .json, .jsonl or .jsonl.xz")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens: a rehearsal, no measurement")
    parser.add_argument("--stages", help="names, with commas between; default: all")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_proof", help="for data and weights")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_proof" / "results", help="for the records")
    args = parser.parse_args()
    device = check_device(args.device)
    if args.minutes <= 0:
        raise ValueError(f"--minutes must be positive, got {args.minutes}")
    if args.conversations is not None and not args.conversations.is_file():
        raise ValueError(f"no such data file: {args.conversations}")
    for name in ("conversations", "work", "out"):  # the stages run in the repository's root
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path.absolute())
    output_folder(args.work)
    output_folder(args.out)
    sizes = TINY if args.tiny else Sizes()
    stages = [test_stage(sizes), *pair_stages(args, sizes), *machine_stages(args, sizes)]
    if args.stages is not None:
        wanted, names = args.stages.split(","), [s.name for s in stages]
        if unknown := set(wanted) - set(names):
            raise ValueError(f"there is no stage {min(unknown)!r}: there are {', '.join(names)}")
        stages = [s for s in stages if s.name in wanted]
    head = provenance(device) | {"tiny": args.tiny, "cuda_device": args.device.startswith("cuda")}
    records: list[dict] = []

    def done(record: dict) -> None:
        records.append(record)
        print(f"{record['stage']}: {record['outcome']}", file=sys.stderr, flush=True)
        name = record["stage"].replace(" ", "_")
        write_json(args.out / f"stage_{name}.json", head | record)
        write_json(args.out / "gpu_proof.json", head | {"stages": [brief(r) for r in records]})

    run_stages(stages, 60 * args.minutes, done, cwd=ROOT)
    print_records(records)
    outcomes = {r["stage"]: r["outcome"] for r in records}
    print(json.dumps({"out": str(args.out), "outcomes": outcomes, "torch": torch.__version__}))
    if "failed" in outcomes.values():
        sys.exit(1)


def brief(record: dict) -> dict:
    """A record without what its own file holds in full."""
    return {key: value for key, value in record.items() if key not in ("output_tail", "result")}


if __name__ == "__main__":
    main()
