"""Does replay equal reality? Records a superset, decodes for real, and compares (docs/replay.md).

    python scripts/replay_check.py --prompt-file MT_BENCH --limit 40
    python scripts/replay_check.py --prompt-file MT_BENCH --limit 40 --temperature 0.8
    python scripts/replay_check.py --prompt-file MT_BENCH --limit 10 --temperature 1 --expected

The rounds of every question are compared one by one, for 24 trees, and 10 over the blocks of a drafter that has any, at
any temperature; then the time to replay 500
trees is compared with that of five real runs. With --expected the question is whether what a recording expects of the
likeliest children, and of a drawn chain, lies within the 99 % interval of 20 real runs with other seeds, for 6 trees
and the chain. The last line is one JSON object.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import checkout  # noqa: F401
import torch
from torch import Tensor

from specdec.cli.errors import one_sentence_errors
from specdec.contracts import TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.traces import RowTrace, tau
from specdec.lab.models import add_model_flags, load_models, read_encoded
from specdec.lab.replay import Superset, record
from specdec.lab.replay.superset import Replayed
from specdec.structs import Sampling
from specdec.trees import BlockTree, DynamicTree, SampledTree
from specdec.trees.spec import TreeSpec
from specdec.verify import make_verifier

BLOCK_TREES = (  # topk, steps, num_draft_tokens
    (1, 6, 7), (2, 3, 6), (2, 6, 16), (4, 2, 8), (4, 5, 16), (4, 6, 32), (8, 3, 16), (8, 5, 32), (8, 6, 24), (8, 6, 64),
)  # fmt: skip
TOPKS, STEPS, NODES = (1, 2, 4, 8), 6, (2, 5, 8, 16, 24, 32)
SAMPLED = [TreeSpec(*shape) for shape in ((1, 2, 3), (1, 4, 5), (2, 3, 6), (2, 4, 8), (4, 3, 8), (4, 5, 16))]
RUNS, T_QUANTILE = 20, 2.861  # 99 %, two-sided, 19 degrees of freedom


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(p)
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=40, help="prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--expected", action="store_true", help="compare expectations, at a temperature above 0")
    p.add_argument("--samples", type=int, default=20, help="texts recorded of each prompt for --expected")
    p.add_argument("--threads", type=int, default=1)
    return p


def chosen_trees(drafter) -> list[TreeSpec]:
    """24 trees, and 10 over the block of a drafter that has one of independent slots, if it goes so deep."""
    crossed = [TreeSpec(k, s, s + 1 if k == 1 else n) for k in TOPKS for s, n in enumerate(NODES, 1)]
    if drafter.block is not None and not drafter.conditioned:
        crossed += [TreeSpec(*shape, block=True) for shape in BLOCK_TREES]
    trees = [replace(t, num_draft_tokens=min(t.num_draft_tokens, t.most_nodes)) for t in crossed]
    return [t for t in trees if t.steps <= drafter.deepest(STEPS)]


def choice(tree: TreeSpec) -> DynamicTree | BlockTree:
    """The tree as a choice of what was recorded, chains too: what a round is expected to emit follows from a pool."""
    return tree.build() if tree.block else DynamicTree(tree.topk, tree.steps, tree.num_draft_tokens)


def many_trees(count: int, steps: int) -> list[DynamicTree]:
    """`count` of all trees that the superset holds, evenly spread."""
    pairs = [(k, s) for k in TOPKS for s in range(1, steps + 1)]
    every = [(k, s, n) for k, s in pairs for n in range(2, min(64, DynamicTree.candidates(k, s) + 1) + 1)]
    return [DynamicTree(*every[i * len(every) // count]) for i in range(count)]


def decode(engine: Engine, prompts: list[list[int]], args) -> list[RowTrace]:
    how = {"max_new_tokens": args.max_new_tokens, "sampling": Sampling(args.temperature)}
    return [engine.generate([p], seed=[(args.seed, i)], **how).rows[0].trace for i, p in enumerate(prompts)]


def closest_cut(superset: Superset, root: int, tree: TreeSpec) -> float:
    """The least difference of scores that a choice at this root depends on.

    Choices are made where a level's best candidates are expanded, and where the best of all become the tree."""
    topk = tree.topk
    if tree.block:
        best = superset.marginals[""]
        one = (x[root : root + 1, : tree.steps, :topk] for x in (best.gains, best.tokens))
        return gap(choice(tree).best_paths(*one).scores[0], tree.num_draft_tokens - 1)
    pool = superset.candidates["", topk].pool
    scores = pool.scores[root, : tree.most_nodes - 1]
    levels = scores.split([topk] + [topk * topk] * (tree.steps - 1))
    cuts = [(scores, tree.num_draft_tokens - 1), *((level, topk) for level in levels[1:-1])]
    return min((gap(values, place) for values, place in cuts), default=float("inf"))


def gap(values: Tensor, place: int) -> float:
    """The difference between the value of this place, counted from 1 in descending order, and the next."""
    ordered = values.sort(descending=True).values
    return float(ordered[place - 1] - ordered[place]) if place < len(ordered) else float("inf")


