"""The measured acceptance of a drafter: `acceptance.json`, stored with its weights.

The drafter drafts along answers of the target, from every token. For each place the file stores the rank of each
following token among the drafter's best children, up to the first token that was not among them. Ranks are digits of
base 36, so "00a" means rank 0, rank 0, rank 10, then none; "-" means that the first token was not among the children.

From that follow the acceptance by depth and rank, and the tau of every static tree, round by round as decoding goes.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from itertools import accumulate, takewhile
from math import comb
from pathlib import Path
from typing import Any

from specdec.cli.limits import LIMITS
from specdec.cli.reading import parse_json, read_text
from specdec.schema import check, ranged, shown

FILE = "acceptance.json"
FORMAT = "specdec acceptance 1"
DIGITS = string.digits + string.ascii_lowercase
NONE = "-"
WORD = re.compile(r"[0-9a-z]+|-")


@dataclass(frozen=True)
class AlongTexts:
    """What a drafter proposed along answers that the target gave at one temperature."""

    temperature: float = ranged(0, LIMITS["temperature"].metadata["high"])
    topk: int = ranged(1, len(DIGITS))  # children that were looked at
    steps: int = ranged(1, LIMITS["steps"].metadata["high"])  # levels that were looked at
    texts: tuple[str, ...]  # type: ignore[misc]  # of each answer, a word for each token but the last

    def __post_init__(self) -> None:
        """Raise ValueError for a field out of range, or for a word that is no list of ranks below `topk`."""
        check(type(self), vars(self), "")
        for text in self.texts:
            for word in text.split():
                too_large = word != NONE and max(word) > DIGITS[self.topk - 1]
                if not WORD.fullmatch(word) or len(word) > self.steps or too_large:
                    raise ValueError(f"{word!r} is no word of ranks below {self.topk} on at most {self.steps} levels")

    @cached_property
    def places(self) -> list[list[str]]:
        """The ranks at every place of every answer, "" where the next token was not among the children."""
        return [[word.replace(NONE, "") for word in text.split()] for text in self.texts]

    @property
    def empty(self) -> bool:
        """Every answer is one token at most, so nothing was drafted along them."""
        return not any(self.places)

    def table(self) -> list[list[float]]:
        """Return conditional acceptance rates: [d-1][r] for the child of rank r at depth d.

        The rate is the share of places where the answer's token at depth d is that child. Only places count that
        reached depth d, so the tokens before were children too. Every place has the same weight.
        """
        hits = [[0] * self.topk for _ in range(self.steps)]
        tries = [0] * self.steps
        for words in self.places:
            for at, word in enumerate(words):
                for depth in range(min(len(word) + 1, self.steps, len(words) - at)):
                    tries[depth] += 1
                    if depth < len(word):
                        hits[depth][DIGITS.index(word[depth])] += 1
        return [[hit / max(of, 1) for hit in row] for row, of in zip(hits, tries, strict=True)]

    def tau(self, paths: Sequence[Sequence[int]], batch: int = 1) -> float:
        """Tokens a round of the static tree of these paths of ranks, had it drafted along the answers.

        batch: number of answers of equal length that are decoded together, until the slowest has ended; on average.
        """
        nodes = {"".join(DIGITS[rank] for rank in path) for path in paths}

        def accepted(words: list[str], at: int) -> int:
            return sum(1 for _ in takewhile(nodes.__contains__, accumulate(words[at])))

        rounds = [len(round_starts(len(words), partial(accepted, words))) for words in self.places]
        if batch == 1:
            return sum(map(len, self.places)) / max(sum(rounds), 1)
        rates = sorted(count / len(words) for count, words in zip(rounds, self.places, strict=True) if words)
        if not rates:
            return 0.0
        chosen = min(batch, len(rates))
        # Of comb(len(rates), chosen) choices the i-th rate is the largest in comb(i, chosen - 1).
        slowest = sum(comb(i, chosen - 1) * rate for i, rate in enumerate(rates)) / comb(len(rates), chosen)
        return 1 / slowest


def round_starts(places: int, accepted: Callable[[int], int]) -> list[int]:
    """Return the places of a text at which rounds begin, where a round at a place accepts so many drafted tokens."""
    found, at = [], 0
    while at < places:
        found.append(at)
        at += accepted(at) + 1
    return found


def word_of(ranks: Iterable[int], topk: int) -> str:
    """Return the ranks at one place as a word, up to the first that is not below `topk`."""
    return "".join(DIGITS[rank] for rank in takewhile(lambda rank: rank < topk, ranks)) or NONE


@dataclass(frozen=True)
class Acceptance:
    """A drafter's measured acceptance, at one or more temperatures in ascending order."""

    measured: tuple[AlongTexts, ...]
    about: str = ""  # what was answered, in words

    def tau(self, paths: Sequence[Sequence[int]], temperature: float, batch: int = 1) -> float:
        """Return `AlongTexts.tau` at any temperature: interpolated linearly, or that of the nearest measured one."""
        below = [m for m in self.measured if m.temperature <= temperature] or [self.measured[0]]
        above = [m for m in self.measured if m.temperature >= temperature] or [self.measured[-1]]
        low, high = below[-1], above[0]
        if low.temperature >= high.temperature:
            return high.tau(paths, batch)
        share = (temperature - low.temperature) / (high.temperature - low.temperature)
        return (1 - share) * low.tau(paths, batch) + share * high.tau(paths, batch)

    def nearest(self, temperature: float) -> AlongTexts:
        """Return the measurement whose temperature is nearest to `temperature`."""
        return min(self.measured, key=lambda m: abs(m.temperature - temperature))

    def as_text(self) -> str:
        """The content of the file."""
        content = {"format": FORMAT, "about": self.about, "measured": [asdict(m) for m in self.measured]}
        return json.dumps(content, indent=1) + "\n"


def read_acceptance(folder: Path) -> Acceptance | None:
    """What a drafter's folder says; None if it says nothing. ValueError, one sentence, if the file is damaged."""
    file = folder / FILE
    if not file.exists() and not file.is_symlink():
        return None
    try:
        content = parse_json(read_text(file, "JSON"), FILE)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        about, measured = content.get("about"), content.get("measured")
        if not isinstance(about, str):
            raise ValueError(f"about must be a text, got {shown(about)}")
        if not isinstance(measured, list) or not measured:
            raise ValueError(f"measured must be a list with entries, got {shown(measured)}")
        return Acceptance(tuple(sorted(map(_entry, measured), key=lambda row: row.temperature)), about)
    except ValueError as error:
        wrong = f"{file} holds no measured acceptance ({error})"
        raise ValueError(f"{wrong}: remove it, or write it again with specdec tune tree") from None


def _entry(entry: object) -> AlongTexts:
    """What an entry of `measured` says."""
    names = [setting.name for setting in fields(AlongTexts)]
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ValueError(f"an entry of measured has {', '.join(names)}, and not {shown(entry)}")
    check(AlongTexts, entry, "")  # before the texts become a tuple, which one text would become too
    given: dict[str, Any] = entry | {"texts": tuple(entry["texts"])}
    along = AlongTexts(**given)
    if along.empty:  # every tree would have a tau of 0
        raise ValueError(f"the texts at temperature {along.temperature:g} hold no word")
    return along
