"""Training that starts from a checkpoint: its weights and its vocabulary, refused where the settings say another."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from omegaconf import OmegaConf

from specdec.drafters.eagle3 import look_at_itself, scale_of
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.formats.convert import without_a_form
from specdec.drafters.layers import DraftShape
from specdec.drafters.vocab import fitting_size
from specdec.model.attention import Attention
from specdec.model.loader import load_target
from specdec.model.rope import Rope, RopeTable
from specdec.training.train import build_drafter

CONF = Path(__file__).parents[2] / "conf"


def settings(name: str = "eagle3", **fields):
    return OmegaConf.merge(OmegaConf.load(CONF / "drafter" / f"{name}.yaml"), fields)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "medusa"])
def test_every_kind_can_be_trained_further(target_path, drafter_path, tmp_path, kind):
    """With the vocabulary of the checkpoint; EAGLE-3 heads have some tokens here, and the others all."""
    target, folder = load_target(target_path), drafter_path if kind == "eagle3" else tmp_path / "given"
    if kind != "eagle3":
        made = tiny_drafter(target, kind=kind)
        made.recipe = {"_target_": "drafters.none.create"}  # not used by those with a layout
        save_drafter(made, folder, target)
    given = load_drafter(folder, target)
    some = given.vocab.size if kind == "eagle3" else None
    drafter = build_drafter(settings(kind, draft_vocab_size=some), target, [], 0, str(folder))
    assert kind != "eagle3" or torch.equal(drafter.vocab.ids, given.vocab.ids)
    for (name, weight), expected in zip(drafter.named_parameters(), given.parameters(), strict=True):
        assert torch.equal(weight, expected), name
        assert weight.dtype == torch.float32, name
        assert weight.requires_grad or kind != "eagle3", name


def test_the_draft_vocabulary_is_that_of_the_checkpoint_unless_a_size_is_given(target_path, drafter_path):
    target = load_target(target_path)
    given = load_drafter(drafter_path, target)
    drafter = build_drafter(settings(draft_vocab_size="auto"), target, [], 0, str(drafter_path))
    assert torch.equal(drafter.vocab.ids, given.vocab.ids)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "size"), [(576, 1536, 8192), (1024, 3072, 16384), (4096, 14336, 32000)]
)
def test_the_head_costs_no_more_than_the_rest(hidden, intermediate, size):
    assert fitting_size(SimpleNamespace(hidden=hidden, intermediate=intermediate)) == size


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("eagle3", {"draft_vocab_size": 7}, r"set drafter\.draft_vocab_size=160"),
        ("eagle3", {"taps": [0, 1, 3]}, r"taps \[.*settings describe .* taps \[0, 1, 3\]"),
        ("eagle3", {"feedback": "post"}, "feedback='post'"),
        ("eagle3", {"intermediate_size": 32}, "intermediate=32"),
        ("mtp", {}, "is Eagle3 .*describe Mtp"),
    ],
)
def test_another_drafter_is_refused(target_path, drafter_path, name, fields, message):
    target = load_target(target_path)
    size = load_drafter(drafter_path, target).vocab.size
    with pytest.raises(ValueError, match=message.replace("160", str(size))):
        build_drafter(settings(name, **({"draft_vocab_size": size} | fields)), target, [], 0, str(drafter_path))


def test_a_fresh_eagle3_head_looks_at_the_token_just_drafted():
    """Of 60 positions with random embeddings, nearly all weight falls on the position itself, whatever the rope."""
    torch.manual_seed(0)
    attention = Attention(DraftShape(256, 512, 8, 4, 32, 1e-5, Rope()), 512)
    look_at_itself(attention)
    table = RopeTable(Rope(), 32)
    table.reserve(60, torch.zeros(()))
    seen = []

    def attend(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, dim=2)) * 32**-0.5
        seen.append(scores.softmax(-1).diagonal(dim1=2, dim2=3))
        return q.flatten(2)

    attention(torch.randn(1, 60, 512), table(torch.arange(60)[None]), attend)
    assert seen[0].mean() > 0.9


def test_a_fresh_eagle_head_hears_the_embedding_beside_the_feature(target_path):
    """However small the target's embeddings are, half as loud as a feature, which itself passes through."""
    target = load_target(target_path)
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
    further = build_drafter(config, target, [], 0, str(tmp_path / "draft"))
    assert torch.equal(further.scaled_fc(), loaded.fc.weight)


def test_features_are_divided_by_their_size():
    target = tiny_target(layers=6)
    target.blocks[3].mlp.down.weight.data.mul_(1000)
    scale = scale_of(target, (1, 3, 5)).unflatten(0, (3, -1))
    feats = target(torch.arange(17)[None], None, taps=(1, 3, 5))[1].unflatten(-1, (3, -1))
    sizes = (feats * scale).square().mean((0, 1, 3)).sqrt()
    assert ((sizes > 0.5) & (sizes < 2)).all()
    assert scale[2, 0] < scale[1, 0] / 8
    assert torch.equal(scale.log2(), scale.log2().round())
