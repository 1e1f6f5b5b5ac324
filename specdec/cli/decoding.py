"""The decoding of the prompts of `specdec generate`, and with --compare of the same ones plainly."""

from dataclasses import dataclass

from specdec.api import Generation
from specdec.cli.screen import Screen
from specdec.cli.session import Session

LONG_ENOUGH, PASSES = 6.0, 5  # seconds of decoding, and passes, after which speeds are believed


@dataclass
class Decoded:
    """What was decoded, in the order of the prompts."""

    done: list[Generation]
    baseline: list[Generation]  # plain decoding of the same, with --compare; else empty
    turns: list[tuple[float, float]]  # tokens/s, speculatively and plainly, of further passes over all prompts


def run_prompts(session: Session) -> Decoded:
    """Decode every prompt of a session, batch by batch, and print the text as it grows.

    After SIGINT or SIGTERM the last generation is partial, and it has no plain decoding to compare with.
    """
    args, prompts = session.args, session.prompts
    single = args.batch_size == 1
    if args.compare:  # the first call of each kind pays for memory and code that is loaded then
        for plain in (False, True):
            session.run(prompts[:1], plain=plain, max_new_tokens=8)
    done, baseline = [], []
    for start in range(0, len(prompts), args.batch_size):
        if session.signals.asked:
            break
        batch = prompts[start : start + args.batch_size]
        if len(prompts) > 1:
            print(f"\n--- {start + 1}" + (f" to {start + len(batch)}" if not single else "") + f" of {len(prompts)}")
        screen = Screen(session.target, quiet=not single, trees=args.show_trees, stops=session.stops)
        done.append(session.run(batch, screen, first=start))
        screen.end()
        if not single:
            print("\n".join(done[-1].text))
        if args.compare and not session.signals.asked:
            baseline.append(session.run(batch, plain=True, first=start))
    if len(baseline) == len(done) and session.signals.asked:
        baseline = baseline[:-1]  # the signal came while it was made
    turns = take_turns(session, done + baseline) if args.compare else []
    return Decoded(done, baseline, turns)


def take_turns(session: Session, first: list[Generation]) -> list[tuple[float, float]]:
    """Return tokens per second, speculative and plain, of further silent passes over all prompts.

    A short first pass cannot be timed well. Passes repeat up to `LONG_ENOUGH` seconds or `PASSES` in all, the first
    included.

    Args:
        session: Its prompts are decoded again.
        first: The generations of the first pass.
    """
    spent, prompts = sum(part.result.seconds for part in first), session.prompts
    turns: list[tuple[float, float]] = []
    size, together = session.args.batch_size, session.args.tp_plan is not None  # whose clocks differ
    if session.drafter is None or together:
        return []
    while spent < LONG_ENOUGH and len(turns) < PASSES - 1 and not session.signals.asked:
        ways = []
        for plain in (False, True):
            starts = range(0, len(prompts), size)
            ways.append(merged([session.run(prompts[i : i + size], plain=plain, first=i) for i in starts]))
        if not session.signals.asked:
            turns.append((ways[0].tokens_per_second, ways[1].tokens_per_second))
        spent += sum(way.result.seconds for way in ways)
    return turns


def merged(parts: list[Generation]) -> Generation:
    """Return several generations as one: rows concatenated, times added."""
    result = parts[0].result
    for part in parts[1:]:
        keys = result.parts.keys() | part.result.parts.keys()
        result = type(result)(
            result.rows + part.result.rows,
            result.seconds + part.result.seconds,
            result.prefill_seconds + part.result.prefill_seconds,
            {key: result.parts.get(key, 0) + part.result.parts.get(key, 0) for key in keys},
        )
    text = [t for part in parts for t in part.text]
    return Generation(text, result.rows, result, parts[0].steps, parts[0].verifier)
