"""The bundled pair: small enough, trained, and lossless in every way of decoding it. The tour shows it."""

import html
import json
from pathlib import Path

import pytest

import specdec
from specdec.engine.engine import Engine
from specdec.text import encode_prompt

DEMO = specdec.DEMO_TARGET.parent
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"
PROMPTS = [
    "What are some good ways to learn a new language?",
    "Tom has 5 apples and buys 7 more. How many apples does he have now?",
    "I would like to find a restaurant in San Jose, please.",
    "Explain why the sky is blue, in simple words that a child can understand.",
    "Write a Python function that adds two numbers.",
    "Hi",
    "Name three animals that live in the sea, and say what each of them eats.",
    "Is a tomato a fruit or a vegetable? Give a reason for your answer.",
]


@pytest.fixture(scope="module")
def target():
    return specdec.load_target(specdec.DEMO_TARGET)


@pytest.fixture(scope="module")
def plain(target):
    ids = [encode_prompt(target, p) for p in PROMPTS]
    return [Engine(target).generate([i], max_new_tokens=64).rows[0].tokens for i in ids]


def test_it_may_be_shipped():
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) <= 50 * 2**20
    assert (DEMO / "README.md").is_file()


PAIRED = ("demo/eagle3", {}), ("demo/eagle2", {}), ("demo/mtp", {}), ("ngram", {})


@pytest.mark.parametrize(("draft", "how"), [*PAIRED, ("demo/eagle2", {"token_map": DEMO / "frspec_4096.json"})])
def test_every_bundled_drafter_is_lossless_and_of_use(target, plain, draft, how):
    drafter = specdec.load_drafter(draft, target, **how)
    out = [specdec.generate(target, p, drafter, max_new_tokens=64) for p in PROMPTS]
    assert [o.rows[0].tokens for o in out] == plain
    assert sum(o.num_tokens - 1 for o in out) / sum(o.rounds for o in out) > 1.3


def test_the_cells_of_the_tour_run(monkeypatch, capsys):
    """In order, and they are few."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cells = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(bool(line.strip()) for cell in cells for line in cell.splitlines()) <= 25
    there: dict = {}
    for cell in cells:
        exec(compile(cell, str(NOTEBOOK), "exec"), there)
    said = capsys.readouterr().out
    assert there["out"].text[0] in said
    comparison = there["comparison"]
    assert [score.same_as_plain for score in comparison.scores] == [len(there["prompts"])] * 3
    assert html.escape(comparison.verdict) in comparison._repr_html_()
    assert comparison.plot()._repr_png_().startswith(b"\x89PNG")
    assert there["drafted"].min() >= 0
    assert there["drafted"].max() < 1.001
