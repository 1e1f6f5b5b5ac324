"""What any tree would have accepted of what a drafter proposed along known texts (docs/replay.md).

Rounds follow without any model: a round that begins at root i accepts the part of its tree that the text runs through,
and the next round begins behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.contracts import TreePolicy
from specdec.engine.traces import RowTrace, tau
from specdec.lab.replay.acceptance import (
    Acceptance,
    Rule,
    block_accepts,
    dynamic_levels,
    filled,
    follow,
    pool_ranks,
    static_accepts,
)  # fmt: skip
from specdec.lab.replay.recording import Recording
from specdec.trees import BlockTree, Chain, DynamicTree, StaticTree
from specdec.trees.spec import TreeSpec

Tree = TreeSpec | TreePolicy


@dataclass
class Replayed:
    """What decoding with one tree would have done."""

    rows: list[RowTrace]  # by text
    # By row and round, the number of tokens that the round is expected to emit given the text before it.
    expected: list[list[float]] | None
    nodes: float  # verified in a round on average, the root counted
    levels: float  # drafted in a round on average
    drafted: list[list[int]]  # the levels by row and round; 0 where the drafter has nothing to propose

    @property
    def emitted(self) -> list[list[int]]:
        """How many tokens each round of each text emits."""
        return [row.emitted for row in self.rows]

    @property
    def rounds(self) -> int:
        return sum(row.rounds for row in self.rows)

    @property
    def tau(self) -> float:
        """Emitted tokens a round; see `specdec.engine.traces.tau`."""
        return tau(self.rows)

    @property
    def expected_tau(self) -> float:
        """tau of expected instead of counted tokens, which has less noise (docs/replay.md).

        It is tau itself for greedy texts, and for trees whose expectation was not recorded."""
        if self.expected is None:
            return self.tau
        return sum(map(sum, self.expected)) / self.rounds


@dataclass
class DrawnChains:
    """What decoding with drawn chains would have done under the rejection rule, given the texts."""

    rounds: list[float]  # by text, their expected number
    tokens: int  # emitted by the rounds of all texts

    @property
    def tau(self) -> float:
        return self.tokens / sum(self.rounds)


@dataclass
class Superset(Recording):
    """A recording, and what trees accept of it: R roots of Q texts."""

    def __post_init__(self) -> None:
        roots = torch.tensor([text.roots for text in self.texts])
        self.roots, self.starts = roots, roots.cumsum(0) - roots  # [Q] each: how many of a text, and where its first is
        self.following = torch.cat([text.following(self.steps) for text in self.texts])  # [R,D] tokens behind each root
        self._ranks: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def replay(self, tree: Tree, vocabulary: str = "", rule: Rule | None = None) -> Replayed:
        """Replay one tree: a dynamic tree of a recorded topk, a tree over a block of no larger topk than recorded, or a
        static tree or chain of any width.

        rule: cuts a dynamic tree at each root (`specdec.lab.replay.acceptance`).

        Raises ValueError for what was not recorded."""
        return self.replay_many([tree], vocabulary, rule)[0]

    def replay_many(
        self, trees: Sequence[Tree | Acceptance], vocabulary: str = "", rule: Rule | None = None
    ) -> list[Replayed]:
        """Replay many trees, or what `acceptance` returned for them, at once: much less work than one by one."""
        found = [tree if isinstance(tree, Acceptance) else self.acceptance(tree, vocabulary, rule) for tree in trees]
        return self._rounds(found)

    def replay_drawn(self, steps: int, vocabulary: str = "") -> DrawnChains:
        """Replay chains of `steps` tokens drawn from the drafter (`trees.SampledTree` of [1] * steps) under multi-round
        rejection. The result is the exact expectation over draws and coins, given the texts.

        A token x is emitted with probability p(x), and as an accepted draft with min(p(x), q(x)). So a token that was
        emitted had been accepted with probability min(1, q(x)/p(x)), whatever follows it. Rounds are a Markov chain
        over roots. Raises ValueError for greedy texts.
        """
        if self.sampling.greedy:
            raise ValueError("chains are drawn at a temperature above 0, and these texts are greedy: replay a chain")
        self._check(steps, vocabulary)
        p = self.p[:, :steps].clamp(min=torch.finfo(torch.float32).tiny)
        accept = (self.along[vocabulary].q[:, :steps] / p).clamp(max=1).double()
        if (levels := self.along[vocabulary].levels) is not None:
            accept *= torch.arange(steps) < levels[:, None]
        reach = F.pad(accept.cumprod(1), (1, 0), value=1.0)  # [R,D+1]: probability that a or more are accepted
        stop = torch.cat([reach[:, :-1] - reach[:, 1:], reach[:, -1:]], 1)  # that exactly a are
        rounds = []
        for start, roots in zip(self.starts.tolist(), self.roots.tolist(), strict=True):
            begins = torch.zeros(roots + steps + 1, dtype=torch.float64)  # that a round begins here
            begins[0] = 1
            for root in range(roots):
                begins[root + 1 : root + steps + 2] += begins[root] * stop[start + root]
            rounds.append(begins[:roots].sum().item())
        return DrawnChains(rounds, int(self.roots.sum()))

    def acceptance(self, tree: Tree, vocabulary: str = "", rule: Rule | None = None) -> Acceptance:
        """Return what a round with this tree accepts at each of the R roots. Arguments and errors: as for `replay`."""
        if isinstance(tree, TreeSpec):
            tree = tree.build()
        for kinds, of_kind in (
            (StaticTree | Chain, self._static), (BlockTree, self._block), (DynamicTree, self._dynamic)
        ):  # fmt: skip
            if isinstance(tree, kinds):
                return of_kind(tree, vocabulary, rule)
        raise ValueError(f"{type(tree).__name__} cannot be replayed: take DynamicTree, StaticTree, BlockTree or Chain")

    def _static(self, tree: StaticTree | Chain, vocabulary: str, rule: Rule | None) -> Acceptance:
        if rule is not None:
            raise ValueError("a truncation rule cuts dynamic trees, and this one is static")
        self._check(tree.steps, vocabulary)
        accepted = static_accepts(tree, self.along[vocabulary].ranks)
        levels = self._levels(vocabulary, tree.steps)
        return Acceptance(accepted.minimum(levels), None, (tree.depth <= levels[:, None]).sum(1), levels)

    def _block(self, tree: BlockTree, vocabulary: str, rule: Rule | None) -> Acceptance:
        if rule is not None:
            raise ValueError("a truncation rule cuts dynamic trees, and this one is over a block")
        if self.steps == self.settings.get("block"):
            tree = tree.within(self.steps)
        self._check(tree.steps, vocabulary)
        if vocabulary not in self.marginals:
            raise ValueError("trees over blocks were not recorded: that takes slots that do not depend on each other")
        found = self.marginals[vocabulary]
        if tree.topk > (most := found.gains.shape[2]):
            raise ValueError(f"topk is {tree.topk}, but the {most} best tokens of a slot were recorded")
        best = (x[:, : tree.steps, : tree.topk] for x in (found.gains, found.tokens))
        kept, counts = block_accepts(tree, *best, self.following)
        levels, expected = self._levels(vocabulary, tree.steps), None
        kept, counts = (F.pad(x * (levels > 0)[:, None], (0, self.steps - tree.steps)) for x in (kept, counts))
        if found.p is not None:
            children = torch.arange(found.p.shape[2]) < counts[..., None]
            expected = self._expected(found.p, kept, children)
        nodes = torch.where(levels > 0, tree.num_draft_tokens, 1)
        return Acceptance(kept.sum(1), expected, nodes, tree.steps * (levels > 0))

    def _levels(self, vocabulary: str, steps: int) -> Tensor:
        """[R] how many levels of a tree of `steps` levels are drafted."""
        along = self.along[vocabulary]
        return filled(along.ranks, steps) if along.levels is None else along.levels.long().clamp(max=steps)

    def _check(self, steps: int, vocabulary: str, topk: int | None = None) -> None:
        if vocabulary not in self.along:
            names = ", ".join(map(repr, self.along))
            raise ValueError(f"the vocabulary {vocabulary!r} was not recorded; there are {names}")
        if topk is not None and (vocabulary, topk) not in self.candidates:
            known = ", ".join(str(k) for name, k in self.candidates if name == vocabulary) or "none"
            raise ValueError(f"topk {topk} was not recorded; recorded were {known}")
        if steps > self.steps:
            raise ValueError(f"the tree is {steps} levels deep, but {self.steps} were recorded")

    def _dynamic(self, tree: DynamicTree, vocabulary: str, rule: Rule | None) -> Acceptance:
        self._check(tree.steps, vocabulary, tree.topk)
        candidates = self.candidates[vocabulary, tree.topk]
        hit, children = self._ranks_of(vocabulary, tree.topk)
        levels, budget = filled(hit, tree.steps), filled(hit, tree.num_draft_tokens)
        if rule is not None:
            places = dynamic_levels(tree.topk, tree.steps)
            levels, most = rule([candidates.scores[:, level] for level in places])
            if levels.min() < 1 or levels.max() > tree.steps or most.min() < 1:
                raise ValueError(f"a truncation rule must keep 1 to {tree.steps} levels and at least the root")
            budget = torch.minimum(budget, most).minimum(1 + tree.topk + (levels - 1) * tree.topk**2)
        row = torch.arange(len(hit))
        kept = hit[row, levels - 1] < (budget - 1)[:, None]  # [R,D]: is the text's node of this depth in the tree?
        drafts, expected = self._levels(vocabulary, tree.steps) > 0, None
        if candidates.p is not None:
            children = children[row, levels - 1] < (budget - 1)[:, None, None]
            expected = torch.where(drafts, self._expected(candidates.p, kept, children), 1)
        return Acceptance(kept.sum(1) * drafts, expected, torch.where(drafts, budget, 1), levels * drafts)

    def _expected(self, p: Tensor, kept: Tensor, children: Tensor) -> Tensor:
        """[R] tokens that a round is expected to emit: one, and for each node of the tree that the text reaches the
        probability that one of the node's children comes next."""
        depth = torch.arange(self.steps)
        emitted = torch.cat([torch.arange(1, n + 1) for n in self.roots.tolist()])[:, None]  # when the round begins
        left = torch.cat([torch.arange(n, 0, -1) for n in self.roots.tolist()])[:, None]
        # No token follows where the limit is reached, and none is asked for behind the text's end.
        room = (depth < self.max_new_tokens - 1 - emitted) & (depth < left)
        reached = F.pad(kept[:, :-1], (1, 0), value=True)
        return 1 + ((p * children).sum(-1) * (room & reached)).sum(1)

    def _ranks_of(self, vocabulary: str, topk: int) -> tuple[Tensor, Tensor]:
        """Ranks by path score for each number of steps: [R,D,D] of the nodes that the text runs through, by depth, and
        [R,D,D,W] of the candidates to be the next node; NOWHERE where there is none. Computed once."""
        key = vocabulary, topk
        if key not in self._ranks:
            pool = self.candidates[key].pool
            first, hit, _ = follow(pool, dynamic_levels(topk, self.steps), self.following)
            children = torch.where(first[..., None] < 0, -1, first[..., None] + torch.arange(topk))
            places = torch.cat([hit[..., None], children], -1).flatten(1)  # [R,D*(1+W)]
            ranks = torch.stack([pool_ranks(pool, topk, steps, places) for steps in range(1, self.steps + 1)], 1)
            ranks = ranks.unflatten(2, (self.steps, 1 + topk))
            self._ranks[key] = ranks[..., 0].contiguous(), ranks[..., 1:].contiguous()
        return self._ranks[key]

    def _rounds(self, acceptances: list[Acceptance]) -> list[Replayed]:
        """Go from root to root, all trees (n) and texts (Q) side by side."""
        accepts = torch.stack([a.accepted for a in acceptances])  # [n,R]
        place = torch.zeros(len(acceptances), len(self.texts), dtype=torch.int64)
        visits, emits = [], []
        while bool((place < self.roots).any()):
            root = self.starts + place.minimum(self.roots - 1)
            emitted = (accepts.gather(1, root) + 1).minimum(self.roots - place)  # 0 where the text has ended
            visits.append(root)
            emits.append(emitted)
            place = place + emitted
        roots, emitted = torch.stack(visits, -1), torch.stack(emits, -1)  # [n,Q,rounds of the longest]
        return [self._replayed(*of_tree) for of_tree in zip(acceptances, roots, emitted, strict=True)]

    def _replayed(self, acceptance: Acceptance, roots: Tensor, emitted: Tensor) -> Replayed:
        """roots, emitted [Q,rounds]: where each round begins, and how many tokens it emits, 0 behind the last."""
        counts = (emitted > 0).sum(1).tolist()

        def by_row(values: Tensor) -> list[list]:
            return [row[:n] for row, n in zip(values.tolist(), counts, strict=True)]

        drafted = by_row(acceptance.levels[roots])
        rows = [
            RowTrace(*row, drafted.count(0))
            for *row, drafted in zip(by_row(acceptance.accepted[roots]), by_row(emitted), drafted, strict=True)
        ]
        expected = None if acceptance.expected is None else by_row(acceptance.expected[roots])
        visited = roots[emitted > 0]
        nodes, levels = (x[visited].double().mean().item() for x in (acceptance.nodes, acceptance.levels))
        return Replayed(rows, expected, nodes, levels, drafted)
