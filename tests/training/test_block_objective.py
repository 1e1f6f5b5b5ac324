"""Which slots of blocks are learnt, the loss against plain restatements, and runs of block drafters."""

import pytest
import short_runs
import torch
import torch.nn.functional as F
from helpers import BLOCKS, tiny_block, tiny_target
from short_runs import LEARNT, TEXTS, check_resumed, packed_batch

from specdec.drafters import dflash, unroll_block
from specdec.training.objectives import losses
from specdec.training.objectives.anchors import draw, draw_visible, slots
from specdec.training.objectives.block import BlockObjective, pace
from specdec.training.objectives.eagle3 import Eagle3Objective


def test_anchors():
    """All that may be, where there is room for all: a token before them in their document, and what `where` asks."""
    mask, documents = torch.tensor(LEARNT).float(), torch.tensor(TEXTS)
    at, there = draw(12, "next", 4, mask, documents)
    assert [at[b][there[b]].tolist() for b in (0, 1)] == [[1, 2, 5, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10]]
    at, there = draw(12, "whole", 4, mask, documents)
    assert [at[b][there[b]].tolist() for b in (0, 1)] == [[1, 2, 3], [3, 4, 5, 6, 7, 8]]
    at, there = draw(3, "whole", 40, mask, documents)
    assert not there.any()


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


def test_slots_that_count():
    mask, documents = torch.tensor(LEARNT).float(), torch.tensor(TEXTS)
    anchors, there = torch.tensor([[2, 5, 9], [8, 10, 1]]), torch.tensor([[True] * 3, [True, True, False]])

    def counted(how, weights=None):
        return slots(anchors, there, 3, how, mask, documents, weights).mask.tolist()

    assert counted("label") == [[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert counted("prefix") == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert counted("previous") == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    weights = torch.arange(12.0).expand(2, 12)
    assert counted("label", weights)[0] == [3, 0, 5]


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


def test_pace_by_hand():
    losses_of, mask = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    s = [1.0, 1.0, 0.5 + 0.5 * torch.exp(torch.tensor(-2.0)), 0.5 + 0.5 * torch.exp(torch.tensor(-3.0))]
    last = s[2] * s[3]
    torch.testing.assert_close(pace(losses_of, mask, 0.5), torch.tensor([[1 + s[2] + last, 0, s[2] + last, last]]))


def plainly(drafter, data, gamma: float) -> torch.Tensor:
    """The loss of `test_loss_by_hand`, slot by slot, from the unroll behind every row."""
    following = F.pad(data["tokens"][:, 1:], (0, 1))
    states, ids = list(drafter.unroll(data["feats"], following, drafter.block)), drafter.vocab.ids.tolist()
    blocks = drafter.blocks(data["feats"], following, torch.arange(12).expand(2, -1))
    sure, selects = blocks.confidence, drafter.conditioned and drafter.conditional.candidates
    total = divisor = missed = 0
    unchosen = chosen = torch.zeros(())
    for b, learnt in enumerate(LEARNT):
        for p in range(1, 11):
            if not (learnt[p] and learnt[p + 1] and TEXTS[b][p - 1] == TEXTS[b][p] == TEXTS[b][p + 1]):
                continue
            for j, state in enumerate(states):
                at = p + 1 + j
                if at < 12 and learnt[at] and TEXTS[b][at] == TEXTS[b][p]:
                    logq = state.logits[b, p - 1].log_softmax(-1)
                    if selects:
                        logq, among = drafter.head(blocks.readout[b, p - 1, j, :32]).log_softmax(-1), logq
                    p_all = data["teacher_logits"][b, at - 1].softmax(-1)[ids]
                    token, weight = data["tokens"][b, at].item(), torch.exp(torch.tensor(-j / gamma))
                    known = logq[ids.index(token)] if token in ids else logq.sum() * 0
                    total -= weight * (0.1 * known - 0.9 * ((p_all - logq.exp()).abs().sum() + 1 - p_all.sum()))
                    accepted = torch.minimum(p_all, logq.exp()).sum()
                    divisor += weight
                    if selects and token in ids and among[ids.index(token)].isfinite():
                        unchosen, chosen = unchosen - weight * among[ids.index(token)], chosen + weight
                    if sure is not None:
                        missed += weight * F.binary_cross_entropy_with_logits(sure[b, p - 1, j], accepted.detach())
    assert chosen > 0 or not selects
    return (total + missed) / divisor + unchosen / chosen.clamp(min=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("pieces", [1 << 22, 1])
@pytest.mark.parametrize("kind", BLOCKS)
def test_loss_by_hand(monkeypatch, kind, pieces):
    """DSpark's terms, confidence and selector together, in one piece or by block, with and without recomputing."""
    monkeypatch.setattr(losses, "PIECE", pieces)
    monkeypatch.setattr(losses, "LEAST_ROWS", 1)
    monkeypatch.setattr(unroll_block, "PIECE", min(pieces, 2))
    target = tiny_target()
    drafter = tiny_block(target, **BLOCKS[kind])
    data = packed_batch(target, drafter)
    objective = BlockObjective({"tokens": 0.1, "l1": 0.9}, gamma=3.0)
    expected = plainly(drafter, data, 3.0)
    learners = [p for p in drafter.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected, learners)
    for drafter.recompute in (False, True):
        loss, metrics = objective(drafter, **data)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(loss, learners)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(metrics["losses"]) == len(metrics["accuracy"]) == drafter.block
    assert ("confidence_losses" in metrics) == (drafter.confidence is not None)


@pytest.mark.parametrize("kind", ["dflash", "dspark-rnn"])
def test_objectives_that_unroll_teach_blocks_too(kind):
    """Each slot's loss is that of EAGLE-3's objective, whose mask says behind which tokens it learns."""
    target = tiny_target()
    drafter = tiny_block(target, **BLOCKS[kind])
    data, mask = packed_batch(target, drafter), torch.ones(2, 12)
    drafter.documents = None
    _, blocks = BlockObjective({"kl": 1.0})(drafter, **data | {"loss_mask": mask})
    mask[:, -1] = 0
    _, unrolled = Eagle3Objective(steps=3, terms={"kl": 1.0}, known_only=False)(drafter, **data | {"loss_mask": mask})
    for name in ("losses", "accuracy"):
        torch.testing.assert_close(unrolled[name], blocks[name][:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "pack"), [("dflash", None), ("dspark", 20)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, pack):
    """Anchors depend on the seed and the batch's number only."""

    def drafter(target):
        torch.manual_seed(1)
        return dflash.create(target, **{"layers": 1, "taps": 2, "block_size": 4, "rank": 4} | BLOCKS[kind])

    objective = BlockObjective(anchors=4)
    check_resumed(lambda out: short_runs.trainer(out, objective=objective, drafter=drafter, pack=pack), tmp_path)
