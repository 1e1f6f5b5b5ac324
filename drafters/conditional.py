"""Heads that make the slots of a block depend on the tokens drafted before them.

A slot's base logits come from the backbone, whatever was drafted. A conditional head adds what the path to a node
changes of them: the product of a narrow vector with a matrix that has a row for each token. What it needs of a path it
carries along the path, a vector for each node, and no slot is computed twice.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.layers import SumHead
from specdec.drafters.vocab import DraftVocab
from specdec.model.layers import Linear, LinearMap


class ConditionalHead(nn.Module):
    """Change a slot's logits by the tokens drafted before it.

    The carried state of a path begins with the anchor. The head reads one token after the other, and each slot may
    change the state. A subclass takes the draft vocabulary, the target's embedding [V,H], the width R, and its own
    `settings`.
    """

    rank: int  # its width, of most R
    head: LinearMap  # [U,R], with a row for each token of the draft vocabulary
    state = 0  # width of what is carried, without the embedding of the last token
    candidates = 0  # it chooses among so many tokens, the best by the base logits; 0: among all
    own_settings: tuple[str, ...] = ()  # names of further settings

    def settings(self) -> dict[str, int]:
        """What else it is made of, by name."""
        return {name: getattr(self, name) for name in self.own_settings}

    def begin(self, anchor: Tensor) -> Tensor:
        """Return the state [B,1,C] after reading the anchor [B,1]."""
        return self.read(anchor, self.head.weight.new_zeros(*anchor.shape, self.state))

    @abstractmethod
    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        """Nodes with target ids [B,W], and what their parents' slots left, [B,W,C] -> what is carried on, [B,W,C]."""

    @abstractmethod
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return the input of `head` [B,W,R] and the next state [B,W,C] of W paths at a slot.

        hidden: the slot's hidden state [B,1,H], in training [B,W,H]. slot: its number among those that draft.
        """

    def forward(self, base: Tensor, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return the logits of a slot's W paths [B,W,U] and their next states, from its base logits [B,1,U].

        The other arguments are those of `narrow`.
        """
        low, carried = self.narrow(hidden, carried, slot)
        return base + self.head(low), carried

    def joined(self, base: LinearMap) -> SumHead:
        """What makes a slot's logits of its hidden state, which the head `base` reads, and of what `head` reads."""
        return SumHead(base, self.head)


