"""Observers say what they read, and that is what they are given, of launched rounds and of replayed ones."""

import pytest
from helpers import tiny_drafter, tiny_target
from tape import Tape
from test_overlap import SAMPLED

from specdec.cli.screen import Screen
from specdec.engine import static_batch
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.engine.report import Observer, Observers, Reads, RoundReport
from specdec.trees import DynamicTree, SampledTree
from specdec.verify import make_verifier

HOW = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": 12, "eos": frozenset()}


class Watch(Observer):
    """Keeps what there is to see of each round: of tree, q, verdict and logits."""

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


@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched"])
def test_what_an_observer_reads(graphs):
    """Each is given what it reads and no more, and all are told the same tokens. A function is given everything."""
    target = tiny_target()
    engine = Engine(
        target, tiny_drafter(target), SampledTree((2, 2)), make_verifier("rejection"), graphs=Tape() if graphs else None
    )
    watches = [Watch(reads) for reads in Reads]
    everything = Watch(Reads.TOKENS)
    for observer in (*watches, lambda report: everything(report)):
        engine.generate(**HOW, sampling=SAMPLED, observer=observer)
    for watch in watches:
        assert set(watch.seen) == {SEEN[watch.reads]}
    assert everything.seen == watches[-1].seen
    assert all(watch.emitted == everything.emitted for watch in watches)
    assert len(everything.emitted) > 3
    if graphs:
        assert engine.graphs.backend.captures == len(Reads)
        engine.generate(**HOW, sampling=SAMPLED)  # nobody looks: the graph of an observer that reads tokens
        assert engine.graphs.backend.captures == len(Reads)


def test_plain_decoding_has_nothing_to_see():
    target = tiny_target()
    for graphs in (Tape(), None):
        watch = Watch(Reads.LOGITS)
        Engine(target, graphs=graphs).generate(**HOW, observer=watch)
        assert set(watch.seen) == {SEEN[Reads.TOKENS]}


def test_nothing_is_copied_that_nobody_reads(monkeypatch):
    """Behind a replay."""
    copied = []
    copy = static_batch._copy
    monkeypatch.setattr(static_batch, "_copy", lambda value: copied.append(value) or copy(value))
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), DynamicTree(3, 3, 9), graphs=Tape())
    for observer in (None, Watch(Reads.TOKENS)):
        engine.generate(**HOW, observer=observer)
    assert not copied
    tape = engine.graphs.backend
    before = tape.replays
    engine.generate(**HOW, observer=Watch(Reads.TREES))
    assert len(copied) == 2 * (tape.replays - before) > 0  # tree and verdict


def test_who_reads_what():
    target = tiny_target()
    target.tokenizer = None
    screens = [Screen(target, quiet=True, trees=trees) for trees in (False, True)]
    assert [screen.reads for screen in screens] == [Reads.TOKENS, Reads.TREES]
    assert Recorder().reads is Observer.reads is Reads.LOGITS
    assert Observers(*screens).reads is Reads.TREES
    assert Observers(screens[0], Recorder()).reads is Reads.LOGITS
