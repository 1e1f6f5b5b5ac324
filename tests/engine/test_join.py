"""Sequences join a running batch and leave it. Texts do not change, and ended sequences leave no state.

Long prompts are read in parts, and prompts that share a prefix with an earlier one from where they differ.
"""

import gc
from copy import deepcopy

import pytest
import torch
from helpers import DRAFTERS, MIXED, assert_as_alone, come_and_go, finish, job, tiny_drafter, tiny_target
from hybrids import HYBRIDS, hybrid_target
from policies import Depths, Restless
from tape import Interpreted, Tape, live_bytes

from specdec import Engine, Recorder, Sampling
from specdec.engine.adaptive import Fixed
from specdec.engine.prefill import LEAST, ChunkedPrefill, Prefixes
from specdec.engine.sequence import Sequence
from specdec.model.cache import KVCache
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify.rules import MultiRoundRejection, TwoThresholds, TypicalAcceptance

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]]
TREE = DynamicTree(3, 3, 9)
WAYS = {
    "at once": dict,
    "overlapped": lambda: {"overlap": True},
    "carried": lambda: {"compact": False},
    "captured": lambda: {"graphs": Tape()},
    "compiled": lambda: {"graphs": Interpreted()},
    "adaptive": lambda: {"adaptive": Restless(3)},
    "captured, adaptive": lambda: {"adaptive": Depths(3), "graphs": Tape()},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_joins_has_the_text_that_it_has_alone(way, unpacked):
    """Rows have settings of their own, long prompts that are read in parts, and limits of drafted levels. fuzz.py draws
    further cases."""
    engine = Engine(tiny_target(), tiny_drafter(tiny_target()), TREE, **WAYS[way]())
    jobs = [
        job(i, prompt=job(i)["prompt"] * (1 + i % 9), logprobs=i % 3 > 0, steps=[None, 0, 1, 9][i % 4])
        for i in range(9)
    ]
    sequences, _ = come_and_go(engine, jobs, part=4)
    assert sum(sum(s.trace.accepted) for s in sequences) > 0
    for s in sequences:
        assert max(s.trace.accepted, default=0) <= (3 if s.steps is None else min(s.steps, 3))


@pytest.mark.parametrize("way", ["at once", "overlapped", "captured", "compiled"])
@pytest.mark.parametrize("verifier", [MultiRoundRejection(), TypicalAcceptance(), TwoThresholds(0.1, 0.1)], ids=str)
def test_a_row_without_levels_is_decoded_plainly_next_to_others(way, verifier, unpacked):
    """By any rule, also a lossy one."""
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), SampledTree((2, 1)), verifier, **WAYS[way]())
    engine.reserve(4, 80)
    rows = [engine.add(**job(i, (Sampling(1.0), MIXED[2]), steps=[0, None][i % 2])) for i in range(12)]
    finish(engine)
    assert sum(sum(s.trace.accepted) for s in rows) > 0
    assert_as_alone(target, rows[::2])


@pytest.mark.parametrize("adaptive", [None, Fixed(2)], ids=["as asked", "adaptive"])
def test_a_chain_is_as_long_as_the_longest_that_a_row_wants(adaptive):
    for steps, nodes in ((0, 1), (1, 2)):
        engine = Engine(tiny_target(), tiny_drafter(tiny_target()), Chain(3), adaptive=adaptive)
        _, reports = come_and_go(engine, [job(i, steps=steps) for i in range(3)])
        assert {report.nodes for report in reports} == {nodes}


