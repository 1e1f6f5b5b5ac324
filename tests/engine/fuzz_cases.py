"""Random decoding cases for fuzz.py: a tiny random target, a drafter, a tree that fits both, rows, engine options.

The number of a case determines all of it.
"""

import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from helpers import DRAFTERS, MORE_BLOCKS, PARALLEL, random_model, tiny_block, tiny_parallel
from policies import Depths, Restless
from tape import Tape

from specdec import Engine, Sampling
from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.layers import restrict
from specdec.engine.adaptive import Fixed, Policy
from specdec.engine.compatibility import over_block
from specdec.engine.sequence import Sequence
from specdec.model.archs import ModelConfig
from specdec.model.layers import round_weights
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.block import most_nodes
from specdec.tuning.costs import Costs, Point
from specdec.tuning.engines import kinds_of, make_policy


def draft_model(target: Target) -> DraftModel:
    return DraftModel(random_model(replace(target.config, layers=2, sliding=target.config.sliding[:2])))


MAKERS = DRAFTERS | {"draft-model": draft_model} | {name: partial(tiny_parallel, kind=name) for name in PARALLEL}
MAKERS |= {name: partial(tiny_block, **switches) for name, switches in MORE_BLOCKS.items()}
POLICIES = ("restless", "depths", "fixed", "ema", "table",
            "survival", "survival:told", "survival:margin", "survival:calibrated")  # fmt: skip


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    settings: dict  # of `Engine.add`
    digits: int | None  # of its stop condition

    def join(self, engine: Engine) -> Sequence:
        return engine.add(self.prompt, stop=Digits(self.digits) if self.digits else None, **self.settings)


@dataclass(frozen=True)
class Case:
    """Everything that one case decodes."""

    target: Target
    drafter: Drafter
    tree: TreePolicy
    rows: list[Row]
    part: int  # tokens of a prompt that are read at once, 0 for all
    prefixes: int  # bytes of the prefix cache
    schedule: random.Random  # draws when rows join and when they are aborted
    options: dict  # of the engine
    about: str


def draw(number: int) -> Case:
    rng = random.Random(number)
    target = draw_target(rng)
    name, drafter = draw_drafter(rng, target)
    tree = draw_tree(rng, drafter)
    options = draw_options(rng, target, drafter, tree)
    rows = [draw_row(rng, target, place) for place in range(rng.choice([1, 1, 2, 3, 5]))]
    about = (
        f"{name}, {type(tree).__name__} {tree.topk}/{tree.steps}/{tree.num_draft_tokens}, {len(rows)} rows, {options}"
    )
    part, prefixes = rng.choice([0, 0, 1, 2, 5]), rng.choice([0, 0, 20_000, 1 << 24])
    if prefixes:
        first = rows[0].prompt  # others share a prefix with it
        shared = [rng.randint(0, len(first)) for _ in rows]
        rows = [replace(r, prompt=first[:n] + r.prompt[n:] or r.prompt) for r, n in zip(rows, shared, strict=True)]
        about += f", prefix cache of {prefixes} bytes"
    return Case(target, drafter, tree, rows, part, prefixes, random.Random(number), options, about)


def draw_target(rng: random.Random) -> Target:
    layers, switches = 3, {}
    if rng.random() < 0.35:
        sliding = tuple(rng.random() < 0.6 for _ in range(layers))
        switches = {"sliding": sliding, "window": rng.choice([1, 2, 3, 5, 9, 20])}
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
    if rng.random() < 0.3:  # representable in bf16: kernels for bf16 weights then serve, where there are any
        for parameter in target.parameters():
            parameter.data = parameter.data.bfloat16().float()
    target.eos = frozenset(rng.sample(range(config.vocab), rng.choice([0, 1, 1, 2])))
    return target


def draw_drafter(rng: random.Random, target: Target) -> tuple[str, Drafter]:
    name = rng.choice(list(MAKERS))
    torch.manual_seed(rng.randrange(1000))
    drafter = MAKERS[name](target)
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


def draw_tree(rng: random.Random, drafter: Drafter) -> TreePolicy:
    kinds = ["chain", "dynamic", "dynamic", "static", "sampled"]
    if drafter.block is not None and not drafter.conditioned:
        kinds.append("block")
    kind = "chain" if drafter.chains_only else rng.choice(kinds)
    steps = rng.randint(1, drafter.deepest(rng.choice([1, 2, 4, 8, 63])))
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
    return Row(prompt, settings, rng.choice([5, 9, 13]) if rng.random() < 0.3 else None)


