"""Packed weights give the same products, follow changes, and are made only where they may be; also for drafters."""

import gc
import subprocess
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from golden_blocks import absorb
from helpers import DRAFTERS, texts_of, tiny_target

from specdec.api import DEMO_TARGET, generate, load_target
from specdec.engine.engine import Engine
from specdec.model.layers import GatedMLP, Linear, RMSNorm, round_weights
from specdec.ops import linear as cpu_linear
from specdec.ops import native
from specdec.ops.gated import _packed, gated_mlp
from specdec.ops.linear import Fp16Weight, RowsWeight, bytes_read, linear, pack
from specdec.trees import DynamicTree

ROWS = native.has_rows()
AMX = ROWS and (torch.cpu._is_amx_tile_supported() or torch.ops.specdec_rows.tiled(64, 2))
with torch.no_grad(), mock.patch.object(native, "has_rows", return_value=False):
    PACKS = pack(torch.full((16, 16), 1 / 3)) is not None
    FP16 = isinstance(pack(torch.zeros(16, 16)), Fp16Weight)
pytestmark = pytest.mark.usefixtures("as_in_decoding")
needs_rows = pytest.mark.skipif(not ROWS, reason="needs AVX2 or AVX-512, and a C++ compiler")
needs_packing = pytest.mark.skipif(not PACKS, reason="oneDNN has no fast product on this processor")
needs_fp16 = pytest.mark.skipif(not FP16, reason="this torch has no FBGEMM")


def held_in(weight: torch.Tensor) -> torch.dtype | None:
    """What the weight is packed in, by our own product or by FBGEMM; None if by neither."""
    packed = pack(weight)
    if isinstance(packed, RowsWeight):
        return packed.packed.dtype
    return torch.float16 if isinstance(packed, Fp16Weight) else None


@pytest.fixture
def without_onednn(monkeypatch):
    """As with AVX2, where fp32 weights are left to our own product."""
    monkeypatch.setattr(cpu_linear, "_pack_onednn", lambda weight: None)


def same_in_parts(product, x: torch.Tensor, counts, places=(0, 5)) -> bool:
    """Whether a row of a product has the same bits whatever the other rows are."""
    whole = product(x)
    return all(torch.equal(product(x[at : at + n]), whole[at : at + n]) for n in counts for at in places)


def same_on_any_threads(product, x: torch.Tensor, counts) -> bool:
    threads = torch.get_num_threads()
    try:
        return all(torch.set_num_threads(n) or same_in_parts(product, x, counts) for n in (1, 2))
    finally:
        torch.set_num_threads(threads)


