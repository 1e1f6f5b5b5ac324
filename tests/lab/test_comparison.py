"""`specdec.compare` and the command: they report what decoding did, and the verdict follows the intervals. Names,
messages and ids stand for objects and texts there, as in `specdec.generate`."""

import csv
import json
import math

import pytest
import torch
from helpers import main_of, run_here

import specdec
from specdec import registry
from specdec.drafters.ngram import NGram
from specdec.lab.output import write_json
from specdec.lab.sweep.compare_command import contenders_of, engines_in_words, entries_of
from specdec.lab.sweep.comparison import Comparison, named, way_of
from specdec.lab.sweep.turns import PARTS, UNKNOWN, Score, Tally, ratio
from specdec.model.names import draft_for
from specdec.text import read_prompts

compare_main = main_of("compare")

PROMPTS = ["The quick brown", "What is 12", "Ein Café"]


def comparison(speeds: dict[str, list[float]], plain_compiled: bool = False, **differences) -> Comparison:
    """Each way decodes a token a prompt, in so many seconds; plain decoding takes 1."""
    times = {"": [1.0] * len(next(iter(speeds.values())))} | speeds
    tallies = {name: Tally(torch.tensor([[1.0, 1.0, s] for s in t]).double()) for name, t in times.items()}
    shared = {
        "drafter": "D", "tree": "1/3/4", "verifier": "match", "rule": "match", "lossless": True, "tau": 2.0,
        "tau_interval": (1.9, 2.1), "acceptance_by_depth": [0.5], "tokens_per_second": 1.0, "draft_vocab": 9,
        "milliseconds_a_round": dict.fromkeys(PARTS, 1.0), "same_as_plain": 3, "settled": True, "prompts": 3,
        "num_draft_tokens": 4, "compiled": False,
    }  # fmt: skip
    found = {name: ratio(tallies[name], tallies[""]) for name in speeds}
    scores = [Score(name=n, ratio_to_plain=r, ratio_interval=i, **shared | differences) for n, (r, i) in found.items()]
    return Comparison(scores, 1.0, tallies, compiled=plain_compiled)


