"""Two processes (gloo, CPU) train and decode as one does. All that two processes do is done in one launch."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import main_of, run_here, save_hf
from safetensors.torch import load_file
from short_runs import CONF, SMALL, composed, logged
from transformers import AutoConfig

from specdec.model.hf_devices import misfit, shares, sketch
from specdec.model.loader import load_target
from specdec.ranks import share_output
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import join_processes
from specdec.training.train import run

generate = main_of("generate")

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
WORKER = """
import json, os, signal, sys
from hydra import compose, initialize_config_dir
from specdec import ranks
from specdec.__main__ import main
from specdec.cli.errors import StopSignals, one_sentence_errors
from specdec.training.loop import trainer
from specdec.training.train import run
conf, requests, runs, stopped = sys.argv[1], *map(json.loads, sys.argv[2:])
for words in requests:
    main(["generate", *words, "--tp-plan", "auto"])
with initialize_config_dir(conf, version_base="1.3"):
    for settings in runs:
        run(compose("train", settings))
        trainer.draw_curves = lambda log, picture: None  # it takes longer than these runs
    enter = StopSignals.__enter__
    def enter_and_ask_one(self):
        entered = enter(self)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return entered
    StopSignals.__enter__ = enter_and_ask_one
    run(compose("train", stopped))
@one_sentence_errors
def one_fails():
    if ranks.rank() == 1:
        raise ValueError("this process alone has found a mistake")
    ranks.largest([0])
