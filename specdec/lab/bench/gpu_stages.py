"""What a first session on a GPU runs, in parts, the most important first (docs/gpu.md, scripts/gpu_proof.py).

The seconds of a stage are what it should take on one H100, estimated before any of this has run on a GPU. A call shares
its time out in proportion to them.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.lab.bench.stages import Stage

SIMULATED_TAU = 3.0
TREE = {"topk": 10, "steps": 8, "num_draft_tokens": 60}  # that of docs/gpu_round.md
OURS = "suite.contenders=[plain,speculative]"
COMPILED = "suite.contenders=[plain,speculative,compiled-plain,compiled-speculative]"
ALL = "suite.contenders=[plain,speculative,sdpa,eager,prompt-lookup,static-compile]"


@dataclass(frozen=True)
class Sizes:
    """Further words of the commands: these are the real ones, and `TINY` those of a rehearsal on a CPU."""

    tests: str = "-n 8"  # processes: compiling kernels takes most of the time, and the GPU holds many small models
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
class Proof:
    """The stages of one device. results: a folder for JSON files; work: one for data and weights."""

    device: str
    work: Path
    results: Path
    conversations: Path | None
    sizes: Sizes

    def parts(self) -> dict[str, list[Stage]]:
        """The stages by part, both in the order in which they matter."""
        sizes, each = self.sizes, f"-m specdec.lab.bench.kernels --device {self.device}"
        return {
            "tests": [self.tests()],
            "shape": self.shapes(),
            "train": self.train(),
            "kernels": [
                self.stage("kernels", 180, f"{each} {sizes.kernels}"),
                self.bench(f"compiled {sizes.against[-1]}", 240, COMPILED, sizes.against[-1]),
            ],
            "transformers": [
                *(self.bench(f"transformers {s}", 120 if i else 180, ALL, s) for i, s in enumerate(sizes.against)),
                self.bench("transformers pair", 100, ALL),
            ],
        }

    def stage(self, name: str, seconds: float, text: str, *words: object, out: str | None = "--out {}", **how) -> Stage:
        """Return the stage of a Python command: the words of a text, and further ones.

        out: the words that name the result file; None: the command has none. The file is named after the stage, or
        after `result`.
        """
        result = self.results / f"{how.pop('result', name).replace(' ', '_')}.json" if out else None
        named = [word.format(result) for word in out.split()] if out else []
        command = [sys.executable, *text.split(), *map(str, words), *named]
        return Stage(name, command, seconds, result=result, **how)

    def tests(self) -> Stage:
        text = "-m pytest -p specdec.lab.bench.outcomes -m gpu --no-header -p no:cacheprovider --dist worksteal "
        if find_spec("pytest_timeout"):  # a kernel that never ends costs its process, and not the whole time
            text += "--timeout 180 --timeout-method thread "
        return self.stage("tests", 240, f"{text}--max-worker-restart 100 {self.sizes.tests}", out="--outcomes {}")

    def shapes(self) -> list[Stage]:
        """Random weights: rounds by part, and decoding plainly and with a simulated tau."""
        text = f"-m specdec.lab.bench.replayed_rounds --device {self.device} --tau {SIMULATED_TAU} {self.sizes.rounds}"
        text += "".join(f" --{name.replace('_', '-')} {value}" for name, value in TREE.items())
        stages = []
        for i, shape in enumerate(self.sizes.shapes):
            if i < self.sizes.parts:
                stages.append(self.stage(f"rounds {shape}", 60 if i else 110, f"{text} --shape {shape}"))
            stages.append(self.bench(f"bench {shape}", 60 if i else 90, OURS, shape))
        return stages

    def bench(self, name: str, seconds: float, contenders: str, shape: str | None = None) -> Stage:
        """The benchmark of a shape with a simulated tau, or of the trained pair."""
        text = f"-m specdec lab bench device={self.device} budget_s={{budget}} {contenders} "
        if shape is not None:
            tree = " ".join(f"{key}={value}" for key, value in TREE.items())
            text += f"shape={shape} simulate_tau={SIMULATED_TAU} {tree} {self.sizes.shape}"
            return self.stage(name, seconds, text, out="out={}")
        target, draft = self.pair
        words = f"target={target}", f"draft={draft}", f"prompts={self.work / 'pair' / 'heldout.jsonl'}"
        how: dict[str, Any] = {"out": "out={}", "result": f"bench_{name}", "needs": self.pair}
        return self.stage(name, seconds, text + self.sizes.pair, *words, **how)

    @property
    def pair(self) -> tuple[Path, Path]:
        """The target and the drafter that are trained."""
        return self.work / "pair" / "target", self.work / "draft" / "draft"

    def train(self) -> list[Stage]:
        """A target, its answers, its drafter, and both decoding together."""
        (target, draft), sizes, answers = self.pair, self.sizes, self.work / "answers"
        folder, on_device = target.parent, f"--device {self.device}"
        pretrain = f"scripts/pretrain_target.py {on_device} --seconds {{limit}} {sizes.target} --out"
        regenerate = f"-m specdec data regenerate {on_device} {sizes.answers} --target"
        learn = f"-m specdec train device={self.device} drafter=eagle3_1 drafter.draft_vocab_size=null "
        learn += f"drafter.train_head=false data.bad=skip {sizes.drafter}"
        paths = f"target={target}", f"out={self.work / 'draft'}", f"data={answers}/answers*.jsonl"
        words = *paths, "objective.terms={tokens: 1.0}"  # as the demo's
        generate = f"-m specdec generate --compare --json {on_device} {sizes.tau}"
        both = "--target", target, "--draft", draft, "--prompts", folder / "heldout.jsonl"
        asked = target, "--prompts", folder / "prompts.jsonl", "--out", answers / "answers.jsonl"
        missing = {} if self.conversations else {"void": "no --conversations were given"}
        learnt = {"makes": draft, "needs": (target, answers)}
        return [
            self.stage(
                "target", 220, pretrain, folder, "--data", self.conversations, out=None, makes=target, **missing
            ),
            # If the time is over, the shards that are whole serve.
            self.stage("answers", 60, regenerate, *asked, out=None, needs=(target,), ends_itself=False),
            self.stage("drafter", 100, learn, *words, out=None, ends_itself=False, **learnt),
            self.stage("tau", 40, generate, *both, out=None, needs=self.pair),
            self.stage("tau of a chain", 40, f"{generate} --topk 1 --steps 3", *both, out=None, needs=self.pair),
            self.bench("pair", 60, OURS),
        ]