@pytest.mark.parametrize(("drafter", "overlap"), [("eagle3", True), ("suffix", True), ("draft-model", False)])
def test_memory_does_not_grow(drafter, overlap):
    """Over 160 sequences, some of which are aborted. One object left of each would be seen."""
    target = tiny_target(layers=1)
    engine = Engine(target, DRAFTERS[drafter](target), Chain(2), overlap=overlap)
    engine.reserve(4, 24)
    place, seen, last = [kv.data_ptr() for kv in engine.loop.batch.cache.memory], [], None
    gc.collect()
    gc.freeze()  # objects from before are not searched
    for number in range(160):
        last = engine.add([1 + number % 7, 3], max_new_tokens=1 + number % 9, eos=frozenset())
        engine.step()
        if number % 40 == 39:
            engine.abort(last)
            finish(engine)
            gc.collect()
            seen.append((live_bytes(objects := gc.get_objects()), len(objects)))
            del objects
    gc.unfreeze()
    assert [kv.data_ptr() for kv in engine.loop.batch.cache.memory] == place
    sizes, objects = zip(*seen[1:], strict=True)
    assert max(sizes) - min(sizes) <= (512 if overlap else 0)  # the buffers of the last reading
    assert max(objects) - min(objects) <= 100


@pytest.mark.parametrize("early", [True, False], ids=["before the first round", "between rounds"])
@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model", "captured"])
def test_rows_go_on_after_a_prefill_fails(drafter, early, monkeypatch):
    target, how = tiny_target(), {}
    if drafter == "captured":
        drafter, how = "eagle3", {"graphs": Tape()}
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(2)] if drafter else []), **how)
    engine.reserve(3, 40)
    rows = [engine.add(PROMPTS[0], max_new_tokens=9, eos=frozenset())]
    for _ in range(0 if early else 2):
        engine.step()
    rows += [engine.add(prompt, max_new_tokens=9, eos=frozenset()) for prompt in PROMPTS[1:]]
    with monkeypatch.context() as patch:

        def fail(*_):
            patch.undo()
            raise MemoryError

        patch.setattr(KVCache, "advance", fail)
        with pytest.raises(MemoryError):
            finish(engine)
    for other in rows[1:]:
        engine.abort(other)
    finish(engine)
    assert_as_alone(target, rows[:1])


def test_a_trace_of_rows_that_join():
    target, recorder = tiny_target(), Recorder()
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), TREE)
    engine.reserve(2, 40)
    rows = [engine.add(**job(i, (Sampling(),), eos=frozenset())) for i in range(6)]
    while (report := engine.step()) is not None:
        recorder(report)
        assert [row.trace for row in recorder.trace.rows] == [row.trace for row in rows if row.tokens]
        if len(rows[1].tokens) == 4:  # when row 0 is aborted, its place is taken before the next report
            engine.abort(rows[0])
        if len(rows[5].tokens) > 1:  # no report follows
            engine.abort(rows[5])
    assert rows[0].finish == rows[5].finish == "abort"
    seen, made = ([(r.prompt, r.tokens, r.finish, r.trace) for r in some] for some in (recorder.trace.rows, rows))
    assert seen == made


def test_what_does_not_fit_is_said():
    """Room is what was reserved. Captured rounds have more."""
    engine = Engine(tiny_target(), graphs=Tape())
    with pytest.raises(ValueError, match=r"nothing is reserved: call Engine\.reserve first"):
        engine.add([1])
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        engine.reserve(0, 5)
    engine.reserve(1, 8)
    with pytest.raises(ValueError, match="the prompt has 8 tokens, room was reserved for 8, new ones included"):
        engine.add([1] * 8)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        engine.add([1], max_new_tokens=0)
    row = engine.add([1, 2], max_new_tokens=100, eos=frozenset())
    finish(engine)
    assert (len(row.tokens), row.finish) == (6, "context")
    assert engine.step() is None


class Failing:
    """A `Stop` that raises an error at its n-th token."""

    def __init__(self, place: int, error: BaseException):
        self.place, self.error = place, error

    def add(self, token: int) -> bool:
        self.place -= 1
        if self.place == 0:
            raise self.error
        return False


