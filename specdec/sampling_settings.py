"""How tokens are drawn: the settings that Python, commands, settings files and requests share."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypedDict

from specdec.schema import check_value

# Of the settings of `Sampling`: penalties change logits before the temperature, filters drop tokens after it.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FILTERS = ("top_k", "top_p", "min_p")
# The smallest temperature above 0: divided by less, logits overflow, and infinite ones have no largest.
COLDEST = 1e-20


def setting(default: float, text: str, **limits: float) -> Any:
    """Return a field that is off at `default`. text: of the flag's help. limits: of a request, as pydantic has them."""
    return field(default=default, metadata={"help": text, "limits": limits})


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing a token from the target's logits, applied in the order of docs/sampling.md.

    Command lines, settings files, requests and `generate` use the names, types and defaults of these fields.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the most likely tokens of this total probability; 1 is off.
        min_p: Drop tokens below this share of the highest probability; 0 is off.
        repetition_penalty: Factor for tokens of prompt and output; 1 is off.
        presence_penalty: Subtracted from logits of tokens in the output, -2 to 2; 0 is off.
        frequency_penalty: The same for each occurrence, -2 to 2; 0 is off.
    """

    temperature: float = setting(0.0, "0 (default) is greedy", ge=0, le=1e6)
    top_k: int = setting(0, "keep the N most likely tokens; 0 (default) is off", ge=0)
    top_p: float = setting(1.0, "keep the most likely tokens of mass X; 1 (default) is off", gt=0, le=1)
    min_p: float = setting(0.0, "drop tokens below X times the most likely; 0 (default) is off", ge=0, le=1)
    repetition_penalty: float = setting(1.0, "of prompt and output; 1 (default) is off", gt=0, le=1e6)
    presence_penalty: float = setting(0.0, "of the output, -2 to 2; 0 (default) is off", ge=-2, le=2)
    frequency_penalty: float = setting(0.0, "the same, for each occurrence; 0 (default) is off", ge=-2, le=2)

    def __post_init__(self) -> None:
        """Check types and ranges. Raises ValueError for the first wrong value."""
        for setting in fields(self):
            known = int if setting.type is int else int | float  # a quick look, before `check_value`
            if not isinstance(value := getattr(self, setting.name), known) or isinstance(value, bool):
                check_value(setting, value, setting.name)
                number = int(value) if setting.type is int else float(value)  # of NumPy's, which JSON does not take
                object.__setattr__(self, setting.name, number)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if 0 < self.temperature < COLDEST:  # the same law: at both it is the most likely token, or one of equals
            object.__setattr__(self, "temperature", COLDEST)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if self.greedy and not self.active.isdisjoint(FILTERS):
            names = f"{', '.join(FILTERS[:-1])} and {FILTERS[-1]}"
            raise ValueError(f"{names} need a temperature above 0: at temperature 0 decoding is greedy")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a positive number (1 is off), got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must lie in [-2, 2] (0 is off), got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty is in effect."""
        return not self.active.isdisjoint(PENALTIES)

    @cached_property
    def active(self) -> frozenset[str]:
        """The names of the settings that are not off, which is to say not at their defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


class SamplingWords(TypedDict, total=False):
    """The fields of `Sampling` as arguments of a function. None stands for the default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
