"""One round: draft, verify, commit, extend. It knows nothing of batches, loops or graphs.

Everything in it happens on the device, without waiting: `tests/engine/test_no_sync.py` holds it to that. Only texts
that obey a grammar make their rounds wait (`specdec.engine.sequence.Masks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.children import children_of, kind_for
from specdec.contracts import Drafter, DraftState, TreePolicy
from specdec.engine.clock import Clock, SilentClock
from specdec.engine.fits import checked
from specdec.engine.guide import Guide, Played, Watch
from specdec.engine.held import HOLD
from specdec.engine.prefill import Reading
from specdec.engine.report import Reads
from specdec.engine.sequence import Masks
from specdec.model.cache import KVCache
from specdec.model.target import Target, check_taps
from specdec.ops.likely import logprobs_of, top
from specdec.sampling.draws import sample
from specdec.sampling.noise import Noise, Seed, hashes_of
from specdec.sampling.penalties import Penalties
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict, Verifier


@dataclass
class RoundSettings:
    """What rounds are played with beside the pieces themselves."""

    sampling: Sampling | SamplingBatch
    noise: Noise
    clock: Clock | SilentClock
    penalties: Penalties | None = None
    masks: Masks | None = None  # of grammars
    logprobs: bool = False  # compute those of the emitted tokens
    likely: int = 0  # and so many of the likeliest tokens in the place of each
    steps: Tensor | None = None  # [B] levels of the tree that count for each row; None: all of them

    def shaped(self, logits: Tensor, tree: DraftTree | None = None) -> Tensor:
        """logits [B,N,V] as tokens are drawn from them: with penalties, and as grammars allow."""
        if self.penalties is not None:
            logits = self.penalties(logits, tree)
        return logits if self.masks is None else self.masks(logits, tree)

    def told(self, logits: Tensor, tokens: Tensor, path: Tensor | None = None) -> dict[str, Tensor]:
        """What is told of tokens [...] by the target's own logits [..., V]: fields of `RoundOutput`. With a path [B,P]
        they are those of a tree's nodes [B,N,V], and token k follows node path[:, k]."""
        if not self.logprobs:
            return {}
        if path is not None:
            logits = logits.gather(1, path[..., None].expand(-1, -1, logits.shape[-1]))
        if not self.likely:
            return {"logprobs": logprobs_of(logits, tokens)}
        scores = logits.float().log_softmax(-1)
        values, ids = top(scores, self.likely)
        own = scores.gather(-1, tokens[..., None]).squeeze(-1)  # the same bits as among the likeliest
        return {"logprobs": own, "likely": ids, "likely_logprobs": values}


@dataclass
class RoundOutput:
    """What a round made on the device. tree, verdict and logits are None if nothing was drafted or nobody reads."""

    tokens: Tensor  # [B,P] emitted tokens, as in `Verdict`
    n: Tensor  # [B] how many of them
    logprobs: Tensor | None = None  # [B,P] if asked for
    likely: Tensor | None = None  # [B,P,k] the likeliest tokens in the place of each, best first, if asked for
    likely_logprobs: Tensor | None = None  # [B,P,k] theirs
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    logits: Tensor | None = None  # [B,N,V] of the target at the tree's nodes, penalties taken off: what was verified
    levels: Tensor | None = None  # [B] of the tree: so many count of each row; None: all of them
    experts: Sequence[Tensor] = ()  # by layer, which ones the nodes of all rows chose
    nodes: int = 1  # of the tree, the root included
    played: Played | None = None  # what an adaptive policy is told of it
    watch: Watch | None = None  # and, of one that is recorded, the tensors for that
    launched: bool = False  # in the place of a replay, as what was recorded cannot be run yet

    def to_read(self) -> dict[str, Tensor]:
        """What the host wants to know, by name."""
        made = {"tokens": self.tokens, "counts": self.n, "logprobs": self.logprobs, "levels": self.levels}
        made |= {"likely": self.likely, "likely_logprobs": self.likely_logprobs}
        return {name: x for name, x in made.items() if x is not None}

    def only(self, reads: Reads) -> "RoundOutput":
        """This, without what nobody reads."""
        if self.tree is None or reads >= Reads.LOGITS:
            return self
        if reads < Reads.TREES:
            return replace(self, tree=None, verdict=None, logits=None, experts=())
        return replace(self, tree=replace(self.tree, q=None), logits=None, experts=())


