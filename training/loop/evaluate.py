"""How good a drafter is: expected tau on known text, and the tau of real decoding."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.formats import load_drafter
from specdec.contracts import Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.engine.trace import tau
from specdec.text import encode_prompt, read_prompts
from training.objectives.losses import pieces
from training.objectives.student import Student
from training.objectives.teacher import TeacherLogits, TopTeacher, read_teacher
from trees import Chain


@torch.no_grad()
def expected_tau(
    drafter: Drafter, feats: Tensor, tokens: Tensor, teacher_logits: TeacherLogits, loss_mask: Tensor, steps: int
) -> Tensor:
    """Teacher forcing: tokens that a round of a chain of `steps` would emit, summed over the counted positions.

    Inputs as of an objective. Returns [3]: the greedy sum, the sampled sum, and the number of positions. Of one
    position they are 1 + sum_j prod_{i<=j} a_i, where a_i is 1 if draft i is the target's most likely token, else 0
    (greedy), or the chance sum_v min(p, q) that rejection sampling accepts it at temperature 1 (Leviathan et al.,
    arXiv 2211.17192), of which the target's likeliest tokens alone give an upper bound. The chain ends with the text,
    and what stands in the text counts as drafted so far.
    """
    following = F.pad(tokens[:, 1:], (0, 1))
    counted = F.pad(loss_mask[:, 1:], (0, 1))
    agrees, overlaps = _one_by_one(drafter, drafter.unroll(feats, following, steps), teacher_logits, loss_mask, steps)
    greedy = sampled = counted
    total = counted.sum() * torch.ones(3, dtype=torch.float64, device=tokens.device)
    for agree, overlap in zip(agrees, overlaps, strict=True):
        greedy, sampled = greedy * agree, sampled * overlap
        total += torch.stack([greedy.sum(), sampled.sum(), greedy.new_zeros(())])
    return total


def _one_by_one(
    drafter: Drafter, states: Iterable[DraftState], teacher_logits: TeacherLogits, loss_mask: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """[steps,B,T] both: does row t's draft j agree with the target's choice, and how likely is it accepted? Row t
    drafts what the target draws from its logits at t+1+j; 0 where that is not to be learnt or beyond the text."""
    vocab, states = drafter.vocab, list(states)
    row, column = loss_mask.nonzero(as_tuple=True)
    labels = torch.full_like(loss_mask, -1, dtype=torch.int64)  # nothing here asks for them
    agrees, overlaps = torch.zeros(2, steps, *loss_mask.shape, device=loss_mask.device)
    for piece in pieces(len(row), vocab.target_size):
        here = row[piece], column[piece]
        teacher = read_teacher(teacher_logits, here, vocab, labels, renormalise=True)
        for j, state in enumerate(states):
            source = column[piece] - 1 - j
            readout = state.readout[here[0], source.clamp(min=0)]
            student = Student((readout @ state.head.weight.T).float()[:, None])
            p = teacher.facing(student).whole if isinstance(teacher, TopTeacher) else teacher.whole
            reached = source >= 0
            at = j, here[0][reached], source[reached]
            agree = vocab.to_target(student.best[:, 0]) == teacher.choice
            agrees[at] = agree[reached].to(agrees)
            overlaps[at] = torch.minimum(p, student.q[:, 0]).sum(-1)[reached]
    return agrees, overlaps


class Decoding:
    """The held-out prompts of a run, and what a drafter makes of them."""

    def __init__(self, target, prompts: Path, count: int, steps: int, max_new_tokens: int):
        """The first `count` prompts of a file that `read_prompts` reads; chains of `steps`."""
        self.target, self.steps, self.max_new_tokens = target, steps, max_new_tokens
        self.prompts = [encode_prompt(target, prompt) for prompt in read_prompts(prompts)[:count]]

    def tau(self, folder: Path) -> float:
        """Greedy decoding with the drafter in `folder`, loaded as a user loads it; see `specdec.engine.trace.tau`."""
        drafter = load_drafter(folder, self.target)
        steps = min(self.steps, drafter.max_steps or self.steps)
        result = Engine(self.target, drafter, Chain(steps)).generate(self.prompts, max_new_tokens=self.max_new_tokens)
        return tau([row.trace for row in result.rows])
