"""Threads next to busy programs: a short spin before torch loads, fewer threads on busy cores, the same results."""

import os
import subprocess
import sys

import pytest
import torch

from specdec import threads
from specdec.api import DEMO_TARGET, generate, load_drafter, load_target


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "8000 1"),
        ({"GOMP_SPINCOUNT": "7"}, "7 1"),
        ({"KMP_BLOCKTIME": "200"}, "8000 200"),
        ({"OMP_WAIT_POLICY": "active"}, "None None"),
    ],
)
def test_spin_is_set_before_torch_and_yields_to_the_user(own, expected):
    names = {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"}
    code = (
        "import sys, os, specdec; assert 'torch' not in sys.modules; "
        "print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('KMP_BLOCKTIME'))"
    )
    env = {name: value for name, value in os.environ.items() if name not in names} | own
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split() == expected.split()


@pytest.fixture
def cores(monkeypatch):
    """Four idle cores. Returns a function that occupies some of them for the next look."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(4))
    clock, busy = [0.0], [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads.Threads, "_others", lambda self: busy[0])
    before = torch.get_num_threads()
    torch.set_num_threads(4)

    def occupy(count: float, seconds: float = 1.0) -> None:
        clock[0], busy[0] = clock[0] + seconds, busy[0] + count * seconds

    yield occupy
    torch.set_num_threads(before)
    threads.Threads.usual = None


def test_threads_follow_the_free_cores(cores):
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


def test_a_fixed_number_stays(cores, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
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
    assert threads.Threads(True).busy == others


def test_results_do_not_depend_on_the_number_of_threads():
    target = load_target(DEMO_TARGET)
    drafter = load_drafter("demo/mtp", target)
    before, out = torch.get_num_threads(), []
    prompts = ["Tell me about exercise.", "Hi, who are you? " * 40]
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        rows = generate(target, prompts, drafter, max_new_tokens=24, logprobs=True).rows
        out.append([(row.tokens, row.logprobs) for row in rows])
    torch.set_num_threads(before)
    assert out[0] == out[1] == out[2]
