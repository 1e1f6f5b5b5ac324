"""Terms of a loss, by name: distances between the teacher's distribution p and the student's q.

A term is a function (student, teacher, **settings) -> (value, slope, total), for n positions and J steps:

- value [n,J].
- slope, of a shape that broadcasts to [n,J,U]: d value / d log q_v, with the entries of log q taken as independent.
- total, of a shape that broadcasts to [n,J]: the sum of slope over v.

The gradient by the student's logits is slope - q total. So a multiple of q may be left out of slope and total alike. A
slope may be shared between terms: it is never written to.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.cli.limits import MOST
from specdec.schema import check_value, parameters
from specdec.training.objectives.teacher import Student, Teacher

Value = tuple[Tensor, Tensor, Tensor]
Term = Callable[..., Value]
Weight = float | Mapping[str, float | bool]
TERMS: dict[str, Term] = {}
LEAST = 1e-5  # of alpha: a student far off gets a steep slope, not an infinite one


def term(function: Any) -> Any:
    """Decorator: `objective.terms` has the function under its own name."""
    TERMS[function.__name__] = function
    return function


@term
def ce(student: Student, teacher: Teacher) -> Value:
    """-sum p log q."""
    return teacher.cross_entropy(student), -teacher.p[:, None], -teacher.mass[:, None]


@term
def kl(student: Student, teacher: Teacher, temperature: float = 1.0) -> Value:
    """KL(p || q) = sum p log(p/q): the cross-entropy less the teacher's own entropy, with the same gradient.

    With a temperature T it is T^2 KL(p' || q'), where p' and q' are p and q at that temperature: the slope is then of
    the same size at any T (arXiv 1503.02531).
    """
    if temperature == 1:
        value, slope, total = ce(student, teacher)
        return value - teacher.entropy[:, None], slope, total
    logp = (teacher.logp / temperature).log_softmax(-1)[:, None]
    logq = (student.logits / temperature).log_softmax(-1)
    value = (logp.exp() * (logp - logq)).sum(-1)
    slope = (logq.exp() - logp.exp()).mul_(temperature)  # sums to 0
    return value * temperature**2, slope, torch.zeros_like(value)


@term
def reverse_kl(student: Student, teacher: Teacher) -> Value:
    """KL(q || p) = sum q log(q/p)."""
    slope = (student.logq - teacher.logp[:, None]).mul_(student.q)
    value = slope.sum(-1)
    return value, slope, value


@term
def jsd(student: Student, teacher: Teacher) -> Value:
    """Jensen-Shannon divergence: KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2."""
    logp = teacher.logp[:, None]
    logm = torch.logaddexp(student.logq, logp).sub_(math.log(2))
    slope = (student.logq - logm).mul_(student.q).div_(2)
    total = slope.sum(-1)
    return ((logp - logm) * teacher.p[:, None]).sum(-1) / 2 + total, slope, total


@term
def tv(student: Student, teacher: Teacher, renormalised: bool = False) -> Value:
    """Total variation 1 - sum min(p, q). Over all V tokens it is the chance that rejection sampling rejects a draft.

    renormalised: let p sum to 1 over the draft vocabulary, as the library speculators does.
    """
    p = (teacher.p / teacher.mass[:, None] if renormalised else teacher.whole)[:, None]
    slope = -student.q * (student.q < p)
    return 1 - torch.minimum(student.q, p).sum(-1), slope, slope.sum(-1)


@term
def l1(student: Student, teacher: Teacher, renormalised: bool = False) -> Value:
    """Sum |p - q| over all V tokens, twice the total variation (see `tv`): DSpark's distance."""
    value, slope, total = tv(student, teacher, renormalised)
    return 2 * value, 2 * slope, 2 * total


@term
def choice(student: Student, teacher: Teacher) -> Value:
    """-log q of p's best token; speculators calls this one `ce`."""
    return _token(student, teacher.best, torch.ones_like(teacher.mass))


