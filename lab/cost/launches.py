"""How many kernels a round launches on a GPU, by part, counted without one.

The round runs on a GPU that is not there (`lab.cost.absent_gpu`). Every operator of torch that computes something is
counted, and every Triton kernel. Operators that only make a view, or only reserve memory, launch nothing. Most others
launch one kernel; `KERNELS` has those that launch more. Not seen: a matrix product of few rows may be cut along its
inner dimension, and then cuBLAS adds a second kernel.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.engine.batch import Progress
from specdec.engine.round import Round, RoundSettings
from specdec.engine.sequence import Sequence
from specdec.types import Sampling

# Kernels of an operator, where it is not one, as torch's source has them (aten/src/ATen/native; for rows that fit in
# one block, of up to some thousand entries).
KERNELS = {
    "sort": 4,  # cuda/Sort.cpp: places (`arange`, `copy_`), values (`copy_`), and the bitonic sort
    "topk": 2,  # cuda/TensorTopK.cpp: the k largest, and their sort
    "constant_pad_nd": 2,  # PadNd.cpp: `fill_`, `copy_`
    "masked_fill": 2,  # TensorAdvancedIndexing.cpp: these six copy their input, and then change the copy in place
    "scatter": 2,
    "scatter_add": 2,
    "index_copy": 2,
    "index_fill": 2,
    "index_put": 2,
    "eye": 2,  # cuda/TensorFactories.cu: zeros, and then the diagonal
}
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")

ROOT, LEVEL, SELECTION, TARGET = "root", "draft levels", "selection", "target"
VERIFICATION, COMMIT, ABSORB, SETTLE = "verification", "commit", "absorb", "settle"
PARTS = (ROOT, LEVEL, SELECTION, TARGET, VERIFICATION, COMMIT, ABSORB, SETTLE)


def kernels_of(func, args: tuple, out) -> int:
    """Kernels that an operator launches on a GPU, given its arguments and its result; on the CPU 1 for any work."""
    name = func.__name__.split(".")[0]
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    aliases = [r.alias_info for r in func._schema.returns]
    view = any(info is not None and not info.is_write for info in aliases)
    if name in NOTHING or view or not any(x.numel() for x in made):
        return 0
    if not any(x.is_cuda for x in made):
        return int(not any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves(args)))
    return KERNELS.get(name, 1)


class LaunchCounter(TorchDispatchMode):
    """Counts what is launched while a part is named. It is entered inside of `absent_gpu`, to see operators first."""

    def __init__(self) -> None:
        super().__init__()
        self.part: str | None = None
        self.found: dict[str, Counter] = {}  # by part, kernels by name

    def note(self, name: str, kernels: int = 1) -> None:
        if self.part is not None and kernels:
            self.found.setdefault(self.part, Counter())[name] += kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for metadata
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self.note(func.__name__.split(".")[0], kernels_of(func, (args, kwargs), out))
        return out

    def then(self, function: Callable, part: str, after: str | None = None) -> Callable:
        """The function, with whose call `part` begins; behind it comes `after`, if that is given."""

        def call(*args, **kwargs):
            self.part = part
            out = function(*args, **kwargs)
            self.part = after or self.part
            return out

        return call


@dataclass
class _Marks:
    """The clock of a counted round: where a part ends, the next begins."""

    counter: LaunchCounter

    def mark(self, part: str) -> None:
        self.counter.part = {"verify": COMMIT, "commit": ABSORB}.get(part, self.counter.part)


@dataclass
class Launches:
    """What one round launches: kernels by part and name. Of the draft levels there are `levels`, all alike but for the
    last, after which nothing is chosen."""

    found: dict[str, Counter]
    levels: int

    def of(self, part: str) -> int:
        return sum(self.found.get(part, Counter()).values())

    @property
    def level(self) -> float:
        """Kernels of one draft level, on average."""
        return self.of(LEVEL) / self.levels if self.levels else 0.0

    @property
    def total(self) -> int:
        return sum(self.of(part) for part in PARTS)


def count_round(round_: Round, sampling: Sampling | None = None, context: int = 1024, rows: int = 1) -> Launches:
    """Count a round of `rows` rows behind `context` committed tokens, on the device of the target: within `absent_gpu`
    kernels, on the CPU operators. Call it without gradients."""
    target, drafter, device = round_.target, round_.drafter, round_.target.device
    room = context + 4 * round_.path
    cache = target.new_cache(rows, round_.target_slots(room)).clear(rows)
    state = None
    if drafter is not None:
        drafter.reset(rows, round_.draft_slots(room))
        drafter.cache.clear(rows)
        width = len(drafter.taps) * target.config.hidden
        feats = torch.zeros(rows, round_.path, width, dtype=target.dtype, device=device) if width else None
        tokens = torch.zeros(rows, round_.path, dtype=torch.int64, device=device)
        state = drafter.extend(feats, tokens, tokens[:, 0] + 1, context)
    cache.max_len = context
    progress = Progress([Sequence([0], 100, eos=frozenset({1})) for _ in range(rows)], device)
    root = torch.zeros(rows, dtype=torch.int64, device=device)
    itself = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)
    counter = LaunchCounter()
    settings = RoundSettings(sampling or Sampling(), None, _Marks(counter))
    with counter, _parts(counter, round_) as levels:
        counter.part = ROOT
        output = round_.play(root, state, cache, progress.active, settings, itself)[2]
        counter.part = SETTLE
        progress.settle(output.tokens, output.n)
        counter.part = None
    return Launches(counter.found, len(levels))


@contextmanager
def _parts(counter: LaunchCounter, round_: Round) -> Iterator[list[int]]:
    """While this lasts the pieces of the round tell the counter which part begins. Gives a list of the levels."""
    target, drafter, policy = round_.target, round_.drafter, round_.policy
    levels: list[int] = []
    changed = [(target, "forward", counter.then(target.forward, TARGET, VERIFICATION))]
    if drafter is not None:
        expand = counter.then(drafter.expand, LEVEL)

        def level(*args):
            levels.append(args[3])
            return expand(*args)

        changed.append((drafter, "expand", level))
    if hasattr(policy, "select"):
        changed.append((policy, "select", counter.then(policy.select, SELECTION)))
    for owner, name, function in changed:
        object.__setattr__(owner, name, function)
    try:
        yield levels
    finally:
        for owner, name, _ in changed:
            object.__delattr__(owner, name)
