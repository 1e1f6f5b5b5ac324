"""`Held` against lists: whatever rows do, each keeps its own positions in their order."""

import random

import pytest
import torch

import specdec.engine.held as held_module
from specdec.engine.held import Held
from specdec.structs import Survivors


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


def leave(held: Held, ended: list[bool]) -> Survivors:
    kept = Survivors(ended, torch.device("cpu"))
    held.compact(kept)
    return kept


@pytest.mark.parametrize("most_parts", [1, 4, 256])
@pytest.mark.parametrize("with_feats", [True, False])
def test_rows_come_go_and_end(with_feats, most_parts, monkeypatch):
    monkeypatch.setattr(held_module, "MOST_PARTS", most_parts)
    monkeypatch.setattr(held_module, "FEW_PARTS", min(most_parts, held_module.FEW_PARTS))
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
            held.join(len(rows), 2, (feats, tokens, torch.tensor([3, 5])))
            rows += [Row(tokens[0, :3].tolist()), Row(tokens[1].tolist())]
        elif kind == "places":  # rows whose prompts the drafter has absorbed
            held.join(len(rows), 1)
            rows.append(Row())
        elif kind == "leave" and len(rows) > 1:
            gone = rng.randrange(len(rows))
            rows = leave(held, [b == gone for b in range(len(rows))]).of(rows)
            assert len(held.parts) < max(held_module.FEW_PARTS, 2 * most_parts)
        elif rows:
            rng.choice(rows).active = False
        if held.parts:
            check(held, rows, with_feats)
    assert max(len(row.tokens) for row in rows) > 20


def test_rows_of_which_nothing_is_held():
    """Their neighbours had something, and have left."""
    held = Held(1)
    held.put(None, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    held.join(1, 1)
    leave(held, [True, False])
    check(held, [Row()], with_feats=False)
