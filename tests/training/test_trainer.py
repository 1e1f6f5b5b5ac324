"""The training loop in one process: the golden step, accumulation, averages, what is measured, what goes wrong."""

import math
import os
import re
import signal
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import BLOCKS, DRAFTERS, tiny_drafter, tiny_target
from safetensors.torch import load_file
from short_runs import assert_goes_on, gradient, samples, trainer, write_rows
from test_golden import GOLDEN, golden_drafter

from specdec.acceptance import read_acceptance
from specdec.cli.files import partial_path
from specdec.drafters.formats import eagle3, load_drafter
from specdec.engine.engine import Engine
from specdec.engine.traces import tau
from specdec.model.loader import load_target
from specdec.text import encode_prompt, read_prompts
from specdec.training.data import Batch, Batches, Sample
from specdec.training.loop.checkpoint import checkpoints, read_newest, write_checkpoint
from specdec.training.loop.evaluate import expected_tau
from specdec.training.loop.log import check_loggers, read_log
from specdec.training.loop.trainer import Trainer, TrainerConfig
from specdec.training.objectives.block import BlockObjective
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.parallel import ParallelObjective
from specdec.trees import Chain


def fixed(*batches: Batch) -> SimpleNamespace:
    """Data of these batches."""
    return SimpleNamespace(iterate=lambda skip: iter(batches[skip:]))


class GoldenTarget(torch.nn.Module):
    """What the golden file says the target said."""

    device = torch.device("cpu")

    def __init__(self, golden: dict):
        super().__init__()
        self.golden, self.config = golden, SimpleNamespace(layers=8)

    def forward(self, tokens, cache, **_):
        assert torch.equal(tokens, self.golden["input_ids"])
        return self.golden["target_logits"], self.golden["features"]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_golden_step_comes_out_of_the_trainer(tmp_path, recompute):
    drafter, _ = golden_drafter("eagle3")
    golden = load_file(GOLDEN / "eagle3" / "ttt_reference.safetensors")
    objective = Eagle3Objective(steps=7, decay=0.8, mean="all")
    config = TrainerConfig(steps=1, recompute=recompute)
    data = fixed(Batch(golden["input_ids"], golden["loss_mask"]))
    run = Trainer(GoldenTarget(golden), drafter, objective, data, None, config, tmp_path)
    run.optimizers.step = lambda scale, clip: 1.0  # leaves the gradients where they are
    metrics, _, row = run._step(next(run._groups()))
    torch.testing.assert_close(metrics["losses"].float(), golden["ploss"], rtol=0, atol=1e-5)
    assert row["loss"] == pytest.approx(golden["total_loss"].item(), abs=1e-5)
    for name, rows in eagle3.FAMILY.parameters(drafter).items():
        expected = golden[f"grad.{name}"]
        difference = (gradient(rows) - expected).norm() / expected.norm()
        assert difference < 1e-4, f"{name}: relative difference {difference:.1e}"


