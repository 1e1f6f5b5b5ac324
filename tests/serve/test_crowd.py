"""Many mixed requests at once over real connections: everyone gets the text that it has alone, counters add up, and
nothing is left."""

import asyncio

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from specdec.lab.load.crowd import Alone, Sizes
from specdec.lab.load.crowd_run import Crowd, run

from specdec.engine.engine import Engine
from specdec.serve.replies import Reply
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Service
from specdec.trees import DynamicTree

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * 3, "What is 12 + 30? It is 42.", "Ein Café, 日本語."]
SIZES, WARM_UP = Sizes(characters=60, tokens=14, room=120, body=4000), 4


def wrong_of(pair, count: int) -> tuple[dict, list[str]]:
    """Figures of a crowd of so many, and what is wrong with them."""
    crowd = Crowd.draw(Alone(pair[0]), count, PROMPTS, SIZES, WARM_UP)
    engine = Engine(*pair, DynamicTree(3, 3, 9), prefixes=1 << 16)  # some prompts, and not all
    told = asyncio.run(run(engine, crowd, SIZES, at_once=12, warm_up=WARM_UP, rows=4, prefill_chunk=60))
    return told, told["wrong"]


def test_a_crowd_gets_what_everyone_gets_alone(pair):
    told, wrong = wrong_of(pair, 44)
    assert wrong == []
    assert told["requests"] == 50
    assert min(told["went_away"], told["refused"], told["rows_aborted"]) >= 2
    assert told["tau"] > 1


def wrong_seed(monkeypatch, kept):
    real = Service._job

    def drawn_by_another(self, *given):
        job = real(self, *given)
        job.seed = 5, 5
        return job

    monkeypatch.setattr(Service, "_job", drawn_by_another)


def usage_of_a_token_more(monkeypatch, kept):
    real = Reply.usage
    monkeypatch.setattr(Reply, "usage", lambda self: real(self) | {"completion_tokens": real(self)["total_tokens"]})


def jobs_that_stay(monkeypatch, kept):
    real = Scheduler._book
    monkeypatch.setattr(Scheduler, "_book", lambda self, deltas: (kept.extend(deltas), real(self, deltas))[1])


@pytest.mark.parametrize(
    ("broken", "says"),
    [(wrong_seed, "choice 0: "), (usage_of_a_token_more, "usage "), (jobs_that_stay, "left behind")],
)
def test_a_server_that_errs_is_found_out(pair, monkeypatch, broken, says):
    kept: list = []
    broken(monkeypatch, kept)
    assert any(says in found for found in wrong_of(pair, 4)[1])
