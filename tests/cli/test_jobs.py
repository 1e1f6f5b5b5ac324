"""A command as several jobs: the words after -- arrive as they are, and two jobs make one sweep."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from helpers import main_of, refused, run_here

sweep = main_of("sweep")

ROOT = Path(__file__).parents[2]


def test_words_reach_the_command_as_they_are(tmp_path):
    words = ["show", "it's", "a b", "x='y'", "${z}", "back\\slash\\", "{part} of {parts}", "[1,2]"]
    started = []

    def note(command, check):
        started.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    with mock.patch.object(subprocess, "run", note):
        done = run_here(main_of("lab jobs"), "parts=2", f"out={tmp_path}", "--", *words)
    assert done.returncode == 0, done.stderr
    assert "loading" not in done.stderr
    assert started == [[*words[:6], f"{part} of 2", *words[7:]] for part in (0, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parts=2"], "write the command after --"),
        (["--", "show"], "say how many jobs there are: parts=4"),
        (["parts=0", "--", "show"], "say how many jobs there are: parts=4"),
        (["--parts=1", "--", "nonsense"], "job 0 of 1 ended with exit code 2: specdec nonsense"),
        (["parts=2", "part=5", "--", "show"], "part must be a number from 0 to 1 where parts=2, got 5"),
        (["parts=1", "--", "nonsense"], "job 0 of 1 ended with exit code 2: specdec nonsense"),
    ],
)
def test_mistakes_are_reported(words, message, tmp_path):
    assert message in refused(main_of("lab jobs"), *words[:1], f"out={tmp_path}", *words[1:])


@pytest.mark.skipif(find_spec("joblib") is None, reason="needs hydra-joblib-launcher: pip install 'specdec[jobs]'")
def test_a_sweep_of_two_jobs_is_the_sequential_one(target_path, drafter_path, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"What is {i} + 2?"}) + "\n" for i in range(3)))
    settings = [
        f"benchmark.path={questions}", f"target.path={target_path}", f"draft=[{drafter_path},ngram]", "topk=[1,2]",
        "steps=2", "num_draft_tokens=4", "max_new_tokens=6", "resamples=20", "probe=0", "best_tree=null",
        "report=false", "traces=false",
    ]  # fmt: skip
    assert run_here(sweep, *settings, f"out={tmp_path / 'one'}").returncode == 0
    launch = [sys.executable, "-m", "specdec", "lab", "jobs", "parts=2"]
    launch += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = ["--", "sweep", *settings, "shards={parts}", "shard={part}", f"out={tmp_path / 'two'}"]
    done = subprocess.run(
        [*launch, f"out={tmp_path / 'jobs'}", *command],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = ((tmp_path / name / "results.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two
    assert len(one.splitlines()) == 5
