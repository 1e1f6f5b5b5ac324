"""The engine: sequences are added, every step plays a round, and returns its record."""

import time
from collections import abc
from dataclasses import replace
from typing import Any

import torch

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.adaptive import Policy
from specdec.engine.batch import Batch
from specdec.engine.compatibility import check_autocast, check_parts, check_settings, check_user, take
from specdec.engine.executor import Executor
from specdec.engine.graphs import make_graphs, widths_up_to
from specdec.engine.loop import Loop
from specdec.engine.memory import Request, check_memory
from specdec.engine.prefill import ChunkedPrefill, Prefixes
from specdec.engine.report import Clock, Observer, Reads, Result, RoundReport
from specdec.engine.round import Round
from specdec.engine.sequence import Sequence, Stop, make_sequence, per_row, raise_failure
from specdec.model.language_model import LanguageModel
from specdec.sampling.filters import settings_of
from specdec.sampling.json_grammar import Grammar
from specdec.sampling.noise import Seed
from specdec.structs import Sampling, Verifier
from specdec.verify import sample_and_match


class Engine:
    """Decode sequences with a target, and with a drafter and a draft tree if given.

    `generate` decodes a batch; `reserve`, `add`, `step`, `abort` are for continuous batching. A drafter has one engine.

    Args:
        target: The model.
        drafter: Its drafter; None decodes plainly.
        policy: The draft tree.
        verifier: The rule that accepts drafted tokens.
        children: Children of a node above temperature 0: likeliest, coupled or drawn. None fits the verifier.
        graphs: Capture rounds and replay them (docs/graphs.md). None does so on a GPU if possible.
        compile: Compile rounds with Inductor. "aside" compiles in another process and runs eager rounds meanwhile.
        overlap: Start a round before the previous one is read. None does so with graphs.
        compact: Remove finished rows from the batch.
        abstain: Draft only as many levels as the drafter has proposals for (`DraftState.levels`).
        adaptive: A policy that chooses each round's tree, no larger than `policy`.
        prefixes: Bytes of the prefix cache across calls. Recurrent targets have none.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        verifier: Verifier = sample_and_match,
        *,
        children: str | None = None,
        graphs: bool | Executor | None = None,
        compile: bool | str = False,
        overlap: bool | None = None,
        compact: bool = True,
        abstain: bool = True,
        adaptive: Policy | None = None,
        prefixes: int = 0,
    ):
        """Check that the parts fit together, and prepare rounds. Raises ValueError if the parts do not fit."""
        check_parts(target, drafter, policy, verifier, adaptive)
        check_settings(graphs, compile=compile, overlap=overlap, compact=compact, abstain=abstain, prefixes=prefixes)
        self.round = Round(target, drafter, policy, verifier, children)
        self.target, self.drafter, self.verifier, self.device = target, drafter, verifier, target.device
        self.policy: Any = self.round.policy  # a `TreePolicy`; None without a drafter
        self.adaptive, self.round.adapts = adaptive, adaptive is not None
        self.graphs = make_graphs(graphs, self.round, compile, adaptive, abstain)
        self.round.parts.captured = self.graphs is not None or self.device.type != "cpu"
        late = self.graphs is not None and self.graphs.executor.late
        if overlap is False and late:
            raise ValueError("rounds that are replayed are read late: overlap=False needs graphs=False")
        self.overlap, self.compact, self.abstain = late if overlap is None else overlap, compact, abstain
        self.prefixes = Prefixes(prefixes) if prefixes and not target.chains_only else None
        self.waiting: list[Sequence] = []
        self.loop: Any = None  # a `Loop`, while room is reserved
        self.room = 0  # tokens of a row, as reserved; caches may have more
        self.chunk_read = self.generating = False  # a part of a prompt was read since the last round; in `generate`

    def __repr__(self) -> str:
        """Return the names of target, drafter and tree."""
        parts = (self.drafter, str(self.policy)) if self.drafter else ()
        return f"Engine({', '.join(map(repr, (self.target, *parts)))})"

    @torch.inference_mode()
    def reserve(self, rows: int, room: int, *, seed: int = 0, reads: Reads = Reads.LOGITS, part: int = 0) -> None:
        """Allocate `rows` rows of up to `room` tokens, prompt included, and drop all sequences.

        Args:
            rows: Number of sequences that decode at once.
            room: Tokens of a row, cut to the target's context.
            seed: The n-th added sequence has the seed (seed, n), unless it has its own.
            reads: The fields of a step's report that are read.
            part: Tokens of a prompt per prefill step; 0: all. Rounds run between the steps. Only the last reports rows.
        """
        self._check_free()
        check_settings(rows=rows, room=room, seed=seed, reads=reads, part=part)
        rows, room = int(rows), min(int(room), self.target.config.context)
        request = Request(rows, room, room, greedy=False, penalised=True, reads=reads, part=part)
        self._reserve(request, widths_up_to(rows) if self.compact else [rows], continuous=True)
        self.seed, self.added = seed, 0  # the second counts sequences

    def add(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        seed: Seed | int | None = None,
        eos: frozenset[int] | None = None,
        stop: Stop | None = None,
        logprobs: bool = False,
        grammar: Grammar | None = None,
        steps: int | None = None,
        top_logprobs: int = 0,
    ) -> Sequence:
        """Queue a sequence until a row is free. It ends at the latest with the reserved room. See `generate`.

        `steps` limits the levels of the draft tree that count for it. `top_logprobs` stores so many alternatives.
        Raises ValueError if the prompt does not fit.
        """
        self._check_free()
        if self.loop is None:
            raise ValueError("nothing is reserved: call Engine.reserve first")
        eos, seed = self.target.eos if eos is None else eos, (self.seed, self.added) if seed is None else seed
        vocab, room = self.target.config.vocab, self.room
        if isinstance(prompt, abc.Sized) and room <= len(prompt) < self.target.config.context:
            raise ValueError(f"the prompt has {len(prompt)} tokens, room was reserved for {room}, new ones included")
        how: dict[str, Any] = {"logprobs": logprobs, "steps": steps, "top_logprobs": top_logprobs}
        own = prompt, max_new_tokens, sampling, seed, stop, grammar, eos
        sequence = make_sequence(*own, vocab=vocab, context=room, **how)
        self.added += 1
        self.waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def abort(self, sequence: Sequence) -> None:
        """End a sequence and free its row. The sequence keeps its tokens."""
        if sequence.finish is not None:
            return
        sequence.finish, sequence.matcher = "abort", None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            chunked = self.loop.batch.chunked
            if chunked is not None and chunked.sequence is sequence:
                chunked.drop()
        elif self.loop is not None and sequence in self.loop.batch.sequences:
            self.loop.batch.stop()

    @torch.inference_mode()
    def step(self) -> RoundReport | None:
        """Prefill waiting sequences if rows are free, else run a round. Return None if nothing is left to do.

        An error in a round, or an interrupt, drops all sequences. An error of a `Stop` ends its sequence alone.
        """
        self._check_free()
        if self.loop is None:
            return None
        self.loop.batch.clock.mark("output")  # the caller's time since the last step
        try:
            if (report := self._step()) is None:
                self.loop.rest()
        except BaseException as error:
            if self.loop.lost or not isinstance(error, Exception):  # a prefill that fails is undone
                self._clear()
            raise
        raise_failure(report.rows if report else ())
        return report

    def _check_free(self) -> None:
        if self.generating:  # in another thread, or an observer calls
            raise ValueError("the engine is in the middle of a generate: use one engine for each thread")

    def _step(self) -> RoundReport | None:  # `generate` is in inference mode already: to enter it takes microseconds
        loop, batch = self.loop, self.loop.batch
        check_user(self.drafter, self)
        batch.clock.fold()
        if self.waiting and batch.free() and not (self.chunk_read and batch.going()):
            return loop.drain() or self._admit()
        self.chunk_read = batch.captured = False
        return loop.next()

    def _admit(self) -> RoundReport:
        batch = self.loop.batch
        joining = self.waiting[: batch.free()]
        if batch.chunked is not None:
            joining, read = batch.chunked.ready(joining)
            self.chunk_read |= read
            if not joining:
                batch.clock.mark("prefill")
                return RoundReport(clock=batch.clock, prefill=True)
        self.loop.admit(joining)
        self.waiting = self.waiting[len(joining) :]  # not before: if a prefill fails, they wait on
        emitted = [sequence.tokens[:] for sequence in joining]
        sampling = settings_of([sequence.sampling for sequence in joining], self.device)
        report = RoundReport(joining, sampling, batch.clock, True, emitted=emitted, accepted=[0] * len(joining))
        batch.clock.mark("prefill")
        return report

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int | abc.Sequence[int] = 128,
        sampling: Sampling | abc.Sequence[Sampling] | None = None,
        seed: int | abc.Sequence[Seed | int] = 0,
        eos: frozenset[int] | None = None,
        stop: abc.Sequence[Stop | None] | None = None,
        logprobs: bool = False,
        grammar: Grammar | abc.Sequence[Grammar | None] | None = None,
        observer: Observer | abc.Callable[[RoundReport], None] | None = None,
    ) -> Result:
        """Continue each prompt until EOS, its stop, the grammar's end, `max_new_tokens` or the end of the context.

        Args:
            prompts: Token ids per row. Rows may differ in all arguments that accept a list.
            max_new_tokens: Tokens to emit at most.
            sampling: Temperature, filters and penalties; None for greedy decoding.
            seed: Row i has the seed (seed, i), or seed[i] of a list. Draws of a row depend only on its seed.
            eos: Ids that end a row and belong to it; the target's by default.
            stop: Stop condition per row.
            grammar: Grammar that texts must match.
            logprobs: Store log-probabilities of emitted tokens, before penalties, temperature and filters.
            observer: Called after every step.
        """
        start, config, eos = time.perf_counter(), self.target.config, self.target.eos if eos is None else eos
        self._check_free()
        if (count := len(prompts)) == 0:
            raise ValueError("no prompt was given")
        seeds = seed if isinstance(seed, abc.Sequence) else [(seed, row) for row in range(count)]
        given: Any = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seeds, "stop": stop}
        columns = [per_row(value, count, name) for name, value in (given | {"grammar": grammar}).items()]
        how: dict[str, Any] = {"eos": eos, "logprobs": logprobs, "vocab": config.vocab, "context": config.context}
        rows = [make_sequence(*own, **how) for own in zip(prompts, *columns, strict=True)]
        request = Request(
            batch=len(rows),
            prompt=max(len(row.prompt) for row in rows),
            room=max(row.room for row in rows),
            greedy=all(row.sampling.greedy for row in rows),
            penalised=any(row.sampling.penalised for row in rows),
            reads=Reads.TOKENS if observer is None else getattr(observer, "reads", Reads.LOGITS),
        )
        self.generating = True
        try:
            self._reserve(request, [len(rows)])  # fewer rows would need captures of their own
            self.waiting, clock, begun, mark, prefill_seconds = rows[:], self.loop.batch.clock, start, 0, 0.0
            while (report := self._step()) is not None:
                raise_failure(report.rows)
                if report.prefill:  # with a prefix cache several, and rounds between them
                    prefill_seconds += time.perf_counter() - begun - clock.seconds(mark).get("capture", 0.0)
                if observer is not None:
                    observer(report)
                    clock.mark("output")
                report.logits = None  # too much for an observer to hold through the next round
                begun, mark = time.perf_counter(), clock.position - 1
        finally:
            self.generating = False
            self._clear()
        return Result(rows, time.perf_counter() - start, prefill_seconds, clock.seconds())

    def _reserve(self, request: Request, widths: list[int], continuous: bool = False) -> None:
        """widths: numbers of rows that rounds are captured for, if they are. continuous: sequences join and leave."""
        check_autocast(self.target)
        self._clear()  # before memory is taken
        if self.drafter is not None:
            take(self.drafter, self)
        levels = 1 if self.adaptive is None else 1 + self.policy.steps
        prefixes = 0 if self.prefixes is None else max(self.prefixes.budget - self.prefixes.bytes, 1)  # 0: no cache
        request = replace(request, prefixes=prefixes, captures=len(widths) * levels)
        self.room, room, clock = request.room, request.room, Clock(self.device)
        if self.graphs is None:
            check_memory(self.round, request)
            how: dict[str, Any] = {name: getattr(self, name) for name in ("overlap", "compact", "abstain", "adaptive")}
            batch = Batch(self.round, request.batch, room, clock, **how)
        else:
            room = self.graphs.room_for(widths, room)
            check_memory(self.round, replace(request, room=room), True, allocated=self.graphs.batch is not None)
            batch = self.graphs.begin(widths, room, clock, self.adaptive, continuous)
        batch.reads, batch.chunked = request.reads, None
        if (request.part or self.prefixes) and self.target.reads_on:
            batch.chunked = ChunkedPrefill(
                self.target, batch.cache, self.round.taps, request.part or room, self.prefixes
            )
        self.loop = Loop(batch, int(self.overlap))

    def _clear(self) -> None:
        """Drop all sequences, and the caches unless graphs keep them."""
        if self.loop is not None:
            self.loop.threads.restore()
        self.waiting, self.loop, self.room, self.chunk_read = [], None, 0, False
