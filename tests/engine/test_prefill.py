"""Long prompts are read in parts: rows that run wait for a part at a time, and every text is the one it has alone."""

import pytest
from helpers import DRAFTERS, finish, tiny_target
from hybrids import HYBRIDS, hybrid_target
from tape import Tape

from specdec.adaptive import Fixed
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree

PROMPTS = [[3, 5, 7], [4, 4, 9, 8, 7, 6, 1] * 3, [1] * 4, [6, 1, 3] * 6, [10, 9, 8, 7, 6, 5, 4, 3, 2], [2, 8] * 12]
SAMPLINGS = [Sampling(), Sampling(0.9), Sampling(frequency_penalty=0.5)]
PART = 4


def added(engine: Engine, number: int):
    how = {"sampling": SAMPLINGS[number % 3], "seed": (number, 0), "max_new_tokens": 12, "logprobs": number % 2 == 0}
    return engine.add(PROMPTS[number], eos=frozenset(), **how)


def alone(target, number: int) -> list[int]:
    how = {"sampling": SAMPLINGS[number % 3], "seed": [(number, 0)], "max_new_tokens": 12, "eos": frozenset()}
    return Engine(target).generate([PROMPTS[number]], **how).rows[0].tokens


def decode(engine: Engine, part: int = PART, count: int = len(PROMPTS)) -> list:
    """The first `count` prompts, for three rows."""
    engine.reserve(3, 48, part=part)
    rows = [added(engine, number) for number in range(count)]
    finish(engine)
    return rows


@pytest.mark.parametrize(
    ("drafter", "how"),
    [("eagle3", {}), ("eagle3", {"overlap": True}), ("eagle3", {"graphs": Tape()}), ("eagle3", {"adaptive": Fixed(0)}),
     ("draft-model", {}), ("medusa", {}), ("dflash", {}), ("lookup", {}), (None, {})],
    ids=lambda value: "".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_every_text_is_the_one_it_has_alone(drafter, how):
    target = tiny_target()
    parts = [DRAFTERS[drafter](target), Chain(3)] if drafter else []
    count = 3 if "graphs" in how else len(PROMPTS)
    for number, row in enumerate(decode(Engine(target, *parts, **how), count=count)):
        assert row.tokens == alone(target, number)
        assert row.logprobs is None or len(row.logprobs) == 12


@pytest.mark.parametrize("family", sorted({*HYBRIDS} - {"qwen3_5_text"}))
def test_targets_with_recurrent_layers(family, tmp_path):
    """A family whose layers read several positions from an empty state only reads its prompts at once."""
    target = hybrid_target(tmp_path, family)
    assert target.reads_on == (family != "mamba")
    engine = Engine(target, DRAFTERS["lookup"](target), Chain(2))
    for number, row in enumerate(decode(engine, 7)):
        assert row.tokens == alone(target, number)


def watched(engine: Engine, monkeypatch) -> list[list]:
    """What the target's forwards read: a list that begins anew with every round."""
    read, forward, play = [[]], engine.target.forward, engine.round.play

    def reading(tokens, cache, **how):
        if not playing:
            read[-1].append(tokens.numel())
        return forward(tokens, cache, **how)

    def round_(*args, **how):
        playing.append(True)
        try:
            return play(*args, **how)
        finally:
            playing.clear()
            read.append([])

    playing: list = []
    monkeypatch.setattr(engine.target, "forward", reading)
    monkeypatch.setattr(engine.round, "play", round_)
    return read


def test_rows_that_run_wait_for_one_part_at_a_time(monkeypatch):
    """Between two of their rounds the target reads PART tokens of prompts at most, and all prompts in the end."""
    target = tiny_target()
    engine = Engine(target, DRAFTERS["eagle3"](target), DynamicTree(3, 3, 9))
    engine.reserve(3, 60, part=PART)
    first = engine.add([5, 6], max_new_tokens=50, eos=frozenset())
    engine.step()
    read = watched(engine, monkeypatch)
    for number in (1, 3, 4, 5):
        added(engine, number)
    while first.finish is None:
        engine.step()
    most = [sum(parts) for parts in read]
    assert max(most) == PART
    assert sum(most) == sum(len(PROMPTS[number]) for number in (1, 3, 4, 5))
    assert all(len(parts) <= 1 for parts in read)


def test_nobody_waits_where_nothing_runs():
    engine = Engine(tiny_target())
    engine.reserve(2, 48, part=PART)
    row = added(engine, 5)
    kinds = [engine.step().prefill for _ in range(8)]
    assert kinds == [True] * 6 + [False] * 2  # 24 tokens
    assert len(row.tokens) == 3


def test_one_that_is_given_up_while_it_is_read_is_forgotten():
    target = tiny_target()
    engine = Engine(target)
    engine.reserve(1, 48, part=PART)
    gone, other = added(engine, 1), added(engine, 3)
    engine.step()
    engine.abort(gone)
    assert engine.loop.batch.reading.sequence is None
    finish(engine)
    assert (gone.tokens, other.tokens) == ([], alone(target, 3))


def test_a_part_that_fails_can_be_repeated(monkeypatch):
    target = tiny_target()
    engine = Engine(target)
    engine.reserve(1, 48, part=PART)
    row, forward = added(engine, 3), target.forward
    engine.step()
    monkeypatch.setattr(target, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(target, "forward", forward)
    finish(engine)
    assert row.tokens == alone(target, 3)
