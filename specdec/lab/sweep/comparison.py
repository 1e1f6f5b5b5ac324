"""`specdec.compare`: drafters side by side on one target, the result in words, as a table and as a chart."""

import html
import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Column, Table

from specdec.arguments import as_sampling, as_target, as_tree, as_verifier, check_drafter, check_prompts, check_types
from specdec.cli.terminal import console, print_table
from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.formats import load_drafter
from specdec.lab.models import own_names, read_entry, short_name
from specdec.lab.sweep.turns import PARTS, ComparedWay, Score, Tally, decode_in_turn, ratio
from specdec.lab.traces.metrics import Interval, entry
from specdec.model.language_model import LanguageModel
from specdec.schema import named_arguments
from specdec.structs import Sampling, Verifier
from specdec.text import Prompt, as_prompts
from specdec.training.build import instantiate
from specdec.verify import make_verifier

if TYPE_CHECKING:  # matplotlib is imported when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIELDS = ("draft", "name", "tree", "verifier", "token_map", "compile")
FEW = 10  # prompts, below which a bootstrap has little to draw from
SMALL = 4  # nodes of a tree, for which a smaller one is no advice
COLUMNS: dict[str, Any] = {
    "": "left", "tree (topk/steps/tokens)": "left", "tau": "right", "accepted to depth, of all rounds": "right",
    "tokens/s": "right", "to plain": "right", "ms a round: draft, verify": "left", "lossless": "left",
}  # fmt: skip
OPTIONAL = ("ms a round: draft, verify", "accepted to depth, of all rounds")  # columns
WIDTH = 180  # of a table where there is no terminal
SMALLER = "Smaller trees cost less a round, such as a chain of 3 (topk 1, steps 3), and"