@pytest.mark.parametrize("place", [1, 2, 4])
@pytest.mark.parametrize("way", ["at once", "overlapped", "captured"])
def test_an_error_in_a_stop_ends_its_sequence_alone(way, place):
    """At the first token, in the prefill, too. An interrupt, after which tokens may be missing, drops all sequences."""
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), TREE, **WAYS[way]())
    engine.reserve(3, 40)
    for error in (KeyError(), KeyboardInterrupt()):
        stops = [None, Failing(place, error), None]
        rows = [engine.add(p, max_new_tokens=9, eos=frozenset(), stop=s) for p, s in zip(PROMPTS, stops, strict=True)]
        with pytest.raises(type(error)):
            finish(engine)
        finish(engine)
        if isinstance(error, Exception):
            assert (len(rows[1].tokens), rows[1].finish) == (place, "error")
            assert_as_alone(target, [rows[0], rows[2]])
    with pytest.raises(ValueError, match="nothing is reserved"):
        engine.add([1])


def test_an_error_in_a_round_drops_all_sequences(monkeypatch):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), TREE)
    engine.reserve(1, 40)
    engine.add(PROMPTS[0])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "extend", lambda *_: 1 / 0)  # the target has committed its tokens
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.step() is None


def test_a_drafter_has_one_engine_at_a_time():
    """Two engines would write to one cache."""
    target, drafter = tiny_target(), tiny_drafter(tiny_target())
    first, second = (Engine(target, drafter, tree) for tree in (TREE, Chain(2)))
    texts = [engine.generate(PROMPTS, max_new_tokens=9) for engine in (first, second, first)]
    assert len({str([row.tokens for row in text.rows]) for text in texts}) == 1
    with pytest.raises(ValueError, match="this drafter is in the middle of another engine's generate"):
        first.generate(PROMPTS, max_new_tokens=9, observer=lambda report: second.generate([[1]]))
    first.reserve(2, 30)
    first.add(PROMPTS[0])
    first.step()
    second.generate([[1]], max_new_tokens=2)
    with pytest.raises(ValueError, match="another engine has taken this drafter since the sequences were added"):
        first.step()
    first.reserve(2, 30)
    copy = Engine(target, deepcopy(drafter), TREE)
    assert copy.generate(PROMPTS, max_new_tokens=9).rows[0].tokens == texts[0].rows[0].tokens
    assert first.step() is None


def test_sequences_of_an_earlier_reserve_can_be_aborted():
    engine = Engine(tiny_target())
    engine.reserve(1, 40)
    row = engine.add(PROMPTS[0])
    engine.step()
    engine.reserve(1, 40)
    engine.abort(row)
    assert row.finish == "abort"


def test_an_error_in_an_observer_ends_what_was_decoded():
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2))
    with pytest.raises(KeyError):
        engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset(), observer=lambda _: {}["no"])
    assert engine.step() is None
    assert engine.generate([[1, 2]], max_new_tokens=9, eos=frozenset()).rows[0].finish == "length"
    assert engine.loop is None, "caches live on when nothing is decoded"


def test_a_report_on_those_that_join_has_their_sampling():
    engine = Engine(tiny_target(), graphs=Tape())
    engine.reserve(3, 40)
    for sampling in (Sampling(), Sampling(0.5), Sampling(1.0, top_k=2)):
        row = engine.add([1, 2], max_new_tokens=20, sampling=sampling, eos=frozenset())
        while not (report := engine.step()).prefill:
            pass
        assert (report.rows, report.sampling) == ([row], sampling)
        engine.step()


def test_settings_that_are_whole_numbers_leave_room_for_others():
    """Captured rounds read the tensors of the first rows."""
    engine = Engine(tiny_target(), tiny_drafter(tiny_target()), Chain(2), graphs=Tape())
    come_and_go(engine, [job(i, (Sampling(1, top_p=1), Sampling(0.7, top_p=0.8))) for i in range(4)], rows=2)


PART = 4