def differences(superset: Superset, tree: TreeSpec, replayed: Replayed, real: list[RowTrace]) -> list[dict]:
    """The questions whose rounds are not the same, and how close to a tie the first different round was."""
    found = []
    for q, (ours, theirs) in enumerate(zip(replayed.rows, real, strict=True)):
        if ours != theirs:
            same = next(r for r in range(ours.rounds) if ours.accepted[r] != theirs.accepted[r])
            root = int(superset.starts[q]) + sum(ours.emitted[:same])
            margin = closest_cut(superset, root, tree)
            found.append({"setting": str(tree), "question": q, "round": same, "margin": margin})
    return found


def check_exact(target, drafter, prompts: list[list[int]], args) -> dict:
    start = time.perf_counter()
    how = {"max_new_tokens": args.max_new_tokens, "sampling": Sampling(args.temperature), "seed": args.seed}
    superset = record(target, drafter, prompts, topks=TOPKS, steps=drafter.deepest(STEPS), **how)
    recording = time.perf_counter() - start
    print(f"recorded {int(superset.roots.sum())} roots in {recording:.1f} s")
    found, real_seconds, rounds = [], [], 0
    for tree in chosen_trees(drafter):
        start = time.perf_counter()
        real = decode(Engine(target, drafter, tree.build()), prompts, args)
        real_seconds.append(time.perf_counter() - start)
        replayed = superset.replay(choice(tree))
        differing = differences(superset, tree, replayed, real)
        found, rounds = found + differing, rounds + sum(trace.rounds for trace in real)
        print(f"{tree}: tau {tau(real):.4f}, replayed {replayed.tau:.4f}; {len(differing)} questions differ")
    superset.replay(DynamicTree(2, 1, 2))  # torch's first calls
    fresh = replace(superset)  # without what it has computed of its ranks
    trees = many_trees(500, superset.steps)
    start = time.perf_counter()
    fresh.replay_many(trees)
    replaying = time.perf_counter() - start
    five = sum(sorted(real_seconds)[:5])
    print(f"500 trees replayed in {replaying:.2f} s; the 5 fastest real runs took {five:.1f} s")
    return {
        "differences": found,
        "settings": len(real_seconds),
        "rounds": rounds,
        "recording_seconds": recording,
        "seconds_of_500_replayed": replaying,
        "seconds_of_the_5_fastest_real": five,
        "seconds_of_all_real": sum(real_seconds),
    }


def real_taus(target, drafter, tree: TreePolicy, verifier: str, prompts, args) -> list[float]:
    children = "likeliest" if verifier == "match" else "drawn"
    engine = Engine(target, drafter, tree, make_verifier(verifier), children=children)
    how = {"max_new_tokens": args.max_new_tokens, "sampling": Sampling(args.temperature)}
    runs = [engine.generate(prompts, seed=1000 + seed, **how).rows for seed in range(RUNS)]
    return [tau([row.trace for row in rows]) for rows in runs]


def check_expected(target, drafter, prompts: list[list[int]], args) -> dict:
    topks, steps = sorted({tree.topk for tree in SAMPLED}), max(tree.steps for tree in SAMPLED)
    start = time.perf_counter()
    superset = record(
        target, drafter, prompts, topks=topks, steps=steps, max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.temperature), samples=args.samples, children="likeliest",
    )  # fmt: skip
    print(f"recorded {len(superset.texts)} texts in {time.perf_counter() - start:.1f} s")
    rows = []
    for tree in SAMPLED:
        replayed = superset.replay(choice(tree))
        taus = real_taus(target, drafter, tree.build(), "match", prompts, args)
        rows.append(judged(f"{tree} match", taus, replayed.expected_tau, replayed.tau))
    taus = real_taus(target, drafter, SampledTree([1] * steps), "rejection", prompts, args)
    rows.append(judged(f"drawn chain of {steps}, rejection", taus, superset.replay_drawn(steps).tau))
    return {"sampled": rows, "samples": args.samples}


def judged(name: str, taus: list[float], expected: float, counted: float | None = None) -> dict:
    """Print and return whether the replayed expectation lies within the interval of the real runs' mean."""
    half = T_QUANTILE * stdev(taus) / len(taus) ** 0.5
    inside = abs(expected - mean(taus)) <= half
    noise = "" if counted is None else f" ({counted:.4f} by counting)"
    print(f"{name}: real {mean(taus):.4f} +- {half:.4f}, replayed {expected:.4f}{noise}: {'in' if inside else 'OUT'}")
    return {"setting": name, "real": mean(taus), "half_interval": half, "replayed": expected, "inside": inside}


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    target, drafter = load_models(args)
    prompts = read_encoded(target, args.prompt_file, args.limit)
    if args.expected and not args.temperature:
        raise ValueError("--expected needs a --temperature above 0")
    check = check_expected if args.expected else check_exact
    print(json.dumps({"prompts": len(prompts), **check(target, drafter, prompts, args)}))


if __name__ == "__main__":
    main()
