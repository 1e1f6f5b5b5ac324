"""Tensors that graphs read live as long as the graphs, and no longer. The tape holds none: see `tape.Borrowed`."""

from functools import partial

from helpers import finish, tiny_drafter, tiny_target
from tape import Tape
from test_overlap import SAMPLED, assert_same, outcome
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.engine import batch as batches
from specdec.engine.engine import Engine
from specdec.model import rope
from specdec.model.layers import RMSNorm
from specdec.ops.rms_norm import reference
from specdec.structs import Sampling
from specdec.trees import DynamicTree

launching = partial(Engine, compact=False)
SHORT = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": [9, 12]}
TREE = DynamicTree(3, 3, 9)


class Settling(RMSNorm):
    """A norm that replaces its frozen function at its second call."""

    calls = 0

    def bind(self):
        self.calls = 0
        return super().bind()

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.frozen = reference(self.weight.clone(), self.eps)
        return super().forward(x)


def test_graphs_hold_what_the_warm_up_has_made():
    """Also after another engine has frozen the modules again."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.norm.__class__ = Settling
    recorded, plain = Engine(target, drafter, TREE, graphs=Tape()), launching(target, drafter, TREE)
    for _ in range(2):
        assert_same(outcome(recorded, **SHORT), outcome(plain, **SHORT))
    assert recorded.graphs.backend.captures == 1


def test_another_engine_may_replace_the_tables_of_positions(monkeypatch):
    monkeypatch.setattr(rope, "GROWTH", 64)
    target = tiny_target(context=600)
    alone = Engine(target).generate([[3, 5, 7]], max_new_tokens=12).rows[0].tokens
    engine = Engine(target, graphs=Tape())
    engine.reserve(1, 20)
    sequence = engine.add([3, 5, 7], max_new_tokens=12)
    for _ in range(4):
        engine.step()
    before = target.ropes[0].table.data_ptr()
    Engine(target).generate([[1] * 500], max_new_tokens=2)
    assert target.ropes[0].table.data_ptr() != before
    finish(engine)
    assert sequence.tokens == alone


def test_settings_are_dropped_with_their_graphs(monkeypatch):
    """An engine keeps the settings of its graphs and the present ones, however many it meets."""
    monkeypatch.setattr(batches, "MOST", 2)
    target = tiny_target(layers=1)
    parts, counts = (target, tiny_drafter(target), TREE), []
    recorded, plain = Engine(*parts, graphs=Tape()), launching(*parts)
    penalised = [Sampling(0.5, repetition_penalty=1.5), Sampling(1.0, frequency_penalty=0.5)]
    for step, sampling in enumerate((penalised, SAMPLED, Sampling(), Sampling(0.7), penalised)):
        how = SHORT | {"sampling": sampling, "eos": frozenset(range(11, 11 + step % 5))}
        assert_same(outcome(recorded, **how), outcome(plain, **how))
        batch = recorded.graphs.batch
        assert len(batch.graphs) <= 2
        assert set(batch.tensors.kinds) <= {key[1] for key in batch.graphs} | {batch.tensors.kind}
        if (penalties := batch.tensors.settings.penalties) is not None:
            counts.append(StorageWeakRef(penalties.counts.untyped_storage()))
    assert [ref.expired() for ref in counts] == [True, False]