def long(number: int) -> dict:
    """A job whose prompt has up to 24 tokens."""
    one = job(number)
    return one | {"prompt": one["prompt"] * (2 + 3 * (number % 3)), "max_new_tokens": 12}


@pytest.mark.matrix
@pytest.mark.parametrize("family", sorted({*HYBRIDS} - {"qwen3_5_text"}))
def test_targets_with_recurrent_layers(family, tmp_path):
    """A family whose layers read several positions from an empty state only reads its prompts at once."""
    target = hybrid_target(tmp_path, family)
    assert target.reads_on == (family != "mamba")
    engine = Engine(target, DRAFTERS["lookup"](target), Chain(2))
    come_and_go(engine, [long(number) for number in range(6)], rows=3, part=7)


def test_rows_that_run_wait_for_one_part_at_a_time():
    """Between two rounds the target reads PART prompt tokens at most, and every prompt token once."""
    target, read = tiny_target(), [[]]
    engine = Engine(target, DRAFTERS["eagle3"](target), DynamicTree(3, 3, 9))
    engine.reserve(3, 60, part=PART)
    first = engine.add([5, 6], max_new_tokens=50, eos=frozenset())
    engine.step()
    target.register_forward_pre_hook(lambda _, args: read[-1].append(args[0].numel()))
    others = [engine.add(**long(number)) for number in (1, 2, 4, 5)]
    while first.finish is None:
        if not engine.step().prefill:
            read[-1].pop()  # by the round itself
            read.append([])
    most = [sum(parts) for parts in read]
    assert max(most) == PART
    assert sum(most) == sum(len(other.prompt) for other in others)
    assert all(len(parts) <= 1 for parts in read)


def test_nobody_waits_where_nothing_runs():
    engine = Engine(tiny_target())
    engine.reserve(2, 48, part=PART)
    row = engine.add([2, 8] * 12, max_new_tokens=12, eos=frozenset())
    assert [engine.step().prefill for _ in range(8)] == [True] * 6 + [False] * 2  # 24 tokens
    assert len(row.tokens) == 3


def test_a_part_that_fails_can_be_repeated(monkeypatch):
    """A prompt that is aborted before it has been read completely leaves nothing."""
    target = tiny_target()
    engine = Engine(target)
    engine.reserve(1, 48, part=PART)
    aborted = engine.add(**long(1))
    engine.step()
    engine.abort(aborted)
    assert engine.loop.batch.chunked.sequence is None
    row, forward = engine.add(**long(2)), target.forward
    engine.step()
    monkeypatch.setattr(target, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(target, "forward", forward)
    finish(engine)
    assert_as_alone(target, [row])


draw = torch.Generator().manual_seed(0)
START = torch.randint(1, 17, (LEAST + 8,), generator=draw).tolist()
# The first again, its beginning, what continues it, what leaves it, what shares too little, and a short one.
BEGUN = [
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
    for first in range(0, len(BEGUN), together):
        for number in range(first, min(first + together, len(BEGUN))):
            rows.append(engine.add(BEGUN[number], seed=number, **asked(number)))
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


def test_prompts_are_read_anew_after_the_weights_have_changed():
    engine = Engine(tiny_target(), prefixes=PLENTY)
    for cached in (0, LEAST + 7, 0):
        if not cached:
            with torch.no_grad():
                engine.target.blocks[0].attention.qkv.weight.mul_(1.5)
        (row,) = engine.generate([START], max_new_tokens=12).rows
        assert row.cached == cached
        assert_as_alone(engine.target, [row])


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


@torch.inference_mode()
def test_a_prompt_that_was_read_is_for_its_row_only():
    target = tiny_target()
    chunked, row = ChunkedPrefill(target, target.new_cache(1, 20), (), 4), Sequence([1, 2, 3], 1)
    assert chunked.take([row.prompt]) is None
    chunked.read(row)
    assert chunked.take([[4, 5, 6]]) is chunked.take([row.prompt, [4]]) is None
    assert chunked.take([row.prompt]) is not None
