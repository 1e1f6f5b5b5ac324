"""The objective of drafters whose blocks are rows of mask tokens: P-EAGLE and PARD (arXiv 2602.01469, 2504.18583).

They train on some rows, by conditional drop (COD). A row has an anchor, the position p of the last real token before
it, and a depth d, the number of mask tokens up to itself. The target predicts its token at column p + d. Depth 0 is the
real row itself, and all of those are drawn. Of depth d a share `share` ** d is drawn, `least_share` at least, of the
rows that follow one drawn at depth d - 1. So a chain is always drawn from its beginning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.drafters.parallel import ParallelDrafter
from specdec.model.attention import document_positions
from specdec.schema import choice, ranged
from specdec.training.objectives.base import Objective, TermsJudge, documents_of
from specdec.training.objectives.losses import head_loss, pieces
from specdec.training.objectives.teacher import Student, Teacher, TeacherLogits, TopTeacher, TopTokens
from specdec.training.objectives.terms import Value, Weight


def sample(
    learnt: Tensor, depths: int, share: float, least_share: float, anchors: int | None = None, pool: str = "learnt"
) -> Tensor:
    """[B,T,depths] bool, at [b,c,d]: whether the row of depth d that ends at column c is drawn.

    learnt [B,T] bool: columns at which the target's prediction is learnt. pool: 'learnt', chains go through learnt
    columns, whose number n gives (n - d) share^d rows of depth d (speculators); 'all', through any, T share^d rows
    (PARD). anchors: chains begin in so many learnt columns at most. While gradients are off, as in evaluation, the draw
    is the same every time.
    """
    generator = None if torch.is_grad_enabled() else torch.Generator(learnt.device).manual_seed(0)

    def some(candidates: Tensor, count: Tensor) -> Tensor:
        """`count` [B] of the candidates [B,T], or all if there are fewer."""
        lots = torch.rand(candidates.shape, device=candidates.device, generator=generator)
        places = lots.masked_fill(~candidates, 2).argsort(1).argsort(1)
        return candidates & (places < count[:, None])

    through = learnt if pool == "learnt" else torch.ones_like(learnt)
    now = through if anchors is None else some(through, torch.full_like(learnt[:, 0], anchors, dtype=torch.int64))
    total, drawn = now.sum(1), [learnt]
    for depth in range(1, depths):
        size = total - depth if pool == "learnt" else total
        now = some(now, (size.clamp(min=0).double() * max(share**depth, least_share)).long())
        drawn.append(now & learnt)
        now = F.pad(now[:, :-1], (1, 0), value=False) & through
    return torch.stack(drawn, 2)


def by_anchor(drawn: Tensor, documents: Tensor, earliest: int) -> Tensor:
    """Return the drawn rows by their anchor, bool [B,T+1,depths], where [b,p+1,d] is the row of anchor p.

    The anchor p of a chain with nothing before it is -1. Rows that leave the anchor's document [B,T] are left out, and
    so are those of anchors before place `earliest` of their document.
    """
    b, t, depths = drawn.shape
    anchors = torch.arange(-1, t, device=documents.device).clamp(min=0)
    may = F.pad(document_positions(documents) >= earliest, (1, 0), value=earliest < 0)
    out = torch.zeros(b, t + 1, depths, dtype=torch.bool, device=drawn.device)
    for depth in range(min(depths, t + 1)):
        columns = slice(max(depth - 1, 0), t)
        begin = 1 if depth == 0 else 0
        rows = slice(begin, begin + t - columns.start)
        same = documents[:, anchors[rows]] == documents[:, columns]
        out[:, rows, depth] = drawn[:, columns, depth] & same & may[:, rows]
    return out


@dataclass
class Sampled:
    """The n training rows of a batch, ordered by text and column, and their chains."""

    anchors: Tensor  # [B,A] positions of the last real tokens of chains, the longest chain of a text first
    lengths: list[int]  # of each of the A, how many slots are wanted
    row: Tensor  # [n]
    place: Tensor  # [n] in `anchors`
    depth: Tensor  # [n]
    column: Tensor  # [n] at which the target predicts


@dataclass(eq=False)
class ParallelObjective(Objective):
    """The weighted mean of terms over rows that `sample` draws, all depths alike.

    conf/objective/parallel.yaml says what each setting is for. weights: 'teacher' is the product of the target's
    probabilities of the tokens that the mask tokens up to the row replace (PARD-2).
    """

    usual: ClassVar[Mapping[str, Weight]] = {"kl": 1.0}
    steps: int = field(default=1, init=False)
    decay: float = field(default=1.0, init=False)
    kept: float = ranged(0, 1, 0.7)
    kept_min: float = ranged(0, 1, 0.2)
    anchors: int | None = ranged(1, 1 << 20, None)
    pool: str = choice("learnt", "all")
    counts: str = choice("previous", "label")
    weights: str = choice("uniform", "teacher")
    drop: float = ranged(0, 1, 0.0)

    lookahead = 0  # no chain leaves its document

    def __call__(self, drafter, feats, tokens, teacher_logits, loss_mask, weights=None):
        """As `Objective`; the metrics have an entry for each depth."""
        if not isinstance(drafter, ParallelDrafter):
            raise ValueError(f"objective=parallel is for P-EAGLE and PARD, which {type(drafter).__name__} is not")
        following = F.pad(tokens[:, 1:], (0, 1))
        documents = documents_of(drafter, tokens)
        learnt = self.learnt(drafter, teacher_logits, loss_mask, documents)
        rows = sampled(self.rows_of(drafter, learnt, documents))
        blocks = drafter.blocks(self.noisy(feats), following, rows.anchors - 1, rows.lengths)
        readout = blocks.readout[rows.row, rows.place, rows.depth]
        each = torch.ones_like(readout[:, 0], dtype=torch.float32)
        if self.weights == "teacher":
            each = believed(rows, teacher_logprobs(rows, teacher_logits, following))
        if weights is not None:
            each = each * F.pad(weights[:, 1:], (0, 1), value=1.0)[rows.row, rows.column]
        ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
        labels = drafter.vocab.from_target(following).masked_fill(ends, -1)
        judge = _Rows(self, drafter, teacher_logits, labels, rows, each)
        loss = head_loss(judge, [readout], [blocks.head.weights])
        counts = {"counted": judge.divisor, "counts": torch.stack([judge.counted] * 2)}
        return loss, {"losses": judge.losses, "accuracy": judge.accuracy} | counts

    def learnt(
        self, drafter: ParallelDrafter, teacher_logits: TeacherLogits, loss_mask: Tensor, documents: Tensor
    ) -> Tensor:
        """[B,T] bool: columns at which the target's prediction is trained on."""
        if self.counts == "label":
            same = documents[:, 1:] == documents[:, :-1]
            loss_mask = F.pad(loss_mask[:, 1:] * same, (0, 1))
        return self.positions(drafter.vocab, teacher_logits, loss_mask, loss_mask) > 0

    def rows_of(self, drafter: ParallelDrafter, learnt: Tensor, documents: Tensor) -> Tensor:
        """[B,T+1,block] bool: which rows are trained on, as `by_anchor` gives them."""
        drawn = sample(learnt, drafter.block, self.kept, self.kept_min, self.anchors, self.pool)
        return by_anchor(drawn, documents, drafter.earliest)

    @override
    def noisy(self, feats: Tensor) -> Tensor:
        feats = super().noisy(feats)
        if not self.drop or not torch.is_grad_enabled():
            return feats
        return feats * (torch.rand(len(feats), 1, 1, device=feats.device) >= self.drop)

    @override
    def readouts(self, drafter: ParallelDrafter, feats: Tensor, tokens: Tensor) -> list[Tensor]:
        drafter.first_tokens = tokens[:, 0]
        width = tokens.shape[1]
        shares = [1.0] + [max(self.kept**depth, self.kept_min) for depth in range(1, drafter.block)]
        lengths = [sum(column < share * width for share in shares) for column in range(width)]
        return [drafter.blocks(feats, tokens, torch.arange(width).expand_as(tokens), lengths).readout]


