"""Adaptive policies choose by load and acceptance, and they change no text."""

from itertools import combinations

import numpy as np
import pytest
from helpers import DRAFTERS, come_and_go, finish, job, tiny_drafter, tiny_target
from policies import Restless
from tape import Tape

import specdec
from specdec.engine.adaptive import Draft, Fixed, Outcome
from specdec.engine.controller import Controller
from specdec.engine.engine import Engine
from specdec.trees import Chain, DynamicTree
from specdec.tuning import timing
from specdec.tuning.costs import PLAIN, Costs, Kind, Point
from specdec.tuning.engines import Table, Workload, adaptive_engine, make_policy
from specdec.tuning.policy import BEGIN, BLOCK, SETTLE, SHARE, Bandit
from specdec.tuning.survival import FIRST, Calibrated, Estimator, Survival


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
    never = property(lambda self: False, lambda self, value: None)
    for whole in (1, 32, None):  # positions absorbed at once; None: in each round
        if whole is None:
            monkeypatch.setattr(Controller, "defers", never, raising=False)
        else:
            monkeypatch.setattr("specdec.engine.controller.ABSORBED", whole)
        policy = Restless(3)
        engine = Engine(target, DRAFTERS[kind](target), DynamicTree(3, 3, 9), adaptive=policy)
        sequences, reports = come_and_go(engine, [job(i) for i in range(9)], rows=3)
        assert all((report.nodes == 1) == (report.tree is None) for report in reports)
        assert {outcome.levels for outcome in policy.outcomes} == {0, 1, 2, 3}
        traces.append([s.trace for s in sequences])
    assert traces[0] == traces[1] == traces[2]
    assert sum(sum(trace.accepted) for trace in traces[0]) > 0
    assert held == {True, False}


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
def test_a_server_that_never_drafts_holds_no_more_than_its_rows(target, overlap, monkeypatch):
    """An idle server holds nothing."""
    monkeypatch.setattr("specdec.engine.controller.MOST_PARTS", 1)
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


def test_rows_that_want_fewer_levels_count_in_the_time_of_a_round_only(target):
    """A round takes as long as its rows want together; acceptance is learnt from those for which all levels count."""
    policy = Restless(3)
    engine = Engine(target, DRAFTERS["eagle3"](target), Chain(3), adaptive=policy)
    engine.reserve(3, 64)
    for steps in (None, 1, 1):
        engine.add([1, 2, 3], max_new_tokens=40, eos=frozenset(), steps=steps)
    reports = [report for report in (engine.step() for _ in range(9)) if not report.prefill]
    for report, outcome in zip(reports, policy.outcomes, strict=True):
        wanted = [0] if outcome.levels > 1 else [0, 1, 2]
        assert outcome.accepted == [report.accepted[row] for row in wanted]
        assert outcome.others == [report.accepted[row] for row in range(3) if row not in wanted]
    policy = Bandit(costs_of(1.0, 0.01), KINDS, [0.6] * 5)
    policy.learn(Outcome(2, 3, [2], [True], others=[1, 0]))
    assert policy.last == (3, 2, 3, 6)


# What policies choose


KINDS = [PLAIN, *(Kind(levels, levels + 1, levels - 1) for levels in range(1, 6))]


def costs_of(forward: float, node: float, level: float = 0.2, rows=(1, 8, 64)) -> Costs:
    """Costs of a forward: a base, and `node` for every node of every row. A drafted level costs `level`."""
    return Costs(Point(k, b, 128.0, level * k.levels, forward + node * b * k.nodes) for k in KINDS for b in rows)


@pytest.mark.parametrize("kind", ["table", "ema", "survival"])
def test_more_rows_draft_less_and_slow_servers_draft_more(kind):
    policy = make_policy(kind, lambda: costs_of(1.0, 0.03), KINDS, [0.6] * 5)
    policy.seen, policy.drafts, policy.rounds = FIRST, BEGIN, BEGIN  # before that, all levels are tried
    depths = [policy.plan(rows) for rows in (1, 8, 64)]
    assert depths[0] > depths[1] > depths[2] == 0
    if kind == "table":
        return
    for _ in range(200):  # a round takes as long as many forwards
        policy.plan(64)
        policy.learn(Outcome(0, 1, [0] * 64, [True] * 64))
        policy.took(1.0 + 0.03 * 64 + 50.0)
    assert settled(policy, 64) > 0


