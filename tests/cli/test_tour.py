"""docs/tour.ipynb: its cells run, in order, and are few."""

import html
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"


def test_the_cells_run(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
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
