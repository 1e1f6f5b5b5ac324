"""How much memory a request takes, from shapes alone; what cannot fit is refused before anything is allocated."""

import os
import re
from collections import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from specdec.contracts import Drafter
from specdec.engine.executor import buckets
from specdec.engine.report import Reads
from specdec.engine.round import Round
from specdec.ops.attention import shares_key_heads

GIB = 2**30
NOISE = 12  # bytes
VERIFY = 56  # bytes per logit that filters, draws and rules hold at most; a top-p filter has some ten tensors at a time
PENALTIES = 32  # the same for `penalties.Penalties`
# Bytes per score of torch's attention without a fused kernel: the scores in fp32, their softmax, that once more with
# rows that see nothing set to 0, and a mask of those (`_scaled_dot_product_attention_math` and `_safe_softmax`).
SCORE = 13
SMALL = 2**20  # trees, masks of nodes, lengths and the like
CUBLAS = 32 * 2**20  # the workspace that torch gives cuBLAS on Hopper and Blackwell; older GPUs get 8 MiB


@dataclass(frozen=True)
class Request:
    """Size of one call. room: tokens of the longest row, new ones included; prompt: of the longest prompt."""

    batch: int
    prompt: int
    room: int
    greedy: bool = True  # no row draws
    penalised: bool = False
    reads: Reads = Reads.TOKENS  # what is read of reports
    part: int = 0  # tokens of a prompt that are read at once; 0: all of them
    prefixes: int = 0  # bytes of the prefix cache
    captures: int = 1  # captured rounds for each bucket: of several numbers of rows and levels


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part.

    prefill and round are upper bounds of temporary memory in addition to the caches; only one of the two is in use at a
    time. graphs is the memory that captured rounds hold.
    """

    weights: int  # of target and drafter: they are there already
    target_cache: int
    draft_cache: int
    prefill: int
    round: int
    graphs: int = 0
    libraries: int = 0  # workspaces

    @property
    def needed(self) -> int:
        """Bytes that must be free."""
        return self.target_cache + self.draft_cache + self.needed_again + self.graphs

    @property
    def needed_again(self) -> int:
        """Bytes that must be free if the caches, and the graphs on them, exist from an earlier call."""
        return max(self.prefill, self.round) + self.libraries


def plan(round_: Round, request: Request, graphs: bool = False) -> MemoryPlan:
    """Return the memory of a request for these rounds. `request.room` is already the room of the caches."""
    target, drafter, policy = round_.target, round_.drafter, round_.policy
    batch, nodes, width, vocab = request.batch, round_.nodes, target.dtype.itemsize, target.vocab
    slots = round_.target_slots(request.room)
    draft_cache = 0 if drafter is None else drafter.cache_bytes(batch, round_.draft_slots(request.room))
    # Tables of positions, of the target's kinds of layers and the drafter's.
    small = SMALL + 3 * 2 * slots * target.cache_shape[1] * width
    prefill = small + _layers(target, drafter, batch * request.prompt) + batch * vocab * (width + VERIFY)
    prefill += _prompt_attention(target, drafter, batch, request.prompt)
    # A mask for each query head and slot, and once more as what is added to scores.
    masks = batch * nodes * slots * target.query_heads * (1 + width)
    likeliest = request.greedy and (drafter is None or round_.verifier.likeliest_only)
    # Of every position of a round and token of the vocabulary, as bits, what is made of them, and a draft vocabulary's.
    noise = 0 if request.greedy else batch * round_.path * vocab * NOISE
    each = width + (0 if likeliest else VERIFY) + (PENALTIES if request.penalised else 0)
    drafting, read = 0, 0
    if policy is not None and drafter is not None:
        # The logits of a level in fp32, their log-softmax, and for a tree that samples its probabilities.
        drafting = batch * policy.topk * drafter.vocab.size * (width + 12) + batch * nodes * vocab * 4 * policy.samples
        if request.reads >= Reads.LOGITS:  # an observer reads those of one round while the next one runs
            read = batch * nodes * vocab * (max(width, 4 * request.penalised) + 4 * policy.samples)
    round_bytes = _layers(target, drafter, batch * nodes) + masks + batch * nodes * vocab * each + drafting + small
    round_bytes += noise + 2 * read
    apart = target.cache_bytes(1, slots) if request.part or request.prefixes else 0
    target_cache = target.cache_bytes(batch, slots) + apart
    if not graphs:  # between rounds rows are dropped, for which a layer's slots are held twice
        round_bytes = max(round_bytes, target_cache // target.config.layers, draft_cache)
    on_gpu = target.device.type == "cuda"
    return MemoryPlan(
        weights=weight_bytes(target, drafter),
        target_cache=target_cache + request.prefixes,
        draft_cache=draft_cache,
        prefill=prefill,
        round=round_bytes,
        graphs=round_bytes + request.captures * len(buckets(request.room)) * read if graphs else 0,
        # One for eager work, one for captured rounds (`graphs.own_workspaces`).
        libraries=cublas_workspace() * (2 if graphs else 1) if on_gpu else 0,
    )


def cublas_workspace() -> int:
    """Return bytes that torch gives cuBLAS for each stream: CUBLAS_WORKSPACE_CONFIG, `:KIB:COUNT` once or more."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * 1024 * int(count) for kib, count in sizes) or CUBLAS