class Server:
    """Plays a policy's rounds, which take `seconds(rows, levels)` times the machine's speed."""

    def __init__(self, policy, seconds, accepts: float = 0.6, seed: int = 0):
        self.policy, self.seconds, self.accepts, self.speed = policy, seconds, accepts, 1.0
        self.draw, self.depths, self.time, self.tokens = np.random.default_rng(seed), [], 0.0, 0

    def play(self, rows: int, rounds: int) -> float:
        """Play rounds, and return the tokens per second of a row."""
        self.depths, self.time, self.tokens = [], 0.0, 0
        for _ in range(rounds):
            levels = self.policy.plan(rows)
            counts = (self.draw.random((rows, levels)) < self.accepts).cumprod(1).sum(1)
            self.policy.learn(Outcome(levels, levels + 1, counts.tolist(), (counts == levels).tolist()))
            took = self.speed * self.seconds(rows, levels) * (1 + 0.1 * self.draw.random())
            self.policy.took(took)
            self.depths.append(levels)
            self.time, self.tokens = self.time + took, self.tokens + 1 + counts.mean()
        return self.tokens / self.time


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("late", [0.0, 0.6, 2.0], ids=["as measured", "drafts are slower", "drafts never pay"])
@pytest.mark.parametrize("accepts", [0.3, 0.8])
def test_the_bandit_is_nearly_as_fast_as_the_best_depth(rows, late, accepts):
    """Whatever served drafts take beyond the measured seconds. It begins with wrong rates."""
    costs = costs_of(1.0, 0.01)

    def seconds(rows: int, levels: int) -> float:
        return float(costs.seconds(KINDS[levels], rows)) + (late if levels else 0.1)

    best = max(Server(Fixed(d), seconds, accepts).play(rows, 600) for d in range(6))
    served = Server(Bandit(costs, KINDS, [0.6] * 5), seconds, accepts)
    served.play(rows, 400)
    assert served.play(rows, 2000) >= 0.95 * best


def test_a_machine_that_slows_down_slows_all_kinds_of_rounds():
    """This includes kinds of rounds that are not played meanwhile: no depth looks slower than another."""
    costs = costs_of(1.0, 0.01)
    policy = Bandit(costs, KINDS, [0.6] * 5)
    served = Server(policy, lambda rows, levels: float(costs.seconds(KINDS[levels], rows)))
    served.play(8, 400)
    before = policy.now
    for served.speed in (1.4, 2.0, 1.0):
        served.play(8, 400)
        assert policy.now == before
        assert policy.speed == pytest.approx(served.speed, rel=0.15)


def test_drafting_begins_again_when_it_would_have_been_faster_for_a_while():
    policy = Bandit(costs_of(1.0, 0.03), KINDS, [0.6] * 5)
    policy.rounds = BEGIN
    assert policy.plan(1) > 0, "at first there is nothing to absorb"
    assert policy.plan(64) == 0
    assert [policy.plan(1) > 0 for _ in range(BLOCK + 2)] == [False] * BLOCK + [True] * 2
    assert policy.plan(64) == 0
    for rows in (1,) * BLOCK + (64,) + (1,) * BLOCK:
        assert policy.plan(rows) == 0, "a while that is interrupted begins anew"


def test_prompts_that_a_drafter_absorbs_are_paid_for_by_drafts():
    """If absorbing a prompt costs more than drafting saves, plain rounds are faster."""
    policies = [Bandit(costs_of(1.0, 0.03), KINDS, [0.6] * 5) for _ in range(2)]
    for policy, seconds in zip(policies, (0.001, 9.0), strict=True):
        policy.rounds = BEGIN
        for _ in range(40):
            policy.joined(1, seconds)
            for _ in range(4):
                policy.learn(Outcome(2, 3, [1], [False]))
        assert policy.plan(1) > 0, "nobody reports how long anything takes"
        policy.took(float(policy.costs.seconds(KINDS[2])))
    assert [settled(policy, 1) > 0 for policy in policies] == [True, False]


