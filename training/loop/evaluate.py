"""How good a drafter is: the expected tau on known text, and the tau of decoding, replayed along answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.acceptance import FILE, Acceptance
from specdec.cli.files import write_text
from specdec.contracts import Drafter
from specdec.drafters.formats import load_drafter
from specdec.drafters.layers import SumHead
from specdec.engine.traces import RowTrace, tau, tau_interval
from specdec.recording import Recording, Text
from specdec.structs import Sampling
from specdec.text import encode_prompt, read_prompts
from specdec.training.data import Batches, Sample
from specdec.training.loop.settings import TrainerConfig
from specdec.training.objectives.losses import pieces, product
from specdec.training.objectives.teacher import Student, TeacherLogits, TopTeacher, read_teacher
from specdec.trees import Chain
from specdec.trees.optimal import TEMPERATURES
from specdec.trees.record import answers_to, record

DEPTH = WIDTH = 8  # levels and children of acceptance.json
HELDOUT = "heldout"  # as trainer.prompts: the prompts of the held-out conversations


@torch.no_grad()
def expected_tau(
    drafter: Drafter, feats: Tensor, tokens: Tensor, teacher_logits: TeacherLogits, loss_mask: Tensor, steps: int
) -> Tensor:
    """Tokens that a round of a chain of `steps` drafts would emit, summed over the counted positions (teacher forcing).

    Inputs as of an objective. Returns [3], fp64: the sum for greedy decoding, that for sampling, and the number of
    positions. A position adds 1 + sum_j prod_{i<=j} a_i. Greedy, a_i is 1 if draft i is the target's most likely token,
    else 0. Sampled, a_i is the chance sum_v min(p, q) that rejection sampling accepts it at temperature 1 (Leviathan et
    al., arXiv 2211.17192); where only the most likely tokens of p are known, this is an upper bound. A chain's earlier
    drafts are taken to be the text's own tokens, and the chain ends where the text does.
    """
    vocab: Any = drafter.vocab
    states = list(drafter.unroll(feats, F.pad(tokens[:, 1:], (0, 1)), steps))
    row, column = loss_mask.nonzero(as_tuple=True)
    labels = torch.full_like(loss_mask, -1, dtype=torch.int64)  # not asked for here
    # [steps,B,T]: whether draft j of position t is the target's choice at t+1+j, and how likely it is accepted; 0 where
    # that is no training token, or beyond the text
    agrees, overlaps = torch.zeros(2, steps, *loss_mask.shape, device=loss_mask.device)
    for piece in pieces(len(row), vocab.target_size):
        here = row[piece], column[piece]
        teacher = read_teacher(teacher_logits, here, vocab, labels, renormalise=True)
        for j, state in enumerate(states):
            source = column[piece] - 1 - j
            readout = state.readout[here[0], source.clamp(min=0)]
            head: Any = state.head  # a single one would lay out its weights anew for each call
            logits = head(readout) if isinstance(head, SumHead) else product(readout, head.weights)
            student = Student(logits.float()[:, None])
            p = teacher.facing(student).whole if isinstance(teacher, TopTeacher) else teacher.whole
            reached = source >= 0
            at = j, here[0][reached], source[reached]
            agree = vocab.to_target(student.best[:, 0]) == teacher.choice
            agrees[at] = agree[reached].to(agrees)
            overlaps[at] = torch.minimum(p, student.q[:, 0]).sum(-1)[reached]
    greedy = sampled = counted = F.pad(loss_mask[:, 1:], (0, 1))
    total = counted.sum() * torch.ones(3, dtype=torch.float64, device=tokens.device)
    for one, other in zip(agrees, overlaps, strict=True):
        greedy, sampled = greedy * one, sampled * other
        total += torch.stack([greedy.sum(), sampled.sum(), greedy.new_zeros(())])
    return total


@dataclass
class Decoding:
    """Answers of the target to a run's held-out prompts, decoded once, along which its drafters are recorded."""

    target: Any
    prompts: list[list[int]]
    about: str  # where the prompts are from, in words
    steps: int  # the length of chains
    max_new_tokens: int
    answers: dict[float, list[Text]] = field(default_factory=dict)  # by temperature

    def _record(self, drafter: Drafter, steps: int, temperature: float) -> Recording:
        if temperature not in self.answers:
            new, sampling = self.max_new_tokens, Sampling(temperature)
            self.answers[temperature] = answers_to(self.target, self.prompts, sampling, max_new_tokens=new)
        depth = drafter.deepest(steps)
        return record(self.target, drafter, self.answers[temperature], steps=depth, sampling=Sampling(temperature))

    def tau(self, folder: Path) -> dict[str, float]:
        """Tau of greedy decoding with the drafter in `folder`, which is loaded as a user loads it, and its interval."""
        recording = self._record(load_drafter(folder, self.target), self.steps, 0.0)
        return measured_tau(recording.replay(Chain(recording.steps)).rows)

    def keep_acceptance(self, folder: Path, write: bool = True) -> None:
        """Measure the acceptance of the drafter in `folder`, and, if `write`, write it there for --tree auto."""
        drafter = load_drafter(folder, self.target)
        found = tuple(self._record(drafter, DEPTH, t).along(min(WIDTH, drafter.vocab.size)) for t in TEMPERATURES)
        about = f"{len(self.prompts)} {self.about}, {self.max_new_tokens} tokens"
        if write and not any(along.empty for along in found):  # answers of one token give no acceptance to choose by
            write_text(folder / FILE, Acceptance(found, about).as_text())


def decoding_of(target, config: TrainerConfig, heldout: Batches | None, train: Batches) -> Decoding | None:
    """What `trainer.prompts` asks for: a file's prompts, those of the held-out conversations, or None."""
    if config.prompts is None:
        return None
    if config.prompts == HELDOUT:
        held = heldout.samples if heldout else []
        prompts, about = beginnings(held, train.samples, target.config.context // 2), "held-out prompts"
    else:
        asked = read_prompts(Path(config.prompts))[: config.decode_prompts]
        prompts = [encode_prompt(target, prompt) for prompt in asked]
        if (most := max(map(len, prompts))) >= target.config.context:
            raise ValueError(
                f"trainer.prompts={config.prompts} has a prompt of {most} tokens, and the target's context holds "
                f"{target.config.context}, new ones included: leave the prompt out"
            )
        about = f"prompts of {Path(config.prompts).name}"
    prompts = prompts[: config.decode_prompts]
    return Decoding(target, prompts, about, config.decode_steps, config.decode_tokens) if prompts else None


def beginnings(samples: list[Sample], known: list[Sample], longest: int) -> list[list[int]]:
    """Return the texts of at most `longest` tokens before the first training tokens of samples, without duplicates.

    Texts with which a `known` sample also begins are left out, because the drafter may have been trained on their
    answers. So are plain texts, which are trained on from their first token.
    """

    def beginning(sample: Sample) -> bytes:
        return sample.ids[: int(sample.mask.argmax())].tobytes()

    found = dict.fromkeys(map(beginning, samples))
    for sample in known:
        found.pop(beginning(sample), None)
    return [ids for text in found if 0 < len(ids := np.frombuffer(text, np.int32).tolist()) <= longest]


def measured_tau(traces: list[RowTrace]) -> dict[str, float]:
    """tau, and, of two prompts or more, tau_low and tau_high: its 95 % interval over prompts."""
    between = tau_interval(torch.tensor([[trace.rounds, sum(trace.emitted)] for trace in traces]))
    interval = dict(zip(("tau_low", "tau_high"), between or (), strict=False))
    return {"tau": tau(traces)} | {name: round(value, 4) for name, value in interval.items()}
