"""Stand-ins for what SGLang 0.5.23 needs on a CPU and no package index has: `sglang_side.py` puts them in their place.

`sgl_kernel` is SGLang's library of kernels. Its build for CPUs must be compiled from source, and SGLang takes its
attention on processors with AMX only. Here are plain torch versions of the functions that are called when a Llama
decodes with an EAGLE head and a chain of drafts. They take the same arguments, write to the same places, and are slow.
What else SGLang asks of the library is absent. So norms, rope, activations and products run in SGLang's own torch code,
as on any processor without AMX. `torchvision` is imported and not used.
"""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.utils import is_torchvision_available

CHAINS = "the stand-ins know chains of drafts only, topk 1"

# Where keys and values lie: `req_to_token` has a row of slots for each request.


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, slots, _width) -> None:
    """Note the slots of new tokens."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, slots, _width) -> None:
    """Look up the slots of tokens from `starts` to `ends`."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[at : at + end - start] = req_to_token[row, start:end].to(slots.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, lengths, slots, _width, topk, steps) -> None:
    """Look up the slots of the tokens to draft, behind the text."""
    ends = lengths + topk * steps
    assign_extend_cache_locs_cpu(requests, req_to_token, lengths, ends, slots, _width)


def build_draft_decode_metadata_cpu(req_to_token, requests, _lengths, topk, _steps, width):
    """A row of slots for each chain that is drafted, which lies behind the text."""
    if topk != 1:
        raise NotImplementedError(CHAINS)
    return req_to_token[requests.long(), :width].clone()


def fill_bonus_tokens_cpu(accepted, counts, bonus, stride) -> None:
    """The last accepted token of each request, which is the target's own."""
    for i, count in enumerate(counts.tolist()):
        bonus[i] = accepted.flatten()[stride * i + count - 1]


def copy_all_layer_kv_cache_cpu(_pointers, _strides, to, source) -> None:
    """Move keys and values to other slots. Those of a chain are where they belong, and stay."""
    if not torch.equal(to, source):
        raise NotImplementedError(CHAINS)


def uncalled(*_) -> None:
    raise NotImplementedError(CHAINS)


# Drafts, in a chain: a draft's parent is the one before it.


def build_tree_kernel_efficient_cpu(
    _parents, _selected, lengths, mask, positions, index, next_token, _next_sibling, topk, _depth, count, mask_mode
) -> None:
    """Who follows whom, at which position, and who may see whom: a mask of `count` columns, or of the text's too."""
    if topk != 1:
        raise NotImplementedError(CHAINS)
    requests, text_too, at = len(lengths), int(mask_mode) == 0, 0
    steps, seen = torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril()
    index.copy_(torch.arange(requests * count).view(requests, count))
    next_token[:, :-1] = steps[1:]
    positions.copy_((lengths[:, None] + steps).view_as(positions))
    for length in lengths.tolist():
        width = count + length * text_too
        mask.view(-1)[at : at + count * width].view(count, width)[:, -count:] = seen
        at += count * width


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, target_predict, **_links
) -> None:
    """Accept drafts as long as each is what the target says behind the one before. SGLang calls it with these names."""
    target = target_predict.flatten()
    for i, (drafts, places) in enumerate(zip(candidates, retrive_index.long(), strict=True)):
        said = target[places]
        count = int((drafts[1:] == said[:-1]).cumprod(0)[: accept_index.shape[1] - 1].sum())
        kept = places[: count + 1]
        accept_index[i, : count + 1] = kept.to(accept_index.dtype)
        predicts[kept] = said[: count + 1].to(predicts.dtype)
        accept_token_num[i] = count


# Attention


def attend(q, keys, values, scale, mask=None):
    """q [Q,H,D], keys and values [K,G,D], mask [Q,K] -> [Q,H,D]."""
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def check_plain(cap, across, window, sinks) -> None:
    if cap or across or window or sinks is not None:
        raise NotImplementedError("the stand-in for attention knows no cap, window, sinks or other sequence")


def decode_attention_cpu(
    q, k_cache, v_cache, _k_scale, _v_scale, out, keys, values, slots, _space, req_to_token, requests, lengths, scale,
    cap, across, window, _encoder, sinks,
) -> None:  # fmt: skip
    """One new token for each request. Its key and value, if given, are stored first."""
    check_plain(cap, across, window, sinks)
    if keys is not None:
        k_cache[slots], v_cache[slots] = keys.view(-1, *k_cache.shape[1:]), values.view(-1, *v_cache.shape[1:])
    for i, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        places = req_to_token[row, :length].long()
        out[i : i + 1] = attend(q[i : i + 1], k_cache[places], v_cache[places], scale)


def extend_attention_cpu(
    q, _keys, _values, out, k_cache, v_cache, _k_scale, _v_scale, req_to_token, requests, lengths, news, starts, _most,
    scale, cap, across, window, _encoder, sinks, tree, causal,
) -> None:  # fmt: skip
    """Several new tokens for each request, whose keys and values are stored already."""
    check_plain(cap, across, window, sinks)
    numbers = zip(*(x.tolist() for x in (requests, lengths, news, starts)), strict=True)
    for i, (row, length, new, start) in enumerate(numbers):
        mask = torch.ones(new, length, dtype=torch.bool)
        if causal:
            mask[:, length - new :] = mask.new_ones(new, new).tril() if tree is None else tree.view(-1, new, new)[i]
        places, here = req_to_token[row, :length].long(), slice(start, start + new)
        out[here] = attend(q[here], k_cache[places], v_cache[places], scale, mask)


# Putting them in place

FUNCTIONS = (
    assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    build_draft_decode_metadata_cpu,
    fill_bonus_tokens_cpu,
    copy_all_layer_kv_cache_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)
UNCALLED = ("fill_accept_out_cache_loc_cpu", "rotate_input_ids_cpu")  # imported all the same
OPERATORS = (decode_attention_cpu, extend_attention_cpu)


def install() -> None:
    """Puts the stand-ins where SGLang looks for them. It does so before SGLang is imported."""
    kernels = ModuleType("sgl_kernel")
    vars(kernels).update({function.__name__: function for function in FUNCTIONS} | dict.fromkeys(UNCALLED, uncalled))
    torch.ops.sgl_kernel = SimpleNamespace(**{operator.__name__: operator for operator in OPERATORS})
    sys.modules["sgl_kernel"] = kernels
    is_torchvision_available()  # transformers keeps the answer, no
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].InterpolationMode = sys.modules[name].functional = None


def keep_the_backend() -> None:
    """SGLang turns to an attention backend without EAGLE where it finds no AMX. Here it keeps the one that is asked
    for, `intel_amx`, whose two operators have stand-ins."""
    hook = import_module("sglang.srt.arg_groups.attention_hook")
    hook._attention_backend_platform_fallbacks = lambda view: {}
