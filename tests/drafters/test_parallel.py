"""P-EAGLE and PARD: rounds against their authors' outputs (tests/golden/README.md), and training against decoding."""

import pytest
import torch
from golden_blocks import GOLDEN, absorb, drafted, golden_drafter
from helpers import PARALLEL, assert_close_in_fp32, save_hf, tiny_parallel, tiny_target
from safetensors.torch import load_file

from specdec import Engine, load_target
from specdec.drafters import dflash, pard, peagle, unroll_block
from specdec.drafters.vocab import DraftVocab
from specdec.trees import BlockTree, Chain


@pytest.mark.parametrize("layout", ["peagle", "peagle_speculators"])
@torch.inference_mode()
def test_rounds_of_peagle_match(layout):
    """Logits of all slots and drafted tokens, before and after two drafts were accepted."""
    reference, drafter = load_file(GOLDEN / "peagle.safetensors"), golden_drafter(layout, "peagle")
    drafter.set_block(4)
    seen = 0
    for number in range(2):
        at = f"rounds.round{number}"
        tokens = reference[f"{at}.row_tokens"][None, seen:]
        end = seen + tokens.shape[1]
        state, seen = absorb(drafter, reference["rounds.taps"][:, seen:end], tokens, seen), end
        assert_close_in_fp32(state.logits[0], reference[f"{at}.logits"])
        assert drafted(drafter, state) == [reference[f"{at}.draft_tokens"].tolist()]


@pytest.mark.parametrize("kind", ["", "_pard2"])
@torch.inference_mode()
def test_rounds_of_pard_match(kind):
    """The authors' first round drafts after the prompt alone. A mask row of PARD-2 has the last real row's feature."""
    reference, extra, changes = load_file(GOLDEN / "pard.safetensors"), {}, {}
    if kind:
        extra["target_proj.weight"] = reference["rounds_pard2.target_proj.weight"]
        changes = {"spd_type": "pard2", "pard2_target_layers": [-1, -4, -8], "pard2_scale": 0.02}
        assert reference["rounds_pard2.scale"] == pytest.approx(0.02)
    drafter = golden_drafter("pard", "pard", extra=extra, block_size=5, **changes)
    assert drafter.taps == ((12, 9, 5) if kind else ())
    drafter.reset(1, 64)
    seen = 0
    for number in range(3):
        at = f"rounds{kind}.round{number}"
        tokens, feats = reference[f"{at}.input_ids"][:, :-4], reference.get(f"{at}.target_feat")
        n, feats = tokens.shape[1], None if feats is None else feats[:, :-4]
        if number == 0:
            given = None if feats is None else feats[:, 1:]
            state = drafter.admit(0, tokens[:, 0], given, tokens[:, 1:], torch.tensor([n - 1]))
        else:
            state = drafter.extend(feats, tokens, torch.tensor([n]), seen + n)
        seen += n
        assert_close_in_fp32(state.logits, reference[f"{at}.logits"])
        assert drafted(drafter, state) == reference[f"{at}.draft_tokens"].tolist()


@pytest.mark.parametrize("piece", [64, 1])
@pytest.mark.parametrize("kind", PARALLEL)
@torch.no_grad()
def test_a_slot_in_training_is_the_slot_in_decoding(kind, piece, monkeypatch):
    """After prefixes of two documents in a row, in rows of different lengths, at every row or at sampled ones."""
    monkeypatch.setattr(unroll_block, "PIECE", piece)
    length, target = 16, tiny_target()
    drafter = tiny_parallel(target, kind)
    feats, texts = torch.randn(2, length, len(drafter.taps) * 32), torch.randint(17, (2, length + 1))
    drafter.first_tokens, tokens = texts[:, 0], texts[:, 1:]
    drafter.documents = (torch.arange(length) >= 9).long().expand(2, length)
    unrolled = torch.stack([state.logits for state in drafter.unroll(feats, tokens, 6)], 2)
    rows = torch.tensor([[7, 2, 13], [12, 14, 5]])
    blocks = drafter.blocks(feats, tokens, rows, [6, 4, 1])
    for place, wanted in enumerate((6, 4, 1)):
        logits = blocks.head(blocks.readout[:, place])
        expected = unrolled[torch.arange(2), rows[:, place]]
        assert_close_in_fp32(logits[:, :wanted], expected[:, :wanted])
    for first, counts in ((0, (1, 8)), (0, (3, 8)), (9, (6, 2))):
        drafter.reset(2, 64)
        n, part = torch.tensor(counts), slice(first, first + max(counts))
        state = drafter.admit(0, texts[:, first], feats[:, part], tokens[:, part], n)
        expected = unrolled[torch.arange(2), first + n - 1]
        assert_close_in_fp32(state.logits, expected)


