"""`Held` against lists: whatever rows do, each keeps its own positions in their order."""

import random

import numpy as np
import pytest
import torch

import specdec.engine.held as held_module
from specdec.engine.held import Held


class Row:
    """What one row should hold: tokens, and whether it goes on."""

    def __init__(self, tokens: list[int] = ()):
        self.tokens, self.active = list(tokens), True


def check(held: Held, rows: list[Row], with_feats: bool) -> None:
    feats, tokens, n = held.padded()
    assert n.tolist() == [len(row.tokens) for row in rows]
    assert [t[:k] for t, k in zip(tokens.tolist(), n.tolist(), strict=True)] == [row.tokens for row in rows]
    assert (feats is None) != with_feats
    if with_feats:
        for row, own in zip(rows, feats, strict=True):
            assert own[: len(row.tokens), 0].tolist() == row.tokens


def numbers(rows: int, width: int, fresh, with_feats: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Features [R,K,2] and tokens [R,K]; a token's features begin with the token."""
    tokens = torch.tensor([[next(fresh) for _ in range(width)] for _ in range(rows)])
    return (tokens[..., None].expand(-1, -1, 2).float() if with_feats else None), tokens


@pytest.mark.parametrize("most_parts", [1, 4, 64])
@pytest.mark.parametrize("with_feats", [True, False])
def test_rows_come_go_and_end(with_feats, most_parts, monkeypatch):
    monkeypatch.setattr(held_module, "MOST_PARTS", most_parts)
    rng, fresh = random.Random(3), iter(range(10**6))
    rows, held = [Row(), Row()], Held(2)
    for _ in range(200):
        kind = rng.choice(["round", "round", "round", "prompts", "places", "leave", "end"])
        if kind == "round" and rows:
            feats, tokens = numbers(len(rows), 1, fresh, with_feats)
            held.put(feats, tokens, torch.tensor([int(row.active) for row in rows]))
            for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                row.tokens += [token] * row.active
        elif kind == "prompts" and len(rows) < 6:
            feats, tokens = numbers(2, 5, fresh, with_feats)
            held.join(2, (feats, tokens, torch.tensor([3, 5])))
            rows += [Row(tokens[0, :3].tolist()), Row(tokens[1].tolist())]
        elif kind == "places":  # rows whose prompts the drafter has absorbed
            held.join(1)
            rows.append(Row())
        elif kind == "leave" and len(rows) > 1:
            kept = sorted(rng.sample(range(len(rows)), len(rows) - 1))
            held.compact(np.array(kept))
            rows = [rows[b] for b in kept]
            assert len(held.parts) <= most_parts
        elif rows:
            rng.choice(rows).active = False
        if held.parts:
            check(held, rows, with_feats)
    assert max(len(row.tokens) for row in rows) > 20


def test_rounds_of_the_same_rows_are_one_part():
    held = Held(2)
    for _ in range(3):
        held.put(None, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    held.join(1)
    held.put(None, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    assert [len(part.rounds) for part in held.parts] == [3, 1]


def test_nothing_is_kept_of_rows_that_left():
    held = Held(1)
    held.put(None, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    held.join(1)
    held.compact(np.array([1]))
    assert held.parts == []
