"""Replay: record once what a drafter proposes along texts of the target, and know what any tree accepts.

superset = record(target, drafter, prompts, topks=(2, 4, 8), steps=6)
superset.save("runs/superset")
Superset.load("runs/superset").replay(topk=4, steps=5, num_draft_tokens=16).tau

What is exact, and in what sense, says docs/replay.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.vocab import DraftVocab
from lab.replay.outcomes import NOWHERE, Rule, follow, likely, while_likely
from lab.replay.superset import Along, Candidates, Drawn, Replayed, Superset, Text
from specdec.contracts import Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.engine.recorder import describe, versions
from specdec.model.target import check_taps
from specdec.sampling.filters import filtered_probs
from specdec.text import encode_prompt
from specdec.types import Sampling
from trees import DynamicTree
from trees.dynamic import Pool

PIECE = 32  # roots of a text that are drafted one after the other; its pieces run side by side


@torch.inference_mode()
def record(
    target,
    drafter: Drafter,
    prompts: Sequence[str | list[int]],
    *,
    topks: Sequence[int],
    steps: int,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    samples: int = 1,
    seed: int = 0,
    eos: frozenset[int] | None = None,
    outputs: Sequence[list[int]] | None = None,
    vocabularies: Mapping[str, Tensor] | None = None,
    batch: int = 32,
) -> Superset:
    """Decode the prompts plainly, `samples` times each, and draft behind every token of the texts: for each of `topks`
    all candidates of `steps` levels, and along the text itself.

    prompts: token ids, or texts as `specdec.generate` takes them. outputs: texts of the target to take instead, one for
    each prompt, such as those of real runs; an end-of-text token or max_new_tokens ended them. vocabularies: target ids
    [U'] by name, for FR-Spec's restriction of the drafter (`drafters.layers.restrict`), each recorded beside the
    drafter's own, whose name is ''. batch: texts, and pieces of texts, that run at once. Raises ValueError for what
    does not fit.
    """
    sampling, eos = sampling or Sampling(), target.eos if eos is None else eos
    if "" in (vocabularies or {}):
        raise ValueError("a vocabulary needs a name: '' is the drafter's own")
    if sampling.penalised:
        raise ValueError("texts under penalties cannot be replayed: what a node may be followed by depends on its path")
    device = target.device
    restricted = {name: Restricted(drafter, ids.to(device)) for name, ids in (vocabularies or {}).items()}
    drafters = {"": drafter} | restricted
    _check(target, drafters, topks, steps)
    if not prompts:
        raise ValueError("no prompt was given")
    prompts = [encode_prompt(target, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if outputs is None:
        questions = [q for _ in range(samples) for q in range(len(prompts))]
        outputs = _decode(target, [prompts[q] for q in questions], max_new_tokens, sampling, seed, eos, batch)
    else:
        questions = list(range(len(prompts)))
        if [len(outputs), *(len(o) for o in outputs if not 1 <= len(o) <= max_new_tokens)] != [len(prompts)]:
            raise ValueError(f"each of the {len(prompts)} prompts needs one output, of 1 to {max_new_tokens} tokens")
    texts = _texts(target, questions, [prompts[q] for q in questions], outputs, steps, sampling, seed, batch)
    if not any(text.roots for text in texts):
        raise ValueError("there is no round to replay: every text ends with its first token")
    recording = _Recording(target, drafters, texts, sorted(set(topks)), steps, sampling, eos)
    pieces = list(recording.pieces())
    for first in range(0, len(pieces), batch):
        recording.draft(pieces[first : first + batch])
    if not sampling.greedy:
        recording.weigh()
    settings = describe(target, None, None, None) | {
        "drafter": {"class": type(drafter).__name__} | dict(drafter.conventions),
        "vocabularies": {name: d.vocab.size for name, d in drafters.items()},
        "samples": samples,
        "seed": seed,
        "versions": versions(),
    }
    return Superset(
        steps, max_new_tokens, sampling, texts, recording.candidates, recording.along, recording.p, settings
    )


def _check(target, drafters: Mapping[str, Drafter], topks: Sequence[int], steps: int) -> None:
    drafter = drafters[""]
    check_taps(drafter.taps, target.config.layers)
    if not topks or min(topks) < 1 or steps < 1:
        raise ValueError(f"topks and steps must be at least 1, got topks {list(topks)} and steps {steps}")
    if drafter.max_steps is not None and steps > drafter.max_steps:
        raise ValueError(f"steps is {steps}, but this drafter guesses {drafter.max_steps} tokens ahead at most")
    size = min(d.vocab.size for d in drafters.values())
    if max(topks) > size:
        raise ValueError(f"topk is {max(topks)}, but a draft vocabulary has {size} tokens only")


def _decode(target, prompts, new: int, sampling: Sampling, seed: int, eos, batch: int) -> list[list[int]]:
    """What the target says to each prompt, without a drafter."""
    engine, out = Engine(target), []
    for first in range(0, len(prompts), batch):
        how = {"max_new_tokens": new, "sampling": sampling, "seed": seed + first, "eos": eos}
        out += [row.tokens for row in engine.generate(prompts[first : first + batch], **how).rows]
    return out


def _texts(target, questions, prompts, outputs, steps: int, sampling: Sampling, seed: int, batch: int) -> list[Text]:
    """The outputs, and what the target says behind them."""
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, whole)) + steps
    if longest > target.config.context:
        raise ValueError(
            f"a text and the {steps} tokens drafted behind it take {longest} places, the target's context has "
            f"{target.config.context}: decode fewer new tokens"
        )
    beyond = _decode(target, whole, steps, sampling, seed + len(whole), frozenset(), batch)
    return [Text(*parts) for parts in zip(questions, prompts, outputs, beyond, strict=True)]


class Restricted:
    """A drafter that proposes the given target tokens only: `drafters.layers.restrict` on its logits instead of its
    head, for drafters without a head too, and leaving the drafter as it is."""

    def __init__(self, drafter: Drafter, ids: Tensor):
        rows = drafter.vocab.from_target(ids)
        self.rows = rows[rows >= 0]
        if not len(self.rows):
            raise ValueError("a vocabulary and the drafter's own have no token in common")
        self.drafter = drafter
        self.vocab = DraftVocab(drafter.vocab.target_size, drafter.vocab.to_target(self.rows))

    def restrict(self, state: DraftState) -> DraftState:
        return DraftState(state.hidden, state.logits.index_select(-1, self.rows))

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        return self.restrict(self.drafter.step(tokens, hidden, level, ancestors))


@dataclass
class _Piece:
    """Some roots of a text."""

    text: int
    first: int
    count: int
    place: int  # of the first among all roots of all texts


class _Recording:
    """Fills what a superset holds, some pieces of texts at a time."""

    def __init__(
        self, target, drafters: Mapping, texts: list[Text], topks: list[int], steps: int, sampling: Sampling, eos
    ):
        self.target, self.drafters, self.texts, self.steps, self.sampling = target, drafters, texts, steps, sampling
        self.drafter, self.topks, self.device = drafters[""], topks, target.device
        self.eos = torch.tensor(sorted(eos), dtype=torch.int32)
        roots = sum(text.roots for text in texts)
        greedy = sampling.greedy

        def empty(*shape: int, dtype=torch.float32) -> Tensor:
            return torch.zeros(roots, *shape, dtype=dtype)

        self.candidates, self.along = {}, {}
        for name in drafters:
            self.along[name] = Along(empty(steps, dtype=torch.int32), None if greedy else empty(steps))
            for topk in topks:
                m = DynamicTree.candidates(topk, steps)
                pool = Pool(empty(m, dtype=torch.int32), empty(m), empty(m, dtype=torch.int32))
                self.candidates[name, topk] = Candidates(pool, None if greedy else empty(steps, topk))
        self.p = None if greedy else empty(steps)
        self.slots = max(topks) * (steps - 1)  # beyond the committed positions

    def pieces(self) -> Iterator[_Piece]:
        place = 0
        for number, text in enumerate(self.texts):
            for first in range(0, text.roots, PIECE):
                count = min(PIECE, text.roots - first)
                yield _Piece(number, first, count, place)
                place += count

    def draft(self, pieces: Sequence[_Piece]) -> None:
        """All roots of the pieces: a row for each, one root after the other, as a chain of rounds that emit one token
        each would have it."""
        texts = [self.texts[piece.text] for piece in pieces]
        rows = [text.prompt + text.tokens + text.beyond for text in texts]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        starts = [len(text.prompt) + piece.first for text, piece in zip(texts, pieces, strict=True)]
        start = torch.tensor(starts, device=self.device)
        count = torch.tensor([piece.count for piece in pieces], device=self.device)
        feats = self._features(pieces, rows, longest)
        self.drafter.reset(len(rows), longest + self.slots)
        first = max(starts)
        prompts = None if feats is None else feats[:, :first]
        state = self.drafter.admit(0, tokens[:, 0], prompts, tokens[:, 1 : first + 1], start)
        for n in range(int(count.max())):
            root = (start + n).clamp(max=longest - self.steps - 1)[:, None]
            behind = tokens.gather(1, root + torch.arange(1, self.steps + 1, device=self.device))
            self._draft_roots(state, behind, [(b, p.place + n) for b, p in enumerate(pieces) if n < p.count])
            absorbed = None if feats is None else feats.gather(1, root[..., None].expand(-1, -1, feats.shape[-1]))
            state = self.drafter.extend(absorbed, behind[:, :1], (n + 1 < count).long(), first + n + 1)

    def _draft_roots(self, state: DraftState, behind: Tensor, where: list[tuple[int, int]]) -> None:
        """One root of every row, behind which the text goes on with [B,D]; where: rows, and their roots' places."""
        rows, places = torch.tensor(where).T
        for name, drafter in self.drafters.items():
            seen = drafter.restrict(state) if name else state
            ranks, q = self._draft_along(drafter, seen, behind)
            self.along[name].ranks[places] = ranks.cpu()[rows]
            if self.along[name].q is not None:
                self.along[name].q[places] = q.cpu()[rows]
            for topk in self.topks:
                pool = DynamicTree(topk, self.steps, 2).expand(drafter, seen)
                for ours, drafted in zip(self.candidates[name, topk].pool, pool, strict=True):
                    ours[places] = drafted.cpu()[rows].to(ours)

    def _draft_along(self, drafter: Drafter, state: DraftState, behind: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks [B,D] int32 of the text's tokens among the children, and their filtered probabilities [B,D]."""
        ids = drafter.vocab.from_target(behind)
        ranks, probs = [], []
        for depth in range(self.steps):
            logits, draft_id = state.logits[:, 0].float().log_softmax(-1), ids[:, depth : depth + 1]
            own = logits.gather(1, draft_id.clamp(min=0))
            before = torch.arange(logits.shape[1], device=logits.device) < draft_id
            rank = ((logits > own) | ((logits == own) & before)).sum(1)
            known = draft_id[:, 0] >= 0
            ranks.append(torch.where(known, rank, NOWHERE).int())
            q = filtered_probs(logits, self.sampling).gather(1, draft_id.clamp(min=0))[:, 0]
            probs.append(torch.where(known, q, 0))
            if depth + 1 < self.steps:
                ancestors = torch.ones(len(behind), 1, depth + 1, dtype=torch.bool, device=behind.device)
                state = drafter.step(behind[:, depth : depth + 1], state.hidden, depth + 1, ancestors)
        return torch.stack(ranks, 1), torch.stack(probs, 1)

    def _features(self, pieces: Sequence[_Piece], rows: list[list[int]], longest: int) -> Tensor | None:
        """[B,longest,F] of the target along the rows, each text run once; None for drafters without taps."""
        if not self.drafter.taps:
            return None
        of: dict[int, Tensor] = {}
        for piece, row in zip(pieces, rows, strict=True):
            if piece.text not in of:
                ids = torch.tensor([row], device=self.device)
                feats = self.target(ids, None, taps=self.drafter.taps, logits=False)[1]
                of[piece.text] = F.pad(feats[0], (0, 0, 0, longest - len(row)))
        return torch.stack([of[piece.text] for piece in pieces])

    def weigh(self) -> None:
        """The target's probabilities along the texts, of their tokens and of the candidates beside them."""
        place, depth = 0, torch.arange(self.steps)
        for text in self.texts:
            ids = torch.tensor([text.prompt + text.tokens + text.beyond], device=self.device)
            logits = self.target(ids, None)[0][0, len(text.prompt) :]
            probs = filtered_probs(logits, self.sampling).cpu()
            here, behind = slice(place, place + text.roots), text.following(self.steps)
            position = torch.arange(text.roots)[:, None] + depth  # from which the token of this depth is predicted
            self.p[here] = probs[position, behind]
            for (_, topk), kept in self.candidates.items():
                pool = Pool(*(part[here] for part in kept.pool))
                first, _ = follow(pool, topk, behind)
                places = first.clamp(min=0)[..., None] + torch.arange(topk)
                tokens = pool.tokens.gather(1, places.flatten(1).long()).view(places.shape)
                counts = (first >= 0)[..., None] & ~torch.isin(tokens, self.eos)
                kept.p[here] = probs[position[..., None], tokens] * counts
            place += text.roots


__all__ = [
    "Drawn",
    "Replayed",
    "Rule",
    "Superset",
    "Text",
    "likely",
    "record",
    "while_likely",
]
