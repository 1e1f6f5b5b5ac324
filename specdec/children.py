"""Which children of a node a tree takes: the most likely ones, the most likely given the noise, or drawn ones.

Above temperature 0 the target's token is the v with the largest log p(v) + G(v) (`sampling.noise`), and the rule
`match` asks whether it was drafted. A drafter that sees the same noise G proposes the v with the largest log q(v) +
G(v). Were q the target's p, the first would be the target's token for certain, and not with probability p(v). Siblings
stay distinct.
"""

import torch
from torch import Tensor
from typing_extensions import override

from specdec.contracts import Children, DraftState, TreePolicy
from specdec.ops.likely import top
from specdec.sampling.filters import filtered_probs, perturbed, warmed
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftVocab, Sampling, SamplingBatch, Verifier

KINDS = ("likeliest", "coupled", "drawn")
LIKELIEST = Children()


def kind_for(verifier: Verifier, policy: TreePolicy, wanted: str | None = None) -> str:
    """Return which children trees take above temperature 0: `wanted`, or the best ones for the rule.

    Raises ValueError, one sentence, for what does not fit the rule or the tree.
    """
    if wanted is not None and wanted not in KINDS:
        raise ValueError(f"children must be one of {', '.join(KINDS)}, got {wanted!r}")
    other = "drawn" if policy.samples or verifier.needs_q else "likeliest"
    kind = wanted or ("coupled" if verifier.couples else other)
    if verifier.needs_q and kind != "drawn":
        raise ValueError(f"this verifier takes children that were drawn from the drafter, not {kind} ones")
    if kind == "drawn" and not policy.samples:
        needs = "this verifier needs to know" if verifier.needs_q else "drawn children need a tree that knows"
        raise ValueError(
            f"{needs} what the children of a node were drawn from, and this tree does not draw them: give "
            "--sample-draft, or in Python a tree of make_tree(sample_draft=True)"
        )
    if kind == "coupled" and not verifier.couples:
        raise ValueError(
            "this verifier draws by other noise than the target's, so children that are coupled to that do not fit it"
        )
    return kind


class Coupled(Children):
    """The drafter's tokens that the target is most likely to draw, given the noise that it draws by.

    The best have the largest s = trust * log q + G, q at the target's temperature and not filtered. `log softmax(s)`
    estimates what a child's log-probability is given the noise: it would be exact if log p - trust * log q were Gumbel
    noise of scale 1. docs/log.md compares this with other estimates, and has what filters cost.
    """

    def __init__(self, noise: RoundNoise, sampling: Sampling | SamplingBatch, trust: float = 1.0):
        """Draw with this trust, as `Drafter.trust`."""
        self.noise, self.sampling, self.trust = noise, sampling, trust
        self.of: tuple[DraftVocab, Tensor] | None = None

    @override
    def best(self, state: DraftState, vocab: DraftVocab, level: int | slice, count: int) -> tuple[Tensor, Tensor]:
        return top(self.scores(state.logits, vocab, level), count)

    def scores(self, logits: Tensor, vocab: DraftVocab, level: int | slice) -> Tensor:
        """Return log-probabilities given the noise, by the drafter's logits [B,W,U]. level: as for `best`."""
        levels = level if isinstance(level, slice) else slice(level, level + 1)
        if self.of is None or self.of[0] is not vocab:
            self.of = vocab, self.noise.among(vocab.select)  # [B,D',U]
        scores = warmed(logits, self.sampling, self.trust)
        return perturbed(scores, self.sampling, self.of[1][:, levels]).log_softmax(-1)


class Drawn(Children):
    """Drawn from the drafter's distribution, filtered as the target's, by noise that the target does not draw by."""

    drawn = True

    def __init__(self, noise: RoundNoise | None, sampling: Sampling | SamplingBatch):
        """Noise None: temperature 0, at which the most likely tokens are drawn."""
        self.noise, self.sampling = noise, sampling

    @override
    def draw(self, logits: Tensor, vocab: DraftVocab, level: int, count: int) -> tuple[Tensor, Tensor]:
        probs = filtered_probs(logits, self.sampling)
        # What is denormal cannot be renormalised exactly once the rest is drawn, so it counts as nothing.
        probs = probs.masked_fill(probs < torch.finfo(probs.dtype).tiny, 0.0)
        weight = probs if self.noise is None else probs * vocab.select(self.noise.drafts)[:, level : level + 1].exp()
        keys = torch.where(probs > 0, weight, logits.log_softmax(-1))
        return probs, keys.topk(count, dim=-1).indices


def children_of(
    kind: str, sampling: Sampling | SamplingBatch, noise: RoundNoise | None, trust: float = 1.0
) -> Children:
    """Return the children of one round. noise None: temperature 0, where none are coupled. trust: `Drafter.trust`."""
    if kind == "drawn":
        return Drawn(noise, sampling)
    return Coupled(noise, sampling, trust) if kind == "coupled" and noise is not None else LIKELIEST
