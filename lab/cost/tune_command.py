"""The fastest setting of a pair on this machine:  specdec tune --prompt-file questions.jsonl --out best.yaml

Measures what rounds cost (once for a machine and pair), replays what the drafter would have had accepted under every
setting, predicts tokens/s, decodes with the best few and plainly, and writes the fastest as a file for
`python -m specdec.generate --settings`. docs/tuning.md says how; --help lists all flags.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.cost.cost import NODES, WIDTHS, CostModel, Setting, grid, machine, measured_costs, static
from lab.cost.tune import Tuned, report_of, shape_entries, tune, write_settings
from lab.replay.recording import record
from specdec.api import DEMO_DRAFTER, DEMO_TARGET, Sampling, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.engine.recorder import versions
from specdec.text import encode_prompt, read_prompts

SHOWN = 10
BUSY = 0.1  # functions that fit the measured rounds worse than this were fitted to whatever else the machine did


def whole_numbers(text: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4]."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants whole numbers, such as 1,2,4, and not {text!r}") from None
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"wants numbers of at least 1, got {numbers[0]}")
    return numbers


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="specdec tune", description="Find a pair's fastest setting here.")
    model = p.add_argument_group("models")
    model.add_argument("--target", help="folder or hub name of the target (default: the bundled demo)")
    model.add_argument("--draft", help="its drafter, as specdec.generate takes it (default: the demo's)")
    model.add_argument("--token-map", type=Path, help="the drafter proposes these tokens only (FR-Spec)")
    model.add_argument("--feedback", choices=("pre", "post"), help="of MTP heads in a target")
    model.add_argument("--dtype", default="auto", help="as specdec.generate takes it")
    model.add_argument("--device", default="cpu")
    text = p.add_argument_group("what is decoded")
    text.add_argument("--prompt-file", type=Path, required=True, help="as specdec.generate takes it")
    text.add_argument("--limit", type=int, default=16, help="prompts")
    text.add_argument("--max-new-tokens", type=int, default=64)
    text.add_argument("--batch-size", type=int, default=1, help="prompts decoded together")
    text.add_argument("--temperature", type=float, default=0.0)
    text.add_argument("--seed", type=int, default=0)
    text.add_argument("--raw", action="store_true", help="do not apply the chat template")
    tries = p.add_argument_group("what is tried")
    tries.add_argument("--topk", type=whole_numbers, default=list(WIDTHS), help="1,2,4,8")
    tries.add_argument("--steps", type=int, default=8, help="levels at most")
    tries.add_argument("--num-draft-tokens", type=whole_numbers, default=list(NODES), help="nodes: 2,3,4,6,...")
    tries.add_argument(
        "--tree", type=Path, action="append", default=[], help="a static tree's file, to try too; may be given again"
    )
    tries.add_argument("--tries", type=int, default=4, help="settings that are decoded with for real")
    tries.add_argument("--repeats", type=int, default=3, help="of real decoding, and of every measured round")
    tries.add_argument("--remeasure", action="store_true", help="do not use kept measurements")
    p.add_argument("--out", type=Path, required=True, help="the settings file")
    p.add_argument("--json", action="store_true", help="the report as one JSON object in the last line")
    return p


def check_flags(args: argparse.Namespace) -> None:
    for flag in ("limit", "max_new_tokens", "batch_size", "steps", "tries", "repeats"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}")
    if args.max_new_tokens < 2:
        raise ValueError("--max-new-tokens must be at least 2: the first token comes from the prefill")
    if args.target is not None and args.draft is None:
        raise ValueError("a target of your own needs its drafter: give --draft")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"cannot write {args.out}: there is no folder {args.out.absolute().parent}")


def print_tables(tuned: Tuned, costs: CostModel) -> None:
    ranking = Table("topk/steps/nodes", "tokens/s", "to plain", "tau", "ms a round", title="predicted")
    for p in tuned.ranking[:SHOWN]:
        ratio = p.tokens_per_second / tuned.plain.tokens_per_second
        cells = f"{p.tokens_per_second:.1f}", f"{ratio:.2f}", f"{p.tau:.2f}", f"{1e3 * p.seconds_a_round:.2f}"
        ranking.add_row(str(p.setting), *cells)
    ranking.caption = (
        f"the best {min(SHOWN, len(tuned.ranking))} of {len(tuned.ranking)}; the functions fit the measured rounds "
        f"within {statistics.median(costs.errors()):.1%} at the median"
    )
    real = Table("", "predicted", "measured", "predicted to measured", "tau", title="tokens/s for real")
    for p, m in tuned.measured:
        name = "plain" if p.setting is None else str(p.setting)
        rates = p.tokens_per_second, m.tokens_per_second
        real.add_row(name, f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[0] / rates[1]:.2f}", f"{m.tau:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(ranking)
    console.print(real)


def model_entries(args: argparse.Namespace) -> dict:
    """The models as a settings file names them: what is on disk by its whole path."""

    def place(name) -> str | None:
        return str(Path(name).resolve()) if name is not None and Path(name).exists() else name and str(name)

    entries = {key: place(getattr(args, key)) for key in ("target", "draft", "token_map")}
    defaults = {"dtype": "auto", "device": "cpu"}
    entries |= {key: None if getattr(args, key) == usual else getattr(args, key) for key, usual in defaults.items()}
    return entries | {"feedback": args.feedback}


def settings_of(args: argparse.Namespace, drafter) -> list[Setting]:
    """Everything that is to be predicted."""
    topks = [topk for topk in args.topk if topk <= drafter.vocab.size]
    steps = min(args.steps, drafter.max_steps or args.steps)
    dynamic = grid(topks, steps, args.num_draft_tokens)
    if not dynamic:
        raise ValueError("there is no setting with these topk, steps and num_draft_tokens: give more of them")
    return [*dynamic, *(static(file) for file in args.tree)]


def find(args: argparse.Namespace, target, drafter, bars: Progress) -> tuple[CostModel, Tuned]:
    """Measure, replay, predict, try."""

    def bar(name: str):
        task = bars.add_task(name)
        return lambda done, of: bars.update(task, completed=done, total=of)

    prompts = [encode_prompt(target, text, args.raw) for text in read_prompts(args.prompt_file)[: args.limit]]
    settings, sampling = settings_of(args, drafter), Sampling(args.temperature)
    dynamic = [s for s in settings if s.file is None]
    costs = measured_costs(
        target,
        drafter,
        [token for prompt in prompts for token in prompt],
        remeasure=args.remeasure,
        progress=bar("costs"),
        topks=sorted({s.topk for s in dynamic}),
        steps=max(s.steps for s in dynamic),
        nodes=args.num_draft_tokens,
        statics=[s for s in settings if s.file is not None],
        batches=sorted({min(args.batch_size, len(prompts)), len(prompts) % args.batch_size or args.batch_size}),
        sampling=sampling,
        repeats=args.repeats,
    )
    how = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    topks, steps = sorted({s.topk for s in dynamic}), max(s.steps for s in settings)
    superset = record(target, drafter, prompts, topks=topks, steps=steps, **how)
    how |= {"batch": args.batch_size, "repeats": args.repeats, "progress": bar("real runs")}
    return costs, tune(costs, superset, settings, target, drafter, prompts, tries=args.tries, **how)


def write(args: argparse.Namespace, tuned: Tuned, target) -> dict:
    """The settings file; returns its report."""
    told = ("max_new_tokens", "batch_size", "temperature")
    report = report_of(tuned) | {
        "tuned_for": {"prompts": len(tuned.measured[0][1].texts)} | {name: getattr(args, name) for name in told},
        "machine": machine(target.device),
        "versions": versions(),
    }
    setting, models = tuned.best[0].setting, model_entries(args)
    if setting is None:
        models = {key: models[key] for key in ("target", "dtype", "device")}
    else:
        models["verifier"] = "match"  # the rule that replay knows, and the engine's own
    write_settings(args.out, models | shape_entries(setting), report)
    return report


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_flags(args)
    target = load_target(args.target or DEMO_TARGET, dtype=args.dtype, device=args.device)
    drafter = load_drafter(args.draft or DEMO_DRAFTER, target, token_map=args.token_map, feedback=args.feedback)
    with Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bars:
        costs, tuned = find(args, target, drafter, bars)
    print_tables(tuned, costs)
    if (misfit := statistics.median(costs.errors())) > BUSY:
        print(
            f"note: the measured rounds scatter by {misfit:.0%}: the machine was busy, and predictions are rough; "
            "run again with --remeasure when it is idle",
            file=sys.stderr,
        )
    report = write(args, tuned, target)
    print(tuned.verdict)
    print(json.dumps(report) if args.json else f"wrote {args.out}: python -m specdec.generate --settings {args.out}")


if __name__ == "__main__":
    main()
