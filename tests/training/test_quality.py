"""scripts/quality.py: trains what is not trained yet, reads what is, and counts tokens by what they are."""

import csv
import json

import pytest
from omegaconf import OmegaConf
from test_training import CONVERSATIONS

from scripts import quality
from scripts.quality import main
from specdec.model.loader import load_target
from specdec.training.data import Batches, tokenise
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.log import read_log

SMALL = [
    "trainer.steps=4", "trainer.decode_every=2", "trainer.decode_prompts=2", "trainer.decode_tokens=8",
    "trainer.batch_tokens=100", "trainer.save_every=4", "trainer.eval_batches=0", "trainer.autocast=null",
    "drafter.intermediate_size=64", "data.heldout=8",
]  # fmt: skip


@pytest.fixture
def command(target_path, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    (tmp_path / "prompts.txt").write_text("What is 3 + 4?\nWhat is 8 + 1?\n")
    where = ["--data", tmp_path / "data.jsonl", "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "q"]
    return [str(word) for word in (*where, "--target", target_path, "--set", *SMALL)]


def table(path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_runs_are_trained_once_and_read_again(command, tmp_path, capsys):
    out = tmp_path / "q"
    command = [
        "demo_mtp",
        *command,
        "data.on_policy.share=0.5",
        "data.on_policy.max_new_tokens=8",
        "trainer.save_every=2",
    ]
    command += ["--seeds", "0", "1"]
    main(command)
    folders = [out / f"demo_mtp-seed{seed}" for seed in (0, 1)]
    rows = table(out / "quality.csv")
    assert [(r["run"], r["seed"], r["step"]) for r in rows] == [("demo_mtp", s, step) for s in "01" for step in "24"]
    logged = [row for folder in folders for row in read_log(folder / "log.jsonl") if row["split"] == "decode"]
    assert [float(row["tau"]) for row in rows] == [row["tau"] for row in logged]
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")

    written = checkpoints(folders[0])[-1].stat().st_mtime_ns
    checkpoints(folders[1])[-1].unlink()  # as if it had been interrupted after step 2
    main(command)
    assert checkpoints(folders[0])[-1].stat().st_mtime_ns == written
    assert [path.stem for path in checkpoints(folders[1])] == ["step-00000002", "step-00000004"]
    for row, before in zip(table(out / "quality.csv"), rows, strict=True):
        assert row | {"seconds": 0} == before | {"seconds": 0}

    capsys.readouterr()
    main([*map(str, folders), "--out", str(tmp_path / "read")])
    assert json.loads(capsys.readouterr().out)["demo_mtp-seed1-seed1"] == float(rows[-1]["tau"])
    main(["demo_mtp", "--dry", "--out", str(out)])
    assert len(table(out / "quality.csv")) == 2


@pytest.mark.parametrize(
    ("drafter", "objective", "share", "said"),
    [
        ({"_target_": "specdec.drafters.mtp.create"}, {"terms": {"tokens": 1.0, "ce": 0}}, 0, "MTP: the text's tokens"),
        ({"_target_": "specdec.drafters.eagle3.create", "tap_norms": True}, {"terms": None, "then": {"tokens": 1.0}}, 0,
         "EAGLE-3.1: the target's distribution, then the text's tokens"),
        ({"_target_": "specdec.drafters.eagle.create"}, {"terms": {"lk": 1.0}}, 0.25, "EAGLE-2: LK, on-policy"),
    ],
)  # fmt: skip
def test_a_run_is_called_by_its_method(drafter, objective, share, said):
    config = {"drafter": drafter, "objective": objective, "data": {"on_policy": {"share": share}}}
    assert quality.method(OmegaConf.create(config)) == said


def test_a_run_is_joined_to_the_one_it_goes_on_from(tmp_path, monkeypatch):
    def rows(name: str, after: str, learnt: list[float], low: float | str) -> list[dict]:
        who = {"run": name, "method": name, "seed": 0, "folder": str(tmp_path / name), "after": after}
        return [who | {"learnt": 1e6 * n, "tau": n, "tau_low": low, "tau_high": 3.0} for n in learnt]

    drawn = []
    monkeypatch.setattr(quality, "write_figure", lambda path, figure: drawn.append(figure.axes[0]))
    quality.draw([rows("a", "", [1, 2], 1.0), rows("b", str(tmp_path / "a"), [2.5, 3], "")], tmp_path / "x.png")
    lines = [line.get_xydata().tolist() for line in drawn[0].lines]
    assert lines == [[[1, 1], [2, 2]], [[2.5, 2.5], [3, 3]], [[2, 2], [2.5, 2.5]]]
    assert len(drawn[0].collections) == 2  # the bands of intervals, of which b's is empty


def test_learnt_tokens_are_those_of_answers_and_other_settings_refused(command, target_path, tmp_path, capsys):
    main(["demo_mtp", *command])
    target = load_target(target_path)
    config = OmegaConf.load(tmp_path / "q" / "demo_mtp-seed0" / "config.yaml")
    samples = tokenise(target.tokenizer, CONVERSATIONS, config.data.max_length)[: -config.data.heldout]
    batches = Batches(samples, 100, 0)
    learnt = padded = 0
    for number, indices in enumerate(batches.epoch(0)[:4], 1):
        learnt += sum(int(batches.samples[i].mask.sum()) for i in indices)
        padded += len(indices) * max(len(batches.samples[i].ids) for i in indices)
        if number % 2 == 0:
            row = table(tmp_path / "q" / "quality.csv")[number // 2 - 1]
            assert (int(row["tokens"]), int(row["learnt"])) == (padded, learnt)
    assert 0 < learnt < padded / 2
    with pytest.raises(SystemExit):
        main(["demo_mtp", *command, "trainer.lr=0.5"])
    assert "holds a run of other settings: trainer.lr was 0.002 and is 0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["demo_nothing"], "demo_nothing is neither the folder of a run nor an experiment; of these there are demo, "),
        (["demo", "--out", "OUT"], "to train demo give --data"),
        (["demo_mtp", "COMMAND", "trainer.stepps=3"], "Could not override 'trainer.stepps'."),
        (["demo_mtp", "COMMAND", "trainer.steps=null"], "demo_mtp says no number of steps: give --set"),
        (["FOLDER", "--out", "OUT"], "has no measured tau: train with trainer.prompts=FILE"),
    ],
)
def test_mistakes_are_one_sentence(command, tmp_path, capsys, change, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps({"split": "train", "step": 1}) + "\n")
    places = {"COMMAND": command, "OUT": [str(tmp_path / "new")], "FOLDER": [str(tmp_path / "run")]}
    argv = [word for item in change for word in places.get(item, [item])]
    with pytest.raises(SystemExit) as exit:
        main(argv if "--out" in argv else [*argv, "--out", str(tmp_path / "new")])
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "new").exists()


def test_a_run_that_goes_on_from_another_is_counted_behind_it(command, tmp_path):
    main(["demo_mtp", "demo_mtp_tokens", *command])
    rows, out = table(tmp_path / "q" / "quality.csv"), tmp_path / "q"
    assert [(r["run"], r["step"]) for r in rows] == [(n, s) for n in ("demo_mtp", "demo_mtp_tokens") for s in "24"]
    assert OmegaConf.load(out / "demo_mtp_tokens-seed0" / "config.yaml").init_from.endswith("demo_mtp-seed0/draft")
    own = [r for r in read_log(out / "demo_mtp_tokens-seed0" / "log.jsonl") if r["split"] == "decode"]
    for key in ("tokens", "learnt"):
        assert [int(r[key]) - int(rows[1][key]) for r in rows[2:]] == [r[key] for r in own]
