"""Models and settings of one run of `specdec generate`, and the decoding of its prompts, with --compare plainly too."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from specdec import ops, ranks
from specdec.api import Generation, ModelSettings, Sampling, answer
from specdec.children import kind_for
from specdec.cli.errors import StopSignals
from specdec.cli.parser import read_flags
from specdec.cli.reading import parse_json, read_text
from specdec.cli.screen import Screen
from specdec.engine.engine import Engine, Result
from specdec.engine.recorder import Recorder, describe
from specdec.engine.report import Observer, Observers, Reads, RoundReport
from specdec.engine.sequence import check_prompt
from specdec.engine.trace_files import check_trace_folder, write_trace
from specdec.model.language_model import LanguageModel
from specdec.text import check_stops, clean, encode_prompt
from specdec.trees.spec import TreeSettings
from specdec.tuning.choose import choose_tree
from specdec.tuning.engines import CHAIN, POLICY, Workload, adaptive_engine
from specdec.verify import SampleAndMatch, VerifierSettings, in_words

LONG_ENOUGH, PASSES = 6.0, 5  # seconds of decoding, and passes, after which speeds are believed
CHAT_BYTES = 256 << 20  # bytes for the turns of a chat, which each turn sends again


class EndOnSignal(Observer):
    """Ends the decoding of an engine after the current round, if a signal has asked for it."""

    reads = Reads.TOKENS

    def __init__(self, signals: StopSignals, engine: Engine):
        """signals: polled after each round. engine: aborts all of its rows after a signal."""
        self.signals, self.engine = signals, engine

    @override
    def __call__(self, report: RoundReport) -> None:
        self.signals.meet(report.emitted)
        if self.signals.asked:
            for row in report.rows:
                self.engine.abort(row)


class Session:
    """The loaded models and settings that the flags of `specdec generate` ask for.

    Settings are checked first, because loading takes a while. Prompts are encoded before anything is measured or
    answered. `engine` decodes as asked, `plain` without a drafter; both have the same target.
    """

    def __init__(self, args: argparse.Namespace, prompts: Sequence[str] = ()):
        """prompts: texts, stored as token ids. Raises ValueError for one that does not fit the target."""
        self.args = args
        if args.trace is not None:
            check_trace_folder(args.trace)
        self.sampling = read_flags(Sampling, args)
        self.stops = [clean(stop) for stop in args.stop or ()]
        check_stops(self.stops)
        file = args.json_schema
        self.schema = None if file is None else parse_json(read_text(file, "JSON schema"), str(file))
        trees = read_flags(TreeSettings, args)
        self.tree: Any = None if args.no_draft else trees.make()  # a `Tree`; None for plain decoding
        self.verifier = read_flags(VerifierSettings, args).make()
        if self.tree is not None:
            kind_for(self.verifier, self.tree, args.children)
        models = read_flags(ModelSettings, args)
        self.target = models.load_target()
        self.prompts = _encoded(self.target, prompts, args.raw)
        self.drafter: Any = None if args.no_draft else models.load_drafter(self.target)
        if args.compile and self.target.device.type == "cuda":
            ops.use("torch")  # Inductor makes its own of torch's operators
        shared = args.tp_plan is not None and ranks.world() > 1
        self.signals = StopSignals("ending after this round; once more ends at once", insist=True, shared=shared)
        self.choice: Any = None  # a `Choice`, where a tree was chosen
        if self.drafter is not None and trees.automatic and args.adaptive is None:
            self._choose_tree(asked=trees.tree is not None)
        how: dict[str, Any] = {"graphs": False if args.no_graphs or args.adaptive else None, "compile": args.compile}
        self.plain = Engine(self.target, **how)
        how |= {"children": args.children, "prefixes": CHAT_BYTES if args.chat else 0}
        parts: Any = self.target, self.drafter, self.tree, self.verifier
        if args.adaptive is None:
            self.engine = Engine(*parts, **how)
        else:
            how |= {"temperature": self.sampling.temperature, "recalibrate": args.recalibrate}
            self.engine = adaptive_engine(args.adaptive, Workload(args.batch_size, together=True), *parts, **how)
        self.recorder = None
        if args.trace is not None:
            flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
            self.recorder = Recorder({"flags": flags} | describe(self.target, self.drafter, self.tree, self.verifier))

    def _choose_tree(self, asked: bool) -> None:
        """Choose the tree that is fastest here, or none. Raises ValueError if none can be, and --tree auto was `asked`.

        With --show-trees, keep the default tree. On a CPU, a drafter without measured acceptance drafts a chain, and a
        policy learns while it decodes how many of its levels pay.
        """
        args = self.args
        if args.show_trees and not asked:
            return
        why = None
        if args.tp_plan is not None:
            why = "it goes by measured times, which differ between processes that share a target"
        elif self.drafter.acceptance is None:
            why = "this drafter has no acceptance.json; `specdec tune tree --keep` writes it"
        elif not isinstance(self.verifier, SampleAndMatch):
            why = f"acceptance was measured with the rule match, and not with {in_words(self.verifier)}"
        if why is not None:
            if asked:
                raise ValueError(f"--tree auto cannot choose: {why}")
            unmeasured = self.drafter.acceptance is None and not self.drafter.abstains and args.children is None
            if unmeasured and self.target.device.type == "cpu":
                self.tree = CHAIN
                if not (args.compile or args.tp_plan):
                    args.adaptive = POLICY
                    print("tree: up to 3 levels, as many as pay; the drafter has no acceptance.json", file=sys.stderr)
            return
        how: dict[str, Any] = {"temperature": self.sampling.temperature, "recalibrate": args.recalibrate}
        choice = choose_tree(self.target, self.drafter, batch=args.batch_size, compile=args.compile, **how)
        self.choice, self.tree = choice, choice.tree
        if self.tree is None:
            self.drafter = None

    def write_trace(self) -> None:
        """Write the trace to the folder of --trace, if it was asked for and something was decoded."""
        if self.recorder is not None and self.recorder.trace.rows:
            write_trace(self.recorder.trace, self.args.trace)

    def run(
        self,
        prompts: list[list[int]],
        screen: Screen | None = None,
        *,
        plain: bool = False,
        max_new_tokens: int | None = None,
        first: int = 0,
    ) -> Generation:
        """Decode prompts as one batch. first: the number of its first prompt among all, which its seed depends on."""
        args, engine = self.args, self.plain if plain else self.engine
        shown = [] if screen is None else [screen] if self.recorder is None else [screen, self.recorder]
        return answer(
            engine,
            prompts,
            sampling=self.sampling,
            max_new_tokens=max_new_tokens or args.max_new_tokens,
            stop=self.stops,
            json_schema=self.schema,
            logprobs=args.logprobs,
            seed=[(args.seed, first + row) for row in range(len(prompts))],
            observer=Observers(EndOnSignal(self.signals, engine), *shown),
        )


def _encoded(target: LanguageModel, prompts: Sequence[str], raw: bool) -> list[list[int]]:
    """Return the token ids of prompts. Raises ValueError for one that does not fit the target, with its number."""
    found = []
    for number, prompt in enumerate(prompts, 1):
        try:
            found.append(encode_prompt(target, prompt, raw))
            check_prompt(found[-1], target.config.vocab, target.config.context)
        except ValueError as error:
            where = f" (prompt {number} of {len(prompts)})" if len(prompts) > 1 else ""
            raise ValueError(f"{error}{where}") from None
    return found


@dataclass
class Decoded:
    """What was decoded, in the order of the prompts."""

    done: list[Generation]
    baseline: list[Generation]  # plain decoding of the same, with --compare; else empty
    turns: list[tuple[float, float]]  # tokens/s, speculatively and plainly, of further passes over all prompts


def run_prompts(session: Session) -> Decoded:
    """Decode all prompts, batch by batch. After a signal the last generation is partial and has no plain one."""
    args, prompts = session.args, session.prompts
    single = args.batch_size == 1
    if args.compare:  # the first call of each kind pays for memory and code that is loaded then
        for plain in (False, True):
            session.run(prompts[:1], plain=plain, max_new_tokens=8)
    done, baseline = [], []
    for start in range(0, len(prompts), args.batch_size):
        if session.signals.asked:
            break
        batch = prompts[start : start + args.batch_size]
        if len(prompts) > 1:
            print(f"\n--- {start + 1}" + (f" to {start + len(batch)}" if not single else "") + f" of {len(prompts)}")
        screen = Screen(session.target, quiet=not single, trees=args.show_trees, stops=session.stops)
        done.append(session.run(batch, screen, first=start))
        screen.end()
        if not single:
            print("\n".join(done[-1].text))
        if args.compare and not session.signals.asked:
            baseline.append(session.run(batch, plain=True, first=start))
    if len(baseline) == len(done) and session.signals.asked:
        baseline = baseline[:-1]  # the signal came while it was made
    return Decoded(done, baseline, take_turns(session, done + baseline) if args.compare else [])


def take_turns(session: Session, first: list[Generation]) -> list[tuple[float, float]]:
    """Return tokens per second, speculative and plain, of silent passes until times are long enough to compare."""
    spent, prompts = sum(part.result.seconds for part in first), session.prompts
    turns: list[tuple[float, float]] = []
    size, together = session.args.batch_size, session.args.tp_plan is not None  # whose clocks differ
    if session.drafter is None or together:
        return []
    while spent < LONG_ENOUGH and len(turns) < PASSES - 1 and not session.signals.asked:
        ways = []
        for plain in (False, True):
            starts = range(0, len(prompts), size)
            ways.append(merged([session.run(prompts[i : i + size], plain=plain, first=i) for i in starts]))
        if not session.signals.asked:
            turns.append((ways[0].tokens_per_second, ways[1].tokens_per_second))
        spent += sum(way.result.seconds for way in ways)
    return turns


def merged(parts: list[Generation]) -> Generation:
    """Return several generations as one: rows concatenated, times added."""
    results = [part.result for part in parts]
    rows, text = [row for one in results for row in one.rows], [t for part in parts for t in part.text]
    names = dict.fromkeys(name for one in results for name in one.parts)
    seconds, prefill = sum(one.seconds for one in results), sum(one.prefill_seconds for one in results)
    result = Result(rows, seconds, prefill, {name: sum(one.parts.get(name, 0) for one in results) for name in names})
    return Generation(text, rows, result, parts[0].steps, parts[0].verifier)
