"""Servers with OpenAI's interface: asked, compared, and caught where they are wrong."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from helpers import Credulous, main_of, run_here, tiny_drafter, tiny_target
from remotes import small_server

from specdec import remote
from specdec.api import load_drafter, load_target
from specdec.engine.engine import Engine
from specdec.lab.proof.prove_command import against_engine, against_server
from specdec.remote import Remote, in_order, seed_of
from specdec.serve.app import make_app
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Service
from specdec.structs import Sampling
from specdec.trees import Chain
from specdec.verify import SampleAndMatch

main = main_of("prove")

PROMPTS = [[3, 5, 7], [1], list(range(12)), [2, 2]]
NEW = 16


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.001)


def speculative(target, rule=None) -> Engine:
    return Engine(target, tiny_drafter(target), Chain(3), rule or SampleAndMatch())


def test_a_right_server_is_found_lossless(target):
    with small_server(speculative(target)) as fast, small_server(Engine(target)) as slow:
        by_engine = against_engine(Remote(fast.url), target, PROMPTS, NEW)
        by_server = against_server(Remote(fast.url), Remote(slow.url), PROMPTS, NEW)
    for proof in (by_engine, by_server):
        assert (proof.texts, proof.tokens, proof.mismatches) == (4, 64, [])
        assert proof.drift < 1e-5
        assert "0.1 of the tests" in proof.server
    assert [body["logprobs"] for body in fast.asked] == [0] * 4 + [5] * 4


@pytest.mark.parametrize("ids", [True, False])
def test_a_wrong_server_is_caught(ids, target):
    """Also if it returns names of tokens only; then nothing can be queried again, and nothing passes as a tie."""
    with small_server(speculative(target, Credulous()), ids=ids) as fast, small_server(Engine(target), ids=ids) as slow:
        proof = against_server(Remote(fast.url), Remote(slow.url), PROMPTS, NEW)
        assert proof.bugs == len(proof.mismatches) > 0
        assert proof.mismatches[0].plain != proof.mismatches[0].speculative
        assert (proof.mismatches[0].margin < float("inf")) <= ids
        assert "NOT LOSSLESS" in proof.verdict()
        if ids:
            proof = against_engine(Remote(fast.url), target, PROMPTS, NEW)
            assert proof.bugs == len(proof.mismatches) > 0
        else:
            with pytest.raises(ValueError, match="returns no token ids"):
                against_engine(Remote(fast.url), target, PROMPTS, NEW)


def test_our_own_server_by_the_command(target_path, drafter_path, tmp_path):
    target = load_target(target_path)
    engine = Engine(target, load_drafter(drafter_path, target), Chain(3))
    app = make_app(Service(target, Scheduler(engine, rows=2, room=128), "ours"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level=50))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.run)
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        how = ["--server", url, "--target", str(target_path), "--max-new-tokens", "12", "--limit", "2"]
        done = run_here(main, *how, "--json", "--out", str(tmp_path / "page.md"))
        server.should_exit = True
    printed = json.loads(done.stdout.splitlines()[-1])
    assert (printed["sound"], printed["texts"], printed["bugs"]) == (True, 2, 0)
    assert printed["drift"] < 1e-4
    assert "No bug found: 2 of 2 texts equal" in (tmp_path / "page.md").read_text()


def test_the_command_ends_with_1_for_a_wrong_server(target_path, drafter_path):
    target = load_target(target_path)
    engine = Engine(target, load_drafter(drafter_path, target), Chain(3), Credulous())
    with small_server(engine) as fast, small_server(Engine(target)) as slow:
        where = ["--server", fast.url, "--plain-server", slow.url, "--target", str(target_path)]
        done = run_here(main, *where, "--max-new-tokens", "12")
    assert (done.returncode, "NOT LOSSLESS" in done.stdout) == (1, True)


def test_requests_are_tried_again_and_refusals_are_reported(target):
    with small_server(Engine(target), fail=lambda number: {0: 503, 1: 0, 2: 429}.get(number)) as server:
        answer = Remote(server.url).complete([3], 4, Sampling(0.5, top_p=0.9), seed=7)
        assert len(server.asked) == 4
        assert server.asked[3] == server.asked[0]
        assert {"temperature": 0.5, "top_p": 0.9, "seed": 7, "prompt": [3]}.items() <= server.asked[3].items()
        assert len(answer.tokens) == 4
    with small_server(Engine(target), fail=lambda number: 422) as server:
        with pytest.raises(ValueError, match="answers 422: not now"):
            Remote(server.url).complete([3], 4)
        assert len(server.asked) == 2  # with the ids of tokens, and without
    lost = "gave no answer in 3 attempts; the last: 500: not now"
    with small_server(Engine(target), fail=lambda number: 500) as server, pytest.raises(ValueError, match=lost):
        Remote(server.url, retries=2).complete([3], 4)
    with pytest.raises(ValueError, match="gave no answer in 1 attempts"):
        Remote(server.url, retries=0)  # it is gone
    with small_server(Engine(target)) as server, pytest.raises(ValueError, match="has no model 'other'; it has small"):
        Remote(server.url, "other")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("choices",), None, "choices must be a valid list, got null"),
        (("choices",), [], "choices is empty"),
        (("choices", 0), "x", "choices[0] must be a valid dictionary, got 'x'"),
        (("choices", 0, "text"), 5, "choices[0].text must be a valid string, got 5"),
        (("choices", 0, "finish_reason"), ["stop"], "choices[0].finish_reason must be a valid string"),
        (("choices", 0, "token_ids"), "1 2", "choices[0].token_ids must be a valid list"),
        (("choices", 0, "token_ids", 1), 1.5, "choices[0].token_ids[1] must be a valid integer, got 1.5"),
        (("choices", 0, "token_ids", 1), -1, "choices[0].token_ids[1] must be greater than or equal to 0, got -1"),
        (("choices", 0, "token_ids", 1), 999, "returns the token id 999, and the target has 17 tokens"),
        (("choices", 0, "logprobs"), [], "choices[0].logprobs must be a valid dictionary"),
        (("choices", 0, "logprobs", "token_logprobs", 2), None, "token_logprobs[2] must be a valid number, got null"),
        (("choices", 0, "logprobs", "token_logprobs", 2), float("nan"), "token_logprobs[2] must be a finite number"),
        (("choices", 0, "logprobs", "tokens"), ["a"], "choices[0] has lists of different lengths"),
        (("choices", 0, "logprobs", "top_logprobs", 0), "x", "top_logprobs[0] must be a valid dictionary"),
    ],
)
def test_an_odd_answer_is_one_sentence_that_names_the_field(target, place, value, message):
    def change(answer: dict) -> dict:
        inner = answer
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value
        return answer

    with small_server(Engine(target), change=change) as server, pytest.raises(ValueError, match=re.escape(message)):
        against_engine(Remote(server.url), target, PROMPTS[:1], NEW)


def test_an_empty_answer_is_a_bug(target):
    none = {"choices": [{"text": "", "token_ids": []}]}
    with small_server(Engine(target), change=lambda answer: none) as server:
        proof = against_engine(Remote(server.url), target, PROMPTS[:1], NEW)
    assert (proof.bugs, proof.mismatches[0].speculative) == (1, "the end")


def test_many_at_once_in_order():
    together, slots = threading.Barrier(5, timeout=10), threading.Semaphore(5)

    def work(number: int) -> int:
        assert slots.acquire(blocking=False), "more than five at once"
        together.wait()
        slots.release()
        return number * number

    assert list(in_order(work, range(20), 5)) == [i * i for i in range(20)]
    assert seed_of(1, 2) != seed_of(2, 1)
    assert seed_of(1, 2) == seed_of(1, 2) < 1 << 48
