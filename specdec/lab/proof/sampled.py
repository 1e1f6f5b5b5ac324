"""Does sampled speculative text follow the target's distribution?

The law of a whole text cannot be enumerated on a real pair, but the law of each token given those before it can."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.lab.proof.laws import chi_square
from specdec.model.target import Target
from specdec.sampling.filters import filtered_probs
from specdec.structs import Sampling, Verifier

BINS = 20
SLACK = 1e-3  # of top_p: whether a token at the edge of the filter belongs to it is a matter of rounding


@dataclass
class SampledProof:
    """What became of the tokens that one drafter and tree emitted."""

    tokens: int
    outside: int  # tokens that the filters exclude, given the tokens before them
    pvalue: float  # chi-square: are the tokens' places in the target's distributions uniform?


def prove_sampled(
    target: Target,
    drafter: Drafter,
    tree: TreePolicy,
    verifier: Verifier,
    prompts: list[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
) -> SampledProof:
    """Test whether the places of the tokens in the target's own distributions are uniform.

    A token's place is the probability of all likelier tokens given the text before it, and a random part of its own
    probability (Rosenblatt's transform, 1952). The places of tokens that are drawn from these distributions are
    independent and uniform on [0, 1], however the tokens were drafted."""
    assert not sampling.penalised, "the distributions are those of the target without penalties"
    engine = Engine(target, drafter, tree, verifier)
    generator = torch.Generator().manual_seed(seed)
    places, outside = [], 0
    for number, prompt in enumerate(prompts):
        row = engine.generate([prompt], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + number).rows[0]
        own, beyond = _places(target, row, sampling, generator)
        places.append(own)
        outside += beyond
    u = torch.cat(places)
    seen = (u * BINS).long().clamp_(max=BINS - 1).bincount(minlength=BINS).double()
    return SampledProof(len(u), outside, chi_square(seen, torch.full_like(seen, len(u) / BINS)))


@torch.inference_mode()
def _places(target: Target, row: Sequence, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, int]:
    text = torch.tensor([row.prompt + row.tokens], device=target.device)
    logits = target(text, None)[0][0, len(row.prompt) - 1 : -1].float().cpu()
    tokens = torch.tensor(row.tokens)[:, None]
    p = filtered_probs(logits, sampling)
    wider = filtered_probs(logits, replace(sampling, top_p=min(1.0, sampling.top_p + SLACK)))
    own = p.gather(1, tokens)
    likelier = torch.where(p > own, p, 0).sum(1).double()
    equal = torch.where(p == own, p, 0).sum(1).double()
    u = likelier + equal * torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    return u, int((wider.gather(1, tokens) == 0).sum())