@pytest.mark.parametrize(
    ("speeds", "differences", "verdict"),
    [
        ({"a": [0.5, 0.5, 0.5], "b": [0.8, 0.8, 0.8]}, {},
         "a is 2.00 times as fast as plain decoding (2.00 to 2.00). All texts are plain decoding's."),
        ({"a": [0.4, 0.6, 0.5], "b": [0.6, 0.4, 0.55]}, {}, "No significant difference from it: b."),
        ({"a": [2.0, 2.0, 2.0]}, {}, "No drafter pays here: a, the nearest, is 0.50 times as fast"),
        ({"a": [0.5, 1.5, 0.9]}, {}, "No drafter is shown to pay: a came out 1.03 times as fast"),
        ({"a": [0.5]}, {}, "a was 2.00 times as fast as plain decoding. One prompt says nothing of others"),
        ({"a": [0.5, 0.5, 0.5]}, {"same_as_plain": 2}, "Texts that differ from plain decoding's: a 1 of 3."),
        ({"a": [0.5, 0.5, 0.5]}, {"same_as_plain": 2, "plain_compiled": True},
         "1 of 3. Rounding may be why: plain decoding is compiled, the rounds of a are eager."),
        ({"a": [0.5, 0.5, 0.5]}, {"lossless": False}, "Lossy: a."),
        ({"a": [0.5, 0.5, 0.5]}, {}, "3 prompts are few, and the intervals rough."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_the_intervals_say(speeds, differences, verdict):
    assert verdict in comparison(speeds, **differences).verdict


def test_compare_decodes_as_generate_does(target, drafter_path, monkeypatch):
    how = {"temperature": 0.8, "max_new_tokens": 8, "seed": 3}
    found = specdec.compare(target, [drafter_path, "ngram"], PROMPTS, tree="2/2/5", progress=False, **how)
    assert [score.name for score in found.scores] == [drafter_path.name, "ngram"]
    drafter = specdec.load_drafter(drafter_path, target)
    alone = specdec.generate(target, PROMPTS, drafter, tree=specdec.make_tree(2, 2, 5), **how)
    assert [row.tokens for row in found.tallies[drafter_path.name].rows] == [row.tokens for row in alone.rows]
    score = found.scores[0]
    assert (score.tau, score.same_as_plain) == (alone.tau, 3)
    assert score.tau_interval[0] <= score.tau <= score.tau_interval[1]
    assert f"{score.tau:.2f} (" in str(found)
    assert str(found).endswith(found.verdict)
    assert found.verdict.split(".")[0] in found._repr_html_()
    twice = specdec.compare(target, drafter_path, PROMPTS, tree="2/2/5", trials=2, progress=False, **how).scores[0]
    assert (twice.prompts, twice.same_as_plain) == (3, 3)  # however often each is decoded
    assert math.isnan(specdec.compare(target, "ngram", "x", max_new_tokens=2, progress=False).scores[0].tau_interval[0])
    monkeypatch.setattr(NGram, "capturable", False)  # as a drafter of one's own may be
    with pytest.raises(ValueError, match="NGram cannot be captured"):
        specdec.compare(target, {"draft": "ngram", "compile": True}, "x")
    eager = way_of("ngram", "ngram", target, {"tree": None, "verifier": "match", "token_map": None, "compile": True})
    assert not eager.compile  # it cannot be compiled, and the entry did not ask for it


def test_names_stand_for_objects_and_messages_and_ids_for_texts(target, target_path, drafter_path):
    drafter = specdec.load_drafter(drafter_path, target)
    objects = {"tree": specdec.make_tree(1, 3), "verifier": specdec.make_verifier("match")}
    sampling = specdec.Sampling(temperature=0.8, top_k=9)
    made = specdec.generate(target, PROMPTS, drafter, sampling=sampling, max_new_tokens=8, **objects)
    how = {"tree": "1/3/4", "verifier": "match", "temperature": 0.8, "top_k": 9, "max_new_tokens": 8}
    assert specdec.generate(target_path, PROMPTS, drafter_path, **how).text == made.text
    ids, message = [row.prompt for row in made.rows], [{"role": "user", "content": PROMPTS[0]}]
    assert specdec.generate(target, ids, drafter, **how).text == made.text
    for first in (ids[0], message):
        assert specdec.generate(target, first, drafter, **how).text == made.text[:1]
    assert specdec.generate(target, [message, message], drafter, **how).rows[1].prompt == ids[0]


def test_drafts_have_names_of_their_own_and_another_target_needs_its_own():
    assert list(named(["a/draft", "b/draft", "ngram:suffix"])) == ["a", "b", "ngram:suffix"]
    assert list(named(["a/x", "b/x/", "draft"])) == ["a/x", "b/x/", "draft"]
    assert list(named(["demo/mtp", {"draft": "demo/mtp", "name": "mine"}])) == ["mtp", "mine"]
    for wrong, message in ((["ngram", "ngram"], "two drafters are called ngram"), ([], "no drafter was given")):
        with pytest.raises(ValueError, match=message):
            named(wrong)
    own = registry.read_yaml(registry.CONF / "compare.yaml", "settings")
    for path in (None, "demo/target"):
        assert entries_of(own | {"target": {"path": path}}) == own["entries"]
    assert list(entries_of(own | {"target": {"path": "x"}, "draft": ["ngram"]})) == ["ngram"]
    smollm2 = entries_of(own | {"target": {"path": "smollm2"}})
    assert list(smollm2) == ["smollm2-eagle3", "smollm2-mtp", "smollm2-dspark", "ngram", "ngram:suffix"]
    assert smollm2["smollm2-eagle3"] == draft_for("smollm2")
    with pytest.raises(ValueError, match="no drafter is bundled for a/b: give --draft FOLDER, or --draft ngram"):
        entries_of(own | {"target": {"path": "a/b"}})


def test_other_engines_are_compared_in_words():
    rates = {"plain": 90.0, "speculative": 180.0, "transformers": 45.0}
    rows = [{"contender": name, "tokens_per_second": rate} for name, rate in rates.items()]
    said = engines_in_words([*rows, {"contender": "llama.cpp", "skipped": "it is not there"}], "mtp")
    assert said == "Plain decoding is 2.00 times as fast as transformers, and mtp 4.00 times."


def test_next_to_other_engines_the_first_entry_decodes_with_its_own_tree_and_verifier(target):
    settings = dict.fromkeys(("draft_tree", "num_draft_tokens", "token_map")) | {"target": {"path": None}, "with": []}
    entry = {"draft": "ngram", "tree": "2/2/5", "verifier": "typical"}
    settings |= {"topk": 1, "steps": 3, "max_new_tokens": 4, "compile": False}
    made = contenders_of(settings, target, "a", entry)
    assert list(made) == ["plain", "speculative"]
    engine = made["speculative"]().engine
    assert (engine.policy, engine.verifier) == (specdec.make_tree(2, 2, 5), specdec.make_verifier("typical"))


# The command


def test_table_chart_and_result(target, target_path, drafter_path, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a tree?\nName three animals that live in the sea.\n")
    monkeypatch.setenv("COLUMNS", "200")
    entries = (
        f"target.path={target_path}", "~entries", f"+entries.eagle3={{draft: {drafter_path}}}",
        "+entries.lossy={draft: ngram, tree: chain, verifier: {name: typical}}",
    )  # fmt: skip
    tree = ("topk=4", "steps=5")  # the default of specdec.generate
    done = run_here(compare_main, f"prompts={prompts}", f"out={tmp_path}", "max_new_tokens=12", *tree, *entries)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 identical" in done.stdout
    assert "NO: typical" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    result = json.loads((tmp_path / "result.json").read_text())
    eagle3, lossy = result["scores"]
    alone = [specdec.generate(target, p, drafter_path, max_new_tokens=12) for p in read_prompts(prompts)]
    tau = sum(len(row.tokens) - 1 for out in alone for row in out.rows) / sum(out.rounds for out in alone)
    assert eagle3["tau"] == last["tau"]["eagle3"] == pytest.approx(tau)
    assert (eagle3["lossless"], lossy["lossless"]) == (True, False)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["name"] for row in rows] == ["eagle3", "lossy"]
    assert float(rows[0]["tau"]) == eagle3["tau"]
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


def test_a_result_is_json_without_nan(tmp_path):
    write_json(tmp_path / "it.json", {"interval": UNKNOWN, "tau": 1.5})
    assert json.loads((tmp_path / "it.json").read_text(), parse_constant=pytest.fail) == {
        "interval": [None] * 2,
        "tau": 1.5,
    }
