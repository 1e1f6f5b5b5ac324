"""The fused, piecewise losses against what autograd makes of plain ones. Muon in fp32, where a processor has no
products in bf16, against torch's Muon."""

import copy
from contextlib import nullcontext

import pytest
import short_runs
import torch
import torch.nn.functional as F
from helpers import tiny_drafter, tiny_target
from torch import nn

from specdec.model.loader import load_target
from specdec.training.data import Batch
from specdec.training.features.online import online_features
from specdec.training.loop import optim
from specdec.training.loop.optim import Muon, Optimizers
from specdec.training.objectives import losses
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.teacher import Student, Teacher, TopTeacher
from specdec.training.objectives.terms import TERMS, read_terms


def plain(name: str, p, whole, q, known, labels=None):
    """Each term as its paper writes it, on distributions [n,U] -> [n]; None for a term without a formula here.

    whole: p as part of all tokens' mass. known: how many of the columns are tokens, of which the first is p's most
    likely one."""
    m, logq = (p + q) / 2, q.log()
    alpha, kl = torch.minimum(whole, q).sum(-1), (p * (p.log() - logq)).sum(-1)
    w = torch.exp(-3.0 * alpha.detach())
    warm = lambda x: x**0.4 / (x**0.4).sum(-1, keepdim=True)  # noqa: E731
    by_rank = p[:, :known].argsort(-1, descending=True)[:, :10]
    formulas = {
        "ce": lambda: -(p * logq).sum(-1),
        "kl": lambda: kl,
        "kl at a temperature": lambda: 2.5**2 * (warm(p) * (warm(p) / warm(q)).log()).sum(-1),
        "reverse_kl": lambda: (q * (logq - p.log())).sum(-1),
        "jsd": lambda: 0.5 * (p * (p / m).log()).sum(-1) + 0.5 * (q * (q / m).log()).sum(-1),
        "tv": lambda: 1 - alpha,
        "l1": lambda: 2 * (1 - alpha),
        "choice": lambda: F.nll_loss(logq, p[:, :known].argmax(-1), reduction="none"),
        "tokens": lambda: F.nll_loss(logq, labels, reduction="none", ignore_index=-1),
        "lk": lambda: -alpha.log(),
        "lk_hybrid": lambda: w * kl + (1 - w) * (1 - alpha),
        "top_k": lambda: -(p * logq).gather(1, by_rank).sum(-1),
    }
    return formulas[name]() if name in formulas else None


def expect(formula, own, logits):
    """Value [n] of a term, its gradient by the logits [n,U], and the tolerance: of its formula, by autograd. A term
    without a formula above is compared with its own value, by central differences."""
    if (value := formula(logits)) is not None:
        return value.detach(), torch.autograd.grad(value.sum(), logits)[0], 1e-10
    at, steps = logits.detach(), 1e-5 * torch.eye(logits.shape[-1], dtype=logits.dtype)
    return own(at), torch.stack([(own(at + step) - own(at - step)) / 2e-5 for step in steps], -1), 1e-6


SETTINGS = {"kl at a temperature": {"kl": {"temperature": 2.5}}}
SETTINGS |= {f"{name}, renormalised": {name: {"renormalised": True}} for name in ("tv", "l1", "lk", "lk_hybrid")}


@pytest.mark.matrix
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("name", [*TERMS, *SETTINGS])
def test_every_term_equals_its_formula(name, renormalise):
    """Value, and gradient by the logits, in fp64; the draft vocabulary is part of the target's.

    Terms that renormalise compare softmaxes of the draft vocabulary, as speculators does, whatever the objective's p.
    """
    torch.manual_seed(0)
    ids = torch.arange(0, 40, 2)
    logits = (3 * torch.randn(30, 2, 20, dtype=torch.float64)).requires_grad_()
    theirs = (3 * torch.randn(30, 40, dtype=torch.float64)).log_softmax(-1)[:, ids]
    labels = torch.randint(-1, 20, (30,))
    share = theirs.logsumexp(-1, keepdim=True)
    teacher = Teacher(theirs - share, share, None, labels) if renormalise else Teacher(theirs, None, None, labels)
    ((_, term),) = read_terms(SETTINGS.get(name, {name: 1.0}))
    whole = (theirs - share).exp() if "renormalised" in name else theirs.exp()
    student = Student(logits.detach())
    value, slope, total = term(student, teacher)
    for j in range(2):
        expected, wanted, near = expect(
            lambda x: plain(name.partition(",")[0], teacher.logp.exp(), whole, x.softmax(-1), 20, labels),
            lambda x: term(Student(x[:, None]), teacher)[0][:, 0],
            logits[:, j].detach().requires_grad_(),
        )
        torch.testing.assert_close(value[:, j], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close((slope - student.q * total[..., None])[:, j], wanted, rtol=near, atol=near)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in TERMS if n != "tokens"])
