"""The objectives of EAGLE-1/2, MTP and Medusa against plain restatements; what a step keeps."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import BLOCKS, DRAFTERS, PARALLEL, tiny_block, tiny_drafter, tiny_parallel, tiny_target
from short_runs import batch

from specdec.training.loop.measure import saved_bytes
from specdec.training.objectives.block import BlockObjective
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.parallel import ParallelObjective
from specdec.training.objectives.tokens import TokensObjective


def test_eagle_loss_by_hand():
    """One step, no noise: row t predicts feature t+1 from feature t and token t+1."""
    target = tiny_target()
    drafter = tiny_drafter(target, kind="eagle")
    data = batch(target, drafter)
    loss, metrics = EagleObjective(feature=1.0, terms={"ce": 0.1}, noise=0.0)(drafter, **data)
    (state,) = drafter.unroll(data["feats"], F.pad(data["tokens"][:, 1:], (0, 1)), 1)
    distance, entropy, count = 0.0, 0.0, 0
    for b, t in (data["loss_mask"][:, 1:] > 0).nonzero():
        distance += F.smooth_l1_loss(state.hidden[b, t], data["feats"][b, t + 1])
        p = data["teacher_logits"][b, t + 1].softmax(-1)
        entropy -= (p * F.log_softmax(target.head.weight @ state.hidden[b, t], -1)).sum()
        count += 1
    torch.testing.assert_close(metrics["feature_losses"][0], distance.detach() / count)
    torch.testing.assert_close(metrics["losses"][0], 0.1 * entropy.detach() / count, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, (distance + 0.1 * entropy) / count, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mean", ["masked", "all"])
@pytest.mark.parametrize(("renormalise", "known_only"), [(True, True), (True, False), (False, False)])
def test_distillation_by_hand(renormalise, known_only, mean):
    """Step j of row t learns the target's distribution at t+1+j; loss, accuracy and count position by position."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8)
    data = batch(target, drafter)
    objective = Eagle3Objective(
        steps=3, decay=0.5, terms={"ce": 2.0, "tv": 1.0}, mean=mean, renormalise=renormalise, known_only=known_only
    )
    loss, metrics = objective(drafter, **data)
    ids = drafter.vocab.ids.tolist()
    means, shares, counts = [], [], []
    for j, state in enumerate(drafter.unroll(data["feats"], F.pad(data["tokens"][:, 1:], (0, 1)), 3)):
        values, hits = [], []
        for b, t in (data["loss_mask"][:, 1 + j :] > 0).nonzero():
            theirs = data["teacher_logits"][b, t + 1 + j]
            if known_only and theirs.argmax().item() not in ids:
                continue
            whole, q = theirs.softmax(-1)[ids], state.logits[b, t].softmax(-1)
            p = whole / whole.sum() if renormalise else whole
            values.append(-2 * (p * q.log()).sum() + 1 - torch.minimum(whole, q).sum())
            hits.append(ids[q.argmax()] == theirs.argmax().item())
        means.append(sum(values) / (len(values) if mean == "masked" else 48))
        shares.append(sum(hits) / len(hits))
        counts.append(len(values) if mean == "masked" else 48)
    torch.testing.assert_close(loss, means[0] + 0.5 * means[1] + 0.25 * means[2])
    torch.testing.assert_close(metrics["losses"], torch.stack(means).detach())
    torch.testing.assert_close(metrics["accuracy"], torch.tensor(shares))
    assert metrics["counted"] == counts[0]


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("eagle3", Eagle3Objective(steps=3)), ("dspark", BlockObjective()), ("peagle", ParallelObjective())],
)
def test_a_batch_with_nothing_to_learn_is_harmless(kind, objective):
    target = tiny_target()
    drafter = DRAFTERS[kind](target)
    data = batch(target, drafter) | {"loss_mask": torch.zeros(4, 12)}
    loss, metrics = objective(drafter, **data)
    loss.backward()
    assert loss == 0
    assert all(torch.isfinite(value).all() for value in metrics.values())
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())
    with torch.no_grad():  # as evaluation runs it
        assert objective(drafter, **data)[0] == 0