def random_weight(dtype: torch.dtype, *, input_major: bool = False, of: torch.dtype | None = None) -> torch.Tensor:
    """of: the dtype of a checkpoint, which holds all values of the weight exactly."""
    weight = torch.randn(96, 48).to(of or torch.float32).to(dtype)
    return weight.t().contiguous().t() if input_major else weight


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of", [None, torch.bfloat16])
@pytest.mark.parametrize("input_major", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_linear_is_the_product(dtype, of, input_major, biased, own, monkeypatch):
    monkeypatch.setattr(native, "has_rows", lambda: own and ROWS)
    weight = random_weight(dtype, input_major=input_major, of=of)
    bias = torch.linspace(-1, 1, 96).to(dtype) if biased else None
    product = linear(weight, bias)
    for rows in (1, 2, 5, 16, 33):
        x = torch.randn(rows, 48).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        # One rounding of the result, and sums of 48 products whose sizes add up to less than 128.
        bound = exact.abs() * torch.finfo(dtype).eps + 128 * 48 * torch.finfo(torch.float32).eps
        assert ((product(x).double() - exact).abs() <= bound).all()
    if pack(weight) is not None:  # the other rows do not matter, except for which product takes one row or two
        assert same_in_parts(product, x, (3, 6, 16))


SIZES = pytest.mark.parametrize(("size", "inputs"), [(96, 48), (64, 2), (130, 50), (5, 6), (192, 640), (130, 32)])


@needs_rows
@SIZES
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("without_onednn")
def test_what_bf16_holds_is_read_in_bf16_and_all_is_multiplied_in_fp32(size, inputs, held):
    """A product with the identity gives the weight, and a row of a product does not depend on the other rows."""
    weight = torch.randn(size, inputs).to(held).float()
    least = 1.2e-38 if torch.ops.specdec_rows.tiled(inputs, 4 // held.itemsize) else 1e-38  # AMX takes less for 0
    weight[0, :2] = torch.tensor([least, -3e38]).to(held)
    product = linear(weight, None)
    assert held_in(weight) == held
    assert bytes_read(weight) == weight.numel() * held.itemsize
    assert torch.equal(product(torch.eye(inputs)), weight.t())
    weight[0, :2] = 0.0
    x, product = torch.randn(33, inputs), linear(weight, None)
    whole = product(x)
    exact, size_of_sums = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert ((whole - exact).abs() <= size_of_sums * inputs * torch.finfo(torch.float32).eps).all()
    assert same_on_any_threads(product, x, (*range(1, 18), 24))
    assert torch.equal(product(x.t().contiguous().t()), whole)
    assert product(x[:0]).shape == (0, size)


@pytest.mark.skipif(not AMX, reason="needs AMX, and a C++ compiler")
def test_amx_multiplies_all_of_an_fp32_number():
    """A number is split into three of bf16: the identity gives it back, whatever its size and its last bits are."""
    assert torch.ops.specdec_rows.tiled(64, 2) or not torch.cpu._init_amx()
    product = linear(torch.eye(64), None)
    x = torch.randn(40, 64) * torch.logspace(-30, 37, 64)
    assert torch.equal(product(x), x)
    assert not torch.equal(x.bfloat16().float(), x)


USE_OF_AMX = """
#include "amx.h"
#ifndef SPECDEC_AMX
#error these are the processor's flags, and AMX is left out
#endif
void use(const float* x, int64_t rows, int64_t in, int64_t parts, const void* weight, int64_t outputs, float* y) {
  amx::Rows(x, rows, in, parts).multiply(weight, outputs, y, outputs);
}
"""


@needs_rows
def test_the_instructions_of_amx_are_known_to_the_compiler(tmp_path):
    source = tmp_path / "use.cpp"
    source.write_text(USE_OF_AMX)
    words = ["-std=c++20", "-O1", "-march=sapphirerapids", f"-I{native.FOLDER}", "-c", source, "-o", tmp_path / "use.o"]
    subprocess.run([native.compiler(), *words], check=True)


@needs_rows
@SIZES
def test_rows_are_rounded_to_bf16_where_that_is_asked_for(size, inputs, matmul_precision):
    """... and multiplied and added as exactly as ever; still a row does not depend on the other rows."""
    tiled = torch.ops.specdec_rows.tiled(inputs, 2)
    x, weight = torch.randn(65, inputs), torch.randn(size, inputs).bfloat16().float()
    product, rounded = linear(weight, None), x.bfloat16().float()
    exact, of_rounded = product(x), product(rounded)
    matmul_precision("high")  # two numbers of bf16, with AMX
    bound = (2.0**-16 if tiled else 0) * (x.abs() @ weight.abs().t())
    assert ((product(x) - exact).abs() <= bound).all()
    matmul_precision("medium")
    whole = product(x)
    if not (tiled or torch.cpu._is_avx512_bf16_supported()):
        assert torch.equal(whole, exact)
        return
    assert not torch.equal(whole, exact)
    sums = rounded.abs() @ weight.abs().t()
    assert ((whole - of_rounded).abs() <= sums * inputs * torch.finfo(torch.float32).eps).all()
    assert same_in_parts(product, x, (*range(1, 18), 24, 49))
    assert torch.equal(linear(torch.eye(inputs), None)(x), rounded)
    assert product(x[:0]).shape == (0, size)


@needs_rows
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_speculative_text_is_the_plain_one_at_any_precision(precision, matmul_precision):
    matmul_precision(precision)
    target, prompts = load_target(DEMO_TARGET), ["What is a tree?", "Why?"]
    plain = generate(target, prompts, max_new_tokens=24)
    for draft, tree in (("demo/mtp", "1/6/7"), ("demo/eagle3", "4/5/16")):
        speculative = generate(target, prompts, draft, tree=tree, max_new_tokens=24)
        assert [row.tokens for row in speculative.rows] == [row.tokens for row in plain.rows]
        assert speculative.tau > 1.5


@needs_rows
@pytest.mark.parametrize("held", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
@pytest.mark.usefixtures("without_onednn")
def test_the_gated_mlp_is_one_call(held):
    mlp = GatedMLP(96, 576).requires_grad_(False)
    for parameter, dtype in zip(mlp.parameters(), held, strict=True):
        parameter.copy_(parameter.to(dtype))
    product, x = gated_mlp(mlp.gate_up, mlp.down, "silu"), 3 * torch.randn(20, 96)
    gate, up = F.linear(x.double(), mlp.gate_up.weight.double()).chunk(2, -1)
    exact = F.linear(F.silu(gate) * up, mlp.down.weight.double())
    torch.testing.assert_close(product(x).double(), exact, rtol=0, atol=1e-5)  # of values of up to 1.5
    assert torch.equal(mlp.bind()(x), product(x))
    assert same_in_parts(product, x, (1, 4, 7, 13), (0,))
    far = F.linear(F.silu(1e4 * gate) * 1e4 * up, mlp.down.weight.double())
    torch.testing.assert_close(product(1e4 * x).double(), far, rtol=0, atol=1e3)  # e^-gate overflows here
    norm, residual = RMSNorm(96, 1e-5).requires_grad_(False), torch.randn(20, 96)
    norm.weight.uniform_(0.5, 2)
    total, normed = mlp.bind_add(norm)(residual, x)
    assert torch.equal(total, residual + product(x))
    assert torch.equal(normed, norm(total))
    round_weights(mlp)
    rounded = mlp.bind()(x)
    gate, up = linear(mlp.gate_up.weight, None, int8=True)(x).chunk(2, -1)
    torch.testing.assert_close(rounded, linear(mlp.down.weight, None, int8=True)(F.silu(gate) * up), rtol=0, atol=2e-4)
    assert not torch.equal(rounded, product(x))


@needs_rows
@pytest.mark.parametrize(
    "how", [(576, False, "gelu_tanh"), (576, True, "silu"), (600, False, "silu"), (448, False, "silu")], ids=str
)
def test_other_mlps_are_several_calls(how):
    mlp = GatedMLP(96, *how).bfloat16().float().requires_grad_(False)
    assert _packed(mlp.gate_up, mlp.down, how[2]) is None
    x, norm = torch.randn(2, 3, 96), RMSNorm(96, 1e-5)
    total, normed = mlp.bind_add(norm)(x[0], x[1])
    assert torch.equal(total, x[0] + mlp(x[1]))
    assert torch.equal(normed, norm(total))


@needs_fp16
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16])
def test_what_fp16_holds_is_read_in_fp16_and_multiplied_in_fp32(of, monkeypatch):
    """A product with the identity gives the weight, and a row of a product does not depend on the other rows.
    With AVX2 FBGEMM takes one row and two in another order of sums."""
    monkeypatch.setattr(native, "has_rows", lambda: False)
    few = (1, 2) if torch.backends.cpu.get_cpu_capability() == "AVX512" else ()
    weight = random_weight(torch.float32, of=of)
    weight[0, :3] = torch.tensor([3e-9, -7e-8, 2e-5]).to(of)  # for fp16 too small in bf16, unless they are scaled
    half, product = pack(weight), linear(weight, None)
    assert isinstance(half, Fp16Weight)
    assert (half.scale == 1) == (of == torch.float16)
    assert bytes_read(weight) == weight.nbytes // 2
    assert torch.equal(product(torch.eye(48)), weight.t())
    assert same_on_any_threads(product, torch.randn(32, 48), (*few, 3, 6, 16))


@pytest.mark.parametrize(
    "held", [pytest.param(torch.bfloat16, marks=needs_rows), pytest.param(torch.float16, marks=needs_fp16)]
)
@pytest.mark.parametrize("spoil", [1 / 3, float("inf"), float("nan"), 2.0**40])
def test_a_weight_is_held_narrowly_only_where_that_is_exact(held, spoil, monkeypatch):
    """One value has too many digits, is no number, or is too large for fp16. Changes are seen."""
    monkeypatch.setattr(native, "has_rows", lambda: held == torch.bfloat16)
    weight, x = random_weight(torch.float32, of=torch.bfloat16), torch.ones(4, 48)
    before = linear(weight, None)(x)
    weight.mul_(2)
    assert torch.equal(linear(weight, None)(x), 2 * before)
    assert held_in(weight) == held
    weight[5, 7] = spoil
    exact = held == torch.bfloat16 and spoil in (float("inf"), 2.0**40)
    assert (held_in(weight) == held) == exact
    assert bytes_read(weight) == weight.nbytes // (2 if exact else 1)
    torch.testing.assert_close(linear(weight, None)(x), F.linear(x, weight), equal_nan=True)


@needs_rows
def test_packed_sizes_are_checked():
    assert held_in(torch.ones(96, 47)) != torch.bfloat16  # an odd number of inputs
    with pytest.raises(RuntimeError, match="packed for other sizes"):
        torch.ops.specdec_rows.linear(torch.ones(1, 46), pack(torch.ones(96, 48)).packed, 96)


@needs_packing
def test_a_shared_weight_is_packed_once_and_its_pack_goes_with_it():
    weight, x = random_weight(torch.float32), torch.ones(4, 48)
    packed, before = pack(weight), linear(weight, None)(x)
    assert pack(weight) is packed
    assert pack(weight.detach()) is packed
    weight.mul_(2)
    torch.testing.assert_close(linear(weight, None)(x), 2 * before)
    assert pack(weight[:48]) is not pack(weight)
    assert pack(weight[:48]).shape == (48, 48)
    gc.collect()
    held = len(cpu_linear._packed)
    del weight, packed
    gc.collect()
    assert len(cpu_linear._packed) == held - 1


def test_autograd_and_other_dtypes_are_left_alone():
    layer = Linear(48, 96)
    assert pack(layer.weight) is None  # it may still learn
    with torch.enable_grad():
        layer(torch.ones(3, 48)).sum().backward()
    assert layer.weight.grad is not None
    assert pack(random_weight(torch.float64)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert pack(random_weight(torch.float32)) is None
    with torch.inference_mode():
        assert pack(torch.zeros(16, 16)) is None  # nothing counts its changes


@needs_rows
@pytest.mark.parametrize(("size", "inputs"), [(96, 48), (64, 512), (70, 8192)])
def test_our_own_product_with_a_rounded_weight(size, inputs):
    """Of the rounded weight, as near as rows of so many bits allow. A row's bits do not depend on the other rows."""
    weight, x = torch.randn(size, inputs), torch.randn(14, inputs)
    weight[3] *= 100
    weight[5] = 0
    x[2] *= 1e-20
    x[4] = 0
    x[7], weight[9] = 1, 1  # the largest sum that there can be
    bias = torch.linspace(-1, 1, size)
    product = linear(weight, None, int8=True)
    scales = weight.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    rounded = (weight / scales).round() * scales
    assert ((rounded - weight).abs() <= scales / 2 * (1 + 1e-6)).all()
    exact, got = F.linear(x.double(), rounded), product(x)
    step = x.double().abs().amax(1, keepdim=True) / min(32767, (2**31 - 1) // (127 * inputs))
    bound = step / 2 * rounded.abs().sum(1) + 8 * exact.abs() * torch.finfo(torch.float32).eps
    assert ((got - exact).abs() <= bound * (1 + 1e-4)).all()
    assert same_in_parts(product, x, range(15), (0,))
    assert same_in_parts(product, x, (1,), range(14))
    assert torch.equal(linear(weight, bias, int8=True)(x), got + bias)


@needs_fp16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_with_a_rounded_weight(dtype, biased, monkeypatch):
    """As near as the roundings allow: a weight to half a step of its row, an input to one step of all inputs' range."""
    monkeypatch.setattr(native, "has_rows", lambda: False)
    monkeypatch.setattr(cpu_linear, "LARGE", 96 * 48)
    weight = random_weight(dtype)
    weight[3] *= 100
    weight[5] = 0
    bias = torch.linspace(-1, 1, 96).to(dtype) if biased else None
    product = linear(weight, bias, int8=True)
    for rows in (1, 2, 5, 33):
        x = torch.randn(rows, 48).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        steps = weight.double().abs().amax(1) / 127
        step = (x.max() - x.min()).double() / (255 if torch.cpu._is_vnni_supported() else 127)
        bound = x.double().abs().sum(1, keepdim=True) * steps / 2 + (weight.double().abs().sum(1) + 48 * steps) * step
        got = product(x)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= bound + exact.abs() * torch.finfo(dtype).eps + 1e-5).all()
        assert not torch.equal(got, linear(weight, bias)(x))


@needs_fp16
@pytest.mark.parametrize("name", ["eagle3", "mtp", "dflash"])
@pytest.mark.parametrize("rows", [True, False], ids=["our own", "FBGEMM's"])
def test_a_drafter_with_rounded_weights_is_as_lossless(name, rows, monkeypatch):
    """Its products differ, the target's with a head that both share do not, and it sees new weights too."""
    monkeypatch.setattr(cpu_linear, "LARGE", 0)
    if not rows:
        monkeypatch.setattr(native, "has_rows", lambda: False)
    target, how = tiny_target(), {"prompts": [[1, 2, 3]], "max_new_tokens": 24}
    drafter = DRAFTERS[name](target).eval().requires_grad_(False)
    plain = texts_of(Engine(target), **how)
    assert texts_of(Engine(target, drafter, DynamicTree(2, 2, 5)), **how) == plain
    round_weights(drafter)
    assert texts_of(Engine(target, drafter, DynamicTree(2, 2, 5)), **how) == plain
    layer = next(module for module in drafter.modules() if isinstance(module, Linear))
    x = torch.linspace(-1, 1, layer.in_features)[None]
    before = layer.bind()(x)
    assert not torch.equal(before, F.linear(x, layer.weight, layer.bias))
    layer.weight.mul_(2)
    assert not torch.equal(layer.bind()(x), before)
    with pytest.raises(ValueError, match="needs a CPU of the x86 family"):
        round_weights(torch.nn.Sequential(Linear(2, 2, device="meta")))


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_drafter_sees_its_weights_as_they_are(name, learns):
    """A drafter that was frozen for one decoding uses new weights in the next one, and in an unroll right after."""
    target = tiny_target()
    drafter = DRAFTERS[name](target).eval().requires_grad_(learns)
    tokens = torch.tensor([[3, 4, 5]])
    feats = torch.randn(1, 3, len(drafter.taps) * target.config.hidden)

    def decoded() -> torch.Tensor:
        return absorb(drafter, feats, tokens).logits[0, 0]

    def unrolled() -> torch.Tensor:
        return next(iter(drafter.unroll(feats, tokens, 1))).logits[0, -1]

    before = decoded()
    torch.testing.assert_close(unrolled(), before)
    drafter.reset(1, 16)  # frozen again
    for parameter in drafter.parameters():
        parameter.mul_(1.5)
    after = unrolled()
    assert not torch.allclose(after, before)
    torch.testing.assert_close(decoded(), after)
