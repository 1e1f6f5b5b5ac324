"""Tuning: predictions follow the engine's rounds, real runs decide, and the file that is written decodes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import main_of, run_here, tiny_target

from specdec.cli.checks import read_settings
from specdec.drafters import ngram
from specdec.engine.engine import Engine
from specdec.lab import tune as lab
from specdec.lab.tune import MeasuredRate, Tuned, finalists, measure_rates, predict_all
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, StaticTree, Tree
from specdec.trees.record import answers_to, record
from specdec.tuning.costs import PLAIN, Kind
from specdec.tuning.grid import Prediction, clairvoyant, predict, useful_trees

PROMPTS = [[3, 5, 7, 9], [4] * 9, [2, 6]]
CHAIN, TREE = Chain(2), DynamicTree(2, 2, 5)


class Known:
    """Costs: `each` seconds by tree and for plain decoding, and some for every row and token of the context."""

    def __init__(self, each: dict, a_token: float = 0.0):
        self.each = {kind_of(tree): seconds for tree, seconds in each.items()}
        self.a_token = a_token

    def seconds(self, kind, rows, context):
        return np.asarray(self.each[kind] + self.a_token * rows * context)


def kind_of(tree: Tree | None) -> Kind:
    return PLAIN if tree is None else Kind.of(tree)


def accepted(recording, *trees: Tree) -> dict:
    return {tree: tree.replay(recording) for tree in trees}


def test_a_prediction_by_hand():
    emitted = [[3, 1], [2, 2, 1]]
    costs = Known({CHAIN: 2.0, None: 1.0}, a_token=0.1)
    # contexts 4, 7 and 9, 11, 13
    assert predict(costs, CHAIN, emitted, [4, 9]) == Prediction(CHAIN, 9 / (10 + 4.4), 9 / 5, 14.4 / 5)
    # together three rounds, the longer row's contexts 9, 11, 13 for two rows
    assert predict(costs, CHAIN, emitted, [4, 9], batch=2).tokens_per_second == pytest.approx(9 / (6 + 6.6))
    # plainly 4 and 5 tokens: contexts 4..7 and 9..13
    plain = predict(costs, None, emitted, [4, 9])
    assert (plain.tokens_per_second, plain.tau) == (pytest.approx(9 / (9 + 0.1 * (22 + 55))), 1)
    assert predict(costs, CHAIN, [[], [2, 1]], [3, 4]).tau == 3 / 2  # a text without a round is passed over
    with pytest.raises(ValueError, match="nothing can be predicted"):
        predict(costs, CHAIN, [[], []], [3, 4])


@pytest.mark.parametrize(
    ("tree", "batch", "drafted", "seconds"),
    [
        (CHAIN, 1, [[2, 0, 1], [1, 0]], 2.0 + 1.0 + 1.5 + 1.5 + 1.0),
        (CHAIN, 2, [[2, 0, 1], [1, 0]], 2.0 + 1.0 + 1.5),  # the row that drafts most; not one that has ended
        (TREE, 1, [[2, 0, 2], [2, 0]], 3 * 3.0 + 2 * 1.0),  # a tree that cannot be cut costs all of it
    ],
)
def test_rounds_that_draft_less_cost_less(tree, batch, drafted, seconds):
    costs = Known({CHAIN: 2.0, Chain(1): 1.5, TREE: 3.0, None: 1.0})
    predicted = predict(costs, tree, [[3, 1, 1], [2, 1]], [4, 9], batch, drafted)
    assert predicted.tokens_per_second == pytest.approx(8 / seconds)


def really(engine, prompts: list, batch: int, new: int) -> tuple[int, int]:
    """Tokens of rounds, and rounds, of all batches."""
    tokens = rounds = 0
    for start in range(0, len(prompts), batch):
        rows = engine.generate(prompts[start : start + batch], max_new_tokens=new).rows
        tokens += sum(len(row.tokens) - 1 for row in rows)
        rounds += max(row.trace.rounds for row in rows)
    return tokens, rounds


@pytest.mark.parametrize("batch", [1, 3])
def test_n_grams_are_predicted_as_they_run(batch):
    """With forwards that take as many seconds as they have columns."""
    target, columns = tiny_target(), []
    prompts, drafter, tree = [*PROMPTS, [5, 6, 7, 5, 6, 7, 5]], ngram.create(target), Chain(3)
    recording = record(target, drafter, answers_to(target, prompts, max_new_tokens=30), topks=(1,), steps=3)

    def note(_, inputs, keywords):
        columns.append(0 if keywords.get("prefill") else inputs[0].shape[1])

    target.register_forward_pre_hook(note, with_kwargs=True)
    tokens, _ = really(Engine(target, drafter, tree), prompts, batch, 30)
    assert {1, 4} <= set(columns)
    costs = Known({None: 1.0} | {Chain(steps): 1.0 + steps for steps in (1, 2, 3)})
    _, (predicted,) = predict_all(costs, recording, accepted(recording, tree), [len(p) for p in prompts], batch)
    assert predicted.tokens_per_second == pytest.approx(tokens / sum(columns))


@pytest.mark.parametrize("batch", [1, 3])
def test_replay_and_known_times_predict_real_runs(pair, batch):
    """With every round of the engine taking a known time, tokens/s are exact: acceptance, rounds, and order fit."""
    trees = useful_trees((1, 2, 3), 3, (3, 8))
    recording = record(*pair, answers_to(pair[0], PROMPTS, max_new_tokens=20), topks=(1, 2, 3), steps=3)
    costs = Known(dict.fromkeys([None, *trees], 0.5))
    plain, ranking = predict_all(costs, recording, accepted(recording, *trees), [len(p) for p in PROMPTS], batch)
    assert {p.tree for p in ranking} == set(trees)
    assert [p.tokens_per_second for p in ranking] == sorted((p.tokens_per_second for p in ranking), reverse=True)
    for p in (plain, *ranking):
        engine = Engine(pair[0]) if p.tree is None else Engine(*pair, p.tree)
        tokens, rounds = really(engine, PROMPTS, batch, 20)
        assert p.tokens_per_second == pytest.approx(tokens / (0.5 * rounds)), p.tree


def test_the_clairvoyant_bound(pair):
    """No sequence of choices by round is faster: all of them are tried on a text."""
    recording = record(*pair, answers_to(pair[0], PROMPTS[:1], max_new_tokens=9), topks=(1, 2), steps=2)
    costs = Known({CHAIN: 1.5, TREE: 2.0, None: 1.1}, a_token=0.01)
    found, roots = accepted(recording, CHAIN, TREE), int(recording.roots[0])

    def least(root: int) -> float:
        if root >= roots:
            return 0.0
        ways = [(None, 0), *((tree, int(a.accepted[root])) for tree, a in found.items())]
        return min(float(costs.seconds(kind_of(tree), 1, 4 + root)) + least(root + 1 + n) for tree, n in ways)

    known = {tree: (a.accepted.numpy(), a.levels.numpy()) for tree, a in found.items()}
    bound = clairvoyant(costs, known, recording.roots.tolist(), [4])
    assert bound == pytest.approx(roots / least(0))
    plain, ranking = predict_all(costs, recording, found, [4])
    assert max(plain.tokens_per_second, ranking[0].tokens_per_second) < bound


def test_every_width_that_may_win_is_tried():
    rates = {(4, 2): 100, (4, 3): 99, (4, 1): 98, (2, 2): 95, (1, 2): 91, (8, 2): 80}
    ranking = [Prediction(DynamicTree(*at, 3), rate, 2.0, 0.1) for at, rate in rates.items()]
    assert [p.tokens_per_second for p in finalists(ranking, 4)] == [100, 95, 91, 99]
    assert [p.tokens_per_second for p in finalists(ranking, 2)] == [100, 95]
    assert len(finalists(ranking, 20)) == 6
    static = StaticTree([[0], [1], [2]])
    assert static in [p.tree for p in finalists([*ranking[:4], Prediction(static, 94, 2.0, 0.1)], 3)]


# Real runs


def test_real_runs_say_what_generate_says(pair):
    how = {"batch": 2, "max_new_tokens": 12, "repeats": 2}
    found = measure_rates(*pair, PROMPTS, [None, CHAIN, TREE], **how)
    assert [m.tree for m in found] == [None, CHAIN, TREE]
    texts = [Engine(pair[0]).generate([p], max_new_tokens=12).rows[0].tokens for p in PROMPTS]
    assert [m.texts for m in found] == [texts] * 3
    rows = [Engine(*pair, TREE).generate([p], max_new_tokens=12).rows[0] for p in PROMPTS]
    assert found[2].tau == sum(len(r.tokens) - 1 for r in rows) / sum(r.trace.rounds for r in rows)
    assert found[0].tau == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_real_runs_draw_the_texts_that_predictions_are_for(pair, batch):
    how = {"max_new_tokens": 8, "sampling": Sampling(2.0), "seed": 3}
    (found,) = measure_rates(*pair, PROMPTS, [None], batch=batch, repeats=1, **how)
    assert found.texts == [text.tokens for text in answers_to(pair[0], PROMPTS, **how)]


SETTING = "topk 2, steps 2, num_draft_tokens 5"


@pytest.mark.parametrize(
    ("plain", "best", "verdict"),
    [
        (50.0, TREE, f"{SETTING}: 75.0 tokens/s, 1.50 times plain decoding"),
        (100.0, None, "decode plainly: no setting beats plain decoding (100.0 tokens/s) here; "
         f"the best one that drafts, {SETTING}, reaches 0.75 of it"),
    ],
)  # fmt: skip
def test_the_fastest_that_was_tried_wins(plain, best, verdict):
    """Whatever was predicted."""
    predicted, rates = {None: 1.0, CHAIN: 3.0, TREE: 2.0}, {None: plain, CHAIN: 60.0, TREE: 75.0}
    tried = [(Prediction(t, predicted[t], 2.0, 0.1), MeasuredRate(t, rates[t], 2.0, [])) for t in rates]
    tuned = Tuned(tried[0][0], [prediction for prediction, _ in tried[1:]], tried)
    assert (tuned.best[0].tree, tuned.best_draft[0].tree) == (best, TREE)
    assert tuned.verdict == verdict


@pytest.mark.parametrize(("seconds", "disturbed"), [([[1, 1.5], [3, 3]], False), ([[1, 1.5], [1, 1.4]], True)])
def test_whole_turns_that_vary_are_noticed(pair, monkeypatch, seconds, disturbed):
    """seconds: of each prompt in both turns."""

    def timed(runs, *how):
        kinds = zip([run().rows for run in runs], seconds, strict=True)
        return [[SimpleNamespace(rows=rows, decode_seconds=one) for one in turns] for rows, turns in kinds]

    monkeypatch.setattr(lab, "in_turns", timed)
    (found,) = measure_rates(pair[0], None, PROMPTS[:2], [None], max_new_tokens=4)
    assert found.disturbed == disturbed


# The command


@pytest.fixture
def tiny(target_path, drafter_path, tmp_path, monkeypatch):
    """Run the command on the tiny pair with few settings; returns what it printed and the settings file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "prompts.txt").write_text("The quick\nWhat is 12\nEin Café\n", encoding="utf-8")
    out = tmp_path / "best.yaml"
    models = ["--target", target_path, "--draft", drafter_path, "--prompts", tmp_path / "prompts.txt"]
    few = ["--max-new-tokens", 8, "--topk", "1,2", "--steps", 2, "--num-draft-tokens", "3,5", "--tries", 2]
    words = *models, *few, "--repeats", 1, "--out", out
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *flags: (run_here(main_of("tune"), *map(str, (*words, *flags))), out)
    torch.set_num_threads(threads)


