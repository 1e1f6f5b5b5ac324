"""All that a drafter proposed along known texts, and what any tree would have accepted of it (docs/replay.md).

Along a fixed text the tree at every position depends on the text before it alone. So the candidates that the drafter
proposes there, recorded once, hold every tree that is a choice among them, and rounds follow without any model: a round
that begins at root i accepts the part of its tree that the text runs through, and the next begins behind it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.replay.outcomes import Outcome, Rule, constant, follow, pool_ranks, static_accepts
from specdec.cli.files import replace_folder
from specdec.contracts import TreePolicy
from specdec.engine.trace import RowTrace, tau
from specdec.model.checkpoint import read_json
from specdec.types import Sampling
from trees import Chain, DynamicTree, StaticTree
from trees.dynamic import Pool

FORMAT, VERSION = "specdec superset", 1
FILES = HEADER, TENSORS = "superset.json", "superset.safetensors"


@dataclass
class Text:
    """One text of the target: the first token comes from the prefill, every other is the root of a round or within
    one."""

    question: int  # which of the prompts it answers
    prompt: list[int]
    tokens: list[int]
    beyond: list[int]  # as many more tokens of the target as there are steps: accepted, but cut off

    @property
    def roots(self) -> int:
        """Places at which a round can begin, which is also the number of tokens that rounds emit."""
        return len(self.tokens) - 1

    def following(self, steps: int) -> Tensor:
        """[roots,steps]: the tokens behind each root."""
        ahead = torch.tensor(self.tokens[1:] + self.beyond, dtype=torch.int32)
        return ahead.unfold(0, steps, 1)[: self.roots]


@dataclass
class Candidates:
    """What was recorded of one vocabulary and one topk: R roots, M candidates each, all on the CPU."""

    pool: Pool  # [R,M] int32, fp32, int32
    # [R,D,W] the target's filtered probability of the candidates for depth d that stand behind the text's token before,
    # 0 for those that end a text and where there are none; None for greedy texts, where one of them is certain
    p: Tensor | None


@dataclass
class Along:
    """What the drafter says of the text itself, its own output fed back behind each root: R roots, D steps."""

    ranks: Tensor  # [R,D] int32: how many children stand before the text's token; NOWHERE if it has no such child
    q: Tensor | None  # [R,D] probability of the text's token under the drafter, filtered as the target's; None: greedy


@dataclass
class Replayed:
    """What one setting would have done: a row for each text."""

    rows: list[RowTrace]
    # by row and round: how many tokens the round is expected to emit given the text before it; see `expected_tau`
    expected: list[list[float]] | None
    nodes: float  # verified in a round on average, the root counted
    levels: float  # drafted in a round on average

    @property
    def accepted(self) -> list[list[int]]:
        """Tokens emitted by each round of each text."""
        return [row.emitted for row in self.rows]

    @property
    def rounds(self) -> int:
        return sum(row.rounds for row in self.rows)

    @property
    def tau(self) -> float:
        """Emitted tokens per round, see `specdec.engine.trace.tau`."""
        return tau(self.rows)

    @property
    def expected_tau(self) -> float:
        """tau with every round's tokens replaced by their expectation, which has less noise: docs/replay.md. For greedy
        texts, and where nothing was recorded to expect from, tau itself."""
        if self.expected is None:
            return self.tau
        return sum(map(sum, self.expected)) / self.rounds


@dataclass
class Drawn:
    """What drawn chains would have done under rejection, given the texts."""

    rounds: list[float]  # expected, by text
    tokens: int  # that rounds emitted, all texts

    @property
    def tau(self) -> float:
        return self.tokens / sum(self.rounds)


@dataclass
class Superset:
    """Texts, and what a drafter proposed at each of their R roots, text by text. `lab.replay.record` makes it."""

    steps: int  # D: no tree may be deeper
    max_new_tokens: int
    sampling: Sampling
    texts: list[Text]
    candidates: dict[tuple[str, int], Candidates]  # by vocabulary, '' being the drafter's own, and topk
    along: dict[str, Along]  # by vocabulary
    p: Tensor | None  # [R,D] filtered probability of the text's tokens behind each root; None: greedy
    settings: dict = field(default_factory=dict)  # what was recorded of what, in values that JSON has

    def __post_init__(self) -> None:
        roots = torch.tensor([text.roots for text in self.texts])
        self.roots, self.starts = roots, roots.cumsum(0) - roots  # [Q] each: how many, and the first one's place in R
        self._ranks: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def replay(
        self, *, topk: int, steps: int, num_draft_tokens: int, vocabulary: str = "", rule: Rule | None = None
    ) -> Replayed:
        """The dynamic tree of these settings (`trees.DynamicTree`; topk 1 is a chain), cut by a truncation rule if
        there is one. ValueError if they lie outside what was recorded."""
        return self.replay_many([DynamicTree(topk, steps, num_draft_tokens)], vocabulary, rule)[0]

    def replay_static(self, tree: StaticTree | Chain, vocabulary: str = "") -> Replayed:
        """A static tree with any number of children: what it accepts is read off the ranks of the text's tokens."""
        return self.replay_many([tree], vocabulary)[0]

    def replay_many(
        self, trees: Sequence[TreePolicy], vocabulary: str = "", rule: Rule | None = None
    ) -> list[Replayed]:
        """All trees at once, as `replay` and `replay_static` do one: much less work than one after the other."""
        outcomes = [self._outcome(tree, vocabulary, rule) for tree in trees]
        return self._rounds(outcomes)

    def replay_drawn(self, steps: int, vocabulary: str = "") -> Drawn:
        """Chains of `steps` tokens drawn from the drafter (`trees.SampledTree` of [1] * steps), under multi-round
        rejection: exact expectation over draws and coins, given the texts.

        A token x is emitted with probability p(x) and as an accepted draft with min(p(x), q(x)); so one that was
        emitted had been accepted with min(1, q(x)/p(x)), whatever comes after it. Rounds are a Markov chain over roots.
        """
        if self.sampling.greedy:
            raise ValueError("chains are drawn at a temperature above 0, and these texts are greedy: replay a chain")
        self._check(steps, vocabulary)
        p = self.p[:, :steps].clamp(min=torch.finfo(torch.float32).tiny)
        accept = (self.along[vocabulary].q[:, :steps] / p).clamp(max=1).double()
        reach = F.pad(accept.cumprod(1), (1, 0), value=1.0)  # [R,D+1]: a or more are accepted
        stop = torch.cat([reach[:, :-1] - reach[:, 1:], reach[:, -1:]], 1)  # exactly a are
        rounds = []
        for start, roots in zip(self.starts.tolist(), self.roots.tolist(), strict=True):
            begins = torch.zeros(roots + steps + 1, dtype=torch.float64)  # that a round begins here
            begins[0] = 1
            for root in range(roots):
                begins[root + 1 : root + steps + 2] += begins[root] * stop[start + root]
            rounds.append(begins[:roots].sum().item())
        return Drawn(rounds, int(self.roots.sum()))

    # Files

    def save(self, folder: Path) -> None:
        """Write a folder, whole or not at all; an older superset in its place is replaced, anything else refused."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "steps": self.steps,
            "max_new_tokens": self.max_new_tokens,
            "sampling": asdict(self.sampling),
            "candidates": list(self.candidates),
            "along": list(self.along),
            "texts": [asdict(text) for text in self.texts],
        }

        def fill(aside: Path) -> None:
            save_file({name: t.contiguous() for name, t in self._tensors().items()}, aside / TENSORS)
            (aside / HEADER).write_text(json.dumps(header) + "\n", encoding="utf-8")

        replace_folder(Path(folder), fill, FILES, "a superset")

    def _tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor | None] = {"p": self.p}
        for number, c in enumerate(self.candidates.values()):
            named |= {f"candidates.{number}.{name}": t for name, t in (c.pool._asdict() | {"p": c.p}).items()}
        for number, a in enumerate(self.along.values()):
            named |= {f"along.{number}.ranks": a.ranks, f"along.{number}.q": a.q}
        return {name: t for name, t in named.items() if t is not None}

    @classmethod
    def load(cls, folder: Path) -> "Superset":
        """Raises ValueError, one sentence, if there is no superset, or one of another version, or a damaged one."""
        folder = Path(folder)
        if not (folder / HEADER).is_file():
            raise ValueError(f"{folder} is not a superset: it has no {HEADER}")
        header = read_json(folder / HEADER)
        if (header.pop("format", None), header.pop("version", None)) != (FORMAT, VERSION):
            raise ValueError(f"{folder / HEADER} is not a superset of version {VERSION}: record it anew")
        try:
            tensors = load_file(folder / TENSORS)
            texts = [Text(**text) for text in header.pop("texts")]
            candidates = {tuple(key): _part(tensors, f"candidates.{n}.") for n, key in enumerate(header["candidates"])}
            along = {key: _part(tensors, f"along.{n}.") for n, key in enumerate(header["along"])}
            header |= {
                "sampling": Sampling(**header["sampling"]),
                "candidates": {k: Candidates(p=t.pop("p", None), pool=Pool(**t)) for k, t in candidates.items()},
                "along": {key: Along(t["ranks"], t.get("q")) for key, t in along.items()},
            }
            return cls(**header, texts=texts, p=tensors.get("p"))
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is damaged, record it anew: {error}") from None

    # What one tree accepts at every root

    def _outcome(self, tree: TreePolicy, vocabulary: str, rule: Rule | None) -> Outcome:
        if isinstance(tree, Chain):
            tree = StaticTree([[0] * depth for depth in range(1, tree.steps + 1)])
        if isinstance(tree, StaticTree):
            if rule is not None:
                raise ValueError("a truncation rule cuts dynamic trees, and this one is static")
            self._check(tree.steps, vocabulary)
            accepted = static_accepts(tree, self.along[vocabulary].ranks)
            return Outcome(accepted, None, constant(accepted, tree.num_draft_tokens), constant(accepted, tree.steps))
        if not isinstance(tree, DynamicTree):
            raise ValueError(f"{type(tree).__name__} cannot be replayed: take DynamicTree, StaticTree or Chain")
        self._check(tree.steps, vocabulary, tree.topk)
        return self._dynamic(tree, vocabulary, rule)

    def _check(self, steps: int, vocabulary: str, topk: int | None = None) -> None:
        if vocabulary not in self.along:
            names = ", ".join(map(repr, self.along))
            raise ValueError(f"the vocabulary {vocabulary!r} was not recorded; there are {names}")
        if topk is not None and (vocabulary, topk) not in self.candidates:
            known = ", ".join(str(k) for name, k in self.candidates if name == vocabulary) or "none"
            raise ValueError(f"topk {topk} was not recorded; recorded were {known}")
        if steps > self.steps:
            raise ValueError(f"the tree is {steps} levels deep, but {self.steps} were recorded")

    def _dynamic(self, tree: DynamicTree, vocabulary: str, rule: Rule | None) -> Outcome:
        candidates = self.candidates[vocabulary, tree.topk]
        hit, children = self._ranks_of(vocabulary, tree.topk)
        levels, budget = constant(hit, tree.steps), constant(hit, tree.num_draft_tokens)
        if rule is None:
            hit, children = hit[:, tree.steps - 1], children[:, tree.steps - 1]
        else:
            by_level = candidates.pool.scores[:, : DynamicTree.candidates(tree.topk, tree.steps)].split(
                [tree.topk] + [tree.topk**2] * (tree.steps - 1), dim=1
            )
            levels, most = rule(by_level)
            if levels.min() < 1 or levels.max() > tree.steps or most.min() < 1:
                raise ValueError(f"a truncation rule must keep 1 to {tree.steps} levels and at least the root")
            budget = torch.minimum(budget, most).minimum(1 + tree.topk + (levels - 1) * tree.topk**2)
            row = torch.arange(len(hit))
            hit, children = hit[row, levels - 1], children[row, levels - 1]
        kept = hit < (budget - 1)[:, None]  # [R,D]: is the text's node of this depth in the tree?
        expected = None
        if candidates.p is not None:
            expected = self._expected(candidates.p, kept, children < (budget - 1)[:, None, None])
        return Outcome(kept.sum(1), expected, budget, levels)

    def _expected(self, p: Tensor, kept: Tensor, children: Tensor) -> Tensor:
        """[R] tokens that a round is expected to emit, node by node along the text: each node of the tree that the text
        reaches adds the probability that one of its children comes next, and another token after that."""
        depth = torch.arange(self.steps)
        emitted = torch.cat([torch.arange(1, n + 1) for n in self.roots.tolist()])[:, None]  # when the round begins
        left = torch.cat([torch.arange(n, 0, -1) for n in self.roots.tolist()])[:, None]
        # No token follows where the limit is reached, and none is asked for behind the text's end.
        room = (depth < self.max_new_tokens - 1 - emitted) & (depth < left)
        reached = F.pad(kept[:, :-1], (1, 0), value=True)
        return 1 + ((p * children).sum(-1) * (room & reached)).sum(1)

    def _ranks_of(self, vocabulary: str, topk: int) -> tuple[Tensor, Tensor]:
        """For every number of steps the ranks by path score, [R,D,D] of the nodes that the text runs through, by depth,
        and [R,D,D,W] of the candidates that compete to be the next; NOWHERE if there are none. Computed once."""
        key = vocabulary, topk
        if key not in self._ranks:
            following = torch.cat([text.following(self.steps) for text in self.texts])
            pool = self.candidates[key].pool
            first, hit = follow(pool, topk, following)
            children = torch.where(first[..., None] < 0, -1, first[..., None] + torch.arange(topk))
            places = torch.cat([hit[..., None], children], -1).flatten(1)  # [R,D*(1+W)]
            ranks = torch.stack([pool_ranks(pool, topk, steps, places) for steps in range(1, self.steps + 1)], 1)
            ranks = ranks.unflatten(2, (self.steps, 1 + topk))
            self._ranks[key] = ranks[..., 0].contiguous(), ranks[..., 1:].contiguous()
        return self._ranks[key]

    # Rounds

    def _rounds(self, outcomes: list[Outcome]) -> list[Replayed]:
        """From root to root, all outcomes and texts side by side."""
        accepts = torch.stack([o.accepted for o in outcomes])  # [n,R]
        place = torch.zeros(len(outcomes), len(self.texts), dtype=torch.int64)
        visits, emits = [], []
        while bool((place < self.roots).any()):
            root = self.starts + place.minimum(self.roots - 1)
            emitted = (accepts.gather(1, root) + 1).minimum(self.roots - place)  # 0 where the text has ended
            visits.append(root)
            emits.append(emitted)
            place = place + emitted
        roots, emitted = torch.stack(visits, -1), torch.stack(emits, -1)  # [n,Q,rounds of the longest]
        return [self._replayed(o, r, e) for o, r, e in zip(outcomes, roots, emitted, strict=True)]

    def _replayed(self, outcome: Outcome, roots: Tensor, emitted: Tensor) -> Replayed:
        """roots, emitted [Q,rounds]: where each round began, and what it emitted, 0 behind the last."""
        counts = (emitted > 0).sum(1).tolist()

        def by_row(values: Tensor) -> list[list]:
            return [row[:n] for row, n in zip(values.tolist(), counts, strict=True)]

        rows = [RowTrace(*row) for row in zip(by_row(outcome.accepted[roots]), by_row(emitted), strict=True)]
        expected = None if outcome.expected is None else by_row(outcome.expected[roots])
        visited = roots[emitted > 0]
        nodes, levels = (x[visited].double().mean().item() for x in (outcome.nodes, outcome.levels))
        return Replayed(rows, expected, nodes, levels)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
