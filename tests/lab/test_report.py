"""The report of a sweep: numbers worked out by hand, figures that are true to them, a page that needs nothing else. A
wrapped drafter, by which reports observe, is the one that it holds."""

import inspect
import itertools
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from helpers import DRAFTERS, tiny_target
from matplotlib.text import Text
from sweeps import BEST, tiny_sweep

from specdec.contracts import Drafter
from specdec.drafters import eagle3
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.engine.recorder import TracedRound, TracedRow, TracedTree
from specdec.lab import figure_style
from specdec.lab.sweep import figures
from specdec.lab.sweep.benchmarks import Benchmark, Question
from specdec.lab.sweep.points import Draft
from specdec.lab.sweep.report import REPORT, DrawnNode, best_tree_svg, round_svg, tree_svg, write_report
from specdec.lab.sweep.store import collect, print_tables, table_of, write_results
from specdec.lab.traces.diagnose import Probe, by_context, calibration, coverage, examples
from specdec.lab.wrapped import WrappedDrafter
from specdec.model.loader import load_target
from specdec.structs import Sampling
from specdec.trees import DynamicTree

SVG = "{http://www.w3.org/2000/svg}"

# A root with four nodes: 1 and 2 are its children, 3 and 4 those of 1.
PARENTS, OWN = [0, 0, 0, 1, 1], [1.0, 0.62, 0.33, 0.55, 0.24]


def traced(path: list[int], emitted: int, context: int, own: list[float] = OWN) -> TracedRound:
    logq = [0.0]
    for q, parent in zip(own[1:], PARENTS[1:], strict=True):
        logq.append(logq[parent] + math.log(q))
    ones = torch.ones(5)
    tree = TracedTree(torch.arange(5).int(), torch.tensor(PARENTS).int(), torch.tensor(logq), ones, ones)
    return TracedRound(context, path, [7] * emitted, {}, tree)


def row(question: str, rounds: list[TracedRound]) -> TracedRow:
    return TracedRow(question, None, 0, 2, Sampling(), [1], 3, "eos", 0.0, rounds=rounds)


ROWS = [
    row("a", [traced([0, 1, 4], 3, 60), traced([0], 1, 63)]),
    row("b", [traced([0, 2], 2, 64), traced([0, 1], 1, 200)]),
]


# Diagnostics


def test_calibration_by_hand():
    # 0.62 was examined 4 times and taken twice, 0.33 4 times and once, 0.55 twice and never, 0.24 twice and once.
    expected = [(0.24, 1 / 2, 2), (0.33, 1 / 4, 4), (0.55, 0.0, 2), (0.62, 2 / 4, 4)]
    found = calibration(ROWS, bins=10)
    assert [(round(b["draft"], 6), b["accepted"], b["count"]) for b in found["bins"]] == expected
    assert found["error"] == pytest.approx(sum(abs(q - share) * n for q, share, n in expected) / 12, abs=1e-6)
    silent = traced([0], 1, 5, [math.nan] * 5)
    assert calibration([row("a", [silent])]) == {"bins": [], "error": None}


def test_tau_by_context_by_hand():
    found = by_context(ROWS, resamples=50)
    assert [(b["from"], b["to"], b["rounds"], b["value"]) for b in found] == [
        (0, 64, 2, 2.0), (64, 128, 1, 2.0), (128, 256, 1, 1.0),
    ]  # fmt: skip
    assert found[0]["low"] == found[0]["high"] == 2.0  # question a alone has rounds there
    assert by_context([row("a", [])]) == []


def test_coverage_by_hand():
    target = tiny_target(vocab=9)
    drafter = eagle3.create(target, vocab=DraftVocab(9, torch.tensor([0, 1, 3])))
    rows = [row("a", [TracedRound(5, [0], [7, 3, 7, 5], {}, None)])]  # and 3, from the prefill
    found = coverage(rows, drafter, str)
    assert found == {"share": 2 / 5, "tokens": 5, "size": 3, "missed": [["7", 2], ["5", 1]]}


def test_examples_are_the_best_a_usual_and_a_failed_round():
    found = examples(ROWS, str)
    assert [(e["question"], e["path"]) for e in found] == [("a", [0, 1, 4]), ("b", [0, 2]), ("a", [0])]
    assert found[0]["draft"] == pytest.approx(OWN, abs=1e-4)
    assert found[0]["bonus"] == "7"
    assert examples([row("a", [traced([0, 1], 1, 5)])], str)[0]["bonus"] is None  # the text ended before it
    assert examples([], str) == []