@dataclass
class Comparison:
    """What `compare` found: a score for each drafter, in order. It prints as a table with a summary in words."""

    scores: list[Score]
    plain_tokens_per_second: float
    tallies: dict[str, Tally]  # by name; plain decoding under ""
    compiled: bool = False  # plain decoding's rounds

    @property
    def verdict(self) -> str:
        """The result in sentences: which drafter is fastest, whether it pays, and whether texts are the target's.

        It also names the drafters that are not significantly slower. Intervals are of 95 % over prompts; a ratio whose
        interval contains 1 is no significant difference.
        """
        best = max(self.scores, key=lambda s: s.ratio_to_plain)
        large = any(s.num_draft_tokens > SMALL for s in self.scores)
        remedy = f"{SMALLER + ' ' if large else ''}`specdec tune` finds what is fastest here."
        low, high = best.ratio_interval
        times = f"{best.ratio_to_plain:.2f} times as fast as plain decoding"
        known = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
        if not known:
            said = [f"{best.name} was {times}. One prompt says nothing of others: give several."]
        elif low > 1:
            said = [f"{best.name} is {times}{known}."]
        elif high < 1:
            said = [f"No drafter pays here: {best.name}, the nearest, is {times}{known}. {remedy}"]
        else:
            said = [f"No drafter is shown to pay: {best.name} came out {times}{known}. Give more prompts. {remedy}"]
        fastest, others = self.tallies[best.name], [s.name for s in self.scores if s is not best and known]
        intervals = {name: ratio(fastest, self.tallies[name])[1] for name in others}
        if even := [name for name, (low, high) in intervals.items() if low <= 1 <= high]:
            said.append(f"No significant difference from it: {', '.join(even)}.")
        few = [f"{best.prompts} prompts are few, and the intervals rough."] if known and best.prompts < FEW else []
        return " ".join([*said, *self._texts(), *few])

    def _texts(self) -> list[str]:
        lossy = [s.name for s in self.scores if not s.lossless]
        wrong = [s for s in self.scores if s.lossless and s.settled and s.same_as_plain < s.prompts]
        said = [f"Lossy: {', '.join(lossy)}."] if lossy else []
        if wrong:
            counts = ", ".join(f"{s.name} {s.prompts - s.same_as_plain} of {s.prompts}" for s in wrong)
            said.append(f"Texts that differ from plain decoding's: {counts}.")
            own, plains = ("eager", "compiled") if self.compiled else ("compiled", "eager")
            if apart := ", ".join(s.name for s in wrong if s.compiled != self.compiled):
                said.append(f"Rounding may be why: plain decoding is {plains}, the rounds of {apart} are {own}.")
        elif any(s.lossless and s.settled for s in self.scores):
            said.append(f"All texts{' of the others' if lossy else ''} are plain decoding's.")
        return said

    def _recorded(self) -> Console:
        shown = console(WIDTH, file=StringIO(), record=True, force_jupyter=False)
        print_table(shown, self._table(), OPTIONAL)
        return shown

    def __str__(self) -> str:
        """Return the table and the result in sentences."""
        return f"{self._recorded().export_text().rstrip()}\n{self.verdict}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        pre = '<pre style="white-space: pre; line-height: 1.1">{code}</pre>'
        table = self._recorded().export_html(inline_styles=True, code_format=pre)
        return f"{table}<p>{html.escape(self.verdict)}</p>"

    def print(self) -> None:
        """Print the table and the summary on the terminal."""
        print_table(console(WIDTH), self._table(), OPTIONAL)
        print(self.verdict)

    def _table(self) -> Table:
        columns = (Column(name, justify=side) for name, side in COLUMNS.items())
        table = Table(*columns, title=f"plain decoding: {self.plain_tokens_per_second:.0f} tokens/s")
        for s in self.scores:
            parts = s.milliseconds_a_round
            claim = "yes" if s.lossless else f"NO: {s.rule}"
            table.add_row(
                s.name,
                s.tree,
                f"{s.tau:.2f}{_interval(s.tau_interval)}",
                " ".join(f"{100 * a:.0f}" for a in s.acceptance_by_depth) + " %",
                f"{s.tokens_per_second:.0f}",
                f"{s.ratio_to_plain:.2f}{_interval(s.ratio_interval)}",
                f"{parts['round']:.1f} in all" if parts["round"] else f"{parts['draft']:.1f}, {parts['verify']:.1f}",
                f"{claim}, {s.same_as_plain} of {s.prompts} identical" if s.settled else claim,
            )
        return table

    def plot(self, title: str = "") -> "Figure":
        """Return a figure of matplotlib: tau and speed with intervals, and the parts of a round."""
        from matplotlib import rc_context

        from specdec.lab.figure_style import COLOURS, STYLE, stacked_bars, subplots

        scores = self.scores
        with rc_context(STYLE):
            figure, (left, middle, right) = subplots(1, 3, figsize=(14, 1.5 + 0.5 * len(scores)), sharey=True)
            figure.suptitle(title)
            _bars(left, [s.tau for s in scores], [s.tau_interval for s in scores], COLOURS[0])
            _bars(middle, [s.ratio_to_plain for s in scores], [s.ratio_interval for s in scores], COLOURS[2])
            left.set_xlabel("tau: tokens per round")
            middle.set_xlabel("speed, times plain decoding")
            left.set_yticks(range(len(scores)), [s.name + ("" if s.lossless else "\n(lossy)") for s in scores])
            left.invert_yaxis()
            stacked_bars(right, {part: [s.milliseconds_a_round[part] for s in scores] for part in PARTS})
            right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)  # above: it would cover a bar
            for axis in (left, middle, right):
                axis.grid(axis="y", visible=False)
        return figure


def _interval(interval: Interval) -> str:
    return "" if math.isnan(interval[0]) else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def _bars(axis: "Axes", values: list[float], intervals: list[Interval], colour: str) -> None:
    """Bars with their values, intervals where there are any, and a line at plain decoding's 1."""
    from specdec.lab.figure_style import error_bars

    known = [entry(value, *interval) for value, interval in zip(values, intervals, strict=True)]
    axis.barh(range(len(values)), values, color=colour, xerr=error_bars(known), ecolor="#555555", capsize=2)
    axis.axvline(1, color="grey", linewidth=0.8)
    for place, one in enumerate(known):
        end: Any = one["high"] or one["value"]
        axis.text(end, place, f"  {one['value']:.2f}", va="center", zorder=3,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})  # fmt: skip
    axis.margins(x=0.15)


