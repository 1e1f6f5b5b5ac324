"""What `specdec checkpoint check` prints: a table for each round, an explanation of its numbers, and the result."""

import textwrap

from specdec.cli.parser import help_width
from specdec.drafters.formats.check import HARDLY, LEVEL, Outcome, Report

COLUMNS = "{:>5}  {:13} {:17} {:9}{}"


def as_json(report: Report) -> dict:
    """The report as plain values. `readings` are those of the first round, the declared one first."""
    return {
        "readings": [_row(outcome) for outcome in report.rounds[0]],
        "rounds": [[_row(outcome) for outcome in outcomes] for outcomes in report.rounds[1:]],
        "better_reading": report.better_reading,
        "not_told_apart": [outcome.name for outcome in _rivals(report)],
        "taps_searched": report.searched,
        "answers": report.answers,
        "positions": report.positions,
        "loads": report.declared.refused is None,
        "verdict": verdict(report),
    }


def _row(outcome: Outcome) -> dict:
    return {
        "reading": outcome.name,
        "tau": outcome.tau,
        "tau_interval": outcome.interval,
        "gain": outcome.gain,
        "gain_margin": outcome.margin,
        "verdict": outcome.verdict,
        "better": outcome.verdict == "better",
        "refused": outcome.refused,
    }


def as_text(report: Report) -> str:
    """Tables, explanation and result."""
    parts = [_table(outcomes) for outcomes in report.rounds]
    for i in range(1, len(parts)):
        parts[i] = f"With {'; '.join(outcome.name for outcome in report.chosen[:i])}:\n{parts[i]}"
    return "\n\n".join([*parts, *(textwrap.fill(words, help_width()) for words in (_legend(report), verdict(report)))])


def _table(outcomes: list[Outcome]) -> str:
    lines, first = [COLUMNS.format("tau", "95 % interval", "gain a token", "", "reading")], outcomes[0]
    likewise = [o for o in outcomes[1:] if o.refused and o.refused == first.refused]
    for o in outcomes:
        if o in likewise:
            continue
        tau = "-" if o.tau is None else f"{o.tau:.2f}"
        interval = "" if o.interval is None else "{:.2f} to {:.2f}".format(*o.interval)
        gain = "" if o.gain is None else f"{o.gain:+.3f} ± {o.margin:.3f}"
        refused = f": refused, {o.refused}" if o.refused else ""
        lines.append(COLUMNS.format(tau, interval, gain, o.verdict, o.name + refused))
    if likewise:
        lines.append(f"{len(likewise)} other readings are refused likewise.")
    return "\n".join(lines)


def _legend(report: Report) -> str:
    text = (
        f"tau is that of greedy decoding with a chain of {report.steps}, over {report.answers} answers of the target; "
        "its interval is over answers. A gain is that of the log-probability which the drafter gives to the answers' "
        f"tokens, in nats, over the first line, at {report.positions} positions. 'noise' is a gain that chance "
        f"explains at a level of {LEVEL:g}, divided among the readings tried, and for taps among those tried. "
        "'likelier' has a gain and yet no longer chains."
    )
    if any(report.searched):
        text += f" The taps in the table are the best of {max(report.searched)} that were tried."
    return text


def verdict(report: Report) -> str:
    """What follows, in some sentences."""
    best, declared = report.rounds[-1][0], report.declared
    if report.chosen:
        best = report.chosen[-1]
        was = "does not load" if declared.refused else f"has tau {declared.tau:.2f}"
        text = (
            f"Another reading does better: '{report.better_reading}' has tau {best.tau:.2f}; as declared the drafter "
            f"{was}."
        )
    else:
        text = "No other reading does better than the declared one."
        if above := [o for o in _rivals(report) if o.reach > declared.reach]:
            top = max(above, key=lambda o: o.reach)
            text = (
                f"'{top.name}' came out with tau {top.tau:.2f} and the declared reading with {declared.tau:.2f}, which "
                "chance explains: no other reading is shown to do better."
            )
    if best.followed is not None and not best.followed.logp.isfinite().all():
        return f"{text} But it computes NaN or Inf."
    if best.reach < HARDLY:
        return (
            f"{text} But it drafts next to nothing (tau {best.tau:.2f}), and no reading that was tried explains that: "
            "the weights may be damaged or untrained, or belong to another target, tokenizer or order of tokens."
        )
    rivals = _rivals(report)
    if not rivals:
        return f"{text} All others are worse."
    names = "; ".join(f"'{outcome.name}'" for outcome in rivals)
    furthest = max(abs(outcome.gain or 0.0) + (outcome.margin or 0.0) for outcome in rivals)
    return (
        f"{text} No significant difference from it: {names}. On these answers they are within {furthest:.3f} nats per "
        "token of it, so which of them the drafter was trained with cannot be seen here; more answers (--prompts, "
        "--max-new-tokens) show smaller differences."
    )


def _rivals(report: Report) -> list[Outcome]:
    """The readings without a significant difference from the best one."""
    return [outcome for outcome in report.rounds[-1][1:] if outcome.verdict in ("noise", "likelier")]
