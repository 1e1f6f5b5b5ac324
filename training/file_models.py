"""What files of a training run hold, as models of pydantic: a row of its log, and cache.json of a cache of features.

Only readers of these files import this module: training starts without pydantic.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from specdec.engine.trace_lines import Count, Strict


class LogRow(BaseModel):
    """What was measured at a step: numbers by name, and lists of them with a value for each step of the unroll."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float | list[float] | None]

    split: str
    step: Annotated[int, Field(ge=0)]
    # What the curves show
    loss: float | None = None
    gradient_norm: float | None = None
    tau: float | None = None
    expected_tau: float | None = None
    expected_tau_sampled: float | None = None
    accuracy: list[float] = Field(default_factory=list)


class Manifest(Strict):
    """The fields of cache.json that are read before shards are opened. A shard belongs to one manifest, all of it."""

    keep: Annotated[int, Field(ge=1)] | None
    shards: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    taps: list[Count]
    sizes: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
