"""Objective of drafters that draft a block at once: DFlash, DSpark, JetSpec.

The papers are arXiv 2602.06036, 2607.05147 and 2606.18394.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.unroll_block import Blocks
from specdec.schema import choice, ranged
from specdec.training.objectives.anchors import COUNTS, WHERE, Slots, draw, draw_visible, slots
from specdec.training.objectives.base import Objective, TermsJudge, documents_of
from specdec.training.objectives.losses import head_loss, pieces
from specdec.training.objectives.teacher import Student, Teacher, TopTeacher
from specdec.training.objectives.terms import Value, Weight, tv


@dataclass(eq=False)
class BlockObjective(Objective):
    """Terms at each slot of blocks after sampled anchors: sum w_j term_j / denominator.

    conf/objective/block.yaml says what each setting is for; `training.objectives.anchors` has `where` and `counts`.

    - confidence: the loss is the binary cross-entropy of the confidence head against the share sum min(p, q) of its
      slot's tokens that rejection sampling accepts. It has no gradient by p and q.
    - base: falls in a line to 0 over the share `base_until` of the run.
    - visible: weights start again at the first token that is not shown.
    - selector: the other terms are then those of the base logits.
    """

    usual: ClassVar[Mapping[str, Weight]] = {"tokens": 1.0}
    steps: int = field(default=1, init=False)
    decay: float = field(default=1.0, init=False)
    known_only: bool = field(default=False, init=False)
    anchors: int = ranged(1, 1 << 20, 512)
    where: str = choice(*WHERE)
    counts: str = choice(*COUNTS)
    weights: str = choice("exp", "uniform", "d_pace")
    gamma: float = ranged(0, 1e6, 4.0, above=True)
    alpha: float = 0.5
    denominator: str = choice("weights", "slots", "texts")
    confidence: float = 1.0
    base: float = ranged(0, 1, 0.0)
    base_until: float = ranged(0, 1, 0.5, above=True)
    visible: float | None = ranged(0, 1e6, None, above=True)
    selector: float = 1.0
    chooses: str = choice("text", "target")
    missing: str = choice("leave", "replace")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.weights == "d_pace" and self.denominator == "weights":
            raise ValueError("objective.weights=d_pace is known after the loss only: divide by slots or texts")

    @property
    def base_share(self) -> float:
        """What `base` has come to by now."""
        return self.base * max(0.0, 1 - self.progress / self.base_until)

    lookahead = 0  # no block leaves its document

    def __call__(self, drafter, feats, tokens, teacher_logits, loss_mask, weights=None):
        """As `Objective`; the metrics have an entry for each slot, and `confidence_losses` if there is such a head."""
        if not isinstance(drafter, BlockDrafter):
            raise ValueError(f"objective=block is for drafters of blocks, which {type(drafter).__name__} is not")
        chosen = self.slots(drafter, loss_mask, weights)
        following = F.pad(tokens[:, 1:], (0, 1))
        blocks = drafter.blocks(self.noisy(feats), following, (chosen.anchors - 1).clamp(min=0), chosen.visible)
        texts = texts_of(documents_of(drafter, tokens), loss_mask)
        judge = _Slots(self, drafter, teacher_logits, drafter.vocab.from_target(following), chosen, texts)
        rows, base = blocks.readout[chosen.chosen], [drafter.head.weights] * drafter.block
        slots, reads = rows.split_with_sizes([drafter.shape.hidden, rows.shape[2] - drafter.shape.hidden], 2)
        if judge.candidates is not None:  # the selector's own loss is asked for below
            readouts, heads = slots.unbind(1), base
        else:
            readouts, heads = rows.unbind(1), [blocks.head.weights] * drafter.block
            if judge.base > 0:  # as many steps more
                readouts, heads = readouts + slots.unbind(1), heads + base
        loss = head_loss(judge, readouts, heads)
        metrics = {"losses": judge.losses, "accuracy": judge.accuracy}
        counts = [judge.counted] * 2
        for name, lost, by_slot, count in self._heads(drafter, blocks, slots, reads, judge, texts):
            loss = loss + lost
            metrics[name] = by_slot
            counts.append(count)
        return loss, metrics | {"counted": judge.divisor, "counts": torch.stack(counts)}

    def _heads(self, drafter, blocks: Blocks, slots: Tensor, reads: Tensor, judge: "_Slots", texts: Tensor) -> Iterator:
        """Yield the metric's name, the loss, and the loss by slot with its divisors: confidence head and selector.

        slots [n,W,H] and reads [n,W,R] are of the blocks that count.
        """
        counted = judge.weights.sum(0).clamp(min=1e-6)
        if blocks.confidence is not None:
            sure = blocks.confidence[judge.slots.chosen].float()
            missed = F.binary_cross_entropy_with_logits(sure, judge.accepted, reduction="none") * judge.weights
            lost = self.confidence * missed.sum() / judge.divisor
            yield "confidence_losses", lost, missed.detach().sum(0) / counted, counted
        if judge.candidates is not None:
            known = judge.candidates.known
            weights, mask = judge.weights * known, judge.slots.mask * known
            (output,), (own,) = drafter.head.weights, drafter.conditional.head.weights
            missed = judge.candidates.losses(slots, reads, output, own) * weights
            lost = missed.sum() / self.divisor(mask, weights, texts).clamp(min=1e-6)
            counted = weights.sum(0).clamp(min=1e-6)
            yield "selector_losses", self.selector * lost, missed.detach().sum(0) / counted, counted

    def slots(self, drafter: BlockDrafter, loss_mask: Tensor, weights: Tensor | None) -> Slots:
        """Draw anchors, and return the weights of their slots."""
        documents = documents_of(drafter, loss_mask)
        drawn = draw(self.anchors, self.where, drafter.switches.rows, loss_mask, documents)
        shown = None if self.visible is None else draw_visible(self.visible, drawn[0], drafter.switches.rows)
        return slots(*drawn, drafter.block, self.counts, loss_mask, documents, weights, shown)

    @override
    def readouts(self, drafter: BlockDrafter, feats: Tensor, tokens: Tensor) -> list[Tensor]:
        count = min(self.anchors, tokens.shape[1])
        return [drafter.blocks(feats, tokens, torch.arange(count).expand(len(tokens), -1)).readout]

    def weigh_slots(self, losses: Tensor, mask: Tensor, since: Tensor) -> Tensor:
        """What each slot of n blocks weighs, given its loss, what it counts, and `Slots.since`, [n,W] each."""
        if self.weights == "d_pace":
            return pace(losses, mask, self.alpha)
        if self.weights == "uniform":
            return mask
        return mask * torch.exp(-since / self.gamma)

    def divisor(self, mask: Tensor, weights: Tensor, texts: Tensor) -> Tensor:
        """[] what the sum over slots, which count mask [n,W] and weigh weights [n,W], is divided by."""
        if self.denominator == "texts":
            return texts.to(mask)
        return (mask if self.denominator == "slots" else weights).sum()


def texts_of(documents: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the number [] of texts with training tokens. A packed row has several. documents [B,T]; -1: padding."""
    return torch.zeros_like(loss_mask).scatter_add(1, documents.clamp(min=0), loss_mask).count_nonzero()


