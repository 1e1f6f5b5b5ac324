"""Block drafters in the commands: generate, tree and sweep, with trees over the block and along paths."""

import pytest
import torch
from helpers import main_of
from sweeps import QUESTIONS, tiny_sweep

from specdec.drafters import dflash
from specdec.drafters.formats import save_drafter
from specdec.lab.sweep.benchmarks import Benchmark
from specdec.lab.sweep.points import Draft
from specdec.lab.sweep.store import write_results
from specdec.trees.spec import grid

generate = main_of("generate")

KINDS = {
    "dflash": {"block_size": 5},
    "dspark": {"block_size": 4, "label": "p+k+1", "conditional": "markov", "rank": 4, "confidence": True},
}
BLOCK = ["--tree", "block"]  # by default far deeper than this block
TREES = {
    "dflash": [BLOCK, ["--tree", "block 2/3/6"]],
    "dspark": [["--topk", "2", "--steps", "4"], ["--topk", "1", "--steps", "4"]],
}


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    found = {kind: tmp_path_factory.mktemp("blocks") / kind for kind in KINDS}
    for kind, folder in found.items():
        torch.manual_seed(0)
        save_drafter(dflash.create(target, layers=1, taps=2, **KINDS[kind]), folder, target)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_measured_and_decoded_with(folders, target_path, tmp_path, capsys, kind):
    models = ["--target", str(target_path), "--draft", str(folders[kind])]
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tree.yaml"
    prompts.write_text("what is a tree?\nwhy?\n")
    how = ["--prompts", str(prompts), "--raw", "--max-new-tokens", "10"]
    main_of("tune tree")([*models, *how, "--topk", "3", "--num-draft-tokens", "6", "--out", str(out)])
    assert "depth 4:" in capsys.readouterr().out
    for tree in [["--tree", str(out)], *TREES[kind]]:
        generate([*models, *how, *tree, "--compare"])
        assert "identical: yes" in capsys.readouterr().out
    if kind == "dspark":
        with pytest.raises(SystemExit):
            generate([*models, *how, *BLOCK])
        assert "take a dynamic tree" in capsys.readouterr().err


def test_a_sweep_has_points_over_blocks(folders, target, tmp_path):
    sweep, reported = tiny_sweep(target, tmp_path, Benchmark("tiny", QUESTIONS[2:])), []
    drafts = [Draft.read(str(folder)) for folder in folders.values()]
    trees = grid(2, 3, 6) + grid([1, 2], 3, 6, block=True)
    points = sweep.points(drafts, trees, baseline=True, best_tree=None)
    sweep.run(points, lambda point, what: reported.append(what.split(":")[0]))
    assert reported == ["measured"] * 6 + ["skipped"]  # the last one's slots depend on the drafted tokens
    results, _, _ = write_results(tmp_path)
    assert {r["names"]["draft"] for r in results} >= {"dflash", "dflash, over the block", "dspark"}
    assert [r["identical"] for r in results if "tau" in r.get("metrics", {})] == [1] * 6