@term
def tokens(student: Student, teacher: Teacher) -> Value:
    """-log q of the token in the text; 0 where it is no training token."""
    return _token(student, teacher.labels.clamp(min=0), (teacher.labels >= 0).to(student.logits.dtype))


@term
def top_k(student: Student, teacher: Teacher, k: int = 10) -> Value:
    """Return -sum p log q over p's k most likely tokens (HASS, arXiv 2408.15766, section 3.1; `train/main_hass.py`).

    Neither p nor q is renormalised over these tokens.
    """
    p, ids = teacher.top(k)
    slope = p.new_zeros(len(p), student.logits.shape[-1]).scatter_(1, ids, -p)
    mass = p.sum(-1, keepdim=True)
    at_best = student.logits.gather(-1, ids[:, None].expand(-1, student.best.shape[1], -1))
    value = mass * student.log_mass - (p[:, None] * at_best).sum(-1)
    return value, slope[:, None], -mass


@term
def lk(student: Student, teacher: Teacher, renormalised: bool = False) -> Value:
    """-log alpha, with alpha = sum min(p, q) over all V tokens the chance that a draft is accepted (arXiv 2602.23881).

    Its gradient is that of the total variation divided by alpha: large where little is accepted.
    """
    rejected, slope, total = tv(student, teacher, renormalised)
    alpha = (1 - rejected).clamp(min=LEAST)
    return -alpha.log(), slope / alpha[..., None], total / alpha


@term
def lk_hybrid(
    student: Student, teacher: Teacher, scale: float = 1.0, decay: float = 3.0, renormalised: bool = False
) -> Value:
    """Return w KL(p || q) + (1 - w) (1 - alpha), where w = scale exp(-decay alpha) has no gradient.

    For alpha see `lk`. decay = 3 is the paper's best value and the default of speculators; SpecForge's is 1.
    """
    rejected, slope, total = tv(student, teacher, renormalised)
    distance, pull, pull_total = kl(student, teacher)
    w = scale * torch.exp(-decay * (1 - rejected))
    value = w * distance + (1 - w) * rejected
    return value, torch.lerp(slope, pull, w[..., None]), torch.lerp(total, pull_total.expand_as(total), w)


def _token(student: Student, ids: Tensor, known: Tensor) -> Value:
    """-log q of ids [n], times known [n], 1 or 0."""
    ids, known = ids[:, None], known[:, None]
    at_ids = student.logits.gather(-1, ids.expand(student.best.shape)[..., None]).squeeze(-1)
    slope = student.logits.new_zeros(len(ids), student.logits.shape[-1]).scatter_(1, ids, -known)
    return (student.log_mass - at_ids) * known, slope[:, None], -known


def read_terms(terms: Mapping[str, Weight]) -> list[tuple[float, "partial[Value]"]]:
    """{name: weight} or {name: {weight: w, setting: value}} -> [(weight, term)]; ValueError for what is unknown."""
    chosen: list[tuple[float, partial[Value]]] = []
    for name, value in terms.items():
        if name not in TERMS:
            raise ValueError(f"objective.terms has no {name!r}; there are {', '.join(TERMS)}")
        settings = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight, (taken, _) = settings.pop("weight", 1.0), parameters(TERMS[name])
        for setting, given in settings.items():
            if setting not in taken or setting in ("student", "teacher"):
                names = ["weight", *list(taken)[2:]]
                raise ValueError(f"objective.terms.{name} has no setting {setting!r}; it has {names}")
            check_value(taken[setting], given, f"objective.terms.{name}.{setting}", {"low": 0, "high": MOST})
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(f"objective.terms.{name} must have a weight of 0 or above, got {weight!r}")
        if weight:  # 0 takes a term out of a configuration that others are added to
            chosen.append((float(weight), partial(TERMS[name], **settings)))
    if not chosen:
        raise ValueError(f"objective.terms needs a term of a weight other than 0; there are {', '.join(TERMS)}")
    return chosen
