"""Speed of several ways to decode, side by side in one run (docs/bench.md).

In each configuration every contender is warmed up and has its first trial. Then all take turns, trial by trial, and
medians over the trials count. So an interrupted run has results of the configurations that were begun. Configurations
and their contenders share the time budget: with a small one, each decodes fewer texts. A contender that fails, does not
fit or exceeds the budget has a row with the reason.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from specdec.cli.limits import MOST
from specdec.lab.bench.contenders import Contender, NotAvailable, TimedRun, peak_bytes, reset_peak
from specdec.lab.bench.random_weights import MARK
from specdec.lab.output import sentence
from specdec.model.language_model import LanguageModel
from specdec.schema import check_fields, ranged
from specdec.structs import Sampling

Prompts = Callable[[int, int], list[list[int]]]  # trial, tokens of each -> the prompts of this trial


@dataclass(frozen=True)
class Configuration:
    """What is decoded: tokens of a prompt, new tokens, and how they are drawn, as fields of `Sampling`."""

    name: str
    prompt: int = ranged(1, MOST)
    new: int = ranged(1, MOST)
    sampling: dict = field(default_factory=dict)


def read_configurations(known: dict[str, dict], chosen: Sequence[str]) -> list[Configuration]:
    """Return the chosen configurations. Raises ValueError for a name or field that there is not, or a wrong number."""
    out = []
    for name in chosen:
        if name not in known:
            raise ValueError(f"there is no configuration {name!r}: there are {', '.join(known)}")
        try:
            out.append(Configuration(name, **known[name]))
        except TypeError as error:
            raise ValueError(f"configurations.{name}: {str(error).removeprefix('Configuration.__init__() ')}") from None
        check_fields(out[-1], f"configurations.{name}.")
    return out


def random_prompts(vocab: int, questions: int, seed: int) -> Prompts:
    """Random token ids, for random weights, where no text means more than another."""

    def prompts(trial: int, length: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed + trial)
        return torch.randint(vocab, (questions, length), generator=generator).tolist()

    return prompts


def text_prompts(texts: list[list[int]], questions: int) -> Prompts:
    """Encoded prompts with others in front of short ones, cut in front to length. Every trial takes the next ones."""

    def prompts(trial: int, length: int) -> list[list[int]]:
        out = []
        for i in range(trial * questions, (trial + 1) * questions):
            ids: list[int] = []
            while len(ids) < length:
                ids = texts[i % len(texts)] + ids
                i -= 1
            out.append(ids[-length:])
        return out

    return prompts


@dataclass
class Bench:
    """Runs configurations, with what all of them share."""

    target: LanguageModel
    contenders: dict[str, Callable[[], Contender]]  # how to make each; it is made when first needed, and reused
    prompts: Prompts
    ceiling: float  # bytes/s that the memory moves at best
    warmups: int = 2
    trials: int = 3
    budget: float | None = None  # seconds from now on
    configurations: int = 1  # that will run, which share the budget
    seed: int = 0
    random_weights: bool = False  # then those of transformers differ from ours, and drafts are accepted by accident
    save: Callable[[list[dict]], None] = lambda rows: None  # given a configuration's rows after each warm-up and trial

    def __post_init__(self) -> None:
        """Start the time budget."""
        self.deadline = time.monotonic() + (self.budget or float("inf"))
        self.left = self.configurations
        self.made: dict[str, Contender] = {}

    def run(self, configuration: Configuration) -> list[dict]:
        """Return a row for each contender, or one for all if the configuration cannot be."""
        self.configuration = configuration
        self.rows: dict[str, dict[str, Any]]
        self.rows = {name: {"configuration": configuration.name, "contender": name} for name in self.contenders}
        self.runs: dict[str, list[list[TimedRun]]] = {}  # by contender and trial; without contenders that failed
        try:
            if unknown := sorted(set(configuration.sampling) - {f.name for f in fields(Sampling)}):
                raise ValueError(f"not available: decoding has no {unknown[0]} here")
            self.sampling = Sampling(**configuration.sampling)
            need, context = configuration.prompt + configuration.new, self.target.config.context
            if need > context:
                raise ValueError(f"{need} tokens are needed, the target's context holds {context}")
        except ValueError as error:
            return [{"configuration": configuration.name, "contender": "all", "skipped": str(error)}]
        end = _share(self.deadline, self.left)
        self.left -= 1
        for number, name in enumerate(self.contenders):
            self.limit = _share(end, len(self.contenders) - number)
            self._attempt(name)
        self.limit = end
        for _ in range(1, self.trials):
            for name in list(self.runs):
                self._attempt(name)
        summary = self._summarised()
        if "plain" in self.runs and self.sampling.greedy:
            self._compare_texts(summary)
        return list(summary.values())

    def _attempt(self, name: str) -> None:
        """Give a contender a trial, after its warm-up if it is the first, and save all rows.

        Nothing begins after the deadline, and no further trial after the limit. An error is recorded in the row.
        """
        row, now = self.rows[name], time.monotonic()
        try:
            if name not in self.runs:
                if now > self.deadline:
                    raise NotAvailable(f"the budget of {self.budget:g} s is used up")
                self._warm_up(name)
            if not self.runs[name] or now <= self.limit:
                self._trial(name)
        except NotAvailable as error:
            row["skipped"] = str(error)
        except Exception as error:  # a benchmark reports a contender's failure and continues
            row["failed"] = sentence(error)
        if "failed" in row or "skipped" in row:
            self.runs.pop(name, None)
        self.save(list(self._summarised().values()))

    def _warm_up(self, name: str) -> None:
        print(f"{self.configuration.name}: {name} warms up", file=sys.stderr, flush=True)
        start = time.monotonic()
        if name not in self.made:
            self.made[name] = self.contenders[name]()
        half = _share(self.limit, 2)
        for number in range(self.warmups):
            if number and time.monotonic() > half:
                break
            prompt = self.prompts(0, self.configuration.prompt)[0]
            self.made[name](prompt, self.configuration.new, self.sampling, self.seed)
        self.rows[name] |= {"warmup_seconds": time.monotonic() - start, "trials": 0}
        self.runs[name] = []

    def _trial(self, name: str) -> None:
        trial, row, contender = len(self.runs[name]), self.rows[name], self.made[name]
        print(f"{self.configuration.name}: {name}, trial {trial + 1} of {self.trials}", file=sys.stderr, flush=True)
        device, prompts = self.target.device, self.prompts(trial, self.configuration.prompt)
        before = reset_peak(device)
        runs: list[TimedRun] = []
        for prompt in prompts:
            if not runs or time.monotonic() <= self.limit:
                runs.append(contender(prompt, self.configuration.new, self.sampling, self.seed + trial))
        peak = peak_bytes(device, before)
        time.sleep(contender.settle_seconds)
        for run in runs:
            if len(run.tokens) != self.configuration.new:
                raise ValueError(f"it made {len(run.tokens)} tokens instead of {self.configuration.new}")
        row["peak_bytes"] = max(row.get("peak_bytes", 0), peak + (contender.weights if device.type == "cuda" else 0))
        row["trials"] += 1
        self.wanted = self.trials * len(prompts)
        self.runs[name].append(runs)

    def _summarised(self) -> dict[str, dict]:
        """Return the rows with what the trials so far say, and speeds relative to plain and to transformers."""
        summary = {name: dict(row) for name, row in self.rows.items()}
        measured = [name for name, trials in self.runs.items() if trials]
        for name in measured:
            summary[name] |= self._summary(name)
        speed = {name: summary[name]["tokens_per_second"] for name in measured}
        others = {name: r for name, r in speed.items() if not (self._own(name) or self._accidental(name))}
        best = max(others, key=others.__getitem__) if others else None
        for name, rate in speed.items():
            if best is not None:
                summary[name] |= {"to_transformers": rate / others[best], "fastest_of_transformers": best}
            if "plain" in speed:
                summary[name]["to_plain"] = rate / speed["plain"]
        return summary

    def _summary(self, name: str) -> dict:
        trials, configuration, contender = self.runs[name], self.configuration, self.made[name]
        runs = [run for trial in trials for run in trial]
        steps = [seconds for run in runs for seconds in run.steps]
        first = statistics.median(run.prefill_seconds for run in runs)
        rates = [sum(len(run.tokens) for run in trial) / sum(run.seconds for run in trial) for trial in trials]
        out = {
            "texts": len(runs),
            "tokens_per_second": statistics.median(rates),
            "prefill_tokens_per_second": configuration.prompt / first,
            "time_to_first_token_ms": 1e3 * first,
            "cache_bytes": max(run.cache_bytes for run in runs),
            "weight_bytes": contender.weights,
            **contender.details(),
        }
        if steps:
            rates = [sum(len(run.tokens) - 1 for run in t) / sum(sum(run.steps) for run in t) for t in trials]
            rate = statistics.median(rates)
            moved = contender.moved(self.target, configuration.prompt + configuration.new / 2)
            p50, p95 = np.percentile(steps, [50, 95])
            out |= {
                "decode_tokens_per_second": rate,
                "step_ms": {"p50": 1e3 * p50, "p95": 1e3 * p95},
                "tokens_per_step": sum(len(run.tokens) - 1 for run in runs) / len(steps),
                "share_of_bandwidth": rate * moved / self.ceiling,
            }
        if MARK in name:
            out["simulated"] = True
        elif self._accidental(name):
            out["note"] = "random weights: what is accepted means nothing"
        if len(runs) < self.wanted and self.budget is not None:
            out["cut"] = f"{len(runs)} of {self.wanted} texts within the budget of {self.budget:g} s"
        return out

    def _accidental(self, name: str) -> bool:
        return self.random_weights and self.made[name].drafts and MARK not in name

    def _own(self, name: str) -> bool:
        """Whether it has the target's own weights."""
        return self.made[name].ours or self.made[name].peer

    def _compare_texts(self, rows: dict) -> None:
        """Compare greedy texts with those of our plain decoding."""
        for name, trials in self.runs.items():
            if MARK in name or (self.random_weights and not self._own(name)):
                continue
            texts = [
                (prompt, mine.tokens, plain.tokens)
                for trial, both in enumerate(zip(trials, self.runs["plain"], strict=False))
                for prompt, mine, plain in zip(self.prompts(trial, self.configuration.prompt), *both, strict=False)
            ]
            rows[name] |= compare_texts(self.target, texts, gaps=not self.sampling.penalised)