def test_every_term_over_some_tokens_and_the_rest(name):
    """What a cache that keeps four tokens tells: value and gradient in fp64 over these and one bucket for the rest, and
    divergences that are no larger than those of the whole distribution."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(30, 20, dtype=torch.float64)).requires_grad_()
    logp = (3 * torch.randn(30, 20, dtype=torch.float64)).log_softmax(-1)
    share, top = torch.rand(30, 1, dtype=torch.float64) * 0.5 + 0.5, logp.topk(4)
    rest = logp.scatter(1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
    known = TopTeacher(top.indices, top.values, rest, share.log(), None, torch.full((30,), -1))
    ((_, term),) = read_terms({name: {"weight": 1.0} | ({"k": 4} if name == "top_k" else {})})
    draft = Student(logits.detach()[:, None])
    value, slope, total = term(draft, known.facing(draft))

    def coarse(x, ids):
        return torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1)

    def expected(ids, x=logits):
        p = coarse(logp.exp(), ids)
        return plain(name, p, p * share, coarse(x.softmax(-1), ids), ids.shape[1])

    def own(x):
        return term(Student(x[:, None]), known.facing(Student(x[:, None])))[0][:, 0]

    wanted, wanted_slope, near = expect(lambda x: expected(top.indices, x), own, logits)
    torch.testing.assert_close(value[:, 0], wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        (slope - draft.q * total[..., None])[:, 0], wanted_slope, rtol=max(near, 1e-9), atol=near
    )
    if name in ("kl", "reverse_kl", "jsd", "tv"):
        assert (value[:, 0] <= expected(logp.argsort(-1, descending=True)[:, :19]) + 1e-9).all()


class Squares:
    """A judge with a simple loss: sum_j scale_j * sum(logits^2)."""

    def __init__(self, scales):
        self.scales = scales

    def teacher(self, rows):
        return None

    def judge(self, steps, rows, teacher, logits):
        scale = torch.tensor([self.scales[j] for j in steps], dtype=logits.dtype)[:, None]
        return (scale * logits.square()).sum(), 2 * logits, scale.expand(len(logits), -1, -1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("parts", [(6,), (4, 2)])
def test_gradients_by_readouts_and_heads(monkeypatch, parts, shared, frozen):
    """Pieces of 4 rows of 10, three steps, one head or three, of one matrix or two: what autograd gives for the plain
    product."""
    monkeypatch.setattr(losses, "LEAST_ROWS", 4)
    monkeypatch.setattr(losses, "PIECE", 1)
    torch.manual_seed(0)
    readouts = [torch.randn(10, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    own = {"dtype": torch.float64, "requires_grad": not frozen}
    heads = [[torch.randn(8, width, **own) for width in parts] for _ in range(1 if shared else 3)]
    heads *= 3 // len(heads)
    scales = [1.0, 0.5, 0.25]
    logits = [x @ torch.cat(h, 1).T for x, h in zip(readouts, heads, strict=True)]
    expected = 7 * sum(s * x.square().sum() for s, x in zip(scales, logits, strict=True))
    loss = 7 * losses.head_loss(Squares(scales), readouts, heads)
    torch.testing.assert_close(loss, expected)
    learners = readouts if frozen else readouts + [weight for h in heads[: 1 if shared else 3] for weight in h]
    torch.testing.assert_close(torch.autograd.grad(loss, learners), torch.autograd.grad(expected, learners))


@pytest.mark.parametrize("terms", [{"ce": 1.0}, {"ce": 0.5, "lk": 2.0, "tokens": 0.1}])
def test_autocast_rounds_the_products_only(terms):
    """bf16 products: the loss is the fp32 one to bf16's precision (8 bits, on losses of about 1 to 5), and gradients
    arrive in the parameters' fp32."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=9)
    inputs = short_runs.batch(target, drafter) | {"loss_mask": torch.ones(4, 12)}
    fine, _ = Eagle3Objective(steps=3, terms=terms)(drafter, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = Eagle3Objective(steps=3, terms=terms)(drafter, **inputs)
    assert fine != loss
    assert loss.dtype == torch.float32
    assert abs(fine - loss) < 2**-7 * fine.abs()
    loss.backward()
    assert drafter.head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("draft_vocab", [None, 8])
def test_deferred_logits_give_the_same_step(draft_vocab):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=draft_vocab)
    torch.manual_seed(3)
    batch = Batch(torch.randint(17, (4, 12)), (torch.arange(12) >= 3).float().expand(4, 12))
    features, results = online_features(target, batch, drafter.taps, nullcontext()), []
    for logits in (features["teacher_logits"], target(batch.tokens, None)[0].detach()):
        loss, metrics = Eagle3Objective(steps=3)(drafter, **features | {"teacher_logits": logits})
        drafter.zero_grad()
        loss.backward()
        results.append((loss, metrics, [p.grad.clone() for p in drafter.parameters()]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("generic", [False, True])
def test_a_drafter_without_taps_learns_from_any_target(generic, target_path):
    target = load_target(target_path, generic=generic)
    features = online_features(target, Batch(torch.randint(17, (2, 12)), torch.ones(2, 12)), (), nullcontext())
    assert features["feats"].shape == (2, 12, 0)


def test_logits_under_autocast_leave_it_as_it_was():
    """A context that is entered twice stays on after its end."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8)
    batch = Batch(torch.randint(17, (2, 12)), torch.ones(2, 12))
    features = online_features(target, batch, drafter.taps, torch.autocast("cpu", torch.bfloat16))
    assert not torch.is_autocast_enabled("cpu")
    Eagle3Objective(steps=2)(drafter, **features)
    assert not torch.is_autocast_enabled("cpu")


# Muon


SHAPES = [(24, 48), (48, 24), (32, 32)]


def test_matrices_alone_leave_nothing_to_adamw():
    weight = nn.Parameter(torch.ones(3, 3))
    optimizers = Optimizers([("weight", weight)], lr=0.1, muon_lr=0.1)
    weight.grad = torch.eye(3)
    optimizers.step(1.0, 1.0)
    assert [lr for _, lr in optimizers.parts] == [0.1]
    assert not torch.equal(weight, torch.ones(3, 3))


def stepped(kind: type, steps: int, state: dict | None = None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """What so many steps add to matrices, and the optimizer; the first one is without a gradient."""
    draw = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in [(3, 3), *SHAPES]]
    optimizer, before = kind(matrices, lr=0.1, momentum=0.95, weight_decay=0.05), [m.detach().clone() for m in matrices]
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))  # which is changed in place
    for _ in range(steps):
        for matrix in matrices[1:]:
            matrix.grad = torch.randn(matrix.shape, generator=draw)
        optimizer.step()
    return [matrix.detach() - old for matrix, old in zip(matrices, before, strict=True)], optimizer


@pytest.mark.parametrize("state", [None, torch.optim.Muon, Muon])
def test_steps_are_torchs_up_to_its_rounding(state, monkeypatch):
    """Also from a state that the other one wrote."""
    monkeypatch.setattr(optim, "fast_bf16", lambda device: False)
    state = None if state is None else stepped(state, 3)[1].state_dict()
    ours, theirs = (stepped(kind, 3, state)[0] for kind in (Muon, torch.optim.Muon))
    assert not ours[0].any()
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert (one - other).norm() < 2**-5 * other.norm()  # torch rounds 15 products one after the other to 2^-9
        assert not torch.equal(one, other)


def test_with_products_in_bf16_it_is_torchs(monkeypatch):
    monkeypatch.setattr(optim, "fast_bf16", lambda device: True)
    ours, theirs = (stepped(kind, 2)[0] for kind in (Muon, torch.optim.Muon))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
