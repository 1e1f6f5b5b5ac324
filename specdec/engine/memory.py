"""How much memory a request takes, from shapes alone; what cannot fit is refused before anything is allocated."""

from dataclasses import dataclass

import torch
from torch import nn

from specdec.contracts import Drafter, TreePolicy
from specdec.model.target import Target

GIB = 2**30
# Bytes per logit that filters, draws and the rules of verification hold at most. A top-p filter holds the most at a
# time, some ten tensors of four or eight bytes (`sampling.filters.filtered_probs`).
VERIFY = 56
PENALTIES = 32  # the same for `penalties.Penalties`
SMALL = 2**20  # trees, masks of nodes, lengths and the like


@dataclass(frozen=True)
class Request:
    """What one call asks for. room: tokens of the longest row, new ones included; prompt: of the longest prompt."""

    batch: int
    prompt: int
    room: int
    greedy: bool = True  # nothing but the likeliest token is asked of the logits
    penalised: bool = False


@dataclass(frozen=True)
class Plan:
    """Bytes by part. prefill and round are upper bounds of what lives for a moment beside the caches, only one of them
    at a time; graphs hold the memory of a round for themselves."""

    weights: int  # of target and drafter: they are there already
    target_cache: int
    draft_cache: int
    prefill: int
    round: int
    graphs: int = 0

    @property
    def needed(self) -> int:
        """What must be free."""
        return self.target_cache + self.draft_cache + max(self.prefill, self.round) + self.graphs


def plan(target, drafter: Drafter | None, policy: TreePolicy | None, request: Request, graphs: bool = False) -> Plan:
    """The memory of a request on this pair. `request.room` already is what caches are made for."""
    batch, width = request.batch, target.dtype.itemsize
    path, nodes = (policy.steps + 1, policy.num_draft_tokens) if policy else (1, 1)
    vocab = target.vocab
    slots = request.room + path + nodes
    draft_cache = 0
    if drafter is not None:
        draft_cache = drafter.cache_bytes(batch, request.room + path + max(path, policy.draft_slots()))
    # Tables of positions, of the target's kinds of layers and the drafter's.
    small = SMALL + 3 * 2 * slots * target.cache_shape[1] * width
    prefill = small + _layers(target, drafter, batch * request.prompt) + batch * vocab * (width + VERIFY)
    if not isinstance(target, Target):  # masks of its own, which the causal prefill of ours does without
        prefill += batch * request.prompt**2 * (8 + 2 * width)
    # A mask for each query head and slot, and once more as what is added to scores.
    masks = batch * nodes * slots * target.query_heads * (1 + width)
    each = width + (0 if request.greedy else VERIFY) + (PENALTIES if request.penalised else 0)
    drafting = 0
    if policy is not None:
        # The logits of a level in fp32, their log-softmax, and what a tree that samples holds beside them.
        drafting = batch * policy.topk * drafter.vocab.size * (width + 12) + batch * nodes * vocab * 4 * policy.samples
    round_ = _layers(target, drafter, batch * nodes) + masks + batch * nodes * vocab * each + drafting + small
    target_cache = target.cache_bytes(batch, slots)
    if not graphs:  # between rounds rows are dropped, for which a layer's slots are held twice
        round_ = max(round_, target_cache // target.config.layers, draft_cache)
    return Plan(
        weights=weight_bytes(target, drafter),
        target_cache=target_cache,
        draft_cache=draft_cache,
        prefill=prefill,
        round=round_,
        graphs=round_ if graphs else 0,
    )


def _layers(target, drafter: Drafter | None, positions: int) -> int:
    """What the layers of target and drafter hold of `positions` at most, the one behind the other.

    Of a layer: its input and norms, some in fp32; rows of q, k and v before and after the rotation, which makes three
    tensors of its own; both halves of the MLP and their product. Of all layers together: the tapped states, and those
    states side by side."""
    config, width = target.config, target.dtype.itemsize
    kv_heads, head_dim = target.cache_shape
    heads = (target.query_heads + 2 * kv_heads) * head_dim
    taps = len(drafter.taps) if drafter is not None else 0
    layer = width * (8 * config.hidden + 6 * heads + 5 * config.intermediate) + 8 * config.hidden
    states = width * 4 * taps * config.hidden
    # A draft layer is taken to be no wider than a layer of the target; its attention reads two rows at once.
    draft = layer + width * 4 * config.hidden if taps else layer * (drafter is not None)
    return positions * (max(layer, draft) + states) + _experts(drafter)


def _experts(drafter: Drafter | None) -> int:
    """Few tokens read copies of the experts that they chose, together at most all of them."""
    return 0 if drafter is None else sum(p.nbytes for p in drafter.parameters() if p.ndim == 3)


def weight_bytes(*models: nn.Module | None) -> int:
    """Bytes of all parameters and buffers of the models that are given; what is shared counts once."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for part in models
        if part is not None
        for x in (*part.parameters(), *part.buffers())
    }
    return sum(storages.values())


def free_bytes(device: torch.device) -> int | None:
    """What a GPU can still give, blocks included that torch holds unused; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check(plan: Plan, free: int, kept: bool = False) -> None:
    """Raise ValueError, with the numbers, if a plan does not fit into `free` bytes. kept: the caches, and the graphs on
    them, are there from an earlier call."""
    working = max(plan.prefill, plan.round) + plan.graphs
    needed = plan.prefill if kept else plan.needed
    if needed > free:
        raise ValueError(
            f"this request does not fit: it needs {needed / GIB:.2f} GiB ({plan.target_cache / GIB:.2f} for the "
            f"target's cache, {plan.draft_cache / GIB:.2f} for the drafter's, up to {working / GIB:.2f} for the work), "
            f"and beside {plan.weights / GIB:.2f} GiB of weights {free / GIB:.2f} GiB are free; take fewer rows at a "
            "time, shorter prompts or fewer new tokens"
        )
