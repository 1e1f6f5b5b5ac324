"""Objectives of block drafters, P-EAGLE and PARD: training rows, the loss against plain restatements, whole runs."""

import itertools
from functools import partial

import pytest
import short_runs
import torch
import torch.nn.functional as F
from helpers import BLOCKS, DRAFTERS, PARALLEL, tiny_block, tiny_parallel, tiny_target
from short_runs import LEARNT, TEXTS, assert_goes_on, packed_batch

from specdec.drafters import unroll_block
from specdec.drafters.formats import load_drafter
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.objectives import losses
from specdec.training.objectives.anchors import draw, draw_visible, slots
from specdec.training.objectives.block import BlockObjective, Candidates
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.parallel import ParallelObjective, by_anchor, sample, sampled


def test_anchors():
    """All that may be, where there is room for all: a token before them in their document, and what `where` asks."""
    for count, where, block, expected in (
        (12, "next", 4, [[1, 2, 5, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10]]),
        (12, "whole", 4, [[1, 2, 3], [3, 4, 5, 6, 7, 8]]),
        (3, "whole", 40, [[], []]),
    ):
        at, there = draw(count, where, block, torch.tensor(LEARNT).float(), torch.tensor(TEXTS))
        assert [at[b][there[b]].tolist() for b in (0, 1)] == expected


def test_anchors_are_drawn_uniformly_and_anew():
    mask, documents = torch.ones(1, 9), torch.zeros(1, 9)
    torch.manual_seed(0)
    seen = torch.zeros(9)
    for _ in range(700):
        at, there = draw(2, "next", 4, mask, documents)
        assert there.all()
        assert at[0, 0] < at[0, 1]
        seen[at] += 1
    assert seen[[0, 8]].sum() == 0
    assert (seen[1:8] - 200).abs().max() < 5 * (700 * 2 / 7 * 5 / 7) ** 0.5
    with torch.no_grad():  # an evaluation is the same every time, and takes no random numbers
        state = torch.get_rng_state()
        assert torch.equal(draw(2, "next", 4, mask, documents)[0], draw(2, "next", 4, mask, documents)[0])
        assert torch.equal(state, torch.get_rng_state())


