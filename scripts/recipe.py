"""Is the default recipe the best, and what does each part of it give?

    python scripts/recipe.py --data answers.jsonl --out runs/recipe

trains the default of `python -m training.train`, the presets of other trainers, and the default with one part taken out
at a time, on the same answers of the same target. A run is so many padded tokens with one seed. All runs hold out the
same conversations, on which agreement with the target's choice and tau at three trees are measured.

Every run leaves a JSON file in OUT/results, and one that has it is skipped: so the same command goes on after an
interruption, and --stages and --seeds choose what is run, in the order given. OUT/recipe.md holds the tables of all
results that are there; --dry writes it and trains nothing.

Learning rates fall to zero at the end of a run, so every size needs a run of its own. Of the presets only the length of
the run is changed, and of EAGLE's the warm-up, which keeps its share of the run. Their learning rates were chosen for
targets a thousand times as large, so `eagle_adamw` is the EAGLE preset with twenty times its rate and half its batch.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import specdec.training.train
from specdec.api import DEMO_TARGET, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.cli.hydra_entry import CONF, settings_errors
from specdec.cli.revision import revision
from specdec.drafters.formats import load_drafter
from specdec.engine.engine import Engine
from specdec.lab.output import write_json
from specdec.model.target import Target
from specdec.training.data import Batches, Sample, hold_out, load_samples
from specdec.training.loop.evaluate import beginnings, measured_tau
from specdec.training.loop.log import read_log
from specdec.trees.spec import TreeSpec

TREES = (TreeSpec(1, 5, 6), TreeSpec(4, 5, 16), TreeSpec(10, 8, 60))
EAGLE = ("+experiment=preset_eagle", "trainer.warmup=0.015")  # 12,000 of 800,000 steps
COMPARED = {
    "recipe": (),
    "preset_eagle": EAGLE,
    "preset_specforge": ("+experiment=preset_specforge",),
    "eagle_adamw": (*EAGLE, "trainer.lr=1e-3", "trainer.batch_tokens=2048", "trainer.clip=1.0"),
}
WITHOUT = {
    "no_muon": ("trainer.muon_lr=null",),
    "no_tap_norms": ("drafter.tap_norms=false",),
    "feedback_pre": ("drafter.feedback=pre",),
    "no_last_state": ("drafter.taps=null",),
    "init_random": ("drafter.init=random",),
    "distribution_only": ("objective.then=null",),
    "tokens_only": ("objective.terms={ce: 0, tokens: 1.0}", "objective.then=null"),
    "batch_4096": ("trainer.batch_tokens=4096",),
    "steps_7": ("objective.steps=7",),
}
EXPORTABLE = {  # to SGLang too
    "eagle3": ("drafter=eagle3",),
    "eagle3_published_taps": ("drafter=eagle3", "drafter.taps=null", "drafter.scale_taps=false"),
}
NAMES = COMPARED | WITHOUT | EXPORTABLE
STAGES = {  # names and padded tokens; each with every seed
    "75k": (COMPARED, 75_000),
    "parts_75k": (WITHOUT | EXPORTABLE, 75_000),
    "300k": (COMPARED, 300_000),
    "parts_300k": (WITHOUT | EXPORTABLE, 300_000),
    "1M": (COMPARED, 1_000_000),
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # quantiles .975 of Student's t, by the number of values


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    tokens: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.name}-{self.tokens}-seed{self.seed}"


@dataclass
class Ground:
    """What all runs share."""

    args: argparse.Namespace
    target: Target
    train: list[Sample]
    prompts: list[list[int]]


def settings(job: Job, args: argparse.Namespace, steps: int = 1) -> DictConfig:
    out = args.out / "runs" / job.key
    given = {
        "target.path": args.target,
        "data.path": args.data,
        "data.heldout": args.heldout,
        "data.max_length": args.max_length,
        "out": out,
        "resume": "auto",
        "trainer.seed": job.seed,
        "trainer.steps": steps,
        "trainer.epochs": "null",
        "trainer.prompts": "null",
        "trainer.eval_batches": 10**6,  # all that is held out
        "trainer.save_every": 250,
    }
    with initialize_config_dir(str(CONF), version_base="1.3"), settings_errors():
        return compose("train", [*NAMES[job.name], *(f"{k}={v}" for k, v in given.items())])


def steps_for(tokens: int, samples: list[Sample], config: DictConfig) -> int:
    """Steps after which the padded tokens of a run come nearest to `tokens`."""
    batches = Batches(samples, config.trainer.batch_tokens, config.trainer.seed)
    seen, best = 0, (tokens, 0)
    for step, indices in enumerate(batches.order(), 1):
        rows, longest = batches.layout(indices)[1]
        seen += rows * longest
        best = min(best, (abs(seen - tokens), step))
        if seen >= tokens:
            return max(best[1], 1)
    raise AssertionError("an endless order ended")


def run(job: Job, ground: Ground) -> dict:
    """Train and measure. A signal that stops the training ends the process; the same command goes on."""
    config = settings(job, ground.args)
    steps = steps_for(job.tokens, ground.train, config)
    config = settings(job, ground.args, steps)
    folder = Path(config.out)
    specdec.training.train.run(config)
    rows = read_log(folder / "log.jsonl")
    heldout, trained = ([row for row in rows if row["split"] == split][-1] for split in ("heldout", "train"))
    return {
        "name": job.name,
        "seed": job.seed,
        "steps": steps,
        **{key: trained[key] for key in ("tokens", "learnt", "seconds")},
        "agreement": heldout["accuracy"],
        "expected_tau": [heldout["expected_tau"], heldout["expected_tau_sampled"]],
        "tau": {str(tree): tau_of(folder / "draft", tree, ground) for tree in TREES},
        "settings": list(NAMES[job.name]),
        "parameters": sum(p.numel() for p in load_drafter(folder / "draft", ground.target).parameters()),
        "made_by": {"torch": torch.__version__, "revision": revision() or "unknown"},
    }


def tau_of(folder: Path, tree: TreeSpec, ground: Ground) -> dict:
    engine = Engine(ground.target, load_drafter(folder, ground.target), tree.build())
    traces = [row.trace for row in engine.generate(ground.prompts, max_new_tokens=ground.args.new_tokens).rows]
    emitted, rounds = [sum(trace.emitted) for trace in traces], [trace.rounds for trace in traces]
    return measured_tau(traces) | {"emitted": emitted, "rounds": rounds}


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """In the order of --stages, and in each of --seeds, so that every seed completes a table."""
    jobs = []
    for stage, seed in itertools.product(args.stages, args.seeds):
        names, tokens = STAGES[stage]
        jobs += [Job(name, tokens, seed) for name in names if args.only is None or name in args.only]
    return jobs


def mean(values: list[float]) -> str:
    """Mean and half the width of its 95 % interval by Student's t over seeds."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3f} ± {half:.3f}"


