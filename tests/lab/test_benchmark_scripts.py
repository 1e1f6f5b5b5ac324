"""The comparisons of training steps run, at small sizes, and compare like with like."""

import json
import sys

from specdec.lab.bench import objective_memory, row_costs, train_step

SMALL = ["--hidden", "64", "--vocab", "96", "--length", "24", "--steps", "2"]


def test_the_training_step_against_modules_of_transformers(monkeypatch, capsys):
    """The command itself refuses to time implementations whose losses or gradients differ."""
    monkeypatch.setattr(sys, "argv", ["train_step", *SMALL, "--rows", "2", "--trials", "1", "--autocast", "bf16"])
    train_step.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["learnt"] for row in rows] == [1.0, 0.5]
    assert all(row["ratio"] > 0 and row["loss_difference"] < 1e-4 for row in rows)


def test_the_training_step_on_conversations(monkeypatch, capsys, tmp_path):
    turns = [{"from": "human", "value": "What is a tree?"}, {"from": "gpt", "value": "It is a plant with a stem."}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"conversations": turns}) + "\n" + json.dumps({"conversations": turns * 2}) + "\n")
    how = ["--data", str(path), "--steps", "2", "--rows", "1", "--length", "64", "--batches", "2", "--trials", "1"]
    monkeypatch.setattr(sys, "argv", ["train_step", *how])
    train_step.main()
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert 0.2 < row["learnt"] < 0.8
    assert row["ratio"] > 0
    assert row["loss_difference"] < 1e-4


def test_every_way_to_compute_the_objective_gives_the_same_losses(monkeypatch, capsys):
    losses = []
    for way in objective_memory.WAYS:
        monkeypatch.setattr(sys, "argv", ["objective_memory", *SMALL, "--way", way])
        objective_memory.main()
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1] == losses[2]


def test_the_costs_of_rows(monkeypatch, capsys, tmp_path):
    out = tmp_path / "rows.json"
    how = ["--shape", "tiny", "--steps", "2", "--repeats", "1", "--context", "8", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["row_costs", *how])
    row_costs.main()
    report = json.loads(out.read_text())
    assert set(report["products_ms"]["engine"]) == {str(rows) for rows in row_costs.ROWS}
    assert set(report["launched_ms"]) == {"0", "1", "2"}
    assert set(report["launched_ms"]["0"]) == {"verify", "host"}
    assert all(ms > 0 for part in report["launched_ms"].values() for ms in (part["verify"], part["host"]))
    assert set(report["forward_ms"]) == {"0", "1", "2"}
    assert all(ms > 0 for ms in report["forward_ms"].values())
    assert "its forward" in capsys.readouterr().out
