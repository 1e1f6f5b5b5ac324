"""Replay equals reality: round by round where a text decides, in expectation where draws do."""

import json
from collections.abc import Callable
from itertools import product

import pytest
import torch
from helpers import DRAFTERS, tiny_drafter, tiny_target

from specdec.children import LIKELIEST
from specdec.drafters.layers import restrict
from specdec.engine.engine import Engine
from specdec.lab.replay import Recording, answers_to, likely, record, while_likely
from specdec.recording import Text
from specdec.sampling.filters import filtered_probs
from specdec.structs import DraftTree, Sampling
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.dynamic import Pool, select
from specdec.verify import make_verifier

PROMPTS = [[3, 5, 7, 9], [1], [8, 2, 6]]
EOS = frozenset({4})
HOW = {"max_new_tokens": 25, "eos": EOS}
SETTINGS = [(1, 2, 3), (2, 3, 5), (3, 2, 2), (3, 3, 9), (3, 3, 22)]
KINDS = ("eagle3", "eagle", "mtp-two-heads-pre-norm", "medusa", "lookup", "suffix", "draft-model", "dflash", "dflash2")
FILTERS = (Sampling(0.8), Sampling(0.8, 7, 0.95))
BLOCK_TREES = [BlockTree(*shape) for shape in (
    (1, 3, 4), (2, 1, 3), (2, 3, 6), (3, 2, 8), (3, 3, 12), (4, 4, 9), (4, 5, 14), (5, 2, 20), (6, 5, 24), (5, 16, 40),
)]  # fmt: skip
AMONG_FOUR = StaticTree([[0], [1], [3], [0, 0], [3, 1], [3, 1, 0], [0, 0, 2]])  # a selector's candidates
STATIC = StaticTree([[0], [1], [5], [0, 0], [5, 1], [5, 1, 0], [0, 0, 4]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, draft_vocab=8)


def refused(calls: dict[str, Callable]) -> None:
    """Each call is a ValueError with this message."""
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def recorded(
    target, drafter, prompts=PROMPTS, *, outputs=None, seed=0, max_new_tokens=25, eos=EOS, sampling=None, **how
) -> Recording:
    """Along answers of the target, or along these outputs."""
    same = {"max_new_tokens": max_new_tokens, "eos": eos}
    if outputs is None:
        texts = answers_to(target, prompts, sampling, seed=seed, **same)
    else:
        texts = [
            Text(prompt, output, (seed, i)) for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
    return record(target, drafter, texts, sampling=sampling, **same, **how)


def real(target, drafter, tree, verifier="match", prompts=PROMPTS, **how):
    return Engine(target, drafter, tree, make_verifier(verifier)).generate(prompts, **HOW | how).rows


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "sampling", "children"),
    [
        *product(KINDS, [Sampling()], [None]),
        *product(("eagle3", "mtp-two-heads-pre-norm", "suffix"), FILTERS, ("coupled", "likeliest")),
    ],
    ids=lambda value: f"t{value.temperature}-k{value.top_k}" if isinstance(value, Sampling) else str(value),
)
def test_rounds_are_those_of_real_runs(target, kind, sampling, children):
    """What the target draws is settled by seed and position, so one recording holds the rounds of every tree."""
    drafter, abstains = DRAFTERS[kind](target), kind in ("lookup", "suffix")
    how, asked = HOW | {"sampling": sampling, "seed": 5}, {"children": children} if children else {}
    recording = recorded(target, drafter, PROMPTS, topks=(1, 2, 3), steps=3, **how, **asked)
    if sampling.greedy:
        assert {text.tokens[-1] in EOS for text in recording.texts} == {True, False}, "both ends should be there"
    trees = [*(DynamicTree(*setting) for setting in SETTINGS), Chain(3)]
    if not abstains:  # their children tie, and `topk` breaks ties in an order of its own
        trees.append(AMONG_FOUR if kind == "dflash2" else STATIC)
    accepted = 0
    for tree, replayed in zip(trees, recording.replay_many(trees), strict=True):
        rows = Engine(target, drafter, tree, children=children).generate(PROMPTS, **how).rows
        assert [text.tokens for text in recording.texts] == [row.tokens for row in rows]
        assert replayed.rows == [row.trace for row in rows]
        if abstains:  # as often as the rows' traces say
            drafted = [levels > 0 for row in replayed.drafted for levels in row]
            assert drafted.count(False) == sum(row.trace.undrafted for row in rows) > 0
            assert replayed.levels == pytest.approx(sum(map(sum, replayed.drafted)) / len(drafted))
        else:
            assert (replayed.nodes, replayed.levels) == (tree.num_draft_tokens, tree.steps)
        assert sampling.greedy <= (replayed.expected_tau == replayed.tau)
        accepted += sum(map(sum, (row.accepted for row in replayed.rows)))
    assert accepted > 0, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("children", [None, "coupled", "likeliest"], ids=["greedy", "coupled", "likeliest"])
