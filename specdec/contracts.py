"""What the pieces ask of each other: `DraftState`, and what a drafter and a tree policy must offer.

Shapes are named in `specdec/structs.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.acceptance import Acceptance
from specdec.model.cache import KVCache
from specdec.model.layers import LinearMap
from specdec.ops import Head
from specdec.ops.likely import head_topk
from specdec.structs import DraftTree, Survivors

Features = Any  # Tensor [B,P,F] of the target; None for drafters without taps


@dataclass
class DraftState:
    """What a drafter knows of W positions: the same in decoding and in training.

    The logits are not made before they are asked for. A loss makes them in pieces from `readout` and `head`, so that no
    [B,T,U] tensor need exist, and `top` may do without them.
    """

    hidden: Tensor  # [B,W,any] what the drafter keeps of each position; a tree policy hands it back to `step`
    readout: Tensor  # [B,W,H] what the head reads; the logits themselves [B,W,U] if there is no head
    head: Head | None = None  # [U,H]
    # [B] of the state that a tree grows from: the number of levels with proposals, 0 for none, which follows from the
    # text alone. None: all levels of the tree.
    levels: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """[B,W,U], computed at each access."""
        return self.readout if self.head is None else self.head(self.readout)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities (fp32) and draft ids [B,W,k] of the k most likely tokens, best first."""
        return head_topk(self.readout, self.head, k)

    def compact(self, index: Tensor) -> "DraftState":
        """The rows index [B'] only."""
        levels = None if self.levels is None else self.levels[index]
        return DraftState(self.hidden[index], self.readout[index], self.head, levels)

    def joined(self, other: "DraftState") -> "DraftState":
        """These rows, and below them the rows of `other`."""
        levels = None if self.levels is None or other.levels is None else torch.cat([self.levels, other.levels])
        hidden, readout = torch.cat([self.hidden, other.hidden]), torch.cat([self.readout, other.readout])
        return DraftState(hidden, readout, self.head, levels)

    def blank(self, rows: int) -> "DraftState":
        """The state of so many rows of which nothing is known."""
        hidden, readout = (x.new_zeros(rows, *x.shape[1:]) for x in (self.hidden, self.readout))
        levels = None if self.levels is None else self.levels.new_zeros(rows, *self.levels.shape[1:])
        return DraftState(hidden, readout, self.head, levels)

    def first(self, count: int) -> "DraftState":
        """The first `count` of the W positions."""
        return DraftState(self.hidden[:, :count], self.readout[:, :count], self.head)

    def slot(self, level: int, width: int) -> "DraftState":
        """Of a block, the state of `width` nodes of tree level `level` (0: the root): all of them the same."""
        at = slice(level, level + 1)
        return DraftState(
            self.hidden[:, at].expand(-1, width, -1), self.readout[:, at].expand(-1, width, -1), self.head
        )


