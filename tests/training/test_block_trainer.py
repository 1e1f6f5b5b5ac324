"""Runs of block drafters in one process: learnt, interrupted, estimated, exported and decoded."""

import pytest
import torch
from helpers import BLOCKS, DRAFTERS, tiny_target
from short_runs import check_resumed, kept_bytes, short_run

from specdec.drafters import dflash
from specdec.drafters.vocab import DraftVocab
from specdec.training.loop.evaluate import expected_tau
from specdec.training.loop.footprint import saved_bytes
from specdec.training.objectives.block import BlockObjective


@pytest.mark.parametrize(("kind", "pack"), [("dflash", None), ("dspark", 20)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, pack):
    """Anchors depend on the seed and the batch's number only."""

    def begin(out):
        target = tiny_target()
        torch.manual_seed(1)
        drafter = dflash.create(target, **{"layers": 1, "taps": 2, "block_size": 4, "rank": 4} | BLOCKS[kind])
        return short_run(out, target, drafter, BlockObjective(anchors=4), pack)

    check_resumed(begin, tmp_path)


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_expected_tau_of_blocks_by_hand(kind):
    target = tiny_target()
    drafter = DRAFTERS[kind](target)
    torch.manual_seed(2)
    tokens, mask = torch.randint(17, (2, 9)), (torch.rand(2, 9) < 0.7).float()
    logits, feats = target(tokens, None, taps=drafter.taps)
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    states, ids = list(drafter.unroll(feats, following, 3)), drafter.vocab.ids
    greedy = sampled = count = 0.0
    for b in range(2):
        for t in range(8):
            if not mask[b, t + 1]:
                continue
            right = likely = 1.0
            greedy, sampled, count = greedy + 1, sampled + 1, count + 1
            for j, state in enumerate(states):
                at = t + 1 + j
                known = at < 9 and mask[b, at]
                p, q = logits[b, min(at, 8)].softmax(-1), state.logits[b, t].softmax(-1)
                right *= known * (ids[q.argmax()] == p.argmax())
                likely *= known * torch.minimum(p[ids], q).sum()
                greedy, sampled = greedy + right, sampled + likely
    got = expected_tau(drafter, feats, tokens, logits, mask, 3)
    torch.testing.assert_close(got, torch.tensor([greedy, sampled, count], dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS)
def test_activations_counted_on_shapes_are_those_of_real_blocks(kind):
    """About as many bytes as a real step keeps."""
    drafter, objective = DRAFTERS[kind](tiny_target()), BlockObjective(anchors=6)
    assert saved_bytes(drafter, (3, 20), objective) == pytest.approx(kept_bytes(drafter, objective, (3, 20)), rel=0.05)


def test_a_part_of_the_vocabulary_is_learnt():
    """A text's token that is not in the draft vocabulary has no cross-entropy."""
    target = tiny_target()
    vocab = DraftVocab(17, torch.arange(0, 17, 2))
    drafter = dflash.create(target, vocab=vocab, layers=1, taps=2, block_size=3)
    tokens = torch.tensor([[0, 2, 4, 1, 3, 5]])
    with torch.no_grad():
        logits, feats = target(tokens, None, taps=drafter.taps)
    loss, metrics = BlockObjective(weights="uniform")(drafter, feats, tokens, logits, torch.ones(1, 6))
    assert metrics["counted"] == 7  # anchors 1 to 4, two slots each, the last one's second behind the text
    assert metrics["losses"][1] == 0
    assert loss == metrics["losses"][0] * 4 / 7
