"""A row of a training log, as a model of pydantic."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


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
