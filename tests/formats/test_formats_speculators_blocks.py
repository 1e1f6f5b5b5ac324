"""vLLM's `speculators` library loads our exports of block drafters, and computes the block logits that we compute."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import save_hf

from specdec.drafters import dflash, peagle
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.formats.convert import convert
from specdec.drafters.vocab import DraftVocab
from specdec.model.loader import load_target

speculators = pytest.importorskip("speculators", reason="requirements-speculators.txt is not installed")

WINDOWS = {"sliding_layers": 1, "window": 3, "window_from": "anchor"}
DSPARK = {"label": "p+k+1", "conditional": "markov", "confidence": True, "rank": 16}
BLOCKS = {
    "dflash": {},
    "dflash, windows": WINDOWS,
    "dflash, bidirectional windows": WINDOWS | {"sliding_causal": False},
    "dspark": DSPARK,
    "dspark, gated": DSPARK | {"conditional": "markov_gated"},
    "dspark, rnn": DSPARK | {"conditional": "markov_rnn", "confidence": False},
}
DFLASH2 = {"conditional": "selector", "head": {"candidates": 6}, "convolution": 8, "rank": 16}
LENGTH = 24


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculators") / "target"
    save_hf(folder, "llama", num_hidden_layers=8)
    return folder


def exported(drafter, target, target_folder, folder):
    """The drafter with other weights, through our export, in the library. Its default masks are compiled ones."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    save_drafter(drafter, folder / "ours", target)
    convert(folder / "ours", folder / "theirs", "speculators", target_folder)
    config = speculators.SpeculatorModelConfig.from_pretrained(folder / "theirs")
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(folder / "theirs", config=config, dtype=torch.float32).eval()


def metrics_of(monkeypatch, module) -> SimpleNamespace:
    """What the library's forward hands to its loss, which is not computed."""
    seen = SimpleNamespace()

    def keep(logits=None, targets=None, *rest, unary_logits=None, candidate_logits=None, **named):
        seen.logits, seen.confidence = (unary_logits if logits is None else logits)[0], rest[0] if rest else None
        seen.ids, seen.candidates = named.get("training_candidate_ids"), candidate_logits
        return seen.logits.new_zeros(()), {}

    monkeypatch.setattr(module, "compute_metrics", keep)
    return seen


def anchored(drafter, target, target_folder, folder, monkeypatch) -> tuple:
    """What the library and we compute of the same four blocks: its metrics' arguments, our blocks and our drafter."""
    model = exported(drafter, target, target_folder, folder)
    core = __import__(f"speculators.models.{model.config.speculators_model_type}.core", fromlist=["core"])
    backbone = __import__("speculators.models.dflash.core", fromlist=["core"])
    anchors = torch.tensor([3, 7, 12, 15])
    monkeypatch.setattr(backbone, "select_anchors", lambda *given: (anchors, torch.ones(4, dtype=torch.bool)))
    seen = metrics_of(monkeypatch, core)
    feats, tokens = torch.randn(1, LENGTH, 3 * 48), torch.randint(target.vocab, (1, LENGTH))
    ones, documents = torch.ones(1, LENGTH), torch.zeros(1, LENGTH, dtype=torch.int64)
    model(feats, tokens, ones, torch.randn(1, LENGTH, 48), documents, max_anchors=4)
    ours = load_drafter(folder / "theirs", target)
    return seen, ours.blocks(feats, F.pad(tokens[:, 1:], (0, 1)), anchors[None] - 1), ours


