"""The decoding loop: prefill, then rounds of draft, verify, commit, extend."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState, TreePolicy
from specdec.engine.batch import Live, Outcome
from specdec.engine.clock import Clock
from specdec.engine.graphs import Backend, make_graphs
from specdec.engine.memory import Request, check, free_bytes, plan
from specdec.engine.overlap import Rounds, read_late
from specdec.engine.sequence import Row, Stop, make_rows
from specdec.model.cache import KVCache
from specdec.model.target import Target, check_taps
from specdec.sampling.draws import sample
from specdec.sampling.filters import settings_of
from specdec.sampling.likely import logprobs_of
from specdec.sampling.penalties import Penalties
from specdec.types import DraftTree, Sampling, SamplingBatch, Verdict, Verifier
from specdec.verify import SampleAndMatch, sample_and_match


@dataclass
class RoundReport:
    """What an observer sees after the prefill and after each round. What the round made on the device is lent: it is
    the engine's again when the observer returns. tree, verdict and logits are None for the prefill and for plain
    decoding."""

    rows: list[Row]  # the same list from the prefill to the end, each row as it is by now
    emitted: list[list[int]]  # per row
    accepted: list[int]  # per row: how many of them were drafted
    sampling: Sampling | SamplingBatch  # of the rows in `places`
    clock: Clock
    places: list[int]  # the rows that tree, verdict and logits hold, ascending: rows that have ended may be dropped
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    logprobs: list[list[float]] | None = None  # per row, of what a round emitted before any cut; None if not asked for
    logits: Tensor | None = None  # [B,N,V] of the target at the tree's nodes, penalties taken off: what was verified


@dataclass
class Result:
    rows: list[Row]
    seconds: float  # all of it
    prefill_seconds: float  # until the first token
    parts: dict[str, float]  # seconds in prefill, draft, verify, commit (or round, if replayed), host, output

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last, without the time that the observer took."""
        return self.seconds - self.prefill_seconds - self.parts.get("output", 0.0)


