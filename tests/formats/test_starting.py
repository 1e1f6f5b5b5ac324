"""What starts a server with an export: as `scripts/check_in_vllm.py` starts vLLM's engine, and by SGLang's flags."""

import json
import shlex
from types import SimpleNamespace

import pytest

import specdec
from drafters.formats import FAMILIES, open_checkpoint
from drafters.formats.starting import command

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
        assert ("vllm" in family.servers) == (family.vllm is not None)


def test_sglang(tmp_path):
    said = command("sglang", open_checkpoint(specdec.DEMO_TARGET.parent / "eagle2"), tmp_path, "some/target")
    words = shlex.split(said)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert flags["--speculative-algorithm"] == "EAGLE"
    assert flags["--speculative-draft-model-path"] == str(tmp_path)
    assert int(flags["--speculative-num-draft-tokens"]) == int(flags["--speculative-num-steps"]) + 1
    assert command("sglang", open_checkpoint(specdec.DEMO_TARGET.parent / "dflash"), tmp_path, "T") is None
