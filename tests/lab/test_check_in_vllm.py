"""`scripts/check_in_vllm.py` with a stand-in for vLLM: what it exports, and which differences it notices."""

import copy
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import check_in_vllm

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.model.names import bundled_drafts

ARGS = Namespace(max_new_tokens=12, steps=3)
PROMPTS = [[1, 300, 400, 500], [1, 700, 30, 20]]


def test_bundled_drafters_and_variants_are_exported(tmp_path):
    cases, refused = check_in_vllm.drafter_cases(tmp_path, sorted(bundled_drafts(None)))
    assert [case.name for case in cases] == ["eagle2", "eagle3"]
    assert set(refused) == {"mtp"}
    variants = check_in_vllm.variant_cases(tmp_path / "variants")
    assert [case.asked["method"] for case in variants] == ["eagle3"] * 8


def test_differences_are_noticed(monkeypatch, tmp_path):
    target, path = load_target(DEMO_TARGET, dtype="fp32"), DEMO_TARGET.parent / "eagle2"
    case, drafters = check_in_vllm.exported("eagle2", path, tmp_path / "eagle2"), (None, load_drafter(path, target))
    right = [check_in_vllm.here(target, d, PROMPTS, 3 if d else 0, ARGS.max_new_tokens) for d in drafters]
    for change, noticed in (
        (lambda rows: None, []),
        (lambda rows: rows[1][1].update(accepted=99), ["prompt 2: other accepted"]),
        (lambda rows: rows[1][0]["tokens"].append(7), ["prompt 1: other tokens"]),
        (lambda rows: rows.pop(), ["vLLM gave no answer"]),
    ):
        rows, folder = copy.deepcopy(right), tmp_path / str(len(list(tmp_path.iterdir())))
        change(rows)
        folder.mkdir()

        def vllm(python, script, flag, jobs, answers, rows=rows):
            assert [job["speculative"] is None for job in json.loads(Path(jobs).read_text())] == [True, False]
            for number, answer in enumerate(rows):
                (answers / f"{number}.json").write_text(json.dumps({"versions": {}, "rows": answer}))

        monkeypatch.setattr(check_in_vllm, "run", vllm)
        report = check_in_vllm.check([case], Path("python"), target, PROMPTS, folder, ARGS)
        again = [f"the export read back: {what}" for what in noticed if "prompt" in what]
        assert report["wrong"] == [f"eagle2: {what}" for what in (*noticed, *again)]
        if len(rows) == 2:
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


def test_needs_of_a_package_without_torch():
    needs = ["torch==2.13.0", "pillow", "x; extra == 'y'"]
    assert check_in_vllm.requirements("".join(f"Requires-Dist: {need}\n" for need in needs)) == ["pillow"]