def test_trees_over_blocks(target, children, tmp_path):
    """Ten settings from one recording, read from a file; the last is bounded by the block alone."""
    drafter, how = DRAFTERS["dflash"](target), dict(HOW)
    if children:
        how |= {"sampling": Sampling(0.8), "seed": 5}
    told = {"children": children} if children else {}
    recorded(target, drafter, PROMPTS, topks=(1, 2, 6), steps=5, **told, **how).save(tmp_path / "it")
    recording = Recording.load(tmp_path / "it")
    accepted = set()
    for tree, replayed in zip(BLOCK_TREES, recording.replay_many(BLOCK_TREES), strict=True):
        rows = Engine(target, drafter, tree, children=children).generate(PROMPTS, **how).rows
        assert replayed.rows == [row.trace for row in rows]
        assert (replayed.nodes, replayed.levels) == (tree.num_draft_tokens, min(tree.steps, 5))
        assert (replayed.expected is None) == (children != "likeliest")
        accepted.add(sum(map(sum, (row.accepted for row in replayed.rows))))
    assert len(accepted) > 3, "the trees accept alike: the test shows little"
    for whole in ((1, 3, 4), (2, 2, 7)):  # trees of all nodes are the same as dynamic ones
        ours, dynamic = recording.replay(BlockTree(*whole)), recording.replay(DynamicTree(*whole))
        assert ours.rows == dynamic.rows
        assert ours.expected_tau == pytest.approx(dynamic.expected_tau)


def test_what_is_not_recorded_of_blocks(target):
    drafter, conditioned = DRAFTERS["dflash"](target), DRAFTERS["dflash2"](target)
    how = {"prompts": PROMPTS[:1], "topks": (2,), "max_new_tokens": 4}
    recording, of_conditioned = (recorded(target, each, steps=3, **how) for each in (drafter, conditioned))
    refused({
        "the 2 best tokens of a slot were recorded": lambda: recording.replay(BlockTree(3, 2, 4)),
        "4 levels deep, but 3 were recorded": lambda: recording.replay(BlockTree(2, 4, 4)),
        "guesses 5 tokens ahead": lambda: recorded(target, drafter, steps=6, **how),
        "do not depend on each other": lambda: of_conditioned.replay(BlockTree(2, 3, 4)),
    })  # fmt: skip


def test_pieces_and_batches_change_nothing(target, drafter, monkeypatch):
    how = {"topks": (3,), "steps": 3, "sampling": Sampling(0.9)}
    whole = recorded(target, drafter, PROMPTS * 2, **how)
    monkeypatch.setattr("specdec.trees.record.PIECE", 4)
    outputs = [text.tokens for text in whole.texts]
    cut = recorded(target, drafter, PROMPTS * 2, **how, outputs=outputs, batch=3)
    assert torch.equal(whole.tensors["pool.3.parents"], cut.tensors["pool.3.parents"])
    torch.testing.assert_close(whole.tensors["pool.3.scores"], cut.tensors["pool.3.scores"])
    tree = DynamicTree(3, 3, 9)
    assert whole.replay(tree).emitted == cut.replay(tree).emitted


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_vocabularies_are_those_of_frspec(target, kind):
    ids = torch.tensor([12, 3, 4, 6, 8, 5])
    drafter, smaller = DRAFTERS[kind](target), DRAFTERS[kind](target)
    restrict(smaller, ids)
    whole, restricted = (recorded(target, each, PROMPTS, topks=(2,), steps=3) for each in (drafter, smaller))
    differs = False
    for tree in (DynamicTree(2, 3, 6), Chain(3), StaticTree([[0], [1], [1, 1]])):
        replayed = restricted.replay(tree)
        assert replayed.rows == [row.trace for row in real(target, smaller, tree)]
        differs |= replayed.rows != whole.replay(tree).rows
    assert differs, "the restriction changed nothing: the test shows nothing"


