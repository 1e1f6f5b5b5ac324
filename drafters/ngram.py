"""Drafts from the text itself: what followed the last time these words were written.

Nothing is trained. A position's state is its matches with the committed text, prompt and output: lengths[j] is the
length of the longest common suffix of the position's text and of the committed text up to token j. One more token x
gives lengths'[j] = lengths[j-1] + 1 where token j is x, and 0 elsewhere, which is what a suffix automaton keeps track
of, for all places at once. The tokens that followed the matches are the candidates.
"""

import math
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.drafters.vocab import DraftVocab
from specdec.model.cache import KVCache, cache_bytes
from specdec.ops.likely import largest, top

MODES = ("lookup", "suffix")
LONGEST = 16  # how many committed tokens of a match count
BASE = 4.0  # 2 to 8 draft alike
REACH = 3  # 2 to 5 do, where 10 more rows cost about as much as a token (docs/log.md)
ALL = 2**15  # levels: more than any tree has
Array = np.ndarray


class Matches(DraftState):
    """The match lengths of nodes, hidden [B,W,S]. What they vote for is counted when somebody asks."""

    def __init__(self, drafter: "NGram", lengths: Tensor):
        """Hold match lengths at the places of the drafter's texts that a token may follow."""
        super().__init__(lengths, lengths)
        self.drafter = drafter

    @cached_property
    def votes(self) -> tuple[Tensor, Tensor]:
        """Return the votes of the matches for each draft token [B,W,U], and the share of every token [B,W,1].

        fp64 holds sums of powers of BASE exactly. Both are relative to the longest match, so no power overflows.
        """
        lengths, lookup, vocab = self.hidden, self.drafter.mode == "lookup", self.drafter.vocab
        text, lens = texts_of(self.drafter.cache), self.drafter.cache.lens
        b, w, places = lengths.shape
        place = torch.arange(places, device=lengths.device)
        counted = (lengths >= self.drafter.min_ngram) & (place < lens[:, None, None] - 1)  # and followed
        longest = (lengths * counted).amax(-1, keepdim=True).double()
        exponent = lengths - longest
        if lookup:  # an earlier place first, by the row's own length, whatever the batch
            exponent -= place / lens[:, None, None].double()
        weights = torch.pow(BASE, exponent) * counted
        votes = weights.new_zeros(b, w, vocab.target_size)
        followers = text[:, None, 1 : places + 1].expand(b, w, places)
        votes.scatter_reduce_(2, followers, weights, "amax" if lookup else "sum")
        even = torch.pow(BASE, -longest).div_(vocab.target_size).clamp_(min=torch.finfo(torch.float32).tiny)
        return vocab.select(votes), even

    @property
    @override
    def logits(self) -> Tensor:
        votes, even = self.votes
        return (votes + even).log().float()

    @override
    def top(self, k: int) -> tuple[Tensor, Tensor]:
        votes, even = self.votes
        best, ids = (x[..., None] for x in largest(votes)) if k == 1 else top(votes, k)
        whole = votes.sum(-1, keepdim=True) + even * votes.shape[-1]
        return ((best + even) / whole).log().float(), ids