class Round:
    """A target, and with it, for speculation, a drafter, a tree policy and a verifier that fit together.

    Raises ValueError, one sentence, for pieces that do not."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        verifier: Verifier,
        children: str | None = None,
    ):
        """children: which the tree takes above temperature 0, one of `specdec.children.KINDS`; None for those that suit
        the rule best."""
        if (drafter is None) != (policy is None):
            raise ValueError("a drafter needs a tree policy, and a tree policy a drafter")
        if drafter is not None:
            check_taps(drafter.taps, target.config.layers)
            policy = checked(target, drafter, policy, verifier)
            children = kind_for(verifier, policy, children)
        self.target, self.drafter, self.policy, self.verifier = target, drafter, policy, verifier
        self.children = children
        self.path = policy.steps + 1 if policy else 1  # P, the most tokens that a round emits
        self.nodes = policy.num_draft_tokens if policy else 1  # N
        self.taps = drafter.taps if drafter else ()
        self.adapts = False  # an adaptive policy chooses the trees: `Guide`

    @cached_property
    def hashes(self) -> Tensor:
        """[V] of the target's tokens, for `Noise`."""
        return hashes_of(torch.arange(self.target.vocab, device=self.target.device))

    def noise(self, seeds: Sequence[Seed]) -> Noise:
        """The noise of rows of these seeds."""
        return Noise(seeds, self.hashes)

    @cached_property
    def _policies(self) -> list[TreePolicy]:
        """By levels from 1 on, the first levels of the tree."""
        return [self.policy.shallower(steps) for steps in range(1, self.policy.steps)] + [self.policy]

    @cached_property
    def rungs(self) -> list[TreePolicy]:
        """By levels from 1 on, the trees that an adaptive policy chooses from."""
        return [self.policy.smaller(steps) for steps in range(1, self.policy.steps)] + [self.policy]

    def proposed(self, state: DraftState | None) -> Tensor | None:
        """[B] how many levels to draft for each row, 0 to D; None: all of them for all rows."""
        if state is None or state.levels is None:
            return None
        steps = self.policy.steps
        return (state.levels > 0) * steps if self._policies[0] is self.policy else state.levels.clamp(max=steps)

    def target_slots(self, room: int) -> int:
        """Slots of the target's cache for texts of `room` tokens."""
        return room + self.path + self.nodes

    def draft_slots(self, room: int) -> int:
        """Slots that the drafter is asked to keep for texts of `room` tokens."""
        held = HOLD if self.adapts else 0
        return room + self.path + max(self.path, held, self.policy.draft_slots()) if self.policy else 0

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        row: int,
        settings: RoundSettings,
        guide: Guide | None = None,
        reading: Reading | None = None,
    ) -> tuple[Tensor, DraftState | None, dict[str, Tensor]]:
        """Run prompts, right-padded, at once. They take the rows row .. row+R-1 of the cache and of the drafter.
        reading: may have read the only one, and is told what the target made of all.

        Returns the first token of each [R], the drafter's state, and what is told of the tokens."""
        device, longest = cache.lens.device, max(map(len, prompts))
        tokens = torch.tensor([[*prompt] + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        lens = torch.tensor([len(prompt) for prompt in prompts], device=device)
        part = cache.admit(row, len(prompts), longest)
        read = reading and reading.take(prompts)
        if read is None:
            logits, feats = self.target(tokens, part, taps=self.taps, last=lens - 1, prefill=True)
            part.advance(lens, longest)
        else:
            part.take(read.cache, longest)
            logits, feats = read.logits, read.feats
        if reading is not None:
            reading.keep(prompts, part, feats)
        root = self._draw(logits, torch.ones_like(lens), settings, lens - 1)
        told = settings.told(logits[:, 0], root)
        if self.drafter is None:
            return root, None, told
        following = tokens.roll(-1, 1).scatter(1, lens[:, None] - 1, root[:, None])
        admit = self.drafter.admit if guide is None else guide.admit
        return root, admit(row, tokens[:, 0], feats, following, lens), told

    def play(
        self,
        root: Tensor,
        state: DraftState | None,
        cache: KVCache,
        active: Tensor,
        settings: RoundSettings,
        itself: Tensor | None = None,
        levels: Tensor | None = None,
        most: int | None = None,
        guide: Guide | Watch | None = None,
    ) -> tuple[Tensor, DraftState | None, RoundOutput]:
        """One round. root [B]: the last token of each row, which the target has not seen. Rows that are not active [B]
        stand still. itself: ones [B,1,1], for plain rounds where `cache.max_len` is not exact. levels [B]: as
        `proposed` gives them, so that rows do not depend on their neighbours; most: the largest of them, on the host.
        guide: an adaptive policy has chosen `most`, and may leave out nodes of the tree.

        Returns the next root, the drafter's state, and what was emitted."""
        if self.drafter is None or most == 0:
            return self._plain(root, state, cache, active, settings, itself, levels, guide)
        clock, penalties = settings.clock, settings.penalties
        policy = self.policy if most is None else (self._policies if guide is None else self.rungs)[most - 1]
        sampling, noise = settings.sampling, None
        if isinstance(sampling, SamplingBatch) or not sampling.greedy:
            noise = settings.noise.behind(cache.lens, policy.steps + 1)
        children = children_of(self.children, sampling, noise, self.drafter.trust)
        tree = policy.grow(self.drafter, root, state, children)
        if guide is not None:
            tree = guide.cut(tree, state)
        clock.mark("draft")
        if tree is None:
            return self._plain(root, state, cache, active, settings, itself, levels, guide)
        own, feats = self.target(tree.tokens, cache, depth=tree.depth, ancestors=tree.ancestors, taps=self.drafter.taps)
        experts = self.target.chosen_experts()
        logits = settings.shaped(own, tree)
        verdict = self.verifier(tree, logits, sampling, noise)
        if levels is not None:  # where to stop does not depend on what the target said, so the law stays the target's
            verdict.n = torch.minimum(verdict.n, levels + 1)
        if guide is not None:
            guide.verified(tree, verdict)
        n = verdict.n * active
        if penalties is not None:
            penalties.add(verdict.tokens, n)
        told = settings.told(own, verdict.tokens, verdict.path)
        clock.mark("verify")
        max_len = cache.max_len + tree.steps + 1
        cache.commit(verdict.path, n, max_len)
        clock.mark("commit")
        if feats is not None:
            feats = feats.gather(1, verdict.path[..., None].expand(-1, -1, feats.shape[-1]))
        state = self.drafter.extend(feats, verdict.tokens, n, max_len)
        root = verdict.tokens.gather(1, verdict.n[:, None] - 1).squeeze(1)
        clock.mark("draft")
        output = RoundOutput(
            verdict.tokens, verdict.n, tree=tree, verdict=verdict, logits=logits, levels=levels, **told
        )
        output.experts, output.nodes = experts, tree.tokens.shape[1]
        return root, state, output

    def _plain(
        self,
        root: Tensor,
        state: DraftState | None,
        cache: KVCache,
        active: Tensor,
        settings: RoundSettings,
        itself: Tensor | None,
        levels: Tensor | None,
        guide: Guide | Watch | None,
    ) -> tuple[Tensor, DraftState | None, RoundOutput]:
        """One token per row, which the drafter, if there is one, absorbs, or a guide keeps for it."""
        logits, feats = self.target(root[:, None], cache, ancestors=itself, taps=self.taps)
        n, max_len = active.long(), cache.max_len + 1
        token = self._draw(logits, n, settings, cache.lens)
        cache.advance(n, max_len)
        settings.clock.mark("verify")
        told = settings.told(logits, token[:, None])
        output = RoundOutput(token[:, None], torch.ones_like(token), levels=levels, **told)
        if self.drafter is None:
            return token, None, output
        if guide is not None and guide.holds:
            return token, guide.hold(feats, token[:, None], n, state), output
        state = self.drafter.extend(feats, token[:, None], n, max_len)
        settings.clock.mark("draft")
        return token, state, output

    @staticmethod
    def _draw(logits: Tensor, n: Tensor, settings: RoundSettings, last: Tensor) -> Tensor:
        """The next token [B] from logits [B,1,V] behind the position last [B]; the rows of which n [B] is 1, and not 0,
        count it."""
        token = sample(settings.shaped(logits), settings.sampling, settings.noise.behind(last))
        if settings.penalties is not None:
            settings.penalties.add(token, n)
        return token[:, 0]
