"""Reading one round late, dropping rows that have ended, and who observes change nothing but the time."""

from types import SimpleNamespace

import pytest
import torch
from helpers import DRAFTERS, save_hf, tiny_drafter, tiny_target
from tape import Tape
from test_batches import HEAVY, TREES, After, ragged

from specdec import Engine, Recorder, Sampling
from specdec.cli.screen import Screen
from specdec.drafters import eagle3
from specdec.engine import batch as batches
from specdec.engine import executor
from specdec.engine.loop import Loop
from specdec.engine.report import Emission, Observer, Observers, Reads, RoundReport, SilentClock
from specdec.engine.sequence import Sequence
from specdec.model.hf_target import TransformersTarget
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

    target = TransformersTarget(save_hf(tmp_path, "gpt_neox"))
    samplings = [Sampling(repetition_penalty=1.3), SAMPLED, Sampling(0.7, frequency_penalty=0.5)]
    how = {"max_new_tokens": 12, "sampling": samplings, "logprobs": True, "eos": frozenset()}
    for parts in ((), (eagle3.create(target).eval(), DynamicTree(3, 3, 9))):
        results = [
            outcome(Engine(target, *parts, overlap=late), stop=[None, After(3), None], **how) for late in (False, True)
        ]
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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model"])
def test_rows_that_have_ended_are_not_computed(drafter, late):
    """All of 16 rows but one end in the second round. The engine knows that one round later, and two if rounds are
    read late."""
    target, computed = tiny_target(), []
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(1)] if drafter else []), overlap=late)
    target.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    limits = [2] * 16
    limits[5] = 20
    rows = engine.generate([[3, 1]] * 16, max_new_tokens=limits, eos=frozenset()).rows
    assert [len(row.tokens) for row in rows] == limits
    assert computed[1:3] == [16, 16]
    assert set(computed[3:]) == {1}
    assert 0 <= len(computed) - 1 - rows[5].trace.rounds <= late  # a round that was started in vain


@pytest.mark.parametrize("price", [0.0, batches.PRICE], ids=["at once", "by the rule"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("drafter", "tree"), [("eagle3", "dynamic"), ("mtp", "sampled"), ("dflash", "chain")])
def test_dropping_rows_shows_nowhere(drafter, tree, late, price, monkeypatch):
    """Text, log-probabilities and reports are those of rows that are carried to the end."""
    monkeypatch.setattr(batches, "PRICE", price)
    target, (prompts, limits) = tiny_target(), ragged(6)
    sampling = [Sampling(0.8, 5, 0.9), HEAVY, Sampling()] * 2
    how = {"max_new_tokens": limits, "sampling": sampling, "eos": frozenset([11]), "logprobs": True}
    results = [
        outcome(
            Engine(target, DRAFTERS[drafter](target), TREES[tree], **made), prompts, **how,
            stop=[After(4 + i) if i % 4 == 2 else None for i in range(6)],
        )
        for made in ({"overlap": late}, {"compact": False})
    ]  # fmt: skip
    assert_same(*results)
    assert {finish for _, finish, _ in results[0][0]} >= {"length", "stop"}
    assert len(results[0][2][-1][0]) < 6, "nothing was dropped: the test shows nothing"


HOW = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": 12, "eos": frozenset()}


class Watch(Observer):
    """Notes which of tree, q, verdict and logits a report has."""

    def __init__(self, reads: Reads):
        self.reads, self.seen, self.emitted = reads, [], []

    def __call__(self, report: RoundReport) -> None:
        self.emitted.append(report.emitted)
        if not report.prefill:
            tree = report.tree
            parts = tree, tree and tree.q, report.verdict, report.logits
            self.seen.append(tuple(part is not None for part in parts))


SEEN = {
    Reads.TOKENS: (False, False, False, False),
    Reads.TREES: (True, False, True, False),
    Reads.LOGITS: (True, True, True, True),
}


@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "eager"])
def test_what_an_observer_reads(graphs, monkeypatch):
    """All observers receive the same tokens. A function receives everything. Unread fields are not copied."""
    copied, copy = [], executor.copy_of
    monkeypatch.setattr(executor, "copy_of", lambda value: copied.append(value) or copy(value))
    target = tiny_target(layers=1)
    parts = target, tiny_drafter(target), SampledTree((2, 2)), make_verifier("rejection")
    engine = Engine(*parts, graphs=Tape() if graphs else None)
    watches = [Watch(reads) for reads in Reads]
    everything = Watch(Reads.TOKENS)
    engine.generate(**HOW, sampling=SAMPLED, observer=watches[0])
    assert not copied
    watches[0] = Watch(Reads.TOKENS)
    for observer in (*watches, lambda report: everything(report)):
        engine.generate(**HOW, sampling=SAMPLED, observer=observer)
    for watch in watches:
        assert set(watch.seen) == {SEEN[watch.reads]}
    assert everything.seen == watches[-1].seen
    assert all(watch.emitted == everything.emitted for watch in watches)
    assert len(everything.emitted) > 3
    if graphs:
        assert engine.graphs.executor.captures == len(Reads)
        assert copied
    watch = Watch(Reads.LOGITS)
    Engine(target, graphs=Tape() if graphs else None).generate(**HOW, observer=watch)
    assert set(watch.seen) == {SEEN[Reads.TOKENS]}, "plain decoding has nothing to see"


def test_who_reads_what():
    target = tiny_target()
    target.tokenizer = None
    screens = [Screen(target, quiet=True, trees=trees) for trees in (False, True)]
    assert [screen.reads for screen in screens] == [Reads.TOKENS, Reads.TREES]
    assert Recorder().reads is Observer.reads is Reads.LOGITS
    assert Observers(*screens).reads is Reads.TREES
    assert Observers(screens[0], Recorder()).reads is Reads.LOGITS
