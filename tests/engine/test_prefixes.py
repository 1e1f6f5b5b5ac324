"""A prompt that shares a prefix with an earlier one is read from where it differs, and no text changes."""

import pytest
import torch
from helpers import DRAFTERS, assert_as_alone, finish, tiny_target
from hybrids import hybrid_target
from tape import Tape

from specdec.engine.adaptive import Fixed
from specdec.engine.engine import Engine
from specdec.engine.prefill import LEAST, Prefixes
from specdec.structs import Sampling
from specdec.trees import Chain

draw = torch.Generator().manual_seed(0)
START = torch.randint(1, 17, (LEAST + 8,), generator=draw).tolist()
# The first again, its beginning, what continues it, what leaves it, what shares too little, and a short one.
PROMPTS = [
    START, START, START[:-3], [*START, 5, 6, 7], [*START, 5, 6, 7, 8, 9] * 2, [*START[:-2], 3, 4, 5],
    [*START[: LEAST - 1], 1, 2, 3], START[:4],
]  # fmt: skip
CACHED = [0, LEAST + 7, LEAST + 4, LEAST + 8, LEAST + 11, LEAST + 6, 0, 0]
SAMPLINGS = [Sampling(), Sampling(0.9), Sampling(frequency_penalty=0.5)]
PLENTY = 1 << 24


def asked(number: int) -> dict:
    return {"max_new_tokens": 12, "eos": frozenset(), "sampling": SAMPLINGS[number % 3]}


def decode(engine: Engine, together: int = 1, **how) -> list:
    """All prompts, so many at a time."""
    engine.reserve(3, 120, **how)
    rows = []
    for first in range(0, len(PROMPTS), together):
        for number in range(first, min(first + together, len(PROMPTS))):
            rows.append(engine.add(PROMPTS[number], seed=number, **asked(number)))
        finish(engine)
    return rows


@pytest.mark.parametrize(
    ("drafter", "how"),
    [("eagle3", {"overlap": True}), ("eagle3", {"graphs": Tape()}), ("eagle3", {"adaptive": Fixed(0)}), ("mtp", {}),
     ("draft-model", {}), ("medusa", {}), ("dflash", {}), ("lookup", {}), (None, {})],
    ids=lambda value: "".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_every_text_is_the_one_it_has_alone(drafter, how):
    target = tiny_target(layers=1)
    parts = [DRAFTERS[drafter](target), Chain(3)] if drafter else []
    rows = decode(Engine(target, *parts, prefixes=PLENTY, **how))
    assert [row.cached for row in rows] == CACHED
    assert_as_alone(target, rows)


@pytest.mark.parametrize(("together", "part"), [(2, 16), (3, 0), (8, 16)])
def test_in_parts_and_next_to_others(together, part):
    target = tiny_target()
    rows = decode(Engine(target, DRAFTERS["eagle3"](target), Chain(3), prefixes=PLENTY), together, part=part)
    assert_as_alone(target, rows)
    assert sum(row.cached > 0 for row in rows) >= 2


@pytest.mark.parametrize(("more", "together"), [(30, False), (70, True)])
def test_who_shares_little_is_read_with_others(more, together):
    """A prompt that shares 40 tokens joins alone if that is half of it, or if no other request waits."""
    target = tiny_target()
    engine = Engine(target, prefixes=PLENTY)
    engine.reserve(3, 125)
    draw = torch.Generator().manual_seed(more)
    own = [torch.randint(1, 17, (more,), generator=draw).tolist() for _ in range(3)]
    rows = [engine.add(START, **asked(0))]
    finish(engine)
    rows += [engine.add(START + rest, **asked(0)) for rest in own[:2]]
    assert len(engine.step().rows) == (2 if together else 1)
    finish(engine)
    rows.append(engine.add(START + own[2], **asked(0)))
    finish(engine)
    shared = len(START)
    assert [row.cached for row in rows[1:]] == ([0, 0, shared] if together else [shared] * 3)
    assert_as_alone(target, rows)


def test_a_target_with_recurrent_layers_keeps_nothing(tmp_path):
    target = hybrid_target(tmp_path, "qwen3_next")
    rows = decode(Engine(target, prefixes=PLENTY))
    assert not any(row.cached for row in rows)
    assert_as_alone(target, rows)


def layers(tokens: int) -> list[torch.Tensor]:
    return [torch.zeros(2, 1, tokens + 9, 1, 4)]


def bytes_of(tokens: int) -> int:
    return tokens * (8 + 2 * 4 * 4)


def test_those_used_longest_ago_go_first():
    prefixes = Prefixes(bytes_of(3 * 40))
    prompts = [[number] * 40 for number in range(4)]
    for prompt in prompts[:3]:
        prefixes.keep(prompt, layers(40), None)
    assert prefixes.bytes == bytes_of(120)
    prefixes.touch(prefixes.find(prompts[0])[0])
    prefixes.keep(prompts[3], layers(40), None)
    assert [prefixes.find(prompt) is not None for prompt in prompts] == [True, False, True, True]
    assert prefixes.bytes == bytes_of(120) == sum(prefix.bytes for prefix in prefixes.used)
    prefixes.keep([9] * 121, layers(121), None)  # more than all of it
    assert prefixes.find([9] * 121) is None
    assert prefixes.bytes == bytes_of(120)


def test_one_that_is_continued_gives_way():
    prefixes = Prefixes(PLENTY)
    prefixes.keep([8] * (LEAST - 1), layers(LEAST - 1), None)
    assert prefixes.bytes == 0, "too short a prefix is cached"
    prefixes.keep([1] * 40, layers(40), None)
    prefixes.keep([1] * 40 + [2] * 40, layers(80), None)
    assert prefixes.bytes == bytes_of(80)
    prefixes.keep([1] * 50, layers(50), None)  # shares 40 tokens, and goes on otherwise
    prefixes.keep([1] * 45, layers(45), None)  # is there
    assert prefixes.bytes == bytes_of(130)
    assert prefixes.find([1] * 60)[1] == 50
    assert prefixes.find([1] * 40 + [2] * 9)[1] == 48  # not its last one
