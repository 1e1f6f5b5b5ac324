"""What superset.json holds, as models of pydantic."""

from typing import Annotated

from pydantic import Field, model_validator

from specdec.engine.trace_lines import STEPS, Count, Sampled, Strict


class Text(Strict, extra="forbid"):
    question: Count
    prompt: list[Count]
    tokens: Annotated[list[Count], Field(min_length=1)]
    beyond: list[Count]


class Header(Strict):
    steps: Annotated[int, Field(ge=1, le=STEPS)]
    max_new_tokens: Count
    sampling: Sampled
    texts: list[Text]
    candidates: list[Annotated[tuple[str, Annotated[int, Field(ge=1)]], Field(strict=False)]]  # a list in JSON
    along: list[str]
    marginals: list[str] = Field(default_factory=list)
    settings: dict = Field(default_factory=dict)

    @model_validator(mode="after")
    def check_beyond(self) -> "Header":
        """Raise ValueError for a text that ends before the deepest draft."""
        for number, text in enumerate(self.texts):
            if len(text.beyond) < self.steps:
                raise ValueError(f"texts[{number}].beyond must hold {self.steps} tokens, got {len(text.beyond)}")
        return self