def measures(result: dict) -> list[float]:
    """Agreement at the first step, its mean over five, and tau at each tree."""
    agreement = result["agreement"][:5]
    return [agreement[0], statistics.fmean(agreement), *(result["tau"][str(tree)]["tau"] for tree in TREES)]


def tables(results: dict[Job, dict]) -> str:
    """Markdown: for each size the runs of every name, and how far the recipe is ahead, seed by seed."""
    lines = []
    for tokens in sorted({job.tokens for job in results}):
        lines += [f"## {tokens:,} tokens", "", table_of(tokens, results), ""]
    return "\n".join(lines)


def table_of(tokens: int, results: dict[Job, dict]) -> str:
    head = ["run", "seeds", "agreement, step 1", "of 5 steps", *(f"tau {tree}" for tree in TREES)]
    head += [f"recipe ahead, tau {tree}" for tree in TREES]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name in NAMES:
        found = {job.seed: measures(results[job]) for job in results if (job.name, job.tokens) == (name, tokens)}
        if not found:
            continue
        recipe = {seed: results.get(Job("recipe", tokens, seed)) for seed in found}
        ahead = [
            [measures(best)[at] - found[seed][at] for seed, best in recipe.items() if best is not None]
            for at in range(2, 2 + len(TREES))
        ]
        cells = [mean(list(column)) for column in zip(*found.values(), strict=True)]
        lines.append(" | ".join([name, str(len(found)), *cells, *("" if name == "recipe" else mean(a) for a in ahead)]))
    return "\n".join(f"| {line} |" for line in lines)


def read_results(folder: Path) -> dict[Job, dict]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        name, tokens, seed = path.stem.rsplit("-", 2)
        if name in NAMES:
            found[Job(name, int(tokens), int(seed.removeprefix("seed")))] = json.loads(path.read_text(encoding="utf-8"))
    return found


def prepare(args: argparse.Namespace) -> Ground:
    target = load_target(args.target)
    config = settings(Job("recipe", 1, 0), args)
    train, heldout = hold_out(load_samples(config.data, target), args.heldout)
    prompts = beginnings(heldout, train, target.config.context // 2)[: args.prompts]
    if not prompts:
        raise ValueError("every held-out conversation begins as one that is learnt: put others at the end of --data")
    return Ground(args, target, train, prompts)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="answers of the target; the last ones are held out")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, results and tables")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(NAMES), metavar="NAME", help="of the runs of these stages")
    parser.add_argument("--heldout", type=int, default=160, help="conversations (default 160)")
    parser.add_argument("--max-length", type=int, default=320, help="tokens of a conversation (default 320)")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts that are decoded (default 48)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each (default 64)")
    parser.add_argument("--dry", action="store_true", help="train nothing: make the tables of what is there")
    args = parser.parse_args(argv)
    folder = output_folder(args.out / "results")
    ground = None
    for job in [] if args.dry else jobs_of(args):
        path = folder / f"{job.key}.json"
        if path.exists():
            continue
        ground = ground or prepare(args)
        print(f"== {job.key}", file=sys.stderr, flush=True)
        write_json(path, run(job, ground))
        shutil.rmtree(args.out / "runs" / job.key / "checkpoints")
        write_text(args.out / "recipe.md", tables(read_results(folder)))
    text = tables(read_results(folder))
    write_text(args.out / "recipe.md", text)
    print(text)


if __name__ == "__main__":
    main()
