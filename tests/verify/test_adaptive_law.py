"""Drawn chains that an adaptive policy cuts keep the target's law. Cuts that know too much do not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_trees import CheckedDrafter
from test_verify_laws import DRAFTER, ROWS, TARGET, WARM, filled_up, noise_of, pvalue, target_law, verify

from specdec.children import children_of
from specdec.engine.controller import Controller, trimmed
from specdec.engine.report import Plan
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Noise, hashes_of
from specdec.trees import SampledTree
from specdec.tuning import survival
from specdec.tuning.costs import PLAIN, Costs, Kind, Point
from specdec.tuning.survival import Estimator, Survival
from specdec.verify import BlockVerification, MultiRoundRejection

Q = filtered_probs(DRAFTER, WARM).amax(-1)  # of each token's next one: the estimate before it is drawn
FIRST, SECOND = Q[0].item(), Q[0].item() * Q.median().item()  # survivals of the levels after a median token


KINDS = [PLAIN, *(Kind(levels, levels + 1, levels - 1) for levels in (1, 2, 3))]


def costs(*seconds: float) -> Costs:
    """Of 1, 2, 3 and 4 nodes."""
    return Costs(Point(kind, 1, 1.0, 0.0, verify) for kind, verify in zip(KINDS, seconds, strict=True))


# A first level always pays, and a second one after a token with a high probability.
BY_LEVEL = costs(1.0, 1.0, (1 + FIRST + SECOND) / (1 + FIRST), 1.5)
# A first level alone does not pay, but it does with a second one after a token with a high probability.
TOGETHER = costs(1.0, 1.01 * (1 + FIRST), 1 + FIRST + SECOND, 3.0)


def rows_of(draft, rows):
    """Return some rows of a `Draft` or `DraftTree`."""
    parts = ("edges", "live", "tokens", "parents", "depth", "ancestors", "logq", "q")
    return replace(draft, **{name: value[rows] for name in parts if (value := getattr(draft, name, None)) is not None})


def by_its_own_token(draft, tree, p):
    """Whether a token is verified depends on how likely it was drawn itself."""
    edges = tree.logq - tree.logq.gather(1, tree.parents)
    return replace(draft, edges=edges.numpy())


def by_the_target(draft, tree, p):
    """The host has seen the target's answer."""
    edges = p[tree.tokens.gather(1, tree.parents), tree.tokens].log()
    edges[:, 0] = 0
    return replace(draft, edges=edges.numpy())


def by_what_follows(draft, tree, p):
    """The width with the most tokens per second of all widths, also those after tokens that are left out then."""
    return replace(draft, drawn=False)


def three_tokens(verifier, sees, curve=BY_LEVEL):
    """As in `test_verify_laws`; each row is cut as if it were alone."""
    drafter, root = CheckedDrafter(DRAFTER), torch.zeros(ROWS, dtype=torch.int64)
    noise, later = noise_of(ROWS, 3)
    state = drafter.state(root[:, None])
    tree = SampledTree((1, 1, 1)).grow(drafter, root, state, children_of("drawn", WARM, noise))
    policy = Survival(curve, KINDS, [0.5] * 3, Estimator())
    controller = Controller(policy, drafter, 3)
    controller.plan = Plan(3, rows=range(ROWS))
    draft = sees(controller._draft(tree, state), tree, filtered_probs(TARGET, WARM))
    _, first, kind = np.unique(tree.tokens.numpy(), axis=0, return_index=True, return_inverse=True)
    chosen = []
    for b in first:  # rows of the same tokens are cut alike
        policy.drafts, policy.seen = survival.BEGIN, survival.FIRST  # before that, drafts are verified whole
        chosen.append(policy.keep(rows_of(draft, slice(b, b + 1))))
    widths = torch.tensor([4 if k is None else k.shape[1] for k in chosen])[torch.from_numpy(kind).flatten()]
    tokens, n = torch.zeros(ROWS, 4, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    for width in range(2, 5):
        some = (widths == width).nonzero()[:, 0]
        if not len(some):
            continue
        cut = trimmed(rows_of(tree, some), torch.arange(width).repeat(len(some), 1))
        own = Noise([(0, b) for b in some.tolist()], hashes_of(torch.arange(len(DRAFTER))))
        verdict = verify(verifier, cut, WARM, own.after(torch.zeros(len(some)).long(), 4))
        tokens[some, :width], n[some] = verdict.tokens, verdict.n
    return filled_up(tokens, n, WARM, later), widths


@pytest.mark.parametrize("verifier", [MultiRoundRejection(), BlockVerification()], ids=str)
def test_a_chain_that_is_cut_by_the_draft_leaves_the_law(verifier):
    tokens, widths = three_tokens(verifier, lambda draft, tree, p: draft)
    assert len(widths.unique()) > 1, "nothing was cut differently: the test shows nothing"
    assert pvalue(tokens, target_law(WARM)) > 1e-3


@pytest.mark.parametrize("sees", [by_its_own_token, by_the_target, by_what_follows])
def test_a_cut_that_knows_too_much_is_found_out(sees):
    tokens, widths = three_tokens(MultiRoundRejection(), sees, TOGETHER if sees is by_what_follows else BY_LEVEL)
    assert len(widths.unique()) > 1
    assert pvalue(tokens, target_law(WARM)) < 1e-6
