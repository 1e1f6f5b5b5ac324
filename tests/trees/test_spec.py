"""`TreeSpec`: every form of a tree is read, printed, built and refused in one place."""

import json
from pathlib import Path

import pytest

from specdec import make_tree, registry
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.spec import TreeSpec, describe, load_tree, shape_of

NAMES = registry.names("tree")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"paths": [[0], [1], [0, 0], [0, 3]]}))
    return path


@pytest.mark.parametrize(
    "text", ["4/5/16", "1/5/6", "2/2/7", "1/3/9", "2/2/60", "drawn 3,1,1", "drawn 3,2", "block 8/7/32", *NAMES]
)
def test_what_is_printed_is_read_again(text):
    spec = TreeSpec.parse(text)
    assert str(spec) == text
    assert {spec, TreeSpec.parse(str(spec))} == {spec}


def test_a_file_prints_as_its_path_and_is_a_list_of_paths(file):
    spec = TreeSpec.parse(file)
    assert str(spec) == str(file)
    assert (spec.topk, spec.steps, spec.num_draft_tokens, spec.path) == (4, 2, 5, file)
    assert TreeSpec.parse(str(spec)) == spec
    assert load_tree(file).num_draft_tokens == 5
    file.write_text("_target_: specdec.trees.chain.Chain\nsteps: 3\n")
    with pytest.raises(ValueError, match="it has no list `paths`"):
        TreeSpec.parse(file)


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
def test_building(text, kind, described):
    spec = TreeSpec.parse(text)
    policy = spec.build()
    assert type(policy) is kind
    assert describe(policy) == described
    assert shape_of(spec) == described.split()[1]


def test_every_name_of_conf_is_a_tree():
    assert {"chain", "dynamic", "sampled", "static"} <= set(NAMES)
    for name in NAMES:
        spec = TreeSpec.parse(name)
        assert shape_of(spec.build()) == shape_of(spec)
        assert (spec.entries(), spec.path) == ({"tree": name}, registry.CONF / "tree" / f"{name}.yaml")


def test_a_new_policy_is_found_by_its_yaml(monkeypatch, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "long.yaml").write_text("_target_: specdec.trees.chain.Chain\nsteps: 9\n")
    monkeypatch.setattr(registry, "CONF", tmp_path)
    assert TreeSpec.parse("long").build().steps == 9


def test_what_is_left_out():
    assert TreeSpec.of() == TreeSpec(4, 5, 16)
    assert TreeSpec.of(topk=1) == TreeSpec(1, 5, 6)
    assert TreeSpec.of(topk=2, steps=2) == TreeSpec(2, 2, 7)
    assert TreeSpec.of(topk=2, steps=3, sample_draft=True) == TreeSpec.drawn((2, 1, 1))
    assert TreeSpec.of(topk=2, steps=3, num_draft_tokens=7, sample_draft=True).num_draft_tokens == 7
    assert TreeSpec.of(tree="static") == TreeSpec.parse("static")
    assert describe(make_tree(3, 2, sample_draft=True)) == "sampled 3/2/7"


def test_entries_say_the_same_again(file):
    for spec in map(TreeSpec.parse, ("4/5/16", "1/3/4", "drawn 3,1,1", "block 4/7/32", "static", file)):
        assert TreeSpec.of(**spec.entries()).build().num_draft_tokens == spec.num_draft_tokens
    assert TreeSpec(2, 3, 6).entries() == {"topk": 2, "steps": 3, "num_draft_tokens": 6}


def test_the_grid_has_every_combination_once_and_a_chain_for_every_length():
    specs = TreeSpec.grid([4, 1], (2, 3), [8, 16, 8])
    assert [str(s) for s in specs] == ["4/2/8", "4/2/16", "4/3/8", "4/3/16", "1/2/3", "1/3/4"]
    assert TreeSpec.grid(2, 2, 60) == [TreeSpec(2, 2, 60)], "what cannot be built is in it too"
    assert TreeSpec(2, 2, 60).most_nodes == 7
    assert [str(s) for s in TreeSpec.grid([4, 1], 2, 8, block=True)] == ["block 4/2/8", "1/2/3"]
    assert TreeSpec(4, 5, 8, block=True).most_nodes == 1365


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TreeSpec(0, 5), "topk and steps must be at least 1, got topk 0 and steps 5"),
        (lambda: TreeSpec.of(steps=0), "topk and steps must be at least 1, got topk 4 and steps 0"),
        (lambda: TreeSpec(2, 2, 9).build(), "with topk 2 and steps 2 a tree holds 2 to 7 tokens"),
        (lambda: TreeSpec(1, 5, 9).build(), r"with topk 1 the tree is a chain of steps \+ 1 = 6 tokens, not 9"),
        (
            lambda: TreeSpec.of(4, 5, 9, sample_draft=True),
            r"with topk 4 the tree drawn from the drafter is 4 chains of topk \* steps \+ 1 = 21 tokens, not 9",
        ),
        (lambda: TreeSpec.of(topk=2, tree="static"), "contradict a whole tree"),
        (lambda: TreeSpec.parse("block 2/2/9").build(), "a tree holds 2 to 7"),
        (lambda: TreeSpec(2, 2, 1, block=True).build(), "a tree holds 2"),
        (lambda: TreeSpec.parse("drawn 3,0"), "at least one child on each"),
        (lambda: TreeSpec.drawn(()), "at least one child on each"),
        (lambda: TreeSpec.parse("oak"), "there is no tree 'oak'; known are .*chain, .*static"),
        (lambda: TreeSpec.parse("no/such"), "no such tree file: no/such"),
        (lambda: TreeSpec.parse("oak.yaml"), "no such tree file: oak.yaml"),
        (lambda: TreeSpec.grid([1, 0], 2, 3), "topk must be a positive whole number or a list of such, got 0"),
        (lambda: TreeSpec.grid(1, True, 3), "steps must be a positive whole number or a list of such, got True"),
        (lambda: TreeSpec.grid(1, 2, []), r"num_draft_tokens must be a positive whole number .* got \[\]"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
