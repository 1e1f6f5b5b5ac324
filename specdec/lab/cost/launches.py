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

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.engine.clock import SilentClock
from specdec.engine.graphs import obstacle
from specdec.engine.report import Reads
from specdec.engine.round import Round
from specdec.engine.sequence import Sequence
from specdec.engine.static_batch import StaticBatch
from specdec.structs import Sampling

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

# The parts of a round, in order. Those of a drafter's levels are `LEVEL` and their number. `VERIFICATION` is all
# between the target's forward and the commit. `ABSORB` is the drafter's forward over what was accepted, and the next
# root. `KEPT` are copies to where the next round, and the host, find the results.
ROOT, LEVEL, SELECTION, TARGET, VERIFICATION = "root", "level ", "selection", "target", "verification"
COMMIT, ABSORB, SETTLE, KEPT = "commit", "absorb", "settle", "kept"


def kernels_of(func, out, device: str) -> int:
    """What an operator costs on a device of this type, given its result: on a GPU the kernels that it launches, on the
    CPU 1 if it does any work."""
    name = func.__name__.split(".")[0]
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == device]
    aliases = [r.alias_info for r in func._schema.returns]
    view = any(info is not None and not info.is_write for info in aliases)
    if name in NOTHING or view or not any(x.numel() for x in made):
        return 0
    return 1 if device == "cpu" else KERNELS.get(name, 1)


class LaunchCounter(TorchDispatchMode):
    """Counts what is launched while a part is named. It is entered inside of `absent_gpu`, to see operators first."""

    def __init__(self) -> None:
        super().__init__()
        self.part: str | None = None
        self.device = "cuda"  # the type of the device whose operators count
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
        self.note(func.__name__.split(".")[0], kernels_of(func, out, self.device))
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
class Launches:
    """What one round launches: the numbers of kernels by part and kernel."""

    found: dict[str, Counter]

    def of(self, part: str) -> int:
        return sum(self.found.get(part, Counter()).values())

    @property
    def levels(self) -> list[int]:
        """Of each draft level behind the first, which comes from the root."""
        return [self.of(part) for part in self.found if part.startswith(LEVEL)]

    @property
    def total(self) -> int:
        return sum(self.of(part) for part in self.found)


class _Counted:
    """A `Backend` of static batches that captures nothing: the round runs as often as for a graph, and is counted."""

    any_bound, late = False, False

    def __init__(self, counter: "LaunchCounter"):
        self.counter = counter

    def forget(self) -> None:
        pass

    def capture(self, run: Callable, kept: list[Tensor], bound: int) -> Callable:
        run(bound)  # the first makes constants
        self.counter.found.clear()
        self.counter.part = ROOT
        with self.counter:
            made = run(bound)
        self.counter.part = None
        return lambda bound: made


def count_round(
    round_: Round, counter: LaunchCounter, sampling: Sampling | None = None, context: int = 1024, rows: int = 1
) -> Launches:
    """Count a round of `rows` rows behind up to `context` tokens as it is captured, on the device of the target: within
    `absent_gpu`, whose kernels go to `counter.note`, or on the CPU. Call it without gradients.

    Raises ValueError for what cannot be captured."""
    if why := obstacle(round_.target, round_.drafter):
        raise ValueError(why)
    counter.found, counter.device = {}, round_.target.device.type
    batch = StaticBatch(round_, [rows], context, _Counted(counter), SilentClock())
    batch.begin(SilentClock())
    batch.reads = Reads.TOKENS
    batch.admit([Sequence([0], 9, sampling=sampling or Sampling(), eos=frozenset({1})) for _ in range(rows)])
    with _parts(counter, batch):
        batch.launch(context, ())
    return Launches(counter.found)


@contextmanager
def _parts(counter: LaunchCounter, batch: StaticBatch) -> Iterator[None]:
    """While this lasts the pieces of the round tell the counter which part begins."""
    target, drafter, policy = batch.round.target, batch.round.drafter, batch.round.policy
    hooks = [(target, "forward", TARGET, VERIFICATION), (batch.cache, "commit", COMMIT, ABSORB)]
    hooks += [(batch.progress, "settle", SETTLE, KEPT)]
    hooks += [(policy, name, SELECTION, None) for name in ("pooled", "select") if hasattr(policy, name)]
    changed = [(owner, name, counter.then(getattr(owner, name), *parts)) for owner, name, *parts in hooks]
    if drafter is not None:
        expand = drafter.expand
        changed.append((drafter, "expand", lambda *args: counter.then(expand, f"{LEVEL}{args[3]}")(*args)))
    for owner, name, function in changed:
        object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        for owner, name, _ in changed:
            object.__delattr__(owner, name)
