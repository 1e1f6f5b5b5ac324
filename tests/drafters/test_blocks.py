"""Block drafters against outputs of their authors' own code (tests/golden/README.md)."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from golden_blocks import GOLDEN, absorb, drafted, golden_drafter, golden_heads
from helpers import assert_close_in_fp32
from safetensors.torch import load_file

from specdec.contracts import DraftState
from specdec.drafters.block_layers import BlockForward
from specdec.drafters.conditional import HEADS, Confidence, Domino
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats.dflash import BARE, MARKOV, PARTS, conditional_of
from specdec.drafters.vocab import DraftVocab
from specdec.model.layers import Linear


def absorb_round(drafter: BlockDrafter, reference: dict, at: str, seen: int) -> tuple[DraftState, int]:
    """The state after the context of round `at`, whose last token is the anchor, and how much is seen then."""
    feats = reference[f"{at}.target_hidden"]
    tokens = torch.zeros(feats.shape[:2], dtype=torch.int64)
    tokens[0, -1] = reference[f"{at}.block_ids"][0, 0]
    return absorb(drafter, feats, tokens, seen), seen + feats.shape[1]


def along(drafter: BlockDrafter, first: DraftState, tokens: torch.Tensor) -> Iterator[DraftState]:
    """Yield the state of each slot, on the path of these tokens."""
    state = drafter.root(first)
    yield state
    for slot in range(1, drafter.block):
        state = drafter.expand(first, tokens[:, slot - 1 : slot], state.hidden, slot, None)
        yield state


MIXED = ["full_attention", "sliding_attention"]
CASES = {
    "dflash": ("dflash", "dflash", {}),
    "dflash in the layout of speculators": ("speculators", "dflash", {}),
    "deepspec": ("deepspec", "deepspec", {}),
    "windows, causal": ("dflash", "sliding_causal", {"layer_types": MIXED}),
    "windows": ("dflash", "sliding_noncausal", {"layer_types": MIXED, "is_causal": False}),
}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_rounds_match(case):
    """Logits of every slot that drafts, and the tokens, while the context grows by what was accepted."""
    name, prefix, changes = CASES[case]
    drafter = golden_drafter(name, keeps=name == "deepspec", sliding_window=5, **changes)
    reference, seen = load_file(GOLDEN / "dflash_rounds.safetensors"), 0
    rounds = sum(key.startswith(f"{prefix}.") and key.endswith("target_hidden") for key in reference)
    for number in range(rounds):
        at = f"{prefix}.round{number}"
        state, seen = absorb_round(drafter, reference, at, seen)
        assert_close_in_fp32(state.logits, reference[f"{at}.logits"][:, drafter.switches.unused :])
        expected = reference[f"{at}.{'sampled' if prefix == 'deepspec' else 'draft'}_tokens"]
        assert drafted(drafter, state) == expected.tolist()
    assert seen == drafter.cache.lens
    for name, stored in ((k, v) for k, v in reference.items() if f"{prefix}.round{rounds - 1}.cache" in k):
        kind, layer = name.split("_")[-1].split(".")
        ours = drafter.cache.layers[int(layer)]["kv".index(kind), :, :seen].transpose(1, 2)
        assert_close_in_fp32(ours, stored)


@pytest.mark.parametrize("prefix", ["full", "sliding_causal", "sliding_noncausal"])
@torch.inference_mode()
def test_dflash2_rounds_match(prefix):
    """Convolutions and windows in the logits of every slot, the selector's scores along the drafted tokens, and only
    tokens among its candidates. The last block of the authors is a row shorter."""
    kinds = ["full_attention", "full_attention" if prefix == "full" else "sliding_attention"]
    windows = {"layer_types": kinds, "sliding_window": 5, "is_causal": prefix == "sliding_causal"}
    reference = load_file(GOLDEN / "dflash2_rounds.safetensors")
    for rows, compared in ((6, (0, 1)), (5, (2,))):
        drafter, seen = golden_drafter("dflash2", "dflash2", block_size=rows, **windows), 0
        for number in range(3):
            state, seen = absorb_round(drafter, reference, f"full.round{number}", seen)
            at = f"{prefix}.round{number}"
            if number not in compared:
                continue
            assert_close_in_fp32(state.logits, reference[f"{at}.logits"][:, 1:])
            tokens = reference[f"{at}.draft_tokens"]
            assert drafted(drafter, state) == tokens.tolist()
            candidates = reference.get(f"{at}.candidate_ids", torch.empty(1, 0))[0]
            for slot, (ids, node) in enumerate(zip(candidates, along(drafter, state, tokens), strict=False)):
                assert_close_in_fp32(node.logits[0, 0, ids], reference[f"{at}.candidate_scores"][0, slot])
                assert node.logits.isfinite().sum() == len(ids) == 16


@torch.inference_mode()
def test_causal_blocks_match():
    """JetSpec, with slot k for token p+k and, `draft_shift`, for p+k+1, of which the authors leave out the last."""
    reference = load_file(GOLDEN / "jetspec_rounds.safetensors")
    config = json.loads((GOLDEN / "jetspec.json").read_text())["dflash_config"]
    for prefix, changes in (("", {}), ("shift.", {"draft_shift": True})):
        drafter = golden_drafter("jetspec", "jetspec", dflash_config=config | changes)
        seen = 0
        for number in range(3 if prefix == "" else 2):
            anchor = int(reference[f"{prefix}round{number}.anchor_position"])
            tokens = reference["ids"][:, seen + 1 : anchor + 1]
            state, seen = absorb(drafter, reference["target_hidden"][:, seen:anchor], tokens, seen), anchor
            assert_close_in_fp32(state.logits[:, :5], reference[f"{prefix}round{number}.logits"])


@pytest.mark.parametrize("kind", MARKOV)
@torch.inference_mode()
def test_markov_and_confidence_heads_match(kind):
    """From the backbone's states and base logits: what the path changes of every slot, and where a proposal is cut."""
    reference, vocab = load_file(GOLDEN / "dspark.safetensors"), DraftVocab(320)
    heads = golden_heads(reference, kind)
    conditional, confidence = HEADS[MARKOV[kind]](vocab, torch.zeros(320, 64), 16), Confidence(64, 16)
    for part, name in PARTS[MARKOV[kind]].items():
        held = {k.removeprefix(f"{name}."): v for k, v in heads.items() if k.startswith(f"{name}.")}
        getattr(conditional, part).load_state_dict(held)
    confidence.proj.load_state_dict({k.split(".")[-1]: v for k, v in heads.items() if "confidence" in k})
    shape = golden_drafter("dflash").shape
    drafter = BlockDrafter(
        shape, 1, (1,), vocab, torch.zeros(320, 64), None, BlockForward(5, 318, "p+k+1"), conditional, confidence
    )
    for number in range(2):
        at = f"{kind}.round{number}"
        base, tokens = reference[f"round{number}.base_logits"], reference[f"{at}.sampled_tokens"]
        drafter.head = Fixed(base)
        carried = conditional.begin(reference[f"round{number}.block_ids"][:, :1])
        first = DraftState(carried, reference[f"round{number}.hidden"], drafter.head)
        for slot, state in enumerate(along(drafter, first, tokens)):
            assert_close_in_fp32(state.logits, reference[f"{at}.logits"][:, slot : slot + 1])
        assert_close_in_fp32(drafter.confidences(first, tokens), reference[f"{at}.confidence_logits"])
        assert drafted(drafter, first, 5) == tokens.tolist()
        for cut in (0.3, 0.5, 0.7):
            if (stored := reference.get(f"{at}.cut_at_{cut}")) is not None:
                drafter.cut = cut
                assert drafter._kept(first).item() == stored.item()


