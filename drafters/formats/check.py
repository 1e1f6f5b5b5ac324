"""Does a drafter draft better when its checkpoint is read another way?

The target answers some prompts, greedily. Every reading of the checkpoint then drafts a chain from every position of
every answer. Two readings are compared by the log-probabilities that they give to the same tokens. A reading that is
better is taken, and the others are tried on top of it, as a config may be wrong in more than one place.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from math import erfc, inf, sqrt

import torch
from torch import Tensor

from specdec.contracts import Drafter
from specdec.drafters.formats import Checkpoint, open_checkpoint
from specdec.drafters.formats.base import Reading, Tensors
from specdec.drafters.formats.evidence import Answer, Followed, Taps, batches, follow, search_taps
from specdec.engine.engine import Engine
from specdec.engine.traces import tau_interval
from specdec.model.names import DEMO
from specdec.text import encode_prompt

PROMPTS = DEMO / "prompts.txt"  # what `specdec checkpoint check` asks the target, unless it is given other prompts
LEVEL = 0.01  # of significance of the test that another reading is better, divided by the number of those tried
ROUNDS = 3  # so many things may be declared wrongly
HARDLY = 1.1  # a tau below which nothing worth the name is accepted
NAMED = 3  # so many of the best taps are tried like other readings


@dataclass
class Outcome:
    """How well one reading drafts."""

    reading: Reading
    refused: str | None = None  # why it does not load
    followed: Followed | None = field(default=None, repr=False)  # None if it does not load
    taps: Taps = ()
    tau: float | None = None
    interval: tuple[float, float] | None = None  # 95 %, of tau over answers; None for fewer than two
    gain: float | None = None  # of log-probability for each token, in nats, over the reading that the round began with
    margin: float | None = None  # the half width of its 95 % interval
    # Compared with the first reading of the round: 'better'; 'worse'; 'likelier', which gives the answers' tokens more
    # probability and drafts no further; or 'noise', no significant difference. Empty if there is no comparison.
    verdict: str = ""

    @property
    def name(self) -> str:
        """Return the name of the reading."""
        return self.reading.name

    @property
    def reach(self) -> float:
        """`tau`; 0 if the reading does not load."""
        return self.tau or 0.0


@dataclass
class Report:
    """What was tried: a round for the declared reading, and one more for each that was found to be better."""

    rounds: list[list[Outcome]]  # the first of each is the one that the others are compared with
    chosen: list[Outcome]  # the better ones: of round i, element i
    searched: list[int]  # how many choices of taps each round tried; 0 if they were not searched
    answers: int
    positions: int
    steps: int

    @property
    def declared(self) -> Outcome:
        """Return the outcome of the reading that the checkpoint's config declares."""
        return self.rounds[0][0]

    @property
    def better_reading(self) -> str | None:
        """Return the names of the better readings, joined by semicolons, or None if there is none."""
        return "; ".join(outcome.name for outcome in self.chosen) or None


def check(
    target,
    path: str | os.PathLike,
    prompts: list[str],
    *,
    max_new_tokens: int = 64,
    steps: int = 5,
    raw: bool = False,
    allow_nonfinite: bool = False,
) -> Report:
    """Compare the declared reading with the others that are plausible for its family.

    steps: the length of the drafted chain. raw: do not apply the chat template. Raises ValueError for a checkpoint that
    loads in no reading, or, unless allow_nonfinite, whose weights hold NaN or Inf.
    """
    checkpoint = open_checkpoint(path)
    if not allow_nonfinite:
        checkpoint.refuse_nonfinite()
    return compare(target, checkpoint, answer(target, prompts, max_new_tokens, raw), steps)


def answer(target, prompts: list[str], max_new_tokens: int, raw: bool = False) -> list[Answer]:
    """The target's greedy answers."""
    ids = [encode_prompt(target, prompt, raw) for prompt in prompts]
    rows = Engine(target).generate(ids, max_new_tokens=max_new_tokens).rows
    device = target.device
    return [Answer(torch.tensor(row.prompt + row.tokens, device=device), len(row.prompt)) for row in rows]


@torch.inference_mode()
def compare(target, checkpoint: Checkpoint, answers: list[Answer], steps: int) -> Report:
    """All readings of a checkpoint over the same answers.

    Raises ValueError if it loads in no reading.
    """
    trial = _Trial(target, checkpoint, answers, steps)
    start = trial.try_reading(Reading("as declared", checkpoint.meaning, checkpoint.tensors))
    report = Report([], [], [], len(answers), trial.positions, steps)
    rivals: list[Taps] = []
    for _ in range(ROUNDS):
        outcomes, searched, finalists = trial.round(start, rivals)
        report.rounds.append(outcomes)
        report.searched.append(searched)
        better = [o for o in outcomes[1:] if o.verdict == "better"]
        if not better:
            break
        best = max(better, key=lambda o: -inf if o.followed is None else float(o.followed.logp.sum()))
        rivals = finalists if best.taps in finalists and best.taps != start.taps else []
        start = best
        report.chosen.append(best)
    if report.declared.refused and not report.chosen:
        raise ValueError(report.declared.refused)
    return report


