"""Threads next to busy programs: a short spin before torch loads, fewer threads on busy cores, the same results."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from specdec import threads
from specdec.api import DEMO_TARGET, generate, load_drafter, load_target


def test_spin_is_set_before_torch_and_yields_to_the_user():
    code = """if True:
        import os, sys, specdec.threads
        for own in ({}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "200"}, {"OMP_WAIT_POLICY": "active"}):
            for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"):
                os.environ.pop(name, None)
            os.environ.update(own)
            specdec.threads.limit_spinning()
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("KMP_BLOCKTIME"))
            specdec.threads.limit_spinning(specdec.threads.SERVER_SPIN)
            print(os.environ.get("GOMP_SPINCOUNT"))
        assert "torch" not in sys.modules"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_each = [["30000", "1", "300000"], ["7", "1", "7"], ["30000", "200", "300000"], ["None", "None", "None"]]
    assert out.stdout.split() == [word for words in of_each for word in words]


def test_a_time_limit_ends_python_code_in_any_thread():
    def stubborn():
        while True:
            with suppress(Exception):
                time.sleep(0.01)

    limit = threads.TimeLimit()
    assert limit.run(9, sum, [1, 2]) == 3
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(limit.run, seconds, stubborn) for seconds in (0.1, 1.1)]
        with pytest.raises(TimeoutError):
            limit.run(0.1, stubborn)
        assert [type(other.exception()) for other in others] == [TimeoutError] * 2
        assert pool.submit(limit.run, 9, time.sleep, 1.1).result() is None  # in a thread whose time was up before
    with pytest.raises(ValueError, match="invalid literal"):
        limit.run(9, int, "wrong")
    assert not limit.running


def test_time_may_be_up_when_the_code_has_just_ended(monkeypatch):
    ends, limit = [], threads.TimeLimit()
    end = limit._end

    def interrupted(thread):
        ends.append(thread)
        if len(ends) == 1:
            raise threads._TimeIsUp
        end(thread)

    monkeypatch.setattr(limit, "_end", interrupted)
    with pytest.raises(TimeoutError):
        limit.run(9, sum, [1, 2])
    assert len(ends) == 2
    assert not limit.running


@pytest.fixture
def cores(monkeypatch):
    """Simulate four idle cores. Return a function that occupies some of them for the next look."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(4))
    clock, busy, running = [0.0], [0.0], [9]
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads.Threads, "_others", lambda self: busy[0])
    monkeypatch.setattr(threads.Threads, "_running", lambda self: running[0])
    monkeypatch.setattr(threads.Threads, "looked", -1.0)
    monkeypatch.setattr(threads.Threads, "found", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(4)

    def occupy(count: float, seconds: float = 1.0, now: int = 9) -> None:
        running[0] = now
        clock[0], busy[0] = clock[0] + seconds, busy[0] + count * seconds

    yield occupy
    torch.set_num_threads(before)
    threads.Threads.usual = None


def test_the_first_round_knows_the_load_since_the_process_last_looked(cores):
    first, ours = threads.Threads(True), threads.Threads(True)
    cores(3)
    first.adapt()
    ours.adapt()  # at once after another look: what that one found
    assert torch.get_num_threads() == 1
    for seconds, occupied, count in ((0.01, 4, 1), (0.05, 0, 3), (0.1, 4, 3), (0.1, 4, 1)):
        cores(occupied, seconds)
        ours.adapt()
        assert torch.get_num_threads() == count
    ours.restore()
    assert torch.get_num_threads() == 4
    cores(4, now=1)  # they have ended, except one
    ours.adapt()
    assert torch.get_num_threads() == 3


def test_threads_follow_the_free_cores(cores, monkeypatch):
    ours, seen = threads.Threads(True), []
    for occupied in (0, 1, 2.2, 4, 9, 0):
        cores(occupied)
        ours.adapt()
        seen.append(torch.get_num_threads())
        assert threads.full_threads() == 4
    assert seen == [4, 3, 2, 1, 1, 4]
    cores(4, seconds=0.01)  # too soon for another look
    ours.adapt()
    assert torch.get_num_threads() == 4
    cores(4)
    ours.adapt()
    ours.restore()
    assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # a fixed number stays
    for ours in (threads.Threads(True), threads.Threads(False)):
        cores(4)
        ours.adapt()
        assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("nice", "others"), [(0, 60 + 4 + 2 + 1 + 3 - 25), (5, 60 + 4 + 2 + 1 + 3)])
def test_own_and_niced_time_is_not_another_programs(tmp_path, monkeypatch, nice, others):
    stat = tmp_path / "stat"
    fields = {"user": 60, "nice": 500, "system": 4, "idle": 900, "iowait": 50, "irq": 2, "softirq": 1, "steal": 3}
    values = " ".join(str(seconds * threads.TICK) for seconds in fields.values())
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {values} 0 0\ncpu1 {values} 0 0\nintr 5\n", encoding="ascii")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "STAT", str(stat))
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {1})
    monkeypatch.setattr(threads.os, "nice", lambda _: nice)
    monkeypatch.setattr(threads.time, "process_time", lambda: 25.0)
    assert threads.Threads(True)._others() == others


def test_own_threads_are_not_another_programs(tmp_path, monkeypatch):
    stat, tasks = tmp_path / "stat", tmp_path / "task"
    stat.write_text("cpu 1\nprocs_running 5\n")
    for task, state in enumerate("RSRD"):
        (tasks / str(task)).mkdir(parents=True)
        (tasks / str(task) / "stat").write_text(f"{task} (a (b) c) {state} 1 2\n")
    (tasks / "ended").mkdir()
    monkeypatch.setattr(threads, "STAT", str(stat))
    monkeypatch.setattr(threads, "TASKS", str(tasks))
    assert threads.Threads._running() == 3


def test_results_do_not_depend_on_the_number_of_threads():
    target = load_target(DEMO_TARGET)
    drafter, before, out = load_drafter("demo/mtp", target), torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        prompts = ["Tell me about exercise.", "Hi, who are you? " * 40]
        rows = generate(target, prompts, drafter, max_new_tokens=12, logprobs=True).rows
        out.append([(row.tokens, row.logprobs) for row in rows])
    torch.set_num_threads(before)
    assert out[0] == out[1] == out[2]
