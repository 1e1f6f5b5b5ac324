"""What is compiled for real: a round of a tiny pair, once."""

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec.cli import generate
from specdec.engine.compiled import build
from specdec.engine.compiled.backend import compiled_run
from specdec.engine.engine import Engine
from specdec.model import cpu_linear, native
from specdec.model_settings import ModelSettings
from specdec.serve import serve_command
from specdec.trees import Chain

try:
    COMPILER = native.compiler()
except ValueError:
    COMPILER = None
HOW = {"prompts": [[3, 5, 7]], "max_new_tokens": 60, "eos": frozenset()}


def pair():
    """Weights that a checkpoint in bf16 could hold, so that FBGEMM multiplies with them where it can."""
    target = tiny_target(layers=1)
    drafter = tiny_drafter(target)
    for parameter in (*target.parameters(), *drafter.parameters()):
        parameter.data = parameter.data.bfloat16().float()
    return target, drafter.requires_grad_(False), Chain(2)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_compiled_round(tmp_path, monkeypatch, capfd):
    """It gives the same text as a launched one, is kept, and is loaded by the next engine; what is damaged is removed.
    Products with packed weights are the same numbers to the last bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter, tree = pair()
    expected = Engine(target, drafter, tree).generate(**HOW).rows[0]
    engine = Engine(target, drafter, tree, compile=True)
    result = engine.generate(**HOW)
    assert (result.rows[0].tokens, result.rows[0].trace) == (expected.tokens, expected.trace)
    assert result.decode_seconds < result.parts["capture"] < result.seconds
    said = capfd.readouterr().err
    assert "compiling a round ... " in said
    assert "kept for the next time" in said

    (library,) = tmp_path.glob("specdec/compiled/*/round.so")
    assert {path.name for path in library.parent.iterdir()} <= {"round.so", "round.json"}
    with monkeypatch.context() as patched:
        patched.setattr(build, "make_library", None)
        again = Engine(target, drafter, tree, compile=True).generate(**HOW)
    assert again.rows[0].tokens == expected.tokens
    assert "loaded a compiled round" in capfd.readouterr().err

    damaged = tmp_path / "damaged" / "round.so"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no library")
    assert build.load_if_kept(damaged) is None
    assert not damaged.parent.exists()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rows", "rows, int8", "torch's", "int8"])
@torch.inference_mode()
def test_products_with_packed_weights(dtype, kind, monkeypatch):
    """The same numbers to the last bit, with and without bias, from a graph that holds handles or packed tensors."""
    native.load()
    rows, int8 = native.has_rows() and kind.startswith("rows"), kind.endswith("int8")
    monkeypatch.setattr(native, "has_rows", lambda: rows)
    monkeypatch.setattr(cpu_linear, "LARGE", 0)
    with torch.inference_mode(False), torch.no_grad():
        weight, bias = (torch.randn(size).bfloat16().to(dtype) for size in ((24, 16), (24,)))
        products = cpu_linear.linear(weight, None, int8), cpu_linear.linear(weight, bias, int8)
    x, out = torch.randn(3, 16).to(dtype), torch.empty(2, 3, 24, dtype=dtype)

    def multiply(bound: int) -> None:
        for place, product in zip(out, products, strict=True):
            place.copy_(product(x))

    multiply(8)
    expected, graphs = out.clone(), []

    def interpret(graph):
        graphs.append(graph)
        return lambda inputs: list(graph.module(*inputs))

    compiled_run(multiply, [], [8, 4], interpret)(8)
    assert torch.equal(out, expected)
    used = {str(node.target).split(".")[0] for node in graphs[0].module.graph.nodes if node.op == "call_function"}
    assert used & {"quantized", "mkldnn"} == set()


def test_compiled_rounds_are_replayed_so_graphs_cannot_be_off(monkeypatch):
    """Flags are read before models."""
    monkeypatch.setattr(ModelSettings, "load_target", None)
    words = ["--compile", "--no-graphs"]
    for check in (
        lambda: generate.check_flags(generate.parser().parse_args(["--prompt", "x", *words])),
        lambda: serve_command.make_engine(serve_command.parser().parse_args(words)),
    ):
        with pytest.raises(ValueError, match="--no-graphs contradicts --compile"):
            check()
    with pytest.raises(ValueError, match="graphs=False contradicts compile=True"):
        Engine(tiny_target(), graphs=False, compile=True)
