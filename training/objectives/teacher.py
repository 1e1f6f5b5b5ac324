"""The teacher's distribution p: what the target says at n positions. And the student's distribution q.

All of p may be known (`Teacher`), or only its most likely tokens and the mass of the rest (`TopTeacher`). p is the same
for all J steps of the unroll that draft for a position, so a teacher's tensors are [n,...] and a student's [n,J,...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.drafters.vocab import DraftVocab
from specdec.ops.likely import largest
from specdec.training.objectives.losses import DeferredLogits, at_least_fp32


class Student:
    """The distribution q = softmax(logits): what the drafter says at n positions, in J steps of the unroll.

    Each quantity is computed when a term first asks for it: on a CPU passes over the vocabulary take most of a step.
    """

    def __init__(self, logits: Tensor):
        """Take the drafter's logits [n,J,U] of J steps."""
        self.logits = logits
        self.top, self.best = largest(logits)  # [n,J]

    @cached_property
    def q(self) -> Tensor:
        """Return the probabilities q [n,J,U]."""
        return self.logits.softmax(-1)

    @cached_property
    def log_mass(self) -> Tensor:
        """[n,J] log sum exp(logits), computed from the best token: its logit less its log q."""
        return self.top - self.q.gather(-1, self.best[..., None]).squeeze(-1).log()

    @cached_property
    def logq(self) -> Tensor:
        """Return the log-probabilities log q [n,J,U]."""
        return self.logits - self.log_mass[..., None]


def _each(teacher: object, change: Callable[[Tensor], Tensor]) -> list[Any]:
    """The fields of a teacher, changed; None stays None."""
    return [x if x is None else change(x) for x in vars(teacher).values()]


@dataclass
class Teacher:
    """p over the draft vocabulary, the target's choice, and the token that follows in the text."""

    logp: Tensor  # [n,U] log p
    log_share: Tensor | None  # [n,1] log of the draft vocabulary's part of the target's mass; None: p not renormalised
    choice: Tensor  # [n] the target's most likely token, a target id
    labels: Tensor  # [n] draft id of the text's own next token, -1 where there is none to learn

    def at(self, index: Tensor) -> "Teacher":
        """What it says at these of its n positions, in this order and as often."""
        return Teacher(*_each(self, lambda x: x[index]))

    @cached_property
    def p(self) -> Tensor:
        """Return the probabilities p [n,U]."""
        return self.logp.exp()

    @cached_property
    def mass(self) -> Tensor:
        """[n] sum of p: below 1 if p is not renormalised and the draft vocabulary lacks some tokens."""
        return self.p.sum(-1)

    @cached_property
    def whole(self) -> Tensor:
        """[n,U] p as a verifier uses it: probabilities among all V tokens."""
        return self.p if self.log_share is None else self.p * self.log_share.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """Return the entropy -sum p log p [n]."""
        return torch.special.entr(self.p).sum(-1)

    @cached_property
    def best(self) -> Tensor:
        """[n] draft id of p's most likely token."""
        return largest(self.logp)[1]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Probabilities and draft ids [n,k] of p's k most likely tokens, or of all if there are fewer."""
        return self.p.topk(min(k, self.p.shape[-1]), dim=-1)

    def cross_entropy(self, student: Student) -> Tensor:
        """[n,J] -sum p log q, computed as mass log sum exp(x) - sum p x with x the logits, which needs no log q."""
        along = (student.logits * self.p[:, None]).sum(-1)  # on a CPU four times as fast as a matrix product
        return self.mass[:, None] * student.log_mass - along


