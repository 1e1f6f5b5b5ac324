"""A small sweep, for tests of what sweeps measure, write and report."""

from pathlib import Path

from specdec.lab.sweep.benchmarks import Benchmark, Question
from specdec.lab.sweep.sweep import Sweep
from specdec.structs import Sampling
from specdec.verify import make_verifier

QUESTIONS = [
    Question("a", "animals", ("The quick brown", "And the dog?")),
    Question("b", "numbers", ("What is 12 + 30?",)),
    Question("c", "animals", ("Ein Café",)),
]
BENCHMARK = Benchmark("tiny", QUESTIONS)
BEST = {"questions": 2, "steps": 2, "topk": 2, "num_draft_tokens": [4]}


def tiny_sweep(target, out: Path, benchmark: Benchmark = BENCHMARK, **how) -> Sweep:
    """Greedy answers of at most 8 tokens to the questions."""
    out.mkdir(exist_ok=True)
    usual = {"max_new_tokens": 8, "resamples": 20, "probe": 1}
    usual |= {"sampling": Sampling(), "verifier": make_verifier("match")}
    return Sweep(target, "signature", benchmark, out, **usual | how)
