"""Measured acceptance, and the tree that is chosen by it."""

import itertools
from dataclasses import replace

import pytest
from helpers import DRAFTERS, main_of, refused, tiny_target

from specdec import Engine, load_target, parse_tree
from specdec.acceptance import FILE, Acceptance, AlongTexts, read_acceptance
from specdec.contracts import Drafter
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.engine.traces import tau
from specdec.recording import Text
from specdec.trees import Chain, StaticTree, Tree
from specdec.trees.record import record
from specdec.tuning import choose as auto
from specdec.tuning import timing
from specdec.tuning.choose import Candidate, Choice, candidates, choose, choose_tree
from specdec.tuning.costs import Kind

generate = main_of("generate")

PROMPTS = [[3, 5, 7, 2], [1], [4, 4, 9, 8, 7, 6, 1]]
# Five tokens after the first: the words are of the first five places.
HAND = AlongTexts(0.0, 3, 3, ("001 01 - 20 -",))


@pytest.fixture(autouse=True)
def timed_in_short(monkeypatch):
    monkeypatch.setattr(auto, "SECONDS", 0.1)
    monkeypatch.setattr(auto, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(auto, "LOOK", 0.0)
    monkeypatch.setattr(auto.Threads, "occupied_since", lambda self, begun: 0.0)


@pytest.mark.parametrize(("cost", "chosen"), [(0.9, Chain(3)), (1.1, None)])
def test_next_to_other_programs_only_a_chain_is_timed(monkeypatch, cost, chosen):
    """cost: of its round, in plain rounds for each of its tokens."""
    monkeypatch.setattr(auto.Threads, "occupied_since", lambda self, begun: 1.0)
    timed, tau = set(), next(c.tau for c in TREES if c.tree == Chain(3))
    choice = choose(TREES, lambda tree, rounds: timed.add(tree) or (0.5, 0.5 if tree is None else cost * tau - 0.5))
    assert (choice.tree, choice.busy, timed) == (chosen, True, {None, Chain(3)})
    assert str(choice).endswith("the machine was busy, so this is rough and not cached")


def test_tables_by_hand():
    first, second, third = HAND.table()
    assert first == [2 / 5, 0, 1 / 5]  # of five places two of rank 0, one of rank 2
    assert second == [2 / 3, 1 / 3, 0]
    assert third == [0, 1 / 2, 0]  # the third level of the fourth place is after the end of the text


def test_tau_by_hand():
    for paths, expected in (
        ([[0]], 5 / 4),  # from place 0 two tokens; then places 2, 3 and 4 one each
        ([[0], [0, 0], [0, 0, 1]], 5 / 2),  # four tokens at once, and the last
        ([[0], [1], [2], [2, 0]], 5 / 3),  # places 0, 2 and 3, whose second token is the text's last
    ):
        assert HAND.tau(paths) == pytest.approx(expected)


def test_tau_of_a_batch_is_that_of_its_slowest_text():
    """Texts of 2, 3 and 4 rounds for four tokens."""
    three = AlongTexts(0.0, 1, 1, ("0 0 0 0", "0 - - 0", "- - - -"))
    assert three.tau([[0]]) == pytest.approx(12 / 9)
    assert three.tau([[0]], 2) == pytest.approx(1 / ((3 + 4 + 4) / 3 / 4))
    assert [three.tau([[0]], batch) for batch in (3, 16)] == [1.0, 1.0]
    both = Acceptance((three, AlongTexts(1.0, 1, 1, ("0 0", "- -"))))
    assert both.tau([[0]], 0.5, 2) == pytest.approx((three.tau([[0]], 2) + 1) / 2)


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        *itertools.product(["eagle3", "mtp", "medusa"], ["1/2/3", "paths 0 1 2 0.0 0.1 1.0 0.0.0"]),
        ("lookup", "1/2/3"),  # which do not propose at every place
        ("suffix", "1/2/3"),
    ],
)
def test_tau_along_answers_is_that_of_decoding(drafter, tree):
    target = tiny_target()
    model, tree = DRAFTERS[drafter](target), parse_tree(tree)
    plain = Engine(target).generate(PROMPTS, max_new_tokens=14, eos=frozenset()).rows
    texts = [Text(row.prompt, row.tokens) for row in plain]
    recording = record(target, model, texts, steps=3)
    alone = [record(target, model, [text], steps=3).along(4).texts[0] for text in texts]
    assert recording.along(4) == AlongTexts(0.0, 4, 3, tuple(alone))
    rows = Engine(target, model, tree).generate(PROMPTS, max_new_tokens=14, eos=frozenset()).rows
    assert recording.along(4).tau(tree.paths) == pytest.approx(tau([row.trace for row in rows]))
    assert recording.replay(tree).emitted == [row.trace.emitted for row in rows]


