"""Static trees: their shape, what they draft, files, the optimal one, and the acceptance it is made of."""

import itertools
import json
import random

import pytest
import torch
from helpers import DRAFTERS, main_of, refused, tiny_target
from test_trees import check_invariants, start

from specdec.acceptance import FILE, Acceptance, AlongTexts, read_acceptance
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.model.loader import load_target
from specdec.training.loop.evaluate import Decoding
from specdec.trees import StaticTree
from specdec.trees.optimal import expected_tau, optimal_paths

PATHS = [[2], [0], [1], [0, 0], [0, 3], [2, 1], [1, 0], [0, 3, 0], [0, 3, 1], [1, 0, 2], [0, 3, 1, 0]]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "mtp-three-heads", "suffix", "draft-model"])
@torch.inference_mode()
def test_every_node_is_what_its_own_path_drafts(name):
    """Against one path at a time, W = 1: masks, padding, hidden states and ranks are all in it."""
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    policy = StaticTree(PATHS)
    root, state = start(drafter, target)
    tree = policy.grow(drafter, root, state)
    check_invariants(tree, len(PATHS) + 1)
    nodes = [(), *sorted(map(tuple, PATHS), key=lambda path: (len(path), path))]
    for node, path in enumerate(nodes[1:], 1):
        assert nodes[tree.parents[0, node]] == path[:-1]
        state = drafter.root(start(drafter, target)[1])
        logq = torch.zeros(3)
        for depth, rank in enumerate(path, 1):
            gains, ids = state.logits.log_softmax(-1).topk(policy.topk, dim=-1)
            token = drafter.vocab.to_target(ids[:, :, rank])
            logq = logq + gains[:, 0, rank]
            if depth < len(path):
                state = drafter.step(token, state.hidden, depth, torch.ones(3, 1, depth, dtype=torch.bool))
        assert torch.equal(tree.tokens[:, node], token[:, 0]), path
        torch.testing.assert_close(tree.logq[:, node], logq)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ([], "needs paths"),
        ([[0], []], r"a list of child ranks 0, 1, ..., got \[\]"),
        ([[0], None], "got None"),
        ([[0], 1], "a list of child ranks 0, 1, ..., got 1"),
        ([[0], [-1]], r"got \[-1\]"),
        ([[0], [0.5]], r"got \[0.5\]"),
        ([[0], "01"], "got '01'"),
        ([[0], [1], [0]], r"lists the path \[0\] twice"),
        ([[0], [1, 0]], r"lists \[1, 0\], but not its parent \[1\]"),
    ],
)
def test_what_is_no_tree_is_refused(paths, sentence):
    with pytest.raises(ValueError, match=sentence):
        StaticTree(paths)


# The optimal tree


def all_trees(depth: int, children: int, nodes: int):
    """Every prefix-closed set of `nodes` paths."""
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(children), repeat=d)]
    for chosen in itertools.combinations(paths, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_tree_beats_every_other(seed):
    """Ranks need not be ordered, and depth may help: best-first relies on neither."""
    noise = random.Random(seed)
    accept = [[noise.random() for _ in range(2)] for _ in range(3)]
    for nodes in (1, 3, 5, 7):
        best = max(expected_tau(tree, accept) for tree in all_trees(3, 2, nodes))
        paths = optimal_paths(accept, nodes + 1)
        assert StaticTree(paths).num_draft_tokens == nodes + 1
        assert expected_tau(paths, accept) == pytest.approx(best)


def test_the_optimal_tree_by_hand():
    assert expected_tau([[0], [1], [0, 0]], [[0.5, 0.2], [0.4, 0.1]]) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)
    assert optimal_paths([[1.0], [1.0]], 3) == [(0,), (0, 0)]
    with pytest.raises(ValueError, match="num_draft_tokens is 8, but a tree of 2 levels and 2 children has 2 to 7"):
        optimal_paths([[0.5, 0.5]] * 2, 8)


# acceptance.json with one thing wrong is refused in one sentence, which says what

ENTRY = {"temperature": 0.0, "topk": 3, "steps": 3, "texts": ["001 01 - 20 -"]}
RIGHT = json.loads(Acceptance((AlongTexts(**ENTRY),), "some answers").as_text())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (3, "its format is not 'specdec acceptance 1'"),
        ({}, "its format is not 'specdec acceptance 1'"),
        (RIGHT | {"format": "specdec acceptance 0"}, "its format is not 'specdec acceptance 1'"),
        (RIGHT | {"about": 3}, "about must be a text, got 3"),
        (RIGHT | {"measured": []}, r"measured must be a list with entries, got \[\]"),
        (RIGHT | {"measured": 3}, "measured must be a list with entries, got 3"),
        (RIGHT | {"measured": [3]}, "an entry of measured has temperature, topk, steps, texts, and not 3"),
        (RIGHT | {"measured": [{"topk": 3}]}, "an entry of measured has .*, and not {'topk': 3}"),
        (RIGHT | {"measured": [ENTRY | {"texts": ["003"]}]}, "'003' is no word of ranks below 3"),
        (RIGHT | {"measured": [ENTRY | {"texts": ["0000"]}]}, "'0000' is no word .* on at most 3 levels"),
        (RIGHT | {"measured": [ENTRY | {"texts": "000"}]}, "texts must be a list, each entry a text, got '000'"),
        (RIGHT | {"measured": [ENTRY, ENTRY | {"temperature": 1, "texts": ["", ""]}]}, "the texts at temperature 1"),
        (RIGHT | {"measured": [ENTRY | {"texts": []}]}, "the texts at temperature 0 hold no word"),
        (RIGHT | {"measured": [ENTRY | {"temperature": -1}]}, "temperature must be at least 0, got -1"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, content, why):
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"holds no measured acceptance \({why}.*again with specdec tune tree"):
        read_acceptance(tmp_path)


def test_answers_of_one_token_make_no_file(target_path, drafter_path, tmp_path):
    draft, prompts = tmp_path / "draft", tmp_path / "prompts.txt"
    save_drafter(load_drafter(drafter_path, target := load_target(target_path)), draft, target)
    prompts.write_text("what is a tree?\n")
    words = ["--target", target_path, "--draft", draft, "--prompts", prompts, "--raw", "--out", tmp_path / "tree.yaml"]
    assert "every answer is one token long" in refused(main_of("tune tree"), *words, "--max-new-tokens", 1, "--keep")
    assert not (tmp_path / "tree.yaml").exists()
    for tokens in (1, 4):  # a training run, which continues without the file
        assert read_acceptance(draft) is None
        Decoding(target, [[3, 5]], "prompts", 2, tokens).keep_acceptance(draft)
    assert read_acceptance(draft) is not None
    (draft / FILE).unlink()
    few = (*words[:-2], "--max-new-tokens", 4, "--keep", "--topk", 1, "--steps", 2)
    assert "2 levels and 1 children has 2 to 3 nodes" in refused(main_of("tune tree"), *few, *words[-2:])
    assert read_acceptance(draft) is None
    main_of("tune tree")([*map(str, few)])  # no tree is written, so it may have any number of nodes
    assert read_acceptance(draft) is not None
