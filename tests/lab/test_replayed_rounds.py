"""Rounds by part, and the kernels' benchmark: rehearsed on the CPU, and on disk after each case."""

import json
import os
import sys

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec import ops as backends
from specdec.lab.bench import kernels, replayed_rounds
from specdec.lab.bench.formulas import TINY, KernelCase, Shapes, cases
from specdec.lab.bench.replayed_rounds import Scene
from specdec.trees import DynamicTree
from specdec.verify import sample_and_match

PARTS = ["draft", "verify", "rule", "commit", "extend", "round"]
LOOPS = ["plain loop", "loop", "observed loop"]


def command(monkeypatch, module, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def rounds(monkeypatch, path) -> dict:
    sizes = ["--trials", 2, "--new-tokens", 14, "--context", 20, "--topk", 2, "--steps", 3, "--num-draft-tokens", 9]
    command(monkeypatch, replayed_rounds, "--shape", "tiny", "--out", path, *sizes)
    return json.loads(path.read_text())


def test_a_round_by_part(monkeypatch, tmp_path, capsys):
    result = rounds(monkeypatch, tmp_path / "a.json")
    assert all(result[name]["ms"] > 0 for name in ["plain", "forward of 1", "forward of 8", "forward of 9", *PARTS])
    plain = result["plain"]
    assert plain["share_of_bandwidth"] == pytest.approx(
        plain["bytes"] / (plain["ms"] / 1e3) / result["bandwidth_bytes_per_second"]
    )
    for name in LOOPS:
        loop = result[name]
        emitted = loop["tokens_per_second"] * loop["round_ms"] / 1e3
        # 14 tokens, the first of which is the prefill's: rounds of 3, 3, 3, 3 and 1 tokens
        assert emitted == pytest.approx(1 if name == "plain loop" else 13 / 5)
    assert result["loop"]["to_plain"] == pytest.approx(
        result["loop"]["tokens_per_second"] / result["plain loop"]["tokens_per_second"]
    )
    assert "SIMULATED" in result["benchmark"]
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result


@torch.inference_mode()
def test_the_same_round_is_played_again_and_again():
    """The parts leave caches as they were, and each of them is what the round does."""
    target = tiny_target()
    scene = Scene(target, tiny_drafter(target), DynamicTree(2, 3, 7), sample_and_match, [3, 5, 7, 1])
    for run in (scene.play, *(getattr(scene, part) for part in PARTS[:-1]), scene.plain, scene.forward(5), scene.play):
        run()
        scene.reset()
        assert scene.cache.lens.tolist() == [4]
        _, _, output = scene.round.play(scene.root, scene.state, scene.cache, scene.active, scene.settings)
        assert torch.equal(output.tree.tokens, scene.grown.tokens)
        assert torch.equal(output.verdict.tokens, scene.verdict.tokens)
        torch.testing.assert_close(output.logits, scene.verified[0])


# Kernels


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the kernels run on the GPU")
@torch.no_grad()
def test_every_case_of_the_kernels_can_be_computed():
    backends.use("triton")
    try:
        groups = cases(Shapes(torch.device("cpu"), **TINY), 8, 64).values()
        made = {name: case for make in groups for name, case in make().items()}
        assert set(backends.KERNELS) <= set(made)
        for case in made.values():
            case.kernel()
            case.eager()
    finally:
        backends.use("auto")


def test_kernels_are_on_disk_after_each(monkeypatch, tmp_path):
    def absent():
        raise ImportError("no such kernel")

    saved, file = [], tmp_path / "a.json"

    def made(*names: str):
        def make() -> dict[str, KernelCase]:
            saved.append(sorted(json.loads(file.read_text()).get("kernels", [])))
            return {name: KernelCase(lambda: None, lambda: None, moved=8) for name in names}

        return make

    monkeypatch.setattr(kernels, "cases", lambda *sizes: {"a": made("a"), "b": absent, "c": made("c", "d")})
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)
    result = kernels.benchmark(Shapes(torch.device("cpu"), **TINY), 8, 64, 1, file)
    assert saved == [[], ["a", "b"]]
    assert result == json.loads(file.read_text())
    assert sorted(result["kernels"]) == ["a", "b", "c", "d"]
    assert result["kernels"]["b"] == {"failed": "ImportError: no such kernel"}
    assert {"us", "gb_per_s", "share_of_ceiling"} <= set(result["kernels"]["d"]["kernel"])
    assert {"machine", "versions", "revision", "ceiling"} <= set(result)