@torch.no_grad()
def test_a_whole_model_becomes_a_drafter(tmp_path):
    """The first slot is the model's own next token; as its own target's drafter it is always right there."""
    save_hf(tmp_path / "it", "qwen3", head_dim=8, tie_word_embeddings=True)
    target = load_target(tmp_path / "it", tokenizer=False)
    drafter = pard.create(target, path=tmp_path / "it", block_size=3).eval()
    assert drafter.head.weight is drafter.model.embed.weight
    for policy in (Chain(3), BlockTree(3, 3, 8)):
        rows = Engine(target, drafter, policy).generate([[3, 5, 7], [1]], max_new_tokens=12, eos=frozenset()).rows
        assert all(accepted >= 1 for row in rows for accepted in row.trace.accepted[:-1])


def test_a_fresh_model_has_the_targets_ends():
    target = tiny_target()
    drafter = pard.create(target, layers=2)
    assert torch.equal(drafter.model.embed.weight, target.embed.weight)
    assert torch.equal(drafter.head.weight, target.head.weight)
    assert not torch.equal(pard.create(target, layers=2, init="random").head.weight, target.head.weight)
    assert all(parameter.requires_grad for parameter in drafter.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target: peagle.create(target, block_size=1), "block_size must be at least 2"),
        (lambda target: peagle.create(target, layers=0), "layers must be at least 1"),
        (lambda target: peagle.create(target, mask_token=17), "a row of the target's embedding, 0 to 16, got 17"),
        (lambda target: peagle.create(target, feedback="post"), "feeds nothing back"),
        (lambda target: pard.create(target, init="zero"), "init must be 'target' or 'random'"),
        (lambda target: pard.create(target, mask_token=-1), "a row of the target's embedding"),
        (lambda target: dflash.create(target, layers=2, sliding_layers=3, window=4), "sliding_layers from 0 to it"),
        (lambda target: DraftVocab(17, torch.tensor([], dtype=torch.long)), "must hold token ids from 0 to 16"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_target())


def test_the_smallest_block_and_windows_in_all_layers():
    """Two rows, of which the anchor's drafts nothing, and the mask token that no word has: the last of 17."""
    drafter = dflash.create(tiny_target(), block_size=2, layers=2, sliding_layers=2, window=4)
    assert (drafter.block, drafter.switches.sliding, drafter.switches.mask_token) == (1, (True, True), 16)


def test_what_pard_does_not_take(tmp_path):
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    save_hf(tmp_path, "gemma3_text", head_dim=8, sliding_window=16, layer_types=layers, vocab_size=17)
    with pytest.raises(ValueError, match="without windows"):
        pard.create(tiny_target(), path=tmp_path)
    drafter = tiny_parallel(tiny_target(), "pard")
    with pytest.raises(ValueError, match="set first_tokens"):
        next(drafter.unroll(torch.zeros(1, 4, 0), torch.zeros(1, 4, dtype=torch.int64), 2))
    with pytest.raises(ValueError, match="steps is 7, but a block drafts 6 tokens only"):
        next(drafter.unroll(torch.zeros(1, 4, 0), torch.zeros(1, 4, dtype=torch.int64), 7))
