"""What starts a server with an export: as `scripts/check_in_vllm.py` starts vLLM's engine, and by SGLang's flags."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_target

import specdec
from specdec.drafters import dflash, eagle, medusa
from specdec.drafters.formats import FAMILIES, open_checkpoint, save_drafter
from specdec.drafters.formats.convert import export, start_command
from specdec.drafters.vocab import DraftVocab

# A drafter -> vLLM's method and number of tokens (heads of Medusa, slots of a block), and SGLang's algorithm.
STARTED = {
    "eagle3": ("eagle3", 3, "EAGLE3"),
    "eagle2": ("eagle", 3, "EAGLE"),
    "medusa": ("medusa", 3, None),
    "dflash": ("dflash", 5, "DFLASH"),
    "dspark": ("dspark", 5, "DSPARK"),
}
MARKOV = {"label": "p+k+1", "conditional": "markov", "rank": 4, "confidence": True}
MADE = {  # of those that are not bundled
    "medusa": lambda target: medusa.create(target, heads=3),
    "dflash": lambda target: dflash.create(target, layers=1, taps=2, block_size=6),
    "dspark": lambda target: dflash.create(target, layers=1, taps=2, block_size=5, **MARKOV),
}


@pytest.mark.parametrize("name", STARTED)
def test_what_starts_a_server(name, tmp_path):
    (method, count, algorithm), folder = STARTED[name], tmp_path / "a head"
    place = specdec.DEMO_TARGET.parent / name
    if name in MADE:
        save_drafter(MADE[name](target := tiny_target()), place := tmp_path / name, target)
    checkpoint = open_checkpoint(place)
    words = shlex.split(start_command("vllm", checkpoint, folder, "some/target"))
    assert words[:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": method, "num_speculative_tokens": count, "model": str(folder)}
    said = start_command("sglang", checkpoint, folder, "T")
    if algorithm is None:
        assert said is None
        return
    words = shlex.split(said)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "T"]
    assert words[5:9] == ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)]
    flags = dict(zip(words[9::2], words[10::2], strict=True))
    steps, tokens = (flags.get(f"--speculative-num-{what}") for what in ("steps", "draft-tokens"))
    assert (steps, tokens) == (("3", "4") if name.startswith("eagle") else (None, None))  # a block says it itself


@pytest.mark.parametrize(("title", "method"), [("P-EAGLE", "eagle3"), ("PARD", "draft_model")])
def test_vllm_gets_the_mask_rows(title, method, tmp_path):
    (family,) = (family for family in FAMILIES if family.title == title)
    config = json.loads(
        shlex.split(start_command("vllm", SimpleNamespace(family=family, meaning=None), tmp_path, "T"))[4]
    )
    assert (config["method"], config["parallel_drafting"]) == (method, True)
    assert all(bool(family.method) == ("vllm" in family.servers) for family in FAMILIES)


def test_sglang_gets_the_tokens_that_a_head_proposes(tmp_path):
    """They are a list in a pickle in the head's folder, which a later export of all tokens removes."""
    target, there = tiny_target(), tmp_path / "there"
    for ids in ([5, 2, 9, 11], None):
        some = DraftVocab(target.vocab, ids and torch.tensor(ids))
        save_drafter(eagle.create(target, vocab=some), tmp_path / "saved", target)
        words = shlex.split(start_command("sglang", export(tmp_path / "saved", there, "sglang"), there, "some/target"))
        assert ("--speculative-token-map" in words) == (there / "token_map.pt").exists() == (ids is not None)
        if ids is not None:
            assert words[-2:] == ["--speculative-token-map", str(there / "token_map.pt")]
            assert torch.load(there / "token_map.pt", weights_only=True) == ids