def test_between_temperatures_tau_lies_on_a_line():
    hot = AlongTexts(1.0, 3, 3, ("- - - - -",))
    both, paths = Acceptance((HAND, hot)), [[0], [0, 0], [0, 0, 1]]
    assert [both.tau(paths, t) for t in (0, 0.5, 1, 3)] == pytest.approx([2.5, 1.75, 1, 1])
    assert both.nearest(0.4) is HAND
    assert both.nearest(5) is hot


def test_the_file_is_read_as_it_was_written(tmp_path):
    assert read_acceptance(tmp_path) is None
    measured = Acceptance((HAND, AlongTexts(1.0, 3, 3, ("0 -",))), "two words")
    (tmp_path / FILE).write_text(measured.as_text())
    assert read_acceptance(tmp_path) == measured


# Choosing


def world(level: float, node: float, width: float = 0.0):
    """A machine on which a plain token takes 1, and a tree of one level 1, and more by these."""

    def seconds_of(tree: Tree | None, rounds: int) -> tuple[float, float]:
        if tree is None:
            return 0.0, 1.0
        return level * (tree.steps - 1) + width * tree.draft_slots(), 1 + node * (tree.num_draft_tokens - 1)

    return seconds_of


# Half of all places are found to the end, with the best child; a quarter has the second; a quarter nothing.
LIKELY = Acceptance((AlongTexts(0.0, 4, 4, (" ".join(["0000", "01", "0000", "-", "1", "0000", "00", "-"] * 20),)),))
TREES = candidates(LIKELY, DRAFTERS["eagle3"](tiny_target()), 0.0)