def check_return(drafter, target, target_folder, folder) -> None:
    """What the library could load is converted back to the same drafter."""
    convert(folder / "theirs", folder / "back", "speculators", target_folder)
    again = load_drafter(folder / "back", target)
    assert again.switches == drafter.switches
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_blocks(kind, part, target_folder, tmp_path, monkeypatch):
    target = load_target(target_folder, tokenizer=False)
    torch.manual_seed(0)
    vocab = DraftVocab(target.vocab, torch.arange(3, 80, 2) if part else None)
    how = {"layers": 2, "taps": 3, "block_size": 4} | BLOCKS[kind]
    drafter = dflash.create(target, vocab=vocab, init="random", **how).eval()
    if part:  # the library's head is then the drafter's own
        drafter.head = torch.nn.Linear(48, vocab.size, bias=False)
    seen, blocks, _ = anchored(drafter, target, target_folder, tmp_path, monkeypatch)
    theirs = seen.logits.view(4, 4, -1)[:, drafter.switches.unused :]
    torch.testing.assert_close(blocks.head(blocks.readout[0]), theirs, rtol=0, atol=1e-4)
    if drafter.confidence is not None:
        torch.testing.assert_close(blocks.confidence[0], seen.confidence.view(4, 4), rtol=0, atol=1e-4)
    check_return(drafter, target, target_folder, tmp_path)


@torch.no_grad()
def test_dflash2(target_folder, tmp_path, monkeypatch):
    """Base logits of all tokens, and scores of candidates. The library may put the target's token in the place of the
    last candidate, for its loss; we know no score of that."""
    target = load_target(target_folder, tokenizer=False)
    torch.manual_seed(0)
    drafter = dflash.create(target, layers=2, taps=3, block_size=4, init="random", **DFLASH2).eval()
    seen, blocks, ours = anchored(drafter, target, target_folder, tmp_path, monkeypatch)
    slots, ids, theirs = (x.view(4, 4, -1)[:, 1:] for x in (seen.logits, seen.ids[0], seen.candidates[0]))
    torch.testing.assert_close(ours.head(blocks.readout[0, ..., : ours.shape.hidden]), slots, rtol=0, atol=1e-4)
    scores = blocks.head(blocks.readout[0]).gather(2, ids)
    known = scores.isfinite()
    assert known[..., :-1].all()
    torch.testing.assert_close(scores[known], theirs[known], rtol=0, atol=1e-4)
    check_return(drafter, target, target_folder, tmp_path)


@pytest.mark.parametrize("kind", [{}, {"input_norm": True, "residual_norm": True}, {"tap_norms": True}])
@torch.no_grad()
def test_peagle(kind, target_folder, tmp_path, monkeypatch):
    """Every row behind every anchor, of which the library takes whatever is sampled."""
    from speculators.models.peagle import core

    target = load_target(target_folder, tokenizer=False)
    torch.manual_seed(0)
    vocab = DraftVocab(target.vocab, torch.arange(3, 80, 2))
    drafter = peagle.create(target, vocab=vocab, layers=3, block_size=4, init="random", **kind).eval()
    model = exported(drafter, target, target_folder, tmp_path)
    assert model.config.speculators_config.proposal_methods[0].speculative_tokens == 4
    depth = torch.arange(4).repeat_interleave(LENGTH - 3)
    anchor = torch.arange(LENGTH - 3).repeat(4)
    every = torch.cat([anchor[depth == 0], torch.arange(LENGTH - 3, LENGTH), anchor[depth > 0]])
    depths = torch.cat([torch.zeros(LENGTH, dtype=torch.int64), depth[depth > 0]])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **given: (every, depths))
    seen = metrics_of(monkeypatch, core)
    feats, tokens = torch.randn(1, LENGTH, 3 * 48), torch.randint(target.vocab, (1, LENGTH))
    documents = torch.zeros(1, LENGTH, dtype=torch.int64)
    model(feats, tokens, documents, verifier_last_hidden_states=torch.randn(1, LENGTH, 48))
    unrolled = torch.stack([state.logits[0] for state in drafter.unroll(feats, tokens, 4)])
    torch.testing.assert_close(unrolled[depths, every], seen.logits, rtol=0, atol=1e-4)
    convert(tmp_path / "theirs", tmp_path / "back", "specdec")
    again = load_drafter(tmp_path / "back", target)
    assert (again.switches, again.block) == (drafter.switches, 4)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
