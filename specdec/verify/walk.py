"""The default rule, and parts of all rules.

Nodes are hits or misses, the longest path without a miss is accepted, and a bonus token follows it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.ops import native
from specdec.sampling.filters import draw, filtered_probs, sample
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict, Verifier


class Rule(Verifier):
    """Base class of rules, with the defaults of `Verifier`."""


@dataclass(frozen=True)
class SampleAndMatch(Rule):
    """Draw the target's token at every node, and walk down from the root while a child carries the drawn token.

    Each emitted token is a draw from the target's own distribution given the tokens before it, so the output is
    distributed as the target's whatever was drafted. For trees of distinct siblings the accepted length has the same
    law as EAGLE's accept-or-renormalise walk: a node is left through one of its children with the children's total
    probability. The greedy and the sampled case are the same code.
    """

    likeliest_only = True
    couples = True

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree: see `structs.Verifier`."""
        return follow(tree, sample(logits, sampling, noise, tree.depth))


sample_and_match = SampleAndMatch()


class ChoosingRule(Rule):
    """A rule that chooses the last accepted node by the target's filtered probabilities."""

    def choose(self, tree: DraftTree, p: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
        """Return the last accepted node [B], and what the bonus token is drawn from [B,V]. p [B,N,V]: the target's."""
        raise NotImplementedError

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree: see `structs.Verifier`."""
        winner, probs = self.choose(tree, filtered_probs(logits, sampling), noise)
        if noise is None:
            bonus = probs.max(-1).indices
        else:
            bonus = draw(probs, noise.at(tree.depth.gather(1, winner[:, None]).squeeze(1)))
        return accept(tree, winner, bonus)


def alive(tree: DraftTree, hit: Tensor) -> Tensor:
    """Return [B,N] bool: is every node on the path from the root a hit? hit [B,N] may have any value at the root."""
    # Of truth values a >= b says that b implies a.
    return (hit[:, None, 1:] >= tree.ancestors[..., 1:]).all(-1)


def deepest(tree: DraftTree, hit: Tensor) -> Tensor:
    """Return the last node [B] of the only path without a miss; hit [B,N] is true for at most one of siblings."""
    return (alive(tree, hit) * tree.depth).max(1).indices  # where only the root is alive, the first of zeros: the root


def path_of(tree: DraftTree, on_path: Tensor) -> tuple[Tensor, Tensor]:
    """Return path [B,P] and n [B] as in `Verdict`; on_path [B,N] marks the nodes of a path from the root."""
    b, n = on_path.shape
    path = torch.zeros(b, tree.steps + 1, dtype=torch.int64, device=on_path.device)
    # At each depth one node is on the path, and the others count as node 0.
    nodes = torch.arange(n, device=on_path.device) * on_path
    return path.scatter_reduce_(1, tree.depth, nodes, "amax"), on_path.sum(1)


def follow(tree: DraftTree, drawn: Tensor) -> Verdict:
    """Accept the path along the drawn tokens [B,N], one after each node.

    Every accepted node carries the token that was drawn after its parent. The emitted tokens are the draws after the
    nodes of the path.
    """
    if drawn.device.type == "cpu" and native.has_rows():
        path, n, tokens = native.operator("follow")(tree.tokens, tree.parents, drawn, tree.steps)
        return Verdict(path=path, n=n, tokens=tokens)
    # Siblings carry different tokens, so what is alive is one path.
    path, n = path_of(tree, alive(tree, tree.tokens == drawn.gather(1, tree.parents)))
    return Verdict(path=path, n=n, tokens=drawn.gather(1, path))


def accept(tree: DraftTree, winner: Tensor, bonus: Tensor) -> Verdict:
    """Emit the path from the root to winner [B], and then the token bonus [B]."""
    on_path = tree.ancestors.gather(1, winner[:, None, None].expand(-1, 1, tree.depth.shape[1])).squeeze(1)
    path, n = path_of(tree, on_path)
    tokens = tree.tokens.gather(1, path).roll(-1, 1).scatter_(1, (n - 1)[:, None], bonus[:, None])
    return Verdict(path=path, n=n, tokens=tokens)


def coins_of(tree: DraftTree, noise: RoundNoise | None, of_parents: bool = False) -> Tensor:
    """Return for each node a number in (0, 1) [B,N] that decides whether it is accepted; void at the root.

    With `of_parents` siblings have the same number. Without noise, at temperature 0, the numbers decide nothing.
    """
    if noise is None:
        return torch.full(tree.tokens.shape, 0.5, device=tree.tokens.device)
    if of_parents:
        return noise.coins(tree.depth, tree.tokens).gather(1, tree.parents)
    return noise.coins((tree.depth - 1).clamp(min=0), tree.tokens)


def at(nodes: Tensor, values: Tensor) -> Tensor:
    """Return the values [B,V] of the nodes [B] from values [B,N,V]."""
    return values.gather(1, nodes[:, None, None].expand(-1, 1, values.shape[-1])).squeeze(1)


def of_parent(tree: DraftTree, probs: Tensor) -> Tensor:
    """Return the probability [B,N] that each node's parent gives to it; void at the root. probs [B,N,V]."""
    return probs.flatten(1).gather(1, tree.parents * probs.shape[-1] + tree.tokens)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(p - q, 0)) over the last dimension: the part of p that remains after q was offered and rejected.

    No mass remains only if p equals q, when only rounding can reject: then return p.
    """
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)
