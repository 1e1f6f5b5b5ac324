"""The kernels around a tree: its levels and its selection."""

import pytest
import torch
from kernel_cases import on_devices
from kernel_formulas import pool_of

from specdec.ops.cuda import tree_level, tree_select
from specdec.trees.dynamic import best_tree, next_level

pytestmark = on_devices


def level(b: int, w: int, columns: int, seed: int, ties: bool):
    """W nodes of a level and their children. With ties, many scores are equal, zeros of both signs among them."""
    g = torch.Generator().manual_seed(seed)
    scores, gains = -torch.rand(b, w, generator=g), -torch.rand(b, w, w, generator=g)
    if ties:
        scores, gains = (scores * 3).round(), (gains * 2).round()
    places = torch.randint(1, 1000, (b, w), generator=g)
    seen = torch.rand(b, w, columns, generator=g) < 0.5
    tokens = torch.randint(0, 100_000, (b, w, w), generator=g)
    return scores, places, seen, gains.sort(dim=2, descending=True).values, tokens


@pytest.mark.parametrize(("b", "w", "columns"), [(1, 1, 1), (2, 3, 3), (1, 8, 40), (2, 10, 70), (1, 32, 64)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_tree_level(device, b, w, columns, ties):
    """Of equal scores the first candidates are chosen: for torch they are a little better than the later ones."""
    scores, places, seen, gains, tokens = given = level(b, w, columns, w, ties)
    made = [x.cpu() for x in tree_level.launch(*(x.to(device) for x in given), 17, w)]
    order = torch.arange(w * w).view(w, w) * (1e-4 if ties else 0)
    wanted = list(next_level(torch.eye(w).bool(), scores, places, seen, gains - order, tokens, 17, w))
    wanted[0] = (scores[..., None] + gains).flatten(1)
    wanted[2] = wanted[0].gather(1, wanted[5] - 17)
    for got, exact in zip(made, wanted, strict=True):
        assert torch.equal(got, exact)


def test_a_last_level_chooses_nothing(device):
    given = level(2, 4, 12, 0, False)
    made = tree_level.launch(*(x.to(device) for x in given), 17, 0)
    wanted = next_level(torch.eye(4).bool(), *given, 17, 0)
    assert [torch.equal(a.cpu(), b) for a, b in zip(made[:2], wanted, strict=True)] == [True, True]
    assert not any(x.numel() for x in made[2:])


@pytest.mark.parametrize(("w", "steps", "n"), [(1, 4, 5), (1, 1, 2), (2, 3, 5), (3, 4, 20), (3, 3, 22), (10, 8, 60)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_tree_select(device, w, steps, n, ties):
    pool, root = pool_of(w, steps, 2, n, ties), torch.tensor([5, 9])
    made = tree_select.launch(root.to(device), *(x.to(device) for x in pool), n, steps)
    for got, wanted in zip(made, best_tree(root, *pool, n, steps), strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_candidates_that_cannot_be_come_last(device):
    """A path of probability 0 is selected only where nothing else is left."""
    scores = torch.tensor([[-1.0, -torch.inf, -1.5, -torch.inf, -torch.inf, -torch.inf]])
    given = torch.tensor([7]), torch.arange(6)[None], scores, torch.tensor([[0, 0, 1, 1, 2, 2]])
    made = tree_select.launch(*(x.to(device) for x in given), 4, 2)
    assert [x.tolist() for x in made[:3]] == [[[7, 0, 1, 2]], [[0, 0, 0, 1]], [[0, 1, 1, 2]]]