def _prompt_attention(target, drafter: Drafter | None, batch: int, prompt: int) -> int:
    """Return the largest temporary memory of a layer's attention in a prefill, except for its rows.

    The drafter is assumed to be like the target, without a window.
    """
    if target.masks_prompts:
        return batch * prompt**2 * (8 + 2 * target.dtype.itemsize)
    windows = {*target.windows, None} if drafter is not None else target.windows
    return max(_scores(target, batch, prompt, window) for window in windows)


def _scores(target, batch: int, prompt: int, window: int | None) -> int:
    """Return the memory of a layer's attention (`attention.attend_causal`).

    That is keys and values for every query head; without a fused kernel also scores, a mask, and rows in fp32.
    """
    masked = window is not None and window < prompt
    queries, keys = (window, min(prompt, 2 * window)) if masked and window is not None else (prompt, prompt)
    heads, (kv_heads, head_dim) = target.query_heads, target.cache_shape
    copies = key_heads(target, masked) > kv_heads
    repeated = copies * batch * keys * head_dim * 2 * heads * target.dtype.itemsize
    if has_fused_attention(target, masked):
        return repeated
    rows = keys * head_dim * (6 * heads + 2 * kv_heads) * 4
    return repeated + batch * (heads * queries * keys * SCORE + rows) + queries * keys * 5


def key_heads(target, masked: bool) -> int:
    """Return the key heads that torch's attention is given for a prompt: one per query head if it cannot share."""
    kv_heads, dim = target.cache_shape
    like = torch.empty(0, dim, dtype=target.dtype, device=target.device)
    return kv_heads if shares_key_heads(like, masked) else target.query_heads


def has_fused_attention(target, masked: bool) -> bool:
    """Return whether torch attends to prompts without writing scores to memory. On a GPU it refuses some head sizes."""
    if target.device.type != "cuda":
        return True
    dim, heads = target.cache_shape[1], (target.query_heads, key_heads(target, masked))
    q, k = (torch.empty(1, 8, n, dim, dtype=target.dtype, device=target.device) for n in heads)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    mask = torch.ones(8, 8, dtype=torch.bool, device=target.device) if masked else None
    asked = SDPAParams(q, k, k, mask, 0.0, not masked, q.shape[1] != k.shape[1])
    return can_use_flash_attention(asked) or can_use_efficient_attention(asked)


