"""Adaptive policies along recorded texts: the same policies, asked and told as the engine does it, without a model.

A recording (`lab.replay`) has what the drafter proposes behind every token of some texts. So it has the draft that a
policy would see in any round, and what the round accepts of any part of it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.adaptive import Curve, Draft, Outcome, Policy
from specdec.engine.guide import kept_of
from specdec.lab.replay.superset import Superset
from specdec.structs import DraftTree
from specdec.trees import DynamicTree
from specdec.trees.dynamic import Pool, select


class Drafts:
    """The trees of 1, 2, ... D levels at every root of a recording, as a policy sees them."""

    def __init__(self, superset: Superset, tree: DynamicTree):
        """ValueError for what was not recorded."""
        superset._check(tree.steps, "", tree.topk)
        if superset.along[""].levels is not None:
            raise ValueError("this drafter does not always have something to propose, which is not simulated here")
        self.roots, self.starts = superset.roots.tolist(), superset.starts.tolist()
        self.tokens = [text.tokens for text in superset.texts]
        self.prompts = [len(text.prompt) for text in superset.texts]
        self.tree, self.levels = tree, tree.steps
        following = torch.cat([text.following(superset.steps) for text in superset.texts]).long()
        pool = superset.candidates["", tree.topk].pool
        self.drafts, self.right = [None], [None]
        for steps in range(1, tree.steps + 1):
            count = DynamicTree.candidates(tree.topk, steps)
            own = Pool(*(part[:, :count].to(kind) for part, kind in
                         zip(pool, (torch.int64, torch.float32, torch.int64), strict=True)))  # fmt: skip
            grown = select(following.new_zeros(len(following)), own, tree.smaller(steps).num_draft_tokens, steps)
            self.drafts.append(_draft_of(grown, steps))
            self.right.append(_right(grown, following).numpy())

    def draft(self, levels: int, roots: np.ndarray) -> Draft:
        """The draft of rows whose rounds begin at these roots, all of them live."""
        parts = ("edges", "parents", "depth", "ancestors")
        whole = self.drafts[levels]
        return Draft(levels, *(getattr(whole, name)[roots] for name in parts), np.ones(len(roots), dtype=bool))

    def play(self, policy: Policy, roots: np.ndarray) -> tuple[int, int, list[int]]:
        """A round of a policy at these roots, of which it is told at once: drafted levels, nodes that each row
        verified, and how many tokens each row accepted."""
        levels = policy.plan(len(roots))
        if levels == 0:
            policy.learn(Outcome(0, 1, [0] * len(roots), [True] * len(roots)))
            return 0, 1, [0] * len(roots)
        draft, right = self.draft(levels, roots), self.right[levels][roots]
        looks = policy.looks()
        kept = policy.keep(draft) if looks else None
        if kept is not None:
            draft, right = kept_of(draft, kept), np.take_along_axis(right, kept, 1)
        if draft.nodes == 1:
            policy.learn(Outcome(levels, 1, [0] * len(roots), [True] * len(roots)))
            return levels, 1, [0] * len(roots)
        accepted = (right * draft.depth).max(1)
        path = np.zeros((len(roots), min(levels, draft.nodes - 1) + 1), dtype=np.int64)
        rows, nodes = right.nonzero()
        path[rows, draft.depth[rows, nodes]] = nodes
        last = path[np.arange(len(roots)), accepted]
        leaves = ~(draft.parents[:, 1:] == last[:, None]).any(1)
        seen = (draft, path) if looks else ()
        policy.learn(Outcome(levels, draft.nodes, accepted.tolist(), leaves.tolist(), *seen))
        return levels, draft.nodes, accepted.tolist()

    def decode(self, policy: Policy, texts: Sequence[int]) -> list[list[int]]:
        """What every round accepts if these texts are decoded together from beginning to end, by text."""
        place, found = [0] * len(texts), [[] for _ in texts]
        while live := [i for i, text in enumerate(texts) if place[i] < self.roots[text]]:
            _, _, accepted = self.play(policy, np.array([self.starts[texts[i]] + place[i] for i in live]))
            for i, count in zip(live, accepted, strict=True):
                found[i].append(count)
                place[i] += count + 1
        return found


def _draft_of(tree: DraftTree, steps: int) -> Draft:
    edges = (tree.logq - tree.logq.gather(1, tree.parents)).numpy()
    host = (x.numpy() for x in (tree.parents, tree.depth, tree.ancestors))
    return Draft(steps, edges, *host, np.ones(len(edges), dtype=bool))


def _right(tree: DraftTree, following: torch.Tensor) -> torch.Tensor:
    """[R,N]: is a node, with all above it, what the text says? following [R,D]."""
    said = following.gather(1, (tree.depth - 1).clamp(min=0)) == tree.tokens
    said[:, 0] = True
    return (said[:, None] | ~tree.ancestors).all(-1)


class Bound:
    """The least seconds that any choice could take, for one that knows the texts (clairvoyant).

    A row at a root may draft any number of levels, and verifies exactly what it accepts. Each of B rows pays its share
    of the round, as if all chose as it does. In truth rows share the levels and, padded, the nodes of the one that has
    most, and cost no less. So the sum of the rows' least shares is a bound from below, found text by text from the end.
    """

    def __init__(self, drafts: Drafts, curve: Curve, rows: int):
        rest, verify = curve.at(rows)
        accepts = [np.zeros(sum(drafts.roots), dtype=np.int64)]
        accepts += [(r * d.depth).max(1) for r, d in zip(drafts.right[1:], drafts.drafts[1:], strict=True)]
        self.rows = rows
        self.least: list[np.ndarray] = []  # by text, from each root to the end
        for start, roots in zip(drafts.starts, drafts.roots, strict=True):
            least = np.zeros(roots + 1)
            for root in range(roots - 1, -1, -1):
                options = []
                for levels, accepted in enumerate(accepts):
                    most = int(accepted[start + root])
                    options += [rest[levels] + verify[n + 1] + rows * least[min(root + n + 1, roots)]
                                for n in ({0, most} if levels else {0})]  # fmt: skip
                least[root] = min(options) / rows
            self.least.append(least)

    def seconds(self, text: int, first: int, end: int) -> float:
        """A row's share from one root of a text to another: no less than this."""
        return float(self.least[text][first] - self.least[text][end])
