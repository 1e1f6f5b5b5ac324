"""What a drafter proposed along known texts, and the rounds that follow from it (docs/replay.md).

Along a fixed text the tree at every position depends on the text before it alone. So the candidates that the drafter
proposes there, recorded once, hold every tree that is a choice among them. A round that begins at a root accepts the
part of its tree that the text runs through, and the next round begins after it: no model is needed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.acceptance import AlongTexts, round_starts, word_of
from specdec.cli.files import replace_folder
from specdec.contracts import TreePolicy
from specdec.engine.traces import RowTrace, tau
from specdec.model.weight_files import read_json
from specdec.sampling.noise import Seed
from specdec.structs import Sampling

NOWHERE = torch.iinfo(torch.int32).max  # the rank of a token or node that no tree holds
FORMAT, VERSION = "specdec recording", 1
FILES = HEADER, TENSORS = "recording.json", "recording.safetensors"


@dataclass
class Text:
    """One text of the target. Its first token comes from the prefill; a round can begin at every other one."""

    prompt: list[int]
    tokens: list[int]
    seed: Seed = (0, 0)  # that it was drawn by
    # The `steps` tokens that the target emits after the end: a round accepts of them and is cut off. Without them only
    # the rounds' accepted tokens after the end are unknown.
    beyond: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seed = tuple(self.seed)  # a list, as JSON has it

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
    """What one tree does at every root: tensors [R]."""

    accepted: Tensor  # drafted tokens that the text runs through
    expected: Tensor | None  # tokens that a round is expected to emit given the text before it; None: not known
    nodes: Tensor  # that are verified, the root counted
    levels: Tensor  # that are drafted; 0 where the drafter has nothing to propose


@dataclass
class Replayed:
    """What decoding with one tree would have done, by text and round."""

    rows: list[RowTrace]
    expected: list[list[float]] | None  # tokens that the round is expected to emit given the text before it
    drafted: list[list[int]]  # levels; 0 where the drafter has nothing to propose
    nodes: float  # verified in a round on average, the root counted

    @property
    def emitted(self) -> list[list[int]]:
        """How many tokens each round of each text emits."""
        return [row.emitted for row in self.rows]

    @property
    def rounds(self) -> int:
        return sum(row.rounds for row in self.rows)

    @property
    def levels(self) -> float:
        """Levels drafted in a round on average."""
        return sum(map(sum, self.drafted)) / max(self.rounds, 1)

    @property
    def tau(self) -> float:
        """Emitted tokens a round; see `specdec.engine.traces.tau`."""
        return tau(self.rows)

    @property
    def expected_tau(self) -> float:
        """tau of expected instead of counted tokens, which has less noise (docs/replay.md).

        It is tau itself for greedy texts, and for trees whose expectation was not recorded."""
        return self.tau if self.expected is None else sum(map(sum, self.expected)) / self.rounds


@dataclass
class DrawnChains:
    """What decoding with drawn chains would have done under the rejection rule, given the texts."""

    rounds: list[float]  # by text, their expected number
    tokens: int  # emitted by the rounds of all texts

    @property
    def tau(self) -> float:
        return self.tokens / sum(self.rounds)


@dataclass
class Recording:
    """Q texts, and what a drafter proposed at each of their R roots, text by text. `specdec.trees.record` makes it.

    `tensors` are on the CPU, integers int32, numbers fp32; D steps, W topk, M candidates of a pool:

        ranks [R,D]           children before the text's token, the text fed back; NOWHERE: no child
        levels [R]            `DraftState.levels`; absent: the drafter always has something to propose
        p, q [R,D]            filtered probability of the text's tokens by the target and the drafter; absent: greedy
        pool.W.tokens ...     [R,M] the parts of a `specdec.trees.dynamic.Pool`
        slots.gains, .tokens  [R,D,W] of a block whose slots do not depend on each other's tokens: the best of each
        pool.W.p, slots.p     [R,D,W] probability by the target of the candidates for depth d after the text's token of
                              depth d-1. 0 for those that end a text and where there are none. Absent for greedy texts,
                              where one of them is certain, and for coupled children, which know the noise: given that,
                              the text itself is certain
    """

    steps: int  # D: no tree may be deeper
    max_new_tokens: int
    sampling: Sampling
    texts: list[Text]
    tensors: dict[str, Tensor]
    settings: dict = field(default_factory=dict)  # of what was recorded, in values that JSON has

    def __post_init__(self) -> None:
        self.roots = torch.tensor([text.roots for text in self.texts])  # [Q]
        self.starts = self.roots.cumsum(0) - self.roots  # [Q] where the first root of each text is
        self.following = torch.cat([text.following(self.steps) for text in self.texts])  # [R,D]
        self._derived: dict[str, Any] = {}

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What several trees need of the tensors, made once."""
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]

    def levels(self, steps: int) -> Tensor:
        """Return how many levels of a tree of `steps` levels are drafted at each root, [R].

        Raises ValueError if fewer levels were recorded."""
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

    # Rounds

    def replay(self, tree: TreePolicy | Accepted) -> Replayed:
        """Replay one tree, or what its `replay` returned. Raises ValueError for what was not recorded."""
        tree = tree if isinstance(tree, Accepted) else tree.replay(self)
        rows, drafted, expected, nodes = [], [], [], 0
        for start, roots in zip(self.starts.tolist(), self.roots.tolist(), strict=True):
            here = slice(start, start + roots)
            accepted = tree.accepted[here].tolist()
            begins = round_starts(roots, accepted.__getitem__)
            levels = tree.levels[here][begins].tolist()
            emitted = [min(accepted[at] + 1, roots - at) for at in begins]
            rows.append(RowTrace([accepted[at] for at in begins], emitted, levels.count(0)))
            drafted.append(levels)
            nodes += int(tree.nodes[here][begins].sum())
            expected.append([] if tree.expected is None else tree.expected[here][begins].tolist())
        return Replayed(
            rows, None if tree.expected is None else expected, drafted, nodes / max(sum(map(len, drafted)), 1)
        )

    def replay_many(self, trees: Sequence[TreePolicy | Accepted]) -> list[Replayed]:
        return [self.replay(tree) for tree in trees]

    def replay_drawn(self, steps: int) -> DrawnChains:
        """Replay chains of `steps` tokens drawn from the drafter (`trees.SampledTree` of [1] * steps) under multi-round
        rejection. The result is the exact expectation over draws and coins, given the texts.

        A token x is emitted with probability p(x), and as an accepted draft with min(p(x), q(x)). So a token that was
        emitted had been accepted with probability min(1, q(x)/p(x)), whatever follows it. Rounds are a Markov chain
        over roots. Raises ValueError for greedy texts.
        """
        if self.sampling.greedy:
            raise ValueError("chains are drawn at a temperature above 0, and these texts are greedy: replay a chain")
        levels = self.levels(steps)
        p = self.tensors["p"][:, :steps].clamp(min=torch.finfo(torch.float32).tiny)
        accept = (self.tensors["q"][:, :steps] / p).clamp(max=1).double() * (torch.arange(steps) < levels[:, None])
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

    def expectation(self, p: Tensor | None, kept: Tensor, children: Tensor) -> Tensor | None:
        """Return the tokens that a round is expected to emit, [R]; None if p is None.

        They are one, and for each node of the tree that the text reaches the probability that one of the node's
        children comes next. kept [R,d]: whether the text's node of each depth is in the tree. p, children [R,D,W]:
        probabilities of that node's children, and [R,d,W] which of them are in the tree."""
        if p is None:
            return None
        depth = torch.arange(kept.shape[1])
        emitted = torch.cat([torch.arange(1, n + 1) for n in self.roots.tolist()])[:, None]  # when the round begins
        left = torch.cat([torch.arange(n, 0, -1) for n in self.roots.tolist()])[:, None]
        # No token follows where the limit is reached, and none is asked for after the text's end.
        room = (depth < self.max_new_tokens - 1 - emitted) & (depth < left)
        reached = F.pad(kept[:, :-1], (1, 0), value=True)
        return 1 + ((p[:, : len(depth)] * children).sum(-1) * (room & reached)).sum(1)

    # Files

    def save(self, folder: Path) -> None:
        """Write a folder, whole or not at all. It replaces an older recording in its place.

        Raises ValueError if the folder holds anything else."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "steps": self.steps,
            "max_new_tokens": self.max_new_tokens,
            "sampling": asdict(self.sampling),
            "texts": [asdict(text) for text in self.texts],
        }

        def fill(aside: Path) -> None:
            save_file({name: t.contiguous() for name, t in self.tensors.items()}, aside / TENSORS)
            (aside / HEADER).write_text(json.dumps(header) + "\n", encoding="utf-8")

        replace_folder(Path(folder), fill, FILES, "a recording")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ValueError, one sentence, if there is no recording, or one of another version, or a damaged one."""
        folder = Path(folder)
        if not (folder / HEADER).is_file():
            raise ValueError(f"{folder} is not a recording: it has no {HEADER}")
        header = read_json(folder / HEADER)
        if (header.pop("format", None), header.pop("version", None)) != (FORMAT, VERSION):
            raise ValueError(f"{folder / HEADER} is not a recording of version {VERSION}: record it anew")
        try:
            header |= {"texts": [Text(**text) for text in header["texts"]], "sampling": Sampling(**header["sampling"])}
            return cls(**header, tensors=load_file(folder / TENSORS))
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is damaged, record it anew: {error}") from None
