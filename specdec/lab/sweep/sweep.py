"""A sweep: every drafter with every tree on one benchmark.

Each point is one recorded run, stored under a key of all that it depends on (`points`, `store`). So an interrupted
sweep continues where it stopped, and no point is measured twice.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec import own
from specdec.cli.lock import only_writer
from specdec.contracts import Drafter
from specdec.engine.engine import Engine, Result
from specdec.engine.recorder import Recorder, describe
from specdec.lab.sweep.benchmarks import Benchmark, Question, converse, spread, template_settings
from specdec.lab.sweep.points import Draft, SweepPoint, code_version, tree_settings
from specdec.lab.sweep.store import RESULT, point_folder, write_point
from specdec.lab.traces.diagnose import Probe, by_context, calibration, coverage, examples
from specdec.lab.traces.metrics import summary
from specdec.machine import matmul_precision, processor
from specdec.model.language_model import LanguageModel
from specdec.recording import Text
from specdec.structs import Sampling, Verifier
from specdec.threads import full_threads
from specdec.trees import Chain
from specdec.trees.optimal import expected_tau, most_nodes, optimal_paths
from specdec.trees.record import record
from specdec.trees.spec import make_tree, parse_tree


@dataclass
class Sweep:
    """Measures points. Its fields are what all points share."""

    target: LanguageModel
    target_identity: str
    benchmark: Benchmark
    out: Path
    sampling: Sampling
    verifier: Verifier
    max_new_tokens: int
    sample_draft: bool = False
    batch_size: int = 1
    seed: int = 0
    raw: bool = False
    thinking: bool | None = None
    resamples: int = 1000
    probe: int = 4  # questions decoded once more with a `Probe`
    traces: bool = True

    def __post_init__(self) -> None:
        """Collect the settings that all points share."""
        self.raw, self.template = template_settings(self.target, self.raw, self.thinking)
        target, benchmark = self.target, self.benchmark
        own_settings = ("raw", "template", "sampling", "max_new_tokens", "batch_size", "seed")
        self.common: dict[str, Any] = {"target": self.target_identity, "benchmark": benchmark.digest()}
        self.common |= {name: getattr(self, name) for name in own_settings} | {"sampling": asdict(self.sampling)}
        self.common |= {"dtype": str(target.dtype).removeprefix("torch.")}
        self.common |= {"matmul_precision": matmul_precision(target.device), "device": target.device.type}
        self.common |= {"decoder": type(target).__name__, "resamples": self.resamples}
        self.common["code"] = code_version() + own.digest(self.verifier)
        self.names: dict[str, Any] = {"target": Path(target.name).name, "benchmark": benchmark.name}
        self.names |= {"questions": len(benchmark.questions), "skipped_records": benchmark.skipped}

    def points(self, drafts: list[Draft], trees: list[str], baseline: bool, best_tree: dict | None) -> list[SweepPoint]:
        """Plain decoding if `baseline`; then for each drafter the points of all trees, and that of its best tree.

        best_tree: {"questions", "steps", "topk", "num_draft_tokens"}: how many questions the best tree is measured on,
        how deep and wide it may be, and the list of sizes that it is made for. None: no best tree.
        """
        plain = SweepPoint("decode", None, None, self.common, self.names | {"draft": "none"})
        found = [plain] if baseline else []
        for draft in drafts:
            mine = self.common | {"draft": draft.identity()}
            names = self.names | {"draft": draft.name}
            for tree in trees:
                described = tree_settings(tree) | {"sampled": self.sample_draft, "verifier": str(self.verifier)}
                settings = mine | {"tree": described, "probe": self.probe}
                called = names | ({"draft": f"{draft.name}, over the block"} if "block" in described else {})
                called |= {"tree": tree} if "shape" in described else {}
                found.append(SweepPoint("decode", draft, tree, settings, called | {"lossless": self.verifier.lossless}))
            if best_tree is not None:
                found.append(SweepPoint("best_tree", draft, None, mine | {"best_tree": best_tree}, names))
        twice = {p.key: p for p in reversed(found)}
        return [twice[key] for key in dict.fromkeys(p.key for p in found)]

    def run(self, points: list[SweepPoint]) -> Iterator[tuple[SweepPoint, str]]:
        """Measure the points that have no result yet, in order.

        Yields each point with 'measured', 'reused', or 'skipped: REASON' if its tree cannot be drafted.
        """
        loaded, drafter = None, None
        for point in points:
            folder = point_folder(self.out, point.key)
            with only_writer(folder, wait=True):  # another process may be at this point
                what = "reused"
                if not (folder / RESULT).is_file():
                    if point.draft is not None and point.draft != loaded:
                        loaded, drafter = point.draft, point.draft.load(self.target)
                    what = self._make(point, drafter)
            yield point, what

    def _make(self, point: SweepPoint, drafter: Drafter | None) -> str:
        """Write the point, and say what became of it: 'measured' or 'skipped: why'."""
        try:
            engine = self.engine(point, drafter)
        except ValueError as error:
            write_point(self.out, point, {"skipped": str(error)}, {})
            return f"skipped: {error}"
        self._measure(point, engine) if point.kind == "decode" else self._best_tree(point, engine)
        return "measured"

    def engine(self, point: SweepPoint, drafter: Drafter | None) -> Engine:
        """Return the engine that decodes a point. Raises ValueError if its tree cannot be drafted."""
        if point.draft is None:
            return Engine(self.target)
        if point.kind == "best_tree":
            return Engine(self.target, drafter, Chain(1))
        described = point.settings["tree"]
        numbers = described["topk"], described["steps"], described["num_draft_tokens"]
        whole = {"block", "shape"} & set(described)
        tree = parse_tree(str(point.tree)) if whole else make_tree(*numbers, sample_draft=self.sample_draft)
        return Engine(self.target, drafter, tree, self.verifier)

    def _decode(self, token: int) -> str:
        return self.target.tokenizer.decode([token])

    def _converse(self, engine: Engine, questions: list[Question], **how) -> tuple[list[Result], int]:
        shared = ("max_new_tokens", "sampling", "seed", "raw", "template")
        return converse(engine, questions, **{name: getattr(self, name) for name in shared} | how)

    def _measure(self, point: SweepPoint, engine: Engine) -> None:
        questions = self.benchmark.questions
        warm = {"max_new_tokens": min(8, self.max_new_tokens), "batch_size": self.batch_size, "observer": Recorder()}
        self._converse(engine, questions[: self.batch_size], **warm)  # the same rounds as will be measured
        described = describe(self.target, engine.drafter, engine.policy, engine.verifier)
        recorder = Recorder({"names": point.names, "settings": point.settings} | described)
        how = {"batch_size": self.batch_size, "name": recorder.name, "observer": recorder}
        results, left_out = self._converse(engine, questions, **how)
        rows = recorder.trace.rows
        name, most, context = self.benchmark.name, self.max_new_tokens, self.target.config.context
        if not rows:
            raise ValueError(
                f"no question of {name} fits the target's context of {context} tokens with max_new_tokens {most}"
            )
        if all(len(row.tokens) < 2 for row in rows):
            raise ValueError(
                f"every answer to {name} is one token long, and the first token is not drafted: "
                f"raise max_new_tokens ({most}), or take another benchmark"
            )
        found = summary(rows, resamples=self.resamples)
        found |= {
            "turns_left_out": left_out,
            "tokens": sum(len(row.tokens) for row in rows),
            "nodes_a_round": sum(map(sum, (row.drafted for row in rows))) / max(found["rounds"], 1) + 1,
            "finish": {end: sum(row.finish == end for row in rows) for end in ("eos", "length", "context")},
            "answers": [hashlib.sha256(json.dumps(row.tokens).encode()).hexdigest()[:8] for row in rows],
            "diagnostics": {"context": by_context(rows, resamples=self.resamples)},
        }
        if engine.drafter is not None:
            covered = coverage(rows, engine.drafter, self._decode)
            found["diagnostics"] |= {"calibration": calibration(rows), "coverage": covered} | self._probe(
                engine, engine.drafter
            )
            found["examples"] = examples(rows, self._decode)
        write_point(self.out, point, found, times(results), recorder if self.traces else None)

    def _probe(self, engine: Engine, drafter: Drafter) -> dict:
        """What traces do not hold, from a few questions decoded once more."""
        if not self.probe:
            return {}
        probe = Probe(drafter)
        for question in spread(self.benchmark.questions, self.probe):
            self._converse(Engine(self.target, probe, engine.policy, engine.verifier), [question], observer=probe)
        return {"norms": probe.norms(), "entropy": probe.entropy()}

    def _best_tree(self, point: SweepPoint, engine: Engine) -> None:
        """Measure acceptance by depth and rank along plain answers to some questions, and find the best trees."""
        wanted: dict[str, Any] = point.settings["best_tree"]
        drafter: Any = engine.drafter
        chosen = spread(self.benchmark.questions, wanted["questions"])
        results, _ = self._converse(Engine(self.target), chosen)
        rows = [row for result in results for row in result.rows if len(row.tokens) > 1]
        if not rows:
            raise ValueError(
                f"every answer that the best tree is measured along, of {len(chosen)}, is one token long: raise "
                "best_tree.questions or max_new_tokens, or set best_tree=null"
            )
        texts, steps = [Text(row.prompt, row.tokens, row.seed) for row in rows], drafter.deepest(wanted["steps"])
        topk = min(wanted["topk"], drafter.vocab.size)
        accept = record(self.target, drafter, texts, steps=steps, sampling=self.sampling).along(topk).table()
        sizes = [n for n in wanted["num_draft_tokens"] if 2 <= n <= most_nodes(topk, len(accept))]
        trees = {n: optimal_paths(accept, n) for n in sizes}
        found = {
            "questions": len(chosen),
            "accept": accept,
            "trees": {str(n): {"paths": p, "expected_tau": expected_tau(p, accept)} for n, p in trees.items()},
        }
        write_point(self.out, point, found, {})


def times(results: list[Result]) -> dict:
    """How long decoding took, and on what machine. A round of a batch counts once, however many rows it had."""
    rounds = sum(max(row.trace.rounds for row in result.rows) for result in results)
    tokens = sum(len(row.tokens) - 1 for result in results for row in result.rows)
    seconds = sum(result.decode_seconds for result in results)
    parts = {name: sum(result.parts.get(name, 0.0) for result in results) for name in ("draft", "verify", "commit")}
    parts["host"] = seconds - sum(parts.values())
    return {
        "seconds": seconds,
        "prefill_seconds": sum(result.prefill_seconds for result in results),
        "tokens_per_second": tokens / seconds,
        "rounds": rounds,
        "milliseconds_a_round": {name: 1e3 * s / rounds for name, s in parts.items()},
        "load": os.getloadavg()[0],
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count() or 1,
            "threads": full_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
