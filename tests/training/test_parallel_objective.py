"""Which rows of mask tokens are learnt, the loss against a plain restatement, and whole runs of P-EAGLE and PARD."""

from functools import partial

import pytest
import short_runs
import torch
import torch.nn.functional as F
from helpers import PARALLEL, tiny_parallel, tiny_target
from short_runs import TEXTS, check_resumed, packed_batch

from specdec.training.objectives import losses
from specdec.training.objectives.cod import by_anchor, sample
from specdec.training.objectives.parallel import ParallelObjective, sampled


def test_so_many_rows_of_each_depth():
    """(n - d) r^d of n learnt columns, the floor of it; a row follows one of the depth before, or begins a chain."""
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
    """PARD: a share of all columns, of which those that are learnt count."""
    learnt = torch.zeros(1, 300, dtype=torch.bool)
    learnt[:, ::3] = True
    torch.manual_seed(0)
    drawn = sample(learnt, 3, 0.7, 0.2, pool="all")
    assert (drawn <= learnt[..., None]).all()
    assert abs(int(drawn[..., 1].sum()) - 70) < 5 * (100 * 0.7 * 0.3) ** 0.5
    assert abs(int(drawn[..., 2].sum()) - 49) < 5 * 25**0.5


@pytest.mark.parametrize("earliest", [1, -1])
def test_rows_by_their_anchor(earliest):
    """Rows stay in their document. With `earliest` 1 a feature stands before the anchor, -1 lets it be before all."""
    drawn, texts = torch.ones(2, 12, 3, dtype=torch.bool), torch.tensor(TEXTS)
    got = by_anchor(drawn, texts, earliest)
    for b in range(2):
        for p in range(-1, 12):
            for depth in range(3):
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
    """Two terms, the teacher's weights and those of tokens, in packed rows: the loss from the unroll behind every row,
    row by row, and every gradient, with and without recomputing."""
    monkeypatch.setattr(losses, "PIECE", pieces)
    monkeypatch.setattr(losses, "LEAST_ROWS", 1)
    target = tiny_target()
    drafter = tiny_parallel(target, kind)
    data = packed_batch(target, drafter)
    weights = torch.rand(2, 12) + 0.5
    objective = ParallelObjective({"tokens": 0.5, "kl": 1}, weights="teacher", counts="label", known_only=False)
    with torch.no_grad():  # the rows that it draws then, every time
        kept = objective.rows_of(
            drafter, objective.learnt(drafter, None, data["loss_mask"], drafter.documents), drafter.documents
        )
    monkeypatch.setattr(objective, "rows_of", lambda *given: kept)
    kept = kept.clone()
    kept[:, :2] = False  # what `unroll` has no row for: anchors at token 0, and before it
    following = F.pad(data["tokens"][:, 1:], (0, 1))
    states = [state.logits for state in drafter.unroll(data["feats"], following, 6)]
    ids = list(range(17)) if drafter.vocab.ids is None else drafter.vocab.ids.tolist()
    total = divisor = 0
    for b, i, depth in kept.nonzero().tolist():
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
    wanted = torch.autograd.grad(total / divisor, learners, allow_unused=True)
    assert divisor > 1
    for drafter.recompute in (False, True):
        loss, metrics = objective(drafter, **data, weights=weights)
        torch.testing.assert_close(loss, total / divisor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(metrics["counted"], divisor)
        got = torch.autograd.grad(loss, learners, allow_unused=True)
        for ours, expected in zip(got, wanted, strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_features_are_dropped():
    """In training a share of the texts has none, in evaluation all have theirs."""
    objective, feats = ParallelObjective(drop=0.25), torch.ones(4000, 1, 1)
    kept = objective.noisy(feats)
    assert set(kept.flatten().tolist()) == {0.0, 1.0}
    assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    with torch.no_grad():
        assert objective.noisy(feats) is feats


@pytest.mark.parametrize(("kind", "pack"), [("peagle", None), ("pard2", 20)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, pack):
    how = {"drafter": partial(tiny_parallel, kind=kind), "objective": ParallelObjective(drop=0.5), "pack": pack}
    report = check_resumed(lambda out: short_runs.trainer(out, **how), tmp_path)
    assert report["heldout_expected_tau"] >= 1
