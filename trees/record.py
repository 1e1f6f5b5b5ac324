"""Record once what a drafter proposes along texts of the target, and know what any tree accepts.

    texts = answers_to(target, ["What is a tree?", "Hello!"], max_new_tokens=64)
    recording = record(target, drafter, texts, steps=6, topks=(2, 4, 8))
    recording.replay(DynamicTree(4, 5, 16)).tau

docs/replay.md says what is exact. B pieces of texts run side by side; other shapes are those of `Recording`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.children import LIKELIEST, Coupled
from specdec.contracts import Children, Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.model.target import check_taps
from specdec.recording import NOWHERE, Recording, Text
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import Sampling
from specdec.text import encode_prompt
from specdec.trees.dynamic import DynamicTree

PIECE = 32  # roots of a text that are drafted one after the other; its pieces run side by side
BATCH = 32  # texts that run at once, and pieces of texts


def answers_to(
    target,
    prompts: Sequence[str | list[int]],
    sampling: Sampling | None = None,
    *,
    max_new_tokens: int = 128,
    seed: int = 0,
    eos: frozenset[int] | None = None,
) -> list[Text]:
    """Let the target answer prompts without speculation: token ids, or texts as `specdec.generate` takes them.

    Answer number i has the seed (seed, i).
    """
    ids = [encode_prompt(target, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    drawn = sampling or Sampling()
    texts = [Text(prompt, [], (seed, number), sampling=drawn) for number, prompt in enumerate(ids)]
    answers = _continue(target, texts, max_new_tokens, sampling, target.eos if eos is None else eos)
    return [replace(text, tokens=tokens) for text, tokens in zip(texts, answers, strict=True)]


@torch.inference_mode()
def record(
    target,
    drafter: Drafter,
    texts: Sequence[Text],
    *,
    steps: int,
    topks: Sequence[int] = (),
    sampling: Sampling | None = None,
    children: str = "coupled",
    batch: int = BATCH,
) -> Recording:
    """Draft after every token of texts of the target.

    The drafter drafts along the text itself, as chains, static trees and `acceptance.json` need. With `topks` it also
    drafts all candidates of `steps` levels for each of them, and for a block whose slots do not depend on each other's
    tokens the best tokens of each slot, as many as the largest of `topks`.

    texts: the target's answers, see `answers_to`. sampling: instead of that of the texts. children: which ones to draft
    above temperature 0, 'coupled', which depend on the seeds of the texts, or 'likeliest'. batch: pieces of text that
    run at once.

    Raises:
        ValueError: The settings do not fit the drafter or the texts.
    """
    _check(target, drafter, texts, topks, steps)
    sampling = sampling or texts[0].sampling
    if topks and sampling.penalised:
        raise ValueError("texts under penalties cannot be replayed: what a node may be followed by depends on its path")
    if children not in ("coupled", "likeliest"):
        raise ValueError(f"what is recorded are coupled or likeliest children, not {children!r}")
    if topks:
        texts = _with_beyond(target, texts, steps, sampling)
    coupled = children == "coupled" and not sampling.greedy
    drafting = _Drafting(target, drafter, texts, steps, sampling, coupled, sorted(set(topks)))
    return Recording(steps, sampling, list(texts), drafting.run(batch), drafter.block)


def _check(target, drafter: Drafter, texts: Sequence[Text], topks: Sequence[int], steps: int) -> None:
    check_taps(drafter.taps, target.config.layers)
    if min(topks, default=1) < 1 or steps < 1:
        raise ValueError(f"topks and steps must be at least 1, got topks {list(topks)} and steps {steps}")
    if (most := drafter.deepest(steps)) < steps:
        raise ValueError(f"steps is {steps}, but this drafter guesses {most} tokens ahead at most")
    if max(topks, default=1) > (size := drafter.vocab.size):
        raise ValueError(f"topk is {max(topks)}, but the draft vocabulary has {size} tokens only")
    if not texts or not all(text.tokens for text in texts):
        raise ValueError("no text was given" if not texts else "a text has no token: leave it out")
    if topks and not any(text.roots for text in texts):
        raise ValueError("there is no round to replay: every text ends with its first token")


def _continue(target, texts: Sequence[Text], new: int, sampling: Sampling | None, eos: frozenset[int]) -> list[list]:
    """What the target says after each text, without a drafter, by the noise of the text's seed."""
    engine, out = Engine(target), []
    for first in range(0, len(texts), BATCH):
        some = texts[first : first + BATCH]
        ids, seeds = [text.prompt + text.tokens for text in some], [text.seed for text in some]
        made = engine.generate(ids, max_new_tokens=new, sampling=sampling, seed=seeds, eos=eos)
        out += [row.tokens for row in made.rows]
    return out


def _with_beyond(target, texts: Sequence[Text], steps: int, sampling: Sampling) -> list[Text]:
    """The texts with what the target says after them."""
    longest = max(len(text.prompt) + len(text.tokens) for text in texts) + steps
    if longest > target.config.context:
        raise ValueError(
            f"a text and the {steps} tokens drafted after it take {longest} places, the target's context has "
            f"{target.config.context}: decode fewer new tokens"
        )
    beyond = _continue(target, texts, steps, sampling, frozenset())
    return [replace(text, beyond=tokens) for text, tokens in zip(texts, beyond, strict=True)]


class _Piece(NamedTuple):
    """Consecutive roots of a text."""

    text: int
    first: int
    size: int
    place: int  # of the first root among those of all texts


