"""The command `python -m specdec.generate`: flags, screen, summary."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from specdec.api import (
    DEMO_DRAFTER,
    DEMO_TARGET,
    Generation,
    Sampling,
    answer,
    load_drafter,
    load_target,
    load_tree,
    make_tree,
    make_verifier,
)
from specdec.cli.errors import one_sentence_errors
from specdec.cli.screen import Screen
from specdec.cli.settings import DRAFTING, SHAPE, parse_with_settings
from specdec.engine.engine import Engine, RoundReport
from specdec.engine.recorder import Recorder, describe
from specdec.engine.trace_files import check_trace_folder, write_trace
from specdec.model.checkpoint import DTYPES
from specdec.text import StopStrings, check_stops, clean, decode_row, encode_chat, read_prompts
from specdec.verify import VERIFIERS

LOSSY = "LOSSY: above temperature 0 the text does not follow the target's distribution"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m specdec.generate", description="Decode speculatively, or plainly.")
    model = p.add_argument_group("models")
    model.add_argument("--target", help="folder or hub name of the target (default: the bundled demo)")
    model.add_argument("--draft", help="its drafter: folder or hub name, or ngram, ngram:suffix (default: the demo's)")
    model.add_argument("--token-map", type=Path, help="the drafter proposes these tokens only (FR-Spec): .json or .pt")
    model.add_argument("--feedback", choices=("pre", "post"), help="of MTP heads in a target: before or after the norm")
    model.add_argument("--no-draft", action="store_true", help="decode plainly")
    model.add_argument("--dtype", default="auto", help="auto (fp32 on the CPU, else the target's), fp32, fp16, bf16")
    model.add_argument(
        "--draft-dtype",
        choices=sorted(DTYPES),
        help="of the drafter (default: the target's); a narrower one drafts faster, and what is emitted stays the same",
    )
    model.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    model.add_argument(
        "--no-graphs", action="store_true", help="on a GPU: launch every operator, and replay no CUDA graphs of rounds"
    )
    model.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="a YAML file of flags, as lab.cost.tune_command writes; other flags override it",
    )
    text = p.add_argument_group("prompts")
    text.add_argument("--prompt", help="one prompt")
    text.add_argument(
        "--prompt-file", type=Path, help="a prompt a line; or .jsonl with `prompt` or `turns` (the first)"
    )
    text.add_argument("--chat", action="store_true", help="talk to the target, with history")
    text.add_argument("--raw", action="store_true", help="do not apply the chat template")
    text.add_argument("--max-new-tokens", type=int, default=128)
    text.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    text.add_argument("--batch-size", type=int, default=1, help="prompts of --prompt-file decoded together")
    sample = p.add_argument_group("sampling of the target")
    sample.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    sample.add_argument("--top-k", type=int, default=0, help="0 is off")
    sample.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    sample.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    sample.add_argument("--repetition-penalty", type=float, default=1.0, help="of prompt and output; 1 is off")
    sample.add_argument("--presence-penalty", type=float, default=0.0, help="of the output, -2 to 2; 0 is off")
    sample.add_argument("--frequency-penalty", type=float, default=0.0, help="the same for each occurrence; 0 is off")
    sample.add_argument("--seed", type=int, default=0)
    tree = p.add_argument_group("draft tree")
    tree.add_argument("--steps", type=int, help="levels (default 5)")
    tree.add_argument(
        "--topk", type=int, help="nodes expanded on each level, and children of each (default 4); 1: a chain"
    )
    tree.add_argument("--num-draft-tokens", type=int, help="nodes that the target verifies, root counted (default 16)")
    tree.add_argument(
        "--sample-draft",
        action="store_true",
        help="draw the drafts: topk chains of steps tokens, with the target's sampling filters",
    )
    tree.add_argument("--tree", type=Path, help="instead of these: a static tree, a file with `paths` of child ranks")
    verify = p.add_argument_group("verification")
    verify.add_argument(
        "--verifier",
        help=f"{', '.join(VERIFIERS)} (default match); rejection and block need --sample-draft, typical is lossy, and "
        "so is sglang with a threshold below 1",
    )
    verify.add_argument(
        "--verifier-args", help="its settings: epsilon=0.09,alpha=0.3; threshold_single=1,threshold_acc=1"
    )
    out = p.add_argument_group("output")
    out.add_argument("--show-trees", action="store_true", help="draw every tree, accepted nodes starred")
    out.add_argument(
        "--compare", action="store_true", help="decode plainly too: ratio of speeds, and are they identical?"
    )
    out.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of every round (docs/trace.md) there")
    out.add_argument("--logprobs", action="store_true", help="with --json: log-probabilities of the emitted tokens")
    out.add_argument("--json", action="store_true", help="one JSON object as the last line, instead of the summary")
    return p


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other."""
    given = [flag for flag in ("prompt", "prompt_file", "chat") if getattr(args, flag) not in (None, False)]
    if len(given) != 1:
        raise ValueError("give exactly one of --prompt, --prompt-file and --chat")
    if args.no_draft:
        for flag in (*DRAFTING, "show_trees", "compare"):
            if getattr(args, flag) not in (None, False):
                raise ValueError(f"--{flag.replace('_', '-')} contradicts --no-draft")
    if args.tree is not None:
        for flag in (*SHAPE, "sample_draft"):
            if getattr(args, flag) not in (None, False):
                raise ValueError(f"--{flag.replace('_', '-')} contradicts --tree, which is a whole tree")
    if args.target is not None and args.draft is None and not args.no_draft:
        raise ValueError("a target of your own needs its drafter: give --draft, or --no-draft to decode plainly")
    if args.chat and (args.json or args.compare or args.raw):
        raise ValueError("--chat goes with neither --json nor --compare nor --raw")
    if args.logprobs and not args.json:
        raise ValueError("--logprobs are part of what --json prints: give both")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.batch_size > 1 and args.show_trees:
        raise ValueError("--show-trees draws one sequence at a time: leave --batch-size at 1")


