"""What all objectives share: one unroll of the drafter, weighted terms at each step, positions that count, metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cli.limits import MOST
from specdec.contracts import Drafter, DraftState
from specdec.schema import check_fields, choice, ranged, shown
from specdec.training.objectives.losses import head_loss, pieces
from specdec.training.objectives.teacher import Student, Teacher, TeacherLogits, TopTeacher, read_choice, read_teacher
from specdec.training.objectives.terms import Value, Weight, read_terms


def documents_of(drafter: Drafter, tokens: Tensor) -> Tensor:
    """Return the document number of each token, [B,T]. Without `drafter.documents` a text is one document."""
    return torch.zeros_like(tokens) if drafter.documents is None else drafter.documents


@dataclass(eq=False)
class Objective:
    """sum_j w_j sum_i weight_i * mean over positions of term_i, over `steps` unrolled steps; w_j = decay^j.

    - terms: names and weights, as `read_terms` takes them; None or an empty mapping stands for the class's `usual`.
    - then: terms that take their place from the share `switch` of the run on. The trainer sets `progress`, the share of
      the run that is done, before each step.
    - mean: 'masked' divides by the number of positions that count, each with its weight. 'all' divides by the number of
      all positions, as EAGLE does; the loss then depends on padding.
    - renormalise: p sums to 1 over the draft vocabulary.
    - known_only: a position of the loss mask counts only if the target's best token is in the draft vocabulary.
    - noise: width of the uniform noise on the target's features, in training only. With `noise_length` it has this
      width at so many tokens, and is narrower in longer texts; without, it has it at any length.
    """

    usual: ClassVar[Mapping[str, Weight]] = {"ce": 1.0}
    terms: Mapping[str, Weight] | None = None
    steps: int = ranged(1, 256, 1)
    decay: float = ranged(0, 1000, 1.0)
    then: Mapping[str, Weight] | None = None
    switch: float = ranged(0, 1, 0.6)
    mean: str = choice("masked", "all")
    renormalise: bool = True
    known_only: bool = True
    noise: float = ranged(0, 1000, 0.0)
    noise_length: int | None = ranged(1, MOST, None)

    def __post_init__(self) -> None:
        """Check the settings, and read the terms of both parts of the run."""
        check_fields(self, "objective.")
        self.parts = [read_terms(self.terms or self.usual)] + ([read_terms(self.then)] if self.then else [])
        self.progress = 0.0
        self.step_weights = [self.decay**j for j in range(self.steps)]

    @property
    def lookahead(self) -> int:
        """Number of tokens after a position that the loss at it may read."""
        return self.steps + 1

    @property
    def present(self) -> list[tuple[float, "partial[Value]"]]:
        """Those of the part of the run that has come."""
        return self.parts[self.part_at(self.progress)]

    def part_at(self, progress: float) -> int:
        """Return the number of the part of the objective, 0 or 1, where this share of the run is done."""
        return len(self.parts) - 1 if progress >= self.switch else 0

    def __call__(
        self,
        drafter: Drafter,
        feats: Tensor,
        tokens: Tensor,
        teacher_logits: TeacherLogits,
        loss_mask: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [] and metrics of a batch.

        Inputs are not shifted: feats [B,T,F], tokens [B,T], teacher_logits [B,T,V], loss_mask [B,T] (1 for training
        tokens). loss_mask[t] belongs to the position at which the target predicts token t+1: it decides over
        all drafts of that token. The row that drafts it first holds feature t-1, so the EAGLE authors' training module,
        which weighs row t by mask[t], takes the same mask one to the left. weights [B,T]: drafting a token counts as so
        many positions, at whatever step it is drafted; None: as one. All means are weighted by them, and `counted` is
        then a sum of weights.

        Metrics: losses [steps], the weighted terms together; accuracy [steps], the share of counted positions at which
        the student's most likely token is the target's; counted [], what the first step's mean was divided by; counts
        [metrics,steps], what the entries of each other metric were divided by.
        """
        # Row t drafts token t+2 from feature t and token t+1, so tokens and mask are read one position later.
        following = F.pad(tokens[:, 1:], (0, 1))
        labels = drafter.vocab.from_target(following).masked_fill(F.pad(loss_mask[:, 1:], (0, 1)) <= 0, -1)
        counted = self.positions(drafter.vocab, teacher_logits, labels, loss_mask)
        if weights is not None:  # the teacher's distribution at t is that of token t+1
            counted = counted * F.pad(weights[:, 1:], (0, 1), value=1.0)
        batch = Positions(counted, self.steps, self.mean)
        states = list(drafter.unroll(self.noisy(feats), following, self.steps, batch.later()))
        judge = _Terms(self, drafter.vocab, teacher_logits, labels, batch)
        readouts = [batch.rows(state.readout, j) for j, state in enumerate(states)]
        heads: list[Any] = [state.head for state in states]
        loss = head_loss(judge, readouts, [head.weights for head in heads])
        metrics = {"losses": judge.losses, "accuracy": judge.accuracy}
        extra, more = self.extra_terms(states, feats, batch)
        counts = torch.stack([batch.divisors, batch.counts, *[batch.divisors] * len(more)])
        return loss + extra, metrics | more | {"counted": batch.divisors[0], "counts": counts}

    def weigh(self, student: Student, teacher: Teacher) -> Value:
        """The terms together, each with its weight."""
        value: Any = 0.0
        slope: Any = None
        total: Any = 0.0
        for weight, term in self.present:
            made, shape = term(student, teacher), student.best.shape
            if not isinstance(made, tuple) or len(made) != 3 or made[0].shape != shape:
                name, wanted = term.func.__name__, f"(value, slope, total), with a value of shape {list(shape)}"
                raise ValueError(f"the term {name} must return {wanted}, got {shown(made)}")
            one, its_slope, its_total = made
            value, total = value + weight * one, total + weight * its_total
            its_slope = its_slope if weight == 1 else its_slope * weight
            slope = its_slope if slope is None else slope + its_slope
        return value, slope, total

    def noisy(self, feats: Tensor) -> Tensor:
        """Return the features [B,T,F] with noise, or unchanged while gradients are off, as in evaluation."""
        if not self.noise or not torch.is_grad_enabled():
            return feats
        width = self.noise * (self.noise_length / feats.shape[1] if self.noise_length else 1)
        return feats + (torch.rand_like(feats) - 0.5) * width

    def positions(self, vocab: Any, teacher_logits, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """[B,T], 1 for each position that counts. Position t is that at which the target predicts token t+1."""
        if not self.known_only or vocab.ids is None:
            return loss_mask.float()
        known = torch.zeros_like(loss_mask)
        row, column = loss_mask.nonzero(as_tuple=True)
        contains = vocab.contains().to(labels.device)
        for piece in pieces(len(row), vocab.target_size):
            here = row[piece], column[piece]
            known[here] = contains[read_choice(teacher_logits, here)].to(known.dtype)
        return (loss_mask * known).float()

    def readouts(self, drafter: Any, feats: Tensor, tokens: Tensor) -> list[Tensor]:
        """The heads' inputs for a batch of training tokens only, for `specdec.training.estimate`."""
        return [state.readout for state in drafter.unroll(feats, tokens, self.steps)]

    def extra_terms(self, states: list[DraftState], feats: Tensor, batch: "Positions") -> tuple[Tensor | float, dict]:
        """What a subclass adds: to the loss, and to the metrics."""
        return 0.0, {}


class Positions:
    """The n positions of a batch that count: row [n] and column [n], the column at which the target predicts.

    Step j drafts what the target predicts at `column` from column - 1 - j of the unroll. Where that is before the text
    there is no such draft, and the position does not count for step j.
    """

    def __init__(self, counted: Tensor, steps: int, mean: str):
        """Take the weight of each position, `counted` [B,T], 0 if it does not count. mean: see `Objective`.

        `nonzero` waits for the device, once a training step, and in return only what counts is computed.
        """
        self.shape = counted.shape
        self.row, before = counted[:, 1:].nonzero(as_tuple=True)  # column 0 predicts token 1, which no step drafts
        self.column = before + 1
        reached = self.column > torch.arange(steps, device=counted.device)[:, None]
        self.mask = counted[self.row, self.column] * reached  # [steps,n]
        self.counts = self.mask.sum(1)
        self.divisors = self.counts if mean == "masked" else torch.full_like(self.counts, counted.numel())
        self.share = self.mask / self.divisors.clamp(min=1e-6)[:, None]  # [steps,n], what a position weighs in its mean

    def later(self) -> Tensor:
        """[B,T], True for the positions of the unroll from which the steps after the first draft."""
        needed = torch.zeros(self.shape, dtype=torch.bool, device=self.row.device)
        for j in range(1, len(self.mask)):
            needed[self.source(j)] = True
        return needed

    def rows(self, x: Tensor, j: int) -> Tensor:
        """Return x [B,T,.] at the positions from which step j drafts, [n,.]."""
        return x[self.source(j)]

    def source(self, j: int) -> tuple[Tensor, Tensor]:
        """Row and column [n] of the unroll from which step j drafts; column 0, of no weight, where it does not."""
        return self.row, (self.column - 1 - j).clamp(min=0)


class TermsJudge:
    """What the judges of `head_loss` share: the teacher of a batch, and gradients of an objective's terms."""

    def __init__(self, objective: Objective, vocab, teacher_logits: TeacherLogits, labels: Tensor):
        """Take the labels [B,T] that `Teacher` describes."""
        self.objective, self.vocab, self.teacher_logits, self.labels = objective, vocab, teacher_logits, labels

    def read(self, row: Tensor, column: Tensor, summarised: bool = False) -> Teacher | TopTeacher:
        """What the target says at these places [n] of the batch. summarised: see `read_teacher`."""
        here, renormalise = (row, column), self.objective.renormalise
        return read_teacher(self.teacher_logits, here, self.vocab, self.labels, renormalise, summarised)

    def read_once(self, row: Tensor, column: Tensor) -> Teacher | TopTeacher:
        """As `read`, for places that repeat: each is computed once, as the target's logits are dear."""
        length = self.labels.shape[1]
        single, index = (row * length + column.clamp(max=length - 1)).unique(return_inverse=True)
        return self.read(single // length, single % length).at(index)

    def gradient(self, student: Student, slope: Tensor, total: Tensor) -> Tensor:
        """Gradient [n,J,U] by the student's logits, given a term's slope and total. It overwrites q."""
        # d log q_v / d x_u = [u = v] - q_u. q is not used after this, so its memory is reused.
        return torch.addcmul(slope, student.q, total[..., None], value=-1, out=student.q)


class _Terms(TermsJudge):
    """The judge that weighs the terms of an objective on a batch, and keeps the metrics."""

    def __init__(self, objective: Objective, vocab, teacher_logits, labels: Tensor, batch: Positions):
        super().__init__(objective, vocab, teacher_logits, labels)
        self.batch = batch
        self.losses, self.accuracy = torch.zeros(2, objective.steps, device=labels.device).unbind()
        self.step_weights = torch.tensor(objective.step_weights, device=labels.device)

    def teacher(self, rows: slice) -> Teacher | TopTeacher:
        # Only positions whose choice `positions` read carry weight.
        return self.read(self.batch.row[rows], self.batch.column[rows], summarised=True)

    def judge(self, steps: list[int], rows: slice, teacher: Teacher | TopTeacher, logits: Tensor) -> Value:
        student, weigh = Student(logits), self.objective.weigh
        if isinstance(teacher, TopTeacher):  # the whole p that it makes depends on the student's step
            each = Student(logits.reshape(-1, 1, logits.shape[-1]))
            weighed = weigh(each, teacher.repeated(len(steps)).facing(each))
            value, slope, total = (x.reshape(*student.best.shape, *x.shape[2:]) for x in weighed)
        else:
            value, slope, total = weigh(student, teacher)
        share, counts = self.batch.share[steps, rows].T, self.batch.counts[steps].clamp(min=1e-6)
        self.losses[steps] += (value * share).sum(0)
        hits = (self.vocab.to_target(student.best) == teacher.choice[:, None]) * self.batch.mask[steps, rows].T
        self.accuracy[steps] += hits.sum(0) / counts
        share = share * self.step_weights[steps]
        return (value * share).sum(), self.gradient(student, slope, total), share[..., None]
