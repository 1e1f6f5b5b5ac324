"""The decoding loop: prefill, then rounds of draft, verify, commit, extend."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.cache import KVCache
from specdec.model import Target, check_taps
from specdec.sampling import sample
from specdec.trace import Clock, RowTrace
from specdec.types import Drafter, DraftState, DraftTree, Sampling, TreePolicy, Verdict, Verifier
from specdec.verify import sample_and_match


@dataclass
class Row:
    """One sequence while it is decoded, and its result. It ends after `limit` tokens for the reason `at_limit`.

    finish: 'eos', 'length' (max_new_tokens) or 'context' (the target's context is full).
    """

    prompt: list[int]
    limit: int
    at_limit: str = "length"
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    trace: RowTrace = field(default_factory=RowTrace)

    def add(self, tokens: list[int], eos: frozenset[int]) -> list[int]:
        """Append what still belongs to the text, and return it."""
        kept = tokens[: self.limit - len(self.tokens)]
        end = next((i for i, token in enumerate(kept) if token in eos), None)
        if end is not None:
            kept = kept[: end + 1]
        self.tokens += kept
        if end is not None:
            self.finish = "eos"
        elif len(self.tokens) == self.limit:
            self.finish = self.at_limit
        return kept


@dataclass
class RoundReport:
    """What an observer sees after the prefill and after each round. What the round made on the device is lent: it is
    the engine's again when the observer returns. tree, verdict and logits are None for the prefill and for plain
    decoding."""

    rows: list[Row]  # the same list from the prefill to the end, each row as it is by now
    emitted: list[list[int]]  # per row
    accepted: list[int]  # per row: how many of them were drafted
    sampling: Sampling
    clock: Clock
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    logits: Tensor | None = None  # [B,N,V] of the target at the tree's nodes


@dataclass
class Result:
    rows: list[Row]
    seconds: float  # all of it
    prefill_seconds: float  # until the first token
    parts: dict[str, float]  # seconds in prefill, draft, verify, commit, host, output

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last, without the time that the observer took."""
        return self.seconds - self.prefill_seconds - self.parts.get("output", 0.0)


class Engine:
    """Decodes a batch of prompts with a target, and with a drafter and a tree policy if they are given.

    Everything between two readings of emitted tokens stays on the device.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        verifier: Verifier = sample_and_match,
    ):
        if (drafter is None) != (policy is None):
            raise ValueError("a drafter needs a tree policy, and a tree policy a drafter")
        if drafter is not None:
            check_taps(drafter.taps, target.config.layers)
            if drafter.max_steps is not None and policy.steps > drafter.max_steps:
                raise ValueError(
                    f"steps is {policy.steps}, but this drafter guesses {drafter.max_steps} tokens ahead at most"
                )
            if policy.topk > drafter.vocab.size:
                raise ValueError(
                    f"topk is {policy.topk}, but the draft vocabulary has {drafter.vocab.size} tokens only"
                )
            _check_fit(verifier, policy)
        self.target, self.drafter, self.policy, self.verifier = target, drafter, policy, verifier
        self.device = target.embed.weight.device

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        seed: int = 0,
        eos: frozenset[int] | None = None,
        observer: Callable[[RoundReport], None] | None = None,
    ) -> Result:
        """Continue each prompt (token ids). Rows may differ in length; a row ends at an `eos` id, which belongs to the
        text, after max_new_tokens, or where the target's context ends."""
        start = time.perf_counter()
        sampling = sampling or Sampling()
        eos = self.target.eos if eos is None else eos
        rows = self._rows(prompts, max_new_tokens)
        generator = torch.Generator(self.device).manual_seed(seed)
        clock = Clock(self.device)
        root, state, cache = self._prefill(rows, sampling, generator)
        first = [[token] for token in root.tolist()]
        clock.mark("prefill")
        started = [row.add(t, eos) for row, t in zip(rows, first, strict=True)]
        report = RoundReport(rows, started, [0] * len(rows), sampling, clock)
        prefill_seconds = time.perf_counter() - start
        self._observe(observer, report, clock)
        while any(row.finish is None for row in rows):
            active = torch.tensor([row.finish is None for row in rows], device=self.device)
            # Exact lengths are known here; within the round the caches work with upper bounds.
            cache.bound = max(len(row.prompt) + len(row.tokens) - 1 for row in rows)
            if self.drafter is None:
                root = self.plain_round(root, cache, active, sampling, generator, clock)
                emitted = [[token] for token in root.tolist()]
                report = RoundReport(rows, emitted, [0] * len(rows), sampling, clock)
            else:
                root, state, report = self._reported_round(rows, root, state, cache, active, sampling, generator, clock)
            self._record(rows, report, eos)
            clock.mark("host")
            self._observe(observer, report, clock)
            report.logits = None  # too much to hold through the next round
        return Result(rows, time.perf_counter() - start, prefill_seconds, clock.seconds())

    def _reported_round(
        self, rows: list[Row], root: Tensor, state: DraftState, cache: KVCache, active: Tensor, *how
    ) -> tuple[Tensor, DraftState, RoundReport]:
        """A round, and what it emitted: reading that waits for the device."""
        sampling, _, clock = how
        root, state, tree, verdict, logits = self.round(root, state, cache, active, *how)
        counts = verdict.n.tolist()
        emitted = [t[:n] for t, n in zip(verdict.tokens.tolist(), counts, strict=True)]
        accepted = [n - 1 for n in counts]
        return root, state, RoundReport(rows, emitted, accepted, sampling, clock, tree, verdict, logits)

    @staticmethod
    def _observe(observer: Callable[[RoundReport], None] | None, report: RoundReport, clock: Clock) -> None:
        if observer is not None:
            observer(report)
            clock.mark("output")

    def _rows(self, prompts: list[list[int]], max_new_tokens: int) -> list[Row]:
        context = self.target.config.context
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if not prompts:
            raise ValueError("no prompt was given")
        for prompt in prompts:
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
            vocab = self.target.config.vocab
            if min(prompt) < 0 or max(prompt) >= vocab:
                raise ValueError(
                    f"the prompt holds token {max(prompt)}, but the target's vocabulary has {vocab} tokens only: "
                    "the tokenizer does not belong to it"
                )
            if len(prompt) >= context:
                raise ValueError(
                    f"the prompt has {len(prompt)} tokens, the target's context holds {context}, new ones included"
                )
        room = [context - len(prompt) for prompt in prompts]
        return [
            Row(prompt, min(max_new_tokens, r), "length" if max_new_tokens <= r else "context")
            for prompt, r in zip(prompts, room, strict=True)
        ]

    def _prefill(
        self, rows: list[Row], sampling: Sampling, generator: torch.Generator
    ) -> tuple[Tensor, DraftState | None, KVCache]:
        """Run all prompts, right-padded, at once: first token [B], the drafter's state, and the filled cache."""
        longest = max(len(row.prompt) for row in rows)
        padded = [row.prompt + [0] * (longest - len(row.prompt)) for row in rows]
        tokens = torch.tensor(padded, device=self.device)
        lens = torch.tensor([len(row.prompt) for row in rows], device=self.device)
        room = max(len(row.prompt) + row.limit for row in rows)
        path = self.policy.steps + 1 if self.policy else 1
        nodes = self.policy.num_draft_tokens if self.policy else 1
        cache = self.target.new_cache(len(rows), room + path + nodes)
        taps = self.drafter.taps if self.drafter else ()
        logits, feats = self.target(tokens, cache, taps=taps, last=lens - 1)
        root = sample(logits[:, 0], sampling, generator)
        cache.advance(lens, longest)
        if self.drafter is None:
            return root, None, cache
        self.drafter.reset(len(rows), room + path + max(path, self.policy.draft_slots()), tokens[:, 0])
        following = tokens.roll(-1, 1).scatter(1, lens[:, None] - 1, root[:, None])
        return root, self.drafter.extend(feats, following, lens, longest), cache

    def round(
        self,
        root: Tensor,
        state: DraftState,
        cache: KVCache,
        active: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
        clock: Clock,
    ) -> tuple[Tensor, DraftState, DraftTree, Verdict, Tensor]:
        """One round, free of host synchronisation. Rows that are not active [B] stand still.

        Returns the next root, the drafter's state, and what was drafted, decided and computed: the tree, the verdict
        and the target's logits [B,N,V]."""
        tree = self.policy.grow(self.drafter, root, state, sampling, generator)
        clock.mark("draft")
        logits, feats = self.target(
            tree.tokens, cache, depth=tree.depth, ancestors=tree.ancestors, taps=self.drafter.taps
        )
        verdict = self.verifier(tree, logits, sampling, generator)
        clock.mark("verify")
        n = verdict.n * active
        bound = cache.bound + tree.steps + 1
        cache.commit(verdict.path, n, bound)
        clock.mark("commit")
        if feats is not None:
            feats = feats.gather(1, verdict.path[..., None].expand(-1, -1, feats.shape[-1]))
        state = self.drafter.extend(feats, verdict.tokens, n, bound)
        root = verdict.tokens.gather(1, verdict.n[:, None] - 1).squeeze(1)
        clock.mark("draft")
        return root, state, tree, verdict, logits

    def plain_round(
        self,
        root: Tensor,
        cache: KVCache,
        active: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
        clock: Clock,
    ) -> Tensor:
        """One token per row without a drafter."""
        logits, _ = self.target(root[:, None], cache)
        token = sample(logits[:, 0], sampling, generator)
        cache.advance(active.long(), cache.bound + 1)
        clock.mark("verify")
        return token

    def _record(self, rows: list[Row], report: RoundReport, eos: frozenset[int]) -> None:
        for i, row in enumerate(rows):
            if row.finish is not None:
                report.emitted[i], report.accepted[i] = [], 0
                continue
            row.trace.accepted.append(report.accepted[i])
            kept = row.add(report.emitted[i], eos)
            row.trace.emitted.append(len(kept))
            report.emitted[i] = kept
            report.accepted[i] = min(report.accepted[i], len(kept))


def _check_fit(verifier: Verifier, policy: TreePolicy) -> None:
    if verifier.needs_q and not policy.samples:
        raise ValueError(
            f"{verifier} needs to know what the children of a node were drawn from, and {type(policy).__name__} does "
            "not draw them: use a tree that samples (trees.SampledTree, or --sample-draft)"
        )
    if verifier.chains_only and policy.topk > 1:
        raise ValueError(
            f"{verifier} verifies chains only, and this tree's nodes have up to {policy.topk} children: take topk 1"
        )