class Markov(ConditionalHead):
    """DSpark's bigram bias, low-rank: head(embed[token before]) is added to the logits (arXiv 2607.05147)."""

    def __init__(self, vocab: DraftVocab, embedding: Tensor, rank: int):
        """Build an embedding of all target tokens and a head to the draft vocabulary, both `rank` wide."""
        super().__init__()
        self.rank = rank
        self.embed = nn.Embedding(vocab.target_size, rank)
        self.head = Linear(rank, vocab.size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    @override
    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        return torch.cat([embedded, carried[..., -self.state :]], -1) if self.state else embedded

    @override
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        return carried, carried


class GatedMarkov(Markov):
    """The same, where a gate that sees the slot weighs the token's embedding."""

    def __init__(self, vocab: DraftVocab, embedding: Tensor, rank: int):
        """Add a gate that reads the slot's hidden state and the token's embedding to `Markov`."""
        super().__init__(vocab, embedding, rank)
        self.gate = Linear(embedding.shape[1] + rank, rank)

    @override
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        hidden = hidden.expand(-1, carried.shape[1], -1)
        gate = self.gate(torch.cat([hidden, carried], -1)).sigmoid()
        return gate * carried, carried


class RecurrentMarkov(Markov):
    """The same, with a state of `rank` numbers that each slot updates from the token before it and from itself."""

    def __init__(self, vocab: DraftVocab, embedding: Tensor, rank: int):
        """Add a gated update of a state of width `rank` to `Markov`."""
        super().__init__(vocab, embedding, rank)
        self.state = rank
        self.joint = Linear(2 * rank + embedding.shape[1], 3 * rank)

    @override
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        hidden = hidden.expand(-1, carried.shape[1], -1)
        embedded, state = carried.split_with_sizes([self.rank, self.rank], -1)
        gate, new, out = self.joint(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * new.tanh()
        return out.tanh(), torch.cat([embedded, state], -1)


class Domino(ConditionalHead):
    """Add Domino's residual to a slot's logits (arXiv 2605.29707).

    A GRU reads the embeddings of the tokens up to a slot, and a narrow MLP reads its state and the slot. The state is
    carried along the path, where the authors' code reads the block again.
    """

    embedding: Tensor  # [V,H]
    own_settings = ("state", "prefix")

    def __init__(self, vocab: DraftVocab, embedding: Tensor, rank: int, state: int = 1024, prefix: int = 1):
        """state: width of the GRU. prefix: so many of the first slots that draft keep their base logits."""
        super().__init__()
        self.rank, self.state, self.prefix = rank, state, prefix
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        hidden = embedding.shape[1]
        self.token, self.past = Linear(hidden, 3 * state, bias=False), Linear(state, 3 * state, bias=False)
        self.down, self.head = Linear(hidden + state, rank, bias=False), Linear(rank, vocab.size, bias=False)

    @override
    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        new, old = self.token(F.embedding(tokens, self.embedding).to(carried)), self.past(carried)
        (reset, update, new), (old_reset, old_update, old) = new.chunk(3, -1), old.chunk(3, -1)
        update = (update + old_update).sigmoid()
        return update * carried + (1 - update) * (new + (reset + old_reset).sigmoid() * old).tanh()

    @override
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if slot < self.prefix:
            return carried.new_zeros(*carried.shape[:-1], self.rank), carried
        hidden = hidden.expand(-1, carried.shape[1], -1)
        return F.silu(self.down(torch.cat([hidden, carried], -1))), carried


class Selector(ConditionalHead):
    """Select among a slot's best tokens by their path (DFlash2).

    Each of the best tokens by the base logits is scored with the token before it and with the slot, by the product of
    three narrow vectors. No other token is proposed.
    """

    own_settings = ("candidates",)

    def __init__(self, vocab: DraftVocab, embedding: Tensor, rank: int, candidates: int = 16):
        """Build vectors of width `rank`, and let each slot propose its `candidates` best tokens by the base logits."""
        super().__init__()
        self.rank, self.candidates = rank, candidates
        self.embed = nn.Embedding(vocab.target_size, rank)
        self.slot = Linear(embedding.shape[1], rank, bias=False)
        self.head = Linear(rank, vocab.size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    @override
    def read(self, tokens: Tensor, carried: Tensor) -> Tensor:
        return self.embed(tokens)

    @override
    def narrow(self, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        return carried * self.slot(hidden), carried

    @override
    def forward(self, base: Tensor, hidden: Tensor, carried: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        low, carried = self.narrow(hidden, carried, slot)
        best, ids = base.topk(min(self.candidates, base.shape[-1]))  # [B,1,k]
        scores = best + low @ F.embedding(ids[:, 0], self.head.weight).mT
        logits = base.new_full((*low.shape[:2], base.shape[-1]), -torch.inf)
        return logits.scatter_(2, ids.expand(scores.shape), scores), carried

    @override
    def joined(self, base: LinearMap) -> SumHead:
        return AmongBest(self.candidates, base, self.head)


class AmongBest(SumHead):
    """The sum for the best tokens by the first head's logits, and nothing else."""

    def __init__(self, candidates: int, *heads: LinearMap):
        """Add the logits of `heads` for the `candidates` best tokens by the first head's logits."""
        super().__init__(*heads)
        self.candidates = candidates

    @override
    def __call__(self, x: Tensor) -> Tensor:
        base, *others = self.parts(x)
        ids, logits = base.topk(min(self.candidates, base.shape[-1])).indices, sum(others, base)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, logits.gather(-1, ids))


class Confidence(nn.Module):
    """Estimate whether a slot's token is accepted if all tokens before it are (DSpark, arXiv 2607.05147).

    The estimate is a linear map of the slot's hidden state and, with a rank, of the Markov embedding of the token
    before it.
    """

    def __init__(self, hidden: int, rank: int = 0):
        """Read hidden states of width `hidden`, and embeddings of width `rank` if that is not 0."""
        super().__init__()
        self.rank = rank
        self.proj = Linear(hidden + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return logits [B,n] of slots with hidden states [B,n,H], after tokens with embeddings [B,n,C]."""
        features = torch.cat([hidden, embedded], -1) if self.rank else hidden
        return self.proj(features)[..., 0]


HEADS: dict[str, type[ConditionalHead]] = {
    "markov": Markov,
    "markov_gated": GatedMarkov,
    "markov_rnn": RecurrentMarkov,
    "domino": Domino,
    "selector": Selector,
}


def head_of(
    kind: str | None, vocab: DraftVocab, embedding: Tensor, rank: int, settings: Mapping[str, int]
) -> ConditionalHead | None:
    """The conditional head of a name. Raises ValueError for a name or a setting that is not there."""
    if kind is None:
        return None
    if kind not in HEADS:
        raise ValueError(f"there is no conditional head {kind!r}: choose one of {', '.join(HEADS)}")
    try:
        return HEADS[kind](vocab, embedding, rank, **settings)
    except TypeError as error:
        raise ValueError(f"head: {error}") from None
