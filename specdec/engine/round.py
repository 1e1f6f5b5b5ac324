"""One round: draft, verify, commit, extend. It knows nothing of batches, loops or graphs.

Everything in it happens on the device, without waiting: `tests/engine/test_no_sync.py` holds it to that. Only texts
that obey a grammar make their rounds wait (`specdec.engine.sequence.Masks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from specdec.children import children_of, kind_for
from specdec.contracts import Drafter, DraftState, TreePolicy
from specdec.engine.compatibility import checked
from specdec.engine.controller import ABSORBED, Controller
from specdec.engine.own_parts import Parts, check_drafter
from specdec.engine.prefill import ChunkedPrefill
from specdec.engine.report import Clock, Emission, Positions, RoundReport, SilentClock
from specdec.engine.sequence import Masks
from specdec.model.cache import KVCache
from specdec.model.language_model import LanguageModel
from specdec.model.target import check_taps
from specdec.ops.likely import logprobs_of, top
from specdec.sampling.filters import sample
from specdec.sampling.noise import Noise, RoundNoise, hashes_of
from specdec.sampling.penalties import Penalties
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verifier


@dataclass
class RoundSettings:
    """Settings of rounds, except the parts themselves."""

    sampling: Sampling | SamplingBatch
    noise: Noise
    clock: Clock | SilentClock
    eos: Tensor  # [B,E] EOS ids per row, padded with -1
    penalties: Penalties | None = None
    masks: Masks | None = None  # of grammars
    logprobs: bool = False  # compute those of the emitted tokens
    likely: int = 0  # and so many of the most likely tokens in the place of each
    steps: Tensor | None = None  # [B] levels of the tree that count for each row; None: all of them

    def shaped(self, logits: Tensor, tree: DraftTree | None = None) -> Tensor:
        """Return logits [B,N,V] as tokens are drawn from them: with penalties, and as grammars allow."""
        if self.penalties is not None:
            logits = self.penalties(logits, tree)
        return logits if self.masks is None else self.masks(logits, tree)

    def requested(self, logits: Tensor, tokens: Tensor, path: Tensor | None = None) -> dict[str, Tensor]:
        """Return the requested fields of `Emission` for tokens [...] by the target's own logits [..., V].

        With a path [B,P] the logits are those of a tree's nodes [B,N,V], and token k follows node path[:, k].
        """
        if not self.logprobs:
            return {}
        if path is not None:
            logits = logits.gather(1, path[..., None].expand(-1, -1, logits.shape[-1]))
        if not self.likely:
            return {"logprobs": logprobs_of(logits, tokens)}
        scores = logits.float().log_softmax(-1)
        values, ids = top(scores, self.likely)
        own = scores.gather(-1, tokens[..., None]).squeeze(-1)  # the same bits as in `values`
        return {"logprobs": own, "likely": ids, "likely_logprobs": values}


class Round:
    """A target, and for speculation a drafter, a tree policy and a verifier that fit together."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        verifier: Verifier,
        children: str | None = None,
    ):
        """Raise ValueError unless the parts fit together. children: as for `children.kind_for`."""
        if (drafter is None) != (policy is None):
            raise ValueError("a drafter needs a tree policy, and a tree policy a drafter")
        if drafter is not None:
            check_drafter(drafter)
            check_taps(drafter.taps, target.config.layers)
            policy = checked(target, drafter, cast(TreePolicy, policy), verifier)
            children = kind_for(verifier, policy, children)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.policy: Any = policy  # a `TreePolicy`; None without a drafter
        self.parts = Parts(drafter, policy, verifier)
        self.children = children or "likeliest"
        self.path = policy.steps + 1 if policy else 1  # P, the most tokens that a round emits
        self.nodes = policy.num_draft_tokens if policy else 1  # N
        self.taps = drafter.taps if drafter else ()
        self.adapts = False  # an adaptive policy chooses the trees: `Controller`

    @cached_property
    def hashes(self) -> Tensor:
        """Hashes [V] of the target's tokens, for `Noise`."""
        return hashes_of(torch.arange(self.target.vocab, device=self.target.device))

    @cached_property
    def cut_trees(self) -> list[TreePolicy]:
        """The first 1, 2, ... D levels of the tree."""
        return [self.policy.shallower(steps) for steps in range(1, self.policy.steps)] + [self.policy]

    @cached_property
    def smaller_trees(self) -> list[TreePolicy]:
        """The trees of 1, 2, ... D levels that an adaptive policy chooses from."""
        return [self.policy.smaller(steps) for steps in range(1, self.policy.steps)] + [self.policy]

    def proposed(self, state: DraftState | None) -> Tensor | None:
        """Return how many levels to draft for each row [B], 0 to D; None: all of them for all rows."""
        if state is None or state.levels is None:
            return None
        steps = self.policy.steps
        whole = self.cut_trees[0] is self.policy  # a tree that cannot be cut
        return (state.levels > 0) * steps if whole else state.levels.clamp(max=steps)

    def target_slots(self, room: int) -> int:
        """Return the slots of the target's cache for texts of `room` tokens."""
        return room + self.path + self.nodes

    def draft_slots(self, room: int) -> int:
        """Return the slots that the drafter is asked to store for texts of `room` tokens."""
        absorbed = ABSORBED if self.adapts else 0
        return room + self.path + max(self.path, absorbed, self.policy.draft_slots()) if self.policy else 0

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        row: int,
        settings: RoundSettings,
        controller: Controller | None = None,
        chunked: ChunkedPrefill | None = None,
    ) -> tuple[Tensor, DraftState | None, dict[str, Tensor]]:
        """Prefill prompts, right-padded, at once. They take the rows row .. row+R-1 of the cache and of the drafter.

        chunked: may have prefilled the only prompt already, and stores what the target computed for all of them.

        Returns the first token of each [R], the drafter's state, and the requested fields of `Emission`.
        """
        device, longest = cache.lens.device, max(map(len, prompts))
        tokens = torch.tensor([[*prompt] + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        lens = torch.tensor([len(prompt) for prompt in prompts], device=device)
        part = cache.admit(row, len(prompts), longest)
        read = None if chunked is None else chunked.take(prompts)
        logits: Any
        feats: Any
        if read is None:
            logits, feats = self.target(tokens, part, taps=self.taps, last=lens - 1, prefill=True)
            part.advance(lens, longest)
        else:
            own, logits, feats = read
            part.take(own, longest)
        if chunked is not None:
            chunked.keep(prompts, part, feats)
        root = self._draw(logits, torch.ones_like(lens), settings, lens - 1)
        requested = settings.requested(logits, root)
        if self.drafter is None:
            return root[:, 0], None, requested
        following = tokens.roll(-1, 1).scatter(1, lens[:, None] - 1, root)
        admit = self.drafter.admit if controller is None else controller.admit
        return root[:, 0], self.parts.state(admit, row, tokens[:, 0], feats, following, lens), requested

    def play(
        self,
        root: Tensor,
        state: DraftState | None,
        cache: KVCache,
        active: Tensor,
        settings: RoundSettings,
        levels: Tensor | None = None,
        most: int | None = None,
        controller: Controller | None = None,
    ) -> tuple[Tensor, DraftState | None, RoundReport]:
        """Play one round. Rows that are not active do not change.

        root: [B], the last token of each row, which the target has not seen.
        active: [B] bool.
        levels: [B], as `proposed` returns them, so that a row does not depend on its neighbours.
        most: their maximum, on the host; 0 plays a plain round.
        controller: the policy has chosen `most`, and may leave out nodes of the tree.

        Returns the next root, the drafter's state, and the record of the round.
        """
        clock, noise = settings.clock, None
        tree = None
        if self.drafter is not None and most != 0:
            policy = self.policy
            if most is not None:
                policy = (self.cut_trees if controller is None else self.smaller_trees)[most - 1]
            if isinstance(settings.sampling, SamplingBatch) or not settings.sampling.greedy:
                noise = settings.noise.after(cache.lens, policy.steps + 1)
            children = children_of(self.children, settings.sampling, noise, self.drafter.trust)
            before: Any = state
            tree = self.parts.grow(policy, root, before, children, levels=levels)
            if controller is not None:
                tree = controller.cut(tree, before)
            clock.mark("draft")
        if tree is None:
            feats, n, report = self._decode(root, cache, active, settings)
        else:
            feats, n, report = self._verify(tree, cache, active, settings, noise, levels)
        emission = report.emission
        emission.levels, root = levels, emission.tokens[:, 0]
        if tree is not None:
            root = emission.tokens.gather(1, emission.counts[:, None] - 1).squeeze(1)
        if controller is not None and tree is None and controller.defers:
            report.deferred = Positions(feats, emission.tokens, n)
            return root, state, report
        if controller is not None and tree is not None:
            report.parents, report.path = tree.parents, report.verdict.path
        if self.drafter is None:
            return root, None, report
        state = self.parts.state(self.drafter.extend, feats, emission.tokens, n, cache.max_len)
        clock.mark("draft")
        return root, state, report

    def _verify(
        self,
        tree: DraftTree,
        cache: KVCache,
        active: Tensor,
        settings: RoundSettings,
        noise: RoundNoise | None,
        levels: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, RoundReport]:
        """Verify a tree, commit the accepted path, and return its features, its lengths [B] and the record."""
        own, feats = self.target(tree.tokens, cache, depth=tree.depth, ancestors=tree.ancestors, taps=self.taps)
        experts = self.target.chosen_experts()
        logits = settings.shaped(own, tree)
        verdict = self.parts.verdict(tree, logits, settings.sampling, noise)
        if levels is not None:  # where to stop does not depend on the target's answer: the distribution stays its own
            verdict.n = torch.minimum(verdict.n, levels + 1)
            if not self.verifier.couples:  # a row without levels emits the token of a plain round
                plain = sample(logits[:, :1], settings.sampling, settings.noise.after(cache.lens))
                first = torch.where(levels[:, None] > 0, verdict.tokens[:, :1], plain)
                verdict.tokens = torch.cat([first, verdict.tokens[:, 1:]], 1)
        n = verdict.n * active
        if settings.penalties is not None:
            settings.penalties.add(verdict.tokens, n)
        requested = settings.requested(own, verdict.tokens, verdict.path)
        settings.clock.mark("verify")
        cache.commit(verdict.path, n, cache.max_len + tree.steps + 1)
        settings.clock.mark("commit")
        if feats is not None:
            feats = feats.gather(1, verdict.path[..., None].expand(-1, -1, feats.shape[-1]))
        report = RoundReport(emission=Emission(verdict.tokens, verdict.n, **requested), tree=tree, verdict=verdict)
        report.nodes, report.experts, report.logits = tree.tokens.shape[1], experts, logits
        return feats, n, report

    def _decode(
        self, root: Tensor, cache: KVCache, active: Tensor, settings: RoundSettings
    ) -> tuple[Tensor | None, Tensor, RoundReport]:
        """Verify the root alone, as `_verify` does: each row emits one token."""
        logits, feats = self.target(root[:, None], cache, taps=self.taps)
        n = active.long()
        token = self._draw(logits, n, settings, cache.lens)
        cache.advance(n, cache.max_len + 1)
        settings.clock.mark("verify")
        requested = settings.requested(logits, token)
        return feats, n, RoundReport(emission=Emission(token, torch.ones_like(root), **requested))

    @staticmethod
    def _draw(logits: Tensor, n: Tensor, settings: RoundSettings, last: Tensor) -> Tensor:
        """Draw the next token [B,1] from logits [B,1,V] after position last [B]. Penalties count it where n is 1."""
        token = sample(settings.shaped(logits), settings.sampling, settings.noise.after(last))
        if settings.penalties is not None:
            settings.penalties.add(token, n)
        return token
