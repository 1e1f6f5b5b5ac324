"""Drafters side by side on one target: every prompt is decoded plainly and by each, in turn."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from specdec.api import answer
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine, Result
from specdec.engine.sequence import Sequence
from specdec.engine.trace import acceptance_by_depth, tau
from specdec.model.target import Target
from specdec.types import Sampling, Verifier
from trees.spec import describe


@dataclass
class ComparedWay:
    """A way to decode that is compared with plain decoding."""

    drafter: Drafter
    tree: TreePolicy
    verifier: Verifier


@dataclass
class Score:
    """What one way to decode did on all prompts. Times leave out the prefill and the first token."""

    name: str
    drafter: str  # its class
    tree: str  # as `trees.spec.describe` has it
    verifier: str
    lossless: bool
    tau: float
    acceptance_by_depth: list[float]
    tokens_per_second: float
    ratio_to_plain: float
    milliseconds_a_round: dict[str, float]  # draft, verify, commit
    same_as_plain: int  # prompts whose text is that of plain decoding
    settled: bool  # it has to be so, but for rounding: the texts are greedy, or the rule draws as plain decoding does
    prompts: int
    num_draft_tokens: int
    draft_vocab: int


@dataclass
class _Tally:
    """What one way to decode has done so far."""

    rows: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)

    def add(self, result) -> None:
        self.rows += result.rows
        self.texts += [row.tokens for row in result.rows]
        self.seconds += result.decode_seconds
        for part, seconds in result.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    @property
    def rate(self) -> float:
        decoded = sum(len(row.tokens) - 1 for row in self.rows)
        return decoded / self.seconds if self.seconds else 0.0


def compare(
    target: Target,
    prompts: list[str],
    ways: dict[str, ComparedWay],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    raw: bool = False,
    trials: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> tuple[float, list[Score]]:
    """Decode every prompt plainly and in each of the ways, in turn, `trials` times after one prompt of warm-up.

    Taking turns spreads whatever else the machine does evenly. progress: called after every prompt. Returns plain
    decoding's tokens/s, and the scores in the order of `ways`.
    """
    # An engine keeps what it has captured from prompt to prompt.
    engines = {"": Engine(target)}
    engines |= {name: Engine(target, way.drafter, way.tree, way.verifier) for name, way in ways.items()}
    tallies = {name: _Tally() for name in engines}

    def run(number: int, engine: Engine) -> Result:
        how = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": [(seed, number)], "raw": raw}
        return answer(engine, prompts[number], **how).result

    for engine in engines.values():
        run(0, engine)
    for _ in range(trials):
        for number in range(len(prompts)):
            for name, engine in engines.items():
                tallies[name].add(run(number, engine))
            progress()
    plain, greedy = tallies.pop(""), sampling is None or sampling.greedy
    return plain.rate, [score(name, ways[name], tally, plain, greedy) for name, tally in tallies.items()]


def score(name: str, way: ComparedWay, tally: _Tally, plain: _Tally, greedy: bool = True) -> Score:
    traces = [row.trace for row in tally.rows]
    rounds = max(sum(trace.rounds for trace in traces), 1)
    return Score(
        name=name,
        drafter=type(way.drafter).__name__,
        tree=describe(way.tree),
        verifier=str(way.verifier),
        lossless=way.verifier.lossless,
        tau=tau(traces),
        acceptance_by_depth=acceptance_by_depth(traces, way.tree.steps),
        tokens_per_second=tally.rate,
        ratio_to_plain=tally.rate / plain.rate if plain.rate else 0.0,
        milliseconds_a_round={p: 1e3 * tally.parts.get(p, 0.0) / rounds for p in ("draft", "verify", "commit")},
        same_as_plain=sum(a == b for a, b in zip(tally.texts, plain.texts, strict=True)),
        settled=greedy or way.verifier.couples,
        prompts=len(tally.texts),
        num_draft_tokens=way.tree.num_draft_tokens,
        draft_vocab=way.drafter.vocab.size,
    )


def as_rows(scores: list[Score]) -> list[dict]:
    """Flat rows for a CSV file: a column for each depth and each part."""
    depth = max(len(s.acceptance_by_depth) for s in scores)
    rows = []
    for s in scores:
        row = asdict(s)
        for d, share in enumerate(row.pop("acceptance_by_depth") + [""] * (depth - len(s.acceptance_by_depth)), 1):
            row[f"accepted_to_depth_{d}"] = share
        for part, milliseconds in row.pop("milliseconds_a_round").items():
            row[f"{part}_ms_a_round"] = milliseconds
        rows.append(row)
    return rows