@dataclass
class _Drafting:
    """Makes the tensors of a `Recording`, some pieces of texts at a time."""

    target: Any
    drafter: Drafter
    texts: Sequence[Text]
    steps: int
    sampling: Sampling
    coupled: bool  # children are coupled, by the seeds of the texts; else they are the most likely ones
    topks: Sequence[int]  # of pools; without any only ranks are recorded

    def __post_init__(self) -> None:
        self.device = self.target.device
        marginals = self.drafter.block is not None and not self.drafter.conditioned
        self.slots = max(self.topks, default=0) if marginals else 0
        self.roots = sum(text.roots for text in self.texts)
        self.tensors = {"ranks": torch.zeros(self.roots, self.steps, dtype=torch.int32)}  # though there be none

    def run(self, batch: int) -> dict[str, Tensor]:
        """Draft along all texts, `batch` pieces at once."""
        pieces, place = [], 0
        for number, text in enumerate(self.texts):
            for first in range(0, text.roots, PIECE):
                pieces.append(_Piece(number, first, min(PIECE, text.roots - first), place + first))
            place += text.roots
        for first in range(0, len(pieces), batch):
            self._draft(pieces[first : first + batch])
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

        The drafter absorbs the text as in decoding with one token per round.
        """
        texts = [self.texts[piece.text] for piece in pieces]
        rows = [text.prompt + text.tokens + text.beyond for text in texts]
        longest = max(len(text.prompt) + len(text.tokens) for text in texts) + self.steps
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        starts = [len(text.prompt) + piece.first for text, piece in zip(texts, pieces, strict=True)]
        count = torch.tensor([piece.size for piece in pieces], device=self.device)
        feats = self._features(pieces, rows, longest)
        self.drafter.reset(len(rows), longest + max(self.topks, default=1) * (self.steps - 1))
        noise = Noise([text.seed for text in texts], hashes_of(torch.arange(self.target.vocab, device=self.device)))
        states = _states_along(self.drafter, tokens, feats, torch.tensor(starts, device=self.device), count)
        for n, (root, state) in enumerate(states):
            root = root.clamp(max=longest - self.steps - 1)
            following = tokens.gather(1, root[:, None] + torch.arange(1, self.steps + 1, device=self.device))
            children: Children = LIKELIEST
            if self.coupled:
                children = Coupled(noise.after(root, self.steps), self.sampling, self.drafter.trust)
            self.where = torch.tensor([(b, p.place + n) for b, p in enumerate(pieces) if n < p.size]).T
            self._draft_roots(state, following, children)

    def _draft_roots(self, state: DraftState, following: Tensor, children: Children) -> None:
        """Draft at one root of every row. following [B,D]: the tokens of the text after it."""
        vocab = self.drafter.vocab
        self._put("ranks", self._ranks_along(state, following, children))
        if state.levels is not None:
            self._put("levels", state.levels)
        if self.slots:
            gains, ids = children.best(state.first(self.steps), vocab, slice(0, self.steps), self.slots)
            self._put("slots.gains", gains)
            self._put("slots.tokens", vocab.to_target(ids))
        for topk in self.topks:
            tree = DynamicTree(topk, self.steps, 2)
            pool = tree.expand(self.drafter, state, children)
            self._put(f"dynamic.{topk}", tree.ranks_along(pool, following))

    def _ranks_along(self, first: DraftState, following: Tensor, children: Children) -> Tensor:
        """[B,D] ranks of the text's tokens among the children of a drafter that is fed the text itself."""
        ids, ranks, here = self.drafter.vocab.from_target(following), [], self.drafter.root(first)
        ancestors = torch.ones(len(following), 1, self.steps, dtype=torch.bool, device=self.device)
        for depth in range(self.steps):
            if depth:
                token = following[:, depth - 1 : depth]
                here = self.drafter.expand(first, token, here.hidden, depth, ancestors[..., :depth])
            logits, draft_id = here.logits.float().log_softmax(-1), ids[:, depth : depth + 1]
            if isinstance(children, Coupled):
                logits = children.scores(logits, self.drafter.vocab, depth)
            scores = logits[:, 0]
            own = scores.gather(1, draft_id.clamp(min=0))
            before = torch.arange(scores.shape[1], device=scores.device) < draft_id
            rank = ((scores > own) | ((scores == own) & before)).sum(1)
            ranks.append(torch.where(draft_id[:, 0] >= 0, rank, NOWHERE))
        return torch.stack(ranks, 1)

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


def _states_along(
    drafter: Drafter, texts: Tensor, feats: Tensor | None, start: Tensor, count: Tensor
) -> Iterator[tuple[Tensor, DraftState]]:
    """Yield the roots [B] and the drafter's state at them, along texts [B,T].

    There are `count` [B] roots in each text, from `start` [B] on. The state after a text's last root is void.
    """
    first = int(start.max())
    state = drafter.admit(0, texts[:, 0], None if feats is None else feats[:, :first], texts[:, 1 : first + 1], start)
    for n in range(int(count.max())):
        yield start + n, state
        at = (start + n)[:, None].clamp(max=texts.shape[1] - 2)
        absorbed = None if feats is None else feats.gather(1, at[..., None].expand(-1, -1, feats.shape[-1]))
        most = min(first + n + 1, texts.shape[1] - 1)  # the row that starts last need not have the most roots
        state = drafter.extend(absorbed, texts.gather(1, at + 1), (n + 1 < count).long(), most)