class _Trial:
    """One checkpoint on the target's answers."""

    def __init__(self, target, checkpoint: Checkpoint, answers: list[Answer], steps: int):
        self.target, self.checkpoint, self.steps = target, checkpoint, steps
        self.family = checkpoint.family
        everything = batches(target, answers)
        few, some = max(1, len(answers) // 16), max(2, len(answers) // 4)
        self.stages = batches(target, answers[:few]), batches(target, answers[:some]), everything
        self.positions = sum(sum(batch.counts) for batch in everything)
        self.tried = self.searched = 0

    def construct(self, reading: Reading) -> Drafter:
        drafter = self.family.construct(reading.meaning, reading.tensors, self.target, self.checkpoint.path)
        return drafter.to(self.target.device, self.target.dtype).eval()

    def try_reading(self, reading: Reading) -> Outcome:
        try:
            drafter = self.construct(reading)
        except ValueError as error:
            return Outcome(reading, refused=str(error))
        depth = drafter.deepest(self.steps)
        parts = [follow(drafter, batch, drafter.taps, depth) for batch in self.stages[-1]]
        followed = Followed([x for part in parts for x in part.lengths], torch.cat([part.logp for part in parts]))
        return Outcome(reading, None, followed, drafter.taps, *tau_of(followed.rounds()))

    def round(self, start: Outcome, rivals: list[Taps]) -> tuple[list[Outcome], int, list[Taps]]:
        """Return `start` and all other readings, compared with it, the number of searched taps, and the best ones.

        rivals: the taps that looked best when those of `start` were found; with them there is no new search.
        """
        meaning, tensors = start.reading.meaning, start.reading.tensors
        others = [self.try_reading(r) for r in self.family.readings(meaning, tensors, self.target)]
        known = {o.taps for o in (start, *others) if o.taps}
        finalists, searched = (rivals, 0) if rivals else self.search(meaning, tensors, known)
        self.tried += len(others)
        self.searched += searched
        for other in others:
            judge(other, start, self.tried)
        for taps in [taps for taps in finalists if taps not in known][:NAMED]:
            retapped = dataclasses.replace(meaning, taps=taps)
            others.append(self.try_reading(Reading(f"taps {list(taps)}", retapped, tensors)))
            judge(others[-1], start, self.searched)
        unjudged = dataclasses.replace(start, gain=None, margin=None, verdict="")
        return [unjudged, *others], searched, finalists

    def search(self, meaning, tensors: Tensors, known: set[Taps]) -> tuple[list[Taps], int]:
        """The taps that look best, and how many were tried: those of `known`, which other readings have, and more."""
        layers, count = self.target.config.layers, self.family.streams(meaning, tensors)
        if not 0 < count <= layers:
            return [], 0
        try:
            drafter = self.construct(Reading("", dataclasses.replace(meaning, taps=tuple(range(count))), tensors))
        except ValueError:
            return [], 0

        def score(taps: Taps, stage: int) -> float:
            return sum(float(follow(drafter, batch, taps, 1).logp.sum()) for batch in self.stages[stage])

        return search_taps(score, layers + 1, count, known)


def tau_of(rounds: Tensor) -> tuple[float, tuple[float, float] | None]:
    """Tau from rounds and emitted tokens [answers,2], and its interval over answers."""
    total = rounds.sum(0)
    return float(total[1] / total[0]), tau_interval(rounds)


def judge(other: Outcome, start: Outcome, tests: int) -> None:
    """Say whether another reading is better or worse than `start` (one-sided paired z-tests over the positions).

    Each token is judged from up to `steps` positions, whose results are not independent. They count as one, so z is
    divided by the root of `steps`. tests: the number of tests by which the level is divided.
    """
    if other.followed is None:
        return
    if start.followed is None:
        other.verdict = "better" if other.reach > HARDLY else ""
        return
    gains = (other.followed.logp - start.followed.logp).double()
    if len(gains) < 2 or not gains.isfinite().all():  # of one position the error is unknown
        return
    steps, gain = gains.shape[1], gains.sum(1)
    error = float(gain.std()) / sqrt(len(gain) / steps)
    other.gain, other.margin = float(gain.mean()) / steps, 1.96 * error / steps
    chance = erfc(abs(float(gain.mean())) / max(error, 1e-12) / sqrt(2)) / 2
    if chance >= LEVEL / tests:
        other.verdict = "noise"
    elif other.gain < 0:
        other.verdict = "worse"
    else:
        other.verdict = "better" if other.reach > max(start.reach, HARDLY) else "likelier"