class Vocabulary(Protocol):
    """The tokens that a drafter can propose."""

    size: int  # U
    target_size: int  # V

    @property
    def ids(self) -> Tensor | None:
        """The target's ids [U] of the tokens; None for all."""

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> target vocabulary ids, any shape."""

    def from_target(self, target_ids: Tensor) -> Tensor:
        """Target vocabulary ids -> draft vocabulary ids, any shape; -1 for tokens that cannot be proposed."""

    def select(self, logits: Tensor) -> Tensor:
        """Columns of the draft vocabulary: [..., V] -> [..., U]."""


class Children:
    """Which children a tree policy takes (`specdec.children`)."""

    drawn: bool = False  # from the drafter's distribution: then policies ask `draw`, and say in the tree what it was

    def best(self, state: DraftState, vocab: Vocabulary, level: int | slice, count: int) -> tuple[Tensor, Tensor]:
        """The best `count` children of the W nodes of tree level `level` (0: the root), or of a node of each level of a
        slice: log-probabilities (fp32) and draft ids [B,W,count], best first."""
        raise NotImplementedError

    def draw(self, logits: Tensor, vocab: Vocabulary, level: int, count: int) -> tuple[Tensor, Tensor]:
        """logits [B,W,U] -> the probabilities [B,W,U] that children are drawn from, and `count` draft ids, in order,
        without replacement. If fewer have a probability above 0, the most likely other tokens follow."""
        raise NotImplementedError


class Drafter(nn.Module):
    """A draft model. Draft position t holds the feature of token t and the embedding of token t+1, predicts token t+2,
    and has RoPE position t, in training as in decoding. Heads that guess several tokens ahead at once, or look the
    continuation up, fit too: what they remember of a position is their `hidden`.

    A drafter that keeps nothing of the rows overrides `extend` and `step`. One that has a cache overrides `reset` and
    `admit` too, and one that learns `unroll`.
    """

    taps: tuple[int, ...] = ()  # which hidden states of the target it reads: indices into Hugging Face `hidden_states`
    vocab: Vocabulary
    max_steps: int | None = None  # no tree may be deeper; None: any may
    # How many tokens one `extend` guesses: its state then has W = block, slot k for tree level k+1, and no tree policy
    # calls `step`. None: `extend` gives the root's position (W = 1), and `step` all others.
    block: int | None = None
    # Of a block: a slot depends on the tokens drafted before it. Then its logits come from `root` and `expand` only.
    conditioned: bool = False
    # All that `extend` and `step` keep is `cache`, its tensors stay where they are, and shapes depend on its `max_len`
    # only: then CUDA graphs can hold them (docs/graphs.md).
    capturable: bool = False
    cache: KVCache | None = None
    keeps_first: bool = False  # that cache holds token 0 of a row too, which `admit` alone brings
    confident: bool = False  # has a confidence head: `confidences`
    abstains: bool = False  # proposes nothing where it knows nothing, and says so in `DraftState.levels`
    learns: bool = False  # has an `unroll`
    chains_only: bool = False  # its states do not distinguish siblings, so it needs trees of topk 1
    # Of training: keep what enters a layer only, and compute it again for gradients. None: there is no such way.
    recompute: bool | None = None
    # Weight of log q where a tree knows the noise that the target draws by (`specdec.children`): 1 if log q is as close
    # to the target's log p in its tails as at its peak, less where q is sharper.
    trust: float = 0.8
    # [B,T] for the next `unroll`: rows hold several texts. Tokens of one text have equal numbers; texts do not see
    # each other.
    documents: Tensor | None = None  # None: one text each
    first_tokens: Tensor | None = None  # [B] for the next `unroll`: token 0 of each row, which it does not bring
    tap_width: int | None = None  # the target's hidden size, where it is not `shape.hidden`
    switches: Any = ""  # the settings in which drafters of one class differ; `str` distinguishes them
    conventions: Mapping[str, str] = MappingProxyType({})  # how a checkpoint was read, for reports
    acceptance: Acceptance | None = None  # what its `acceptance.json` says
    recipe: Mapping[str, object] | None = None  # how to make this drafter again (`specdec.drafters.formats.recipe`)

    def __repr__(self) -> str:
        """One line: what it reads, what it proposes, and its size."""
        taps = f"taps {', '.join(map(str, self.taps))}" if self.taps else "no taps"
        vocab = getattr(self, "vocab", None)
        proposes = f", {vocab.size} of {vocab.target_size} tokens" if vocab is not None else ""
        return f"{type(self).__name__}({taps}{proposes}, {sum(p.numel() for p in self.parameters()):,} parameters)"

    def deepest(self, steps: int) -> int:
        """`steps`, or how many tokens it can guess ahead if those are fewer."""
        return min(steps, self.max_steps or steps, self.block or steps)

    def heads_in_use(self) -> list[LinearMap]:
        """The heads that make logits over `vocab`; empty for a drafter without any."""
        return []

    def set_heads(self, heads: list[LinearMap]) -> None:
        """Put other heads in the place of `heads_in_use`."""
        raise ValueError(f"{type(self).__name__} has no head")

    def reset(self, rows: int, slots: int) -> None:
        """Forget everything; make room for `rows` rows of `slots` positions. None of them is in use before it is
        admitted."""

    def cache_bytes(self, rows: int, slots: int) -> int:
        """Bytes of what `reset` keeps, for `engine.memory`."""
        return 0

    def admit(self, row: int, first: Tensor, feats: Features, tokens: Tensor, n: Tensor) -> DraftState:
        """Prefill: R rows join. They take the places row .. row+R-1; those before are in use already. What was known of
        the places taken is forgotten.

        first [R]: token 0 of each row, the only one that no `extend` brings. The rest is as for `extend`: the first n
        [R] of T positions, feats [R,T,F], tokens [R,T]. Returns the state of the new rows."""
        return self.extend(feats, tokens, n, tokens.shape[1])

    def extend(self, feats: Features, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        """Absorb the first n [B] of P committed positions: features [B,P,F] of the target (None without taps), tokens
        [B,P] one further on.

        `max_len` is a host-side upper bound of the number of positions absorbed so far, these included. Returns the
        state (W = 1, or W = block) at the last absorbed position."""
        raise NotImplementedError

    def compact(self, survivors: Survivors) -> None:
        """Keep the state of these rows only."""
        if self.cache is not None:
            self.cache.compact(survivors)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        """Expand W nodes of tree level `level` (1-based): tokens [B,W], the parents' hidden [B,W,any], and which of the
        level*W nodes given so far each node descends from, itself included: ancestors [B,W,level*W]."""
        raise NotImplementedError

    def root(self, first: DraftState) -> DraftState:
        """Return the part of `extend`'s state that gives the root's children (W = 1)."""
        return first if self.block is None else first.slot(0, 1)

    def expand(self, first: DraftState, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        """What tree policies call: the state of the W nodes of a level, by a `step`, or, if `first`, the state that the
        tree began with, is a block, by its slot for that level."""
        if self.block is None:
            return self.step(tokens, hidden, level, ancestors)
        return first.slot(level, tokens.shape[1])

    def chain(self, first: DraftState, steps: int, children: Children) -> tuple[Tensor, Tensor]:
        """Draft a chain: the best token, and the best token after it, `steps` times. Returns target ids and the
        log-probabilities of the path so far, [B,steps] each."""
        state, tokens, gains = self.root(first), [], []
        every = first.hidden.new_ones(len(first.hidden), 1, steps, dtype=torch.bool)
        for level in range(1, steps + 1):
            gain, draft_id = (x.squeeze(-1) for x in children.best(state, self.vocab, level - 1, 1))  # [B,1]
            tokens.append(self.vocab.to_target(draft_id))
            gains.append(gain)
            if level < steps:
                state = self.expand(first, tokens[-1], state.hidden, level, every[..., :level])
        return torch.cat(tokens, 1), torch.cat(gains, 1).cumsum(1)

    def start_from(self, target: Any) -> None:
        """Change fresh weights so that it begins with guesses of the target's. Raises ValueError if there is no way."""
        raise ValueError(f"{type(self).__name__} has no start from its target: take init 'random'")

    def confidences(self, first: DraftState, tokens: Tensor) -> Tensor:
        """Return logits [B,n] from the confidence head for chain tokens [B,n] after the state `first`: that each token
        is accepted, given that those before it are."""
        raise ValueError(f"{type(self).__name__} has no confidence head")

    def unroll(self, feats: Features, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        """Training, for drafters that learn: the same module at the same positions. feats [B,T,F], tokens [B,T] one
        position later; yields for j < steps the state (W = T) in which row t has drafted j tokens beyond its own. Of
        j > 0 the rows that `needed` [B,T] leaves out are not used."""
        raise ValueError(f"{type(self).__name__} has nothing to learn")


class TreePolicy(Protocol):
    @property
    def num_draft_tokens(self) -> int:
        """N"""

    @property
    def steps(self) -> int:
        """D"""

    @property
    def topk(self) -> int:
        """The most children that a node can have."""

    @property
    def samples(self) -> bool:
        """Children can be drawn from the drafter's distribution; the tree then says which (DraftTree.q)."""

    @property
    def marginals(self) -> bool:
        """The tree needs a block whose slots do not depend on each other's tokens, and calls no `expand`. Then it has
        `within`, the tree over a block of so many slots."""

    def shallower(self, steps: int) -> "TreePolicy":
        """Return the tree of the first `steps` levels, 1 to D. A tree whose first levels depend on the later ones
        returns itself, with all levels."""

    def smaller(self, steps: int) -> "TreePolicy":
        """The tree of this kind that goes `steps` levels deep, 1 to D. It may keep other nodes than this one."""

    def draft_slots(self) -> int:
        """Cache slots that the drafter needs beyond the committed positions while a tree grows."""

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children) -> DraftTree:
        """root [B], state with W = 1 -> a tree of N nodes."""

    def replay(self, recording: Any) -> Any:
        """What the tree would have accepted at every root of a `specdec.recording.Recording`: its `Accepted`."""
