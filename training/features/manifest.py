"""What cache.json of a cache of features holds, as a model of pydantic."""

from typing import Annotated

from pydantic import Field

from specdec.engine.trace_lines import Count, Strict


class Manifest(Strict):
    """The fields that are read before shards are opened. A shard belongs to one manifest, all of it."""

    keep: Annotated[int, Field(ge=1)] | None
    shards: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    taps: list[Count]
    sizes: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
