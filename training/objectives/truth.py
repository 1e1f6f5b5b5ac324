"""What the target and the drafter say at the positions of a piece.

n positions, J steps of the unroll that draft for each: the target's have [n,...], the drafter's [n,J,...]. Of what the
target says all may be known, or its likeliest tokens and the mass of the rest.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafters.vocab import DraftVocab
from specdec.sampling.likely import largest
from training.objectives.losses import DeferredLogits


@dataclass
class Truth:
    """The target's distribution over the draft vocabulary, its choice, and the token that follows.

    Terms of a loss read of it what they need; what only some need is computed for those, once for all steps.
    """

    logp: Tensor  # [n,U] log p; sums to 1 over the draft vocabulary if it is renormalised there
    log_share: Tensor | None  # [n,1] log of the draft vocabulary's part of the target's mass; None: p has it
    choice: Tensor  # [n] the target's most likely token, a target id
    labels: Tensor  # [n] draft id of the text's own next token, -1 where there is none to learn

    @cached_property
    def p(self) -> Tensor:
        """[n,U]"""
        return self.logp.exp()

    @cached_property
    def minus_p(self) -> Tensor:
        """[n,U]"""
        return -self.p

    @cached_property
    def mass(self) -> Tensor:
        """[n] sum of p: 1 unless the draft vocabulary lacks some of it."""
        return self.p.sum(-1)

    @cached_property
    def whole(self) -> Tensor:
        """[n,U] p as the verifier has it: a probability among all V tokens."""
        return self.p if self.log_share is None else self.p * self.log_share.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """[n] -sum p log p"""
        return torch.special.entr(self.p).sum(-1)

    @cached_property
    def best(self) -> Tensor:
        """[n] the draft id that p likes best."""
        return largest(self.logp)[1]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k draft ids that p likes best, or all: their probabilities and ids [n,k]."""
        return self.p.topk(min(k, self.p.shape[-1]), dim=-1)

    def cross_entropy(self, draft: "Drafted") -> Tensor:
        """[n,J] -sum p log q, as mass log sum exp(x) - sum p x, which needs no log q."""
        along = (draft.logits * self.p[:, None]).sum(-1)  # on the CPU a quarter of the time of a matrix product
        return self.mass[:, None] * draft.log_mass - along


@dataclass
class CoarseTruth:
    """The same, of which only the k likeliest tokens and the mass of all others together are known."""

    ids: Tensor  # [n,k] draft ids, the likeliest first
    top_logp: Tensor  # [n,k]
    log_rest: Tensor  # [n,1]
    log_share: Tensor | None
    choice: Tensor
    labels: Tensor

    def facing(self, draft: "Drafted") -> Truth:
        """The rest spread as q, of one step for each of n positions, spreads it.

        Of all distributions with these k probabilities and this rest, that is the nearest to q by every f-divergence,
        and its divergence is the one over k tokens and one bucket: a lower bound of the true one, with the gradient
        that it has while p is held constant. Within the bucket nothing is asked of q.
        """
        logq = draft.logq.squeeze(1)
        log_q_rest = logq.scatter(1, self.ids, -torch.inf).logsumexp(-1, keepdim=True)
        logp = (logq + (self.log_rest - log_q_rest)).scatter_(1, self.ids, self.top_logp)
        return _Completed(logp, self.log_share, self.choice, self.labels, self, log_q_rest)

    def repeated(self, steps: int) -> "CoarseTruth":
        """Every position `steps` times in a row."""
        return CoarseTruth(*(x if x is None else x.repeat_interleave(steps, 0) for x in vars(self).values()))


@dataclass
class _Completed(Truth):
    """A coarse truth facing one q; its entropies are those of k tokens and one bucket."""

    known: CoarseTruth
    log_q_rest: Tensor  # [n,1]

    @cached_property
    def entropy(self) -> Tensor:
        return -torch.cat([x.exp() * x for x in (self.known.top_logp, self.known.log_rest)], -1).sum(-1)

    @cached_property
    def best(self) -> Tensor:
        return self.known.ids[:, 0]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        if k > self.known.ids.shape[1]:
            raise ValueError(
                f"objective.terms.top_k wants the target's {k} likeliest tokens, and the cache of features keeps "
                f"{self.known.ids.shape[1]}: make one with keep={k} or more, or lower the term's k"
            )
        return self.known.top_logp[:, :k].exp(), self.known.ids[:, :k]

    def cross_entropy(self, draft: "Drafted") -> Tensor:
        known = self.known
        top = (known.top_logp.exp() * draft.logq.squeeze(1).gather(1, known.ids)).sum(-1, keepdim=True)
        return -top - known.log_rest.exp() * self.log_q_rest


@dataclass
class TopTokens:
    """In place of a target's logits [B,T,V]: at each position its k likeliest tokens of a draft vocabulary."""

    ids: Tensor  # [B,T,k] draft ids, the likeliest first
    logp: Tensor  # [B,T,k] over the draft vocabulary: with the rest they sum to 1
    log_rest: Tensor  # [B,T,1]
    log_share: Tensor  # [B,T,1] log of the draft vocabulary's part of the target's mass
    choice: Tensor  # [B,T] the likeliest token of all, a target id


TargetLogits = Tensor | DeferredLogits | TopTokens


def read_choice(logits: TargetLogits, here: tuple[Tensor, Tensor]) -> Tensor:
    """The target's likeliest tokens [n] at rows and columns [n]."""
    return logits.choice[here] if isinstance(logits, TopTokens) else largest(logits[here])[1]


def read_truth(
    logits: TargetLogits, here: tuple[Tensor, Tensor], vocab: DraftVocab, labels: Tensor, renormalise: bool
) -> Truth | CoarseTruth:
    """What the target says at rows and columns [n]. labels [B,T]: see `Truth`."""
    if isinstance(logits, TopTokens):
        logp, rest, share = logits.logp[here], logits.log_rest[here], logits.log_share[here]
        if vocab.ids is None:
            share = None
        elif not renormalise:
            logp, rest, share = logp + share, rest + share, None
        return CoarseTruth(logits.ids[here], logp, rest, share, logits.choice[here], labels[here])
    found = logits[here]
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    chosen = vocab.select(found)
    mass = chosen.logsumexp(-1, keepdim=True)
    log_share = None
    if vocab.ids is not None:
        whole = found.logsumexp(-1, keepdim=True)
        mass, log_share = (mass, mass - whole) if renormalise else (whole, None)
    return Truth(chosen - mass, log_share, largest(found)[1], labels[here])


class Drafted:
    """The drafter's distribution q = softmax(logits). Passes over the vocabulary are most of a step's time on a CPU, so
    each is made only if a term asks for it."""

    def __init__(self, logits: Tensor):
        """logits [n,J,U]"""
        self.logits = logits
        self.top, self.best = largest(logits)  # [n,J]

    @cached_property
    def q(self) -> Tensor:
        """[n,J,U]"""
        return self.logits.softmax(-1)

    @cached_property
    def log_mass(self) -> Tensor:
        """[n,J] log sum exp(logits), read off the likeliest token."""
        return self.top - self.q.gather(-1, self.best[..., None]).squeeze(-1).log()

    @cached_property
    def logq(self) -> Tensor:
        """[n,J,U]"""
        return self.logits - self.log_mass[..., None]
