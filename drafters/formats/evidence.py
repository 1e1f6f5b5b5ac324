"""The target's own answers, its hidden states along them, and how far a reading of a drafter follows them.

A lossless decoder emits these answers with any drafter, so a walk over their positions gives the tau of decoding with a
chain. The log-probability that a drafter gives to the answers' tokens is more sensitive than its number of hits.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import comb, inf

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.acceptance import round_starts
from specdec.contracts import Drafter, DraftState
from specdec.ops.likely import largest

BATCH_TOKENS = 4096  # of answers side by side, padding included
PIECE = 512  # positions whose logits are computed together
LEAST = -20.0  # log-probability of a token that a selector (DFlash2) does not propose
Taps = tuple[int, ...]
Score = Callable[[Taps, int], float]  # taps, stage -> how well the drafter follows the answers of this stage
MANY = 300  # so many taps may be tried on the least text
BEST = (4, 16, 4)  # how many of the best: whose neighbours are tried, that enter the second stage, and the third


@dataclass
class Answer:
    """One prompt with the target's answer."""

    tokens: Tensor  # [n], the prompt's first
    prompt: int  # how many tokens are the prompt's


@dataclass
class Batch:
    """Hold a batch of answers, padded on the right, and the n positions from which a round may begin.

    These are the positions of the answers after which tokens remain to be drafted. Row t of the drafter has the feature
    of token t, reads token t+1 and drafts token t+2.
    """

    first: Tensor  # [B] token 0
    following: Tensor  # [B,T] token t+1, for feature t
    states: tuple[Tensor, ...]  # the target's hidden states, each [B,T,H]
    rows: Tensor  # [n]
    columns: Tensor  # [n]
    left: Tensor  # [n] how many tokens are left to draft
    counts: list[int]  # of each answer: how many of the n are its


@dataclass
class Followed:
    """How a reading followed some answers."""

    lengths: list[Tensor]  # of each answer: how many tokens of a greedy chain are accepted at each position
    logp: Tensor  # [n,steps] log-probability of the true tokens; 0 for unknown ones, or past the end

    def rounds(self) -> Tensor:
        """[answers,2] of decoding with a chain: rounds, and tokens that they emit."""
        rounds = [(len(round_starts(len(x), x.tolist().__getitem__)), len(x)) for x in self.lengths]
        return torch.tensor(rounds, dtype=torch.float64)


def batches(target, answers: list[Answer]) -> list[Batch]:
    """The answers in batches of similar length, with all hidden states of the target."""
    with_drafts = [a for a in answers if len(a.tokens) > a.prompt + 1]
    if not with_drafts:
        raise ValueError("the target's answers are too short to draft anything: give other prompts")
    groups: list[list[Answer]] = [[]]
    for answer in sorted(with_drafts, key=lambda a: len(a.tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(answer.tokens) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(answer)
    return [_batch(target, group) for group in groups]


def _batch(target, answers: list[Answer]) -> Batch:
    tokens = pad_sequence([a.tokens for a in answers], batch_first=True)  # nothing looks at the padding
    _, feats = target(tokens[:, :-1], None, taps=tuple(range(target.config.layers + 1)), logits=False)
    columns = [torch.arange(a.prompt - 1, len(a.tokens) - 2) for a in answers]
    counts, device = [len(c) for c in columns], tokens.device
    return Batch(
        first=tokens[:, 0],
        following=tokens[:, 1:],
        states=feats.split(target.config.hidden, dim=-1),
        rows=torch.arange(len(answers)).repeat_interleave(torch.tensor(counts)).to(device),
        columns=torch.cat(columns).to(device),
        left=torch.cat([torch.arange(count, 0, -1) for count in counts]).to(device),
        counts=counts,
    )


def follow(drafter: Drafter, batch: Batch, taps: tuple[int, ...], steps: int) -> Followed:
    """Let a drafter that reads the hidden states `taps` draft chains of `steps` tokens from all n positions.

    The training unroll feeds the true tokens. As far as a chain is accepted, they are the chain's.
    """
    drafter.first_tokens = batch.first
    feats = torch.cat([batch.states[tap] for tap in taps], dim=-1) if taps else None
    needed = torch.zeros_like(batch.following, dtype=torch.bool)
    needed[batch.rows, batch.columns] = True
    alive = torch.ones_like(batch.rows, dtype=torch.bool)
    lengths, logp = torch.zeros_like(batch.rows), []
    for j, state in enumerate(drafter.unroll(feats, batch.following, steps, needed)):
        columns = (batch.columns + 1 + j).clamp(max=batch.following.shape[1] - 1)  # any token, where nothing is left
        true = drafter.vocab.from_target(batch.following[batch.rows, columns])
        readout = state.readout[batch.rows, batch.columns]
        hits, chosen = [], []
        for part, ids in zip(readout.split(PIECE), true.split(PIECE), strict=True):
            logits = DraftState(part, part, state.head).logits.float()
            hits.append(largest(logits)[1] == ids)
            logq = logits.log_softmax(-1).gather(1, ids.clamp(min=0)[:, None]).squeeze(1)
            chosen.append(logq.masked_fill(logq == -inf, LEAST).masked_fill(ids < 0, 0))
        alive = alive & torch.cat(hits) & (batch.left > j)
        lengths += alive
        logp.append(torch.cat(chosen).masked_fill(batch.left <= j, 0))
    return Followed(list(lengths.cpu().split(batch.counts)), torch.stack(logp, dim=1).cpu())


# The hidden states that a drafter reads, when nothing says which they are. All of the target's are known from one pass,
# so trying other taps costs a forward of the drafter's.


def search_taps(score: Score, states: int, count: int, also: Iterable[Taps] = ()) -> tuple[list[Taps], int]:
    """The taps that look best, the best first, and how many were tried.

    states: how many hidden states the target has. count: how many the drafter reads. also: candidates that are
    plausible for other reasons. First come all ascending combinations, or those of a grid if there are too many. Then
    one tap at a time is changed in the best of them, or two change places, until nothing gets better.
    """
    scores: dict[Taps, float] = {}

    def best(number: int) -> list[Taps]:
        return sorted(scores, key=scores.__getitem__, reverse=True)[:number]

    def add(candidates: Iterable[Taps]) -> None:
        for taps in candidates:
            if taps not in scores:
                scores[taps] = score(taps, 0)

    add(itertools.combinations(grid(states, count), count))
    add(also)
    while True:
        leaders = best(BEST[0])
        for taps in leaders:
            add(neighbours(taps, states))
        if best(BEST[0]) == leaders:
            break
    finalists = best(BEST[1])
    for stage in (1, 2):
        again = {taps: score(taps, stage) for taps in finalists}
        finalists = sorted(again, key=again.__getitem__, reverse=True)[: BEST[2]]
    return finalists, len(scores)


def grid(states: int, count: int) -> list[int]:
    """Return the hidden states of which all combinations are tried.

    These are all hidden states, or as many as the search can afford, evenly spread from the first to the last.
    """
    size = states
    while comb(size, count) > MANY:
        size -= 1
    return sorted({round(i * (states - 1) / max(size - 1, 1)) for i in range(size)})


def neighbours(taps: Taps, states: int) -> Iterable[Taps]:
    """One tap changed, or two exchanged."""
    for i, tap in itertools.product(range(len(taps)), range(states)):
        if tap not in taps:
            yield (*taps[:i], tap, *taps[i + 1 :])
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield tuple(swapped)