class Engine:
    """Decodes a batch of prompts with a target, and with a drafter and a tree policy if they are given.

    Everything between two readings of emitted tokens stays on the device. `graphs` records whole rounds and replays
    them (docs/graphs.md): None does so on a GPU if target and drafter can be captured, True or a backend insists on it.
    `late` reads what a round emitted after the next was launched; None does so with graphs. `compact` drops rows that
    have ended from rounds that are not recorded (`live.Live`); False carries them, as recorded rounds do.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        verifier: Verifier = sample_and_match,
        *,
        graphs: bool | Backend | None = None,
        late: bool | None = None,
        compact: bool = True,
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
        self.graphs = make_graphs(graphs, target, drafter)
        if late is False and self.graphs is not None:
            raise ValueError("rounds that are replayed are read late: late=False needs graphs=False")
        self.late = self.graphs is not None if late is None else late
        self.compact = compact

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int = 0,
        eos: frozenset[int] | None = None,
        stop: Sequence[Stop | None] | None = None,
        logprobs: bool = False,
        observer: Callable[[RoundReport], None] | None = None,
    ) -> Result:
        """Continue each prompt (token ids). Rows may differ in length, and in max_new_tokens, sampling and stop, of
        which a sequence has one for each. A row ends at an `eos` id, which belongs to the text, at the token with which
        its `stop` is satisfied, after max_new_tokens, or where the target's context ends.

        logprobs: keep those of the emitted tokens under the target's softmax, before penalties, temperature and
        filters (`Row.logprobs`)."""
        start = time.perf_counter()
        eos = self.target.eos if eos is None else eos
        rows = self._rows(prompts, max_new_tokens, sampling, stop)
        samplings = [row.sampling for row in rows]
        sampling = settings_of(samplings, self.device)
        generator = torch.Generator(self.device) if self.graphs is None else self.graphs.generator
        generator.manual_seed(seed)
        clock = Clock(self.device)
        penalties = None
        if any(s.penalised for s in samplings):
            penalties = Penalties(samplings, prompts, self.target.config.vocab, self.device)
        root, state, cache = self._prefill(rows, sampling, generator, penalties, logprobs)
        how = sampling, generator, clock, penalties, logprobs
        first = [[token] for token in root.tolist()]
        clock.mark("prefill")
        started = [row.add(t, eos) for row, t in zip(rows, first, strict=True)]
        report = RoundReport(rows, started, [0] * len(rows), sampling, clock, list(range(len(rows))))
        prefill_seconds = time.perf_counter() - start
        self._observe(observer, report, clock)
        decode = self._decode_late if self.late else self._decode
        decode(rows, root, state, cache, eos, observer, *how)
        return Result(rows, time.perf_counter() - start, prefill_seconds, clock.seconds())

    def _decode(
        self,
        rows: list[Row],
        root: Tensor,
        state: DraftState | None,
        cache: KVCache,
        eos: frozenset[int],
        observer: Callable[[RoundReport], None] | None,
        *how,
    ) -> None:
        """Rounds until all rows have ended."""
        live = Live(self, rows, root, state, cache, how)
        known = ended = live.ended()
        while not all(ended):
            live.shed(known)
            active = torch.tensor([not ended[place] for place in live.places], device=self.device)
            # Exact lengths are known here; within the round the caches work with upper bounds. Rows that have ended
            # may be longer: what they compute is dropped.
            cache.max_len = max(len(row.prompt) + len(row.tokens) - 1 for row in rows if row.finish is None)
            self._conclude(rows, live.play(active).outcome(), eos, observer, how)
            known, ended = ended, live.ended()  # `shed` is told a round late, as it is when rounds are read late

    def _decode_late(
        self,
        rows: list[Row],
        root: Tensor,
        state: DraftState | None,
        cache: KVCache,
        eos: frozenset[int],
        observer: Callable[[RoundReport], None] | None,
        *how,
    ) -> None:
        """The same, each round launched before the one before it is read."""
        if self.graphs is None:
            rounds = Rounds(self, rows, root, state, cache, eos=eos, how=how)
        else:
            rounds = self.graphs.begin(self, rows, root, state, cache, eos=eos, how=how, observed=observer is not None)
        path = self.policy.steps + 1 if self.policy else 1
        for outcome in read_late(rows, rounds, path, self.device):
            self._conclude(rows, outcome, eos, observer, how)

    def _conclude(
        self,
        rows: list[Row],
        outcome: Outcome,
        eos: frozenset[int],
        observer: Callable[[RoundReport], None] | None,
        how: tuple,
    ) -> None:
        """Add what a round emitted to the rows, and show it."""
        sampling, _, clock, *_ = how
        report = _report(rows, outcome, sampling, clock)
        self._record(rows, report, eos)
        clock.mark("host")
        self._observe(observer, report, clock)
        report.logits = None  # too much for an observer to hold through the next round

    @staticmethod
    def _observe(observer: Callable[[RoundReport], None] | None, report: RoundReport, clock: Clock) -> None:
        if observer is not None:
            observer(report)
            clock.mark("output")

    def _rows(
        self, prompts: list[list[int]], max_new_tokens: int | Sequence[int], sampling=None, stop=None
    ) -> list[Row]:
        config = self.target.config
        return make_rows(prompts, max_new_tokens, sampling, stop, vocab=config.vocab, context=config.context)

    def _check_memory(self, rows: list[Row], room: int, kept: bool) -> None:
        """ValueError for what a GPU cannot hold, before anything is allocated."""
        free = free_bytes(self.device)
        if free is None:
            return
        plain = self.drafter is None or isinstance(self.verifier, SampleAndMatch)
        request = Request(
            batch=len(rows),
            prompt=max(len(row.prompt) for row in rows),
            room=room,
            greedy=plain and all(row.sampling.greedy for row in rows),
            penalised=any(row.sampling.penalised for row in rows),
        )
        needed = plan(self.target, self.drafter, self.policy, request, self.graphs is not None)
        check(needed, free, kept)

    def _prefill(
        self,
        rows: list[Row],
        sampling: Sampling | SamplingBatch,
        generator: torch.Generator,
        penalties: Penalties | None = None,
        logprobs: bool = False,
    ) -> tuple[Tensor, DraftState | None, KVCache]:
        """Run all prompts, right-padded, at once: first token [B], the drafter's state, and the filled cache."""
        room = max(len(row.prompt) + row.limit for row in rows)
        path = self.policy.steps + 1 if self.policy else 1
        nodes = self.policy.num_draft_tokens if self.policy else 1
        cache = None
        if self.graphs is not None:
            room, cache = self.graphs.prepare(len(rows), room, self.target.config.context)
        self._check_memory(rows, room, cache is not None)
        longest = max(len(row.prompt) for row in rows)
        padded = [row.prompt + [0] * (longest - len(row.prompt)) for row in rows]
        tokens = torch.tensor(padded, device=self.device)
        lens = torch.tensor([len(row.prompt) for row in rows], device=self.device)
        if cache is None:
            cache = self.target.new_cache(len(rows), room + path + nodes)
        taps = self.drafter.taps if self.drafter else ()
        logits, feats = self.target(tokens, cache, taps=taps, last=lens - 1)
        root = self._draw(logits, torch.ones_like(lens), sampling, generator, penalties)
        if logprobs:
            for row, logprob in zip(rows, logprobs_of(logits[:, 0], root).tolist(), strict=True):
                row.logprobs = [logprob]
        cache.advance(lens, longest)
        if self.drafter is None:
            return root, None, cache
        self.drafter.reset(len(rows), room + path + max(path, self.policy.draft_slots()), tokens[:, 0])
        if self.graphs is not None:
            self.graphs.place_draft_cache()
        following = tokens.roll(-1, 1).scatter(1, lens[:, None] - 1, root[:, None])
        return root, self.drafter.extend(feats, following, lens, longest), cache

    def round(
        self,
        root: Tensor,
        state: DraftState,
        cache: KVCache,
        active: Tensor,
        sampling: Sampling | SamplingBatch,
        generator: torch.Generator,
        clock: Clock,
        penalties: Penalties | None = None,
        logprobs: bool = False,
    ) -> tuple[Tensor, DraftState, DraftTree, Verdict, Tensor]:
        """One round, free of host synchronisation. Rows that are not active [B] stand still.

        Returns the next root, the drafter's state, and what was drafted, decided and computed: the tree, the verdict
        and the target's logits [B,N,V] as they were verified."""
        tree = self.policy.grow(self.drafter, root, state, sampling, generator)
        clock.mark("draft")
        own, feats = self.target(tree.tokens, cache, depth=tree.depth, ancestors=tree.ancestors, taps=self.drafter.taps)
        logits = own if penalties is None else penalties(own, tree)
        verdict = self.verifier(tree, logits, sampling, generator)
        n = verdict.n * active
        if penalties is not None:
            penalties.add(verdict.tokens, n)
        if logprobs:
            at_path = own.gather(1, verdict.path[..., None].expand(-1, -1, own.shape[-1]))
            verdict.logprobs = logprobs_of(at_path, verdict.tokens)
        clock.mark("verify")
        max_len = cache.max_len + tree.steps + 1
        cache.commit(verdict.path, n, max_len)
        clock.mark("commit")
        if feats is not None:
            feats = feats.gather(1, verdict.path[..., None].expand(-1, -1, feats.shape[-1]))
        state = self.drafter.extend(feats, verdict.tokens, n, max_len)
        root = verdict.tokens.gather(1, verdict.n[:, None] - 1).squeeze(1)
        clock.mark("draft")
        return root, state, tree, verdict, logits

    def plain_round(
        self,
        root: Tensor,
        cache: KVCache,
        active: Tensor,
        sampling: Sampling | SamplingBatch,
        generator: torch.Generator,
        clock: Clock,
        penalties: Penalties | None = None,
        logprobs: bool = False,
        *,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token per row without a drafter, [B], and if asked for its log-probability [B]. ancestors: ones [B,1,1]
        where `cache.bound` is not exact."""
        logits, _ = self.target(root[:, None], cache, ancestors=ancestors)
        n = active.long()
        token = self._draw(logits, n, sampling, generator, penalties)
        cache.advance(n, cache.max_len + 1)
        clock.mark("verify")
        return token, logprobs_of(logits[:, 0], token) if logprobs else None

    @staticmethod
    def _draw(
        logits: Tensor,
        n: Tensor,
        sampling: Sampling | SamplingBatch,
        generator: torch.Generator,
        penalties: Penalties | None,
    ) -> Tensor:
        """The next token [B] from logits [B,1,V]; the rows of which n [B] is 1, and not 0, count it."""
        if penalties is None:
            return sample(logits[:, 0], sampling, generator)
        token = sample(penalties(logits)[:, 0], sampling, generator)
        penalties.add(token[:, None], n)
        return token

    def _record(self, rows: list[Row], report: RoundReport, eos: frozenset[int]) -> None:
        for i, row in enumerate(rows):
            if row.finish is not None:
                report.emitted[i], report.accepted[i] = [], 0
                continue
            row.trace.accepted.append(report.accepted[i])
            kept = row.add(report.emitted[i], eos, None if report.logprobs is None else report.logprobs[i])
            row.trace.emitted.append(len(kept))
            report.emitted[i] = kept
            report.accepted[i] = min(report.accepted[i], len(kept))


def _report(rows: list[Row], outcome: Outcome, sampling: Sampling | SamplingBatch, clock: Clock) -> RoundReport:
    """Of a round of some of the rows; those that were dropped emitted nothing. sampling: of the call."""
    made = outcome.made
    places = list(range(len(rows))) if made.places is None else made.places
    emitted, accepted = [[] for _ in rows], [0] * len(rows)
    logprobs = None if outcome.logprobs is None else [[] for _ in rows]
    for i, (place, count) in enumerate(zip(places, outcome.counts, strict=True)):
        emitted[place], accepted[place] = outcome.tokens[i][:count], count - 1
        if logprobs is not None:
            logprobs[place] = outcome.logprobs[i]
    report = RoundReport(rows, emitted, accepted, made.sampling or sampling, clock, places)
    report.tree, report.verdict, report.logits, report.logprobs = made.tree, made.verdict, made.logits, logprobs
    return report


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
