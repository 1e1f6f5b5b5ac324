"""The objective of drafters that guess a block at once: DFlash, DSpark, JetSpec (arXiv 2602.06036, 2607.05147,
2606.18394)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash import BlockDrafter
from specdec.contracts import Drafter
from training.objectives.anchors import COUNTS, WHERE, Slots, draw, once, slots
from training.objectives.base import Objective
from training.objectives.divergences import tv
from training.objectives.losses import head_loss
from training.objectives.student import Student
from training.objectives.teacher import Teacher, TeacherLogits, TopTeacher, read_teacher
from training.objectives.terms import Weight

WEIGHTS = ("exp", "uniform", "d_pace")
DENOMINATORS = ("weights", "slots", "texts")


class BlockObjective(Objective):
    """Terms at each slot of blocks behind sampled anchors: sum w_j term_j / denominator.

    - anchors: at most so many of each text. where, counts: which anchors, which slots (`training.objectives.anchors`).
    - weights: 'exp', w_j = exp(-j / gamma); 'uniform', w_j = 1; 'd_pace', by what the drafter knows already (`pace`).
    - denominator: 'weights', the sum of w_j over the slots that count; 'slots', their number; 'texts', the number of
      texts.
    - confidence: weight of the confidence head's binary cross-entropy against the share sum min(p, q) of its slot's
      tokens that rejection sampling accepts. It has no gradient by p and q.
    - e2e: weight of 1 - mean_j prod_{i<=j} sum min(p_i, q_i), the mean over blocks: what of a block is not accepted
      (DFly). Slots that do not count are taken to be accepted.
    - base: share of the loss that is that of the base logits, before a conditional head (Domino). It falls in a line to
      0 over the share `base_until` of the run.
    """

    def __init__(
        self,
        terms: Mapping[str, Weight] | None = None,
        *,
        anchors: int = 512,
        where: str = "next",
        counts: str = "label",
        weights: str = "exp",
        gamma: float = 4.0,
        alpha: float = 0.5,
        denominator: str = "weights",
        confidence: float = 1.0,
        e2e: float = 0.0,
        base: float = 0.0,
        base_until: float = 0.5,
        **settings,
    ):
        super().__init__(terms or {"tokens": 1.0}, steps=1, decay=1.0, known_only=False, **settings)
        for name, value, known in (
            ("where", where, WHERE),
            ("counts", counts, COUNTS),
            ("weights", weights, WEIGHTS),
            ("denominator", denominator, DENOMINATORS),
        ):
            if value not in known:
                raise ValueError(f"objective.{name} must be one of {', '.join(known)}, got {value!r}")
        if anchors < 1 or gamma <= 0:
            raise ValueError(f"objective.anchors must be at least 1 and gamma above 0, got {anchors} and {gamma}")
        if not 0 <= base <= 1 or not 0 < base_until <= 1:
            raise ValueError(f"objective.base and base_until are shares, from 0 to 1, got {base} and {base_until}")
        if weights == "d_pace" and denominator == "weights":
            raise ValueError("objective.weights=d_pace is known after the loss only: divide by slots or texts")
        self.anchors, self.where, self.counts = anchors, where, counts
        self.weights, self.gamma, self.alpha, self.denominator = weights, gamma, alpha, denominator
        self.confidence, self.e2e, self.base, self.base_until = confidence, e2e, base, base_until

    @property
    def base_share(self) -> float:
        """What `base` has come to by now."""
        return self.base * max(0.0, 1 - self.progress / self.base_until)

    lookahead = 0  # no block leaves its document

    def __call__(
        self,
        drafter: Drafter,
        feats: Tensor,
        tokens: Tensor,
        teacher_logits: TeacherLogits,
        loss_mask: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `Objective`; the metrics have an entry for each slot, and `confidence_losses` if there is such a head.

        Raises ValueError for a drafter that guesses no blocks.
        """
        if not isinstance(drafter, BlockDrafter):
            raise ValueError(f"objective=block is for drafters of blocks, which {type(drafter).__name__} is not")
        chosen = self.slots(drafter, loss_mask, weights)
        following = F.pad(tokens[:, 1:], (0, 1))
        blocks = drafter.blocks(self.noisy(feats), following, (chosen.anchors - 1).clamp(min=0))
        judge = _Slots(self, drafter, teacher_logits, drafter.vocab.from_target(following), chosen, len(tokens))
        rows, heads = blocks.readout[chosen.chosen], [blocks.head.weights] * drafter.block
        readouts = rows.unbind(1)
        if drafter.conditioned and self.base_share > 0:  # as many steps more
            readouts += rows[..., : drafter.shape.hidden].unbind(1)
            heads += [drafter.head.weights] * drafter.block
        loss = head_loss(judge, readouts, heads)
        metrics = {"losses": judge.losses, "accuracy": judge.accuracy, "counted": judge.divisor}
        if blocks.confidence is not None:
            sure = blocks.confidence[chosen.chosen].float()
            missed = F.binary_cross_entropy_with_logits(sure, judge.accepted, reduction="none") * judge.weights
            loss = loss + self.confidence * missed.sum() / judge.divisor
            metrics["confidence_losses"] = missed.detach().sum(0) / judge.weights.sum(0).clamp(min=1e-6)
        return loss, metrics

    def slots(self, drafter: BlockDrafter, loss_mask: Tensor, weights: Tensor | None) -> Slots:
        """Anchors, drawn anew, and what their slots count."""
        documents = torch.zeros_like(loss_mask) if drafter.documents is None else drafter.documents
        drawn = draw(self.anchors, self.where, drafter.switches.rows, loss_mask, documents)
        return slots(*drawn, drafter.block, self.counts, loss_mask, documents, weights)

    def readouts(self, drafter: BlockDrafter, feats: Tensor, tokens: Tensor) -> list[Tensor]:
        count = min(self.anchors, tokens.shape[1])
        return [drafter.blocks(feats, tokens, torch.arange(count).expand(len(tokens), -1)).readout]

    def weigh_slots(self, losses: Tensor, mask: Tensor) -> Tensor:
        """What each slot of n blocks weighs [n,W], given its loss [n,W] and what it counts [n,W]."""
        if self.weights == "d_pace":
            return pace(losses, mask, self.alpha)
        if self.weights == "uniform":
            return mask
        return mask * torch.exp(-torch.arange(mask.shape[1], device=mask.device) / self.gamma)

    def divisor(self, mask: Tensor, texts: int) -> Tensor:
        """[] what the sum over slots, which count mask [n,W], is divided by."""
        if self.denominator == "texts":
            return mask.new_tensor(texts)
        total = mask if self.denominator == "slots" else self.weigh_slots(mask, mask)
        return total.sum()


