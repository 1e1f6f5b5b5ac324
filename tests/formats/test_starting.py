"""What starts a server with an export: as `scripts/check_in_vllm.py` starts vLLM's engine, and by SGLang's flags."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_target

import specdec
from specdec.drafters import eagle
from specdec.drafters.formats import FAMILIES, open_checkpoint, save_drafter
from specdec.drafters.formats.convert import export
from specdec.drafters.formats.starting import command
from specdec.drafters.vocab import DraftVocab

CONFIGS = {
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "eagle2": {"method": "eagle", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},  # its heads
    "dflash": {"method": "dflash", "num_speculative_tokens": 5},  # its block
    "dspark": {"method": "dspark", "num_speculative_tokens": 5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm(name, tmp_path):
    checkpoint = open_checkpoint(specdec.DEMO_TARGET.parent / name)
    words = shlex.split(command("vllm", checkpoint, tmp_path / "a head", "some/target"))
    assert words[:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    assert json.loads(words[4]) == CONFIGS[name] | {"model": str(tmp_path / "a head")}


@pytest.mark.parametrize(("title", "method"), [("P-EAGLE", "eagle3"), ("PARD", "draft_model")])
def test_vllm_is_told_of_mask_rows(title, method, tmp_path):
    (family,) = (family for family in FAMILIES if family.title == title)
    config = json.loads(shlex.split(command("vllm", SimpleNamespace(family=family, meaning=None), tmp_path, "T"))[4])
    assert (config["method"], config["parallel_drafting"]) == (method, True)


def test_every_family_that_vllm_loads_is_known():
    for family in FAMILIES:
        assert ("vllm" in family.servers) == bool(family.method)


def test_sglang(tmp_path):
    said = command("sglang", open_checkpoint(specdec.DEMO_TARGET.parent / "eagle2"), tmp_path, "some/target")
    words = shlex.split(said)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert flags["--speculative-algorithm"] == "EAGLE"
    assert flags["--speculative-draft-model-path"] == str(tmp_path)
    assert int(flags["--speculative-num-draft-tokens"]) == int(flags["--speculative-num-steps"]) + 1


@pytest.mark.parametrize(("name", "algorithm"), [("dflash", "DFLASH"), ("dspark", "DSPARK")])
def test_sglang_takes_a_block_as_it_is(name, algorithm, tmp_path):
    words = shlex.split(command("sglang", open_checkpoint(specdec.DEMO_TARGET.parent / name), tmp_path, "T"))
    assert words[5:] == ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(tmp_path)]


def test_no_command_where_nothing_is_known(tmp_path):
    assert command("sglang", open_checkpoint(specdec.DEMO_TARGET.parent / "mtp"), tmp_path, "T") is None


def test_sglang_is_told_which_tokens_a_head_proposes(tmp_path):
    """They lie beside the head as a list in a pickle, and a later export of all tokens leaves none behind."""
    target, there = tiny_target(), tmp_path / "there"
    for ids in ([5, 2, 9, 11], None):
        some = DraftVocab(target.vocab, ids and torch.tensor(ids))
        save_drafter(eagle.create(target, vocab=some), tmp_path / "saved", target)
        words = shlex.split(command("sglang", export(tmp_path / "saved", there, "sglang"), there, "some/target"))
        if ids is None:
            assert "--speculative-token-map" not in words
            assert not (there / "token_map.pt").exists()
        else:
            assert words[-2:] == ["--speculative-token-map", str(there / "token_map.pt")]
            assert torch.load(there / "token_map.pt", weights_only=True) == ids