def test_trying_drafts_costs_a_small_share_of_plain_rounds():
    """The first drafted round after plain rounds takes as long as many of them: the drafter catches up."""
    costs, absorbing, before = costs_of(1.0, 0.01, level=1.2), 40.0, 1

    def seconds(rows: int, levels: int) -> float:
        nonlocal before
        own = float(costs.seconds(KINDS[levels], rows)) + (absorbing if levels and not before else 0.0)
        before = levels
        return own

    served = Server(Bandit(costs, KINDS, [0.6] * 5), seconds, accepts=0.4)
    plain = Server(Fixed(0), seconds).play(2, 100)
    served.play(2, 500)
    assert served.play(2, 20_000) >= (1 - 1.5 * SHARE) * plain
    assert 0 < np.count_nonzero(served.depths) < 0.01 * 20_000


def test_no_rounds_are_tried_at_a_load_between_two_others():
    """Requests that end together leave fewer rows for a few rounds. Plain rounds might be as fast as drafts."""
    costs = costs_of(1.0, 0.01, level=0.35)
    policy = Bandit(costs, KINDS, [0.6] * 5)
    served = Server(policy, lambda rows, levels: float(costs.seconds(KINDS[levels], rows)))
    served.play(4, 400)
    for _ in range(5):
        served.play(4, 3 * BLOCK)
        served.play(1, SETTLE)
        assert 0 not in served.depths


def settled(policy, rows: int) -> int:
    """Return the depth that a policy settles on for a constant number of rows, apart from tries."""
    for _ in range(2 * BLOCK + 1):
        policy.plan(rows)
    return policy.now


def test_a_table_says_its_setting():
    table = Table.parse("1=5,8=3,32=0", 5)
    assert [table.plan(rows) for rows in (1, 7, 8, 31, 32, 100)] == [5, 5, 3, 3, 0, 0]
    assert str(table) == "1=5,8=3,32=0"
    for text in ("5", "1=2;3", "1=x", "1=6"):
        with pytest.raises(ValueError, match=r"table|levels"):
            Table.parse(text, 5)


def test_what_is_accepted_decides_how_deep():
    policy = Bandit(costs_of(1.0, 0.03), KINDS, [0.6] * 5)
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
    survival = Estimator().survival(draft)
    np.testing.assert_allclose(survival[0], [1, 0.9, 0.05, 0.72, 0.09, 0.035])
    for node in (0.01, 0.1, 0.3):
        costs = costs_of(1.0, node, rows=(2,))
        policy = Survival(costs, KINDS, [0.5] * 5, Estimator())
        assert policy.keep(draft) is None, "the first are verified whole"
        policy.seen, policy.drafts = FIRST, BEGIN
        chosen = policy.keep(draft)
        chosen = np.arange(6)[None].repeat(2, 0) if chosen is None else chosen
        best = {}
        for width in range(1, 7):
            subsets = [(0, *some) for some in combinations(range(1, 6), width - 1)]
            closed = [s for s in subsets if all(draft.parents[0, x] in s for x in s)]
            best[width] = sum(max(survival[b][list(s)].sum() for s in closed) for b in range(2))
        kind = KINDS[draft.levels]
        speed = {width: best[width] / costs.seconds(kind._replace(nodes=width), 2) for width in best}
        assert chosen.shape[1] == max(speed, key=speed.get)
        assert survival[np.arange(2)[:, None], chosen].sum() == pytest.approx(best[chosen.shape[1]])


def test_a_fit_on_censored_labels_finds_the_truth():
    """The drafter overstates probabilities. Tokens after the first rejection are not labelled."""
    draw, truth = np.random.default_rng(0), np.array([0.3, -0.5, -0.2])
    estimator = Calibrated(3)
    for _ in range(400):
        p = draw.uniform(0.05, 0.95, (8, 3))
        right = draw.random((8, 3)) < 1 / (1 + np.exp(-(truth + 0.6 * np.log(p / (1 - p)))))
        n = right.cumprod(1).sum(1)
        path = np.where(np.arange(4) <= n[:, None], np.arange(4), 0)
        estimator.learn(Outcome(3, 4, n.tolist(), [False] * 8, trees_of(p.tolist(), [0, 0, 1, 2]), path))
    np.testing.assert_allclose(estimator.weights, [*truth, 0.6], atol=0.15)


