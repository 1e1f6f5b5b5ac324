"""scripts/recipe.py: trains what has no result yet, for the same tokens, and makes tables of what has one."""

import json

import pytest
from test_training import CONVERSATIONS

from scripts import recipe
from scripts.recipe import TREES, Job, main, mean, read_results, settings, steps_for, tables
from specdec.training.data import Batches
from specdec.trees.spec import TreeSpec


@pytest.fixture
def words(target_path, tmp_path, monkeypatch):
    """The command, of two small runs at one tree."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    small = ("trainer.batch_tokens=100", "drafter.draft_vocab_size=null", "objective.steps=2")
    runs = {"recipe": small, "preset_eagle": (*recipe.EAGLE, *small)}
    monkeypatch.setattr(recipe, "NAMES", runs)
    monkeypatch.setattr(recipe, "STAGES", {"tiny": (runs, 200)})
    monkeypatch.setattr(recipe, "TREES", (TreeSpec(1, 2, 3),))
    return [f"--data={data}", f"--out={tmp_path / 'out'}", f"--target={target_path}", "--heldout=8", "--new-tokens=8"]


def test_runs_are_measured_once(words, tmp_path, capsys):
    main([*words, "--seeds", "0"])
    results = {path.stem: path for path in (tmp_path / "out" / "results").iterdir()}
    assert set(results) == {"recipe-200-seed0", "preset_eagle-200-seed0"}
    for path in results.values():
        found = json.loads(path.read_text())
        assert abs(found["tokens"] - 200) < 100
        assert len(found["agreement"]) == 2
        tau = found["tau"]["1/2/3"]
        assert tau["tau"] == sum(tau["emitted"]) / sum(tau["rounds"])
        assert 1 <= tau["tau_low"] <= tau["tau"] <= tau["tau_high"] <= 3
        assert len(tau["rounds"]) == 8
    results["preset_eagle-200-seed0"].unlink()
    before = results["recipe-200-seed0"].stat().st_mtime_ns
    main([*words, "--seeds", "0"])
    assert results["recipe-200-seed0"].stat().st_mtime_ns == before
    assert results["preset_eagle-200-seed0"].exists()
    capsys.readouterr()
    main([*words, "--dry"])
    assert capsys.readouterr().out.count("\n| preset_eagle | 1 |") == 1
    assert "| recipe | 1 |" in (tmp_path / "out" / "recipe.md").read_text()


def result(agreement: float, tau: float) -> dict:
    return {"agreement": [agreement] * 7, "tau": {str(tree): {"tau": tau + i} for i, tree in enumerate(TREES)}}


def test_tables_have_means_over_seeds_and_pairs_of_seeds():
    """The lead is that of equal seeds; a seed that only one of the two has is not in it."""
    results = {Job("recipe", 10, seed): result(0.5, tau) for seed, tau in ((0, 2.0), (1, 3.0), (2, 4.0))}
    results |= {Job("preset_eagle", 10, seed): result(0.1, tau) for seed, tau in ((0, 1.0), (1, 2.0))}
    recipe_row, preset_row = (line.split(" | ") for line in tables(results).splitlines()[4:6])
    # The .975 quantile of Student's t with two degrees of freedom is 4.303, and the standard error 1/sqrt(3).
    assert recipe_row[1:5] == ["3", "0.500 ± 0.000", "0.500 ± 0.000", "3.000 ± 2.484"]
    assert preset_row[4:7] == ["1.500 ± 6.353", "2.500 ± 6.353", "3.500 ± 6.353"]
    assert preset_row[7] == "1.000 ± 0.000"
    assert mean([1.5]) == "1.500"


def test_steps_come_nearest_to_the_tokens(words, tmp_path, target_path):
    from argparse import Namespace

    from specdec.model.loader import load_target
    from specdec.training.data import load_samples

    args = Namespace(out=tmp_path / "out", target=target_path, data=tmp_path / "data.jsonl", heldout=8, max_length=320)
    config = settings(Job("recipe", 1, 3), args)
    samples = load_samples(config.data, load_target(target_path))
    batches = Batches(samples, 100, 3)
    sizes = [batches.collate(indices).tokens.numel() for indices in batches.epoch(0)[:4]]
    assert steps_for(sum(sizes[:3]), samples, config) == 3
    assert steps_for(sum(sizes[:3]) + 1, samples, config) == 3
    assert steps_for(sum(sizes) - 1, samples, config) == 4


def test_results_of_other_names_are_left_out(tmp_path):
    (tmp_path / "something-5-seed0.json").write_text("{}")
    (tmp_path / "no_muon-5-seed2.json").write_text("{}")
    assert read_results(tmp_path) == {Job("no_muon", 5, 2): {}}
