"""`specdec serve`: a process that listens, stops on a signal, and says in one sentence why it does not start."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import DRAFTERS, main_of, tiny_drafter, tiny_target

pytest.importorskip("fastapi")

import httpx2
from clients import TEXT

from specdec.cli import checks
from specdec.cli.commands import parse
from specdec.engine.trace_files import read_trace
from specdec.serve import serve_command
from specdec.serve.serve_command import apart, listen, policy_of, tree_of

refused = partial(helpers.refused, main_of("serve"))


@pytest.mark.parametrize(
    ("words", "tree", "policy", "policy_of_ngrams"),
    [
        ("", "1/3/4", "ema", None),
        ("--children likeliest", "1/3/4", "ema", None),
        ("--compile", "1/3/4", "ema", None),
        ("--device cuda", "4/5/16", None, None),
        ("--adaptive survival:told", "4/5/16", "survival:told", "survival:told"),
        ("--adaptive table", "1/3/4", "table", "table"),
        ("--steps 4", "4/4/16", None, None),
        ("--topk 1 --steps 2", "1/2/3", None, None),
        ("--tree static", "static", None, None),
    ],
)
def test_what_a_cpu_drafts_where_nothing_is_asked_for(words, tree, policy, policy_of_ngrams):
    """A chain, as deep as pays. N-grams cost nothing where they propose nothing."""
    args, target = parse("serve", words.split()), tiny_target()
    assert str(tree_of(args)) == tree
    assert policy_of(args, tiny_drafter(target)) == policy
    assert policy_of(args, DRAFTERS["suffix"](target)) == policy_of_ngrams


def test_cuts_do_not_go_with_compiled_rounds(target_path, drafter_path):
    words = ["--target", str(target_path), "--draft", str(drafter_path), "--port", "0", "--compile"]
    assert "the policy 'survival' leaves out nodes" in refused(*words, "--adaptive", "survival")


def test_a_process_serves_and_ends_what_runs_when_it_is_stopped(target_path, drafter_path, tmp_path):
    words = ["--target", str(target_path), "--draft", str(drafter_path), "--port", "0", "--topk", "3", "--steps", "3"]
    words += ["--adaptive", "table:1=3,4=1", "--trace", str(tmp_path / "trace"), "--api-key", " secret-key "]
    command = [sys.executable, "-m", "specdec", "serve", *words, "--served-model-name", "tiny"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command, text=True, **how)
    guard = threading.Timer(500, process.kill)
    guard.start()
    try:
        url = re.fullmatch(r"tiny at (http://127\.0\.0\.1:\d+)/v1\n", process.stdout.readline())[1]
        assert process.stdout.readline() == f"chat in a browser at {url}/\n"
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True, "seed": 1}
        with httpx2.Client(base_url=url, timeout=400, headers={"authorization": "Bearer secret-key"}) as client:
            with client.stream("POST", TEXT, json=body) as gone:
                next(gone.iter_lines())
            with client.stream("POST", TEXT, json=body | {"n": 6}) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        _, err = process.communicate(timeout=400)
    finally:
        guard.cancel()
        process.kill()
    assert events.pop() == "[DONE]"
    ends = [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]
    assert ends.count("length") == 6
    loading = f"specdec serve: loading {target_path} and {drafter_path}\n"
    assert (process.returncode, err) == (0, f"{loading}SIGTERM: finishing what runs\n")
    trace = read_trace(tmp_path / "trace")
    assert sorted(len(row.tokens) for row in trace.rows)[-6:] == [100] * 6
    assert {row.steps for row in trace.rows if len(row.tokens) == 100} <= {1, 3}  # the first may end before any round
    assert "secret-key" not in json.dumps(trace.settings)


@pytest.fixture
def interruptible():
    """Let SIGINT raise KeyboardInterrupt. A shell without job control starts background processes that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_need_not_wait_for_what_is_made_apart():
    """Such as rounds that are compiled for minutes."""
    ended, main_thread = threading.Event(), threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, [main_thread, signal.SIGINT]).start()  # which wakes it
    with pytest.raises(KeyboardInterrupt):
        apart(ended.wait, 60)
    assert not ended.is_set()
    ended.set()


def test_a_signal_while_torch_runs_apart_is_no_abort():
    code = """if True:
        import os, signal, threading, torch
        from specdec.cli.errors import one_sentence_errors
        from specdec.serve.serve_command import apart

        def make():
            while True:
                torch.ones(64, 64) @ torch.ones(64, 64)

        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        one_sentence_errors(lambda: apart(make))()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "terminated\n")


def test_addresses():
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in refused("--port", str(port))
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port
    if socket.has_ipv6:
        with listen("::1", 0) as bound:
            assert bound.family == socket.AF_INET6


def test_a_port_that_another_server_takes_while_models_are_loaded(monkeypatch):
    with listen("127.0.0.1", 0) as other:
        monkeypatch.setattr(serve_command, "apart", lambda *_: other.listen() or (SimpleNamespace(model="tiny"), None))
        monkeypatch.setattr("specdec.serve.app.make_app", lambda *_: None)
        port = other.getsockname()[1]
        assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in refused("--port", str(port))


def test_what_cannot_be_served_is_said_before_models_are_loaded(monkeypatch):
    monkeypatch.setattr(serve_command.ModelSettings, "load_target", lambda _: pytest.fail("it was loaded"))
    assert "give --draft FOLDER, or --draft ngram, or --no-draft" in refused("--port", "0", "--target", "some/where")
    assert "--tree auto chooses for one load" in refused("--port", "0", "--tree", "auto")
    assert "--port must be at most 65535" in refused("--port", "70000")
    assert "cannot listen at 203.0.113.1 port" in refused("--host", "203.0.113.1", "--port", "0")
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "needs fastapi, uvicorn, prometheus_client: pip install 'specdec[serve]'" in refused()


def test_the_name_of_the_model(target_path):
    for words, name in ((["--target", str(target_path)], target_path.name), (["--target", "org/name"], "org/name")):
        assert serve_command.name_of(parse("serve", [*words, "--no-draft"])) == name
    assert serve_command.name_of(parse("serve", [])) == "demo"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_what_is_made_apart_leaves_no_workers_behind():
    """They would be more than there are cores, and libgomp lets all of them sleep between two operators."""

    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def make(threads: int) -> set[str]:
        torch.set_num_threads(threads)  # counts for threads that are new, this one's workers included
        torch.ones(1 << 20).mul_(2)
        return tasks()

    usual = torch.get_num_threads()
    try:
        apart(make, 2)  # the first has threads made that stay, and are no workers
        before = tasks()
        within = apart(make, 2)
    finally:
        apart(torch.set_num_threads, usual)
    assert len(within - before) == 2, "the thread and its worker"
    deadline = time.monotonic() + 20
    while tasks() & (within - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not tasks() & (within - before)
    with pytest.raises(ValueError, match="could not convert"):
        apart(float, "x")