@named_arguments
def compare(
    target: LanguageModel | str | Path,
    drafts: str | Drafter | abc.Sequence | Mapping,
    prompts: Prompt | abc.Sequence[Prompt],
    *,
    tree: TreePolicy | str | dict | None = None,
    verifier: Verifier | str = "match",
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    raw: bool = False,
    trials: int = 1,
    token_map: str | Path | None = None,
    compile: bool = False,
    progress: bool | None = None,
    **words: float,
) -> Comparison:
    """Decode every prompt plainly and with each drafter, in turn, after one prompt of warm-up.

    Args:
        target: The model or its name.
        drafts: Drafters or names; or a mapping from your own names to them. An entry may be a mapping with `draft`,
            and with its own `tree`, `verifier`, `token_map`, `compile` and `name`.
        prompts: As for `specdec.answer`.
        max_new_tokens: As for `specdec.answer`.
        sampling: As for `specdec.answer`.
        seed: As for `specdec.answer`.
        raw: As for `specdec.answer`.
        tree: Tree of entries without one; by default the drafter's usual one.
        verifier: Verifier of entries without one.
        trials: Number of turns.
        token_map: Token map of entries without one.
        compile: Compile plain rounds, and those of all drafters that can be captured.
        progress: Show a bar; None does so on a terminal.
        **words: Fields of `Sampling`, such as `temperature`.

    Returns:
        The comparison, which prints as a table with a summary.

    Raises:
        ValueError: A name does not exist, or something does not fit the target.
    """
    check_types(max_new_tokens=max_new_tokens, seed=seed, raw=raw, trials=trials, compile=compile, sampling=sampling)
    check_prompts(prompts, "compare(target, drafts, prompts)")
    sampling = cast(Sampling | None, as_sampling(sampling, words))
    target, batch = as_target(target), as_prompts(prompts)
    given: dict[str, Any] = {"tree": tree, "verifier": verifier, "token_map": token_map, "compile": compile}
    ways = {name: way_of(name, entry, target, given) for name, entry in named(drafts).items()}
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed, "raw": raw}
    how |= {"trials": trials, "compile": compile, "progress": progress}
    tallies, scores = decode_in_turn(target, batch, ways, **how)
    return Comparison(scores, tallies[""].rate, tallies, compile)


def named(drafts: str | Drafter | abc.Sequence | Mapping) -> dict[str, object]:
    """Return the drafter entries by name.

    An entry of a list gets the name that it gives, else the end of its path (`short_name`), or its full path if that is
    not unique. Raises ValueError if there is no entry, or if two names are still the same.
    """
    if isinstance(drafts, Mapping) and "draft" not in drafts:
        found = dict(drafts)
    else:
        entries = list(drafts) if isinstance(drafts, list | tuple) else [drafts]
        found = dict(zip(own_names(entries, _name), entries, strict=True))
    if not found:
        raise ValueError("no drafter was given: give drafts, such as [demo/mtp, ngram]")
    return found


def _name(entry: object, whole: bool) -> str:
    if isinstance(entry, Mapping):
        return str(entry.get("name") or _name(entry.get("draft"), whole))
    if isinstance(entry, str | Path):
        return str(entry) if whole else short_name(entry)
    return type(entry).__name__


def way_of(name: str, entry: object, target: LanguageModel, given: dict) -> ComparedWay:
    """What an entry describes; `given` has what holds where it says nothing. Raises ValueError for an unknown field."""
    stated = read_entry(entry, FIELDS, f"entries.{name}")
    whole: Any = given | stated
    drafter, rule, tree = whole["draft"], whole["verifier"], whole["tree"]
    check_drafter(drafter)
    if not isinstance(drafter, Drafter):
        drafter = load_drafter(drafter, target, token_map=whole["token_map"])
    tree = instantiate(tree) if isinstance(tree, Mapping) else as_tree(tree, drafter)
    rule = make_verifier(**rule) if isinstance(rule, Mapping) else as_verifier(rule)
    compiled = whole["compile"] and ("compile" in stated or drafter.capturable)
    return ComparedWay(drafter, cast(TreePolicy, tree), rule, compiled)
