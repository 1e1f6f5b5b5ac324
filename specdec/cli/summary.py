"""The summary of `specdec generate`: one JSON object, or a few lines."""

import re
from typing import Any

from specdec.cli.session import Decoded, Session, merged
from specdec.machine import matmul_precision
from specdec.trees.base import shape_of
from specdec.trees.spec import describe
from specdec.verify import in_words

READ = (("feedback", "feeds back"), ("token map", "token map"))
SMALL = 4  # nodes of a tree, for which a smaller one is no advice
LOSSY = "LOSSY: above temperature 0 the text does not follow the target's distribution"


def drafting(session: Session) -> str:
    """Which drafter guesses, and what tree, in words."""
    if session.drafter is None:
        return "no drafter"
    family = session.drafter.conventions.get("family") or session.args.draft  # n-grams and models have their name
    return f"drafter: {family}, tree {describe(session.tree)}"


def summarise(session: Session, decoded: Decoded) -> dict:
    """Return the JSON object that `--json` prints. A single prompt has its text as such, several have lists.

    After a signal, plain decoding is compared up to the shorter text. Of several passes the speeds are the median's.
    """
    done, baseline = decoded.done, decoded.baseline
    total = merged(done)
    one = len(total.rows) == 1
    summary: dict[str, Any] = {
        "text": total.text[0] if one else total.text,
        "token_ids": total.rows[0].tokens if one else [row.tokens for row in total.rows],
        "finish": total.rows[0].finish if one else [row.finish for row in total.rows],
        "num_tokens": total.num_tokens,
        "rounds": total.rounds,
        "rounds_without_draft": total.undrafted,
        "tau": total.tau,
        "acceptance_by_depth": total.acceptance_by_depth,
        "drafter": (dict(session.drafter.conventions) or None) if session.drafter else None,
        "tree": None if session.tree is None else shape_of(session.tree),
        "verifier": None if total.verifier is None else str(total.verifier),
        "lossless": total.lossless,
        "matmul_precision": matmul_precision(session.target.device),
        "tokens_per_second": total.tokens_per_second,
        "prefill_seconds": total.result.prefill_seconds,
        "seconds_by_part": total.result.parts,
    }
    if session.args.logprobs:
        summary["logprobs"] = total.rows[0].logprobs if one else [row.logprobs for row in total.rows]
    if baseline:
        plain, drafted = merged(baseline), merged(done[: len(baseline)])
        turns = [(drafted.tokens_per_second, plain.tokens_per_second), *decoded.turns]
        # A text that ends with its first token decodes nothing, in no time. Nor is there a ratio where plain decoding
        # was chosen: it would be the noise between two equal runs.
        compared = all(slow for _, slow in turns) and session.drafter is not None
        speedups = sorted((fast / slow, fast, slow) for fast, slow in turns) if compared else [(None, *turns[0])]
        names = "speedup", "tokens_per_second", "baseline_tokens_per_second"
        summary |= dict(zip(names, speedups[(len(speedups) - 1) // 2], strict=True))
        summary["speedups"] = [speedup for speedup, *_ in speedups]
        same = [a.tokens == b.tokens for a, b in zip(drafted.rows, plain.rows, strict=True)]
        summary["identical"] = all(same) if session.sampling.greedy or session.verifier.couples else None
        summary["identical_rows"], summary["compared_rows"] = sum(same), len(same)
    return summary


def _drafter(conventions: dict[str, str], layers: int) -> str:
    """Describe how a drafter's checkpoint was read. Taps are indices of transformers' hidden_states."""
    taps, said = conventions.get("taps", ""), [f"drafter: {conventions['family']}"]
    read = re.findall(r"\d+", taps) if "N" not in taps else []
    if read:
        named = f"s {', '.join(read[:-1])} and {read[-1]}" if len(read) > 1 else f" {read[0]}"
        said.append(f"reads hidden state{named} of 0 (the embedding) to {layers} (after the final norm)")
    elif "last one" in taps:
        said.append("reads the last hidden state, after the final norm")
    said += [f"{does} {conventions[key]}" for key, does in READ if key in conventions]
    return "; ".join(said)


def _faster(session: Session) -> str:
    """What may make a pair faster than plain decoding that is slower with this tree."""
    said = ["a smaller tree costs less a round (--topk 1 --steps 3)"] if session.tree.num_draft_tokens > SMALL else []
    said += ["--tree auto chooses by what is measured"] if session.choice is None and session.drafter.acceptance else []
    return ", ".join([*said, "specdec tune finds the fastest setting"])


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms"


def print_summary(session: Session, s: dict) -> None:
    """The summary as lines for people."""
    rounds = "1 round" if s["rounds"] == 1 else f"{s['rounds']} rounds"
    speed = f", tau {s['tau']:.2f}, {s['tokens_per_second']:.1f} tokens/s" if s["rounds"] else ""
    tokens = "1 token" if s["num_tokens"] == 1 else f"{s['num_tokens']} tokens"
    print(f"\n{tokens} in {rounds}{speed}")
    if session.drafter is None:
        print("decoded plainly, without a drafter")
    elif s["rounds_without_draft"]:
        print(f"rounds without a draft: {s['rounds_without_draft']} ({s['rounds_without_draft'] / s['rounds']:.0%})")
    if s["acceptance_by_depth"] and s["rounds"]:
        shares = "  ".join(f"{d}: {a:.0%}" for d, a in enumerate(s["acceptance_by_depth"], 1))
        print(f"accepted to depth, of all rounds: {shares}")
    if s["drafter"]:
        print(_drafter(s["drafter"], session.target.config.layers))
    if s["verifier"] is not None:
        print(f"verifier: {in_words(session.verifier)}, {'lossless' if s['lossless'] else LOSSY}")
    if s["matmul_precision"] != "highest":
        print(f"products: {s['matmul_precision']} precision, in plain decoding too")
    times = "  ".join(f"{k} {_time(v)}" for k, v in sorted(s["seconds_by_part"].items(), key=lambda kv: -kv[1]))
    print(f"time by part: {times}")
    if "speedup" in s:
        ratio = "-" if s["speedup"] is None else f"{s['speedup']:.2f}x"
        if len(turns := s["speedups"]) > 1:
            ratio += f", the median of {len(turns)} turns ({turns[0]:.2f} to {turns[-1]:.2f})"
        print(f"plain decoding: {s['baseline_tokens_per_second']:.1f} tokens/s; speculative to plain: {ratio}")
        if s["speedup"] is not None and s["speedup"] < 1:
            print(f"slower than plain decoding here: {_faster(session)}")
        if s["identical"] is not None:
            print(f"identical: {'yes' if s['identical'] else 'NO'} ({s['identical_rows']} of {s['compared_rows']})")
        else:
            same = "the same distribution" if s["lossless"] else "two distributions, for the verifier is lossy"
            print(f"identical: not asked, both are draws from {same}")
