"""FR-Spec: any drafter with a head proposes only the tokens of a map, and decodes as exactly as before."""

import io
import json
import random

import pytest
import torch
from golden_blocks import absorb
from helpers import LEARNERS, main_of, run_here, tiny_drafter, tiny_target

import specdec
from specdec.cli.reading import pieces_of
from specdec.drafters.layers import restrict
from specdec.model.loader import load_texts
from specdec.training import count as module

count = main_of("data count")

MAP = torch.tensor([12, 3, 0, 7, 16, 5, 9, 1])  # by frequency, not by id


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("own_vocab", [None, 8])
@torch.inference_mode()
def test_restricted_logits_are_columns_of_the_full_ones(kind, own_vocab):
    target = tiny_target()
    full, part = (tiny_drafter(target, kind=kind, draft_vocab=own_vocab) for _ in range(2))
    restrict(part, MAP)
    known = range(17) if own_vocab is None else full.vocab.ids.tolist()
    expected = [i for i in MAP.tolist() if i in known]
    assert part.vocab.to_target(torch.arange(part.vocab.size)).tolist() == expected
    feats = torch.randn(1, 5, len(full.taps) * 32)
    logits = [absorb(drafter, feats, torch.ones(1, 5).long()).logits[0, 0] for drafter in (full, part)]
    torch.testing.assert_close(logits[1], logits[0][[list(known).index(i) for i in expected]], rtol=0, atol=1e-5)


def test_a_map_of_strangers_is_refused():
    drafter = tiny_drafter(tiny_target(), draft_vocab=3)  # tokens 0, 2, 4
    with pytest.raises(ValueError, match="no token in common"):
        restrict(drafter, torch.tensor([1, 3]))


def test_count_tokens(tmp_path):
    """The command counts answers of conversations and whole texts. The end of text is always in the map."""
    text = tmp_path / "a.txt"
    text.write_text("the cat and the dog and the cow. " * 20)
    out = tmp_path / "map.json"
    words = ["--text", str(text), "--size", "12", "--out"]
    done = run_here(count, *words, str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    ids = json.loads(out.read_text())
    assert len(ids) == len(set(ids)) == report["size"] == 12
    assert report["coverage"] == 1.0
    assert 1 in ids  # the demo's end of text
    done = run_here(count, *words, str(tmp_path / "no" / "map.json"))
    assert done.returncode == 2
    assert "cannot write" in done.stderr


def test_a_text_is_counted_in_pieces(tmp_path, monkeypatch):
    """The pieces have the tokens of the whole text."""
    draw = random.Random(1)
    lines = ["def f(x):", "    return x  ", "", "", "Hello, wörld! 12 345", "a\tb  c ...", "x" * 700]
    text = "\n".join(draw.choice(lines) for _ in range(300))
    path, target = tmp_path / "a.txt", load_texts(specdec.DEMO_TARGET)
    path.write_text(text)
    whole = torch.tensor(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    monkeypatch.setattr(module, "pieces_of", lambda file: pieces_of(file, 999))
    assert module.counts_of(target, [], [path]).equal(torch.bincount(whole, minlength=target.vocab))


@pytest.mark.parametrize("text", ["word " * 999, "x" * 4999, " " * 4999, "\n" * 4999, "x\n  " * 999, ""])
def test_pieces_of_a_text_without_ends_are_bounded(text):
    pieces = list(pieces_of(io.StringIO(text), 100))
    assert "".join(pieces) == text
    assert max(map(len, pieces), default=0) <= 200
