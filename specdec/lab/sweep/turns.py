"""Drafters side by side on one target: every prompt is decoded plainly and by each, in turn."""

import math
from collections import Counter, abc
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from specdec.api import answer
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine, Result
from specdec.engine.sequence import Sequence
from specdec.engine.traces import acceptance_by_depth, interval_of, tau, tau_interval
from specdec.lab.traces.metrics import Interval
from specdec.model.language_model import LanguageModel
from specdec.structs import Sampling, Verifier
from specdec.text import Prompt
from specdec.trees.spec import describe
from specdec.verify import in_words

UNKNOWN = (math.nan, math.nan)  # an interval over one prompt
PARTS = ("draft", "verify", "commit", "round")  # of a round's time; a compiled or replayed one has no parts


@dataclass
class ComparedWay:
    """A way to decode that is compared with plain decoding. compile: compile its rounds (docs/compile.md)."""

    drafter: Drafter
    tree: TreePolicy
    verifier: Verifier
    compile: bool = False


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
    compiled: bool  # its rounds


@dataclass
class Tally:
    """What one way has done so far. counts: fp64 [prompts,3], by prompt rounds, tokens emitted in them, seconds."""

    counts: Tensor
    rows: list[Sequence] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, result: Result) -> None:
        """The result of the prompt of this number."""
        self.rows += result.rows
        trace = result.rows[0].trace
        self.counts[number] += torch.tensor([trace.rounds, sum(trace.emitted), result.decode_seconds]).double()
        self.parts.update(result.parts)

    @property
    def rate(self) -> float:
        """Tokens per second after the first token of each text."""
        return _rates(self.counts.sum(0)).item()


def _rates(counts: Tensor) -> Tensor:
    """Tokens/s [...] of counts [...,3] as `Tally` has them; 0 where no time was spent."""
    return torch.where(counts[..., 2] > 0, counts[..., 1] / counts[..., 2], 0.0)


def ratio(a: Tally, b: Tally) -> tuple[float, Interval]:
    """How many times as fast `a` is as `b` on the same prompts, and the 95 % interval of that over prompts."""

    def measure(counts: Tensor) -> Tensor:
        slow = _rates(counts[..., 3:])
        return torch.where(slow > 0, _rates(counts[..., :3]) / slow, 0.0)

    both = torch.cat([a.counts, b.counts], 1)
    return measure(both.sum(0)).item(), interval_of(measure, both) or UNKNOWN


def decode_in_turn(
    target: LanguageModel,
    prompts: abc.Sequence[Prompt],
    ways: dict[str, ComparedWay],
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    trials: int = 1,
    compile: bool = False,
    progress: bool | None = None,
    **how,
) -> tuple[dict[str, Tally], list[Score]]:
    """Decode every prompt plainly and in each of the ways, in turn, `trials` times after one prompt of warm-up.

    Taking turns spreads whatever else the machine does evenly. compile: plain decoding's rounds; each way says so of
    its own. progress: show a bar; None does so on a terminal. how: further arguments of `specdec.answer`. Returns the
    tallies by name, plain decoding's under "", and the scores in the order of `ways`. Raises ValueError where rounds
    cannot be compiled.
    """
    # An engine keeps what it has captured from prompt to prompt.
    engines = {"": Engine(target, compile=compile)}
    for name, way in ways.items():
        engines[name] = Engine(target, way.drafter, way.tree, way.verifier, compile=way.compile)
    tallies = {name: Tally(torch.zeros(len(prompts), 3, dtype=torch.float64)) for name in engines}

    def run(number: int, engine: Engine) -> Result:
        return answer(engine, prompts[number], sampling=sampling, seed=[(seed, number)], **how).result

    for engine in engines.values():
        run(0, engine)
    turns, off = list(range(len(prompts))) * trials, None if progress is None else not progress
    for number in tqdm(turns, "prompts", mininterval=1.0, disable=off):
        for name, engine in engines.items():
            tallies[name].add(number, run(number, engine))
    greedy = sampling is None or sampling.greedy
    return tallies, [score(name, way, tallies[name], tallies[""], greedy) for name, way in ways.items()]


def score(name: str, way: ComparedWay, tally: Tally, plain: Tally, greedy: bool = True) -> Score:
    """Return a drafter's figures from its tally and from plain decoding's. greedy: whether decoding was greedy."""
    traces, prompts = [row.trace for row in tally.rows], len(tally.counts)
    same = [a.tokens == b.tokens for a, b in zip(tally.rows, plain.rows, strict=True)]  # one trial after the other
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
        tau_interval=tau_interval(tally.counts[:, :2]) or UNKNOWN,
        acceptance_by_depth=acceptance_by_depth(traces, way.tree.steps),
        tokens_per_second=tally.rate,
        ratio_to_plain=times,
        ratio_interval=interval,
        milliseconds_a_round={part: 1e3 * tally.parts[part] / rounds for part in PARTS},
        same_as_plain=sum(all(same[number::prompts]) for number in range(prompts)),
        settled=greedy or way.verifier.couples,
        prompts=prompts,
        num_draft_tokens=way.tree.num_draft_tokens,
        draft_vocab=way.drafter.vocab.size,
        compiled=way.compile,
    )


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
