"""specdec/lab/sweep/compare_command.py: the table says what decoding did, and mistakes are one sentence."""

import csv
import json

import pytest
from helpers import run_here

import specdec
from specdec.lab.sweep.compare_command import main as compare_main
from specdec.text import read_prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("What is a tree?\nName three animals that live in the sea.\n")
    return path


def test_table_chart_and_result(prompts, tmp_path):
    entries = (
        "~entries",
        "+entries.eagle3={draft: demo/eagle3}",
        "+entries.lossy={draft: ngram, tree: chain, verifier: {name: typical}}",
    )
    done = run_here(compare_main, f"prompts={prompts}", f"out={tmp_path}", "max_new_tokens=24", *entries)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 identical" in done.stdout
    assert "NO: typical" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    result = json.loads((tmp_path / "result.json").read_text())
    eagle3, lossy = result["scores"]
    target = specdec.load_target(specdec.DEMO_TARGET)
    drafter = specdec.load_drafter("demo/eagle3", target)
    alone = [specdec.generate(target, p, drafter, max_new_tokens=24) for p in read_prompts(prompts)]
    tau = sum(len(row.tokens) - 1 for out in alone for row in out.rows) / sum(out.rounds for out in alone)
    assert eagle3["tau"] == last["tau"]["eagle3"] == pytest.approx(tau)
    assert eagle3["lossless"]
    assert not lossy["lossless"]
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["name"] for row in rows] == ["eagle3", "lossy"]
    assert float(rows[0]["tau"]) == eagle3["tau"]
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "no prompts: give prompts=FILE"),
        (["prompts=nowhere.txt"], "nowhere.txt"),
        (["prompts=PROMPTS", "max_new_tokens=1"], "max_new_tokens must be at least 2"),
        (["prompts=PROMPTS", "~entries", "+entries.a={tree: chain}"], "entries.a lacks the field draft"),
        (["prompts=PROMPTS", "~entries", "+entries.a={draft: ngram, trees: x}"], "unknown field trees"),
        (["prompts=PROMPTS", "~entries", "+entries.a={draft: ngram, tree: oak}"], "there is no tree 'oak'"),
        (["prompts=PROMPTS", "target.path=nowhere"], "nowhere"),
        (["prompts=PROMPTS", "nonsense=1"], "nonsense"),
    ],
)
def test_mistakes(prompts, tmp_path, overrides, message):
    done = run_here(compare_main, f"out={tmp_path}", *(o.replace("PROMPTS", str(prompts)) for o in overrides))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