@pytest.mark.matrix
@pytest.mark.parametrize("level", [0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("node", [0.001, 0.03, 0.1])
@pytest.mark.parametrize("width", [0.0, 0.05])
def test_the_choice_is_nearly_the_best_of_all(level, node, width):
    seconds = world(level, node, width)
    best = max([1.0, *(c.tau / sum(seconds(c.tree, 1)) for c in TREES)])
    choice = choose(TREES, seconds)
    found = 1.0 if choice.tree is None else choice.tau / sum(seconds(choice.tree, 1))
    assert found >= 0.97 * best
    assert choice.speedup == pytest.approx(found)


def test_only_static_trees_are_called_static():
    for tree, said in ((Chain(3), "1/3/4"), (StaticTree([[0], [1]]), "static 2/1/3 (paths 0 1)")):
        assert str(Choice(tree, 2.0, 1.3, 400.0)).startswith(f"tree: {said}, the fastest here")


@pytest.mark.parametrize("slow", [range(5, 10**6), range(35), range(20, 50)])
def test_a_machine_that_is_slow_for_a_while_changes_nothing(slow):
    """Meanwhile all takes twice as long."""
    steady, asked = world(level=0.1, node=0.03), itertools.count()

    def seconds_of(tree: Tree | None, rounds: int) -> tuple[float, float]:
        factor = 2 if next(asked) in slow else 1
        return tuple(factor * part for part in steady(tree, rounds))

    choice, undisturbed = choose(TREES, seconds_of), choose(TREES, steady)
    assert choice.tree == undisturbed.tree is not None
    assert choice.speedup == pytest.approx(undisturbed.speedup)


def test_none_where_none_pays():
    choice = choose(TREES, world(level=2.0, node=1.0))
    assert choice.tree is None
    assert choice.best_speedup < auto.MARGIN
    assert f"; --tree {choice.best} would reach" in str(choice)  # the flag with which it drafts nevertheless
    assert "; --tree 'paths 1 2 5' would reach" in str(replace(choice, best="paths 1 2 5"))
    for gain, tree in ((1.01, None), (1.03, Chain(1))):  # a little is not enough
        assert choose([Candidate(Chain(1), gain, Kind.of(Chain(1)))], lambda *_: (0.0, 1.0)).tree == tree


def test_compiled_rounds_have_costs_of_their_own():
    """Few are compiled, of different depths, and the fastest of those compiled is taken."""
    compiled, asked = world(level=0.0, node=0.01), []

    def seconds_of(tree: Tree | None, rounds: int) -> tuple[float, float]:
        asked.append(tree)
        return 0.0, sum(compiled(tree, rounds)) / 2

    eager = world(level=0.6, node=0.02)
    choice = choose(TREES, eager, seconds_of)
    timed = set(asked) - {None}
    assert len({tree.steps for tree in timed}) == len(timed) == auto.COMPILED
    rate = {c.tree: c.tau / sum(compiled(c.tree, 1)) for c in TREES if c.tree in timed}
    assert choice.tree == max(rate, key=rate.get) != choose(TREES, eager).tree
    assert choice.speedup == pytest.approx(rate[choice.tree])
    assert choice.plain_tokens_per_second == pytest.approx(2.0)
    assert choose(TREES, eager, lambda tree, rounds: (0.0, 1.0 if tree is None else 9.0)).tree is None


def test_candidates_keep_to_the_drafter():
    class Shallow(Drafter):
        max_steps = 2

    assert max(c.tree.steps for c in candidates(LIKELY, Shallow(), 0.0)) == 2
    assert max(c.tree.steps for c in TREES) == 4


# Measured for real, and cached


@pytest.fixture
def pair(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "BUSY", 1e9)
    target = tiny_target()
    drafter = DRAFTERS["eagle3"](target)
    drafter.acceptance = Acceptance((AlongTexts(0.0, 2, 2, ("01 0 - 00 0",)),))  # few trees
    return target, drafter


def test_a_choice_is_kept(pair, monkeypatch):
    first = choose_tree(*pair)
    monkeypatch.setattr(auto, "choose", lambda *_: pytest.fail("measured again"))
    assert choose_tree(*pair) == first
    for how in ({"recalibrate": True}, {"batch": 2}, {"temperature": 1.0}):
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            choose_tree(*pair, **how)
    pair[1].acceptance = Acceptance((HAND,))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        choose_tree(*pair)


def test_what_a_busy_machine_says_is_not_kept(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "BUSY", 0.0)
    assert "busy" in str(choose_tree(*pair))
    assert not (tmp_path / "cache").exists()


def test_commands(target_path, drafter_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draft, prompts = tmp_path / "draft", tmp_path / "prompts.txt"
    save_drafter(load_drafter(drafter_path, target := load_target(target_path)), draft, target)
    prompts.write_text("what is a tree?\nwhy?\n")
    models = ["--target", str(target_path), "--draft", str(draft)]
    ask = ["--prompt", "what is a tree?", "--max-new-tokens", "12", "--raw"]
    said = refused(generate, *models, *ask, "--tree", "auto")
    assert "--tree auto cannot choose: this drafter has no acceptance.json" in said
    main_of("tune tree")([
        *models, "--prompts", str(prompts), "--raw", "--max-new-tokens", "12", "--steps", "3", "--topk", "4",
        "--num-draft-tokens", "7", "--keep", "--out", str(tmp_path / "tree.yaml"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "7 nodes, " in printed
    wrote = f"{tmp_path / 'tree.yaml'}: specdec generate {' '.join(models)} --tree {tmp_path / 'tree.yaml'}\n"
    assert f"wrote {wrote}" in printed  # without them the tree would serve another pair
    assert parse_tree(tmp_path / "tree.yaml").num_draft_tokens == 7
    assert [m.temperature for m in read_acceptance(draft).measured] == [0.0, 1.0]
    generate([*models, *ask, "--compare"])
    printed = capsys.readouterr()
    assert "\ntree: " in printed.err
    assert "identical: yes" in printed.out
    generate([*models, *ask, "--show-trees"])  # --show-trees gets a tree, though none may pay
    shown = capsys.readouterr()
    assert "`-- " in shown.out
    assert "tree: " not in shown.err
    generate([*models, *ask, "--topk", "1", "--steps", "2"])
    assert "tree: " not in capsys.readouterr().err
    said = refused(generate, *models, *ask, "--tree", "auto", "--verifier", "typical")
    assert "acceptance was measured with the rule match" in said
    save_drafter(load_drafter(draft, target), draft, target)  # other weights, for all that is known
    assert read_acceptance(draft) is None
