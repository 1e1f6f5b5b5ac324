"""Long prompts are read in parts. Running rows wait for one part at a time, and no text changes."""

import pytest
from helpers import DRAFTERS, assert_as_alone, come_and_go, finish, job, tiny_target
from hybrids import HYBRIDS, hybrid_target

from specdec.engine.engine import Engine
from specdec.trees import Chain, DynamicTree

PART = 4


def long(number: int) -> dict:
    """A job whose prompt has up to 24 tokens."""
    one = job(number)
    return one | {"prompt": one["prompt"] * (2 + 3 * (number % 3)), "max_new_tokens": 12}


@pytest.mark.matrix
@pytest.mark.parametrize("family", sorted({*HYBRIDS} - {"qwen3_5_text"}))
def test_targets_with_recurrent_layers(family, tmp_path):
    """A family whose layers read several positions from an empty state only reads its prompts at once."""
    target = hybrid_target(tmp_path, family)
    assert target.reads_on == (family != "mamba")
    engine = Engine(target, DRAFTERS["lookup"](target), Chain(2))
    come_and_go(engine, [long(number) for number in range(6)], rows=3, part=7)


def test_rows_that_run_wait_for_one_part_at_a_time(monkeypatch):
    """Between two rounds the target reads PART prompt tokens at most, and every prompt token once."""
    target, read, playing = tiny_target(), [[]], []
    engine = Engine(target, DRAFTERS["eagle3"](target), DynamicTree(3, 3, 9))
    engine.reserve(3, 60, part=PART)
    first = engine.add([5, 6], max_new_tokens=50, eos=frozenset())
    engine.step()
    forward, play = target.forward, engine.round.play

    def reading(tokens, cache, **how):
        if not playing:
            read[-1].append(tokens.numel())
        return forward(tokens, cache, **how)

    def round_(*args, **how):
        playing.append(True)
        output = play(*args, **how)
        playing.clear()
        read.append([])
        return output

    monkeypatch.setattr(target, "forward", reading)
    monkeypatch.setattr(engine.round, "play", round_)
    others = [engine.add(**long(number)) for number in (1, 2, 4, 5)]
    while first.finish is None:
        engine.step()
    most = [sum(parts) for parts in read]
    assert max(most) == PART
    assert sum(most) == sum(len(other.prompt) for other in others)
    assert all(len(parts) <= 1 for parts in read)


def test_nobody_waits_where_nothing_runs():
    engine = Engine(tiny_target())
    engine.reserve(2, 48, part=PART)
    row = engine.add([2, 8] * 12, max_new_tokens=12, eos=frozenset())
    kinds = [engine.step().prefill for _ in range(8)]
    assert kinds == [True] * 6 + [False] * 2  # 24 tokens
    assert len(row.tokens) == 3


def test_a_part_that_fails_can_be_repeated(monkeypatch):
    target = tiny_target()
    engine = Engine(target)
    engine.reserve(1, 48, part=PART)
    row, forward = engine.add(**long(2)), target.forward
    engine.step()
    monkeypatch.setattr(target, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(target, "forward", forward)
    finish(engine)
    assert_as_alone(target, [row])