def domino_head(reference: dict, prefix: int) -> Domino:
    """The golden GRU and residual."""
    head = Domino(DraftVocab(320), reference["embed_tokens.weight"], 20, state=28, prefix=prefix)
    for part, name in (PARTS["domino"] | {k: v.removesuffix(".weight") for k, v in BARE["domino"].items()}).items():
        weight = reference.get(f"domino.{name}.weight", reference.get(f"domino.{name}"))
        getattr(head, part).weight.data.copy_(weight)
    return head


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("label", ["p+k", "p+k+1"])
@torch.inference_mode()
def test_domino_head_matches(label, prefix):
    """From the backbone's states: what the GRU over the path changes of every slot. With label p+k+1 the authors do not
    draft from the last one."""
    reference, shape = load_file(GOLDEN / "domino.safetensors"), golden_drafter("dflash").shape
    head, embedding = reference["lm_head.weight"], reference["embed_tokens.weight"]
    how = BlockForward(6, 318, label)
    conditional = domino_head(reference, prefix)
    drafter = BlockDrafter(shape, 1, (1,), DraftVocab(320), embedding, head, how, conditional)
    name, number = f"{'' if how.unused == 0 else 'no'}shift_prefix{prefix}", 0
    while (expected := reference.get(f"{name}.round{number}.final_logits")) is not None:
        tokens = reference[f"{name}.round{number}.draft_tokens"]
        carried = conditional.begin(reference[f"round{number}.anchor"])
        first = DraftState(carried, reference[f"round{number}.hidden"][:, how.unused :], drafter.head)
        for at, state in enumerate(along(drafter, first, tokens), how.unused):
            assert_close_in_fp32(state.logits, expected[:, at : at + 1])
        assert drafted(drafter, first, 5) == tokens.tolist()
        number += 1
    assert number >= 1


class Fixed(Linear):
    """A head whose logits of all slots are given."""

    def __init__(self, logits):
        super().__init__(1, 1)
        self.slots = logits

    def forward(self, x):
        return self.slots


@pytest.mark.parametrize("layout", ["dspark", "dspark_speculators"])
@pytest.mark.parametrize("kind", MARKOV)
def test_dspark_files_are_read(layout, kind):
    """Every weight finds its place, in both layouts, and the parts are those that the file holds."""
    heads = golden_heads(load_file(GOLDEN / "dspark.safetensors"), kind)
    drafter = golden_drafter(layout, extra=heads, keeps=layout == "dspark", markov_head_type=kind)
    assert (drafter.block, drafter.switches.label) == (5, "p+k+1")
    assert type(drafter.conditional) is HEADS[MARKOV[kind]]
    assert torch.equal(drafter.conditional.head.weight, heads["markov_head.markov_w2.weight"])
    assert torch.equal(drafter.confidence.proj.weight, heads["confidence_head.proj.weight"])


def test_a_domino_checkpoint_without_a_prefix_keeps_the_first_slot():
    """As SpecForge's `pure_draft_prefix_len` does where config.json leaves it out."""
    found = conditional_of({}, SimpleNamespace(hidden=8), {"embed_proj.0.weight": torch.zeros(4, 14)}, "x")
    assert found == {"conditional": "domino", "rank": 4, "head": {"state": 6, "prefix": 1}}
    assert Domino(DraftVocab(12), torch.zeros(12, 8), rank=4).prefix == 1