def test_the_probe_changes_nothing_and_sees_all():
    target = tiny_target(vocab=40)
    torch.manual_seed(0)
    drafter = eagle3.create(target).eval()
    tree, probe = DynamicTree(3, 3, 8), Probe(drafter)
    how = {"max_new_tokens": 20, "eos": frozenset()}
    plain = Engine(target, drafter, tree).generate([[1, 2, 3]], **how).rows[0]
    probed = Engine(target, probe, tree).generate([[1, 2, 3]], observer=probe, **how).rows[0]
    assert probed.tokens == plain.tokens
    rounds, norms = plain.trace.rounds, probe.norms()
    assert [(n["step"], n["count"]) for n in norms] == [(0, rounds + 1), (1, 3 * rounds), (2, 3 * rounds)]
    assert all(n["low"] <= n["mean"] <= n["high"] for n in norms)
    assert sum(taken for _, taken in probe.target) == sum(plain.trace.accepted)
    assert len(probe.draft) == rounds
    assert sum(taken for _, taken in probe.draft) == sum(a > 0 for a in plain.trace.accepted)
    assert all(0 <= h <= math.log(40) + 1e-5 for h, _ in probe.target + probe.draft)
    with pytest.raises(ValueError, match="one row at a time"):
        Engine(target, probe, tree).generate([[1], [2]], observer=probe, **how)
    with torch.no_grad():
        drafter.head.weight.zero_()  # a uniform drafter
    probe = Probe(drafter)
    Engine(target, probe, tree).generate([[1, 2]], max_new_tokens=5, observer=probe)
    assert [h for h, _ in probe.draft] == pytest.approx([math.log(40)] * len(probe.draft))


# Figures


def test_the_pareto_front_by_brute_force():
    points = [(float(x * 7 % 11), float(x * 5 % 13), x) for x in range(11)]
    best = [p for p in points if not any(q[0] <= p[0] and q[1] >= p[1] and q[:2] != p[:2] for q in points)]
    assert figures.pareto(points) == sorted(best)


@pytest.mark.parametrize("seed", range(3))
def test_labels_next_to_points_do_not_overlap(seed):
    g = torch.Generator().manual_seed(seed)
    points = [(10 + 8 * x, 2 + 0.6 * y) for x, y in torch.rand(7, 2, generator=g).tolist()]
    figure, (_, axis) = figure_style.subplots(1, 2, figsize=(figure_style.WIDTH, 3.9))
    axis.plot(*zip(*points, strict=True), "o", markersize=5)
    axis.set(xlim=(0, 40), ylim=(1, 3.5))
    figures._label(axis, [(*point, "eagle3, 4/4/16") for point in points], points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axis.texts]  # without the line to the point
    assert len(boxes) >= 5
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("seed", range(3))
def test_nodes_of_a_tree_do_not_overlap(seed):
    g = torch.Generator().manual_seed(seed)
    parents = [0] + [int(torch.randint(0, i, (), generator=g)) for i in range(1, 40)]
    svg = ElementTree.fromstring(tree_svg([DrawnNode("x" * (1 + i % 14), ".12") for i in range(40)], parents, "random"))
    boxes = [[float(r.get(name)) for name in ("x", "y", "width", "height")] for r in svg.iter(f"{SVG}rect")]
    assert len(boxes) == len([*svg.iter(f"{SVG}path")]) + 1 == 40
    for i, (x, y, w, h) in enumerate(boxes):
        assert all(x >= a + c or a >= x + w or y >= b + d or b >= y + h for a, b, c, d in boxes[:i])
        assert min(x, y) >= 0
        assert x + w <= float(svg.get("width")) + 1
        assert y + h <= float(svg.get("height")) + 1


def test_a_tree_shows_strange_tokens():
    example = examples(ROWS, str)[0]
    example["tokens"] = ["<&>", "\n", "\x00", " a\ud800", ""]
    text = "".join(ElementTree.fromstring(round_svg(example)).itertext())
    assert all(shown in text for shown in ("<&>", "⏎", "\N{REPLACEMENT CHARACTER}", "␣a", "∅"))


def test_the_best_tree_shows_how_often_nodes_are_reached():
    svg = best_tree_svg([(0,), (1,), (0, 1)], [[0.5, 0.25], [0.4, 0.2]])
    found = re.findall(r">(\d|root)(?:<tspan[^>]*>([.\d]+))?", svg)
    assert found == [("root", ""), ("1", ".50"), ("2", ".25"), ("2", ".10")]


# The page


