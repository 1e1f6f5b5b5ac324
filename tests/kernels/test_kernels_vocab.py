"""The kernels over a vocabulary: the head's best tokens, filtered draws."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import close, in_dtypes, on_devices, sums

from specdec.ops.cuda import filtered_sampling, head_topk
from specdec.ops.cuda.shared import noise_bits
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Noise, bits_of, gumbel, hashes_of
from specdec.structs import Sampling

pytestmark = [on_devices, pytest.mark.usefixtures("as_in_decoding")]


@in_dtypes
@pytest.mark.parametrize(
    ("rows", "size", "vocab", "k"), [(1, 32, 128, 1), (3, 96, 129, 4), (17, 40, 500, 10), (2, 64, 7, 7)]
)
def test_head_topk(device, dtype, rows, size, vocab, k):
    hidden, weight = torch.randn(rows, size).to(dtype), torch.randn(vocab, size).to(dtype)
    logp, ids = (x.cpu() for x in head_topk.launch(hidden.to(device), weight.to(device), k))
    whole = (hidden.double() @ weight.double().T).log_softmax(-1)
    error = 2 * sums(size) * (hidden.double().abs() @ weight.double().abs().T).max() + sums(vocab)
    close(logp, whole.topk(k).values, error)
    close(logp, whole.gather(1, ids), error)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_head_topk_of_equal_logits_and_of_none(device):
    """Of equals the first; an index beyond the vocabulary would end the process where it is looked up."""
    hidden, weight = torch.ones(2, 16, device=device), torch.ones(300, 16, device=device)
    assert head_topk.launch(hidden, weight, 5)[1].tolist() == [[0, 1, 2, 3, 4]] * 2
    _, ids = head_topk.launch(hidden * torch.nan, weight[:130], 3)
    assert ((ids >= 0) & (ids < 130)).all()


def keys_of(rows: int, device, seed: int = 3) -> torch.Tensor:
    noise = Noise([(seed, row) for row in range(rows)], hashes_of(torch.arange(1)))
    return noise.after(torch.zeros(rows, dtype=torch.int64)).keys[:, 0].to(device)


def check(device, logits: torch.Tensor, filters: tuple, parts: int | None = None) -> torch.Tensor:
    """Compare what survives with torch's filters, ties at the threshold included; return the tokens drawn."""
    found = filtered_sampling.launch(logits.to(device), *filters, keys_of(len(logits), device), parts=parts)
    tokens, least = (x.cpu() for x in found)
    passing = logits >= least[:, None]
    sorted_out = filtered_scores(logits, Sampling(*filters)) == -torch.inf
    assert torch.equal(passing, logits >= logits.masked_fill(sorted_out, torch.inf).amin(-1, keepdim=True))
    assert passing.gather(1, tokens[:, None]).all()
    return tokens


FILTERS = [
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.7, 20, 0.9, 0.02),
    (1.5, 2100, 0.99, 0.0),  # more than a tile: nothing bounds the threshold from below
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),  # the most likely token alone
    (1.0, 0, 1.0, 1.0),
    (1.0, 0, 1.0, 0.0),
    (0.9, 10_000, 0.5, 0.0),  # top-k beyond the vocabulary
]


@pytest.mark.matrix
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "parts"), [(5, 1), (2200, 1), (2200, 4)])
def test_filters_keep_what_sorting_keeps(device, vocab, parts, filters):
    check(device, torch.randn(2, vocab) * 3, filters, parts)


@pytest.mark.parametrize("filters", [(0.7, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.3)], ids=str)
@pytest.mark.parametrize("order", ["falling", "few", "ties"])
def test_parts_may_hold_nothing_and_ties_are_kept(device, filters, order):
    """All survivors in one part, parts whose logits are all -inf, as a grammar's mask leaves them, and bf16's ties."""
    logits = torch.randn(2, 900, generator=torch.Generator().manual_seed(0)) * 2
    logits = logits.bfloat16() if order == "ties" else logits.sort(descending=True).values
    if order == "few":
        logits[:, 300:] = -torch.inf
    check(device, logits, filters, 8)


@triton.jit
def _bits(out, keys, vocab, WIDTH: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, WIDTH)
    bits = noise_bits(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(out + row * vocab + token, bits.to(tl.int32, bitcast=True), mask=token < vocab)


def test_the_bits_of_the_noise_are_those_of_torch(device):
    """And those of the CPU, where the keys are made too."""
    noise = Noise([(0, 0), (-1, 2**63), (12345678901234567890123, 7)], hashes_of(torch.arange(1000)))
    keys = noise.after(torch.tensor([0, 5, 10**6]), 4).keys.flatten(0, 1)
    out = torch.zeros(12, 1000, dtype=torch.int32, device=device)
    _bits[(12,)](out, keys.to(device), 1000, WIDTH=1024)
    assert torch.equal(out.cpu(), bits_of(keys, noise.hashes))
    hashes = hashes_of(torch.arange(1000, device=device))
    assert torch.equal(bits_of(keys.to(device), hashes).cpu(), out.cpu())


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("filters", [(1.0, 0, 1.0, 0.0), (0.8, 20, 0.9, 0.0), (1.2, 0, 1.0, 0.05)], ids=str)
def test_the_kernel_draws_what_torch_draws(device, filters, parts):
    """So its draws have the distribution of torch's, however a row is cut into parts."""
    rows = 8 if device == "cpu" else 60
    logits = torch.randn(rows, 600, generator=torch.Generator().manual_seed(1)) * 2
    noise = gumbel(bits_of(keys_of(rows, "cpu"), hashes_of(torch.arange(600))))
    expected = (filtered_scores(logits, Sampling(*filters)) + noise).argmax(-1)
    tokens, _ = filtered_sampling.launch(logits.to(device), *filters, keys_of(rows, device), parts=parts)
    assert torch.equal(tokens.cpu(), expected)
    assert len(set(expected.tolist())) > rows // 2
