"""Drafters side by side on one target: every prompt is decoded plainly and by each, in turn."""

import math
from collections import abc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from specdec.api import answer
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine, Result
from specdec.engine.sequence import Sequence
from specdec.engine.traces import acceptance_by_depth, tau, tau_interval
from specdec.lab.traces.summary import Interval, bootstrap
from specdec.model.target import Target
from specdec.structs import Sampling, Verifier
from specdec.text import Prompt
from specdec.trees.spec import describe
from specdec.verify import in_words

PARTS = ("draft", "verify", "commit", "round")  # of a round's time; a compiled or replayed one has no parts


@dataclass
class ComparedWay:
    """A way to decode that is compared with plain decoding."""

    drafter: Drafter
    tree: TreePolicy
    verifier: Verifier
    compile: bool = False  # its rounds (docs/compile.md)


@dataclass
class Score:
    """What one way to decode did on all prompts. Times leave out the prefill and the first token."""

    name: str
    drafter: str  # its class
    tree: str  # as `specdec.trees.spec.describe` has it
    verifier: str
    rule: str  # the verifier, as a user names it
    lossless: bool
    tau: float
    tau_interval: Interval  # 95 % over prompts, as the next; nan for a single one
    acceptance_by_depth: list[float]
    tokens_per_second: float
    ratio_to_plain: float
    ratio_interval: Interval
    milliseconds_a_round: dict[str, float]  # by PARTS
    same_as_plain: int  # prompts whose text is that of plain decoding
    settled: bool  # it has to be so, but for rounding: the texts are greedy, or the rule draws as plain decoding does
    prompts: int
    num_draft_tokens: int
    draft_vocab: int


@dataclass
class Decoded:
    """One prompt, decoded once."""

    question: str  # which prompt; what intervals resample
    emitted: int  # tokens of all rounds
    rounds: int
    seconds: float


@dataclass
class Tally:
    """What one way to decode has done so far."""

    rows: list[Sequence] = field(default_factory=list)
    single: list[Decoded] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, number: int, result: Result) -> None:
        """The result of the prompt of this number."""
        self.rows += result.rows
        trace = result.rows[0].trace
        self.single.append(Decoded(str(number), sum(trace.emitted), trace.rounds, result.decode_seconds))
        for part, seconds in result.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    @property
    def rate(self) -> float:
        return rate(self.single)


class Pair(NamedTuple):
    """A prompt decoded in two ways."""

    question: str
    a: Decoded
    b: Decoded


def rate(single: abc.Sequence[Decoded]) -> float:
    """Tokens/s behind the first token of each text."""
    seconds = sum(one.seconds for one in single)
    return sum(one.emitted for one in single) / seconds if seconds else 0.0


def ratio(a: Tally, b: Tally) -> tuple[float, Interval]:
    """How many times as fast `a` is as `b` on the same prompts, and the 95 % interval of that over prompts."""

    def measure(pairs: list[Pair]) -> float:
        slow = rate([pair.b for pair in pairs])
        return rate([pair.a for pair in pairs]) / slow if slow else 0.0

    pairs = [Pair(one.question, one, other) for one, other in zip(a.single, b.single, strict=True)]
    return measure(pairs), bootstrap(measure, pairs)[0]


def decode_in_turn(
    target: Target,
    prompts: abc.Sequence[Prompt],
    ways: dict[str, ComparedWay],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    raw: bool = False,
    trials: int = 1,
    compile: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Tally], list[Score]]:
    """Decode every prompt plainly and in each of the ways, in turn, `trials` times after one prompt of warm-up.

    Taking turns spreads whatever else the machine does evenly. compile: plain decoding's rounds; each way says so of
    its own. progress: called after every prompt. Returns the tallies by name, plain decoding's under "", and the scores
    in the order of `ways`. Raises ValueError where rounds cannot be compiled.
    """
    # An engine keeps what it has captured from prompt to prompt.
    engines = {"": Engine(target, compile=compile)}
    for name, way in ways.items():
        engines[name] = Engine(target, way.drafter, way.tree, way.verifier, compile=way.compile)
    tallies = {name: Tally() for name in engines}

    def run(number: int, engine: Engine) -> Result:
        how = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": [(seed, number)], "raw": raw}
        return answer(engine, prompts[number], **how).result

    for engine in engines.values():
        run(0, engine)
    for _ in range(trials):
        for number in range(len(prompts)):
            for name, engine in engines.items():
                tallies[name].add(number, run(number, engine))
            progress()
    greedy = sampling is None or sampling.greedy
    return tallies, [score(name, way, tallies[name], tallies[""], greedy) for name, way in ways.items()]


def score(name: str, way: ComparedWay, tally: Tally, plain: Tally, greedy: bool = True) -> Score:
    traces = [row.trace for row in tally.rows]
    rounds = max(sum(trace.rounds for trace in traces), 1)
    times, interval = ratio(tally, plain)
    return Score(
        name=name,
        drafter=type(way.drafter).__name__,
        tree=describe(way.tree),
        verifier=str(way.verifier),
        rule=in_words(way.verifier),
        lossless=way.verifier.lossless,
        tau=tau(traces),
        tau_interval=_tau_interval(tally.single),
        acceptance_by_depth=acceptance_by_depth(traces, way.tree.steps),
        tokens_per_second=tally.rate,
        ratio_to_plain=times,
        ratio_interval=interval,
        milliseconds_a_round={part: 1e3 * tally.parts.get(part, 0.0) / rounds for part in PARTS},
        same_as_plain=sum(a.tokens == b.tokens for a, b in zip(tally.rows, plain.rows, strict=True)),
        settled=greedy or way.verifier.couples,
        prompts=len(tally.rows),
        num_draft_tokens=way.tree.num_draft_tokens,
        draft_vocab=way.drafter.vocab.size,
    )


def _tau_interval(single: list[Decoded]) -> Interval:
    """Over prompts, each with all its trials."""
    of_prompts: dict[str, list[int]] = {}
    for one in single:
        counts = of_prompts.setdefault(one.question, [0, 0])
        counts[0], counts[1] = counts[0] + one.rounds, counts[1] + one.emitted
    return tau_interval(torch.tensor(list(of_prompts.values()))) or (math.nan, math.nan)


def as_rows(scores: list[Score]) -> list[dict]:
    """Flat rows for a CSV file: a column for each depth and each part."""
    depth = max(len(s.acceptance_by_depth) for s in scores)
    rows = []
    for s in scores:
        row = asdict(s)
        for d, share in enumerate(row.pop("acceptance_by_depth") + [""] * (depth - len(s.acceptance_by_depth)), 1):
            row[f"accepted_to_depth_{d}"] = share
        for name in ("tau", "ratio"):
            row[f"{name}_low"], row[f"{name}_high"] = row.pop(f"{name}_interval")
        for part, milliseconds in row.pop("milliseconds_a_round").items():
            row[f"{part}_ms_a_round"] = milliseconds
        rows.append(row)
    return rows
