"""Decode random cases, and compare every row with its plain decoding alone.

    python tests/engine/fuzz.py --seconds 600

fuzz_cases.py draws a case from its number: a target, a drafter, a tree, and rows with samplings, penalties, grammars,
stop conditions and limits of their own. Rows join one after the other, some are aborted, prompts are read in parts or
from the prefix cache, and rounds overlap, use graphs or follow an adaptive policy. Tokens, finish reasons and
log-probabilities are compared. Sampled text must match too: by the default rule the noise of a row and position is the
same. `--first NUMBER --seconds 0` repeats a failed case. The exit code is 1 if a row differs.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.extend(map(str, Path(__file__).resolve().parents[1:3]))

import torch
from fuzz_cases import Case, Row, draw

from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.model.target import Target


def alone(target: Target, row: Row) -> Sequence:
    """Decode one row plainly."""
    engine = Engine(target)
    engine.reserve(1, target.config.context)
    sequence = row.join(engine)
    while engine.step() is not None:
        pass
    return sequence


def together(case: Case) -> list[Sequence]:
    """Decode all rows speculatively. They join as the schedule says; further rows join and are aborted."""
    engine, rng = Engine(case.target, case.drafter, case.tree, prefixes=case.prefixes, **case.options), case.schedule
    engine.reserve(rng.randint(1, len(case.rows)), case.target.config.context, part=case.part)
    if engine.prefixes is not None:
        engine.prefixes.least = 2
    waiting, joined, passing = list(case.rows), [], []
    for _ in range(5000):
        if waiting and (not joined or rng.random() < 0.5):
            joined.append(waiting.pop(0).join(engine))
            if rng.random() < 0.15:
                passing.append(rng.choice(case.rows).join(engine))
        if passing and rng.random() < 0.2:
            engine.abort(passing.pop())
        if engine.step() is None and not waiting:
            return joined
    raise RuntimeError("it does not end within 5000 steps")


def differences(wanted: Sequence, got: Sequence) -> list[str]:
    if (wanted.tokens, wanted.finish) != (got.tokens, got.finish):
        return [f"has {got.tokens} ({got.finish}), and alone {wanted.tokens} ({wanted.finish})"]
    for name in ("logprobs", "likely"):
        counts = [len(getattr(sequence, name) or ()) for sequence in (got, wanted)]
        if counts[0] != counts[1]:
            return [f"has {counts[0]} {name}, and alone {counts[1]}"]
    if got.logprobs:
        ours, theirs = torch.tensor(got.logprobs), torch.tensor(wanted.logprobs)
        if not torch.allclose(ours, theirs, rtol=0, atol=1e-3):
            return [f"has log-probabilities that are up to {(ours - theirs).abs().max():.2g} from those alone"]
    return []


def failures(number: int) -> list[str]:
    """What is wrong with the case of this number, after its description; empty if nothing is."""
    about = f"case {number}: not drawn"
    try:
        case = draw(number)
        about = f"case {number}: {case.about}"
        wanted = [alone(case.target, row) for row in case.rows]
        pairs = zip(wanted, together(case), strict=True)
        found = [f"row {place} {what}" for place, pair in enumerate(pairs) for what in differences(*pair)]
    except Exception:  # a failure too, and the next case follows
        found = [traceback.format_exc()]
    return [about, *found] if found else []


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", type=int, default=0, help="number of the first case (default 0)")
    p.add_argument("--seconds", type=float, default=60.0, help="start no case after this time (default 60)")
    args = p.parse_args()
    torch.set_num_threads(1)  # a second thread does not speed up tiny products
    end, number, wrong = time.monotonic() + args.seconds, args.first, 0
    while number == args.first or time.monotonic() < end:
        if found := failures(number):
            print(*found, sep="\n  ", flush=True)
        number, wrong = number + 1, wrong + bool(found)
    print(json.dumps({"cases": number - args.first, "wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