@dataclass
class TopTeacher:
    """A teacher of which only the k most likely tokens and the mass of all others together are known."""

    ids: Tensor  # [n,k] draft ids, best first
    top_logp: Tensor  # [n,k] log p of these
    log_rest: Tensor  # [n,1] log of the mass of all others
    log_share: Tensor | None  # this and the next two: see `Teacher`
    choice: Tensor
    labels: Tensor

    def facing(self, student: Student) -> Teacher:
        """A whole p that spreads the rest as q does. The student has J = 1.

        Among all p with these k probabilities and this rest, this one is nearest to q by every f-divergence. Its
        divergence from q is that over k tokens and one bucket for the rest: a lower bound of the true one. The gradient
        asks nothing of q within the bucket.
        """
        logq = student.logq.squeeze(1)
        log_q_rest = logq.scatter(1, self.ids, -torch.inf).logsumexp(-1, keepdim=True)
        logp = (logq + (self.log_rest - log_q_rest)).scatter_(1, self.ids, self.top_logp)
        return _Completed(logp, self.log_share, self.choice, self.labels, self, log_q_rest)

    def at(self, index: Tensor) -> "TopTeacher":
        """As `Teacher.at`."""
        return TopTeacher(*_each(self, lambda x: x[index]))

    def repeated(self, steps: int) -> "TopTeacher":
        """Every position `steps` times in a row."""
        return TopTeacher(*_each(self, lambda x: x.repeat_interleave(steps, 0)))


@dataclass
class _Completed(Teacher):
    """What `TopTeacher.facing` makes. Its entropies are those of k tokens and one bucket."""

    known: TopTeacher
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

    def cross_entropy(self, student: Student) -> Tensor:
        known = self.known
        top = (known.top_logp.exp() * student.logq.squeeze(1).gather(1, known.ids)).sum(-1, keepdim=True)
        return -top - known.log_rest.exp() * self.log_q_rest


@dataclass
class TopTokens:
    """A feature cache's replacement of logits [B,T,V]: the k most likely tokens at each position."""

    ids: Tensor  # [B,T,k] draft ids, best first
    logp: Tensor  # [B,T,k] renormalised over the draft vocabulary
    log_rest: Tensor  # [B,T,1] log of what is missing from 1
    log_share: Tensor  # [B,T,1] log of the draft vocabulary's part of the target's mass
    choice: Tensor  # [B,T] the most likely token of all, a target id


TeacherLogits = Tensor | DeferredLogits | TopTokens


def read_choice(logits: TeacherLogits, here: tuple[Tensor, Tensor]) -> Tensor:
    """The target's most likely tokens [n], target ids, at `here`, rows [n] and columns [n]."""
    if isinstance(logits, TopTokens):
        return logits.choice[here]
    return logits.summarise(here) if isinstance(logits, DeferredLogits) else largest(logits[here])[1]


def read_teacher(
    logits: TeacherLogits,
    here: tuple[Tensor, Tensor],
    vocab: DraftVocab,
    labels: Tensor,
    renormalise: bool,
    summarised: bool = False,
) -> Teacher | TopTeacher:
    """What the target says at `here`, rows [n] and columns [n] of logits and labels.

    labels [B,T]: see `Teacher`. renormalise: let p sum to 1 over the draft vocabulary. summarised: `read_choice` has
    read these positions, so only the draft vocabulary's logits are computed if that is enough.
    """
    if isinstance(logits, TopTokens):
        logp, rest, log_share = logits.logp[here], logits.log_rest[here], logits.log_share[here]
        share = None if vocab.ids is None else log_share
        if share is not None and not renormalise:
            logp, rest, share = logp + share, rest + share, None
        return TopTeacher(logits.ids[here], logp, rest, share, logits.choice[here], labels[here])
    if summarised and isinstance(logits, DeferredLogits) and logits.choice is not None and vocab.ids is not None:
        chosen, choice = at_least_fp32(logits.of(here, vocab.ids)), logits.choice[here]
        whole = logits.log_mass[here][:, None]
    else:
        found = at_least_fp32(logits[here])
        chosen, choice = vocab.select(found), largest(found)[1]
        whole = None if vocab.ids is None else found.logsumexp(-1, keepdim=True)
    if whole is not None and not renormalise:
        return Teacher(chosen - whole, None, choice, labels[here])
    mass = chosen.logsumexp(-1, keepdim=True)
    return Teacher(chosen - mass, None if whole is None else mass - whole, choice, labels[here])
