"""What the files of a trace hold, line by line, as models of pydantic.

Only readers of traces import this module: decoding and writing start without pydantic.
"""

from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, model_validator

from specdec.cli.limits import LIMITS, MOST
from specdec.schema import check, shown
from specdec.structs import Sampling

STEPS = LIMITS["steps"].metadata["high"]
Count = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(ge=0)]


def _sampling(value: object) -> Sampling:
    names = [setting.name for setting in fields(Sampling)]
    if not isinstance(value, dict) or not set(value) <= set(names):
        raise ValueError(f"must be a mapping of {', '.join(names)}, got {shown(value)}")
    check(Sampling, value, "")
    return Sampling(**value)


Sampled = Annotated[InstanceOf[Sampling], BeforeValidator(_sampling)]


class Strict(BaseModel):
    """Types as JSON has them: no text for a number, and no NaN."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Header(Strict):
    """Content of trace.json."""

    settings: dict
    versions: dict[str, str]
    sha256: dict[str, str]


class RowLine(Strict, extra="forbid"):
    """A line of rows.jsonl. Traces older than the seeds of rows have none."""

    question: str
    category: str | None
    call: Count
    steps: Annotated[int, Field(ge=0, le=STEPS)]
    sampling: Sampled
    prompt: list[Count]
    first: Count
    finish: Literal["eos", "stop", "length", "context", "abort", "error"] | None
    prefill_seconds: Seconds
    seed: Annotated[list[int], Field(min_length=2, max_length=2)] = [0, 0]


class RoundLine(Strict, extra="forbid"):
    """A line of rounds.jsonl."""

    row: Count
    nodes: Count
    context: Count
    path: list[Count]
    emitted: list[Count]
    seconds: dict[str, Seconds]
    experts: Seconds | None = None

    @model_validator(mode="after")
    def check_path(self) -> "RoundLine":
        """Raise ValueError unless the path begins at the root, is in the tree and explains the emitted tokens."""
        rising = all(a < b for a, b in pairwise(self.path))
        if self.path[:1] != [0] or self.path[-1] >= max(self.nodes, 1) or not rising:
            raise ValueError(f"path must go from node 0 through the {self.nodes} nodes, got {shown(self.path)}")
        if not 1 <= len(self.emitted) <= len(self.path):
            raise ValueError(f"emitted must hold 1 to {len(self.path)} tokens, as path does, got {shown(self.emitted)}")
        return self
