"""Reading one round late changes nothing but the time: same text, same traces, same trees."""

from types import SimpleNamespace

import pytest
import torch
from helpers import DRAFTERS, save_hf, tiny_target

from specdec.drafters import eagle3
from specdec.engine.engine import Engine
from specdec.engine.loop import Loop
from specdec.engine.report import Emission, RoundReport, SilentClock
from specdec.engine.sequence import Sequence
from specdec.model.hf_target import TransformersTarget
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import VERIFIERS, make_verifier

PROMPTS, LIMITS, EOS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]], [17, 30, 5], frozenset({4, 9})
SAMPLED = Sampling(0.8, 5, 0.9, 0.02)


class Watcher:
    """Keeps every report: the numbers of its rows, and what it reports of them."""

    def __init__(self):
        self.seen, self.numbers = [], {}

    def __call__(self, report):
        if report.prefill:
            self.numbers |= {row: len(self.numbers) + i for i, row in enumerate(report.rows)}
        rows = [self.numbers[row] for row in report.rows]
        made = [rows, report.emitted, report.accepted, [row.finish for row in report.rows]]
        if report.tree is not None:
            tree = report.tree
            parts = tree.tokens, tree.parents, tree.ancestors, tree.logq, report.verdict.path, report.logits
            made += [x.clone() for x in parts]
        self.seen.append(made)


def outcome(engine: Engine, prompts=PROMPTS, **how) -> tuple:
    """Return the rows, log-probabilities and reports of one call."""
    watcher = Watcher()
    rows = engine.generate(prompts, observer=watcher, **({"max_new_tokens": LIMITS, "eos": EOS} | how)).rows
    return [(row.tokens, row.finish, row.trace) for row in rows], [row.logprobs for row in rows], watcher.seen


def assert_same(left: tuple, right: tuple) -> None:
    """Real numbers may differ by rounding: attention over more slots sums in another order. Logits are around 10."""
    assert left[0] == right[0]
    for a, b in zip(left[1], right[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-4)
    running = left[2][0][0]  # what is computed for rows that have ended does not matter
    for a, b in zip(left[2], right[2], strict=True):
        ours, theirs = ([seen[0].index(row) for row in running] for seen in (a, b))
        for x, y in zip(a[1:4], b[1:4], strict=True):
            assert [x[row] for row in ours] == [y[row] for row in theirs]
        for x, y in zip(a[4:], b[4:], strict=True):
            torch.testing.assert_close(x[ours], y[theirs], rtol=0, atol=1e-4)
        running = [row for row, at in zip(running, ours, strict=True) if a[3][at] is None]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", ["eagle3", "lookup", "dflash"])
def test_reading_late_changes_nothing(drafter, verifier, sampling):
    target, rule = tiny_target(vocab=11), make_verifier(verifier)
    policy = Chain(3) if not rule.needs_q else SampledTree((1, 1) if rule.chains_only else (2, 2))
    parts = DRAFTERS[drafter](target), policy, rule
    once, late = (outcome(Engine(target, *parts, overlap=late), sampling=sampling) for late in (False, True))
    assert_same(late, once)


def test_a_target_of_transformers_with_settings_of_each_row(tmp_path):
    """Only the host knows stops. The device continues a row that a stop ends."""

    class Third:
        count = 0

        def add(self, token: int) -> bool:
            self.count += 1
            return self.count == 3

    target = TransformersTarget(save_hf(tmp_path, "gpt_neox"))
    samplings = [Sampling(repetition_penalty=1.3), SAMPLED, Sampling(0.7, frequency_penalty=0.5)]
    how = {"max_new_tokens": 12, "sampling": samplings, "logprobs": True, "eos": frozenset()}
    for parts in ((), (eagle3.create(target).eval(), DynamicTree(3, 3, 9))):
        results = [outcome(Engine(target, *parts, overlap=late), stop=[None, Third(), None], **how) for late in (0, 1)]
        assert_same(results[1], results[0])
        assert [row[1] for row in results[0][0]] == ["length", "stop", "length"]


class Script:
    """A batch of one row whose rounds emit given numbers of tokens. It logs each launch with its `max_len`."""

    device = torch.device("cpu")
    round = SimpleNamespace(path=3)
    settings = SimpleNamespace(sampling=Sampling())

    def __init__(self, row: Sequence, rounds: list[int]):
        self.sequences, self.rounds, self.log = [row], iter(rounds), []
        self.captured, self.clock = False, SilentClock()

    def going(self) -> list[Sequence]:
        return [row for row in self.sequences if row.finish is None]

    def launch(self, max_len: int, ended) -> RoundReport:
        n = next(self.rounds)
        self.log.append(f"launch {max_len}")
        return RoundReport(self.sequences, emission=Emission(torch.ones(1, 3, dtype=torch.int64), torch.tensor([n])))


@pytest.mark.parametrize(
    ("row", "rounds", "log", "tokens"),
    [
        # Two tokens are known, one of them not in the cache; an unread round may add three.
        (Sequence([0, 0], 8, tokens=[1]), [1, 3, 3, 3],
         ["launch 2", "launch 5", "read 1", "launch 6", "read 3", "launch 9", "read 3"], [1] * 8),
        # The unread round brings the last token in any case: no other round is started.
        (Sequence([0, 0], 3, tokens=[1]), [1, 3], ["launch 2", "launch 5", "read 1", "read 3"], [1] * 3),
        # One round is void after a text that ends early.
        (Sequence([0], 9, tokens=[2], eos=frozenset({1})), [3, 3], ["launch 1", "launch 4", "read 3"], [2, 1]),
    ],
)  # fmt: skip
def test_a_round_is_launched_before_the_one_before_it_is_read(row, rounds, log, tokens):
    script = Script(row, rounds)
    loop = Loop(script, lag=1)
    while loop.next() is not None:
        script.log.append(f"read {row.trace.accepted[-1] + 1}")
    assert (script.log, row.tokens) == (log, tokens)
