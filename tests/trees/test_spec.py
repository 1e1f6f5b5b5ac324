"""Every form of a tree is read, printed and refused."""

import json
from pathlib import Path

import pytest

from specdec import make_tree, registry
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.base import shape_of
from specdec.trees.spec import describe, grid, load_tree, parse_tree

NAMES = registry.names("tree")


@pytest.mark.parametrize("name", ["block", "chain", "dynamic", "sampled"])
def test_defaults_in_python_are_those_of_the_configuration(name):
    assert registry.target("tree", name)() == registry.make("tree", name)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"paths": [[0], [1], [0, 0], [0, 3]]}))
    return path


@pytest.mark.parametrize(
    "text",
    ["4/5/16", "1/5/6", "2/2/7", "1/3/4", "drawn 3,1,1", "drawn 3,2", "block 8/7/32", "paths 0 1 0.0 0.3", *NAMES],
)
def test_what_is_printed_is_read_again(text):
    tree = parse_tree(text)
    assert str(tree) == text
    assert {tree, parse_tree(str(tree)), parse_tree(tree.text)} == {tree}


def test_a_file_prints_as_its_path_and_is_a_list_of_paths(file):
    tree = parse_tree(file)
    assert str(tree) == str(file)
    assert (tree.topk, tree.steps, tree.num_draft_tokens) == (4, 2, 5)
    assert parse_tree(str(tree)) == tree == load_tree(file)
    for content, sentence in (
        ("_target_: specdec.trees.static.Chain\nsteps: 3\n", "it has no list `paths`"),
        ("paths: [[0], [1, 0]]", r"lists \[1, 0\], but not its parent"),
        ("{", "is not a YAML file"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=sentence):
            parse_tree(file)


@pytest.mark.parametrize(
    ("text", "kind", "described"),
    [
        ("1/5/6", Chain, "chain 1/5/6"),
        ("4/5/16", DynamicTree, "dynamic 4/5/16"),
        ("drawn 3,2", SampledTree, "sampled 3/2/10"),
        ("block 4/7/32", BlockTree, "block 4/7/32"),
        ("block", BlockTree, "block 8/16/32"),
        ("chain", Chain, "chain 1/5/6"),
        ("dynamic", DynamicTree, "dynamic 4/5/16"),
        ("sampled", SampledTree, "sampled 3/5/16"),
        ("static", StaticTree, "static 4/3/16"),
    ],
)
def test_reading(text, kind, described):
    tree = parse_tree(text)
    assert type(tree) is kind
    assert describe(tree) == described
    assert shape_of(tree) == described.split()[1]


class Twig(Chain):
    """A policy that its YAML alone makes known."""

    @classmethod
    def parse(cls, text: str) -> "Twig | None":
        return cls(int(text[5:])) if text.startswith("twig ") else None


def test_a_new_policy_is_found_by_its_yaml(monkeypatch, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "long.yaml").write_text(f"_target_: {Twig.__module__}.Twig\nsteps: 9\n")
    monkeypatch.setattr(registry, "CONF", tmp_path)
    assert parse_tree("long") == Twig(9)
    assert parse_tree("twig 3") == Twig(3)
    assert describe(parse_tree("twig 3")) == "long 1/3/4"


def test_what_is_left_out():
    assert make_tree() == DynamicTree() == DynamicTree(4, 5, 16)
    assert make_tree(topk=1) == Chain(5)
    assert make_tree(topk=2, steps=2) == DynamicTree(2, 2, 7)
    assert make_tree(topk=2, steps=3, sample_draft=True) == SampledTree((2, 1, 1))
    assert make_tree(topk=2, steps=3, num_draft_tokens=7, sample_draft=True).num_draft_tokens == 7
    assert make_tree(tree="static") == parse_tree("static")
    assert describe(make_tree(3, 2, sample_draft=True)) == "sampled 3/2/7"


def test_entries_say_the_same_again(file):
    for tree in map(parse_tree, ("4/5/16", "1/3/4", "drawn 3,1,1", "block 4/7/32", "static", file)):
        assert make_tree(**tree.entries()) == tree
    assert DynamicTree(2, 3, 6).entries() == {"topk": 2, "steps": 3, "num_draft_tokens": 6}


def test_the_grid_has_every_combination_once_and_a_chain_for_every_length():
    assert grid([4, 1], (2, 3), [8, 16, 8]) == ["4/2/8", "4/2/16", "4/3/8", "4/3/16", "1/2/3", "1/3/4"]
    assert grid(2, 2, 60) == ["2/2/60"], "what cannot be built is in it too"
    assert grid([4, 1], 2, 8, block=True) == ["block 4/2/8", "1/2/3"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_tree(0, 5), "topk and steps must be at least 1, got topk 0 and steps 5"),
        (lambda: make_tree(steps=0), "topk and steps must be at least 1, got topk 4 and steps 0"),
        (lambda: DynamicTree(2, 2, 9), "with topk 2 and steps 2 a tree holds 2 to 7 tokens"),
        (lambda: make_tree(1, 5, 9), r"with topk 1 the tree is a chain of steps \+ 1 = 6 tokens, not 9"),
        (
            lambda: make_tree(4, 5, 9, sample_draft=True),
            r"with topk 4 the tree drawn from the drafter is 4 chains of topk \* steps \+ 1 = 21 tokens, not 9",
        ),
        (lambda: make_tree(topk=2, tree="static"), "contradict a whole tree"),
        (lambda: parse_tree("block 2/2/9"), "a tree holds 2 to 7"),
        (lambda: BlockTree(2, 2, 1), "a tree holds 2"),
        (lambda: BlockTree(8, 16, 5000), "num_draft_tokens must be at most 4096, got 5000"),
        (lambda: parse_tree("drawn 3,0"), "at least one child on each"),
        (lambda: SampledTree(()), "at least one child on each"),
        (lambda: parse_tree("oak"), "there is no tree 'oak'; known are .*chain, .*static"),
        (lambda: parse_tree("no/such"), "no such tree file: no/such"),
        (lambda: parse_tree("oak.yaml"), "no such tree file: oak.yaml"),
        (lambda: grid([1, 0], 2, 3), "topk must be a positive whole number or a list of such, got 0"),
        (lambda: grid(1, True, 3), "steps must be a positive whole number or a list of such, got True"),
        (lambda: grid(1, 2, []), r"num_draft_tokens must be a positive whole number .* got \[\]"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