def generated(*words, how: str = "--json") -> str:
    words = *words, "--prompt", "The quick", "--max-new-tokens", 8, how
    return run_here(main_of("generate"), *map(str, words)).stdout


def test_what_is_tuned_can_be_decoded_with(tiny, target_path, tmp_path, matmul_precision):
    (tmp_path / "tree.yaml").write_text("paths: [[0], [1], [2], [0, 0], [0, 0, 0]]")  # deeper and wider than the rest
    flags = "--json", "--batch-size", 2, "--matmul-precision", "medium"
    done, out = tiny(*flags, "--tree", tmp_path / "tree.yaml")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["settings_predicted"] == len(useful_trees((1, 2), 2, (3, 5))) + 1
    assert report["tried"][0]["setting"] == "plain"
    assert all(t["predicted_tau"] == t["measured_tau"] for t in report["tried"])
    assert (report["machine"]["threads"], report["tuned_for"]["batch_size"]) == (1, 2)
    settings = read_settings(out)
    assert settings["target"] == str(target_path)
    assert settings["matmul_precision"] == report["machine"]["matmul_precision"] == "medium"
    assert ("draft" in settings) != settings.get("no_draft", False)
    texts = [generated(*words) for words in (("--settings", out), ("--target", target_path, "--no-draft"))]
    assert len({json.loads(text.splitlines()[-1])["text"] for text in texts}) == 1


def test_the_file_names_pair_tree_and_rule(tiny, target_path, drafter_path, tmp_path, monkeypatch):
    """Where drafting wins."""

    def fake(target, drafter, prompts, settings, **how):
        return [MeasuredRate(s, 1.0 if s is None else 2.0 + s.topk, 2.0, []) for s in settings]

    monkeypatch.setattr(lab, "measure_rates", fake)
    few = "--topk", "2", "--steps", "1", "--num-draft-tokens", "3"
    done, out = tiny(*few)
    assert "4.0 tokens/s, 4.00 times plain decoding" in done.stdout
    pair = {"target": str(target_path), "draft": str(drafter_path), "verifier": "match"}
    assert read_settings(out) == pair | {"topk": 2, "steps": 1, "num_draft_tokens": 3}
    (tmp_path / "wide.yaml").write_text("paths: [[0], [1], [2]]")
    tiny(*few, "--tree", tmp_path / "wide.yaml")
    assert read_settings(out) == pair | {"tree": str(tmp_path / "wide.yaml")}
    assert "|-- " in generated("--settings", out, how="--show-trees")
