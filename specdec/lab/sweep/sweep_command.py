"""Measure drafters and trees on a benchmark.

    specdec sweep --prompts mt_bench --draft DRAFT --topk 1,4

Writes points/, results.jsonl, timings.jsonl, report.html and figures/ under `out`; the last line is one JSON object.
The same command continues an interrupted sweep. `--cfg job` prints every setting; docs/sweeps.md has the details.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from specdec.api import DEMO_TARGET
from specdec.cli.files import no_empty_folder
from specdec.cli.lock import only_writer
from specdec.lab.models import as_list, own_names
from specdec.lab.output import command_line
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.lab.sweep.points import Draft, SweepPoint, signature
from specdec.lab.sweep.store import counts_of, print_tables, write_results
from specdec.lab.sweep.sweep import Sweep
from specdec.model.names import draft_for
from specdec.training.loop.parallel import join_processes
from specdec.training.train import check_folder, instantiate, load_some
from specdec.trees.spec import grid

# Settings of a sweep that are fields of `Sweep`
SHARED = ("max_new_tokens", "sample_draft", "batch_size", "seed", "raw", "thinking", "resamples", "probe", "traces")


def share_of(points: list[SweepPoint], shard: int, shards: int, rank: int, world: int) -> list[SweepPoint]:
    """The points that this process of this job measures. shard: which of the `shards` jobs this is."""
    if shards < 1 or not 0 <= shard < shards:
        raise ValueError(f"shard must lie between 0 and shards - 1, got shard {shard} of {shards}")
    return points[shard * world + rank :: shards * world]


def plan(settings: dict, sweep: Sweep) -> list[SweepPoint]:
    """All points that the settings ask for. Raises ValueError for settings that name none."""
    entries = as_list(settings["draft"])
    names = own_names(entries, lambda entry, whole: Draft.read(entry, whole).name)
    drafts = [replace(Draft.read(entry), name=name) for entry, name in zip(entries, names, strict=True)]
    best = settings["best_tree"]
    if best is not None:
        sizes = set(as_list(settings["num_draft_tokens"])) - {None}
        if not sizes:
            raise ValueError("best_tree finds trees of num_draft_tokens nodes: give numbers, or best_tree=null")
        best = best | {"num_draft_tokens": sorted(sizes)}
    axes = (settings[name] for name in ("topk", "steps", "num_draft_tokens", "block"))
    trees = list(map(str, as_list(settings["draft_tree"]))) if settings["draft_tree"] is not None else grid(*axes)
    return sweep.points(drafts, trees, settings["baseline"], best)


def measure(sweep: Sweep, points: list[SweepPoint], quiet: bool) -> dict[str, int]:
    """Measure the points; returns how many were measured, reused and skipped. Those skipped are named."""
    counts = {"measured": 0, "reused": 0, "skipped": 0}
    for point, what in tqdm(sweep.run(points), desc="points", total=len(points), disable=quiet):
        if what.startswith("skipped"):
            name = point.draft.name if point.draft else "plain"
            tqdm.write(f"{name} {point.tree} {what}", file=sys.stderr)
        counts[what.split(":")[0]] += 1
    return counts


def run(config: DictConfig) -> None:
    """Run `specdec sweep`: measure the points, and report when all are there."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    settings["draft"] = draft_for(settings["target"]["path"], settings["draft"])
    out = Path(config.out)
    with no_empty_folder(out):
        check_folder(out, resume=True)
        sampling, verifier = instantiate(config.sampling), instantiate(config.verifier, "verifier")
        processes = join_processes(config.device)
        benchmark = load_benchmark(**settings["benchmark"])
        target = load_some(config, processes.device, whole=True)
        identity = signature(str(config.target.path or DEMO_TARGET))
        shared = {name: settings[name] for name in SHARED}
        sweep = Sweep(target, identity, benchmark, out, sampling, verifier, **shared)
        points = plan(settings, sweep)
        mine = share_of(points, config.shard, config.shards, processes.rank, processes.world)
        counts = measure(sweep, mine, quiet=not processes.main)
        results, timings, old = write_results(out)
        if old:
            print(f"{old} points of {out} were left out: another version of the code made them", file=sys.stderr)
        there = {r["key"] for r in results}
        waiting = sum(point.key not in there for point in points)
        if not waiting:  # the last of the processes and jobs that share `out` reports
            print_tables(results, timings)
            if config.report:
                from specdec.lab.sweep.report import write_report  # here, as matplotlib takes a second to import

                with only_writer(out, inside=True, wait=True):
                    write_report(out, results, timings, command=command_line())
                print(f"report: {out / 'report.html'}")
        print(json.dumps({"out": str(out)} | counts_of(results) | {"to_be_measured_elsewhere": waiting} | counts))