@pytest.mark.parametrize("objective", [EagleObjective, BlockObjective])
def test_noise_only_while_learning(objective):
    target = tiny_target()
    drafter = tiny_block(target) if objective is BlockObjective else tiny_drafter(target, kind="eagle")
    data, learn = batch(target, drafter), objective(noise=0.5)
    assert learn(drafter, **data)[0] != learn(drafter, **data)[0]
    with torch.no_grad():
        assert learn(drafter, **data)[0] == learn(drafter, **data)[0]
    for length, width in ((None, 0.1), (6, 0.05)):
        noise = objective(noise=0.1, noise_length=length).noisy(torch.zeros(50, 12, 100))
        assert width / 2 * 0.99 < min(noise.max(), -noise.min()) <= max(noise.max(), -noise.min()) <= width / 2


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
def test_token_loss_by_hand(kind):
    """Row t guesses token t+2+j at step j; weights 0.6^j over their sum; tokens outside the vocabulary do not count."""
    target = tiny_target()
    drafter = tiny_drafter(target, kind=kind, draft_vocab=8)
    data = batch(target, drafter)
    loss, metrics = TokensObjective(steps=3, decay=0.6)(drafter, **data)
    ids, means = drafter.vocab.ids.tolist(), []
    for j, state in enumerate(drafter.unroll(data["feats"], F.pad(data["tokens"][:, 1:], (0, 1)), 3)):
        terms = []
        for b, t in itertools.product(range(4), range(12 - 2 - j)):
            token = data["tokens"][b, t + 2 + j].item()
            if data["loss_mask"][b, t + 2 + j] and token in ids:
                terms.append(-F.log_softmax(state.logits[b, t], -1)[ids.index(token)])
        means.append(torch.stack(terms).mean())
    torch.testing.assert_close(metrics["losses"], torch.stack(means).detach(), rtol=1e-5, atol=1e-5)
    expected = (means[0] + 0.6 * means[1] + 0.36 * means[2]) / 1.96
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp-three-heads", "medusa", *BLOCKS, *PARALLEL])
def test_bytes_counted_on_shapes_are_those_that_a_forward_keeps(kind):
    target, saved = tiny_target(), {}
    drafter = tiny_parallel(target, kind) if kind in PARALLEL else DRAFTERS[kind](target)
    objective = Eagle3Objective(steps=3)
    if drafter.block is not None:
        objective = ParallelObjective() if kind in PARALLEL else BlockObjective(anchors=6)
    counted = saved_bytes(drafter, (3, 20), objective)
    own = {t.untyped_storage().data_ptr() for t in (*drafter.parameters(), *drafter.buffers())}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        readouts = objective.readouts(drafter, torch.zeros(3, 20, len(drafter.taps) * 32), torch.zeros(3, 20).long())
    real = sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)
    assert counted == pytest.approx(real + sum(x.untyped_storage().nbytes() for x in readouts), rel=0.05)


def test_drafters_that_do_not_fit_are_refused():
    target = tiny_target()
    for kind, objective, message in (
        ("mtp", EagleObjective(), "Mtp does not predict"),
        ("medusa", TokensObjective(steps=7), r"objective\.steps is 7, but there are 5 Medusa heads"),
        ("eagle3", BlockObjective(), "objective=block is for drafters of blocks, which Eagle3 is not"),
        ("eagle3", ParallelObjective(), "objective=parallel is for P-EAGLE and PARD, which Eagle3 is not"),
    ):
        drafter = tiny_drafter(target, kind=kind)
        with pytest.raises(ValueError, match=message):
            objective(drafter, **batch(target, drafter))


@pytest.mark.parametrize(
    ("objective", "settings", "message"),
    [
        (BlockObjective, {"visible": 0.0}, "above 0"),
        (BlockObjective, {"chooses": "best"}, "chooses must be"),
        (BlockObjective, {"where": "there"}, "objective.where must be one of next, whole, got 'there'"),
        (BlockObjective, {"weights": "d_pace"}, "divide by slots or texts"),
        (BlockObjective, {"anchors": 0}, "objective.anchors must be at least 1"),
        (BlockObjective, {"base": -0.1}, "objective.base must be at least 0, got -0.1"),
        (BlockObjective, {"base": 1.1}, "objective.base must be at most 1, got 1.1"),
        (BlockObjective, {"base_until": 0.0}, "objective.base_until must be above 0, got 0.0"),
        (BlockObjective, {"base_until": 1.1}, "objective.base_until must be at most 1, got 1.1"),
        (ParallelObjective, {"pool": "some"}, "objective.pool must be one of learnt, all, got 'some'"),
        (ParallelObjective, {"kept": 1.5}, "objective.kept must be at most 1, got 1.5"),
        (ParallelObjective, {"anchors": 0}, "objective.anchors must be at least 1"),
        (Eagle3Objective, {"switch": 1.5}, "objective.switch must be at most 1, got 1.5"),
        (Eagle3Objective, {"terms": {"kll": 1.0}}, r"objective\.terms has no 'kll'; there are ce, kl,"),
        (Eagle3Objective, {"terms": {"ce": 0.0}}, r"objective\.terms needs a term of a weight other than 0"),
        (Eagle3Objective, {"terms": {"tv": {"k": 3}}}, r"tv has no setting 'k'; it has \['weight', 'renormalised'\]"),
        (Eagle3Objective, {"terms": {"tv": {"renormalised": "yes"}}}, "renormalised must be true or false, got 'yes'"),
        (Eagle3Objective, {"terms": {"top_k": {"k": 2.5}}}, r"objective\.terms\.top_k\.k must be a whole number"),
        (Eagle3Objective, {"terms": {"kl": {"temperature": -1}}}, "kl.temperature must be at least 0"),
    ],
)
def test_mistakes_are_named(objective, settings, message):
    with pytest.raises(ValueError, match=message):
        objective(**settings)


def test_terms_change_at_the_switch():
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8)
    data = batch(target, drafter)
    objective = Eagle3Objective(steps=2, terms={"ce": 1.0}, then={"tokens": 1.0}, switch=0.5)
    first, second = (Eagle3Objective(steps=2, terms={name: 1.0})(drafter, **data)[0] for name in ("ce", "tokens"))
    assert not torch.isclose(first, second)
    for progress, expected in ((0.0, first), (0.49, first), (0.5, second), (0.99, second)):
        objective.progress = progress
        torch.testing.assert_close(objective(drafter, **data)[0], expected)
