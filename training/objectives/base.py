"""What all objectives share: one unroll of the drafter, weighted terms at each step, positions that count, metrics."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from training.objectives import divergences, hass, lk
from training.objectives.divergences import Value
from training.objectives.losses import head_loss, pieces
from training.objectives.truth import CoarseTruth, Drafted, TargetLogits, Truth, read_choice, read_truth

Term = Callable[[Drafted, Truth], Value]  # see `divergences`
Weight = float | Mapping[str, float]

TERMS: dict[str, Term] = {
    "ce": divergences.ce,
    "kl": divergences.kl,
    "reverse_kl": divergences.reverse_kl,
    "jsd": divergences.jsd,
    "tv": divergences.tv,
    "choice": divergences.choice,
    "tokens": divergences.tokens,
    "lk": lk.lk,
    "lk_hybrid": lk.lk_hybrid,
    "top_k": hass.top_k,
}


def read_terms(terms: Mapping[str, Weight]) -> list[tuple[float, Term]]:
    """{name: weight} or {name: {weight: w, setting: value}} -> [(weight, term)]; ValueError for what is unknown."""
    chosen = []
    for name, value in terms.items():
        if name not in TERMS:
            raise ValueError(f"objective.terms has no {name!r}; there are {', '.join(TERMS)}")
        settings = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight = settings.pop("weight", 1.0)
        allowed = TERMS[name].__code__.co_varnames[2 : TERMS[name].__code__.co_argcount]
        if unknown := set(settings) - set(allowed):
            raise ValueError(f"objective.terms.{name} has no setting {unknown.pop()!r}; it has {['weight', *allowed]}")
        if weight:  # 0 takes a term out of a configuration that others are added to
            chosen.append((float(weight), partial(TERMS[name], **settings)))
    if not chosen:
        raise ValueError(f"objective.terms needs a term of a weight other than 0; there are {', '.join(TERMS)}")
    return chosen


class Objective:
    """sum_j w_j sum_i weight_i * mean over positions of term_i, over `steps` unrolled steps; w_j = decay^j.

    terms: see `TERMS`. A position counts if it belongs to the loss mask and, with `known_only`, the target's likeliest
    token is in the draft vocabulary. mean 'masked' divides by the positions that count, each with its weight; 'all' by
    the number of all, as EAGLE does, which makes the loss depend on padding. renormalise: p sums to 1 over the draft
    vocabulary. noise: width of the uniform noise on the target's features while learning, of that width at
    `noise_length` tokens and narrower in longer texts, or, if that is None, at any length.
    """

    def __init__(
        self,
        terms: Mapping[str, Weight],
        *,
        steps: int,
        decay: float,
        mean: str = "masked",
        renormalise: bool = True,
        known_only: bool = True,
        noise: float = 0.0,
        noise_length: int | None = None,
    ):
        if steps < 1:
            raise ValueError(f"objective.steps must be at least 1, got {steps}")
        if mean not in ("masked", "all"):
            raise ValueError(f"mean must be 'masked' or 'all', got {mean!r}")
        self.terms = read_terms(terms)
        self.step_weights = [decay**j for j in range(steps)]
        self.mean, self.renormalise, self.known_only = mean, renormalise, known_only
        self.noise, self.noise_length = noise, noise_length

    @property
    def steps(self) -> int:
        return len(self.step_weights)

    def __call__(
        self,
        drafter: Drafter,
        feats: Tensor,
        tokens: Tensor,
        target_logits: TargetLogits,
        loss_mask: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unshifted inputs, as the target gives them: feats [B,T,F], tokens [B,T], target_logits [B,T,V] and
        loss_mask [B,T] (1 where the token is to be learnt). Metrics, for each step [steps]: losses, the weighted
        terms together; accuracy, the share of counted positions whose most likely token is the target's. And counted
        [], what the first step's mean was divided by.

        weights [B,T]: drafting token x counts as so many positions, at whatever step it is drafted; 1 if not given. All
        means are then weighted ones, accuracy's too, and counted is the sum of weights."""
        # Row t drafts token t+2 from feature t and token t+1: ids, targets and mask are all read one position later.
        following = F.pad(tokens[:, 1:], (0, 1))
        labels = drafter.vocab.from_target(following).masked_fill(F.pad(loss_mask[:, 1:], (0, 1)) <= 0, -1)
        counted = self.positions(drafter.vocab, target_logits, labels, loss_mask)
        if weights is not None:  # the distribution at t is that of token t+1
            counted = counted * F.pad(weights[:, 1:], (0, 1), value=1.0)
        batch = Positions(counted, self.steps, self.mean)
        states = list(drafter.unroll(self.noisy(feats), following, self.steps, batch.later()))
        judge = _Terms(self, drafter.vocab, target_logits, labels, batch)
        readouts = [batch.rows(state.readout, j) for j, state in enumerate(states)]
        loss = head_loss(judge, readouts, [state.head.weight for state in states])
        metrics = {"losses": judge.losses, "accuracy": judge.accuracy}
        extra, more = self.beside(states, feats, batch)
        return loss + extra, metrics | more | {"counted": batch.divisors[0]}

    def noisy(self, feats: Tensor) -> Tensor:
        if not self.noise or not torch.is_grad_enabled():  # not while evaluating
            return feats
        width = self.noise * (self.noise_length / feats.shape[1] if self.noise_length else 1)
        return feats + (torch.rand_like(feats) - 0.5) * width

    def positions(self, vocab, target_logits, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """[B,T], 1 for each position that counts, by the position of the target whose distribution is learnt there."""
        if not self.known_only or vocab.ids is None:
            return loss_mask.float()
        known = torch.zeros_like(loss_mask)
        row, column = loss_mask.nonzero(as_tuple=True)
        contains = vocab.contains().to(labels.device)
        for piece in pieces(len(row), vocab.target_size):
            here = row[piece], column[piece]
            known[here] = contains[read_choice(target_logits, here)].to(known.dtype)
        return (loss_mask * known).float()

    def beside(self, states: list[DraftState], feats: Tensor, batch: "Positions") -> tuple[Tensor | float, dict]:
        """What a subclass adds to the loss, and to the metrics."""
        return 0.0, {}


class Positions:
    """The n positions of a batch that count, by where the target stands: (row, column). Step j drafts for it from row
    column-1-j of the unroll, or not at all where that lies before the text."""

    def __init__(self, counted: Tensor, steps: int, mean: str):
        """counted [B,T]: what each position weighs, 0 if it does not count. One look at the mask's values a training
        step: only what counts is computed."""
        self.shape = counted.shape
        self.row, before = counted[:, 1:].nonzero(as_tuple=True)  # no step drafts the second token
        self.column = before + 1
        reached = self.column > torch.arange(steps, device=counted.device)[:, None]
        self.mask = counted[self.row, self.column] * reached  # [steps,n]
        self.counts = self.mask.sum(1)
        self.divisors = self.counts if mean == "masked" else torch.full_like(self.counts, counted.numel())
        self.share = self.mask / self.divisors.clamp(min=1)[:, None]  # [steps,n], what a position weighs in its mean

    def later(self) -> Tensor:
        """[B,T], True for the rows of the unroll from which the steps after the first draft."""
        needed = torch.zeros(self.shape, dtype=torch.bool, device=self.row.device)
        for j in range(1, len(self.mask)):
            needed[self.source(j)] = True
        return needed

    def rows(self, x: Tensor, j: int) -> Tensor:
        """What step j drafts from: x [B,T,.] -> [n,.]."""
        return x[self.source(j)]

    def source(self, j: int) -> tuple[Tensor, Tensor]:
        """Where that stands in the unroll, row and column [n]; column 0 if there is nothing, which has no weight."""
        return self.row, (self.column - 1 - j).clamp(min=0)


class _Terms:
    """The judge of `head_loss`: it weighs the terms of one objective on one batch and fills in the metrics."""

    def __init__(self, objective: Objective, vocab, target_logits, labels: Tensor, batch: Positions):
        self.objective, self.vocab, self.target_logits, self.labels, self.batch = (
            objective, vocab, target_logits, labels, batch,
        )  # fmt: skip
        self.losses, self.accuracy = torch.zeros(2, objective.steps, device=labels.device).unbind()
        self.step_weights = torch.tensor(objective.step_weights, device=labels.device)

    def truth(self, rows: slice) -> Truth | CoarseTruth:
        here = self.batch.row[rows], self.batch.column[rows]
        return read_truth(self.target_logits, here, self.vocab, self.labels, self.objective.renormalise)

    def judge(
        self, steps: list[int], rows: slice, truth: Truth | CoarseTruth, logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        draft = Drafted(logits)
        if isinstance(truth, CoarseTruth):  # what it says depends on the step
            each = Drafted(logits.reshape(-1, 1, logits.shape[-1]))
            weighed = self._weigh(each, truth.repeated(len(steps)).facing(each))
            value, slope, total = (x.reshape(*draft.best.shape, *x.shape[2:]) for x in weighed)
        else:
            value, slope, total = self._weigh(draft, truth)
        share, counts = self.batch.share[steps, rows].T, self.batch.counts[steps].clamp(min=1)
        self.losses[steps] += (value * share).sum(0)
        hits = (self.vocab.to_target(draft.best) == truth.choice[:, None]) * self.batch.mask[steps, rows].T
        self.accuracy[steps] += hits.sum(0) / counts
        share = share * self.step_weights[steps]
        # d log q_v / d x_u = [u = v] - q_u; q, which nobody reads any more, gives the room.
        slope = torch.addcmul(slope, draft.q, total[..., None], value=-1, out=draft.q)
        return (value * share).sum(), slope, share[..., None]

    def _weigh(self, draft: Drafted, truth: Truth) -> Value:
        value, slope, total = 0.0, None, 0.0
        for weight, term in self.objective.terms:
            one, its_slope, its_total = term(draft, truth)
            value, total = value + weight * one, total + weight * its_total
            its_slope = its_slope if weight == 1 else its_slope * weight
            slope = its_slope if slope is None else slope + its_slope
        return value, slope, total
