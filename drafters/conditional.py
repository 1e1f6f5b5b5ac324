"""Heads that make the slots of a block depend on the tokens drafted before them.

A slot's base logits come from the backbone, whatever was drafted. A conditional head adds what the path to a node
changes of them: the product of a narrow vector with a matrix that has a row for each token. What it needs of a path it
carries along the path, a vector for each node, and no slot is computed twice.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from drafters.vocab import DraftVocab
from specdec.model.layers import Linear, LinearMap


class ConditionalHead(nn.Module):
    """What is carried along a path begins with the anchor. It reads one token after the other, and each slot may
    change it."""

    @abstractmethod
    def begin(self, anchor: Tensor) -> Tensor:
        """anchor [B,1] -> what is carried when it was read, [B,1,C]."""

    @abstractmethod
    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        """Nodes with target ids [B,W], and what their parents' slots left, [B,W,C] -> what is carried on, [B,W,C]."""

    @abstractmethod
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """hidden [B,1,H], what a slot's base logits are made of, behind W paths: carried [B,W,C] -> what `output` reads
        [B,W,R], and what is carried further [B,W,C]. slot: which of those that draft. In training hidden is [B,W,H]."""

    @property
    @abstractmethod
    def output(self) -> LinearMap:
        """Its matrix [U,R], with a row for each token of the draft vocabulary."""

    @abstractmethod
    def set_output(self, output: LinearMap) -> None:
        """Put another in its place."""

    def forward(self, base: Tensor, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """base [B,1,U], the logits of a slot -> the logits of its W paths [B,W,U], and what is carried further. The
        rest is as for `narrow`."""
        low, carried = self.narrow(hidden, carried, slot)
        return base + self.output(low), carried


class Markov(ConditionalHead):
    """DSpark's bigram bias, low-rank: w2 w1[token before] is added to the logits (arXiv 2607.05147)."""

    state = 0  # width of what is carried beside the embedding of the last token

    def __init__(self, vocab: DraftVocab, hidden: int, rank: int):
        super().__init__()
        self.rank = rank
        self.w1 = nn.Embedding(vocab.target_size, rank)
        self.w2 = Linear(rank, vocab.size, bias=False)
        nn.init.normal_(self.w1.weight, std=0.02)

    @property
    def output(self) -> LinearMap:
        return self.w2

    def set_output(self, output: LinearMap) -> None:
        self.w2 = output

    def begin(self, anchor: Tensor) -> Tensor:
        embedded = self.w1(anchor)
        return torch.cat([embedded, embedded.new_zeros(*anchor.shape, self.state)], -1) if self.state else embedded

    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        embedded = self.w1(tokens)
        return torch.cat([embedded, carried[..., self.rank :]], -1) if self.state else embedded

    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        return carried, carried


class GatedMarkov(Markov):
    """The same, where a gate that sees the slot weighs the token's embedding."""

    def __init__(self, vocab: DraftVocab, hidden: int, rank: int):
        super().__init__(vocab, hidden, rank)
        self.gate = Linear(hidden + rank, rank)

    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        hidden = hidden.expand(-1, carried.shape[1], -1)
        gate = self.gate(torch.cat([hidden, carried], -1)).sigmoid()
        return gate * carried, carried


class RecurrentMarkov(Markov):
    """The same, with a state of `rank` numbers that each slot updates from the token before it and from itself."""

    def __init__(self, vocab: DraftVocab, hidden: int, rank: int):
        super().__init__(vocab, hidden, rank)
        self.state = rank
        self.joint = Linear(2 * rank + hidden, 3 * rank)

    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        hidden = hidden.expand(-1, carried.shape[1], -1)
        embedded, state = carried.split_with_sizes([self.rank, self.rank], -1)
        gate, new, out = self.joint(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * new.tanh()
        return out.tanh(), torch.cat([embedded, state], -1)


class Confidence(nn.Module):
    """DSpark's estimate that a slot's token is accepted if those before it are: a linear map of the slot's hidden
    state, and, with a rank, of the Markov embedding of the token before it."""

    def __init__(self, hidden: int, rank: int = 0):
        super().__init__()
        self.rank = rank
        self.proj = Linear(hidden + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden [B,n,H] of slots, embedded [B,n,C] of the tokens before them -> logits [B,n]."""
        features = torch.cat([hidden, embedded], -1) if self.rank else hidden
        return self.proj(features)[..., 0]


HEADS: dict[str, type[ConditionalHead]] = {"markov": Markov, "markov_gated": GatedMarkov, "markov_rnn": RecurrentMarkov}