OBJECTIVES = {
    **dict.fromkeys(("eagle3", "mtp-three-heads", "medusa"), partial(Eagle3Objective, steps=3)),
    **dict.fromkeys(BLOCKS, BlockObjective), **dict.fromkeys(("peagle", "pard2"), ParallelObjective),
    "eagle": EagleObjective,
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_drafter_learns_in_fp32_whatever_the_targets_dtype_is(tmp_path, kind):
    """As docs/faq.md advises for little memory. bf16 has 8 bits, and the random target's states are far apart."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        run = trainer(
            tmp_path / str(dtype), objective=OBJECTIVES[kind](), steps=2,
            drafter=lambda target, dtype=dtype: DRAFTERS[kind](target.to(dtype)),
        )  # fmt: skip
        found.append(run.train())
        assert {p.dtype for p in run.parameters.values()} == {torch.float32}
    for name in ("heldout_loss", "heldout_expected_tau_sampled"):
        assert found[1][name] == pytest.approx(found[0][name], rel=0.1)


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("eagle3", Eagle3Objective(steps=3, mean="all")),
        ("dspark", BlockObjective()),
        ("dflash2", BlockObjective(weights="uniform")),
        ("dflash", BlockObjective(where="whole", counts="previous", weights="d_pace", denominator="texts")),
        ("peagle", ParallelObjective(kept=1.0, kept_min=1.0, pool="all")),
    ],
)
def test_metrics_are_means_over_positions_however_they_are_batched(tmp_path, kind, objective):
    """Short texts fill batches of their own, without positions for the last slots, and with little padding. No block
    reaches into the padding, and a packed row counts as so many texts."""
    run, found = trainer(tmp_path, drafter=DRAFTERS[kind], objective=objective, eval_batches=99), []
    texts = [*samples(12), *(Sample(s.ids[:4], s.mask[:4]) for s in samples(9))]
    for tokens, pack in ((20, None), (4000, None), (90, 30)):
        run.heldout = Batches(texts, tokens, 0, pack, lookahead=4)
        run._evaluate()
        found.append(read_log(run.log.path)[-1])
    names = [name for name, value in found[0].items() if isinstance(value, list)] + ["loss"] * (kind == "dflash")
    for name in ["accuracy"] if objective.mean == "all" else names:
        assert [row[name] for row in found[:2]] == [pytest.approx(found[2][name], rel=1e-5, abs=2e-5)] * 2, name


def test_two_batches_of_a_step_are_one_of_twice_the_size(tmp_path):
    """With very different numbers of counted positions, and one step of the objective (see Trainer)."""
    tokens = torch.randint(17, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 12)
    mask[0, 3:] = mask[1, 10:] = mask[2, 9:] = 1
    gradients, rows = [], []
    for parts in (1, 2):
        data = fixed(*map(Batch, tokens.chunk(parts), mask.chunk(parts)))
        run = trainer(tmp_path, objective=Eagle3Objective(steps=1), data=data, accumulate=parts)
        run.optimizers.step = lambda scale, clip: 1.0
        rows.append(run._step(next(run._groups()))[2])
        gradients.append([p.grad for p in run.parameters.values()])
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-6)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_averages_are_evaluated_and_exported(tmp_path):
    run, plain = trainer(tmp_path / "ema", ema=0.5), trainer(tmp_path / "plain")
    expected = {name: p.detach().clone() for name, p in plain.parameters.items()}
    step = plain.optimizers.step

    def watched(*how):
        norm = step(*how)
        for name, parameter in plain.parameters.items():
            expected[name].lerp_(parameter.detach(), 0.5)
        return norm

    plain.optimizers.step = watched
    assert plain.train()["heldout_loss"] != run.train()["heldout_loss"]
    exported = load_drafter(tmp_path / "ema" / "draft", run.target)
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(expected[name], p) for name, p in plain.parameters.items())
    again = trainer(tmp_path / "ema", ema=0.5)
    again.resume()
    assert all(torch.equal(again.averages[name], average) for name, average in run.averages.items())
    with pytest.raises(ValueError, match=r"saved with trainer\.ema"):
        trainer(tmp_path / "ema").resume()


def test_averages_know_where_packed_conversations_end(tmp_path):
    """An average that forgets at once is the drafter itself."""
    plain, average = trainer(tmp_path / "plain", pack=40), trainer(tmp_path / "ema", pack=40, ema=1e-12)
    assert len(plain.heldout.epoch(0)[0]) > 2, "a row holds one conversation only"
    assert average.train()["heldout_losses"] == pytest.approx(plain.train()["heldout_losses"], abs=2e-5)


class Disturbed(Eagle3Objective):
    """Does something else at its n-th call while training."""

    def __init__(self, call: int, what, **how):
        super().__init__(steps=2, **how)
        self.left, self.what = call, what

    def __call__(self, drafter, **features):
        loss, metrics = super().__call__(drafter, **features)
        self.left -= torch.is_grad_enabled()
        return (self.what(loss) if self.left == 0 else loss), metrics


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda loss: loss * math.nan, "the loss is nan at step 3"),
        (lambda loss: loss / 0, "the loss is inf at step 3"),
        (lambda loss: loss + (loss * 0).sqrt(), r"the gradient's norm is (nan|inf) at step 3"),
    ],
)
def test_a_loss_that_is_no_number_stops_and_leaves_the_batch(tmp_path, what, message):
    run = trainer(tmp_path, objective=Disturbed(4, what))
    with pytest.raises(ValueError, match=rf"{message}: .*bad_batch_3\.pt"):
        run.train()
    (row,) = torch.load(tmp_path / "bad_batch_3.pt", weights_only=True)
    batches = Batches(samples(), 40, 0).iterate(skip=3)
    assert torch.equal(row["tokens"], next(batches).tokens)
    assert all(p.isfinite().all() for p in run.parameters.values())
    assert read_newest(tmp_path)[1]["step"] == 2


@pytest.mark.parametrize(
    ("number", "at", "how"),
    [(signal.SIGTERM, 3, {"muon_lr": 0.02}), (signal.SIGINT, 4, {}), (signal.SIGTERM, 6, {})],
)
def test_a_signal_finishes_the_step_and_saves(tmp_path, capsys, number, at, how):
    """A due evaluation is done when the run continues: held-out batches after steps 4 and 6, none after step 3."""

    def interrupt(loss):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # launchers send more than one
        return loss

    def begin(out):
        return trainer(out, objective=Eagle3Objective(steps=2, **parts), **how)

    before, parts = signal.getsignal(number), {"then": {"tokens": 1.0}, "switch": 0.4}
    trainer(tmp_path / "cut", objective=Disturbed(at, interrupt, **parts), **how).train()
    assert signal.getsignal(number) is before
    assert f"stopped after step {at}; resume=true goes on" in capsys.readouterr().err
    assert_goes_on(begin, tmp_path / "cut", at)


def one_bit_changed(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damaged", [lambda content: content[: len(content) // 2], lambda _: b"", one_bit_changed])
def test_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path, capsys, damaged):
    """One that a kill left half written does not count."""
    short, cut = partial(trainer, steps=5, ema=0.5), tmp_path / "cut"
    short(cut).train()
    newest = checkpoints(cut)[-1]
    partial_path(newest.with_name("step-00000009.pt")).write_bytes(newest.read_bytes()[:999])
    newest.write_bytes(damaged(newest.read_bytes()))
    capsys.readouterr()
    assert_goes_on(short, cut, 4)
    warning = capsys.readouterr().err
    assert f"warning: {newest} is damaged or not ours" in warning
    assert "; the one before it is used\n" in warning
    for path in checkpoints(cut):
        path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        short(cut).resume()


def test_the_last_few_checkpoints_are_kept(tmp_path):
    trainer(tmp_path, steps=7, keep=3).train()
    assert [read_newest(tmp_path)[1]["step"], len(checkpoints(tmp_path))] == [7, 3]
    checkpoints(tmp_path)[-1].write_bytes(b"")
    written = write_checkpoint(tmp_path, 6, {"step": 6}, keep=1)  # as a run that goes on from step 5 writes it
    assert read_newest(tmp_path) == (written, {"step": 6})
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize("kind", ["eagle3", *BLOCKS])
@torch.no_grad()
def test_expected_tau_is_what_a_loop_says(kind):
    target, steps = tiny_target(), 3
    drafter = tiny_drafter(target, draft_vocab=8) if kind == "eagle3" else DRAFTERS[kind](target)
    tokens = torch.randint(17, (2, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.rand(2, 10, generator=torch.Generator().manual_seed(2)) < 0.8).float()
    logits, feats = target(tokens, None, taps=drafter.taps)
    drafts = [s.logits for s in drafter.unroll(feats, torch.nn.functional.pad(tokens[:, 1:], (0, 1)), steps)]
    for j in (0, 1):  # answers that often agree, so that chains grow
        agreeing = drafter.vocab.to_target(drafts[j].argmax(-1))[:, : 9 - j : 2]
        logits[:, j + 1 :: 2].scatter_(-1, agreeing[..., None], 9.0)
    starts = (mask[:, 1:] > 0).nonzero()
    greedy = sampled = float(len(starts))
    for b, t in starts:
        agree = accept = 1.0
        for j in range(steps):
            if t + 1 + j >= 10 or not mask[b, t + 1 + j]:
                break
            p, q = logits[b, t + 1 + j].softmax(-1), drafts[j][b, t].softmax(-1)
            agree *= float(drafter.vocab.ids[q.argmax()] == p.argmax())
            accept *= torch.minimum(p[drafter.vocab.ids], q).sum().item()
            greedy, sampled = greedy + agree, sampled + accept
    got = expected_tau(drafter, feats, tokens, logits, mask, steps)
    assert got.tolist() == pytest.approx([greedy, sampled, len(starts)], rel=1e-5)
    assert greedy > len(starts) + 2


def test_decoding_is_measured_and_the_best_is_kept(target_path, drafter_path, tmp_path, pictures):
    target = load_target(target_path)
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"turns": [f"What is {n} + 1?"]} for n in range(5)))
    settings = {"prompts": str(prompts), "decode_every": 2, "decode_prompts": 3, "decode_tokens": 12, "decode_steps": 3}
    config = TrainerConfig(steps=4, warmup=0, lr=1e-2, eval_batches=1, **settings)
    data = Batches(samples(vocab=target.config.vocab), 100, 0)
    drafter = load_drafter(drafter_path, target).requires_grad_(True)
    run = Trainer(target, drafter, Eagle3Objective(steps=2), data, data, config, tmp_path)
    result = run.train()
    taus = {row["step"]: row["tau"] for row in read_log(tmp_path / "log.jsonl") if row["split"] == "decode"}
    assert list(taus) == [2, 4]
    assert result["tau"] == taus[4]
    assert read_newest(tmp_path)[1]["best"] == max(taus.values())
    asked = [encode_prompt(target, p) for p in read_prompts(prompts)[:3]]
    for folder, expected in (("draft", taus[4]), ("best", max(taus.values()))):
        decoded = Engine(target, load_drafter(tmp_path / folder, target), Chain(3)).generate(asked, max_new_tokens=12)
        assert tau([row.trace for row in decoded.rows]) == expected
        along_levels = read_acceptance(tmp_path / folder).measured
        assert [along.temperature for along in along_levels] == [0.0, 1.0]
        assert along_levels[0].tau([(0,), (0, 0), (0, 0, 0)]) == expected
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_loggers_get_copies_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock())
    run = trainer(tmp_path, steps=2, logger="wandb")
    assert not wandb.init.called, "a run that fails before its first step leaves nothing"
    run.train()
    assert wandb.init.call_args.kwargs["dir"] == str(tmp_path)
    logged = [(call.kwargs["step"], call.args[0]) for call in wandb.init.return_value.log.call_args_list]
    assert [step for step, row in logged if "train/loss" in row] == [1, 2]
    assert all(row["train/tokens_per_second"] > 0 for _, row in logged if "train/loss" in row)
    assert any("heldout/expected_tau" in row for _, row in logged)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install 'specdec\[wandb\]'"):
        check_loggers(TrainerConfig(logger=["wandb"]).loggers)
    with pytest.raises(ValueError, match="there is no logger 'mlflow': logger may be tensorboard, wandb, or both"):
        check_loggers(TrainerConfig(logger="wandb,mlflow").loggers[1:])


def test_tensorboard_shows_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, steps=4, logger="tensorboard").train()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(row["step"], row["loss"]) for row in read_log(tmp_path / "log.jsonl") if row["split"] == "train"]
    assert [(e.step, pytest.approx(e.value)) for e in found.Scalars("train/loss")] == losses
    assert {"train/accuracy_0", "heldout/expected_tau", "train/tokens_per_second"} <= set(found.Tags()["scalars"])


def test_progress_from_the_first_step_and_the_switch(tmp_path, capsys):
    """The bar and the log; a run that goes on after the switch logs it once."""
    objective = Eagle3Objective(steps=2, then={"ce": 1.0}, switch=0.5)
    run = trainer(tmp_path, steps=6, log_every=4, objective=objective)
    run.train()

    def steps(split):
        return [row["step"] for row in read_log(tmp_path / "log.jsonl") if row["split"] == split]

    assert (steps("train"), steps("switch")) == ([1, 4, 6], [3])
    err = capsys.readouterr().err
    assert "step 3: the objective switches from objective.terms to objective.then" in err
    assert re.search(r"loss=[\d.]+, acc=[\d. ]+, [\d,]+ tokens/s", err)
    run.log.forget_after(3)
    assert steps("switch") == []


def test_mistakes_are_named(tmp_path):
    for settings, message in (
        ({"ema": 1.5}, "ema must be null or a decay"),
        ({"kind": "medusa", "recompute": True}, "recompute is for drafters with a layer"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, **settings)