def test_costs_are_measured_and_policies_are_made_by_name(target, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "BUSY", float("inf"))  # what is measured is cached on any machine
    drafter, tree = tiny_drafter(target), DynamicTree(2, 2, 4)
    measured = adaptive_engine("survival", Workload(3), target, drafter, tree).adaptive.costs
    assert measured.rows == [1, 2, 3]
    kinds = {(p.kind.levels, p.kind.nodes, p.kind.cut) for p in measured.points}
    assert kinds == {(0, 1, False), (1, 3, False), (2, 4, False), (2, 2, True), (2, 3, True)}
    assert min(min(p.draft, p.verify) for p in measured.points) > 0
    with monkeypatch.context() as patch:
        patch.setattr("specdec.tuning.engines.measure_engine", lambda *_: pytest.fail("measured again"))
        assert adaptive_engine("survival", Workload(3), target, drafter, tree).adaptive.costs.points == measured.points
    for name in ("fixed", "table:1=2,2=0", "ema", "survival:told", "survival:margin", "survival:confidence"):
        come_and_go(adaptive_engine(name, Workload(3), target, drafter, tree), [job(i) for i in range(4)], rows=3)
    for name in ("fast", "ema:2", "survival:luck", "table:9"):
        with pytest.raises(ValueError, match=r"there is no|table"):
            adaptive_engine(name, Workload(3), target, drafter, tree)


def test_a_plain_round_asks_no_drafter_for_proposals(target, monkeypatch):
    engine = Engine(target, DRAFTERS["suffix"](target), Chain(2), adaptive=Fixed(0))
    monkeypatch.setattr(engine.round, "proposed", lambda state: pytest.fail("that may wait for the device"))
    engine.generate([[3, 5, 7]], max_new_tokens=4, observer=lambda report: None)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([[1, 2]], "each of the 1 rows must begin with the root"),
        ([[0, 2, 1]], "nodes must ascend, and the last of a tree is 3"),
        ([[0, 4]], "nodes must ascend, and the last of a tree is 3"),
        ([[0, 2]], "the parent of each node must be among them"),
        ([[0.0, 1.0]], r"they must be an array \[B,n\] of whole numbers"),
    ],
)
def test_nodes_that_are_no_tree_are_refused(target, nodes, message):
    class Cut(Fixed):
        def looks(self):
            return True

        def keep(self, draft):
            return np.array(nodes)

    engine = Engine(target, tiny_drafter(target), Chain(3), adaptive=Cut(3))
    with pytest.raises(ValueError, match=f"keeps nodes that are no tree: {message}"):
        engine.generate([[3, 5, 7]], max_new_tokens=4)


def test_a_policy_may_write_to_its_draft(target):
    class Writer(Fixed):
        def looks(self):
            return True

        def keep(self, draft):
            for x in (draft.parents, draft.depth, draft.ancestors):
                x[:] = 0

    plain = Engine(target).generate([[3, 5, 7]], max_new_tokens=20)
    made = Engine(target, tiny_drafter(target), DynamicTree(2, 3, 6), adaptive=Writer(3))
    assert made.generate([[3, 5, 7]], max_new_tokens=20).rows[0].tokens == plain.rows[0].tokens


def test_what_does_not_go_together(target):
    with pytest.raises(ValueError, match="without a drafter"):
        Engine(target, adaptive=Restless(3))
    with pytest.raises(ValueError, match="without a drafter"):
        specdec.generate(target, "Hi", adaptive="ema")
    for levels in (-1, 4, 2.0, None):
        engine = Engine(target, tiny_drafter(target), Chain(3), adaptive=Fixed(levels))
        with pytest.raises(
            ValueError, match=f"fixed plans {'null' if levels is None else levels} levels: the tree has 3"
        ):
            engine.generate([[3, 5, 7]])
    for how in ({"compile": True}, {"graphs": Tape()}):
        with pytest.raises(ValueError, match="without graphs and compiling"):
            Engine(target, tiny_drafter(target), Chain(3), adaptive=Restless(3), **how)