def verifier_settings(text: str | None) -> dict[str, float]:
    """'name=number,name=number' -> {name: number}."""
    settings = {}
    for part in text.split(",") if text else ():
        name, _, number = part.partition("=")
        try:
            settings[name.strip()] = float(number)
        except ValueError:
            raise ValueError(f"--verifier-args takes name=number,name=number, and not {part!r}") from None
    return settings


class Session:
    """Models and settings of one run of the command."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        if args.trace is not None:
            check_trace_folder(args.trace)
        self.sampling = Sampling(**{f.name: getattr(args, f.name) for f in fields(Sampling)})
        self.stops = [clean(stop) for stop in args.stop or ()]
        check_stops(self.stops)
        shape = {k: getattr(args, k) for k in SHAPE if getattr(args, k) is not None}
        tree = load_tree(args.tree) if args.tree else make_tree(**shape, sample_draft=args.sample_draft)
        self.tree = None if args.no_draft else tree
        self.verifier = make_verifier(args.verifier or "match", **verifier_settings(args.verifier_args))
        self.target = load_target(args.target or DEMO_TARGET, dtype=args.dtype, device=args.device)
        self.drafter = None
        if not args.no_draft:
            self.drafter = load_drafter(
                args.draft or DEMO_DRAFTER,
                self.target,
                token_map=args.token_map,
                feedback=args.feedback,
                dtype=DTYPES[args.draft_dtype] if args.draft_dtype else None,
            )
        graphs = False if args.no_graphs else None
        self.engine = Engine(self.target, self.drafter, self.tree, self.verifier, graphs=graphs)
        self.plain = Engine(self.target, graphs=graphs)
        self.recorder = None
        if args.trace is not None:
            flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
            self.recorder = Recorder({"flags": flags} | describe(self.target, self.drafter, self.tree, self.verifier))

    def write_trace(self) -> None:
        if self.recorder is not None:
            write_trace(self.recorder.trace, self.args.trace)

    def observer(self, screen: Screen) -> Callable[[RoundReport], None]:
        """The screen, and the recorder if there is one."""

        def both(report: RoundReport) -> None:
            screen(report)
            self.recorder(report)

        return screen if self.recorder is None else both

    def run(
        self,
        prompts: list[str],
        screen: Screen | None = None,
        *,
        plain: bool = False,
        max_new_tokens: int | None = None,
    ) -> Generation:
        args = self.args
        return answer(
            self.plain if plain else self.engine,
            prompts,
            sampling=self.sampling,
            max_new_tokens=max_new_tokens or args.max_new_tokens,
            stop=self.stops,
            logprobs=args.logprobs,
            seed=args.seed,
            raw=args.raw,
            observer=screen and self.observer(screen),
        )


def run_prompts(session: Session, prompts: list[str]) -> dict:
    """Decode every prompt, showing text on the way; the summary of all of them."""
    args = session.args
    single = args.batch_size == 1
    if args.compare:  # the first call of each kind pays for memory and code that is loaded then
        for plain in (False, True):
            session.run(prompts[:1], plain=plain, max_new_tokens=8)
    done, baseline = [], []
    for start in range(0, len(prompts), args.batch_size):
        batch = prompts[start : start + args.batch_size]
        if len(prompts) > 1:
            print(f"\n--- {start + 1}" + (f" to {start + len(batch)}" if not single else "") + f" of {len(prompts)}")
        screen = Screen(session.target, quiet=not single, trees=args.show_trees, stops=session.stops)
        done.append(session.run(batch, screen))
        screen.end()
        if not single:
            print("\n".join(done[-1].text))
        if args.compare:
            baseline.append(session.run(batch, plain=True))
    return summarise(session, done, baseline)


def merged(parts: list[Generation]) -> Generation:
    """Several generations as if they were one: rows side by side, times added."""
    result = parts[0].result
    for part in parts[1:]:
        keys = result.parts.keys() | part.result.parts.keys()
        result = type(result)(
            result.rows + part.result.rows,
            result.seconds + part.result.seconds,
            result.prefill_seconds + part.result.prefill_seconds,
            {key: result.parts.get(key, 0) + part.result.parts.get(key, 0) for key in keys},
        )
    text = [t for part in parts for t in part.text]
    return Generation(text, result.rows, result, parts[0].steps, parts[0].verifier)


def summarise(session: Session, done: list[Generation], baseline: list[Generation]) -> dict:
    total = merged(done)
    one = len(total.rows) == 1
    summary = {
        "text": total.text[0] if one else total.text,
        "token_ids": total.rows[0].tokens if one else [row.tokens for row in total.rows],
        "finish": total.rows[0].finish if one else [row.finish for row in total.rows],
        "num_tokens": total.num_tokens,
        "rounds": total.rounds,
        "tau": total.tau,
        "acceptance_by_depth": total.acceptance_by_depth,
        "drafter": (dict(session.drafter.conventions) or None) if session.drafter else None,
        "verifier": None if total.verifier is None else str(total.verifier),
        "lossless": total.lossless,
        "tokens_per_second": total.tokens_per_second,
        "prefill_seconds": total.result.prefill_seconds,
        "seconds_by_part": total.result.parts,
    }
    if session.args.logprobs:
        summary["logprobs"] = total.rows[0].logprobs if one else [row.logprobs for row in total.rows]
    if baseline:
        plain = merged(baseline)
        summary["baseline_tokens_per_second"] = plain.tokens_per_second
        # A text that ends with its first token decodes nothing, in no time.
        rate = plain.tokens_per_second
        summary["speedup"] = total.tokens_per_second / rate if rate else None
        same = [a.tokens == b.tokens for a, b in zip(total.rows, plain.rows, strict=True)]
        summary["identical"] = all(same) if session.sampling.greedy else None
        summary["identical_rows"] = sum(same)
    return summary


def print_summary(session: Session, s: dict) -> None:
    count = 1 if isinstance(s["text"], str) else len(s["text"])
    print(
        f"\n{s['num_tokens']} tokens in {s['rounds']} rounds, tau {s['tau']:.2f}, {s['tokens_per_second']:.1f} tokens/s"
    )
    if s["acceptance_by_depth"]:
        print("accepted to depth: " + "  ".join(f"{d}: {a:.0%}" for d, a in enumerate(s["acceptance_by_depth"], 1)))
    if s["drafter"]:
        told = [f"{key} {s['drafter'][key]}" for key in ("taps", "feedback", "token map") if key in s["drafter"]]
        print("; ".join([f"drafter: {s['drafter']['family']}", *told]))
    if s["verifier"] is not None:
        print(f"verifier: {s['verifier']}, {'lossless' if s['lossless'] else LOSSY}")
    times = "  ".join(f"{k} {v * 1e3:.0f} ms" for k, v in sorted(s["seconds_by_part"].items(), key=lambda kv: -kv[1]))
    print(f"time by part: {times}")
    if "speedup" in s:
        ratio = "-" if s["speedup"] is None else f"{s['speedup']:.2f}x"
        print(f"plain decoding: {s['baseline_tokens_per_second']:.1f} tokens/s; speculative to plain: {ratio}")
        if session.sampling.greedy:
            print(f"identical: {'yes' if s['identical'] else 'NO'} ({s['identical_rows']} of {count})")
        else:
            same = "the same distribution" if s["lossless"] else "two distributions, for the verifier is lossy"
            print(f"identical: not asked, both are draws from {same}")


def chat(session: Session) -> None:
    """Read messages until the end of input; the history grows with each answer."""
    if not session.target.tokenizer.chat_template:
        raise ValueError("--chat needs a tokenizer with a chat template, and this target's has none")
    if not session.verifier.lossless:
        print(f"verifier: {session.verifier}, {LOSSY}")
    history: list[dict[str, str]] = []
    while True:
        try:
            message = clean(input("> ")).strip()
        except EOFError:
            print()
            return
        if not message:
            continue
        history.append({"role": "user", "content": message})
        try:
            row = _answer(session, history)
        except ValueError as error:  # too long by now: say so, and let the user start again
            print(f"error: {error}; starting a new conversation", file=sys.stderr)
            history.clear()
            continue
        said = decode_row(session.target.tokenizer, row.tokens, session.stops)
        history.append({"role": "assistant", "content": said})


def _answer(session: Session, history: list[dict[str, str]]):
    args = session.args
    screen = Screen(session.target, quiet=False, trees=args.show_trees, stops=session.stops)
    result = session.engine.generate(
        [encode_chat(session.target, history)],
        max_new_tokens=args.max_new_tokens,
        sampling=session.sampling,
        stop=[StopStrings(session.target.tokenizer, session.stops) if session.stops else None],
        seed=args.seed + len(history),
        observer=session.observer(screen),
    )
    row = result.rows[0]
    screen.end()
    print(f"[{len(row.tokens)} tokens, {row.trace.rounds} rounds]")
    return row


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    sys.stdout.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as the command line's bytes that are not UTF-8 arrive
    args = parse_with_settings(parser(), argv)
    check_flags(args)
    prompts = [args.prompt] if args.prompt is not None else read_prompts(args.prompt_file) if args.prompt_file else []
    session = Session(args)
    if args.chat:
        chat(session)
        session.write_trace()
        return
    summary = run_prompts(session, prompts)
    session.write_trace()
    if args.json:
        print(json.dumps(summary))
    else:
        print_summary(session, summary)
