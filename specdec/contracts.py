"""What the pieces ask of each other: `DraftState`, and what a drafter and a tree policy must offer.

Shapes are named in `specdec/structs.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from specdec.acceptance import Acceptance
from specdec.model.cache import KVCache
from specdec.model.layers import Copyable, LinearMap
from specdec.ops import Head
from specdec.ops.likely import head_topk
from specdec.structs import DraftTree, DraftVocab, Survivors

Features = Any  # Tensor [B,P,F] of the target; None for drafters without taps


@dataclass
class DraftState:
    """State of a drafter at W positions, the same in decoding and in training.

    Logits are computed on demand: a loss computes them in pieces from `readout` and `head`, and `top` may do without.
    """

    hidden: Tensor  # [B,W,any] what the drafter keeps of each position; a tree policy hands it back to `step`
    readout: Tensor  # [B,W,H] what the head reads; the logits themselves [B,W,U] if there is no head
    head: Head | None = None  # [U,H]
    # [B] of the state that a tree grows from: the number of levels with proposals, 0 for none, which follows from the
    # text alone. None: all levels of the tree.
    levels: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The logits [B,W,U], computed at each access."""
        return self.readout if self.head is None else self.head(self.readout)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (fp32) and draft ids [B,W,k] of the k most likely tokens, best first."""
        return head_topk(self.readout, self.head, k)

    def rows(self, index: Tensor | slice) -> "DraftState":
        """Return the state of the rows `index` [B'], for a slice a view."""
        return self._of(lambda x: x[index])

    def blank(self, rows: int) -> "DraftState":
        """Return a state of zeros for `rows` rows."""
        return self._of(lambda x: x.new_zeros(rows, *x.shape[1:]))

    def _of(self, part: Callable[[Tensor], Tensor]) -> "DraftState":
        """Return the state of these parts of the tensors."""
        levels = None if self.levels is None else part(self.levels)
        return DraftState(part(self.hidden), part(self.readout), self.head, levels)

    def joined(self, other: "DraftState") -> "DraftState":
        """Return the state of these rows, followed by the rows of `other`."""
        levels = None if self.levels is None or other.levels is None else torch.cat([self.levels, other.levels])
        hidden, readout = torch.cat([self.hidden, other.hidden]), torch.cat([self.readout, other.readout])
        return DraftState(hidden, readout, self.head, levels)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a round changes."""
        return [x for x in (self.hidden, self.readout, self.levels) if x is not None]

    def first(self, count: int) -> "DraftState":
        """Return the state of the first `count` of the W positions."""
        return DraftState(self.hidden[:, :count], self.readout[:, :count], self.head)

    def slot(self, level: int, width: int) -> "DraftState":
        """Return the state of `width` equal nodes of tree level `level` (0: the root), for a state that is a block."""
        hidden, readout = (x[:, level, None].expand(-1, width, -1) for x in (self.hidden, self.readout))
        return DraftState(hidden, readout, self.head)


class Children:
    """Rule by which a tree policy takes the children of a node (`specdec.children`).

    By default these are the drafter's most likely tokens, without temperature, filters or noise.
    """

    drawn: bool = False  # from the drafter's distribution: then policies ask `draw`, and say in the tree what it was

    def best(self, state: DraftState, vocab: DraftVocab, level: int | slice, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (fp32) and draft ids [B,W,count] of the best children of W nodes, best first.

        `level` is the tree level of the nodes (0: the root), or a slice with the level of each node.
        """
        return state.top(count)

    def draw(self, logits: Tensor, vocab: DraftVocab, level: int, count: int) -> tuple[Tensor, Tensor]:
        """Draw children without replacement: logits [B,W,U] -> probabilities [B,W,U], draft ids [B,W,count] in order.

        If fewer than `count` tokens have a probability above 0, the most likely other tokens follow.
        """
        raise NotImplementedError


class Drafter(Copyable):
    """Base class of draft models.

    Draft position t holds the feature of token t and the embedding of token t+1, predicts token t+2, and has RoPE
    position t, in training as in decoding. Heads that draft several tokens at once, and lookup drafters, store what
    they need of a position in `hidden`. A drafter without a cache overrides `extend` and `step`; one with a cache also
    `reset` and `admit`; one that can be trained also `unroll`.
    """

    taps: tuple[int, ...] = ()  # which hidden states of the target it reads: indices into Hugging Face `hidden_states`
    vocab: DraftVocab
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
    user: Any = None  # a weak reference to the engine whose texts are in the cache
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
        """Return one line: the hidden states it reads, the tokens it proposes, and its size."""
        taps = f"taps {', '.join(map(str, self.taps))}" if self.taps else "no taps"
        vocab = getattr(self, "vocab", None)
        proposes = f", {vocab.size} of {vocab.target_size} tokens" if vocab is not None else ""
        return f"{type(self).__name__}({taps}{proposes}, {sum(p.numel() for p in self.parameters()):,} parameters)"

    def deepest(self, steps: int) -> int:
        """Return `steps`, or the number of tokens that it can draft ahead if that is smaller."""
        return min(steps, self.max_steps or steps, self.block or steps)

    def heads_in_use(self) -> list[LinearMap]:
        """Return the heads that compute logits over `vocab`; empty for a drafter without any."""
        return []

    def set_heads(self, heads: list[LinearMap]) -> None:
        """Replace `heads_in_use` by these heads, in the same order."""
        raise ValueError(f"{type(self).__name__} has no head")

    def reset(self, rows: int, slots: int) -> None:
        """Drop all state, and make room for `rows` rows of `slots` positions. Rows are in use once admitted."""

    def cache_bytes(self, rows: int, slots: int) -> int:
        """Return the bytes that `reset` allocates, for `engine.memory`."""
        return 0

    def admit(self, row: int, first: Tensor, feats: Features, tokens: Tensor, n: Tensor) -> DraftState:
        """Prefill R new rows, row .. row+R-1, whose earlier state is dropped, and return their state.

        `first` [R] is token 0 of each row, which no `extend` brings. The other arguments are those of `extend`: the
        first n [R] of T positions, feats [R,T,F], tokens [R,T].
        """
        return self.extend(feats, tokens, n, tokens.shape[1])

    def extend(self, feats: Features, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        """Absorb the first n [B] of P committed positions, and return the state (W = 1 or block) at the last of them.

        feats [B,P,F] are the target's features (None without taps), and tokens [B,P] those one position later.
        `max_len` is a host-side upper bound of the number of positions absorbed so far, these included.
        """
        raise NotImplementedError

    def compact(self, survivors: Survivors) -> None:
        """Keep the state of these rows only."""
        if self.cache is not None:
            self.cache.compact(survivors)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        """Expand W nodes of tree level `level` (1-based): tokens [B,W], the parents' hidden [B,W,any].

        ancestors [B,W,level*W]: which of the level*W nodes given so far each node descends from, itself included.
        """
        raise NotImplementedError

    def root(self, first: DraftState) -> DraftState:
        """Return the part of `extend`'s state that gives the root's children (W = 1)."""
        return first if self.block is None else first.slot(0, 1)

    def expand(self, first: DraftState, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        """Return the state of the W nodes of a level: from `step`, or for a block from its slot of that level.

        Tree policies call this. `first` is the state that the tree began with.
        """
        if self.block is None:
            return self.step(tokens, hidden, level, ancestors)
        return first.slot(level, tokens.shape[1])

    def chain(self, first: DraftState, steps: int, children: Children) -> tuple[Tensor, Tensor]:
        """Draft a chain of best tokens. Returns target ids and path log-probabilities, [B,steps] each."""
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
        """Initialise new weights so that drafts start near the target's. Raises ValueError if there is no way."""
        raise ValueError(f"{type(self).__name__} has no start from its target: take init 'random'")

    def confidences(self, first: DraftState, tokens: Tensor) -> Tensor:
        """Return the confidence head's logits [B,n] that each chain token is accepted, given those before."""
        raise ValueError(f"{type(self).__name__} has no confidence head")

    def unroll(self, feats: Features, tokens: Tensor, steps: int, needed: Tensor | None = None) -> Iterator[DraftState]:
        """Yield training states: for each j < steps, the state (W = T) in which row t has drafted j more tokens.

        feats [B,T,F], tokens [B,T] one position later. For j > 0, rows that `needed` [B,T] excludes are not used.
        """
        raise ValueError(f"{type(self).__name__} has nothing to learn")


class TreePolicy:
    """Base class of draft trees: their size, and how they grow.

    Attributes:
        num_draft_tokens: The number N of nodes, including the root.
        steps: The number D of levels below the root.
        topk: The largest number of children of a node.
        samples: Children can be drawn from the drafter's distribution, which the tree then holds (`DraftTree.q`).
        marginals: The tree needs a block of slots that are independent of each other. It then has `within`.
    """

    num_draft_tokens: int
    steps: int
    topk: int
    samples: bool = False
    marginals: bool = False

    def shallower(self, steps: int) -> "TreePolicy":
        """Return the first `steps` levels, 1 to D; or the whole tree, if these levels depend on later ones."""
        return self

    def smaller(self, steps: int) -> "TreePolicy":
        """Return the tree of this kind with `steps` levels, 1 to D. It may have other nodes than this tree."""
        raise NotImplementedError

    def draft_slots(self) -> int:
        """Return the cache slots that the drafter needs beyond the committed positions while a tree grows."""
        raise NotImplementedError

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children) -> DraftTree:
        """Grow a tree of N nodes from the root tokens [B] and their state (W = 1)."""
        raise NotImplementedError

    def replay(self, recording: Any) -> Any:
        """Return the `Accepted` of the tree at every root of a `specdec.recording.Recording`.

        Raises ValueError, one sentence, for what was not recorded.
        """
        raise ValueError(f"{type(self).__name__} cannot be replayed: take DynamicTree, StaticTree, BlockTree or Chain")
