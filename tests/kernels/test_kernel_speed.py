"""The kernels' benchmark: its cases can be computed, and results are on disk after each."""

import json
import os

import kernel_speed
import pytest
import torch
from kernel_formulas import TINY, KernelCase, Shapes, cases

from specdec import ops as backends


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
            saved.append(sorted(json.loads(file.read_text())["kernels"]) if file.exists() else [])
            return {name: KernelCase(lambda: None, lambda: None, moved=8) for name in names}

        return make

    monkeypatch.setattr(kernel_speed, "cases", lambda *sizes: {"a": made("a"), "b": absent, "c": made("c", "d")})
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)
    result = kernel_speed.benchmark(Shapes(torch.device("cpu"), **TINY), 8, 64, file)
    assert saved == [[], ["a", "b"]]
    assert result == json.loads(file.read_text())
    assert sorted(result["kernels"]) == ["a", "b", "c", "d"]
    assert result["kernels"]["b"] == {"failed": "ImportError: no such kernel"}
    assert {"us", "gb_per_s", "share_of_ceiling"} <= set(result["kernels"]["d"]["kernel"])
    assert {"machine", "versions", "revision", "ceiling"} <= set(result)