def pace(losses: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): slots weigh what depends on them, by what the drafter knows already.

    With s_i = alpha + (1 - alpha) exp(-loss_i), and 1 for slots that do not count, slot i weighs the sum of the
    products s_1 ... s_j over the j >= i that count. losses, mask [n,W] -> [n,W].
    """
    known = torch.where(mask > 0, alpha + (1 - alpha) * torch.exp(-losses), 1.0)
    reached = known.cumprod(1) * (mask > 0)
    return reached.flip(1).cumsum(1).flip(1) * mask


class _Slots:
    """The judge of `head_loss`, whose rows are blocks and whose steps are slots."""

    def __init__(
        self,
        objective: BlockObjective,
        drafter,
        teacher_logits: TeacherLogits,
        labels: Tensor,
        slots: Slots,
        texts: int,
    ):
        self.objective, self.vocab, self.teacher_logits, self.labels, self.slots = (
            objective, drafter.vocab, teacher_logits, labels, slots,
        )  # fmt: skip
        self.divisor = objective.divisor(slots.mask, texts).clamp(min=1e-6)
        self.counted = slots.mask.sum(0).clamp(min=1e-6)  # of each slot
        self.losses, self.accuracy = torch.zeros(2, slots.mask.shape[1], device=labels.device).unbind()
        self.weights, self.accepted = torch.zeros(2, *slots.mask.shape, device=labels.device).unbind()
        self.conditioned = drafter.conditioned
        self.rates = objective.e2e > 0 or drafter.confidence is not None  # what is accepted is asked for

    def teacher(self, rows: slice) -> Teacher | TopTeacher:
        # Blocks overlap, and slots behind the text count nothing.
        here, index = once(*(x[rows].flatten() for x in self.slots.here), self.labels.shape[1])
        return read_teacher(self.teacher_logits, here, self.vocab, self.labels, self.objective.renormalise).at(index)

    def judge(
        self, steps: list[int], rows: slice, teacher: Teacher | TopTeacher, logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape, mask, base = logits.shape[:2], self.slots.mask[rows], self.objective.base_share
        student = Student(logits.flatten(0, 1)[:, None])
        if isinstance(teacher, TopTeacher):
            teacher = teacher.facing(student)
        value, slope, total = self.objective.weigh(student, teacher)
        losses = value.view(shape)
        weights = self.objective.weigh_slots(losses, mask)
        if steps[0] == mask.shape[1]:
            return self._loss(student, losses, slope, total, weights * base / self.divisor)
        share = weights * (1 - base if self.conditioned else 1) / self.divisor
        self.losses += (losses * mask).sum(0) / self.counted
        hits = (self.vocab.to_target(student.best) == teacher.choice[:, None]).view(shape) * mask
        self.accuracy += hits.sum(0) / self.counted
        self.weights[rows] = weights
        if self.rates:
            missed, pull, pull_total = tv(student, teacher)
            self.accepted[rows] = (1 - missed).view(shape)
        if not self.objective.e2e:
            return self._loss(student, losses, slope, total, share)
        lost, by_slot = unaccepted(self.accepted[rows], mask)
        each = self.objective.e2e / len(self.slots.mask)
        by_slot = each * by_slot.view(-1, 1)
        slope = slope * share.view(-1, 1, 1) + pull * by_slot[..., None]
        total = total * share.view(-1, 1) + pull_total * by_slot
        _, slope, ones = self._loss(student, losses, slope, total, torch.ones_like(share))
        return (losses * share).sum() + each * lost, slope, ones

    def _loss(
        self, student: Student, losses: Tensor, slope: Tensor, total: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a judge returns, given a term's slope and total, and the share [n,W] of each slot's loss [n,W]."""
        # d log q_v / d x_u = [u = v] - q_u. Nobody reads q after this: it gives the memory.
        slope = torch.addcmul(slope, student.q, total[..., None], value=-1, out=student.q)
        return (losses * share).sum(), slope.view(*losses.shape, -1), share[..., None]


def unaccepted(accepted: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum [] over n blocks of 1 - mean_j prod_{i<=j} of what is accepted [n,W], and its gradient [n,W] by what is
    not. Slots that do not count (mask [n,W] is 0) are taken to be accepted."""
    with torch.enable_grad():
        rate = accepted.detach().requires_grad_()
        lost = (1 - torch.where(mask > 0, rate, 1.0).cumprod(1).mean(1)).sum()
        (gradient,) = torch.autograd.grad(lost, rate)
    return lost.detach(), -gradient
