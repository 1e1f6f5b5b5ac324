"""What a first session on a GPU runs, in parts, the most important first (docs/gpu.md, scripts/gpu_proof.py).

The seconds of a stage are what it should take on one H100, estimated before any of this has run on a GPU. A call shares
its time out in proportion to them.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec.lab.bench.stages import Stage

SIMULATED_TAU = 3.0
BENCH = ("-m", "specdec.lab.bench.bench_command")
TREE = {"topk": 10, "steps": 8, "num_draft_tokens": 60}  # that of docs/gpu_round.md
OURS = "suite.contenders=[plain,speculative]"
WORKERS = 8  # processes that test: compiling kernels takes most of the time, and the GPU holds many small models


@dataclass(frozen=True)
class Sizes:
    """Further words of the commands: these are the real ones, and `TINY` those of a rehearsal on a CPU."""

    tests: str = f"-n {WORKERS}"
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
    shapes: tuple[str, ...] = ("llama_3_1_8b", "llama_3_2_1b", "qwen3_1_7b", "gemma3_1b")
    against: tuple[str, ...] = ("llama_3_1_8b", "llama_3_2_1b")  # shapes that are compared with transformers
    parts: int = 2  # of the shapes so many are timed by part too
    shape: str = "suite.configurations=[short,tg128] suite.warmups=1"
    rounds: str = ""
    kernels: str = ""


TINY = Sizes(
    tests="-n 2 tests/engine/test_gpu.py",
    target="--vocab-size 320 --hidden-size 64 --layers 4 --length 256 --batch-tokens 1024 --heldout 2 --tokens 40000 "
    "--eager",
    answers="--limit 24 --batch-size 8 --max-new-tokens 16 --shard-size 8",
    drafter="trainer.steps=3 trainer.schedule=constant trainer.ema=0.99 trainer.batch_tokens=256 trainer.muon_lr=0.02 "
    "trainer.autocast=bf16 data.heldout=2 objective.steps=2",
    tau="--max-new-tokens 16",
    pair="suite.configurations=[short] suite.warmups=1 suite.trials=1",
    shapes=("tiny",),
    against=("tiny",),
    parts=1,
    shape="suite.configurations=[short] suite.warmups=1 suite.trials=1",
    rounds="--trials 2 --new-tokens 24 --context 64",
    kernels="--tiny --nodes 8 --context 64 --trials 2",
)


@dataclass(frozen=True)
class Place:
    """Where the stages work: results are a folder for JSON files, work one for data and weights."""

    device: str
    work: Path
    results: Path
    conversations: Path | None = None


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def parts(place: Place, sizes: Sizes) -> dict[str, list[Stage]]:
    """The stages by part, both in the order in which they matter."""
    return {
        "tests": [tests(place, sizes)],
        "shape": shapes(place, sizes),
        "train": train(place, sizes),
        "kernels": kernels(place, sizes),
        "transformers": transformers(place, sizes),
    }


def tests(place: Place, sizes: Sizes) -> Stage:
    result = place.results / "tests.json"
    pytest = ["-m", "pytest", "-p", "specdec.lab.bench.outcomes", "--outcomes", result, "-m", "gpu", "--no-header"]
    pytest += ["-p", "no:cacheprovider", "--dist", "worksteal", "--max-worker-restart", "100"]
    if find_spec("pytest_timeout"):  # a kernel that never ends costs its process, and not the whole time
        pytest += ["--timeout", "180", "--timeout-method", "thread"]
    return Stage("tests", python(*pytest, *sizes.tests.split()), 240, result=result)


def shapes(place: Place, sizes: Sizes) -> list[Stage]:
    """Random weights: rounds by part, and decoding plainly and with a simulated tau."""
    tree = [word for name, value in TREE.items() for word in (f"--{name.replace('_', '-')}", value)]
    stages = []
    for i, shape in enumerate(sizes.shapes):
        if i < sizes.parts:
            out = place.results / f"rounds_{shape}.json"
            words = ["--shape", shape, "--device", place.device, "--tau", SIMULATED_TAU, "--out", out, *tree]
            rounds = python("-m", "specdec.lab.bench.replayed_rounds", *words, *sizes.rounds.split())
            stages.append(Stage(f"rounds {shape}", rounds, 110 if i == 0 else 60, result=out))
        stages.append(shape_bench(place, sizes, shape, f"bench {shape}", 90 if i == 0 else 60, OURS))
    return stages


def shape_bench(place: Place, sizes: Sizes, shape: str, name: str, seconds: float, contenders: str) -> Stage:
    out = place.results / f"{name.replace(' ', '_')}.json"
    words = [f"shape={shape}", f"device={place.device}", f"simulate_tau={SIMULATED_TAU}", "budget_s={budget}"]
    words += [f"out={out}", *(f"{name}={value}" for name, value in TREE.items())]
    return Stage(name, python(*BENCH, *words, *sizes.shape.split(), contenders), seconds, result=out)


def train(place: Place, sizes: Sizes) -> list[Stage]:
    """A target, its answers, its drafter, and both decoding together."""
    work, on_device = place.work, ["--device", place.device]
    pair, answers = work / "pair", work / "answers"
    target, draft = pair / "target", work / "draft" / "draft"
    pretrain = ["scripts/pretrain_target.py", "--data", place.conversations, "--out", pair, *on_device]
    regenerate = [
        "-m",
        "specdec.training.regenerate",
        "--target",
        target,
        "--prompts",
        pair / "prompts.jsonl",
        *on_device,
    ]
    learn = [
        "-m",
        "specdec.training.train",
        f"target.path={target}",
        f"data.path={answers}/answers*.jsonl",
        "data.bad=skip",
    ]
    learn += [f"out={work / 'draft'}", f"device={place.device}", "drafter=eagle3_1", "drafter.draft_vocab_size=null"]
    learn += ["drafter.train_head=false", "objective.terms={tokens: 1.0}"]  # as the demo's
    heldout = ["--prompt-file", pair / "heldout.jsonl", *on_device]
    generate = ["-m", "specdec.generate", "--target", target, "--draft", draft, *heldout, "--compare", "--json"]
    chain = ["--topk", 1, "--steps", 3]
    no_data = None if place.conversations else "no --conversations were given"
    pretrained = python(*pretrain, "--seconds", "{limit}", *sizes.target.split())
    answered = python(*regenerate, "--out", answers / "answers.jsonl", *sizes.answers.split())
    both = (target, draft)
    return [
        Stage("target", pretrained, 220, makes=target, void=no_data),
        Stage("answers", answered, 60, needs=(target,), ends_itself=False),  # the shards that are whole serve
        Stage("drafter", python(*learn, *sizes.drafter.split()), 100, (target, answers), draft, ends_itself=False),
        Stage("tau", python(*generate, *sizes.tau.split()), 40, needs=both),
        Stage("tau of a chain", python(*generate, *chain, *sizes.tau.split()), 40, needs=both),
        pair_bench(place, sizes, "pair", 60, OURS),
    ]


def pair_bench(place: Place, sizes: Sizes, name: str, seconds: float, contenders: str = "") -> Stage:
    """The trained pair."""
    target, draft = place.work / "pair" / "target", place.work / "draft" / "draft"
    out = place.results / f"bench_{name.replace(' ', '_')}.json"
    words = [f"target.path={target}", f"draft={draft}", f"device={place.device}", f"out={out}", "budget_s={budget}"]
    words += [f"prompts={place.work / 'pair' / 'heldout.jsonl'}", *sizes.pair.split(), *contenders.split()]
    return Stage(name, python(*BENCH, *words), seconds, needs=(target, draft), result=out)


def kernels(place: Place, sizes: Sizes) -> list[Stage]:
    """Each kernel against what torch makes of its formula, and rounds with our kernels against compiled ones."""
    out, shape = place.results / "kernels.json", sizes.against[-1]
    words = ["--device", place.device, "--out", out, *sizes.kernels.split()]
    ways = "suite.contenders=[plain,speculative,compiled-plain,compiled-speculative]"
    each = Stage("kernels", python("-m", "specdec.lab.bench.kernels", *words), 180, result=out)
    return [each, shape_bench(place, sizes, shape, f"compiled {shape}", 240, ways)]


def transformers(place: Place, sizes: Sizes) -> list[Stage]:
    """The same as in other parts, with the contenders of transformers."""
    every = "suite.contenders=[plain,speculative,sdpa,eager,prompt-lookup,static-compile]"
    shapes = [
        shape_bench(place, sizes, shape, f"transformers {shape}", 180 if i == 0 else 120, every)
        for i, shape in enumerate(sizes.against)
    ]
    return [*shapes, pair_bench(place, sizes, "transformers pair", 100, every)]
