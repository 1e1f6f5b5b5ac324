"""vLLM's `speculators` library loads our exports, and computes the logits that we compute."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import save_hf

from specdec.drafters import dflash, eagle3, peagle
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.vocab import DraftVocab
from specdec.model.loader import load_target

speculators = pytest.importorskip("speculators", reason="requirements-speculators.txt is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called")  # unfused, on the CPU

HEADS = {
    "published": {},
    "EAGLE-3.1": {"tap_norms": True, "feedback": "post"},
    "its own": {"input_norm": True, "residual_norm": True, "rope_theta": 500000.0},
}
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


@pytest.fixture
def target(target_folder):
    torch.manual_seed(0)
    return load_target(target_folder, tokenizer=False)


def some(target) -> DraftVocab:
    return DraftVocab(target.vocab, torch.arange(3, 80, 2))


def exported(drafter, target, target_folder, folder):
    """The drafter with other weights, through our export, in the library. Its default masks are compiled ones.

    Of EAGLE-3 the library wants the target's embedding too, which an export for vLLM holds."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    save_drafter(drafter, folder / "ours", target)
    if drafter.block is None:
        export(folder / "ours", folder / "theirs", "vllm", target_folder)
    else:
        convert(folder / "ours", folder / "theirs", "speculators", target_folder)
    config = speculators.SpeculatorModelConfig.from_pretrained(folder / "theirs")
    if drafter.block is not None:
        config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(folder / "theirs", config=config, dtype=torch.float32).eval()


def check_return(drafter, target, target_folder, folder, to: str = "speculators") -> None:
    """What the library could load is converted back to the same drafter."""
    convert(folder / "theirs", folder / "back", to, target_folder)
    again = load_drafter(folder / "back", target)
    assert (again.switches, again.block) == (drafter.switches, drafter.block)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_eagle3(kind, target, target_folder, tmp_path):
    drafter = eagle3.create(target, vocab=some(target), init="random", **HEADS[kind])
    model = exported(drafter, target, target_folder, tmp_path)
    assert model.config.eagle_aux_hidden_state_layer_ids == list(drafter.taps)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    length = 128  # of its attention masks, which come in blocks
    feats, tokens = torch.randn(1, length, 3 * target.config.hidden), torch.randint(target.config.vocab, (1, length))
    model(feats, tokens, document_ids=torch.zeros(1, length, dtype=torch.int64), ttt_steps=3)
    for expected, state in zip(seen, drafter.unroll(feats, tokens, 3), strict=True):
        torch.testing.assert_close(state.logits, expected, rtol=0, atol=1e-4)
    check_return(drafter, target, target_folder, tmp_path, "specdec")


@torch.no_grad()
def test_what_the_library_saves_we_read(target, target_folder, tmp_path):
    """The library's own config leaves defaults out, and its file holds embeddings. We must read the same drafter."""
    drafter = eagle3.create(target, vocab=some(target), init="random")
    exported(drafter, target, target_folder, tmp_path).save_pretrained(tmp_path / "saved")
    again = load_drafter(tmp_path / "saved", target)
    assert (again.shape, again.switches, again.taps) == (drafter.shape, drafter.switches, drafter.taps)
    assert again.vocab.ids.tolist() == drafter.vocab.ids.tolist()
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


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
    anchors = torch.tensor([3, 7, 12, 15])
    backbone = import_module("speculators.models.dflash.core")
    monkeypatch.setattr(backbone, "select_anchors", lambda *given: (anchors, torch.ones(4, dtype=torch.bool)))
    seen = metrics_of(monkeypatch, import_module(f"speculators.models.{model.config.speculators_model_type}.core"))
    feats, tokens = torch.randn(1, LENGTH, 3 * 48), torch.randint(target.vocab, (1, LENGTH))
    ones, documents = torch.ones(1, LENGTH), torch.zeros(1, LENGTH, dtype=torch.int64)
    model(feats, tokens, ones, torch.randn(1, LENGTH, 48), documents, max_anchors=4)
    ours = load_drafter(folder / "theirs", target)
    return seen, ours.blocks(feats, F.pad(tokens[:, 1:], (0, 1)), anchors[None] - 1), ours


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_blocks(kind, part, target, target_folder, tmp_path, monkeypatch):
    vocab = some(target) if part else DraftVocab(target.vocab)
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
def test_dflash2(target, target_folder, tmp_path, monkeypatch):
    """Base logits of all tokens, and scores of candidates. The library may put the target's token in the place of the
    last candidate, for its loss; we know no score of that."""
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
def test_peagle(kind, target, target_folder, tmp_path, monkeypatch):
    """Every row after every anchor, of which the library takes whatever is sampled."""
    core = import_module("speculators.models.peagle.core")
    drafter = peagle.create(target, vocab=some(target), layers=3, block_size=4, init="random", **kind).eval()
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
    check_return(drafter, target, target_folder, tmp_path, "specdec")
