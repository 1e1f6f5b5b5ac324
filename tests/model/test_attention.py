"""Attention of prompts: which of torch's it becomes on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from specdec.model.attention import CacheView
from specdec.model.cache import KVCache
from specdec.ops.attention import attend_causal, attend_grouped


class ClaimsToBeOnAGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 264)])
def test_torch_never_holds_the_scores_of_a_prompt(monkeypatch, dtype, dim, masked):
    """Grouped heads go to flash attention alone: no fp32, no mask, heads of 256 at most. For all else keys and values
    are repeated, so that another attention than the one that holds all scores takes them. The result is the same."""
    asked, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **how: asked.append((x, how)) or real(*x, **how))
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 6, 5, dim, dtype=dtype), torch.randn(2, 2, 2, 5, dim, dtype=dtype)
    mask = torch.ones(5, 5).tril().bool() if masked else None
    on_cpu = attend_grouped(q, k, v, mask, causal=not masked)
    on_gpu = attend_grouped(q.as_subclass(ClaimsToBeOnAGPU), k, v, mask, causal=not masked)
    flash = dtype == torch.bfloat16 and dim <= 256 and not masked
    assert [how["enable_gqa"] for _, how in asked] == [True, flash]
    assert [x[1].shape[1] for x, _ in asked] == [2, 2 if flash else 6]
    torch.testing.assert_close(on_gpu.as_subclass(torch.Tensor), on_cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("window", [None, 600])
def test_memory_of_a_prompt_in_fp32_grows_with_its_length(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4096, heads, 64, device="cuda") for heads in (16, 4, 4))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attend_causal(q, k, v, window)
    held = torch.cuda.max_memory_allocated() - before
    assert held < 16 * 4096 * 4096 * 4 / 4, "as much as a quarter of all scores"
    wanted = attend_causal(q.cpu().double(), k.cpu().double(), v.cpu().double(), window)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loose_bound_of_the_length_hides_the_free_slots(dtype):
    """The only position of the only row too: `max_len` may lie above its length."""
    cache = KVCache(1, 1, 32, 2, 8, like=torch.zeros(0, dtype=dtype))
    q, k, v = (torch.randn(1, 1, 2, 8).to(dtype) for _ in "qkv")
    cache.memory[0].normal_()
    cache.lens.fill_(8)
    found = []
    for cache.max_len in (8, 13):
        found.append(CacheView(cache, 1, None, 1).layer(0)(q, k, v))
    torch.testing.assert_close(*found)
