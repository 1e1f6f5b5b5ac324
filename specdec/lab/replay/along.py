"""Drafting along known texts: at every root of every text, what the drafter proposes and what it says of the text.

R roots of all texts, D steps, W topk, M candidates of a pool, B pieces of texts that run side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.children import LIKELIEST, Coupled
from specdec.contracts import Children, Drafter, DraftState
from specdec.drafters.vocab import DraftVocab
from specdec.lab.replay.acceptance import NOWHERE, dynamic_levels, follow
from specdec.lab.replay.recording import AlongText, Candidates, Marginals, RecordedText
from specdec.lab.wrapped import WrappedDrafter
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Seed
from specdec.structs import Sampling
from specdec.trees import DynamicTree
from specdec.trees.dynamic import Pool
from specdec.trees.optimal import levels_along, noise_of, states_along

PIECE = 32  # roots of a text that are drafted one after the other; its pieces run side by side


class Restricted(WrappedDrafter):
    """A drafter that proposes the given target tokens only.

    `drafters.layers.restrict` cuts the drafter's head; this cuts the logits, so that the drafter stays as it is, and
    drafters without a head can be restricted too. Raises ValueError if the drafter has none of the tokens."""

    def __init__(self, drafter: Drafter, ids: Tensor):
        super().__init__(drafter)
        rows = drafter.vocab.from_target(ids)
        self.rows = rows[rows >= 0]
        if not len(self.rows):
            raise ValueError("a vocabulary and the drafter's own have no token in common")
        self.restricted_vocab = DraftVocab(drafter.vocab.target_size, drafter.vocab.to_target(self.rows))

    @property
    def vocab(self) -> DraftVocab:
        return self.restricted_vocab

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        return self.restrict(super().admit(row, first, feats, tokens, n))

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self.restrict(super().extend(feats, tokens, n, max_len))

    def restrict(self, state: DraftState) -> DraftState:
        return DraftState(state.hidden, state.logits.index_select(-1, self.rows), levels=state.levels)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        return self.restrict(super().step(tokens, hidden, level, ancestors))


@dataclass
class _Piece:
    """Consecutive roots of a text."""

    text: int
    first: int
    count: int
    place: int  # of the first root among those of all texts


class DraftingAlong:
    """Fills `candidates`, `along`, `marginals` and `p` of a `Recording`, some pieces of texts at a time.

    drafters: by vocabulary, '' being the drafter itself."""

    def __init__(
        self,
        target,
        drafters: Mapping[str, Drafter],
        texts: list[RecordedText],
        topks: list[int],
        steps: int,
        sampling: Sampling,
        eos: frozenset[int],
        coupled: list[Seed] | None = None,
    ):
        """coupled: children are, by these seeds of the texts; None: they are the likeliest."""
        self.target, self.drafters, self.texts, self.steps, self.sampling = target, drafters, texts, steps, sampling
        self.drafter, self.topks, self.device = drafters[""], topks, target.device
        self.eos = torch.tensor(sorted(eos), dtype=torch.int32)
        self.seeds = coupled
        roots = sum(text.roots for text in texts)
        greedy = sampling.greedy

        def empty(*shape: int, dtype=torch.float32) -> Tensor:
            return torch.zeros(roots, *shape, dtype=dtype)

        self.candidates, self.along = {}, {}
        for name in drafters:
            self.along[name] = AlongText(empty(steps, dtype=torch.int32), None if greedy else empty(steps))
            for topk in topks:
                m = DynamicTree.candidates(topk, steps)
                pool = Pool(empty(m, dtype=torch.int32), empty(m), empty(m, dtype=torch.int32))
                self.candidates[name, topk] = Candidates(*pool, None if greedy or coupled else empty(steps, topk))
        self.p, self.marginals = None if greedy else empty(steps), {}
        if self.drafter.block is not None and not self.drafter.conditioned:
            shape = steps, max(topks)
            for name in drafters:
                p = None if greedy or coupled else empty(*shape)
                self.marginals[name] = Marginals(empty(*shape), empty(*shape, dtype=torch.int32), p)
        self.slots = max(topks) * (steps - 1)  # beyond the committed positions

    def run(self, batch: int) -> None:
        """Draft along all texts, `batch` pieces at once."""
        pieces, place = [], 0
        for number, text in enumerate(self.texts):
            for first in range(0, text.roots, PIECE):
                pieces.append(_Piece(number, first, min(PIECE, text.roots - first), place + first))
            place += text.roots
        for first in range(0, len(pieces), batch):
            self._draft(pieces[first : first + batch])
        if not self.sampling.greedy:
            self._weigh()

    def _draft(self, pieces: Sequence[_Piece]) -> None:
        """Draft at all roots of the pieces: a row for each piece, one root after the other.

        The drafter absorbs the text as in decoding whose rounds emit one token each."""
        texts = [self.texts[piece.text] for piece in pieces]
        rows = [text.prompt + text.tokens + text.beyond for text in texts]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        starts = [len(text.prompt) + piece.first for text, piece in zip(texts, pieces, strict=True)]
        count = torch.tensor([piece.count for piece in pieces], device=self.device)
        feats = self._features(pieces, rows, longest)
        self.drafter.reset(len(rows), longest + self.slots)
        noise = None if self.seeds is None else noise_of(self.target, [self.seeds[piece.text] for piece in pieces])
        along = states_along(self.drafter, tokens, feats, torch.tensor(starts, device=self.device), count)
        for n, (root, state) in enumerate(along):
            root = root.clamp(max=longest - self.steps - 1)
            behind = tokens.gather(1, root[:, None] + torch.arange(1, self.steps + 1, device=self.device))
            children = LIKELIEST
            if noise is not None:
                children = Coupled(noise.behind(root, self.steps), self.sampling, self.drafter.trust)
            where = [(b, p.place + n) for b, p in enumerate(pieces) if n < p.count]
            self._draft_roots(state, behind, where, children)

    def _draft_roots(self, state: DraftState, behind: Tensor, where: list[tuple[int, int]], children: Children) -> None:
        """Draft at one root of every row. behind [B,D]: how its text goes on. where: rows, places of their roots."""
        rows, places = torch.tensor(where).T

        def put(ours: Tensor, drafted: Tensor) -> None:
            ours[places] = drafted.cpu()[rows].to(ours)

        for name, drafter in self.drafters.items():
            seen = drafter.restrict(state) if isinstance(drafter, Restricted) else state
            ranks, q = self._draft_along(drafter, seen, behind, children)
            along = self.along[name]
            put(along.ranks, ranks)
            if along.q is not None:
                put(along.q, q)
            if seen.levels is not None:
                if along.levels is None:
                    along.levels = torch.zeros(len(along.ranks), dtype=torch.int32)
                put(along.levels, seen.levels)
            if (marginals := self.marginals.get(name)) is not None:
                how = drafter.vocab, slice(0, self.steps), max(self.topks)
                gains, ids = children.best(seen.first(self.steps), *how)
                put(marginals.gains, gains)
                put(marginals.tokens, drafter.vocab.to_target(ids))
            for topk in self.topks:
                pool = DynamicTree(topk, self.steps, 2).expand(drafter, seen, children)
                for ours, drafted in zip(self.candidates[name, topk].pool, pool, strict=True):
                    put(ours, drafted)

    def _draft_along(
        self, drafter: Drafter, state: DraftState, behind: Tensor, children: Children
    ) -> tuple[Tensor, Tensor]:
        """Ranks [B,D] int32 of the text's tokens among the children, and their filtered probabilities [B,D] under the
        drafter, which is fed the text itself."""
        ids, ranks, probs = drafter.vocab.from_target(behind), [], []
        for depth, here in enumerate(levels_along(drafter, state, behind)):
            logits, draft_id = here.logits.float().log_softmax(-1), ids[:, depth : depth + 1]
            scores = logits if children is LIKELIEST else children.scores(logits, drafter.vocab, depth)
            logits, scores = logits[:, 0], scores[:, 0]
            own = scores.gather(1, draft_id.clamp(min=0))
            before = torch.arange(scores.shape[1], device=scores.device) < draft_id
            rank = ((scores > own) | ((scores == own) & before)).sum(1)
            known = draft_id[:, 0] >= 0
            ranks.append(torch.where(known, rank, NOWHERE).int())
            q = filtered_probs(logits, self.sampling).gather(1, draft_id.clamp(min=0))[:, 0]
            probs.append(torch.where(known, q, 0))
        return torch.stack(ranks, 1), torch.stack(probs, 1)

    def _features(self, pieces: Sequence[_Piece], rows: list[list[int]], longest: int) -> Tensor | None:
        """The target's features [B,longest,F] of the rows; None for drafters without taps. Each text is run once."""
        if not self.drafter.taps:
            return None
        of: dict[int, Tensor] = {}
        for piece, row in zip(pieces, rows, strict=True):
            if piece.text not in of:
                ids = torch.tensor([row], device=self.device)
                feats = self.target(ids, None, taps=self.drafter.taps, logits=False)[1]
                of[piece.text] = F.pad(feats[0], (0, 0, 0, longest - len(row)))
        return torch.stack([of[piece.text] for piece in pieces])

    def _weigh(self) -> None:
        """Fill in the target's probabilities of the texts' tokens, and of the candidates beside them."""
        place, depth = 0, torch.arange(self.steps)
        for text in self.texts:
            ids = torch.tensor([text.prompt + text.tokens + text.beyond], device=self.device)
            logits = self.target(ids, None)[0][0, len(text.prompt) :]
            probs = filtered_probs(logits, self.sampling).cpu()
            here, behind = slice(place, place + text.roots), text.following(self.steps)
            position = torch.arange(text.roots)[:, None] + depth  # from which the token of this depth is predicted
            self.p[here] = probs[position, behind]
            for marginals in self.marginals.values():
                if marginals.p is not None:
                    tokens = marginals.tokens[here].long()
                    marginals.p[here] = probs[position[..., None], tokens] * ~torch.isin(tokens, self.eos)
            for (_, topk), kept in self.candidates.items():
                if kept.p is None:
                    continue
                pool = Pool(*(part[here] for part in kept.pool))
                first, *_ = follow(pool, dynamic_levels(topk, self.steps), behind)
                places = first.clamp(min=0)[..., None] + torch.arange(topk)
                tokens = pool.tokens.gather(1, places.flatten(1).long()).view(places.shape)
                counts = (first >= 0)[..., None] & ~torch.isin(tokens, self.eos)
                kept.p[here] = probs[position[..., None], tokens] * counts
            place += text.roots