def draw_sampling(rng: random.Random) -> Sampling:
    penalties = {"repetition_penalty": [0.5, 1.3, 2.0], "presence_penalty": [-1.0, 0.5, 2.0],
                 "frequency_penalty": [-0.5, 0.5, 2.0]}  # fmt: skip
    filters = {"top_k": [1, 2, 5, 100], "top_p": [0.05, 0.5, 0.9, 0.99], "min_p": [0.01, 0.2, 1.0]}
    settings = {name: rng.choice(values) for name, values in penalties.items() if rng.random() < 0.25}
    if rng.random() < 0.35:
        return Sampling(**settings)
    settings |= {name: rng.choice(values) for name, values in filters.items() if rng.random() < 0.35}
    return Sampling(temperature=rng.choice([1e-40, 0.1, 0.5, 1.0, 1.3, 5.0]), **settings)


def draw_options(rng: random.Random, target: Target, drafter: Drafter, tree: TreePolicy) -> dict:
    switches = (("overlap", True), ("compact", False), ("abstain", False))
    options = {name: value for name, value in switches if rng.random() < 0.25}
    if rng.random() < 0.3:
        options["children"] = rng.choice(["likeliest", "coupled", *["drawn"] * tree.samples])
    if rng.random() < 0.35:
        options["adaptive"] = draw_policy(rng, rng.choice(POLICIES), tree)
    cuts = "adaptive" in options and options["adaptive"].cuts
    if rng.random() < 0.35 and drafter.capturable and target.capturable and not cuts:
        options.pop("overlap", None)
        options["graphs"] = Tape()
    return options


def draw_policy(rng: random.Random, name: str, tree: TreePolicy) -> Policy:
    if name in ("restless", "depths"):
        return (Restless if name == "restless" else Depths)(tree.steps)
    if name == "fixed":
        return Fixed(rng.randint(0, tree.steps))
    share = rng.choice([0.0, 0.02, 0.3])  # relative cost of one more level or node
    kinds = kinds_of(tree)
    points = [
        Point(kind, b, 128.0, 1e-3 * b * (1 + share * kind.levels), 1e-2 * (1 + share * kind.nodes * b / 8))
        for kind in kinds
        for b in (1, 2, 4)
    ]
    return make_policy(name, lambda: Costs(points), kinds, [0.7] * tree.steps)


# Stop conditions and grammars over token ids


class Digits:
    """A `Stop` at the first two consecutive tokens a and b with 3 a + b = 0 modulo `of`."""

    def __init__(self, of: int):
        self.of, self.last = of, None

    def add(self, token: int) -> bool:
        done = self.last is not None and (3 * self.last + token) % self.of == 0
        self.last = token
        return done


class Automaton:
    """A `Grammar`: a random automaton over token ids. Some states allow the end of the text, and some force it."""

    def __init__(self, rng: random.Random, vocab: int, ends: frozenset[int], states: int = 5):
        self.ends, self.vocab = ends, vocab
        inner = [token for token in range(vocab) if token not in ends]
        fans = [min(len(inner), rng.choice([1, 3, vocab // 2])) for _ in range(states)]
        self.following = [{token: rng.randrange(states) for token in rng.sample(inner, fan)} for fan in fans]
        self.final = {state for state in range(states) if rng.random() < 0.3}
        self.last = {state for state in range(1, states) if rng.random() < 0.15}

    def start(self) -> "Place":
        return Place(self)


class Place:
    """A `TextMatcher` of an automaton."""

    def __init__(self, automaton: Automaton):
        self.automaton, self.path = automaton, [0]

    @property
    def over(self) -> bool:
        return self.path[-1] in self.automaton.last

    def take(self, token: int) -> bool:
        state = self.automaton.following[self.path[-1]].get(token)
        if state is None or self.over:
            return False
        self.path.append(state)
        return True

    def back(self) -> None:
        self.path.pop()

    def allowed(self) -> np.ndarray:
        tokens = [*self.automaton.following[self.path[-1]]]
        if self.path[-1] in self.automaton.final:
            tokens += self.automaton.ends
        bits = np.zeros(-(-self.automaton.vocab // 8) * 8, np.uint8)
        bits[tokens] = 1
        return np.packbits(bits, bitorder="little")
