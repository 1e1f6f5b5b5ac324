"""vLLM's `speculators` library loads our export, and drafts from it with the logits that ours has."""

import pytest
import torch
from helpers import save_hf

from specdec.drafters import eagle3
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.vocab import DraftVocab
from specdec.model.loader import load_target

speculators = pytest.importorskip("speculators", reason="requirements-speculators.txt is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called")  # unfused, on the CPU

KINDS = {
    "published": {},
    "EAGLE-3.1": {"tap_norms": True, "feedback": "post"},
    "its own": {"input_norm": True, "residual_norm": True, "rope_theta": 500000.0},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculators") / "target"
    save_hf(folder, "llama", num_hidden_layers=8)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_library_drafts_as_we_do(kind, target_folder, tmp_path):
    target = load_target(target_folder, tokenizer=False)
    torch.manual_seed(0)
    vocab = DraftVocab(target.config.vocab, torch.arange(3, 80, 2))
    drafter = eagle3.create(target, vocab=vocab, init="random", **KINDS[kind])
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    save_drafter(drafter, tmp_path / "ours", target)
    export(tmp_path / "ours", tmp_path / "theirs", "vllm", target_folder)
    model = speculators.SpeculatorModel.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    assert model.config.eagle_aux_hidden_state_layer_ids == list(drafter.taps)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    length = 128  # of its attention masks, which come in blocks
    feats, tokens = torch.randn(1, length, 3 * target.config.hidden), torch.randint(target.config.vocab, (1, length))
    model(feats, tokens, document_ids=torch.zeros(1, length, dtype=torch.int64), ttt_steps=3)
    for expected, state in zip(seen, drafter.unroll(feats, tokens, 3), strict=True):
        torch.testing.assert_close(state.logits, expected, rtol=0, atol=1e-4)
    convert(tmp_path / "theirs", tmp_path / "back", "specdec")
    again = load_drafter(tmp_path / "back", target)
    assert again.switches == drafter.switches
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@torch.no_grad()
def test_what_the_library_saves_we_read(target_folder, tmp_path):
    """The library's own config leaves defaults out, and its file holds embeddings. We must read the same drafter."""
    target = load_target(target_folder, tokenizer=False)
    drafter = eagle3.create(target, vocab=DraftVocab(target.config.vocab, torch.arange(40)), init="random")
    save_drafter(drafter, tmp_path / "ours", target)
    export(tmp_path / "ours", tmp_path / "theirs", "vllm", target_folder)
    speculators.SpeculatorModel.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "saved")
    again = load_drafter(tmp_path / "saved", target)
    assert (again.shape, again.switches, again.taps) == (drafter.shape, drafter.switches, drafter.taps)
    assert again.vocab.ids.tolist() == drafter.vocab.ids.tolist()
    for ours, theirs in zip(drafter.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