def _layers(target, drafter: Drafter | None, positions: int) -> int:
    """Return the memory that the layers of target and drafter need for `positions`; they run one after the other.

    Of a layer: its input and norms, some in fp32; rows of q, k and v before and after the rotation, which makes three
    tensors of its own; both halves of the MLP and their product. Of all layers together: the tapped states, and those
    states concatenated.
    """
    config, width = target.config, target.dtype.itemsize
    kv_heads, head_dim = target.cache_shape
    heads = (target.query_heads + 2 * kv_heads) * head_dim
    taps = len(drafter.taps) if drafter is not None else 0
    layer = width * (8 * config.hidden + 6 * heads + 5 * config.intermediate) + 8 * config.hidden
    states = width * 4 * taps * config.hidden
    # A draft layer is taken to be no wider than a layer of the target; its attention reads two rows at once.
    draft = layer + width * 4 * config.hidden if taps else layer * (drafter is not None)
    # Few tokens read copies of the chosen experts, together at most all of them.
    experts = 0 if drafter is None else sum(p.nbytes for p in drafter.parameters() if p.ndim == 3)
    return positions * (max(layer, draft) + states) + experts


def weight_bytes(*models: Any) -> int:
    """Return the bytes of all parameters and buffers of the models that are given; shared memory counts once."""
    tensors = [x for part in models if part is not None for x in (*part.parameters(), *part.buffers())]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def is_limited(device: torch.device) -> bool:
    """Return whether memory is counted before it is taken."""
    return device.type == "cuda"


def free_bytes(device: torch.device, wanted: int) -> int:
    """Return what a GPU can still give, as far as needed to know whether `wanted` bytes are among it."""
    free = torch.cuda.mem_get_info(device)[0]
    if free < wanted:  # only then, as that takes time
        free += unused_bytes(torch.cuda.memory_snapshot(), device.index)
    if free < wanted:
        torch.cuda.empty_cache()  # the pools of graphs that are gone are given back here, and not before
        free = torch.cuda.mem_get_info(device)[0]
        free += unused_bytes(torch.cuda.memory_snapshot(), device.index)
    return free


def unused_bytes(segments: abc.Iterable[dict], device: int) -> int:
    """Return how much of the memory that torch holds on a device new tensors can use.

    That is the free parts of its segments, except those of a graph pool, which only captures into that pool can use.
    segments: `torch.cuda.memory_snapshot`.
    """
    ours = [s for s in segments if s["device"] == device and tuple(s["segment_pool_id"]) == (0, 0)]
    return sum(s["total_size"] - s["active_size"] for s in ours)


def check_memory(round_: Round, request: Request, graphs: bool = False, allocated: bool = False) -> None:
    """Raise ValueError for a request that a GPU cannot hold, before memory is allocated. allocated: as for `check`."""
    device = round_.target.device
    if is_limited(device):
        if round_.drafter is not None and not allocated:
            round_.drafter.reset(1, 1)  # it holds the cache of the last call
        wanted = plan(round_, request, graphs)
        check(wanted, free_bytes(device, wanted.needed_again if allocated else wanted.needed), allocated)


def check(plan: MemoryPlan, free: int, allocated: bool = False) -> None:
    """Raise ValueError, with the numbers, if a plan does not fit into `free` bytes.

    allocated: the caches, and the graphs that use them, exist from an earlier call.
    """
    needed = plan.needed_again if allocated else plan.needed
    working = plan.needed_again + plan.graphs
    if needed > free:
        raise ValueError(
            f"this request does not fit: it needs {needed / GIB:.2f} GiB ({plan.target_cache / GIB:.2f} for the "
            f"target's cache, {plan.draft_cache / GIB:.2f} for the drafter's, up to {working / GIB:.2f} for the work), "
            f"and {free / GIB:.2f} GiB are free after {plan.weights / GIB:.2f} GiB of weights; take fewer rows at a "
            "time, shorter prompts or fewer new tokens"
        )