def _share(end: float, parts: int) -> float:
    """Return when the first of so many equal parts of the time until `end` is over."""
    now = time.monotonic()
    return now + max(end - now, 0.0) / max(parts, 1)


def compare_texts(target, texts: Sequence[tuple[list[int], list[int], list[int]]], gaps: bool = True) -> dict:
    """Return how many texts are the same as plain decoding's, and where each other one differs first.

    texts: prompt, a contender's text and plain decoding's. gaps: also report the target's logit gap there, before any
    penalty. Sums in another order change a text where two logits are nearly equal. A large gap says that the contender
    computes something else.
    """
    differences = []
    for number, (prompt, mine, plain) in enumerate(texts):
        at = next((i for i, (a, b) in enumerate(zip(mine, plain, strict=True)) if a != b), None)
        if at is not None:
            gap = {"logit_gap": logit_gap(target, prompt + plain[:at], plain[at], mine[at])} if gaps else {}
            differences.append({"text": number, "token": at} | gap)
    same = {"same_text_as_plain": f"{len(texts) - len(differences)} of {len(texts)}"}
    if not differences:
        return same
    earliest = min(difference["token"] for difference in differences)
    words = f"{len(differences)} of {len(texts)} texts differ from plain decoding's, the earliest at token {earliest}"
    if gaps:
        found = [difference["logit_gap"] for difference in differences]
        words += f"; the target's logits are {min(found):.2g} to {max(found):.2g} apart there"
    return same | {"differences": differences, "differs": words}


@torch.inference_mode()
def logit_gap(target, tokens: list[int], token: int, other: int) -> float:
    """Return how much higher the target's logit of `token` is than that of `other`, after these tokens."""
    ids = torch.tensor([tokens], device=target.device)
    last = torch.tensor([len(tokens) - 1], device=target.device)
    logits, _ = target(ids, target.new_cache(1, len(tokens)), last=last, prefill=True)
    return (logits[0, 0, token] - logits[0, 0, other]).item()
