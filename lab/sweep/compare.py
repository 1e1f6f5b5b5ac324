"""Drafters side by side: the same target, prompts and settings, one after the other on every prompt."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from specdec.api import DEMO_TARGET, generate
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.sequence import Sequence
from specdec.engine.trace import acceptance_by_depth, tau
from specdec.model.target import Target
from specdec.types import Sampling, Verifier


@dataclass
class Contender:
    """One way to decode."""

    drafter: Drafter
    tree: TreePolicy
    verifier: Verifier


@dataclass
class Score:
    """What a contender did on all prompts. Times are of decoding, the prefill with the first token left out."""

    name: str
    drafter: str
    tree: str
    verifier: str
    lossless: bool
    tau: float
    acceptance_by_depth: list[float]
    tokens_per_second: float
    ratio_to_plain: float
    milliseconds_a_round: dict[str, float]  # draft, verify, commit
    same_as_plain: int  # prompts whose text is plain decoding's; of use when greedy
    prompts: int
    num_draft_tokens: int
    draft_vocab: int


@dataclass
class _Tally:
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
    contenders: dict[str, Contender],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    raw: bool = False,
    trials: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> tuple[float, list[Score]]:
    """Decode every prompt plainly and with every contender, in turn, `trials` times after one prompt of warm-up.

    Taking turns spreads whatever else the machine does evenly. Returns plain decoding's tokens/s and the scores in the
    contenders' order. `progress` is called after every prompt.
    """
    everyone: dict[str, Contender | None] = {"": None, **contenders}
    tallies = {name: _Tally() for name in everyone}

    def run(prompt: str, who: Contender | None):
        kwargs = {} if who is None else {"drafter": who.drafter, "tree": who.tree, "verifier": who.verifier}
        return generate(
            target, prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, raw=raw, **kwargs
        ).result

    for who in everyone.values():
        run(prompts[0], who)
    for _ in range(trials):
        for prompt in prompts:
            for name, who in everyone.items():
                tallies[name].add(run(prompt, who))
            progress()
    plain = tallies.pop("")
    return plain.rate, [score(name, contenders[name], tally, plain) for name, tally in tallies.items()]


def score(name: str, who: Contender, tally: _Tally, plain: _Tally) -> Score:
    traces = [row.trace for row in tally.rows]
    rounds = max(sum(trace.rounds for trace in traces), 1)
    return Score(
        name=name,
        drafter=type(who.drafter).__name__,
        tree=describe_tree(who.tree),
        verifier=str(who.verifier),
        lossless=who.verifier.lossless,
        tau=tau(traces),
        acceptance_by_depth=acceptance_by_depth(traces, who.tree.steps),
        tokens_per_second=tally.rate,
        ratio_to_plain=tally.rate / plain.rate if plain.rate else 0.0,
        milliseconds_a_round={p: 1e3 * tally.parts.get(p, 0.0) / rounds for p in ("draft", "verify", "commit")},
        same_as_plain=sum(a == b for a, b in zip(tally.texts, plain.texts, strict=True)),
        prompts=len(tally.texts),
        num_draft_tokens=who.tree.num_draft_tokens,
        draft_vocab=who.drafter.vocab.size,
    )


def place(name: str) -> str:
    """Where a drafter or a file is that a setting names: demo/x is the bundled x."""
    return str(DEMO_TARGET.parent / name.removeprefix("demo/")) if name.startswith("demo/") else name


def describe_tree(tree: TreePolicy) -> str:
    return f"{type(tree).__name__} {tree.topk}/{tree.steps}/{tree.num_draft_tokens}"


def as_rows(scores: list[Score]) -> list[dict]:
    """Flat rows for a CSV: one column per depth and per part."""
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
