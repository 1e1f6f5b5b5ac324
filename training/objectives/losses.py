"""A loss over a vocabulary, fused with the head before it: computed in pieces, with no [tokens, vocabulary] matrix."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.likely import largest

PIECE = 1 << 22  # logits of a piece, over all its steps: 16 MiB in fp32, of which a few copies live at once
LEAST_ROWS = 16  # a piece of fewer rows would mostly wait for the head's weight to be read


def pieces(rows: int, width: int) -> Iterator[slice]:
    """Cut `rows` rows of `width` logits each into pieces of about `PIECE` logits."""
    step = max(LEAST_ROWS, PIECE // width)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


# ids [U], or None for all tokens -> the function from hidden states [n,H] to logits [n,U], after the target's cap.
Head = Callable[[Tensor | None], Callable[[Tensor], Tensor]]


def at_least_fp32(x: Tensor) -> Tensor:
    """Return the tensor in fp32, or in its own dtype if that is more precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class DeferredLogits:
    """Logits [B,T,V] that are computed where they are indexed, from a target's hidden states [B,T,H] and its head."""

    def __init__(self, hidden: Tensor, head: Head, vocab: int):
        """hidden: after the final norm. head: see `Head`."""
        self.hidden, self.head, self.shape = hidden, cache(head), (*hidden.shape[:2], vocab)
        self.log_mass: Any = None  # [B,T] of the positions that `summarise` has read
        self.choice: Any = None  # the same

    def __getitem__(self, index: tuple[Tensor, Tensor]) -> Tensor:
        """Row and column indices [n] -> [n,V]."""
        return self.of(index, None)

    def summarise(self, index: tuple[Tensor, Tensor]) -> Tensor:
        """Return the most likely tokens [n] at these positions, and store them with log sum exp of the logits."""
        found = at_least_fp32(self[index])
        if self.log_mass is None:
            self.log_mass = found.new_zeros(self.shape[:2])
            self.choice = torch.zeros(self.shape[:2], dtype=torch.int64, device=found.device)
        self.log_mass[index], self.choice[index] = found.logsumexp(-1), largest(found)[1]
        return self.choice[index]

    def of(self, index: tuple[Tensor, Tensor], ids: Tensor | None) -> Tensor:
        """Return the logits [n,U] of the tokens `ids` [U], or of all."""
        return self.head(ids)(self.hidden[index])


class Judge(Protocol):
    """What `head_loss` asks about a piece of rows. A judge may keep what it sees, for metrics."""

    def teacher(self, rows: slice):
        """What all steps share in these rows: the teacher's distribution, for example."""

    def judge(self, steps: list[int], rows: slice, teacher, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss [] of logits [n,J,U] of J steps, with slope [n,J,U] and scale [n,J,1].

        The logits may be overwritten. The product of slope and scale is the gradient by the logits. The scale is
        separate because it is cheaper to multiply into the narrower matrices by which the slope is multiplied.
        """


class _HeadLoss(torch.autograd.Function):
    """sum_j loss_j(readout_j @ head_j.T).

    Forward computes each piece's gradients by readouts and heads while its logits exist. So no piece is stored for
    backward, and none is computed twice. A piece holds all steps of a head at a few positions: what the steps share
    stays in the processor's caches, and the head's weight is read once for all of them.
    """

    @staticmethod
    def forward(ctx, judge: Judge, parts_of: Sequence[tuple[int, ...]], learning: bool, *tensors: Tensor) -> Tensor:
        steps = len(parts_of)
        readouts, heads = tensors[:steps], tensors[steps:]
        wanted = [learning and need for need in ctx.needs_input_grad[3:]]
        grads: list[Any] = [torch.zeros_like(x) if want else None for x, want in zip(tensors, wanted, strict=True)]
        kind = readouts[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else heads[0].dtype
        fine = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=fine, device=readouts[0].device)
        groups = {parts: [j for j in range(steps) if parts_of[j] == parts] for parts in parts_of}
        width = max(len(group) * len(heads[parts[0]]) for parts, group in groups.items())
        with torch.autocast(kind, enabled=False):
            weights = [head.to(dtype) for head in heads]
            for rows in pieces(len(readouts[0]), width):
                teacher = judge.teacher(rows)
                for parts, group in groups.items():
                    x = torch.stack([readouts[j][rows] for j in group], dim=1).to(dtype)
                    logits = product(x, [weights[part] for part in parts]).to(fine)
                    loss, slope, scale = judge.judge(group, rows, teacher, logits)
                    total += loss
                    slope = slope.to(dtype)
                    if any(wanted[j] for j in group):
                        gradient = torch.cat([slope @ weights[part] for part in parts], -1) * scale
                        for i, j in enumerate(group):
                            if wanted[j]:
                                grads[j][rows] = gradient[:, i].to(grads[j].dtype)
                    for part, own in zip(parts, split(x, [weights[part] for part in parts]), strict=True):
                        if wanted[steps + part]:
                            own = (own * scale).to(dtype).flatten(0, 1)
                            _add_product(grads[steps + part], slope.flatten(0, 1).T, own)
        ctx.grads = grads
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "the gradients were handed out by an earlier backward pass"
        # In place: a second copy of the head's gradient would be the largest tensor of the step.
        grads, ctx.grads = [g if g is None else g.mul_(upstream.to(g.dtype)) for g in ctx.grads], None
        return None, None, None, *grads


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def split(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parts of x [...,R] that each of some matrices [U,.] reads."""
    return x.split([weight.shape[1] for weight in weights], -1)


def product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Logits [...,U] of x [...,R]: the sum of the products of its parts with matrices [U,.]."""
    products = (F.linear(part.to(weight), weight) for part, weight in zip(split(x, weights), weights, strict=True))
    return sum(products, start=next(products))


def head_loss(judge: Judge, readouts: Sequence[Tensor], heads: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum [] of the losses that `judge` gives to the logits of all steps.

    readouts: for each step [n,R]. heads: for each step the matrices of its head as `product` takes them, often one, and
    often the same for all steps. Both get gradients if they require them. Under autocast the products are in its dtype,
    and everything else is in fp32.
    """
    distinct = list({id(weight): weight for head in heads for weight in head}.values())
    place = {id(weight): i for i, weight in enumerate(distinct)}
    parts_of = [tuple(place[id(weight)] for weight in head) for head in heads]
    return _HeadLoss.apply(judge, parts_of, torch.is_grad_enabled(), *readouts, *distinct)
