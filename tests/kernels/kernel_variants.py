"""Count what decoding compiles, without a GPU: variants of each kernel in long texts; one JSON line a case.

    python tests/kernels/kernel_variants.py 2000            # all cases, in texts of 2,000 tokens
    python tests/kernels/kernel_variants.py 2000 "plain"    # those that are named

Triton compiles a kernel anew for other constants, dtypes and alignments, and for integers that are 1 or divisible by
16. Its cache hook tells what it is about to compile, and puts an empty kernel in its place. So nothing is computed.
What a kernel would have filled is 0, all logits are equal, and token 0 is always the likeliest. Trees are made in torch
from fixed scores, so that they are deep and their first path is accepted. Shapes, and what the host knows, are those of
a decoding on an H100.
"""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import torch
from kernel_compile import TargetOnly
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec import ops
from specdec.drafters import eagle3
from specdec.drafters.draft_model import DraftModel
from specdec.engine.engine import Engine
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.ops.cuda import filtered_sampling, tree_attention
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree
from specdec.trees.dynamic import best_tree, next_level

PROCESSORS = 132
EMPTY = SimpleNamespace(launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None)


class Compiler:
    """Replaces Triton's, and counts its calls by kernel."""

    def __init__(self):
        self.calls = Counter()

    def hook(self, *, key, fn, **_) -> bool:
        self.calls[f"{fn.module.rsplit('.', 1)[1]}.{fn.name}"] += 1
        cache, *_ = fn.jit_function.device_caches[driver.active.get_current_device()]
        cache[key] = EMPTY
        return True  # there is nothing to compile

    def forget(self) -> None:
        """Start again, as a new process does."""
        self.calls.clear()
        for name in ops.KERNELS:
            for kernel in vars(importlib.import_module(f"specdec.ops.cuda.{name}")).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()


class Again:
    """A backend for rounds on static tensors that runs them instead of replaying them: the bound is that of a graph."""

    any_bound, late = False, False

    def forget(self) -> None:
        pass

    def capture(self, run, preserved, bound):
        return lambda _: run(bound)


def children(hidden: torch.Tensor, weight: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `head_topk` is taken to find: token 0 for certain, and others that are less likely."""
    ranks = torch.arange(k).expand(len(hidden), k)
    return -ranks.float(), ranks


# What is taken for the result of a kernel, if zeros would make no trees.
RESULTS = {"head_topk": children, "tree_select": best_tree}
RESULTS["tree_level"] = lambda scores, *rest: next_level(torch.eye(scores.shape[1]).bool(), scores, *rest)


@functools.cache
def load(name: str, on_gpu: bool) -> Callable:
    launch = importlib.import_module(f"specdec.ops.cuda.{name}").launch
    if name not in RESULTS:
        return launch

    def launch_and_tell(*given):
        launch(*given)
        return RESULTS[name](*given)

    return launch_and_tell


def pretend(compiler: Compiler) -> None:
    """Let tensors on the CPU take the kernels, as on a GPU."""
    knobs.runtime.jit_cache_hook = compiler.hook
    driver.set_active(TargetOnly())
    ops._load = load
    ops.use("triton")
    tree_attention.processors = filtered_sampling.processors = lambda device: PROCESSORS
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros


def target() -> Target:
    """A layer that slides and one that does not: a window of 512 begins to hide when the text is longer."""
    config = ModelConfig(
        layers=2, hidden=64, intermediate=128, heads=8, kv_heads=2, head_dim=16, vocab=640, eps=1e-5, rope=Rope(),
        context=4096, tied=False, sliding=(True, False), window=512,
    )  # fmt: skip
    return Target(config).bfloat16().eval()


FILTERED = {"sampling": Sampling(0.7, top_k=50, top_p=0.9)}
TREE = DynamicTree(8, 6, 60)
# Of three rows one after the other ends, and is dropped unless rounds are graphs.
CASES = {
    "plain": (None, None, False, {}),
    "plain, sampled": (None, None, False, FILTERED),
    "EAGLE-3, chain of 5": ("eagle3", Chain(5), False, {}),
    "EAGLE-3, tree of 60": ("eagle3", TREE, False, {}),
    "EAGLE-3, tree of 60, sampled": ("eagle3", TREE, False, FILTERED),
    "EAGLE-3, tree of 60, three rows": ("eagle3", TREE, False, {"rows": 3}),
    "EAGLE-3, tree of 60, graphs": ("eagle3", TREE, True, {}),
    "EAGLE-3, tree of 60, graphs, three rows": ("eagle3", TREE, True, {"rows": 3}),
    "draft model, tree of 16": ("model", DynamicTree(4, 5, 16), False, {}),
}


def decode(compiler: Compiler, drafter: str | None, tree, graphs: bool, tokens: int, rows: int = 1, **how):
    """Variants by kernel after so many tokens, and how many more a second text needs."""
    compiler.forget()
    model = target()
    made = {"eagle3": lambda: eagle3.create(model).bfloat16().eval(), "model": lambda: DraftModel(target())}
    engine = Engine(model, made[drafter]() if drafter else None, tree, graphs=graphs and Again())
    limits = [tokens - tokens * row // 4 for row in range(rows)]
    engine.generate([[3, 5, 7]] * rows, max_new_tokens=limits, eos=frozenset(), **how)
    variants = dict(sorted(compiler.calls.items()))
    engine.generate([[3, 5, 7, 2]] * rows, max_new_tokens=tokens // 10, eos=frozenset(), **how)
    return {"variants": variants, "more": compiler.calls.total() - sum(variants.values())}


def main() -> None:
    compiler = Compiler()
    pretend(compiler)
    for name in sys.argv[2:] or CASES:
        drafter, tree, graphs, rest = CASES[name]
        print(
            json.dumps({"case": name, **decode(compiler, drafter, tree, graphs, int(sys.argv[1]), **rest)}), flush=True
        )


if __name__ == "__main__":
    main()
