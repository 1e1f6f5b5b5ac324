"""Each kernel's formula at the sizes of a model, and everything that can compute it. A new kernel has its case here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model.layers import RMSNorm
from specdec.ops import commit
from specdec.ops.attention import attend, packed_mask, tree_mask
from specdec.ops.rms_norm import reference
from specdec.ops.rope_write import rotate
from specdec.sampling.filters import draw, filtered_probs
from specdec.sampling.noise import bits_of, gumbel, hashes_of
from specdec.structs import Sampling
from specdec.trees.dynamic import DynamicTree, Pool, next_level

Run = Callable[[], object]
DTYPE = torch.bfloat16
WIDTH, STEPS = 10, 8  # of the dynamic tree


@dataclass
class Shapes:
    """Sizes of a model, by default those of an 8B Llama, and the device of its tensors."""

    device: torch.device
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128256
    drafts: int = 32000  # tokens of the draft vocabulary
    layers: int = 32
    copied: int = 1 << 30  # bytes of the copy that makes the ceiling, and rows of the product
    square: int = 8192

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE)

    def range(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)


TINY = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "dim": 16, "vocab": 300, "drafts": 200}
TINY |= {"layers": 2, "copied": 1 << 20, "square": 64}


@dataclass
class KernelCase:
    """A formula on certain tensors, and what can compute it."""

    kernel: Run
    eager: Run
    moved: int  # bytes that the formula must read and write
    flops: int = 0
    others: dict[str, Run] = field(default_factory=dict)  # further backends, by name


def size(*tensors: Tensor) -> int:
    """Bytes of these tensors together."""
    return sum(x.nbytes for x in tensors)


def attention_case(s: Shapes, nodes: int, context: int) -> KernelCase:
    """A tree after a context: our kernel, SDPA with a dense mask, and FlexAttention, which finds the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from specdec.ops.cuda import tree_attention

    slots = context + nodes
    q, kv = s.random(1, nodes, s.heads, s.dim), s.random(2, 1, slots, s.kv_heads, s.dim)
    keys, values = kv.transpose(2, 3).unbind()
    lens = torch.tensor([context], device=s.device)
    ancestors = torch.ones(1, nodes, nodes, device=s.device).tril().bool()
    groups = s.heads // s.kv_heads

    def visible(b, h, i, slot):
        return (slot < lens[b]) | ancestors[b, i, (slot - lens[b]).clamp(0, nodes - 1)]

    blocks = create_block_mask(visible, 1, None, nodes, slots, device=s.device)
    flex = torch.compile(flex_attention)
    return KernelCase(
        lambda: tree_attention.launch(q, keys, values, lens, ancestors, nodes, slots=context),
        lambda: attend(q, keys, values, packed_mask(tree_mask(lens, ancestors, slots), groups, q.dtype)),
        moved=2 * size(q) + size(kv),
        flops=4 * nodes * s.heads * s.dim * slots,
        others={"flex": lambda: flex(q.transpose(1, 2), keys, values, block_mask=blocks, enable_gqa=True)},
    )


