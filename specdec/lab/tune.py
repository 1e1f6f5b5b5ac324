"""Find the fastest setting of a target and a drafter on this machine.

    specdec tune --prompts questions.jsonl --out best.yaml

Measures what rounds cost (once for a machine and pair), replays what the drafter would have had accepted under every
setting, predicts tokens/s, decodes with the best few and plainly, and writes the fastest as a file for `specdec
generate --settings`. docs/tuning.md says how.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from specdec.cli.checks import REPORT
from specdec.cli.files import write_text
from specdec.cli.lock import only_writer
from specdec.cli.parser import read_flags
from specdec.cli.terminal import console
from specdec.engine.engine import Engine
from specdec.engine.recorder import versions
from specdec.lab.models import load_models, read_encoded
from specdec.lab.output import stage
from specdec.machine import machine
from specdec.recording import Accepted, Recording
from specdec.structs import Sampling
from specdec.trees import Tree
from specdec.trees.record import answers_to, record
from specdec.trees.spec import parse_tree
from specdec.tuning.costs import Costs
from specdec.tuning.grid import Prediction, clairvoyant, grid_costs, predict, useful_trees
from specdec.tuning.timing import busy, in_turns

SHOWN = 10
BUSY = 0.1  # a median misfit of the cost model above this says that the machine did something else too


def predict_all(
    costs: Costs, recording: Recording, accepted: Mapping[Tree, Accepted], prompts: list[int], batch: int = 1
) -> tuple[Prediction, list[Prediction]]:
    """Predict plain decoding and every tree; the trees come fastest first. accepted: of every tree, by root."""
    replays = recording.replay_many(list(accepted.values()))
    plain = predict(costs, None, replays[0].emitted, prompts, batch)
    found = [
        predict(costs, tree, r.emitted, prompts, batch, r.drafted) for tree, r in zip(accepted, replays, strict=True)
    ]
    return plain, sorted(found, key=lambda p: -p.tokens_per_second)


def finalists(ranking: list[Prediction], count: int, within: float = 0.1) -> list[Prediction]:
    """The `count` trees to try for real.

    First come the best of every topk and the best static tree, as far as their predictions lie `within` this share of
    the best of all: this reveals an error common to one topk. The best of the rest follow.
    """
    least = (1 - within) * ranking[0].tokens_per_second
    firsts: dict[Any, Prediction] = {}
    for p in ranking:
        if p.tree is not None and p.tokens_per_second >= least:
            firsts.setdefault("static" if p.tree.fixed else p.tree.topk, p)
    first = list(firsts.values())
    return [*first, *(p for p in ranking if p not in first)][:count]


@dataclass(frozen=True)
class MeasuredRate:
    """What decoding with one tree did."""

    tree: Tree | None
    tokens_per_second: float
    tau: float
    texts: list[list[int]]  # token ids by prompt
    disturbed: bool = False  # its repeats took very different times


def measure_rates(
    target,
    drafter,
    prompts: list[list[int]],
    trees: Sequence[Tree | None],
    *,
    batch: int = 1,
    repeats: int = 3,
    seed: int = 0,
    **how,
) -> list[MeasuredRate]:
    """Decode every batch of prompts with every tree `repeats` times, in turns, after one batch of warm-up.

    prompts: token ids. Prompt i has the seed (seed, i), as in `answers_to`. The time of a batch is the median of its
    repeats. how: arguments of `Engine.generate`.
    """
    engines = [Engine(target) if tree is None else Engine(target, drafter, tree) for tree in trees]
    seeds = [(seed, number) for number in range(len(prompts))]
    groups = [(prompts[i : i + batch], seeds[i : i + batch]) for i in range(0, len(prompts), batch)]
    for engine in engines:
        engine.generate(groups[0][0], **how | {"max_new_tokens": 8})
    runs = [partial(e.generate, group, seed=own, **how) for group, own in groups for e in engines]
    results = in_turns(runs, repeats, "real runs")
    found = []
    for place, tree in enumerate(trees):
        by_group = results[place :: len(trees)]
        rows = [row for turns in by_group for row in turns[0].rows]
        tokens = sum(len(row.tokens) - 1 for row in rows)
        rounds = sum(row.trace.rounds for row in rows)
        times = [[result.decode_seconds for result in turns] for turns in by_group]
        rate, tau = tokens / sum(map(statistics.median, times)), tokens / max(rounds, 1)
        disturbed = busy([sum(turn) for turn in zip(*times, strict=True)])
        found.append(MeasuredRate(tree, rate, tau, [row.tokens for row in rows], disturbed))
    return found


@dataclass(frozen=True)
class Tuned:
    """Predictions of every tree, and what plain decoding and the best few trees did for real."""

    plain: Prediction
    ranking: list[Prediction]
    measured: list[tuple[Prediction, MeasuredRate]]  # plain decoding first
    bound: float | None = None  # tokens/s that no choice of trees by round can exceed (`clairvoyant`); of one row

    @property
    def best(self) -> tuple[Prediction, MeasuredRate]:
        """The fastest of what was tried, plain decoding included."""
        return max(self.measured, key=lambda both: both[1].tokens_per_second)

    @property
    def best_draft(self) -> tuple[Prediction, MeasuredRate]:
        """The fastest of what was tried with a tree."""
        return max(self.measured[1:], key=lambda both: both[1].tokens_per_second)

    @property
    def verdict(self) -> str:
        """What to do, in one sentence."""
        (_, draft), plain = self.best_draft, self.measured[0][1].tokens_per_second
        entries = {} if draft.tree is None else draft.tree.entries()
        words = ", ".join(f"{name} {value}" for name, value in entries.items())
        ratio = draft.tokens_per_second / plain
        if self.best[0].tree is None:
            return (
                f"decode plainly: no setting beats plain decoding ({plain:.1f} tokens/s) here; the best one that "
                f"drafts, {words}, reaches {ratio:.2f} of it"
            )
        return f"{words}: {draft.tokens_per_second:.1f} tokens/s, {ratio:.2f} times plain decoding"

    def report(self) -> dict:
        """Return what was predicted and what was measured, in values that YAML has."""
        tried = [
            {
                "setting": _name(p.tree),
                "predicted_tokens_per_second": round(p.tokens_per_second, 2),
                "measured_tokens_per_second": round(m.tokens_per_second, 2),
                "predicted_tau": round(p.tau, 4),
                "measured_tau": round(m.tau, 4),
            }
            for p, m in self.measured
        ]
        best = tried[self.measured.index(self.best)]
        return {
            "verdict": self.verdict,
            **{name: best[name] for name in ("predicted_tokens_per_second", "measured_tokens_per_second")},
            "plain_tokens_per_second": tried[0]["measured_tokens_per_second"],
            "best_draft": str(self.best_draft[0].tree),
            "settings_predicted": len(self.ranking),
            "clairvoyant_tokens_per_second": self.bound and round(self.bound, 2),
            "tried": tried,
        }


def _name(tree: Tree | None) -> str:
    return "plain" if tree is None else str(tree)


def tune(
    costs: Costs, recording: Recording, trees: Sequence[Tree], target, drafter, prompts: list[list[int]], **how
) -> Tuned:
    """Predict every tree, and decode with the best `tries` (4) of them and plainly.

    prompts: token ids; `recording` holds one text of each, in this order. how: as in `measure_rates`.
    """
    lengths, tries, batch = [len(p) for p in prompts], how.pop("tries", 4), how.get("batch", 1)
    accepted = {tree: tree.replay(recording) for tree in trees}
    plain, ranking = predict_all(costs, recording, accepted, lengths, batch)
    tried = [plain, *finalists(ranking, tries)]
    found = measure_rates(target, drafter, prompts, [p.tree for p in tried], **how)
    bound = None
    if batch == 1:
        known = {tree: (a.accepted.numpy(), a.levels.numpy()) for tree, a in accepted.items()}
        bound = clairvoyant(costs, known, recording.roots.tolist(), lengths)
    return Tuned(plain, ranking, list(zip(tried, found, strict=True)), bound)


def print_tables(tuned: Tuned, costs: Costs) -> None:
    """Print the best predicted settings, and predicted next to measured speeds."""
    ranking = Table("topk/steps/nodes", "tokens/s", "to plain", "tau", "ms a round", title="predicted")
    for p in tuned.ranking[:SHOWN]:
        ratio = p.tokens_per_second / tuned.plain.tokens_per_second
        cells = f"{p.tokens_per_second:.1f}", f"{ratio:.2f}", f"{p.tau:.2f}", f"{1e3 * p.seconds_a_round:.2f}"
        ranking.add_row(str(p.tree), *cells)
    ranking.caption = (
        f"the best {min(SHOWN, len(tuned.ranking))} of {len(tuned.ranking)}; the functions fit the measured rounds "
        f"within {statistics.median(costs.errors()):.1%} at the median"
    )
    if tuned.bound is not None:
        ranking.caption += f"; knowing the texts, the best tree for every round would reach {tuned.bound:.1f} tokens/s"
    real = Table("", "predicted", "measured", "predicted to measured", "tau", title="tokens/s for real")
    for p, m in tuned.measured:
        rates = p.tokens_per_second, m.tokens_per_second
        cells = f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[0] / rates[1]:.2f}", f"{m.tau:.2f}"
        real.add_row(_name(p.tree), *cells)
    console(120).print(ranking, real)


def model_entries(args: argparse.Namespace) -> dict:
    """The models as a settings file names them: what is on disk by its absolute path."""

    def place(name) -> str | None:
        return str(Path(name).resolve()) if name is not None and Path(name).exists() else name and str(name)

    entries = {key: place(getattr(args, key)) for key in ("target", "draft", "token_map")}
    defaults = {"dtype": "auto", "matmul_precision": None, "device": "cpu"}
    entries |= {key: None if getattr(args, key) == usual else getattr(args, key) for key, usual in defaults.items()}
    return entries | {"feedback": args.feedback}


def find(args: argparse.Namespace, target, drafter) -> tuple[Costs, Tuned]:
    """Measure, replay, predict, try. Raises ValueError if there is no tree to predict but those of --tree."""
    prompts = read_encoded(target, args.prompts, args.limit, args.raw)
    topks = [topk for topk in args.topk if topk <= drafter.vocab.size]
    dynamic = useful_trees(topks, drafter.deepest(args.steps), args.num_draft_tokens)
    if not dynamic:
        raise ValueError("there is no setting with these topk, steps and num_draft_tokens: give more of them")
    trees, sampling = [*dynamic, *map(parse_tree, args.tree or ())], read_flags(Sampling, args)
    topks = sorted({tree.topk for tree in dynamic})
    stage("reading or measuring what rounds cost on this machine")
    sizes = {min(args.batch_size, len(prompts)), len(prompts) % args.batch_size or args.batch_size}
    grid = {"topks": topks, "steps": max(tree.steps for tree in dynamic), "nodes": args.num_draft_tokens}
    grid |= {"statics": [tree for tree in trees if tree.fixed], "batches": sorted(sizes), "sampling": sampling}
    costs = grid_costs(target, drafter, remeasure=args.remeasure, **grid, repeats=args.repeats)
    how: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed}
    stage(f"decoding {len(prompts)} prompts without a drafter, and drafting along the answers")
    texts, steps = answers_to(target, prompts, **how), max(tree.steps for tree in trees)
    recording = record(target, drafter, texts, steps=steps, topks=topks, sampling=sampling)
    how |= {"batch": args.batch_size, "repeats": args.repeats}
    return costs, tune(costs, recording, trees, target, drafter, prompts, tries=args.tries, **how)


def write(args: argparse.Namespace, tuned: Tuned, target) -> dict:
    """Write the file for `specdec generate --settings`, without entries that are None; returns its report."""
    recorded = ("max_new_tokens", "batch_size", *(f.name for f in fields(Sampling)))
    report = tuned.report() | {
        "tuned_for": {"prompts": len(tuned.measured[0][1].texts)} | {name: getattr(args, name) for name in recorded},
        "machine": machine(target.device),
        "versions": versions(),
    }
    tree, entries = tuned.best[0].tree, model_entries(args)
    if tree is None:
        entries = {key: entries[key] for key in ("target", "dtype", "matmul_precision", "device")} | {"no_draft": True}
    else:
        entries |= {"verifier": "match"} | tree.entries()  # the rule that replay knows, and the engine's own
    entries = {name: value for name, value in entries.items() if value is not None}
    entries[REPORT] = json.loads(json.dumps(report))  # plain types: versions are of a type of their own
    text = OmegaConf.to_yaml(OmegaConf.create(entries))
    write_text(args.out, f"# Written by specdec tune; the report is not read.\n{text}")
    return report


def run(args: argparse.Namespace) -> None:
    """Run `specdec tune`."""
    with only_writer(args.out):
        target, drafter = load_models(args)
        costs, tuned = find(args, target, drafter)
        try:
            report = write(args, tuned, target)
        finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
            print_tables(tuned, costs)
    if (misfit := statistics.median(costs.errors())) > BUSY:
        print(
            f"note: the measured rounds scatter by {misfit:.0%}: the machine was busy, and predictions are rough; "
            "run again with --remeasure when it is idle",
            file=sys.stderr,
        )
    if any(rate.disturbed for _, rate in tuned.measured):
        print("note: the real runs varied: the machine was busy, and the speeds are rough", file=sys.stderr)
    print(tuned.verdict)
    hint = shlex.join(["specdec", "generate", "--settings", str(args.out)])
    print(json.dumps(report) if args.json else f"wrote {args.out}: {hint}")