class NGram(Drafter):
    """Draft from repetitions in the text, without weights.

    A match of n tokens weighs BASE^n. It has at least `min_ngram` tokens, and at most `max_ngram` are counted. All
    tokens together weigh 1, evenly, so the draft distribution is uniform without a match.

    In mode 'lookup' a candidate weighs as its best match, and among equally long ones an earlier outweighs a later. The
    chain is prompt lookup decoding (Saxena 2023), with the first occurrence as in transformers and vLLM.

    In mode 'suffix' a candidate weighs as all its matches together: frequencies after every suffix of the text, longer
    suffixes counting more (after SuffixDecoding, arXiv 2411.04975).

    Without a match it proposes nothing, and after a match of n tokens `reach` (n - 1) levels, because longer matches
    are right more often and for longer. With `reach` None it proposes all levels of the tree after any match, as
    transformers does.
    """

    # A cache of one layer, whose keys are the committed tokens, and whose values the match lengths at their places.
    cache: KVCache
    like: Tensor  # of its dtype, on its device
    capturable = keeps_first = abstains = True

    def __init__(
        self,
        vocab: DraftVocab,
        mode: str = "lookup",
        max_ngram: int = LONGEST,
        min_ngram: int = 1,
        reach: int | None = REACH,
    ):
        """Check the settings, which the class describes."""
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"the n-gram drafter's mode must be one of {', '.join(MODES)}, got {mode!r}")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must lie between 1 and max_ngram, got {min_ngram} and {max_ngram}")
        if reach is not None and reach < 1:
            raise ValueError(f"reach must be at least 1, or null for whole trees, got {reach}")
        self.vocab, self.mode, self.max_ngram, self.min_ngram, self.reach = vocab, mode, max_ngram, min_ngram, reach
        self.register_buffer("like", torch.zeros(0, dtype=torch.int64), persistent=False)

    @override
    def reset(self, rows: int, slots: int) -> None:
        self.cache = KVCache(1, rows, slots + 1, 1, 1, like=self.like).clear(0)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        return cache_bytes(1, rows, slots + 1, 1, 1, like=self.like)

    @override
    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        part = self.cache.admit(row, len(first), tokens.shape[1] + 1)
        text = texts_of(part)
        text[:, 0] = first
        text[:, 1 : tokens.shape[1] + 1] = tokens
        part.advance(n + 1, tokens.shape[1] + 1)
        return self._match(part)

    @override
    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        cache = self.cache
        texts_of(cache).scatter_(1, cache.lens[:, None] + cache.places[: tokens.shape[1]], tokens)
        cache.advance(n, max_len + 1)
        return self._match(cache)

    @override
    def root(self, first: DraftState) -> Matches:
        return Matches(self, lengths_of(self.cache)[:, None])

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> Matches:
        """Extend the parents' match lengths `hidden` [B,W,S] by one token; the path itself need not be looked up."""
        same = texts_of(self.cache)[:, None, : hidden.shape[-1]] == tokens[..., None]
        return Matches(self, (F.pad(hidden, (1, -1)) + 1).mul_(same))

    @override
    def chain(self, first: DraftState, steps: int, children: Children) -> tuple[Tensor, Tensor]:
        if children is not LIKELIEST or not self._on_host():
            return super().chain(first, steps, children)
        text, lengths = texts_of(self.cache).numpy(), lengths_of(self.cache).numpy()
        ends = _ends(self.cache)
        rows = [self._chain(text[b, :n], lengths[b, : n - 1], steps) for b, n in enumerate(ends)]
        ids, logq = (torch.from_numpy(np.array(part)) for part in zip(*rows, strict=True))
        return self.vocab.to_target(ids), logq.float()

    def _on_host(self) -> bool:
        """Return whether numpy computes, in place: on the CPU, and not in rounds that are captured as operators."""
        return self.like.device.type == "cpu" and not self.cache.captured

    def _chain(self, text: Array, lengths: Array, steps: int) -> tuple[list[int], list[float]]:
        """The winner, and the winner after it, `steps` times: draft ids, and log-probabilities of the path so far.

        text [n] has the match lengths [n-1] at the places that a token follows. numpy computes here what operators do
        elsewhere, in a fraction of their time: a row has a few matches, and not one for each place and token.
        """
        winners = [self._winner(text, lengths)]
        while len(winners) < steps:
            lengths = longer(text, lengths, int(self._ids[0][winners[-1][0]]))
            winners.append(self._winner(text, lengths))
        ids, logp = zip(*winners, strict=True)
        return list(ids), list(accumulate(logp))

    @cached_property
    def _ids(self) -> tuple[Array, Array]:
        """Target ids [U] of the tokens that are drafted, and draft ids [V], -1 for tokens that are not."""
        vocab = self.vocab
        drafted, every = torch.arange(vocab.size), torch.arange(vocab.target_size)
        return vocab.to_target(drafted).numpy(), vocab.from_target(every).numpy()

    def _winner(self, text: Array, lengths: Array) -> tuple[int, float]:
        """The draft id with the most votes, the lowest among equals, and its log-probability."""
        size, lookup = self.vocab.size, self.mode == "lookup"
        places = np.flatnonzero(lengths >= self.min_ngram)
        if not len(places):
            return 0, -math.log(size)
        lengths, ids = lengths[places], text[places + 1]
        longest = int(lengths.max())
        votes = np.power(BASE, (lengths - longest) - (places / len(text) if lookup else 0.0))
        if self.vocab.ids is not None:
            ids = self._ids[1][ids]
            votes *= ids >= 0
        if len(ids) > 1:  # those for the same token together
            order = ids.argsort(kind="stable")
            ids, votes = ids[order], votes[order]
            firsts = np.flatnonzero(np.diff(ids, prepend=-2))
            ids, votes = ids[firsts], (np.maximum if lookup else np.add).reduceat(votes, firsts)
        best, even = votes.argmax(), BASE**-longest / self.vocab.target_size
        share = (votes[best] + even) / (votes.sum() + even * size)
        return (int(ids[best]) if votes[best] > 0 else 0), math.log(share)

    def _match(self, cache: KVCache) -> DraftState:
        """Store the match lengths at the ends of a cache's texts. The state says how many levels they are worth."""
        lengths, lens = lengths_of(cache), cache.lens
        if self._on_host():
            lengths.zero_()
            for row, tokens, n in zip(lengths.numpy(), texts_of(cache).numpy(), _ends(cache), strict=True):
                row[: n - 1] = match_lengths(tokens[:n], self.max_ngram)
        else:
            lengths.copy_(self._matches(texts_of(cache), lens, lengths.shape[1]))
        nothing = lens.new_empty(len(lens), 1, 0)  # the whole state is in the cache
        return DraftState(nothing, nothing, None, self._levels(lengths.amax(-1)))

    def _levels(self, longest: Tensor) -> Tensor:
        """Number of levels proposed after matches whose longest has `longest` [B] tokens."""
        longest = longest * (longest >= self.min_ngram)
        return longest.clip(0, 1) * ALL if self.reach is None else (longest - 1).clip(0) * self.reach

    def _matches(self, text: Tensor, lens: Tensor, places: int) -> Tensor:
        """How many of a row's last `max_ngram` tokens precede each place that a token follows, [B,places]."""
        m = self.max_ngram
        # A window that begins before the text is filled with -1, which equals no token: no match leaves the text.
        ends = torch.arange(places, device=lens.device)[:, None] + torch.arange(m, device=lens.device).flip(0)
        windows = F.pad(text[:, :places], (m - 1, 0), value=-1)[:, ends]
        last = lens[:, None] - 1 - torch.arange(m, device=lens.device)
        recent = text.gather(1, last.clamp_(min=0))
        followed = torch.arange(places, device=lens.device) < lens[:, None] - 1
        return (windows == recent[:, None]).cumprod(-1).sum(-1) * followed