@pytest.fixture(scope="module")
def out(target_path, drafter_path, tmp_path_factory):
    """Two benchmarks in one folder: two drafters on the first, plain decoding of the second."""
    out, target = tmp_path_factory.mktemp("report"), load_target(target_path)
    texts = ("The quick", "Ein Café", "12 + 30")
    questions = [Question(str(i), "ab"[i % 2], (text,)) for i, text in enumerate(texts)]
    drafts = [Draft.read({"draft": str(drafter_path), "name": "eagle<3>"}), Draft.read("ngram")]
    for name, some in (("first", drafts), ("<second>", [])):
        benchmark = Benchmark(name, questions[: 2 + len(some)], skipped=3)
        sweep = tiny_sweep(target, out, benchmark, max_new_tokens=12)
        list(sweep.run(sweep.points(some, ["1/2/3", "2/2/4", "2/3/50"], True, BEST)))
    results, timings, _ = write_results(out)
    write_report(out, results, timings, command="specdec sweep <x>")
    return out


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.open, self.references, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.references += [v for k, v in attributes if k in ("src", "href", "xlink:href", "data") and v]
        self.open += [tag] if tag not in ("meta", "br") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def test_the_page_is_whole_needs_nothing_else_and_says_what_was_measured(out):
    text = (out / REPORT).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert all(ref.startswith(("#", "data:")) for ref in page.references)
    assert not re.findall(r"url\((?!data:|#)|<script|@import", text)
    results, timings, _ = collect(out)
    words = " ".join(page.words)
    taus = [r["metrics"]["tau"]["value"] for r in results if r["kind"] == "decode" and "skipped" not in r]
    torch_version = next(iter(timings.values()))["machine"]["torch"]
    for reported in (
        "eagle<3>", "<second>", "specdec sweep <x>", "3 records of the benchmark", "num_draft_tokens is 50",
        f"torch {torch_version}", *(f"{tau:.2f}" for tau in taus),
    ):  # fmt: skip
        assert reported in words
    assert "that differ from plain" not in words


def test_there_is_a_picture_of_every_figure(out):
    kinds = ("tau", "cost", "parts", "depth", "categories", "diagnostics")
    pictures = {file.name: file.read_bytes()[:4] for file in (out / "figures").iterdir()}
    assert pictures == {f"2-{name}.png": b"\x89PNG" for name in kinds}
    svgs = re.findall(r"<svg.*?</svg>", (out / REPORT).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([ElementTree.fromstring(svg) for svg in svgs]) > 8


def test_tables_warn_of_different_answers_and_have_the_acceptance_of_all_rounds(out, capsys):
    """Acceptance fits tau then, as it does in `specdec generate` and `compare`: n-grams do not draft in each round."""
    results, timings, _ = collect(out)
    found = next(r for r in results if r["names"]["draft"] == "ngram" and "identical" in r)
    found["identical"] -= 1
    found["names"]["lossless"] = False
    print_tables(results, timings)
    reported = capsys.readouterr().out
    assert "Points with answers that differ from plain decoding's: 1." in reported
    assert "Lossy: SampleAndMatch()" in reported
    found["by_depth"]["acceptance_by_depth"] = [{"value": 0.25}, {"value": 0.1}, {"value": None}]
    (row,) = table_of([found], timings)
    assert row["cells"][4] == "25 10"


def test_nothing_to_report(out, tmp_path):
    results, timings, _ = collect(out)
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(tmp_path, [r for r in results if r["names"]["draft"] == "none"], timings, command="")
    (tmp_path / "figures").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot write .*figures"):
        write_report(tmp_path, results, timings, command="")


# Wrapped drafters


# And of graphs
OF_TRAINING = {
    "capturable", "learns", "documents", "recipe", "unroll", "recompute", "heads_in_use", "set_heads", "first_tokens",
    "start_from",
}  # fmt: skip
DERIVED = {"chain", "deepest"}  # which call what is passed on


def test_everything_that_decoding_asks_of_a_drafter_is_passed_on():
    """A member that `Drafter` gets must be passed on too, or be named above."""
    members = {name for name in vars(Drafter) if not name.startswith("_")} | set(inspect.get_annotations(Drafter))
    assert members - OF_TRAINING - DERIVED <= set(vars(WrappedDrafter))


def test_it_drafts_the_same():
    target = tiny_target()
    for kind in ("eagle3", "medusa", "lookup"):
        drafter = DRAFTERS[kind](target)
        rows = [
            Engine(target, each, DynamicTree(3, 3, 9)).generate([[1, 2, 3], [4] * 6], max_new_tokens=20).rows
            for each in (drafter, WrappedDrafter(drafter))
        ]
        assert [row.trace for row in rows[0]] == [row.trace for row in rows[1]]
