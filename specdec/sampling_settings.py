"""How tokens are drawn: the settings that Python, commands, settings files and requests share."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypedDict

from specdec.schema import check_value, ranged

# Of the settings of `Sampling`: penalties change logits before the temperature, filters drop tokens after it.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FILTERS = ("top_k", "top_p", "min_p")
# The smallest temperature above 0: divided by less, logits overflow, and infinite ones have no largest.
COLDEST = 1e-20


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

    temperature: float = ranged(0, 1e6, 0.0, help="0 (default) is greedy")
    top_k: int = ranged(0, 1 << 31, 0, help="keep the N most likely tokens; 0 (default) is off")
    top_p: float = ranged(0, 1, 1.0, above=True, help="keep the most likely tokens of mass X; 1 (default) is off")
    min_p: float = ranged(0, 1, 0.0, help="drop tokens below X times the most likely; 0 (default) is off")
    repetition_penalty: float = ranged(0, 1e6, 1.0, above=True, help="of prompt and output; 1 (default) is off")
    presence_penalty: float = ranged(-2, 2, 0.0, help="of the output, -2 to 2; 0 (default) is off")
    frequency_penalty: float = ranged(-2, 2, 0.0, help="the same, for each occurrence; 0 (default) is off")

    def __post_init__(self) -> None:
        """Check types and ranges. Raises ValueError for the first wrong value."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            check_value(setting, value, setting.name)
            number = int(value) if setting.type is int else float(value)  # of NumPy's, which JSON does not take
            object.__setattr__(self, setting.name, number)
        if 0 < self.temperature < COLDEST:  # the same law: at both it is the most likely token, or one of equals
            object.__setattr__(self, "temperature", COLDEST)
        if self.greedy and not self.active.isdisjoint(FILTERS):
            raise ValueError("top_k, top_p and min_p need a temperature above 0: at temperature 0 decoding is greedy")

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