def create(target, *, vocab: DraftVocab | None = None, **settings) -> NGram:
    """An n-gram drafter for the target's tokens, with the settings of `NGram`."""
    return NGram(vocab or DraftVocab(target.vocab), **settings).to(target.device)


def from_name(name: str, target) -> NGram | None:
    """'ngram' or 'ngram:MODE' -> that drafter; None for every other name."""
    kind, _, mode = name.partition(":")
    return create(target, mode=mode or "lookup") if kind == "ngram" else None


def texts_of(cache: KVCache) -> Tensor:
    """Return the committed tokens [B,S], with void ones after them."""
    return cache.layers[0][0, ..., 0, 0]


def lengths_of(cache: KVCache) -> Tensor:
    """Return the match lengths [B,places] at the places that a token follows in some row."""
    return cache.layers[0][1, :, : cache.max_len - 1, 0, 0]


def _ends(cache: KVCache) -> Array:
    """Return the rows' lengths [B], at most `max_len`: a finished row may be longer, and its draft is not used."""
    return cache.lens.numpy().clip(max=cache.max_len)


def match_lengths(text: Array, most: int) -> Array:
    """How many of the last `most` tokens of text [n] end at each place but the last: [n-1]."""
    lengths = np.zeros(len(text) - 1, dtype=np.int32)
    places, count = np.flatnonzero(text[:-1] == text[-1]), 0
    while len(places) and count < most:
        count += 1
        lengths[places] = count
        places = places[places >= count]
        places = places[text[places - count] == text[-1 - count]]
    return lengths


def longer(text: Array, lengths: Array, token: int) -> Array:
    """The match lengths [n-1] one token further on."""
    grown = np.ones_like(lengths)
    grown[1:] += lengths[:-1]
    grown *= text[:-1] == token
    return grown