class Truncated(DynamicTree):
    """The dynamic tree as a truncation rule cuts it, for one row at a time."""

    def __init__(self, rule: Callable, *setting: int):
        super().__init__(*setting)
        vars(self).update(rule=rule, sizes=[])

    def grow(self, drafter, root, state, children=LIKELIEST) -> DraftTree:
        pool = self.expand(drafter, state)
        sizes = [self.topk] + [self.topk**2] * (self.steps - 1)
        levels, nodes = (int(x) for x in self.rule(pool.scores.split(sizes, 1)))
        candidates = self.candidates(self.topk, levels)
        self.sizes.append(min(self.num_draft_tokens, nodes, candidates + 1))
        return select(root, Pool(*(part[:, :candidates] for part in pool)), self.sizes[-1], self.steps)


@pytest.mark.parametrize("rule", [likely(0.15), while_likely(0.6)], ids=["likely", "while_likely"])
def test_truncation_rules(target, drafter, rule):
    recording = recorded(target, drafter, PROMPTS, topks=(3,), steps=3)
    tree = Truncated(rule, 3, 3, 12)
    rows = [real(target, drafter, tree, prompts=[prompt])[0] for prompt in PROMPTS]
    replayed = recording.replay(DynamicTree(3, 3, 12).replay(recording, rule))
    assert replayed.rows == [row.trace for row in rows]
    assert replayed.nodes == pytest.approx(sum(tree.sizes) / len(tree.sizes))
    assert len(set(tree.sizes)) > 1, "the rule cuts all alike: the test shows little"
    assert replayed.rows != recording.replay(DynamicTree(3, 3, 12)).rows


@pytest.fixture(scope="module")
def every_text():
    """A recording of all texts of up to four tokens, and the probability of each [Q]."""
    target = tiny_target(vocab=5, seed=2)
    drafter = tiny_drafter(target, seed=3)
    sampling, prompt, eos = Sampling(0.9), [3, 0], 4
    outputs = [list(text) for text in product(range(4), repeat=4)]  # those that do not end before the limit
    outputs += [[*text, eos] for length in range(4) for text in product(range(4), repeat=length)]
    logits = target(torch.tensor([prompt + text + [0] * (4 - len(text)) for text in outputs]), None)[0]
    rows = zip(filtered_probs(logits, sampling).double(), outputs, strict=True)
    probability = [probs[range(1, 1 + len(text)), text].prod() for probs, text in rows]
    recording = recorded(
        target, drafter, [prompt] * len(outputs), topks=(1, 2, 3), steps=3, max_new_tokens=4, sampling=sampling,
        eos=frozenset({eos}), outputs=outputs, batch=256, children="likeliest",
    )  # fmt: skip
    assert sum(probability) == pytest.approx(1, abs=1e-5)
    return recording, torch.stack(probability)


@pytest.mark.matrix
@pytest.mark.parametrize("setting", [(1, 3, 4), (2, 1, 3), (2, 3, 4), (3, 2, 10), (3, 3, 6)])
def test_a_rounds_expectation_is_exact(every_text, setting):
    """Over all texts what rounds are expected to emit weighs as much as what they do emit, in every round by itself,
    although in hardly any text it is the same."""
    recording, probability = every_text
    topk, steps, nodes = setting
    replayed = recording.replay(DynamicTree(topk, steps, nodes))
    for number in range(3):
        emitted, expected = (
            sum(p * row[number] for p, row in zip(probability, rows, strict=True) if len(row) > number)
            for rows in (replayed.emitted, replayed.expected)
        )
        assert float(expected) == pytest.approx(float(emitted), abs=1e-5)
    same = [a == pytest.approx(b) for a, b in zip(replayed.emitted, replayed.expected, strict=True) if a]
    assert sum(same) < 0.1 * len(same)


def test_drawn_chains_under_rejection(target):
    """The texts of real runs, and the rounds expected for them: the difference has mean 0."""
    drafter, sampling = tiny_drafter(target), Sampling(2.0)
    prompts = [[3, 5, 7, 9]] * 300
    rows = real(target, drafter, SampledTree([1] * 3), "rejection", prompts, sampling=sampling, max_new_tokens=12)
    outputs = [row.tokens for row in rows]
    how = HOW | {"max_new_tokens": 12}
    how |= {"topks": (1,), "steps": 3, "sampling": sampling, "outputs": outputs, "batch": 300}
    recording = recorded(target, drafter, prompts, children="likeliest", **how)
    rounds = torch.tensor([float(row.trace.rounds) for row in rows])

    def score(expected: list[float]) -> float:
        rest = rounds - torch.tensor(expected)
        return float(rest.mean() / rest.std() * len(rest) ** 0.5)

    assert abs(score(recording.replay_drawn(3).rounds)) < 3.5
    assert abs(score(recording.replay_drawn(2).rounds)) > 6, "a shorter chain cannot be told apart: too little is shown"
    likeliest = recording.replay(DynamicTree(1, 3, 4))
    assert abs(score([float(row.rounds) for row in likeliest.rows])) > 6


