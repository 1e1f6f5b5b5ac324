"""`scripts/check_in_vllm.py` with a stand-in for vLLM: what it exports, and which differences it notices."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import check_in_vllm
import pytest

from specdec.api import DEMO_TARGET, load_drafter, load_target

ARGS = Namespace(max_new_tokens=12, steps=3)
PROMPTS = [[1, 300, 400, 500], [1, 700, 30, 20]]


@pytest.fixture(scope="module")
def target():
    return load_target(DEMO_TARGET, dtype="fp32")


def test_bundled_drafters_and_variants_are_exported(tmp_path):
    cases, refused = check_in_vllm.bundled_cases(tmp_path)
    assert [case.name for case in cases] == ["eagle2", "eagle3", "medusa"]
    assert set(refused) == {"mtp", "dspark", "dflash"}
    variants = check_in_vllm.variant_cases(tmp_path / "variants")
    assert len(variants) == 8
    assert {case.asked["method"] for case in variants} == {"eagle3"}


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda rows: None, []),
        (lambda rows: rows[1][1].update(accepted=99), ["prompt 2: other accepted"]),
        (lambda rows: rows[1][0]["tokens"].append(7), ["prompt 1: other tokens"]),
        (lambda rows: rows.pop(), None),
    ],
)
def test_differences_are_noticed(target, monkeypatch, tmp_path, change, noticed):
    path = DEMO_TARGET.parent / "eagle2"
    case = check_in_vllm.exported("eagle2", path, tmp_path / "eagle2")
    rows = [
        check_in_vllm.here(target, drafter, PROMPTS, 3 if drafter else 0, ARGS.max_new_tokens)
        for drafter in (None, load_drafter(path, target))
    ]
    change(rows)

    def vllm(python, script, flag, jobs, answers):
        assert [job["speculative"] is None for job in json.loads(Path(jobs).read_text())] == [True, False]
        for number, answer in enumerate(rows):
            (answers / f"{number}.json").write_text(json.dumps({"versions": {}, "rows": answer}))

    monkeypatch.setattr(check_in_vllm, "run", vllm)
    report = check_in_vllm.check([case], Path("python"), target, PROMPTS, tmp_path, ARGS)
    if noticed is None:
        assert report["wrong"] == ["eagle2: vLLM gave no answer"]
    else:
        again = [f"the export read back: {what}" for what in noticed]
        assert report["wrong"] == [f"eagle2: {what}" for what in (*noticed, *again)]
        assert report["results"][0]["texts_equal"] == 2 - any("tokens" in what for what in noticed)


def test_counts_of_one_prompt():
    def metric(name, value):
        return SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value, values=value)

    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before, now = (
        check_in_vllm.counts(SimpleNamespace(get_metrics=lambda values=values: list(map(metric, names, values))))
        for values in ((2, 6, 3, [2, 1, 0]), (5, 15, 7, [4, 2, 1]))
    )
    assert check_in_vllm.difference(now, before) == {
        "drafts": 3, "drafted": 9, "accepted": 4, "by_position": [2, 1, 1]
    }  # fmt: skip
    assert check_in_vllm.counts(SimpleNamespace(get_metrics=list))["by_position"] == []


def test_needs_of_a_wheel_without_torch(tmp_path):
    lines = ["Name: vllm", "Requires-Dist: torch==2.13.0", "Requires-Dist: pillow", "Requires-Dist: x; extra == 'y'"]
    with ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("vllm.dist-info/METADATA", "\n".join(lines))
    assert check_in_vllm.requirements(tmp_path / "a.whl") == ["pillow"]
