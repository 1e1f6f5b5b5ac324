"""Adaptive policies choose by load and acceptance, and they change no text."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import DRAFTERS, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Restless
from tape import Tape

from specdec import calibrate
from specdec.adaptive import Calibrated, Curve, Draft, Ema, Fixed, Outcome, Survival, Table, Told
from specdec.adaptive.costed import FEW, FEW_PLAIN, PATIENCE, SELDOM, SHARE, STRETCH
from specdec.adaptive.survival import BEGIN, FIRST
from specdec.engine.controller import Controller
from specdec.engine.engine import Engine
from specdec.trees import Chain, DynamicTree


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("kind", ["eagle3", "mtp-three-heads", "draft-model", "dflash"])
def test_rows_that_come_and_go(target, kind, monkeypatch):
    """Rows join and leave while plain rounds hold positions for the drafter. Whether the drafter absorbs these at once
    or later changes neither the text nor what is accepted."""
    traces, held, admit = [], set(), Controller.admit

    def watched(self, *given):
        state = admit(self, *given)
        held.add(self.joining is not None)
        return state

    monkeypatch.setattr(Controller, "admit", watched)
    for whole in (1, 32, None):  # positions absorbed at once; None: in each round
        if whole is None:
            monkeypatch.setattr(
                Controller, "defers", property(lambda self: False, lambda self, value: None), raising=False
            )
        else:
            monkeypatch.setattr("specdec.engine.backlog.ABSORBED", whole)
        policy = Restless(3)
        engine = Engine(target, DRAFTERS[kind](target), DynamicTree(3, 3, 9), adaptive=policy)
        sequences, _ = come_and_go(engine, [job(i) for i in range(9)], rows=3)
        assert {outcome.levels for outcome in policy.outcomes} == {0, 1, 2, 3}
        traces.append([s.trace for s in sequences])
    assert traces[0] == traces[1] == traces[2]
    assert sum(sum(trace.accepted) for trace in traces[0]) > 0
    assert held == {True, False}


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
def test_a_server_that_never_drafts_holds_no_more_than_its_rows(target, overlap, monkeypatch):
    """An idle server holds nothing."""
    monkeypatch.setattr("specdec.engine.backlog.MOST_PARTS", 1)
    engine = Engine(target, DRAFTERS["eagle3"](target), Chain(2), adaptive=Fixed(0), overlap=overlap)
    engine.reserve(3, 16)
    controller, widest = engine.loop.batch.controller, 0
    for number in range(40):
        engine.add([1 + number % 7, 3], max_new_tokens=4 + number % 9, eos=frozenset())
        for _ in range(4):
            engine.step()
        if controller.backlog is not None:
            widest = max(widest, sum(part.joined()[1].shape[1] for part in controller.backlog.parts))
    assert 8 < widest <= 2 * 16  # one part that was made of others, and what came since
    finish(engine)
    assert controller.backlog is controller.plan is None
    assert not engine.loop.batch.sequences
    row = engine.add([1, 3], max_new_tokens=9, eos=frozenset())
    finish(engine)
    assert row.tokens == Engine(target).generate([[1, 3]], max_new_tokens=9, eos=frozenset()).rows[0].tokens


# What policies choose


def curve(forward: float, node: float, level: float = 0.2, rows=(1, 8, 64)) -> Curve:
    """Costs of a forward: a base, and `node` for every node of every row. A drafted level costs `level`."""
    verify = {b: {n: forward + node * b * n for n in (1, 2, 4, 6)} for b in rows}
    return Curve(rows, {b: [0.0, *(level * d for d in range(1, 6))] for b in rows}, verify)


SIZES = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["table", "ema", "survival"])
def test_more_rows_draft_less_and_slow_servers_draft_more(kind):
    policy = calibrate.assembled(kind, lambda: curve(1.0, 0.03), SIZES, [0.6] * 5)
    policy.seen, policy.drafts, policy.rounds = FIRST, BEGIN, BEGIN  # before that, all levels are tried
    depths = [policy.plan(rows) for rows in (1, 8, 64)]
    assert depths[0] > depths[1] > depths[2] == 0
    for _ in range(200):  # a round takes as long as many forwards
        policy.learn(Outcome(0, 1, [0] * 64, [True] * 64))
        policy.took(1.0 + 0.03 * 64 + 50.0)
    assert settled(policy, 64) > 0


def test_how_long_served_rounds_take_is_learnt_by_the_number_of_rows_and_of_levels():
    costs = curve(1.0, 0.01)
    own = {(rows, levels): costs.seconds(rows, levels, levels + 1) for rows in (1, 8) for levels in range(6)}
    for turn in range(400):
        costs.took(1, 2, 3, own[1, 2] + 0.5)
        costs.took(8, 0, 1, own[8, 0] + 4.0)
        if turn % 50 == 0:
            costs.took(8, 5, 6, own[8, 5] + 1.0)
    assert costs.seconds(1, 2, 3) == pytest.approx(own[1, 2] + 0.5)
    as_drafts = own[1, 0] + 0.5 * 1.01 / 1.41
    assert costs.seconds(1, 0, 1) == pytest.approx(as_drafts), "of plain rounds as of drafts, in proportion"
    assert costs.plain(8) == pytest.approx(own[8, 0] + 4.0)
    assert costs.plain(7) == pytest.approx(costs.plain(8), rel=0.01), "of other rows that of the nearest"
    assert costs.seconds(8, 5, 6) == pytest.approx(own[8, 5] + 1.0)
    assert costs.seconds(8, 2, 3) == pytest.approx(own[8, 2] + 1.48 / 2.08), "as other drafts"
    assert Curve.of(costs.entries()).seconds(8, 2, 3) == own[8, 2], "it is kept with no curve"


def test_a_machine_that_slows_down_slows_all_kinds_of_rounds():
    """This includes kinds of rounds that are not played meanwhile."""
    costs = curve(1.0, 0.01)
    plain, deep = costs.plain(1), costs.seconds(1, 5, 6)
    for slower in (1.0, 1.4):
        for turn in range(300):
            costs.took(1, 0, 1, slower * (plain + 1.0))
            if slower == 1.0 and turn % 10 == 0:
                costs.took(1, 5, 6, deep + 2.0)
    assert costs.plain(1) == pytest.approx(1.4 * (plain + 1.0), rel=0.01)
    assert costs.seconds(1, 5, 6) == pytest.approx(1.4 * (deep + 2.0), rel=0.15)


def test_drafting_begins_again_when_it_would_have_been_faster_for_a_while():
    policy = Ema(curve(1.0, 0.03), SIZES, [0.6] * 5)
    policy.rounds = BEGIN
    assert policy.plan(1) > 0, "at first there is nothing to absorb"
    assert policy.plan(64) == 0
    assert [policy.plan(1) > 0 for _ in range(PATIENCE + 2)] == [False] * PATIENCE + [True] * 2
    assert policy.plan(64) == 0
    for rows in (1,) * PATIENCE + (64,) + (1,) * PATIENCE:
        assert policy.plan(rows) == 0, "a while that is interrupted begins anew"


def test_prompts_that_a_drafter_absorbs_are_paid_for_by_drafts():
    """If absorbing a prompt costs more than drafting saves, plain rounds are faster."""
    policies = [calibrate.assembled("table", lambda: curve(1.0, 0.03), SIZES, [0.6] * 5) for _ in range(2)]
    for policy, seconds in zip(policies, (0.001, 9.0), strict=True):
        for _ in range(40):
            policy.joined(1, seconds)
            for _ in range(4):
                policy.learn(Outcome(2, 3, [1], [False]))
        assert policy.plan(1) > 0, "nobody tells how long anything takes"
        policy.took(policy.curve.seconds(1, 2, 3))
    assert [settled(policy, 1) > 0 for policy in policies] == [True, False]


def test_trying_drafts_costs_a_small_share_of_plain_rounds():
    """The first drafted round after plain rounds takes as long as many of them: the drafter catches up."""
    policy = calibrate.assembled("table", lambda: curve(1.0, 10.0), SIZES, [0.6] * 5)
    plain, drafted, absorbing = policy.curve.plain(2), policy.curve.seconds(2, 1, 2), 40.0
    starts, before = [], 0
    for number in range(40_000):
        levels = policy.plan(2)
        policy.learn(Outcome(levels, levels + 1, [0] * 2, [False] * 2))
        policy.took((drafted + absorbing * plain * (not before)) if levels else plain)
        starts += [number] if levels and not before else []
        before = levels
    lost = FEW * (drafted / plain - 1) + absorbing
    assert len(starts) > 3
    assert lost / SHARE <= starts[1] - starts[0] <= 1.02 * lost / SHARE
    assert all(b - a <= SELDOM + FEW + STRETCH for a, b in pairwise(starts))


def settled(policy, rows: int) -> int:
    """Return the depth that a policy settles on for a constant number of rows."""
    return max([policy.plan(rows) for _ in range(2 * STRETCH + FEW_PLAIN + 1)][-FEW_PLAIN - 1 :])  # some may be plain


def test_a_table_says_what_it_is_told():
    table = Table.parse("1=5,8=3,32=0", 5)
    assert [table.plan(rows) for rows in (1, 7, 8, 31, 32, 100)] == [5, 5, 3, 3, 0, 0]
    assert str(table) == "1=5,8=3,32=0"
    for text in ("5", "1=2;3", "1=x", "1=6"):
        with pytest.raises(ValueError, match=r"table|levels"):
            Table.parse(text, 5)


def test_what_is_accepted_decides_how_deep():
    policy = Ema(curve(1.0, 0.03), SIZES, [0.6] * 5)
    assert policy.plan(1000) == 5, "the first rounds try all levels"
    policy.rounds = BEGIN
    for accepted, deeper in ((0, False), (5, True)):
        for _ in range(100):
            policy.learn(Outcome(5, 6, [accepted], [accepted == 5]))
        assert (settled(policy, 1) > 3) == deeper
    for _ in range(200):
        policy.learn(Outcome(5, 6, [0], [False]))
    assert settled(policy, 1) == 0
    for _ in range(5000):  # and what has not been observed for long goes back to the first guess
        policy.learn(Outcome(0, 1, [0], [True]))
    assert settled(policy, 1) > 0


def trees_of(p: list[list[float]], parents: list[int]) -> Draft:
    """Rows with these probabilities of nodes given their parents, in trees of one shape."""
    reach = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        reach[node] |= reach[parent]
    depth, rows = reach.sum(1) - 1, len(p)
    spread = [np.broadcast_to(np.asarray(x), (rows, *np.shape(x))) for x in (parents, depth, reach)]
    return Draft(int(depth.max()), np.log([[1.0, *row] for row in p]), *spread, np.ones(rows, dtype=bool))


def test_survival_takes_the_best_nodes_of_every_row():
    """By enumeration of all sets of nodes that are closed under parents, and of all widths."""
    draft = trees_of([[0.9, 0.05, 0.8, 0.1, 0.7], [0.5, 0.4, 0.2, 0.6, 0.1]], [0, 0, 0, 1, 1, 2])
    survival = Told().survival(draft)
    np.testing.assert_allclose(survival[0], [1, 0.9, 0.05, 0.72, 0.09, 0.035])
    for node in (0.01, 0.1, 0.3):
        costs = curve(1.0, node, rows=(2,))
        policy = Survival(costs, SIZES, [0.5] * 5, Told())
        assert policy.keep(draft) is None, "the first are verified whole"
        policy.seen, policy.drafts = FIRST, BEGIN
        kept = policy.keep(draft)
        kept = np.arange(6)[None].repeat(2, 0) if kept is None else kept
        best = {}
        for width in range(1, 7):
            subsets = [s for s in subsets_of(6, width) if all(draft.parents[0, x] in s for x in s)]
            best[width] = sum(max(survival[b][list(s)].sum() for s in subsets) for b in range(2))
        speed = {width: tokens / costs.seconds(2, draft.levels, width) for width, tokens in best.items()}
        assert kept.shape[1] == max(speed, key=speed.get)
        assert survival[np.arange(2)[:, None], kept].sum() == pytest.approx(best[kept.shape[1]])


def subsets_of(nodes: int, width: int) -> list[tuple[int, ...]]:
    return [(0, *map(int, s)) for s in torch.combinations(torch.arange(1, nodes), width - 1)] if width > 1 else [(0,)]


def test_a_fit_on_censored_labels_finds_the_truth():
    """The drafter overstates probabilities. Tokens after the first rejection are not labelled."""
    draw, truth = np.random.default_rng(0), np.array([0.3, -0.5, -0.2])
    estimator = Calibrated(3)
    for _ in range(400):
        p = draw.uniform(0.05, 0.95, (8, 3))
        right = draw.random((8, 3)) < 1 / (1 + np.exp(-(truth + 0.6 * np.log(p / (1 - p)))))
        n = right.cumprod(1).sum(1)
        path = np.where(np.arange(4) <= n[:, None], np.arange(4), 0)
        draft = trees_of(p.tolist(), [0, 0, 1, 2])
        estimator.learn(Outcome(3, 4, n.tolist(), [False] * 8, draft, path))
    np.testing.assert_allclose(estimator.weights, [*truth, 0.6], atol=0.15)


def test_costs_are_measured_and_policies_are_made_by_name(target, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "BUSY", float("inf"))  # what is measured is kept on any machine
    drafter, tree = tiny_drafter(target), DynamicTree(2, 2, 4)
    measured, busy = calibrate.measure_curve(target, drafter, tree, 3, repeats=1)
    assert not busy
    assert measured.rows == [1, 2, 3]
    assert all(len(measured.rest[b]) == 3 and set(measured.verify[b]) == {1, 2, 3, 4} for b in measured.rows)
    assert min(min(values) for values in measured.rest.values()) > 0
    for name in ("fixed", "table:1=2,2=0", "ema", "survival:told", "survival:margin", "survival:confidence"):
        policy = calibrate.make_policy(name, target, drafter, tree, rows=3)
        come_and_go(Engine(target, drafter, tree, adaptive=policy), [job(i) for i in range(4)], rows=3)
    for name in ("fast", "ema:2", "survival:luck", "table:9"):
        with pytest.raises(ValueError, match=r"there is no|table"):
            calibrate.make_policy(name, target, drafter, tree, rows=3)


def test_what_does_not_go_together(target):
    with pytest.raises(ValueError, match="without a drafter"):
        Engine(target, adaptive=Restless(3))
    for how in ({"compile": True}, {"graphs": Tape()}):
        with pytest.raises(ValueError, match="without graphs and compiling"):
            Engine(target, tiny_drafter(target), Chain(3), adaptive=Restless(3), **how)
