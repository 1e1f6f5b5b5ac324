"""Drafts from the text itself: what followed the last time these words were written.

Nothing is learnt. A position is remembered by its matches with the committed text, prompt and output: lengths[j] is the
length of the longest common suffix of the position's text and of the committed text up to token j. One more token x
gives lengths'[j] = lengths[j-1] + 1 where token j is x, and 0 elsewhere, which is what a suffix automaton keeps track
of, for all places at once. The tokens that followed the matches are the candidates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.vocab import DraftVocab
from specdec.contracts import Drafter, DraftState

MODES = {"lookup": 3, "suffix": 16}  # and how many committed tokens of a match each of them counts
BASE = 4.0  # 2 to 8 draft alike


class NGram(Drafter):
    """A drafter without weights. A match of n tokens weighs BASE^n, at least `min_ngram` and at most `max_ngram`
    committed ones counted; all tokens together weigh 1, evenly, so that without a match the draft is uniform.

    mode 'lookup': a candidate weighs as its best match, and among equally long ones an earlier outweighs a later. The
    chain is prompt lookup decoding (Saxena 2023), with the first occurrence as in transformers and vLLM.
    mode 'suffix': a candidate weighs as all its matches together: frequencies after every suffix of the text, longer
    suffixes counting more (after SuffixDecoding, arXiv 2411.04975).
    """

    capturable = False  # what it remembers of a position grows with the text

    def __init__(
        self,
        vocab: DraftVocab,
        mode: str = "lookup",
        max_ngram: int | None = None,
        min_ngram: int = 1,
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"the n-gram drafter's mode must be one of {', '.join(MODES)}, got {mode!r}")
        max_ngram = MODES[mode] if max_ngram is None else max_ngram
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must lie between 1 and max_ngram, got {min_ngram} and {max_ngram}")
        self.vocab, self.mode, self.max_ngram, self.min_ngram = vocab, mode, max_ngram, min_ngram
        self.memory: Tensor | None = None  # [R,S] committed tokens, made when the first row tells the device

    def reset(self, rows: int, slots: int) -> None:
        self.memory, self.sizes = None, (rows, slots + 1)

    def cache_bytes(self, rows: int, slots: int) -> int:
        return 8 * rows * (slots + 1)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        if self.memory is None:
            self.memory, self.lens = first.new_zeros(self.sizes), first[:0]
        end = row + len(first)
        self.memory[row:end, 0] = first
        self.memory[row:end, 1 : tokens.shape[1] + 1] = tokens
        self.lens = torch.cat([self.lens[:row], n + 1, self.lens[end:]])
        self.history = self.memory[: len(self.lens)]  # of the rows in use
        lens = self.lens[row:end]
        lengths = self._committed_matches(self.memory[row:end], lens, tokens.shape[1])
        return self._state(self.memory[row:end], lens, lengths[:, None])

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        places = self.lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.history.scatter_(1, places, tokens)
        self.lens = self.lens + n
        lengths = self._committed_matches(self.history, self.lens, max_len)
        return self._state(self.history, self.lens, lengths[:, None])

    def compact(self, index: Tensor) -> None:
        self.memory[: len(index)] = self.history[index]
        self.history, self.lens = self.memory[: len(index)], self.lens[index]

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        """hidden [B,W,S] are the parents' match lengths: the path needs no looking up."""
        same = self.history[:, None, : hidden.shape[-1]] == tokens[..., None]
        return self._state(self.history, self.lens, torch.where(same, F.pad(hidden, (1, -1)) + 1, 0))

    def _committed_matches(self, history: Tensor, lens: Tensor, places: int) -> Tensor:
        """Of rows history [B,S], lens [B]: how many of the last `max_ngram` tokens stand at each place, [B,places]."""
        m = self.max_ngram
        # A window that begins before the text is filled with -1, which equals no token: no match leaves the text.
        windows = F.pad(history[:, :places], (m - 1, 0), value=-1).unfold(1, m, 1)
        last = lens[:, None] - 1 - torch.arange(m, device=lens.device)
        recent = history.gather(1, last.clamp_(min=0))
        return (windows.flip(-1) == recent[:, None]).cumprod(-1).sum(-1)

    def _state(self, history: Tensor, lens: Tensor, lengths: Tensor) -> DraftState:
        """Rows history [B,S], lens [B], match lengths [B,W,S] -> the distribution of the next token. Place j votes for
        token j+1."""
        b, w, places = lengths.shape
        place = torch.arange(places, device=lengths.device)
        followed = place < lens[:, None, None] - 1
        matched = torch.where(followed & (lengths >= self.min_ngram), lengths, 0)
        longest = matched.amax(-1, keepdim=True)
        exponent = (matched - longest).float()  # relative to the longest: no power overflows
        if self.mode == "lookup":
            exponent = exponent - place / lens[:, None, None]  # by the row's own length, whatever the batch
        weights = torch.where(matched > 0, BASE**exponent, 0.0)
        candidates = history[:, None, 1 : places + 1].expand(b, w, places)
        scores = weights.new_zeros(b, w, self.vocab.target_size)
        scores.scatter_reduce_(2, candidates, weights, "amax" if self.mode == "lookup" else "sum")
        even = (BASE ** -longest.float() / self.vocab.target_size).clamp_(min=torch.finfo(torch.float32).tiny)
        return DraftState(lengths, self.vocab.select((scores + even).log()))


def create(target, *, vocab: DraftVocab | None = None, **settings) -> NGram:
    """An n-gram drafter for the target's tokens, with the settings of `NGram`."""
    return NGram(vocab or DraftVocab(target.vocab), **settings)


def from_name(name: str, target) -> NGram | None:
    """'ngram' or 'ngram:MODE' -> that drafter; None for every other name."""
    kind, _, mode = name.partition(":")
    return create(target, mode=mode or "lookup") if kind == "ngram" else None
