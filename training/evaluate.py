"""How good a drafter is: expected tau on known text, and the tau of real decoding."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.formats import load_drafter
from specdec.engine import Engine
from specdec.text import encode_prompt, read_prompts
from specdec.trace import tau
from specdec.types import Drafter
from trees import Chain


@torch.no_grad()
def expected_tau(
    drafter: Drafter, feats: Tensor, tokens: Tensor, target_logits: Tensor, loss_mask: Tensor, steps: int
) -> Tensor:
    """Teacher forcing: tokens that a round of a chain of `steps` would emit, summed over the counted positions.

    Inputs as of an objective. Returns [3]: the greedy sum, the sampled sum, and the number of positions. Of one
    position they are 1 + sum_j prod_{i<=j} a_i, where a_i is 1 if draft i is the target's most likely token, else 0
    (greedy), or the chance sum_v min(p, q) that rejection sampling accepts it at temperature 1 (Leviathan et al.,
    arXiv 2211.17192). The chain ends with the text, and what stands in the text counts as drafted so far.
    """
    vocab, length = drafter.vocab, tokens.shape[1]
    choice, following = target_logits.argmax(-1), F.pad(tokens[:, 1:], (0, 1))
    counted = F.pad(loss_mask[:, 1:], (0, 1))
    greedy = sampled = counted
    total = counted.sum() * torch.ones(3, dtype=torch.float64, device=tokens.device)
    for j, state in enumerate(drafter.unroll(feats, following, steps)):
        later = 1 + j  # row t drafts what the target draws from its logits at t+1+j
        here = max(length - later, 0)
        rest = (0, length - here)
        mask = F.pad(loss_mask[:, later:], rest)
        agrees = vocab.to_target(state.logits[:, :here].argmax(-1)) == choice[:, later:]
        greedy = greedy * mask * F.pad(agrees.float(), rest)
        sampled = sampled * mask * F.pad(_overlap(vocab, target_logits[:, later:], state.logits[:, :here]), rest)
        total += torch.stack([greedy.sum(), sampled.sum(), greedy.new_zeros(())])
    return total


def _overlap(vocab, target_logits: Tensor, logits: Tensor) -> Tensor:
    """sum_v min(p, q): target_logits [B,n,V], logits [B,n,U] -> [B,n]; row by row, to keep the fp32 copies small."""
    rows = []
    for theirs, ours in zip(target_logits, logits, strict=True):
        p = vocab.select(theirs.float().softmax(-1))
        rows.append(torch.minimum(p, ours.float().softmax(-1)).sum(-1))
    return torch.stack(rows)


class Decoding:
    """The held-out prompts of a run, and what a drafter makes of them."""

    def __init__(self, target, prompts: Path, count: int, steps: int, max_new_tokens: int):
        """The first `count` prompts of a file that `read_prompts` reads; chains of `steps`."""
        self.target, self.steps, self.max_new_tokens = target, steps, max_new_tokens
        self.prompts = [encode_prompt(target, prompt) for prompt in read_prompts(prompts)[:count]]

    def tau(self, folder: Path) -> float:
        """Greedy decoding with the drafter in `folder`, loaded as a user loads it; see `specdec.trace.tau`."""
        drafter = load_drafter(folder, self.target)
        steps = min(self.steps, drafter.max_steps or self.steps)
        result = Engine(self.target, drafter, Chain(steps)).generate(self.prompts, max_new_tokens=self.max_new_tokens)
        return tau([row.trace for row in result.rows])
