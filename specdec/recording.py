"""What a drafter proposed along known texts, and the rounds that follow from it (docs/replay.md).

Along a fixed text the tree at every position depends on the text before it alone. So the candidates that the drafter
proposes there, recorded once, hold every tree that is a choice among them. A round that begins at a root accepts the
part of its tree that the text runs through, and the next round begins after it: no model is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.acceptance import AlongTexts, round_starts, word_of
from specdec.contracts import TreePolicy
from specdec.engine.traces import RowTrace, tau
from specdec.sampling.noise import Seed
from specdec.structs import Sampling

NOWHERE = torch.iinfo(torch.int32).max  # the rank of a token or node that no tree holds


@dataclass
class Text:
    """One text of the target. Its first token comes from the prefill; a round can begin at every other one."""

    prompt: list[int]
    tokens: list[int]
    seed: Seed = (0, 0)  # that it was drawn by
    # The `steps` tokens that the target emits after the end: a round accepts of them and is cut off. Without them only
    # the rounds' accepted tokens after the end are unknown.
    beyond: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)  # that it was drawn with

    @property
    def roots(self) -> int:
        """Places at which a round can begin, which is also the number of tokens that rounds emit."""
        return len(self.tokens) - 1

    def following(self, steps: int) -> Tensor:
        """Return the tokens after each root, [roots,steps], -1 where they are unknown."""
        ahead = torch.tensor(self.tokens[1:] + self.beyond, dtype=torch.int32)
        return F.pad(ahead, (0, steps), value=-1).unfold(0, steps, 1)[: self.roots]


@dataclass
class Accepted:
    """Result of one tree at every root: tensors [R]."""

    accepted: Tensor  # drafted tokens that the text runs through
    nodes: Tensor  # that are verified, the root counted
    levels: Tensor  # that are drafted; 0 where the drafter has nothing to propose


@dataclass
class Replayed:
    """Result that decoding with one tree would have had, by text and round."""

    rows: list[RowTrace]
    drafted: list[list[int]]  # levels; 0 where the drafter has nothing to propose
    nodes: float  # verified in a round on average, the root counted

    @property
    def emitted(self) -> list[list[int]]:
        """Number of tokens that each round of each text emits."""
        return [row.emitted for row in self.rows]

    @property
    def rounds(self) -> int:
        """Number of rounds of all texts."""
        return sum(row.rounds for row in self.rows)

    @property
    def levels(self) -> float:
        """Levels drafted in a round on average."""
        return sum(map(sum, self.drafted)) / max(self.rounds, 1)

    @property
    def tau(self) -> float:
        """Emitted tokens per round; see `specdec.engine.traces.tau`."""
        return tau(self.rows)


@dataclass
class Recording:
    """Q texts, and what a drafter proposed at each of their R roots, text by text. `specdec.trees.record` makes it.

    `tensors` are on the CPU, int32 and fp32; D steps, W topk:

        ranks [R,D]           children before the text's token, the text fed back; NOWHERE: no child
        levels [R]            `DraftState.levels`; absent: the drafter always has something to propose
        dynamic.W [R,D,D]     of dynamic trees of 1, 2, ... levels and so many children: by depth the rank of the text's
                              node among all candidates except the root; NOWHERE if it is no candidate
        slots.gains, .tokens  [R,D,W] of a block whose slots do not depend on each other's tokens: the best of each
    """

    steps: int  # D: no tree may be deeper
    sampling: Sampling
    texts: list[Text]
    tensors: dict[str, Tensor]
    block: int | None = None  # of the drafter

    def __post_init__(self) -> None:
        """Find the roots of the texts, and the tokens that follow each root."""
        self.roots = torch.tensor([text.roots for text in self.texts])  # [Q]
        self.starts = self.roots.cumsum(0) - self.roots  # [Q] where the first root of each text is
        self.following = torch.cat([text.following(self.steps) for text in self.texts])  # [R,D]

    def levels(self, steps: int) -> Tensor:
        """Return how many of `steps` levels are drafted at each root [R]. Raises ValueError if fewer were recorded."""
        if steps > self.steps:
            raise ValueError(f"the tree is {steps} levels deep, but {self.steps} were recorded")
        whole = torch.full((len(self.following),), steps)
        return whole if "levels" not in self.tensors else whole.minimum(self.tensors["levels"])

    def along(self, topk: int) -> AlongTexts:
        """Return the ranks below `topk` as `acceptance.json` has them."""
        depth, left = torch.arange(self.steps), torch.cat([torch.arange(n, 0, -1) for n in self.roots.tolist()])
        there = depth < torch.minimum(self.levels(self.steps), left)[:, None]
        words = [word_of(row, topk) for row in torch.where(there, self.tensors["ranks"], topk).tolist()]
        texts = [" ".join(words[at : at + n]) for at, n in zip(self.starts, self.roots, strict=True)]
        return AlongTexts(self.sampling.temperature, topk, self.steps, tuple(texts))

    def replay(self, tree: TreePolicy | Accepted) -> Replayed:
        """Replay one tree, or what its `replay` returned. Raises ValueError for what was not recorded."""
        tree = tree if isinstance(tree, Accepted) else tree.replay(self)
        rows, drafted, nodes = [], [], 0
        for start, roots in zip(self.starts.tolist(), self.roots.tolist(), strict=True):
            here = slice(start, start + roots)
            accepted = tree.accepted[here].tolist()
            begins = round_starts(roots, accepted.__getitem__)
            levels = tree.levels[here][begins].tolist()
            emitted = [min(accepted[at] + 1, roots - at) for at in begins]
            rows.append(RowTrace([accepted[at] for at in begins], emitted, levels.count(0)))
            drafted.append(levels)
            nodes += int(tree.nodes[here][begins].sum())
        return Replayed(rows, drafted, nodes / max(sum(map(len, drafted)), 1))

    def replay_many(self, trees: Sequence[TreePolicy | Accepted]) -> list[Replayed]:
        """Replay several trees, as `replay` does."""
        return [self.replay(tree) for tree in trees]
