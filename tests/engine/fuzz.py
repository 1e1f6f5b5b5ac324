"""Random combinations of all that decodes: does every row get the text that it gets alone, decoded plainly?

    python scripts/fuzz.py --seconds 600 --out fuzz.json

A case is drawn from its number (scripts/fuzz_cases.py): a target with windows, biases, soft caps and short contexts; a
drafter, with few tokens to propose or weights in int8; a tree that fits it; rows with samplings, penalties, grammars,
stops, ends and limits of their own. They join one after the other, some are aborted, prompts are read in parts, or from
where they differ from others, and rounds overlap, are replayed or follow an adaptive policy. Tokens, ends and
log-probabilities are compared. By the default rule drawn text is plain decoding's too, as the noise of a row and
position is the same. A mistake is printed with its number, and `--first NUMBER --cases 1` is that case again. Ends with
1 if there was one.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import checkout  # noqa: F401
import torch
from fuzz_cases import Case, Row, draw

from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.lab.output import write_json
from specdec.model.target import Target

MOST_STEPS = 5000  # of one case: more, and it does not end


def run(case: Case) -> list[str]:
    """What differs, a sentence each."""
    wanted = [alone(case.target, row) for row in case.rows]
    return [
        f"row {number} {fault}"
        for number, pair in enumerate(zip(wanted, together(case), strict=True))
        for fault in differences(*pair)
    ]


def alone(target: Target, row: Row) -> Sequence:
    engine = Engine(target)
    engine.reserve(1, target.config.context)
    sequence = row.join(engine)
    while engine.step() is not None:
        pass
    return sequence


def together(case: Case) -> list[Sequence]:
    """The rows, drafted for, as the schedule lets them join. Others join too, and are aborted."""
    engine, rng = Engine(case.target, case.drafter, case.tree, prefixes=case.kept, **case.options), case.schedule
    engine.reserve(rng.randint(1, len(case.rows)), case.target.config.context, part=case.part)
    if engine.prefixes is not None:
        engine.prefixes.least = 2
    waiting, joined, passing = list(case.rows), [], []
    for _ in range(MOST_STEPS):
        if waiting and (not joined or rng.random() < 0.5):
            joined.append(waiting.pop(0).join(engine))
            if rng.random() < 0.15:
                passing.append(rng.choice(case.rows).join(engine))
        if passing and rng.random() < 0.2:
            engine.abort(passing.pop())
        if engine.step() is None and not waiting:
            return joined
    raise RuntimeError(f"it does not end within {MOST_STEPS} steps")


def differences(wanted: Sequence, got: Sequence) -> list[str]:
    if (wanted.tokens, wanted.finish) != (got.tokens, got.finish):
        return [f"has {got.tokens} ({got.finish}), and alone {wanted.tokens} ({wanted.finish})"]
    found = []
    for name in ("logprobs", "likely"):
        ours, theirs = getattr(got, name) or (), getattr(wanted, name) or ()
        if len(ours) != len(theirs):
            found.append(f"has {len(ours)} {name}, and alone {len(theirs)}")
    if got.logprobs and not found:
        ours, theirs = torch.tensor(got.logprobs), torch.tensor(wanted.logprobs)
        if not torch.allclose(ours, theirs, rtol=0, atol=1e-3):
            found.append(f"has log-probabilities that are up to {(ours - theirs).abs().max():.2g} from those alone")
    return found


def judge(number: int) -> dict | None:
    """What is wrong with the case of this number; None if nothing is."""
    about = "not drawn"
    try:
        case = draw(number)
        about = case.about
        faults = run(case)
    except Exception as error:  # any other is a fault too, and the next case goes on
        faults = [f"{type(error).__name__}: {error}", traceback.format_exc()]
    return {"case": number, "about": about, "faults": faults} if faults else None


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", type=int, default=0, help="number of the first case (default 0)")
    p.add_argument("--cases", type=int, help="no more than so many")
    p.add_argument("--seconds", type=float, default=60.0, help="begin no case after these (default 60)")
    p.add_argument("--out", type=Path, help="JSON")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)  # tiny products gain nothing by a second
    end, number, found = time.monotonic() + args.seconds, args.first, []
    while time.monotonic() < end and (args.cases is None or number < args.first + args.cases):
        fault = judge(number)
        if fault is not None:
            found.append(fault)
            print(f"case {number}: {fault['about']}", *fault["faults"], sep="\n  ")
        number += 1
    if args.out is not None:
        write_json(args.out, {"first": args.first, "cases": number - args.first, "found": found})
    print(json.dumps({"cases": number - args.first, "wrong": len(found)}))
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
