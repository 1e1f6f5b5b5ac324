"""Rows that let fewer levels of the draft tree count, or none: their text stays, and so does that of the others."""

import pytest
from helpers import tiny_drafter, tiny_target
from tape import Tape

from specdec.adaptive import Fixed
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree

STEPS = [None, 0, 1, 2, 0, None, 9]
SAMPLINGS = [Sampling(), Sampling(0.9), Sampling(1.1, top_k=9)]
TREES = {"chain": Chain(3), "tree": DynamicTree(3, 3, 9)}
HOW = {
    "at once": {},
    "overlapped": {"overlap": True},
    "recorded": {"graphs": Tape()},
    "adaptive": {"adaptive": Fixed(2)},
}


def prompt(number: int) -> list[int]:
    return [1 + number, 5, 9 + number % 3] * (1 + number % 2)


def decode(engine: Engine, steps: list, rows: int) -> tuple[list, list]:
    """Sequences, and by round (row, accepted, levels that count)."""
    engine.reserve(rows, 60)
    jobs = []
    for number, most in enumerate(steps):
        sampling = SAMPLINGS[number % 3]
        how = {"sampling": sampling, "seed": (number, 0), "max_new_tokens": 24, "eos": frozenset()}
        jobs.append(engine.add(prompt(number), steps=most, **how))
    rounds = []
    while (report := engine.step()) is not None:
        if not report.prefill:
            levels = report.levels or [None] * len(report.rows)
            rounds += [(row, accepted, level, report.nodes)
                       for row, emitted, accepted, level in zip(
                           report.rows, report.emitted, report.accepted, levels, strict=True) if emitted]  # fmt: skip
    return jobs, rounds


@pytest.mark.parametrize(
    ("tree", "how"), [*(("tree", how) for how in HOW), *(("chain", how) for how in HOW if how != "recorded")]
)
def test_every_row_has_its_text_and_no_more_levels_than_it_lets_count(tree, how):
    target = tiny_target()
    jobs, rounds = decode(Engine(target, tiny_drafter(target), TREES[tree], **HOW[how]), STEPS, 3)
    for number, job in enumerate(jobs):
        alone = Engine(target).generate(
            [prompt(number)], seed=[(number, 0)], sampling=job.sampling, max_new_tokens=24, eos=frozenset()
        )
        assert job.tokens == alone.rows[0].tokens
    most = {job: 3 if steps is None else min(steps, 3) for job, steps in zip(jobs, STEPS, strict=True)}
    assert all(accepted <= most[row] for row, accepted, *_ in rounds)
    assert {accepted for row, accepted, *_ in rounds if row.steps == 1} == {0, 1}
    assert max(accepted for row, accepted, *_ in rounds if row.steps is None) == (2 if how == "adaptive" else 3)


@pytest.mark.parametrize("how", ["at once", "overlapped", "adaptive"])
def test_nothing_is_drafted_where_nobody_wants_it(how):
    """And a chain is as long as the longest that is wanted."""
    target = tiny_target()
    for steps, nodes in ((0, 1), (1, 2)):
        engine = Engine(target, tiny_drafter(target), Chain(3), **HOW[how])
        _, rounds = decode(engine, [steps] * 3, 3)
        assert {columns for *_, columns in rounds} == {nodes}


def test_fewer_levels_than_none():
    engine = Engine(tiny_target())
    engine.reserve(1, 20)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        engine.add([1, 2], steps=-1)