def layer_cases(s: Shapes, nodes: int) -> dict[str, KernelCase]:
    from specdec.ops.cuda import gated, norm_pair, rms_norm, rope_write

    x, y, gate_up = s.random(nodes, s.hidden), s.random(nodes, s.hidden), s.random(nodes, 2 * s.intermediate)
    norm = RMSNorm(s.hidden, 1e-5).to(s.device, DTYPE)
    plain, few = reference(norm.weight, norm.eps), (x[:WIDTH], y[:WIDTH])
    qkv = s.random(1, nodes, s.heads + 2 * s.kv_heads, s.dim)
    cos, sin = s.random(2, 1, nodes, 1, s.dim)
    keys, values = s.random(2, 4096, s.kv_heads * s.dim)
    slots = s.range(nodes) + 100

    def add_norm() -> tuple[Tensor, Tensor]:
        total = x + y
        return total, plain(total)

    def rope() -> Tensor:
        q, k = rotate(qkv[:, :, : s.heads + s.kv_heads], cos, sin).split([s.heads, s.kv_heads], dim=2)
        keys.index_copy_(0, slots, k.reshape(nodes, -1))
        values.index_copy_(0, slots, qkv[:, :, s.heads + s.kv_heads :].reshape(nodes, -1))
        return q

    def gate() -> Tensor:
        a, b = gate_up.chunk(2, dim=-1)
        return F.silu(a) * b

    weight = norm.weight
    return {
        "rms_norm": KernelCase(lambda: rms_norm.launch(x, weight, 1e-5), lambda: plain(x), 2 * size(x)),
        "residual_rms_norm": KernelCase(lambda: rms_norm.launch(y, weight, 1e-5, residual=x), add_norm, 4 * size(x)),
        "rope_write": KernelCase(
            lambda: rope_write.launch(qkv[0], cos, sin, slots, keys, values), rope, 2 * size(qkv) + size(cos, sin)
        ),
        "gated": KernelCase(lambda: gated.launch(gate_up, "silu"), gate, size(gate_up) * 3 // 2),
        "norm_pair": KernelCase(
            lambda: norm_pair.launch(*few, (weight, weight.clone()), (1e-5, 1e-5)),
            lambda: torch.cat([plain(part) for part in few], dim=-1),
            moved=2 * size(*few),
        ),
    }


def commit_case(s: Shapes, context: int) -> KernelCase:
    from specdec.model.cache import KVCache

    cache = KVCache(s.layers, 1, context + 64, s.kv_heads, s.dim, like=s.random(0))
    path = s.range(0, 2 * STEPS, 2)[None]
    n, none = s.range(STEPS, STEPS + 1), s.range(1)
    kernel, eager = (partial(move, none, path, n) for move in (cache.move, commit.reference(cache.memory)))
    return KernelCase(kernel, eager, moved=2 * s.layers * 2 * (STEPS - 1) * s.kv_heads * s.dim * DTYPE.itemsize)


def vocabulary_cases(s: Shapes, nodes: int) -> dict[str, KernelCase]:
    from specdec.ops.cuda import filtered_sampling, head_topk

    hidden, weight, logits = s.random(WIDTH, s.hidden), s.random(s.drafts, s.hidden) / 64, s.random(nodes, s.vocab) * 3
    sampling = Sampling(0.8, 50, 0.9, 0.0)
    filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    keys = torch.randint(2**31, (nodes, 2), dtype=torch.int32, device=logits.device)
    hashes = hashes_of(s.range(s.vocab))

    def sampled(rows: Tensor) -> KernelCase:
        return KernelCase(
            lambda: filtered_sampling.launch(rows, *filters, keys[: len(rows)]),
            lambda: draw(filtered_probs(rows, sampling), gumbel(bits_of(keys[: len(rows)], hashes))),
            moved=size(rows),
        )

    return {
        "head_topk": KernelCase(
            lambda: head_topk.launch(hidden, weight, WIDTH),
            lambda: (hidden @ weight.T).float().log_softmax(-1).topk(WIDTH),
            moved=size(hidden, weight),
            flops=2 * WIDTH * s.hidden * s.drafts,
        ),
        "filtered_sampling": sampled(logits),
        "filtered_sampling_of_a_row": sampled(logits[:1]),
    }


def pool_of(w: int, steps: int, b: int, seed: int, ties: bool) -> Pool:
    """What a random drafter would have a dynamic tree draft."""
    g = torch.Generator().manual_seed(seed)

    def gains(nodes: int):
        x = -torch.rand(b, nodes, w, generator=g) * 3
        return (x.round() if ties else x).sort(dim=2, descending=True).values

    scores, places = gains(1)[:, 0], torch.arange(1, w + 1).expand(b, w)
    seen, itself = torch.eye(w).bool().expand(b, w, w), torch.eye(w).bool()
    found = [(torch.randint(0, 50_000, (b, w), generator=g), scores, torch.zeros_like(places))]
    for depth in range(1, steps):
        tokens = torch.randint(0, 50_000, (b, w, w), generator=g)
        start = 1 + DynamicTree.candidates(w, depth)
        every, parents, scores, _, _, places, seen = next_level(
            itself, scores, places, seen, gains(w), tokens, start, w
        )
        found.append((tokens.flatten(1), every, parents))
    return Pool(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


def tree_cases(s: Shapes, nodes: int) -> dict[str, KernelCase]:
    """What a level of a dynamic tree does around attention and head, and the selection of its nodes."""
    from specdec import ops
    from specdec.ops.cuda import tree_level, tree_select

    ops.use("torch", "tree_select")  # else torch's selection would take the kernel too
    tree = DynamicTree(WIDTH, STEPS, nodes)
    gains = -s.random(1, WIDTH, WIDTH).float().abs().sort(dim=2).values
    tokens = torch.randint(s.vocab, (1, WIDTH, WIDTH), device=s.device)
    itself = torch.eye(WIDTH, dtype=torch.bool, device=s.device)
    scores, places = gains[:, :, 0].contiguous(), s.range(WIDTH)[None]
    level = scores, places, itself.repeat(1, 1, 3), gains, tokens, 1 + tree.candidates(WIDTH, 3), WIDTH
    pool = Pool(*(x.to(s.device) for x in pool_of(WIDTH, STEPS, 1, seed=0, ties=False)))
    root = s.range(1, 2)
    return {
        "tree_level": KernelCase(
            lambda: tree_level.launch(*level), lambda: next_level(itself, *level), moved=2 * size(gains, tokens)
        ),
        "tree_select": KernelCase(
            lambda: tree_select.launch(root, *pool, nodes, STEPS), lambda: tree.select(root, pool), moved=size(*pool)
        ),
    }


def cases(s: Shapes, nodes: int, context: int) -> dict[str, Callable[[], dict[str, KernelCase]]]:
    """What makes the cases, in groups: one that cannot be made leaves the others."""
    return {
        "tree_attention": lambda: {"tree_attention": attention_case(s, nodes, context)},
        "plain_attention": lambda: {"plain_attention": attention_case(s, 1, context)},
        "layers": lambda: layer_cases(s, nodes),
        "commit": lambda: {"commit": commit_case(s, context)},
        "vocabulary": lambda: vocabulary_cases(s, nodes),
        "tree": lambda: tree_cases(s, nodes),
    }