def sampled(drawn: Tensor) -> Sampled:
    """The drawn rows [B,T+1,K], at [b,p+1,d] for anchor p and depth d, sorted for a forward in pieces."""
    depths = torch.arange(1, drawn.shape[2] + 1, device=drawn.device)
    lengths, order = (drawn * depths).amax(2).sort(dim=1, descending=True, stable=True)
    longest = lengths.amax(0).tolist()  # waits for the device, once a training step
    used = max(sum(length > 0 for length in longest), 1)
    order = order[:, :used]
    row, place, depth = drawn.gather(1, order[..., None].expand(-1, -1, drawn.shape[2])).nonzero(as_tuple=True)
    anchors = order - 1
    column = anchors[row, place] + depth
    by_column = (row * drawn.shape[1] + column).argsort(stable=True)  # rows of one column share their teacher
    row, place, depth, column = (x[by_column] for x in (row, place, depth, column))
    return Sampled(anchors, [max(length, 1) for length in longest[:used]], row, place, depth, column)


def before(rows: Sampled) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for 1, 2, ... columns before the n rows the row and the column [n] in the texts.

    The third tensor says whether a mask token of the chain replaces the token that the target predicts there.
    """
    at = [rows.column - back for back in range(1, max(rows.lengths))]
    return [(rows.row, x.clamp(min=0), (rows.depth >= back) & (x >= 0)) for back, x in enumerate(at, start=1)]


def teacher_logprobs(rows: Sampled, teacher_logits: TeacherLogits, following: Tensor) -> Tensor:
    """[B,T] log-probability of the `following` token [B,T] after each column that `before` looks at, elsewhere 0."""
    known = torch.zeros(following.shape, device=following.device)
    for row, column, inside in before(rows):
        known[row[inside], column[inside]] = 1.0
    row, column = known.nonzero(as_tuple=True)
    cached = getattr(teacher_logits, "hidden", None)  # 0 where a cache has no state
    if isinstance(teacher_logits, TopTokens) or (cached is not None and not cached[row, column].any(-1).all()):
        raise ValueError(
            "objective.weights=teacher reads the target's logits at all tokens of a chain, and data.cache lacks some: "
            "make a cache with keep=all and the last hidden state among drafter.taps, or leave data.cache out"
        )
    for piece in pieces(len(row), teacher_logits.shape[-1]):
        here = row[piece], column[piece]
        logp = teacher_logits[here].float().log_softmax(-1)
        known[here] = logp.gather(1, following[here][:, None])[:, 0]
    return known


def believed(rows: Sampled, known: Tensor) -> Tensor:
    """[n], for each row the target's probability of the tokens that the mask tokens up to it replace; known [B,T]."""
    out = torch.zeros(len(rows.row), device=known.device)
    for row, column, inside in before(rows):
        out += known[row, column] * inside
    return out.exp()


