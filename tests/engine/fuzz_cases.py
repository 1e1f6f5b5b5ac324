"""Random cases of decoding for scripts/fuzz.py: a target, a drafter, a tree that fits both, rows, and how they decode.

All is tiny and random. A case follows from its number alone.
"""

import random
import sys
from dataclasses import dataclass, replace
from functools import partial

import checkout
import torch
from fuzz_ends import Automaton, Digits

sys.path.append(str(checkout.ROOT / "tests"))

from helpers import DRAFTERS, MORE_BLOCKS, PARALLEL, random_model, tiny_block, tiny_parallel
from policies import Depths, Restless
from tape import Tape

from specdec.adaptive import Curve, Fixed, Policy
from specdec.calibrate import assembled, sizes_of
from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.layers import restrict
from specdec.engine.engine import Engine
from specdec.engine.fits import most_steps, over_block
from specdec.engine.sequence import Sequence
from specdec.model.archs import ModelConfig
from specdec.model.layers import round_weights
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.block import most_nodes

MAKERS = (
    DRAFTERS
    | {name: partial(tiny_block, **switches) for name, switches in MORE_BLOCKS.items()}
    | {name: partial(tiny_parallel, kind=name) for name in PARALLEL}
)
POLICIES = (
    "restless",
    "depths",
    "fixed",
    "ema",
    "table",
    "survival",
    "survival:told",
    "survival:margin",
    "survival:calibrated",
)


@dataclass(frozen=True)
class Row:
    """A prompt and what is asked for it."""

    prompt: list[int]
    settings: dict  # of `Engine.add`
    digits: tuple[int, int] | None  # of its stop

    def join(self, engine: Engine) -> Sequence:
        stop = Digits(*self.digits) if self.digits else None
        return engine.add(self.prompt, stop=stop, **self.settings)


@dataclass(frozen=True)
class Case:
    """What is decoded with what. schedule: draws who joins and who is aborted when."""

    target: Target
    drafter: Drafter
    tree: TreePolicy
    rows: list[Row]
    part: int  # tokens of a prompt that are read at once, 0 for all
    kept: int  # bytes for what is kept of prompts
    schedule: random.Random
    options: dict  # of the engine
    about: str


def draw(number: int) -> Case:
    """The case of this number."""
    rng = random.Random(number)
    target = draw_target(rng)
    name, drafter = draw_drafter(rng, target)
    tree = draw_tree(rng, drafter)
    options, how = draw_options(rng, target, drafter, tree)
    rows = [draw_row(rng, target, place) for place in range(rng.choice([1, 1, 2, 3, 5]))]
    about = f"{name}, {type(tree).__name__} {tree.topk}/{tree.steps}/{tree.num_draft_tokens}, {len(rows)} rows{how}"
    part, kept = rng.choice([0, 0, 1, 2, 5]), rng.choice([0, 0, 20_000, 1 << 24])
    if kept:
        rows = [begun_alike(rng, row, rows[0].prompt) for row in rows]
        about += f", keeps {kept} bytes of prompts"
    return Case(target, drafter, tree, rows, part, kept, random.Random(number), options, about)


def begun_alike(rng: random.Random, row: Row, prompt: list[int]) -> Row:
    """A row whose prompt begins as another does, or more or less so."""
    same = rng.randint(0, len(prompt))
    return replace(row, prompt=prompt[:same] + row.prompt[same:] or row.prompt)


def draw_target(rng: random.Random) -> Target:
    layers, switches = 3, {}
    if rng.random() < 0.35:
        switches = {
            "sliding": tuple(rng.random() < 0.6 for _ in range(layers)),
            "window": rng.choice([1, 2, 3, 5, 9, 20]),
        }
    for name, value in (
        ("qkv_bias", True), ("qk_norm", True), ("sandwich_norms", True), ("norm_offset", True), ("logit_softcap", 5.0),
        ("attention_scale", 0.2), ("embed_scale", 3.0), ("local_rope", Rope(theta=500.0)),
    ):  # fmt: skip
        if rng.random() < 0.2:
            switches[name] = value
    heads, kv_heads = rng.choice([(4, 2), (2, 2), (4, 1), (3, 1)])
    config = ModelConfig(
        layers=layers, hidden=32, intermediate=rng.choice([48, 256]), heads=heads, kv_heads=kv_heads,
        head_dim=rng.choice([8, 16, 32]), vocab=rng.choice([11, 17, 33, 64]), eps=1e-5, rope=Rope(),
        context=rng.choice([24, 40, 64, 256]), tied=False, **switches,
    )  # fmt: skip
    torch.manual_seed(rng.randrange(1000))
    target = random_model(config)
    if rng.random() < 0.3:  # then products with weights of bf16 are taken, where there are such
        for parameter in target.parameters():
            parameter.data = parameter.data.bfloat16().float()
    target.eos = frozenset(rng.sample(range(config.vocab), rng.choice([0, 1, 1, 2])))
    return target


def draw_drafter(rng: random.Random, target: Target) -> tuple[str, Drafter]:
    name = rng.choice(list(MAKERS))
    torch.manual_seed(rng.randrange(1000))
    drafter = draft_model(target) if name == "draft-model" else MAKERS[name](target)
    if drafter.heads_in_use() and rng.random() < 0.3:
        few = torch.randperm(drafter.vocab.size)[: rng.choice([3, 5, 8])]
        restrict(drafter, drafter.vocab.to_target(few))
        name += " of few tokens"
    if name == "dspark" and rng.random() < 0.4:
        drafter.cut = rng.choice([0.3, 0.5, 0.6])
        name += " cut"
    if rng.random() < 0.15:
        round_weights(drafter)
        name += " in int8"
    return name, drafter