def test_files(target, drafter, tmp_path):
    how = {"topks": (2, 3), "steps": 2, "sampling": Sampling(1.0)}
    recording, folder = recorded(target, drafter, PROMPTS, **how), tmp_path / "recording"
    for _ in range(2):  # the second in place of the first
        recording.save(folder)
    again = Recording.load(folder)
    assert (again.texts, again.settings, again.sampling) == (recording.texts, recording.settings, recording.sampling)
    trees = [DynamicTree(3, 2, 5), StaticTree([[0], [0, 1]])]
    assert again.replay_many(trees) == recording.replay_many(trees)
    assert again.replay_drawn(2).rounds == recording.replay_drawn(2).rounds

    tensors, header = folder / "recording.safetensors", folder / "recording.json"
    tensors.write_bytes(tensors.read_bytes()[:-50])
    refused({"is damaged, record it anew": lambda: Recording.load(folder)})
    header.write_text(json.dumps(json.loads(header.read_text()) | {"version": 99}))
    (tmp_path / "other").write_text("keep me")
    refused({
        "not a recording of version 1": lambda: Recording.load(folder),
        r"it has no recording\.json": lambda: Recording.load(tmp_path),
        "holds other": lambda: recording.save(tmp_path),
    })  # fmt: skip


def test_what_was_not_proposed_is_not_accepted(target, tmp_path):
    """Of n-grams: in files, in sampled texts, and in drawn chains."""
    drafter, how = DRAFTERS["suffix"](target), {"topks": (1,), "steps": 3, "sampling": Sampling(0.7)}
    rows = real(target, drafter, Chain(3), sampling=how["sampling"], prompts=PROMPTS * 4, seed=5)
    recording = recorded(target, drafter, PROMPTS * 4, outputs=[row.tokens for row in rows], seed=5, **how)
    recording.save(tmp_path / "recording")
    again = Recording.load(tmp_path / "recording")
    for kept in (recording, again):
        replayed = kept.replay(Chain(3))
        assert replayed.rows == [row.trace for row in rows]
        assert 0 < sum(row.undrafted for row in replayed.rows) < replayed.rounds
        assert sum(sum(row.accepted) for row in replayed.rows) > 0
    longest = kept.replay_drawn(3)
    kept.tensors["levels"].clamp_(max=1)
    assert sum(kept.replay_drawn(3).rounds) == pytest.approx(sum(kept.replay_drawn(1).rounds))
    assert sum(kept.replay_drawn(3).rounds) > sum(longest.rounds)
    kept.tensors["levels"].zero_()
    assert kept.replay_drawn(3).tau == kept.replay(Chain(3)).tau == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"topks": (0,)}, "at least 1"),
        ({"topks": (9,)}, "vocabulary has 8 tokens only"),
        ({"max_new_tokens": 254}, "decode fewer new tokens"),
        ({"prompts": []}, "no text was given"),
        ({"outputs": [[1], [], [1]]}, "a text has no token"),
        ({"outputs": [[1], [2], [3]]}, "no round to replay"),
        ({"sampling": Sampling(presence_penalty=0.5)}, "under penalties cannot be replayed"),
    ],
)
def test_what_cannot_be_recorded(target, drafter, change, message):
    settings = {"prompts": PROMPTS, "topks": (2,), "steps": 2, "max_new_tokens": 3, "eos": frozenset()} | change
    with pytest.raises(ValueError, match=message):
        recorded(target, drafter, **settings)


def test_what_cannot_be_replayed(target, drafter):
    recording = recorded(target, drafter, PROMPTS, topks=(2, 3), steps=2)
    refused({
        "topk 4 was not recorded; recorded were 2, 3": lambda: recording.replay(DynamicTree(4, 2, 5)),
        "3 levels deep, but 2 were recorded": lambda: recording.replay(DynamicTree(2, 3, 5)),
        "SampledTree cannot be replayed": lambda: recording.replay(SampledTree([1])),
        "must keep 1 to 2 levels": lambda: DynamicTree(2, 2, 5).replay(
            recording, lambda levels: (torch.zeros(len(levels[0])), torch.ones(len(levels[0])))
        ),
        "these texts are greedy": lambda: recording.replay_drawn(2),
        r"must lie in \(0, 1\]": lambda: likely(0.0),
    })  # fmt: skip