class _Rows(TermsJudge):
    """The judge with sampled rows as rows; it has the metrics by depth."""

    def __init__(self, objective: Objective, drafter, teacher_logits, labels: Tensor, rows: Sampled, weights: Tensor):
        super().__init__(objective, drafter.vocab, teacher_logits, labels)
        self.rows, self.weights = rows, weights
        self.divisor = weights.sum().clamp(min=1e-6)
        nothing = torch.zeros(drafter.block, device=labels.device)
        self.counted = nothing.index_add(0, rows.depth, weights).clamp(min=1e-6)
        self.losses, self.accuracy = nothing, nothing.clone()

    def teacher(self, rows: slice) -> Teacher | TopTeacher:
        return self.read_once(self.rows.row[rows], self.rows.column[rows])

    def judge(self, steps: list[int], rows: slice, teacher: Teacher | TopTeacher, logits: Tensor) -> Value:
        student, depth, weights = Student(logits), self.rows.depth[rows], self.weights[rows]
        teacher = teacher.facing(student) if isinstance(teacher, TopTeacher) else teacher
        value, slope, total = self.objective.weigh(student, teacher)
        value, share = value[:, 0], weights / self.divisor
        self.losses.index_add_(0, depth, value * weights / self.counted[depth])
        hits = self.vocab.to_target(student.best[:, 0]) == teacher.choice
        self.accuracy.index_add_(0, depth, hits * weights / self.counted[depth])
        return (value * share).sum(), self.gradient(student, slope, total), share[:, None, None]
