"""What tests of the training share: conversations on disk, and runs without pictures."""

import pytest


@pytest.fixture
def pictures():
    """For a test that looks at the curves."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Drawing the curves takes longer than these runs."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("specdec.training.loop.trainer.draw_curves", lambda log, picture: None)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A file of short conversations."""
    from short_runs import CONVERSATIONS, write_rows

    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", *({"messages": c} for c in CONVERSATIONS))


@pytest.fixture(scope="session")
def where(target_path, data) -> tuple[str, str]:
    """The settings that name target and data."""
    return f"target.path={target_path}", f"data.path={data}"


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A file of 23 prompts."""
    from short_runs import write_rows

    rows = ({"prompt": f"What is {i} + {i % 7}?"} for i in range(23))
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *rows)
