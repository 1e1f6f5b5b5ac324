"""Drafting along known texts: at every root of every text, what the drafter proposes and what it says of the text.

R roots of all texts, D steps, W topk, M candidates of a pool, B pieces of texts that run side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.children import LIKELIEST, Coupled
from specdec.contracts import Children, Drafter, DraftState
from specdec.recording import NOWHERE, Text
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import Sampling
from specdec.trees.dynamic import DynamicTree, children_along

PIECE = 32  # roots of a text that are drafted one after the other; its pieces run side by side
BATCH = 32  # texts, and pieces of texts, that run at once


@dataclass
class _Piece:
    """Consecutive roots of a text."""

    text: int
    first: int
    count: int
    place: int  # of the first root among those of all texts


class Drafting:
    """Makes the tensors of a `Recording`, some pieces of texts at a time."""

    def __init__(
        self,
        target,
        drafter: Drafter,
        texts: list[Text],
        steps: int,
        sampling: Sampling,
        coupled: bool,
        topks: Sequence[int] = (),
        eos: frozenset[int] = frozenset(),
    ):
        """coupled: children are, by the seeds of the texts; else they are the likeliest. topks: of pools; without any
        only ranks are recorded."""
        self.target, self.drafter, self.texts, self.steps, self.sampling = target, drafter, texts, steps, sampling
        self.topks, self.device, self.coupled = topks, target.device, coupled
        self.eos = torch.tensor(sorted(eos), dtype=torch.int32)
        self.weighs = bool(topks) and not sampling.greedy
        self.slots = max(topks) if topks and drafter.block is not None and not drafter.conditioned else 0
        self.tensors: dict[str, Tensor] = {}
        self.where: tuple[Tensor, Tensor] = ()  # rows of the pieces, and the places of the roots they are at

    @torch.inference_mode()
    def run(self, batch: int = BATCH) -> dict[str, Tensor]:
        """Draft along all texts, `batch` pieces at once."""
        pieces, place = [], 0
        for number, text in enumerate(self.texts):
            for first in range(0, text.roots, PIECE):
                pieces.append(_Piece(number, first, min(PIECE, text.roots - first), place + first))
            place += text.roots
        self.roots = place
        self.tensors["ranks"] = torch.zeros(place, self.steps, dtype=torch.int32)  # though there be none
        for first in range(0, len(pieces), batch):
            self._draft(pieces[first : first + batch])
        if self.weighs:
            self._weigh()
        return self.tensors

    def _put(self, name: str, drafted: Tensor) -> None:
        rows, places = self.where
        values = drafted.cpu()[rows]
        values = values if values.is_floating_point() else values.int()
        if name not in self.tensors:
            self.tensors[name] = values.new_zeros(self.roots, *values.shape[1:])
        self.tensors[name][places] = values

    def _draft(self, pieces: Sequence[_Piece]) -> None:
        """Draft at all roots of the pieces: a row for each piece, one root after the other.

        The drafter absorbs the text as in decoding whose rounds emit one token each."""
        texts = [self.texts[piece.text] for piece in pieces]
        rows = [text.prompt + text.tokens + text.beyond for text in texts]
        longest = max(len(text.prompt) + len(text.tokens) for text in texts) + self.steps
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        starts = [len(text.prompt) + piece.first for text, piece in zip(texts, pieces, strict=True)]
        count = torch.tensor([piece.count for piece in pieces], device=self.device)
        feats = self._features(pieces, rows, longest)
        self.drafter.reset(len(rows), longest + max(self.topks, default=1) * (self.steps - 1))
        noise = Noise([text.seed for text in texts], hashes_of(torch.arange(self.target.vocab, device=self.device)))
        states = states_along(self.drafter, tokens, feats, torch.tensor(starts, device=self.device), count)
        for n, (root, state) in enumerate(states):
            root = root.clamp(max=longest - self.steps - 1)
            behind = tokens.gather(1, root[:, None] + torch.arange(1, self.steps + 1, device=self.device))
            children = LIKELIEST
            if self.coupled:
                children = Coupled(noise.behind(root, self.steps), self.sampling, self.drafter.trust)
            self.where = torch.tensor([(b, p.place + n) for b, p in enumerate(pieces) if n < p.count]).T
            self._draft_roots(state, behind, children)

    def _draft_roots(self, state: DraftState, behind: Tensor, children: Children) -> None:
        """Draft at one root of every row. behind [B,D]: how its text goes on."""
        vocab = self.drafter.vocab
        self._along(state, behind, children)
        if state.levels is not None:
            self._put("levels", state.levels)
        if self.slots:
            gains, ids = children.best(state.first(self.steps), vocab, slice(0, self.steps), self.slots)
            self._put("slots.gains", gains)
            self._put("slots.tokens", vocab.to_target(ids))
        for topk in self.topks:
            pool = DynamicTree(topk, self.steps, 2).expand(self.drafter, state, children)
            for name, drafted in pool._asdict().items():
                self._put(f"pool.{topk}.{name}", drafted)

    def _along(self, state: DraftState, behind: Tensor, children: Children) -> None:
        """Ranks of the text's tokens among the children, and their filtered probabilities under the drafter, which is
        fed the text itself."""
        ids, ranks, probs = self.drafter.vocab.from_target(behind), [], []
        for depth, here in enumerate(levels_along(self.drafter, state, behind)):
            logits, draft_id = here.logits.float().log_softmax(-1), ids[:, depth : depth + 1]
            scores = logits if children is LIKELIEST else children.scores(logits, self.drafter.vocab, depth)
            logits, scores, known = logits[:, 0], scores[:, 0], draft_id[:, 0] >= 0
            own = scores.gather(1, draft_id.clamp(min=0))
            before = torch.arange(scores.shape[1], device=scores.device) < draft_id
            rank = ((scores > own) | ((scores == own) & before)).sum(1)
            ranks.append(torch.where(known, rank, NOWHERE))
            if self.weighs:
                q = filtered_probs(logits, self.sampling).gather(1, draft_id.clamp(min=0))[:, 0]
                probs.append(torch.where(known, q, 0))
        self._put("ranks", torch.stack(ranks, 1))
        if probs:
            self._put("q", torch.stack(probs, 1))

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
        """Add the target's probabilities of the texts' tokens, and of the candidates next to them."""
        place, depth, kept = 0, torch.arange(self.steps), {"p": []}
        for text in self.texts:
            ids = torch.tensor([text.prompt + text.tokens + text.beyond], device=self.device)
            logits = self.target(ids, None)[0][0, len(text.prompt) :]
            probs = filtered_probs(logits, self.sampling).cpu()
            here, behind = slice(place, place + text.roots), text.following(self.steps)
            position = torch.arange(text.roots)[:, None] + depth  # from which the token of this depth is predicted
            kept["p"].append(probs[position, behind])
            if not self.coupled:
                beside = {f"pool.{k}.p": children_along(self.tensors, k, self.steps, behind, here) for k in self.topks}
                if self.slots:
                    beside["slots.p"] = self.tensors["slots.tokens"][here].long(), True
                for name, (tokens, there) in beside.items():
                    counts = ~torch.isin(tokens, self.eos) & there
                    kept.setdefault(name, []).append(probs[position[..., None], tokens] * counts)
            place += text.roots
        self.tensors |= {name: torch.cat(parts) for name, parts in kept.items()}


def states_along(
    drafter: Drafter, texts: Tensor, feats: Tensor | None, start: Tensor, count: Tensor
) -> Iterator[tuple[Tensor, DraftState]]:
    """The roots [B] and the drafter's state at them: `count` [B] roots of each of the texts [B,T], from `start` [B] on.

    The drafter, which has room for these rows, absorbs the texts and the target's features [B,T,F] as in decoding whose
    rounds emit one token each. What is said of a text behind its last root is void."""
    first = int(start.max())
    state = drafter.admit(0, texts[:, 0], None if feats is None else feats[:, :first], texts[:, 1 : first + 1], start)
    for n in range(int(count.max())):
        yield start + n, state
        at = (start + n)[:, None].clamp(max=texts.shape[1] - 2)
        absorbed = None if feats is None else feats.gather(1, at[..., None].expand(-1, -1, feats.shape[-1]))
        state = drafter.extend(absorbed, texts.gather(1, at + 1), (n + 1 < count).long(), first + n + 1)


def levels_along(drafter: Drafter, first: DraftState, tokens: Tensor) -> Iterator[DraftState]:
    """The drafter's states on the levels behind a root of each text, tokens [B,D] of the text itself fed back."""
    state = drafter.root(first)
    for depth in range(1, tokens.shape[1] + 1):
        yield state
        if depth < tokens.shape[1]:
            ancestors = torch.ones(len(tokens), 1, depth, dtype=torch.bool, device=tokens.device)
            state = drafter.expand(first, tokens[:, depth - 1 : depth], state.hidden, depth, ancestors)
