"""Two processes (gloo, CPU) share one target by tensor parallelism, and do what one process does."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from helpers import run_here, save_hf
from hydra import compose, initialize_config_dir
from test_training import CONF, CONVERSATIONS
from transformers import AutoConfig

from specdec.cli.generate import main as generate
from specdec.model.hf_parallel import misfit, shares, sketch
from specdec.model.loader import load_target
from specdec.ranks import share_output
from specdec.training.loop.log import read_log
from specdec.training.train import run

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
WORKER = """
import json, sys
from hydra import compose, initialize_config_dir
from specdec import ranks
from specdec.cli.errors import one_sentence_errors
from specdec.cli.generate import main
from specdec.training.train import run
conf, requests, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
for words in requests:
    main([*words, "--tp-plan", "auto"])
with initialize_config_dir(conf, version_base="1.3"):
    run(compose("train", [*settings, "tp_plan=auto"]))
@one_sentence_errors
def one_fails():
    if ranks.rank() == 1:
        raise ValueError("this process alone has found a mistake")
    ranks.largest([0])
one_fails()
"""


def requests(target: Path, drafter: Path) -> list[list[str]]:
    """Greedy trees, seeded chains of a batch, and plain decoding."""
    models = ["--target", str(target), "--draft", str(drafter)]
    how = ["--prompt", "The quick", "--max-new-tokens", "24", "--json"]
    return [
        [*models, *how],
        [*models, *how, "--temperature", "0.9", "--seed", "3", "--topk", "1", "--steps", "3"],
        [*models[:2], "--no-draft", *how, "--temperature", "0.7", "--top-p", "0.9"],
    ]


def settings(target: Path, data: Path) -> list[str]:
    """Real decoding is on, in which all processes must take part."""
    return [
        f"target.path={target}", f"data.path={data}", "drafter.draft_vocab_size=200", "objective.steps=3",
        "data.heldout=8", "trainer=small", "objective=eagle3", "drafter=eagle3", "trainer.batch_tokens=100",
        "trainer.steps=3", "trainer.save_every=3", "trainer.log_every=1", "trainer.eval_batches=2",
        "trainer.prompts=heldout", "trainer.decode_every=3", "trainer.decode_prompts=2", "trainer.decode_tokens=8",
    ]  # fmt: skip


def test_two_processes_decode_and_train_as_one(target_path, drafter_path, tmp_path):
    """Tokens are the same, losses are to 1e-5, number 0 alone prints and writes, and one mistake ends both."""
    data, asked = tmp_path / "train.jsonl", requests(target_path, drafter_path)
    data.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    how = settings(target_path, data)
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [str(CONF), json.dumps(asked), json.dumps([*how, f"out={tmp_path / 'two'}"])]
    done = subprocess.run(
        [*launch, str(tmp_path / "worker.py"), *given], capture_output=True, text=True, check=False, env=ENV
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: this process alone has found a mistake"], done.stderr
    assert done.returncode != 0

    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(asked) + 1  # and the report of the training
    for words, there in zip(asked, told, strict=False):
        here = json.loads(run_here(lambda words=words: generate(words)).stdout.splitlines()[-1])
        for name in ("token_ids", "rounds", "acceptance_by_depth"):
            assert there[name] == here[name]

    with initialize_config_dir(str(CONF), version_base="1.3"):
        run(compose("train", [*how, f"out={tmp_path / 'one'}"]))
    rows, others = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [row["split"] for row in rows] == [row["split"] for row in others]
    for row, other in zip(rows, others, strict=True):
        name = "tau" if row["split"] == "decode" else "loss"
        assert row[name] == pytest.approx(other[name], abs=1e-5)
    assert {p.name for p in (tmp_path / "two").iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}


def test_a_process_alone_shares_nothing(target_path):
    with pytest.raises(ValueError, match=r"shares a target among processes, and there is one: .*torchrun"):
        load_target(target_path, tp_plan="auto")


def test_several_processes_without_a_plan_are_refused(monkeypatch):
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