def draft_model(target: Target) -> DraftModel:
    """A random model of the target's shape with two of its layers."""
    return DraftModel(random_model(replace(target.config, layers=2, sliding=target.config.sliding[:2])))


def draw_tree(rng: random.Random, drafter: Drafter) -> TreePolicy:
    kinds = ["chain", "dynamic", "dynamic", "static", "sampled"]
    if drafter.block is not None and not drafter.conditioned:
        kinds.append("block")
    kind = "chain" if drafter.chains_only else rng.choice(kinds)
    steps = rng.randint(1, min(most_steps(drafter) or 63, rng.choice([1, 2, 4, 8, 63])))
    topk = rng.randint(1, min(drafter.vocab.size, rng.choice([2, 4, 8])))
    if kind == "chain":
        return Chain(steps)
    if kind == "dynamic":
        steps = min(steps, 16)
        most = min(DynamicTree.candidates(topk, steps) + 1, rng.choice([8, 16, 64, 80]))
        return DynamicTree(topk, steps, rng.randint(2, most))
    if kind == "block":
        steps = min(steps, 8)
        return over_block(drafter, BlockTree(topk, steps, rng.randint(2, min(most_nodes(topk, steps, 64), 40))))
    if kind == "static":
        return StaticTree(draw_paths(rng, topk, steps))
    branches, leaves = [], 1
    for _ in range(min(steps, 8)):
        branches.append(rng.randint(1, topk) if leaves <= 4 else 1)
        leaves *= branches[-1]
    return SampledTree(branches)


def draw_paths(rng: random.Random, topk: int, steps: int) -> list[tuple[int, ...]]:
    paths = [()]
    for _ in range(rng.randint(1, 20)):
        path = (*rng.choice(paths), rng.randrange(topk))
        if len(path) <= steps and path not in paths:
            paths.append(path)
    return paths[1:] or [(0,)]


def draw_row(rng: random.Random, target: Target, place: int) -> Row:
    vocab, context = target.vocab, target.config.context
    length = min(rng.choice([1, 2, 3, 7, 15, 23, 39]), context - 1)
    prompt = [rng.randrange(vocab) for _ in range(length)]
    if rng.random() < 0.3:  # n-grams find something
        prompt = (prompt[:3] * length)[:length]
    grammar = Automaton(rng, vocab, target.eos) if target.eos and rng.random() < 0.25 else None
    ends = None if grammar else rng.choice([None, frozenset(), frozenset(rng.sample(range(vocab), 2))])
    settings = {
        "max_new_tokens": rng.choice([1, 2, 5, 20, 40, 60]),
        "sampling": draw_sampling(rng),
        "seed": (rng.randrange(10**9), place),
        "eos": ends,
        "grammar": grammar,
        "logprobs": rng.random() < 0.3,
        "top_logprobs": rng.choice([0, 0, 0, 3, 10]),
        "steps": rng.choice([None, None, None, 0, 1, 2, 99]),
    }
    return Row(prompt, settings, (rng.choice([5, 9, 13]), 0) if rng.random() < 0.3 else None)


def draw_sampling(rng: random.Random) -> Sampling:
    penalties = {
        "repetition_penalty": rng.choice([0.5, 1.3, 2.0]),
        "presence_penalty": rng.choice([-1.0, 0.5, 2.0]),
        "frequency_penalty": rng.choice([-0.5, 0.5, 2.0]),
    }
    settings = {name: value for name, value in penalties.items() if rng.random() < 0.25}
    if rng.random() < 0.35:
        return Sampling(**settings)
    filters = {
        "top_k": rng.choice([1, 2, 5, 100]),
        "top_p": rng.choice([0.05, 0.5, 0.9, 0.99]),
        "min_p": rng.choice([0.01, 0.2, 1.0]),
    }
    settings |= {name: value for name, value in filters.items() if rng.random() < 0.35}
    return Sampling(temperature=rng.choice([1e-40, 0.1, 0.5, 1.0, 1.3, 5.0]), **settings)


def draw_options(rng: random.Random, target: Target, drafter: Drafter, tree: TreePolicy) -> tuple[dict, str]:
    """Of the engine, and in words."""
    options, words = {}, ""
    for name, value in (("overlap", True), ("compact", False), ("abstain", False)):
        if rng.random() < 0.25:
            options[name] = value
            words += f", {name} {value}"
    if rng.random() < 0.3:
        kinds = ["likeliest", "coupled", "drawn"] if tree.samples else ["likeliest", "coupled"]
        options["children"] = rng.choice(kinds)
        words += f", children {options['children']}"
    if rng.random() < 0.35:
        name = rng.choice(POLICIES)
        options["adaptive"] = draw_policy(rng, name, tree)
        words += f", adaptive {name}"
    cuts = "adaptive" in options and options["adaptive"].cuts
    if rng.random() < 0.35 and drafter.capturable and target.capturable and not cuts:
        options.pop("overlap", None)
        options["graphs"] = Tape()
        words += ", replayed"
    return options, words


def draw_policy(rng: random.Random, name: str, tree: TreePolicy) -> Policy:
    if name in ("restless", "depths"):
        return (Restless if name == "restless" else Depths)(tree.steps)
    if name == "fixed":
        return Fixed(rng.randint(0, tree.steps))
    rows, nodes = (1, 2, 4), sorted({1, 2, tree.num_draft_tokens})
    share = rng.choice([0.0, 0.02, 0.3])  # what a level or a node more costs
    rest = {b: [1e-3 * b * (1 + share * level) for level in range(tree.steps + 1)] for b in rows}
    verify = {b: {n: 1e-2 * (1 + share * n * b / 8) for n in nodes} for b in rows}
    return assembled(name, lambda: Curve(rows, rest, verify, True), sizes_of(tree), [0.7] * tree.steps)
