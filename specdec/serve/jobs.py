"""The jobs of a scheduler, and the deltas that it reports for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.sequence import Sequence, Stop
from specdec.sampling.json_grammar import Grammar
from specdec.sampling.noise import Seed
from specdec.structs import Sampling

HOW = ("max_new_tokens", "sampling", "seed", "eos", "stop", "logprobs", "grammar", "steps", "top_logprobs")


@dataclass
class Delta:
    """The result of one step for a job. The last one has a `finish`: a sequence's, or 'error'.

    An error has an HTTP status, and a message unless the grammar failed.
    """

    job: "Job"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    likely: list[list[tuple[int, float]]] = field(default_factory=list)  # as `Sequence.likely`
    finish: str | None = None
    error: str = ""
    status: int = 500
    drafted: int = 0  # nodes of the step's tree without the root
    marks: list[bool] = field(default_factory=list)  # by token: it was drafted and accepted
    text: str = ""  # of the tokens: `Choice.take` adds it
    texts: list[str] = field(default_factory=list)  # the text by token, if `Choice.marked`
    rounds: int = 0  # of the choice so far, if `Choice.marked`


@dataclass(eq=False)
class Job:
    """A requested sequence, with the arguments of `Engine.add`. `tell` gets every `Delta`, in order."""

    prompt: list[int]
    tell: Callable[[Delta], None]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: Seed = (0, 0)
    eos: frozenset[int] | None = None  # None: the target's
    stop: Stop | None = None
    logprobs: bool = False
    grammar: Grammar | None = None
    top_logprobs: int = 0
    steps: int | None = None  # levels of draft trees that count for it
    # The scheduler's own
    sequence: Sequence | None = None  # once it has a row
    request: object = None  # the same for all jobs that were submitted together
    unwanted: bool = False
    arrived: float = 0.0
    heard: float = 0.0  # when its last tokens were reported

    @property
    def how(self) -> dict[str, Any]:
        """The keywords of `Engine.add`."""
        return {name: getattr(self, name) for name in HOW}
