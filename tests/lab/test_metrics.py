"""Every metric by name: hand-made rounds, and numbers worked out by hand, those of docs/metrics.md among them."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import main_of, refused, run_here

from specdec.engine.recorder import Trace, TracedRound, TracedRow, TracedTree
from specdec.engine.trace_files import write_trace
from specdec.lab.traces import metrics
from specdec.lab.traces.metrics import BY_DEPTH, METRICS, bootstrap, by_category, summary
from specdec.structs import Sampling

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def tree(parents: list[int]) -> TracedTree:
    values = torch.zeros(len(parents))
    return TracedTree(torch.arange(len(parents)).int(), torch.tensor(parents).int(), values, values, values)


def chain_round(drafted: int, accepted: int, emitted: int) -> TracedRound:
    chain = tree([max(i - 1, 0) for i in range(drafted + 1)]) if drafted else None
    return TracedRound(5, list(range(accepted + 1)), [7] * emitted, {}, chain)


def row(question: str, category: str | None, rounds: list[TracedRound], steps: int = 3) -> TracedRow:
    return TracedRow(question, category, 0, steps, Sampling(), [1, 2], 3, "eos", 0.0, rounds=rounds)


# (drafted, accepted, emitted) of each round. Question a ends within its last round, so that one of three tokens counts;
# b has two turns, and in one round of the second nothing was drafted.
SMALL = [
    ("a", "math", [(3, 3, 4), (3, 1, 2), (3, 2, 1)]),
    ("b", "chat", [(3, 0, 1), (3, 0, 1)]),
    ("b", "chat", [(0, 0, 1), (3, 3, 4), (3, 0, 1)]),
]
ROWS = [row(question, category, [chain_round(*r) for r in rounds]) for question, category, rounds in SMALL]


def test_trees():
    """5 nodes, two children of the root, two of node 1: what chains alone define is left open."""
    nodes, paths = tree([0, 0, 0, 1, 1]), ([0, 1, 4], [0, 2], [0], [0, 2])
    rows = [row("a", None, [TracedRound(5, path, [7] * len(path), {}, nodes) for path in paths], steps=2)]
    assert metrics.draft_token_efficiency(rows) == 4 / 16
    assert metrics.vllm_per_position_rates(rows) == [3 / 4, 1 / 4]
    assert metrics.tau(rows) == metrics.vllm_mean_acceptance_length(rows) == 2
    assert math.isnan(metrics.mtp_acceptance_rate(rows))
    assert all(map(math.isnan, metrics.n_alpha(rows)))


def test_chains_of_different_lengths():
    """A token that was not drafted was not examined."""
    rows = [row("a", None, [chain_round(1, 1, 2), chain_round(3, 1, 2), chain_round(2, 2, 3)])]
    assert metrics.n_alpha(rows)[:2] == [3 / 3, 1 / 2]
    assert math.isnan(metrics.n_alpha(rows)[2])
    assert metrics.vllm_per_position_rates(rows) == [3 / 3, 1 / 3, 0]
    assert metrics.mtp_acceptance_rate(rows) == 4 / 6


def test_plain_decoding_and_answers_of_one_token():
    plain = [row("a", None, [chain_round(0, 0, 1)] * 4, steps=0), row("b", None, [], steps=0)]
    assert metrics.tau(plain) == metrics.tau_macro(plain) == metrics.eagle_tau(plain) == metrics.hass_tau(plain) == 1
    assert metrics.sglang_accept_length(plain) == 6 / 4
    assert math.isnan(metrics.vllm_mean_acceptance_length(plain))
    assert math.isnan(metrics.draft_token_efficiency(plain))
    assert metrics.n_alpha(plain) == metrics.vllm_per_position_rates(plain) == []
    assert all(math.isnan(metric([row("b", None, [])])) for metric in METRICS.values())


def test_the_bootstrap_draws_questions_by_its_seed():
    """Of two questions a resample is aa, ab or bb, with probabilities 1/4, 1/2 and 1/4; never a turn of b by itself."""
    assert bootstrap(metrics.tau, ROWS, level=0.95) == [(8 / 5, 7 / 3)]
    assert bootstrap(metrics.tau, ROWS, level=0.4) == [(15 / 8, 15 / 8)]
    many = [row(str(q), None, [chain_round(3, q % 4, q % 4 + 1)] * (1 + q % 3)) for q in range(12)]
    first, again, other = (bootstrap(metrics.vllm_per_position_rates, many, resamples=50, seed=s) for s in (1, 1, 2))
    assert first == again != other
    values = metrics.vllm_per_position_rates(many)
    assert all(low < value < high for (low, high), value in zip(first, values, strict=True))


@pytest.mark.parametrize(
    ("setting", "message"), [({"level": 95}, "must lie between 0 and 1"), ({"resamples": 0}, "must be at least 1")]
)
def test_wrong_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(metrics.tau, ROWS, **setting)


def test_summary():
    assert list(by_category(ROWS)) == ["math", "chat"]
    found = summary(ROWS, resamples=20)
    assert (found["questions"], found["rows"], found["rounds"]) == (2, 3, 8)
    assert list(found["metrics"]) == list(METRICS)
    assert found["metrics"]["eagle_tau"]["value"] == (4 + 2 + 3 + 1 + 1 + 1 + 4 + 1) / 8
    assert [entry["value"] for entry in found["by_depth"]["n_alpha"]] == [4 / 7, 3 / 4, 2 / 3]
    chat = found["by_category"]["chat"]
    assert chat["metrics"]["tau"] == {"value": 8 / 5, "low": None, "high": None}
    assert [entry["value"] for entry in chat["by_depth"]["vllm_per_position_rates"]] == [1 / 4, 1 / 4, 1 / 4]
    json.dumps(found, allow_nan=False)


def test_command(tmp_path):
    one, plain, main = str(tmp_path / "one"), str(tmp_path / "plain"), main_of("trace metrics")
    write_trace(Trace({}, {}, ROWS), one)
    write_trace(Trace({}, {}, [row("a", None, [chain_round(0, 0, 1)], steps=0)]), plain)
    found = json.loads(run_here(main, one, "--json", "--resamples", "20").stdout)
    assert found == {one: summary(ROWS, resamples=20)}
    out = run_here(main, one, plain, "--resamples", "20").stdout
    assert re.search(r"mtp_acceptance_rate\W+0\.429.*\W-\W", out)
    assert re.search(r"math\W+2\.333", out)
    assert "is not a trace" in refused(main, tmp_path)
    other, diagnose = str(tmp_path / "other"), main_of("trace diagnose")
    write_trace(Trace({"drafter": {"class": "Eagle3"}}, {}, ROWS), other)
    assert "drafted anything: record answers of several tokens" in refused(diagnose, plain)
    assert "was drafted by a drafter of class Eagle3, and not Mtp" in refused(diagnose, other)
    assert "accepted in 50% of the rounds" in run_here(diagnose, one).stdout


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of docs/metrics.md."""
    section = DOCS.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_small_trace_and_every_metric_of_it_worked_out_by_hand():
    cells_read = [(cells[0], cells[2], [int(cell) for cell in cells[3:]]) for cells in table_rows("The small trace")]
    assert cells_read == [(question, category, list(r)) for question, category, rounds in SMALL for r in rounds]
    cells_read = {cells[0]: cells[3] for cells in table_rows("Which is which")}
    assert cells_read == {name: f"{metric(ROWS):.3f}" for name, metric in METRICS.items()} | {
        name: ", ".join(f"{value:.3f}" for value in metric(ROWS)) for name, metric in BY_DEPTH.items()
    }
