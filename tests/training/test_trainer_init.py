"""Training that starts from a checkpoint: its weights and its vocabulary, refused where the settings say another."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from omegaconf import OmegaConf

from specdec.drafters import eagle3
from specdec.drafters.eagle3 import look_at_itself, scale_of
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.formats.convert import without_a_form
from specdec.drafters.layers import DraftShape
from specdec.drafters.vocab import DraftVocab, fitting_size
from specdec.model.attention import Attention
from specdec.model.loader import load_target
from specdec.model.rope import Rope, RopeTable
from specdec.training.build import build_drafter, from_checkpoint

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def target(target_path):
    return load_target(target_path)


def settings(name: str = "eagle3", **fields):
    return OmegaConf.merge(OmegaConf.load(CONF / "drafter" / f"{name}.yaml"), fields)


def saved(folder, target):
    """The drafter with which a run from this folder begins."""
    return build_drafter(settings("saved", path=str(folder)), target, [], 0)


@pytest.mark.parametrize(
    ("kind", "objective"), [("eagle3", "recipe"), ("eagle", "eagle"), ("mtp", "mtp"), ("medusa", "medusa")]
)
def test_every_kind_can_be_trained_further(target, tmp_path, kind, objective):
    """With the vocabulary, the taps and the shape of the checkpoint, and by the objective of its family."""
    folder = tmp_path / "given"
    save_drafter(tiny_drafter(target, draft_vocab=50 if kind == "eagle3" else None, kind=kind), folder, target)
    given = load_drafter(folder, target)
    words = from_checkpoint([f"from={folder}", "out=x"])
    assert words[2:] == ["drafter=saved", f"drafter.path='{folder}'", f"objective={objective}"]
    drafter = saved(folder, target)
    assert kind != "eagle3" or torch.equal(drafter.vocab.ids, given.vocab.ids)
    assert (type(drafter), drafter.taps, drafter.shape) == (type(given), given.taps, given.shape)
    weights = dict(given.named_parameters())
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, weights.pop(name)), name
        assert weight.dtype == torch.float32, name
        assert weight.requires_grad, name
    assert set(weights) <= {"head.weight"}  # which has the target's rows here


def test_a_head_that_was_not_trained_stays_so(target, tmp_path):
    """Also where the layout stores the target's rows."""
    vocab = DraftVocab(target.vocab, torch.arange(0, target.vocab, 2))
    made = eagle3.create(target, vocab=vocab, train_head=True)  # a fresh head has the target's rows
    save_drafter(made, tmp_path / "draft", target)
    drafter = saved(tmp_path / "draft", target)
    assert "head.weight" not in dict(drafter.named_parameters())
    assert torch.equal(drafter.head.weight, target.head.weight[::2])


def test_taps_are_the_published_ones_or_those_of_a_shallow_target():
    for layers, taps in ((28, (2, 14, 25)), (36, (2, 18, 33)), (5, (1, 3, 5)), (1, (1, 1, 1))):
        assert eagle3.default_taps(layers) == taps


def test_words_that_describe_another_drafter_are_refused(drafter_path):
    assert from_checkpoint(["out=x", "from=null"]) == ["out=x", "from=null"]
    assert from_checkpoint([f"from={drafter_path}", "objective=lk"])[-1] == f"drafter.path='{drafter_path}'"
    again = from_checkpoint(["from=demo/mtp", f"from={drafter_path}"])
    assert again[-2:] == [f"drafter.path='{drafter_path}'", "objective=recipe"], "as Hydra takes the last value"
    for word in ("drafter=mtp", "drafter.taps=[1,2,3]", "+drafter.taps=[1,2,3]"):
        with pytest.raises(ValueError, match="takes the drafter as it was saved: leave out"):
            from_checkpoint([f"from={drafter_path}", word])


def test_the_head_costs_no_more_than_the_rest():
    for hidden, intermediate, size in ((576, 1536, 8192), (1024, 3072, 16384), (4096, 14336, 32000)):
        assert fitting_size(SimpleNamespace(hidden=hidden, intermediate=intermediate)) == size


def test_a_fresh_eagle3_head_looks_at_the_token_just_drafted():
    """Of 60 positions with random embeddings, nearly all weight falls on the position itself, whatever the rope."""
    torch.manual_seed(0)
    attention = Attention(DraftShape(256, 512, 8, 4, 32, 1e-5, Rope()), 512)
    look_at_itself(attention)
    table, attend = RopeTable(Rope(), 32), Mock(return_value=torch.zeros(1, 60, 256))
    table.reserve(60, torch.zeros(()))
    attention(torch.randn(1, 60, 512), table(torch.arange(60)[None]), attend)
    q, k, _ = attend.call_args.args
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, dim=2)) * 32**-0.5
    assert scores.softmax(-1).diagonal(dim1=2, dim2=3).mean() > 0.9


def test_a_fresh_eagle_head_hears_the_embedding_beside_the_feature(target):
    """However small the target's embeddings are, half as loud as a feature, which itself passes through."""
    with torch.no_grad():
        target.embed.weight.mul_(0.01)
    head = build_drafter(settings("eagle", draft_vocab_size=None), target, [], 0)
    embeddings, feature = head.embedding.float(), torch.randn(5, target.config.hidden)
    heard = head.fc(torch.cat([embeddings, torch.zeros_like(embeddings)], dim=-1)) - head.fc.bias
    torch.testing.assert_close(heard.square().mean().sqrt(), 0.5 * target.final_scale())
    passed = head.fc(torch.cat([torch.zeros_like(feature), feature], dim=-1)) - head.fc.bias
    torch.testing.assert_close(passed, feature)


def test_divided_features_end_up_in_a_saved_fc(tmp_path):
    """A head that SGLang loads too: it starts with the deepest tap after the target's final norm, and what is saved
    takes features as they are and says the same."""
    target, config = tiny_target(layers=6), settings("eagle3", draft_vocab_size=None)
    drafter = build_drafter(config, target, [], 0)
    assert drafter.taps == (1, 3, 5)
    with torch.no_grad():
        drafter.tap_scale[: target.config.hidden] *= 4  # as if that tap were small
        feats = target(torch.arange(17)[None], None, taps=drafter.taps)[1]
        behind_the_norm = target.norm(feats.chunk(3, dim=-1)[-1])
        torch.testing.assert_close(drafter.norm(drafter.fuse(feats)), behind_the_norm, rtol=1e-4, atol=1e-4)
        drafter.fc.weight.add_(torch.randn_like(drafter.fc.weight))
        assert "sglang" not in without_a_form(drafter, target)
        save_drafter(drafter, tmp_path / "draft", target)
        loaded = load_drafter(tmp_path / "draft", target)
        torch.testing.assert_close(loaded.fc(feats), drafter.fuse(feats), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(drafter.fc(feats), drafter.fuse(feats), rtol=0.1)
    assert torch.equal(saved(tmp_path / "draft", target).scaled_fc(), loaded.fc.weight)


def test_features_are_divided_by_their_size():
    target = tiny_target(layers=6)
    target.blocks[3].mlp.down.weight.data.mul_(1000)
    scale = scale_of(target, (1, 3, 5)).unflatten(0, (3, -1))
    feats = target(torch.arange(17)[None], None, taps=(1, 3, 5))[1].unflatten(-1, (3, -1))
    sizes = (feats * scale).square().mean((0, 1, 3)).sqrt()
    assert ((sizes > 0.5) & (sizes < 2)).all()
    assert scale[2, 0] < scale[1, 0] / 8
    assert torch.equal(scale.log2(), scale.log2().round())
