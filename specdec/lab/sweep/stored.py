"""What the files of a sweep's points hold, as models of pydantic: the fields that tables, figures and pages read."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from specdec.engine.trace_lines import Count, Sampled, Strict
from specdec.schema import shown

MOST = 1e12  # of a measured number: more is a slip of the pen, and no figure can show it
Measured = Annotated[float, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]


class Head(Strict):
    """What is read of every point, before it is known whether this version of the code made it."""

    class Code(Strict):
        code: str

    settings: Code


class Names(Strict):
    target: str
    benchmark: str
    questions: Count
    skipped_records: Count
    draft: str


class Shape(Strict):
    topk: Size
    steps: Size
    num_draft_tokens: Size | None
    verifier: str
    block: bool = False


class Settings(Strict):
    code: str
    sampling: Sampled
    max_new_tokens: Count
    batch_size: Count
    dtype: str
    device: str
    raw: bool
    matmul_precision: str = "highest"
    template: dict[str, bool | str | int | float | None]
    tree: Shape | None = None


class Point(Strict):
    """result.json of any point; alone of one that was skipped."""

    kind: Literal["decode", "best_tree"]
    key: str
    names: Names
    settings: Settings
    skipped: str = ""


class Value(Strict):
    """A metric and its interval; without a value where it is not defined."""

    value: Measured | None
    low: Measured | None
    high: Measured | None

    @model_validator(mode="after")
    def check_interval(self) -> "Value":
        """Raise ValueError for an interval with one end, or without a value."""
        if (self.low is None) != (self.high is None) or (self.value is None and self.low is not None):
            raise ValueError("must have a value, and both ends of its interval or none")
        return self


class Tau(Value):
    value: Measured


class Metrics(Strict):
    tau: Tau


class Category(Strict):
    metrics: Metrics


class ContextBin(Tau):
    start: Annotated[Count, Field(alias="from")]
    to: Count | None


class Plain(Point):
    """result.json of plain decoding."""

    class Diagnostics(Strict):
        context: list[ContextBin]

    class Depths(Strict):
        acceptance_by_depth: list[Value]

    rows: Count
    metrics: Metrics
    by_depth: Depths
    by_category: dict[str, Category]
    answers: list[str]
    diagnostics: Diagnostics


class DraftBin(Strict):
    draft: Measured
    accepted: Share
    count: Count


class EntropyBin(Strict):
    entropy: Measured
    accepted: Share
    count: Count


class Norm(Strict):
    step: Count
    mean: Annotated[float, Field(gt=0, le=MOST)]
    low: Measured
    high: Measured


class Example(Strict):
    """A round to draw: a tree, and its accepted path."""

    question: str
    context: Count
    tokens: Annotated[list[str], Field(min_length=1)]
    parents: list[Count]
    draft: list[Share | None]
    path: list[Count]
    bonus: str | None

    @model_validator(mode="after")
    def check_tree(self) -> "Example":
        """Raise ValueError unless each node has a parent before it, and the path goes through the tree."""
        size = len(self.tokens)
        before = all(parent < max(node, 1) for node, parent in enumerate(self.parents))
        if len(self.parents) != size or len(self.draft) != size or not before:
            raise ValueError(f"must give each of its {size} tokens a parent before it, and a share in draft")
        if not all(a < b for a, b in pairwise(self.path)) or self.path[:1] != [0] or self.path[-1] >= size:
            raise ValueError(f"must have a path from node 0 through its {size} nodes, got {shown(self.path)}")
        return self


class Drafted(Plain):
    """result.json of a drafter with a tree."""

    class Names(Names):
        lossless: bool

    class Drafting(Settings):
        tree: Shape

    class Diagnostics(Plain.Diagnostics):
        class Calibration(Strict):
            bins: list[DraftBin]

        class Coverage(Strict):
            size: Count
            share: Share | None
            missed: list[Annotated[list[str | int], Field(min_length=2, max_length=2)]]

        class Entropy(Strict):
            target: list[EntropyBin]
            draft: list[EntropyBin]

        calibration: Calibration
        coverage: Coverage
        entropy: Entropy | None = None
        norms: list[Norm] = Field(default_factory=list)

    names: Names
    settings: Drafting
    turns_left_out: Count
    nodes_a_round: Measured
    diagnostics: Diagnostics
    examples: list[Example]


class BestTree(Point):
    """result.json of the trees that would have been best."""

    class Tree(Strict):
        paths: list[Annotated[list[Count], Field(min_length=1)]]
        expected_tau: Measured

    questions: Count
    accept: list[list[Share]]
    trees: dict[str, Tree]

    @model_validator(mode="after")
    def check_paths(self) -> "BestTree":
        """Raise ValueError for a node without a parent, and for one of which `accept` knows nothing."""
        for name, tree in self.trees.items():
            there = {(), *map(tuple, tree.paths)}
            for path in tree.paths:
                if tuple(path[:-1]) not in there:
                    raise ValueError(f"trees.{name}.paths must hold the parent of each node, got {shown(path)}")
                if len(path) > len(self.accept) or path[-1] >= len(self.accept[len(path) - 1]):
                    raise ValueError(f"trees.{name}.paths must lie within accept, got {shown(path)}")
        return self


class Times(Strict):
    """times.json: of a decoded point all, of others the key."""

    key: str


class DecodedTimes(Times):
    class Parts(Strict):
        draft: Measured
        verify: Measured
        commit: Measured
        host: Annotated[float, Field(ge=-MOST, le=MOST)]  # what is left over, below 0 by rounding

    class Machine(Strict):
        processor: str
        cores: Count
        threads: Count
        gpu: str
        torch: str
        python: str

    tokens_per_second: Annotated[float, Field(gt=0, le=MOST)]
    milliseconds_a_round: Parts
    load: Measured
    machine: Machine


def models_of(point: Point) -> tuple[type[Point], type[Times]]:
    """What result.json and times.json of a point hold."""
    if point.skipped:
        return Point, Times
    if point.kind == "best_tree":
        return BestTree, Times
    return (Plain if point.names.draft == "none" else Drafted), DecodedTimes