one_fails()
"""
# Averages and recomputing are on, and some batches count many more positions than others. No Muon: torch's rounds to
# bf16, which makes 1e-4 of 1e-8.
AVERAGED = (
    *("trainer.batch_tokens=100", "trainer.steps=6", "trainer.save_every=3", "trainer.ema=0.5"),
    "trainer.recompute=true",
)
ON_POLICY = (
    *("trainer.batch_tokens=100", "data.on_policy.share=0.5", "data.on_policy.every=2", "data.on_policy.prompts=6"),
    *("data.on_policy.batch_size=2", "data.on_policy.max_new_tokens=12", "data.on_policy.temperature=1.0"),
    "data.on_policy.steps=2",
)
# Real decoding is on, in which all processes must take part.
DECODED = (
    *("trainer.batch_tokens=100", "trainer.steps=3", "trainer.save_every=3", "trainer.prompts=heldout"),
    *("trainer.decode_every=3", "trainer.decode_prompts=2", "trainer.decode_tokens=8"),
)


def requests(target: Path, drafter: Path) -> list[list[str]]:
    """Greedy trees, seeded chains of a batch, and plain decoding."""
    models = ["--target", str(target), "--draft", str(drafter)]
    how = ["--prompt", "The quick", "--max-new-tokens", "24", "--json"]
    return [
        [*models, *how, "--topk", "4", "--steps", "5"],
        [*models, *how, "--temperature", "0.9", "--seed", "3", "--topk", "1", "--steps", "3"],
        [*models[:2], "--no-draft", *how, "--temperature", "0.7", "--top-p", "0.9"],
    ]


@pytest.fixture(scope="module")
def two(where, target_path, drafter_path, tmp_path_factory):
    """What two processes leave: a folder of runs, and their output."""
    folder = tmp_path_factory.mktemp("two")
    small = [*SMALL, *where]
    runs = [[*small, *DECODED, "tp_plan=auto", f"out={folder / 'shared'}"]]
    for way in ("ddp", "fsdp"):
        fsdp = f"trainer.fsdp={way == 'fsdp'}"
        runs.append([*small, *AVERAGED, fsdp, "trainer.accumulate=2", f"out={folder / way}"])
        runs.append([*small, *ON_POLICY, fsdp, f"out={folder / f'rollouts-{way}'}"])
    (folder / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = requests(target_path, drafter_path), runs, [*small, *AVERAGED, f"out={folder / 'stopped'}"]
    command = [*launch, str(folder / "worker.py"), str(CONF), *map(json.dumps, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV, cwd=ROOT)
    assert done.returncode != 0
    return folder, done


def assert_same_run(one: Path, other: Path) -> None:
    rows, others = read_log(one / "log.jsonl"), read_log(other / "log.jsonl")
    assert len(rows) == len(others) == 8
    for a, b in zip(rows, others, strict=True):
        assert (a["split"], a["step"], a["tokens"]) == (b["split"], b["step"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["losses"] == pytest.approx(b["losses"], abs=2e-5)  # rounded to 1e-5 in the log
    assert_near_weights(one, other)


def assert_near_weights(one: Path, other: Path) -> None:
    weights = [load_file(out / "draft" / "model.safetensors") for out in (one, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


def test_two_processes_are_one_of_the_same_global_batch(two, where, tmp_path):
    """DDP and FSDP, each process two batches a step, and one process of four; and what two saved, one resumes.
    A signal to one of them stops both."""
    folder, _ = two
    assert [p.name for p in checkpoints(folder / "stopped")] == ["step-00000001.pt"]
    settings = [*where, *AVERAGED, "trainer.accumulate=4"]
    run(composed("train", *settings, f"out={tmp_path / 'one'}"))
    for way in ("ddp", "fsdp"):
        assert_same_run(folder / way, tmp_path / "one")
    (folder / "fsdp" / "checkpoints" / "step-00000006.pt").unlink()
    run(composed("train", *settings, f"out={folder / 'fsdp'}", "resume=true"))
    assert_same_run(folder / "fsdp", tmp_path / "one")


def test_two_processes_roll_out_what_one_does(two, where, tmp_path):
    """Each decodes its part; the rounds, the batches and the weights are those of one process."""
    run(composed("train", *where, *ON_POLICY, "trainer.accumulate=2", f"out={tmp_path / 'one'}"))
    ones = [row for row in logged(tmp_path / "one") if row["split"] == "rollout"]
    assert [row["step"] for row in ones] == [0, 2]
    for way in ("ddp", "fsdp"):
        out = two[0] / f"rollouts-{way}"
        assert [row for row in logged(out) if row["split"] == "rollout"] == ones
        assert_near_weights(out, tmp_path / "one")


@pytest.mark.usefixtures("pictures")
def test_two_processes_share_a_target_and_decode_and_train_as_one(two, where, target_path, drafter_path, tmp_path):
    """Tokens are the same, losses are to 1e-5, number 0 alone prints and writes, and one mistake ends both."""
    folder, done = two
    errors = re.findall(r"\berror: .*", done.stderr)  # the other process draws its progress in the same line
    assert errors == ["error: this process alone has found a mistake"], done.stderr
    asked = requests(target_path, drafter_path)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(printed) == len(asked) + 6  # and the reports of the runs
    for words, there in zip(asked, printed, strict=False):
        here = json.loads(run_here(lambda words=words: generate(words)).stdout.splitlines()[-1])
        for name in ("token_ids", "rounds", "acceptance_by_depth"):
            assert there[name] == here[name]
    run(composed("train", *where, *DECODED, f"out={tmp_path / 'one'}"))
    rows, others = (read_log(out / "log.jsonl") for out in (tmp_path / "one", folder / "shared"))
    assert [row["split"] for row in rows] == [row["split"] for row in others]
    for row, other in zip(rows, others, strict=True):
        name = "tau" if row["split"] == "decode" else "loss"
        assert row[name] == pytest.approx(other[name], abs=1e-5)
    assert {p.name for p in (folder / "shared").iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}


@pytest.mark.parametrize("what", ["FSDP", "DEEPSPEED"])
def test_what_the_launcher_sets_in_our_place_is_refused(monkeypatch, what):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(f"ACCELERATE_USE_{what}", "true")
    with pytest.raises(ValueError, match=f"the launcher asks for {what}: .*trainer.fsdp=true shards the drafter"):
        join_processes("cpu")


def test_processes_and_plans_that_do_not_fit_are_refused(target_path, monkeypatch):
    with pytest.raises(ValueError, match=r"shares a target among processes, and there is one: .*torchrun"):
        load_target(target_path, tp_plan="auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started: give --tp-plan auto"):
        share_output(Namespace(tp_plan=None))


def test_bytes_of_each_process(tmp_path):
    """Layers are divided, and embedding, head and norms are in every process."""
    model = save_hf(tmp_path, "llama")
    config = AutoConfig.from_pretrained(tmp_path)
    cut, whole = shares(sketch(config), 4)
    layers = {name: p for name, p in model.named_parameters() if "proj" in name}
    assert cut == 4 * sum(p.numel() for p in layers.values())
    assert cut + whole == 4 * sum(p.numel() for p in model.parameters())
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    assert misfit(config, plan, 2) is None
    assert misfit(config, plan, 4) == "6 heads with 2 of keys cannot be shared by 4 processes: take a divisor of both"