def pace(losses: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): slots weigh what depends on them, by what the drafter knows already.

    With s_i = alpha + (1 - alpha) exp(-loss_i), and 1 for slots that do not count, slot i weighs the sum of the
    products s_1 ... s_j over the j >= i that count. losses, mask [n,W] -> [n,W].
    """
    known = torch.where(mask > 0, alpha + (1 - alpha) * torch.exp(-losses), 1.0)
    reached = known.cumprod(1) * (mask > 0)
    return reached.flip(1).cumsum(1).flip(1) * mask


class Candidates:
    """The candidates of n blocks of W slots, and what the selector is to choose, as a judge meets the logits."""

    def __init__(self, blocks: int, slots: int, count: int, chooses: str, missing: str, device: torch.device):
        """chooses, missing: as `BlockObjective` takes them."""
        self.ids = torch.zeros(blocks, slots, count, dtype=torch.int64, device=device)
        self.place = torch.zeros(blocks, slots, dtype=torch.int64, device=device)  # of the token to choose; -1: nowhere
        self.chooses, self.missing = chooses, missing

    def meet(self, rows: slice, logits: Tensor, labels: Tensor, choice: Tensor) -> None:
        """Store the best tokens of blocks by logits [n*W,1,U]. labels, choice [n*W]: draft ids, -1 for none."""
        ids = logits[:, 0].topk(self.ids.shape[2]).indices
        wanted = (labels if self.chooses == "text" else choice)[:, None]
        there = ids == wanted
        if self.missing == "replace":
            ids[:, -1:] = torch.where(there.any(1, keepdim=True) | (wanted < 0), ids[:, -1:], wanted)
            there = ids == wanted
        place = torch.where(there.any(1), there.int().argmax(1), -1)
        self.ids[rows], self.place[rows] = ids.view(self.ids[rows].shape), place.view(self.place[rows].shape)

    @property
    def known(self) -> Tensor:
        """[n,W] 1 where what is to be chosen is a candidate, else 0."""
        return (self.place >= 0).float()

    def losses(self, base: Tensor, low: Tensor, head: Tensor, selector: Tensor) -> Tensor:
        """Return the cross-entropy [n,W] over the candidates of slots, 0 where it is not known.

        base [n,W,H] and low [n,W,R] are what the heads of the backbone [U,H] and of the selector [U,R] read. Some
        blocks are computed at a time, and again for the gradients. Those of `selector[ids]` would have other last bits
        in every run: several threads add to a row in any order.
        """

        def of(rows: slice) -> Tensor:
            ids, x, y = self.ids[rows], base[rows], low[rows]
            wide, narrow = F.embedding(ids, head).to(x), F.embedding(ids, selector)
            scores = torch.einsum("nwh,nwkh->nwk", x, wide) + torch.einsum("nwr,nwkr->nwk", y, narrow)
            place = self.place[rows]
            lost = F.cross_entropy(scores.flatten(0, 1).float(), place.flatten(), reduction="none", ignore_index=-1)
            return lost.view(place.shape)

        cuts = pieces(len(base), self.ids[0].numel() * head.shape[1])
        return torch.cat([checkpoint(of, rows, use_reentrant=False, preserve_rng_state=False) for rows in cuts])


class _Slots(TermsJudge):
    """The judge with blocks as rows and slots as steps."""

    def __init__(self, objective: BlockObjective, drafter, teacher_logits, labels: Tensor, slots: Slots, texts: Tensor):
        super().__init__(objective, drafter.vocab, teacher_logits, labels)
        self.weighs = objective
        self.slots, mask, conditional = slots, slots.mask, drafter.conditional
        weights = objective.weigh_slots(mask, mask, slots.since)  # of d_pace others: it does not divide by them
        self.divisor = objective.divisor(mask, weights, texts).clamp(min=1e-6)
        self.counted = mask.sum(0).clamp(min=1e-6)  # of each slot
        self.losses, self.accuracy = torch.zeros(2, mask.shape[1], device=labels.device).unbind()
        self.weights, self.accepted = torch.zeros(2, *mask.shape, device=labels.device).unbind()
        self.candidates: Candidates | None = None
        if conditional is not None and conditional.candidates:
            count = min(conditional.candidates, drafter.vocab.size)
            blocks, width = mask.shape
            self.candidates = Candidates(blocks, width, count, objective.chooses, objective.missing, labels.device)
        self.base = objective.base_share if conditional is not None and self.candidates is None else 0.0
        self.confident = drafter.confidence is not None

    def teacher(self, rows: slice) -> Teacher | TopTeacher:
        # Blocks overlap, and slots after the end of the text count nothing.
        return self.read_once(*(x[rows].flatten() for x in self.slots.here))

    def judge(self, steps: list[int], rows: slice, teacher: Teacher | TopTeacher, logits: Tensor) -> Value:
        shape, mask, since = logits.shape[:2], self.slots.mask[rows], self.slots.since[rows]
        student = Student(logits.flatten(0, 1)[:, None])
        if isinstance(teacher, TopTeacher):
            teacher = teacher.facing(student)
        value, slope, total = self.objective.weigh(student, teacher)
        losses = value.view(shape)
        weights = self.weighs.weigh_slots(losses, mask, since)
        if steps[0] == mask.shape[1]:
            share = weights * self.base / self.divisor
        else:
            share = weights * (1 - self.base) / self.divisor
            self._measure(rows, student, teacher, losses, weights)
        slope = self.gradient(student, slope, total)
        return (losses * share).sum(), slope.view(*shape, -1), share[..., None]

    def _measure(self, rows: slice, student: Student, teacher: Teacher, losses: Tensor, weights: Tensor) -> None:
        """Keep the metrics of blocks, and what the confidence head and the selector learn from."""
        mask = self.slots.mask[rows]
        self.losses += (losses * mask).sum(0) / self.counted
        hits = (self.vocab.to_target(student.best) == teacher.choice[:, None]).view(mask.shape) * mask
        self.accuracy += hits.sum(0) / self.counted
        self.weights[rows] = weights
        if self.candidates is not None:
            self.candidates.meet(rows, student.logits, teacher.labels, teacher.best)
        if self.confident:
            self.accepted[rows] = (1 - tv(student, teacher)[0]).view(mask.shape)
