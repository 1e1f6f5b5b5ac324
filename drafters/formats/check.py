"""Does a drafter draft better when its checkpoint is read another way?

The target answers a few prompts, greedily. Every reading of the checkpoint then drafts a chain from every position of
every answer. A lossless decoder emits these answers with any drafter, so a walk over the positions gives the tau of
decoding with a chain. Two readings are compared by the log-probabilities that they give to the same tokens: on a few
prompts these say more than the numbers of accepted tokens.
"""

import os
from dataclasses import dataclass
from math import erfc, sqrt

import torch
from torch import Tensor

from drafters.formats import Checkpoint, open_checkpoint
from drafters.formats.base import Reading
from specdec.engine.engine import Engine
from specdec.text import encode_prompt

PROMPTS = [
    "What are some good ways to learn a new language?",
    "Tom has 5 apples and buys 7 more. How many apples does he have now?",
    "Explain why the sky is blue, in simple words that a child can understand.",
    "Write a Python function that adds two numbers.",
]
LEVEL = 0.01  # of significance of the test that another reading is better, divided by the number of readings


@dataclass
class Answer:
    """One prompt with the target's answer."""

    tokens: Tensor  # [n], the prompt's first
    prompt: int  # how many tokens are the prompt's


@dataclass
class Outcome:
    """How well one reading drafts."""

    name: str
    tau: float | None = None  # None if the checkpoint does not load in this reading
    logp: Tensor | None = None  # log-probability of the chain of true tokens, from every position of all answers
    refused: str | None = None  # why it does not load
    better: bool = False  # significantly better than the declared reading


def check(
    target, path: str | os.PathLike, prompts: list[str], *, max_new_tokens: int = 64, steps: int = 5, raw: bool = False
) -> list[Outcome]:
    """Outcomes of the declared reading, and then of the others that are plausible for its family.

    steps: the length of the drafted chain. raw: do not apply the chat template."""
    return compare(target, open_checkpoint(path), answer(target, prompts, max_new_tokens, raw), steps)


def answer(target, prompts: list[str], max_new_tokens: int, raw: bool = False) -> list[Answer]:
    """The target's greedy answers."""
    ids = [encode_prompt(target, prompt, raw) for prompt in prompts]
    rows = Engine(target).generate(ids, max_new_tokens=max_new_tokens).rows
    device = target.device
    return [Answer(torch.tensor(row.prompt + row.tokens, device=device), len(row.prompt)) for row in rows]


@torch.inference_mode()
def compare(target, checkpoint: Checkpoint, answers: list[Answer], steps: int) -> list[Outcome]:
    """Outcomes of all readings of a checkpoint over the same answers, the declared one first."""
    meaning, tensors, family = checkpoint.meaning, checkpoint.tensors, checkpoint.family
    outcomes = []
    for reading in [Reading("as declared", meaning, tensors), *family.readings(meaning, tensors, target)]:
        try:
            drafter = family.construct(reading.meaning, reading.tensors, target, checkpoint.path)
        except ValueError as error:
            outcomes.append(Outcome(reading.name, refused=str(error)))
            continue
        drafter = drafter.to(target.device, target.dtype).eval()
        depth = min(steps, drafter.max_steps or steps, drafter.block or steps)
        outcomes.append(_outcome(reading.name, [follow(drafter, target, a, depth) for a in answers]))
    for other in outcomes[1:]:
        other.better = _beats(other, outcomes[0], len(outcomes) - 1, steps)
    return outcomes


def _outcome(name: str, followed: list[tuple[Tensor, Tensor]]) -> Outcome:
    rounds = emitted = 0
    for accepted in (lengths.tolist() for lengths, _ in followed):
        at = 0
        while at < len(accepted):
            at += accepted[at] + 1
            rounds += 1
        emitted += len(accepted)
    return Outcome(name, emitted / rounds, torch.cat([logp for _, logp in followed]))


def follow(drafter, target, answer: Answer, steps: int) -> tuple[Tensor, Tensor]:
    """The number of accepted tokens of a greedy chain, and the log-probability that the drafter gives to the true
    tokens, from every position of the answer but its last. Tokens outside the drafter's vocabulary are left out of the
    latter.

    The training unroll feeds the true tokens. As far as a chain is accepted, they are the chain's.
    """
    tokens, first, vocab = answer.tokens, answer.prompt - 1, drafter.vocab
    _, feats = target(tokens[None, :-1], None, taps=drafter.taps, logits=False)
    following = tokens[1:]  # row t of the drafter has the feature of token t, reads token t+1 and drafts token t+2
    count = len(following) - 1 - first
    alive = torch.ones(count, dtype=torch.bool, device=tokens.device)
    lengths, logp = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    draft_ids = vocab.from_target(following)
    for j, state in enumerate(drafter.unroll(feats, following[None], steps)):
        true = draft_ids[first + 1 + j :]  # one token shorter at each level, because the answer ends
        logits = state.logits[0, first : first + len(true)].float()
        alive = alive[: len(true)] & (logits.argmax(-1) == true)
        lengths[: len(true)] += alive.cpu()
        chosen = logits.log_softmax(-1).gather(1, true.clamp(min=0)[:, None]).squeeze(1)
        logp[: len(true)] += chosen.masked_fill(true < 0, 0).cpu()
    return lengths, logp


def _beats(other: Outcome, declared: Outcome, readings: int, steps: int) -> bool:
    """Does another reading draft significantly further (one-sided paired z-test over the positions)?

    Each token is judged from up to `steps` positions, whose results are not independent. They count as one, so z is
    divided by the root of `steps`.
    """
    if other.tau is None or declared.tau is None:
        return other.tau is not None and other.tau > 1
    gain = (other.logp - declared.logp).double()
    z = gain.mean() / (gain.std() / sqrt(len(gain) / steps)).clamp(min=1e-12)
    return other.tau > declared.tau and erfc(z / sqrt(2)) / 2 < LEVEL / readings


def as_json(outcomes: list[Outcome]) -> dict:
    best = _best(outcomes)
    return {
        "readings": [{"reading": o.name, "tau": o.tau, "better": o.better, "refused": o.refused} for o in outcomes],
        "better_reading": best.name if best else None,
    }


def as_text(outcomes: list[Outcome]) -> str:
    lines = [f"{'tau':>6}  reading"]
    for outcome in outcomes:
        tau = "-" if outcome.tau is None else f"{outcome.tau:.2f}"
        refused = f": refused, {outcome.refused}" if outcome.refused else ""
        lines.append(f"{tau:>6}  {outcome.name}{refused}{'  <-- better' if outcome.better else ''}")
    best = _best(outcomes)
    if best is None:
        verdict = "No other reading does better: the checkpoint is declared as it was trained."
        if outcomes[0].refused:
            verdict = "The checkpoint does not load as declared, and no other reading helps."
    else:
        was = "does not load" if outcomes[0].refused else f"has tau {outcomes[0].tau:.2f}"
        verdict = f"Another reading does better: '{best.name}' has tau {best.tau:.2f}; as declared the drafter {was}."
    return "\n".join([*lines, "", verdict])


def _best(outcomes: list[Outcome]) -> Outcome | None:
    return max((o for o in outcomes if o.better), key=lambda o: o.tau, default=None)