def test_a_selector_has_the_same_gradients_in_every_run():
    """Several threads add to the row of a token that is a candidate of many slots, and the order matters."""
    torch.manual_seed(0)
    head, selector = torch.randn(64, 8), torch.randn(2048, 256, requires_grad=True)
    base, low = torch.randn(48, 4, 8), torch.randn(48, 4, 256)
    candidates = Candidates(48, 4, 16, "text", "skip", base.device)
    candidates.ids.random_(0, 20)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(4)
    for _ in range(60):
        found += torch.autograd.grad(candidates.losses(base, low, head, selector).sum(), selector)
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def test_slots_that_count():
    mask, documents = torch.tensor(LEARNT).float(), torch.tensor(TEXTS)
    anchors, there = torch.tensor([[2, 5, 9], [8, 10, 1]]), torch.tensor([[True] * 3, [True, True, False]])

    rest = [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    for how, weights, expected in (
        ("label", None, [[1, 0, 1], *rest]),
        ("prefix", None, [[1, 0, 0], *rest]),
        ("previous", None, [[1, 1, 0], *rest]),
        ("label", torch.arange(12.0).expand(2, 12), [[3, 0, 5], [6, 0, 0], [10, 11, 0], [9, 10, 11], [11, 0, 0]]),
    ):
        assert slots(anchors, there, 3, how, mask, documents, weights).mask.tolist() == expected


def test_tokens_that_blocks_are_shown():
    """As often as they should be, within 5 standard deviations; and their slots do not count."""
    torch.manual_seed(0)
    count = 10000
    drawn = draw_visible(0.9, torch.zeros(100, 100, dtype=torch.int64), 6)
    for n in range(8):
        share = 0.9**n / sum(0.9**m for m in range(2, 6)) if 2 <= n <= 5 else 0.0
        assert abs((drawn == n).sum().item() - count * share) <= 5 * (count * share * (1 - share)) ** 0.5
    assert draw_visible(0.9, torch.zeros(1, 3, dtype=torch.int64), 2).tolist() == [[1, 1, 1]]
    mask, anchors = torch.ones(1, 12), torch.tensor([[2, 4]])
    there, visible = torch.ones_like(anchors, dtype=torch.bool), torch.tensor([[3, 2]])
    found = slots(anchors, there, 4, "label", mask, torch.zeros(1, 12), None, visible)
    assert found.mask.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert found.since.tolist() == [[-2, -1, 0, 1], [-1, 0, 1, 2]]


@pytest.mark.parametrize("kind", [*BLOCKS, "eagle3", "eagle", "mtp-three-heads", "medusa-own-heads"])
def test_pieces_and_recomputing_change_nothing(monkeypatch, kind):
    """Of the loss and of every gradient, whose values test_published_losses.py and test_objectives.py hold."""
    target = tiny_target()
    drafter = DRAFTERS[kind](target)
    data = packed_batch(target, drafter)
    objective = BlockObjective({"tokens": 0.1, "l1": 0.9}, gamma=3.0) if kind in BLOCKS else Eagle3Objective(steps=3)
    learners = [p for p in drafter.parameters() if p.requires_grad]
    monkeypatch.setattr(losses, "LEAST_ROWS", 1)
    found = []
    for pieces, scale in ((1 << 22, 1), (1, 7)):
        monkeypatch.setattr(losses, "PIECE", pieces)
        monkeypatch.setattr(unroll_block, "PIECE", min(pieces, 2))
        for drafter.recompute in (False, True) if "medusa" not in kind else (False,):
            loss, metrics = objective(drafter, **data)
            grads = torch.autograd.grad(scale * loss, learners, materialize_grads=True)
            found.append((loss.detach(), metrics, [grad / scale for grad in grads]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)
    assert len(metrics["losses"]) == len(metrics["accuracy"]) == (drafter.block if kind in BLOCKS else 3)
    assert ("confidence_losses" in metrics) == (kind == "dspark")


def test_the_losses_of_slots_add_up():
    """Each slot's is the mean over the blocks in which it counts."""
    target = tiny_target()
    drafter, objective = DRAFTERS["dflash"](target), BlockObjective(anchors=5, weights="uniform", denominator="slots")
    data = packed_batch(target, drafter)
    torch.manual_seed(1)
    counted = objective.slots(drafter, data["loss_mask"], None).mask.sum(0)
    torch.manual_seed(1)
    loss, metrics = objective(drafter, **data)
    assert len(counted.unique()) > 1
    torch.testing.assert_close(loss, (metrics["losses"] * counted).sum() / counted.sum())


# Rows of mask tokens


def test_so_many_rows_of_each_depth():
    """(n - d) r^d of n training columns, the floor of it; a row follows one of the depth before, or begins a chain."""
    learnt = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) < 0.8
    learnt[1, 120:] = False
    torch.manual_seed(0)
    drawn = sample(learnt, 6, 0.7, 0.2)
    assert torch.equal(drawn[..., 0], learnt)
    for row, n in enumerate(learnt.sum(1).tolist()):
        assert drawn[row, :, 1].sum() == int((n - 1) * 0.7)
        for depth in range(2, 6):
            follows = F.pad(drawn[row, :-1, depth - 1], (1, 0)) & learnt[row]
            assert (drawn[row, :, depth] <= follows).all()
            assert drawn[row, :, depth].sum() == min(int((n - depth) * max(0.7**depth, 0.2)), int(follows.sum()))
    assert not torch.equal(sample(learnt, 6, 0.7, 0.2), drawn)
    with torch.no_grad():  # an evaluation is the same every time
        assert torch.equal(sample(learnt, 6, 0.7, 0.2), sample(learnt, 6, 0.7, 0.2))
    few = sample(learnt, 3, 0.7, 0.2, anchors=9)
    assert few.sum(1).tolist() == [[int(n), int(8 * 0.7), few[i, :, 2].sum()] for i, n in enumerate(learnt.sum(1))]


def test_chains_through_what_is_not_learnt():
    """PARD: a share of all columns, of which training columns count."""
    learnt = torch.zeros(1, 300, dtype=torch.bool)
    learnt[:, ::3] = True
    torch.manual_seed(0)
    drawn = sample(learnt, 3, 0.7, 0.2, pool="all")
    assert (drawn <= learnt[..., None]).all()
    assert abs(int(drawn[..., 1].sum()) - 70) < 5 * (100 * 0.7 * 0.3) ** 0.5
    assert abs(int(drawn[..., 2].sum()) - 49) < 5 * 25**0.5


@pytest.mark.parametrize("earliest", [1, -1])
def test_rows_by_their_anchor(earliest):
    """Rows stay in their document. With `earliest` 1 a feature precedes the anchor, -1 lets it be before all."""
    drawn, texts = torch.ones(2, 12, 3, dtype=torch.bool), torch.tensor(TEXTS)
    got = by_anchor(drawn, texts, earliest)
    for b, p, depth in itertools.product(range(2), range(-1, 12), range(3)):
        column, place = p + depth, p - TEXTS[b].index(TEXTS[b][max(p, 0)]) if p >= 0 else -1
        inside = 0 <= column < 12 and TEXTS[b][column] == TEXTS[b][max(p, 0)]
        assert got[b, p + 1, depth] == (inside and place >= earliest), (b, p, depth)
    rows = sampled(got)
    assert len(rows.row) == got.sum()
    assert rows.lengths == sorted(rows.lengths, reverse=True)
    assert torch.equal(rows.column, rows.anchors[rows.row, rows.place] + rows.depth)
    assert got[rows.row, rows.column - rows.depth + 1, rows.depth].all()


@pytest.mark.matrix
@pytest.mark.parametrize("pieces", [1 << 22, 1])
@pytest.mark.parametrize("kind", PARALLEL)
def test_loss_by_hand(monkeypatch, kind, pieces):
    """Two terms, the teacher's weights and those of tokens, in packed rows: the loss from the unroll after every row,
    row by row, and every gradient, with and without recomputing."""
    monkeypatch.setattr(losses, "PIECE", pieces)
    monkeypatch.setattr(losses, "LEAST_ROWS", 1)
    target = tiny_target()
    drafter = tiny_parallel(target, kind)
    data = packed_batch(target, drafter)
    weights = torch.rand(2, 12) + 0.5
    objective = ParallelObjective({"tokens": 0.5, "kl": 1}, weights="teacher", counts="label", known_only=False)
    learnt = objective.learnt(drafter, None, data["loss_mask"], drafter.documents)
    with torch.no_grad():  # the rows that it draws then, every time
        sampled_rows = objective.rows_of(drafter, learnt, drafter.documents).clone()
    sampled_rows[:, :2] = False  # what `unroll` has no row for: anchors at token 0, and before it
    monkeypatch.setattr(objective, "rows_of", lambda *given: sampled_rows)
    following = F.pad(data["tokens"][:, 1:], (0, 1))
    states = [state.logits for state in drafter.unroll(data["feats"], following, 6)]
    ids = list(range(17)) if drafter.vocab.ids is None else drafter.vocab.ids.tolist()
    total = divisor = 0
    for b, i, depth in sampled_rows.nonzero().tolist():
        p, column = i - 1, i - 1 + depth
        weight = weights[b, column + 1]
        for at in range(p, column):
            weight = weight * data["teacher_logits"][b, at].softmax(-1)[data["tokens"][b, at + 1]]
        logq = states[depth][b, p - 1].log_softmax(-1)
        teacher = data["teacher_logits"][b, column][ids].log_softmax(-1)
        token = int(data["tokens"][b, column + 1])
        known = logq[ids.index(token)] if token in ids else 0.0
        total = total + weight * ((teacher.exp() * (teacher - logq)).sum() - 0.5 * known)
        divisor = divisor + weight
    learners = [p for p in drafter.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(total / divisor, learners, allow_unused=True, materialize_grads=True)
    assert divisor > 1
    for drafter.recompute in (False, True):
        loss, metrics = objective(drafter, **data, weights=weights)
        torch.testing.assert_close(loss, total / divisor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(metrics["counted"], divisor)
        got = torch.autograd.grad(loss, learners, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_features_are_dropped():
    """In training a share of the texts has none, in evaluation all have theirs."""
    objective, feats = ParallelObjective(drop=0.25), torch.ones(4000, 1, 1)
    sampled_rows = objective.noisy(feats)
    assert set(sampled_rows.flatten().tolist()) == {0.0, 1.0}
    assert abs(sampled_rows.mean() - 0.75) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    with torch.no_grad():
        assert objective.noisy(feats) is feats


# Whole runs


@pytest.mark.parametrize(("kind", "pack"), [("dflash", None), ("dspark", 20), ("peagle", None), ("pard2", 20)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, pack):
    """What is drawn depends on the seed and the batch's number only, and what is saved loads again to the last bit."""
    make, objective = partial(tiny_parallel, kind=kind), ParallelObjective(drop=0.5)
    if kind in BLOCKS:
        make, objective = partial(tiny_block, layers=1, block_size=4, **BLOCKS[kind]), BlockObjective(anchors=4)
    begin = partial(short_runs.trainer, drafter=make, objective=objective, pack=pack)
    run = begin(tmp_path / "cut")
    made, before = run.drafter, [p.detach().clone() for p in run.parameters.values()]
    report = run.train()
    assert not any(torch.equal(x, y) for x, y in zip(before, run.parameters.values(), strict=True) if x.ndim == 2)
    assert report["heldout_expected_tau"] >= 1
    assert len(report["accuracy"]) == made.block
    drafter = load_drafter(tmp_path / "cut" / "draft", run.target)
    assert (drafter.block, drafter.taps, drafter.switches) == (made.block, made.taps, made.switches)
    loaded = dict(drafter.named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in run.parameters.items())
    checkpoints(tmp_path / "cut")[-1].unlink()
    assert_goes_on(begin, tmp_path / "cut", 4)
