"""HASS's top-k distillation (arXiv 2408.15766, section 3.1; `train/main_hass.py`)."""

from specdec.training.objectives.student import Student
from specdec.training.objectives.teacher import Teacher
from specdec.training.objectives.terms import Value, term


@term
def top_k(student: Student, teacher: Teacher, k: int = 10) -> Value:
    """-sum p log q over p's k likeliest tokens; neither p nor q is renormalised over them."""
    p, ids = teacher.top(k)
    slope = p.new_zeros(len(p), student.logits.shape[-1]).scatter_(1, ids, -p)
    mass = p.sum(-1, keepdim=True)
    at_best = student.logits.gather(-1, ids[:, None].expand(-1, student.best.shape[1], -1))
    value = mass * student.log_mass - (p[:, None] * at_best).sum(-1)
    return value, slope[:, None], -mass
