"""Observers receive what they declare to read, of eager rounds and of replayed ones."""

import pytest
from helpers import tiny_drafter, tiny_target
from tape import Tape
from test_overlap import SAMPLED

from specdec.cli.screen import Screen
from specdec.engine import executor
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.engine.report import Observer, Observers, Reads, RoundReport
from specdec.trees import SampledTree
from specdec.verify import make_verifier

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
    engine = Engine(
        target, tiny_drafter(target), SampledTree((2, 2)), make_verifier("rejection"), graphs=Tape() if graphs else None
    )
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
        assert engine.graphs.backend.captures == len(Reads)
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
