"""The training loop of a drafter: steps, and what comes between them (log, evaluation, checkpoints)."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.cli.errors import StopSignals
from specdec.cli.files import write_whole
from specdec.contracts import Drafter
from specdec.drafters.formats import save_drafter
from specdec.model.language_model import LanguageModel
from specdec.training.data import Batch, Batches
from specdec.training.data.rollouts import Rollouts
from specdec.training.features.online import Features, online_features
from specdec.training.loop.checkpoint import meaning, read_newest, restore, save_state, state_of, write_checkpoint
from specdec.training.loop.evaluate import Decoding, decoding_of, expected_tau
from specdec.training.loop.log import Progress, RunLog, draw_curves
from specdec.training.loop.optim import Optimizers, schedule
from specdec.training.loop.parallel import Learner, Processes, Sums, fill, shell
from specdec.training.loop.settings import OnPolicy, TrainerConfig


class Trainer:
    """Train `drafter` for `target`, and write the run into the folder `out`.

    The folder has checkpoints/ to resume from, draft/ and best/ in the published layout, log.jsonl and curves.png. A
    step takes `accumulate` batches in each of `processes`. Its gradient is that of the mean loss over all positions
    that count in these batches. Random draws for a batch depend only on the seed and its number, so resuming and the
    number of processes do not change them.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        objective,
        train: Batches,
        heldout: Batches | None,
        config: TrainerConfig,
        out: Path,
        run_config: dict | None = None,
        processes: Processes | None = None,
        on_policy: OnPolicy | None = None,
        features: Callable[..., Features] = online_features,
        data_signature: str | None = None,
    ):
        """Set up the run.

        run_config: for the loggers. features: returns what `online_features` does. data_signature: a checkpoint of
        other data is refused, unless it is None.
        """
        self.data, self.features = train, features
        self.target, self.drafter, self.objective = target, drafter, objective
        self.heldout, self.config, self.out = heldout, config, out
        self.processes = processes or Processes()
        if config.recompute:
            if drafter.recompute is None:
                raise ValueError(f"trainer.recompute is for drafters with a layer, not for {type(drafter).__name__}")
            drafter.recompute = True
        self.meaning = meaning(drafter)
        alone = self.processes.world == 1 or not config.fsdp
        self.published = drafter if alone and config.ema is None else shell(drafter)  # evaluated and exported
        self.together = config.accumulate * self.processes.world  # batches of a step
        self.data_signature = data_signature
        self.rollouts: Rollouts | None = None
        if on_policy is not None and on_policy.share > 0:
            how = config.seed, self.processes, self.together
            self.rollouts = Rollouts(target, shell(drafter), train, on_policy, *how)
        self.learner = self.processes.wrap(Learner(drafter, objective), config.fsdp)
        self.parameters = dict(drafter.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()} if config.ema else None
        self.optimizers = Optimizers(
            self.parameters.items(),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            muon_lr=config.muon_lr,
        )
        self.decoding = decoding_of(target, config, heldout, train)
        self.step = self.tokens = self.learnt = self.batches = 0  # tokens: with padding and prompts; learnt: without
        self.seconds, self.rollout_seconds, self.best = 0.0, 0.0, 0.0
        self.owed = False  # a signal stopped the run, and what was due after its last step waits
        self.signals = StopSignals()
        self.main = self.processes.main
        self.log = RunLog(out, self.main, config.loggers, run_config)

    def train(self) -> dict:
        """Run to the last step, or until a signal asks to stop, and save. Returns the last metrics."""
        try:
            with self.signals:
                return self._run()
        except OSError as error:
            raise ValueError(
                f"cannot write to {self.out}: {error.strerror or error}; resume=true goes on from the last checkpoint"
            ) from None

    def _run(self) -> dict:
        config, asked = self.config, False
        self.objective.progress = (self.step - 1) / config.length  # as in the last step, for a due evaluation
        metrics = self._look() if self.owed else {}
        self.owed = False
        groups = self._groups()
        # Closed before an error is printed, which would otherwise appear above it
        with Progress(config.length, self.step, not self.main) as bar:
            mark, first = time.monotonic(), self.step + 1
            while self.step < config.length and not asked:
                if self.rollouts is not None and self.rollouts.due(self.step):
                    self._roll_out(self.rollouts)
                if self._switches():
                    self._log("switch", {})
                    bar.say(f"step {self.step}: the objective switches from objective.terms to objective.then")
                before, tokens, start = self.batches, self.tokens, time.monotonic()
                values, asked, row = self._step(next(groups))
                now = time.monotonic()
                self.seconds, mark = self.seconds + now - mark, now
                bar.add(self.tokens - tokens, now - start)
                if self.rollouts is not None:
                    row["on_policy"] = self.rollouts.part(before, self.batches)
                if self.step == first or self._due(config.log_every):
                    bar.show(row["loss"], values)
                if self.step == 1 or self._due(config.log_every):
                    metrics = self._log("train", values, **row, tokens_per_second=bar.take_speed())
                self.owed = asked  # a due evaluation waits until the run continues
                metrics |= {} if asked else self._look()
                if self._due(config.save_every) and self.step < config.length and not asked:
                    self.save()
        self.save()
        if self.decoding is not None and self.processes.evaluates and not asked:
            self.processes.wait()
            for name in ("draft", "best"):
                if (self.out / name).is_dir():
                    self.decoding.keep_acceptance(self.out / name, write=self.main)
        if self.owed and self.main:
            print(f"stopped after step {self.step}; resume=true goes on from there", file=sys.stderr)
        return metrics

    def _switches(self) -> bool:
        """Whether the next step is the first with the second part of the objective."""
        part_at = getattr(self.objective, "part_at", lambda progress: 0)
        return self.step > 0 and len({part_at(step / self.config.length) for step in (self.step - 1, self.step)}) > 1

    def _look(self) -> dict:
        """Evaluate and decode, if that is due after this step."""
        metrics = self._evaluate() if self._due(self.config.save_every) else {}
        if self.decoding is not None and self._due(self.config.decode_every):
            metrics |= self._decode(self.decoding)
        return metrics

    def _due(self, every: int | None) -> bool:
        """Whether something is to be done after this step: every so many, and after the last one."""
        return self.step == self.config.length or (every is not None and self.step % every == 0)

    def _groups(self) -> Iterator[list[Batch]]:
        """This process's batches of each step: every `world`-th of the step's `accumulate * world` batches."""
        batches = (self.rollouts or self.data).iterate(skip=self.batches)
        own = itertools.islice(batches, self.processes.rank, None, self.processes.world)
        while True:
            yield list(itertools.islice(own, self.config.accumulate))

    def _step(self, group: list[Batch]) -> tuple[dict[str, Tensor], bool, dict[str, float]]:
        """Take one optimiser step; return metrics by step of the unroll, whether to stop, and other values to log."""
        config, world, sums, losses = self.config, self.processes.world, Sums(), []
        self.objective.progress = self.step / config.length
        for i, batch in enumerate(group):
            number = self.batches + i * world + self.processes.rank
            torch.manual_seed(int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0]))
            with self.processes.accumulating(self.learner, last=i == len(group) - 1):
                loss, metrics = self._loss(batch)
                weight = sums.add(batch.loss_mask, loss, metrics, self.signals.asked)
                self.processes.backward(loss * weight * world)  # DDP and FSDP divide by `world`
            losses.append(loss.detach())
        counted, mean, asked, (tokens, learnt), metrics = sums.means(self.processes)
        if not math.isfinite(mean):
            self._give_up(f"the loss is {mean}", group, losses)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(counted or 1)
        warmup = int(config.warmup * (config.length if config.warmup < 1 else 1))
        scale = schedule(self.step, config.length, warmup, config.schedule)
        norm = self.optimizers.step(scale, config.clip)
        if not math.isfinite(norm):
            self._give_up(f"the gradient's norm is {norm}", group, losses)
        for name, average in (self.averages or {}).items():
            average.lerp_(self.parameters[name].detach(), 1 - (config.ema or 0))
        self.step, self.batches = self.step + 1, self.batches + len(group) * world
        self.tokens, self.learnt = self.tokens + tokens, self.learnt + learnt
        return metrics, asked, {"loss": mean, "gradient_norm": norm, "learning_rate": scale * config.lr}

    def _autocast(self):
        return self.config.autocasting(self.target.device)

    def _features(self, drafter: Drafter, batch: Batch) -> Features:
        """The objective's arguments for a batch. Sets the drafter's `documents` and `first_tokens` for it."""
        features = self.features(self.target, batch, drafter.taps, self._autocast())
        tokens = features["tokens"]
        drafter.documents = None if batch.documents is None else batch.documents.to(tokens.device)
        drafter.first_tokens = tokens[:, 0]
        return features

    def _loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        features = self._features(self.drafter, batch)
        with self._autocast():
            return self.learner(**features)

    def _give_up(self, what: str, group: list[Batch], losses: list[Tensor]) -> None:
        """Save this process's batches of the step, and raise."""
        path = self.out / (f"bad_batch_{self.step}" + (f".{self.processes.rank}" * (self.processes.world > 1)) + ".pt")
        rows = [vars(batch) | {"loss": loss.cpu()} for batch, loss in zip(group, losses, strict=True)]
        if self.main or self.processes.world > 1:
            write_whole(path, partial(save_state, rows))
        raise ValueError(f"{what} at step {self.step}: lower trainer.lr, or look at the batch, which is in {path}")

    def _publish(self) -> None:
        """Put the weights that are evaluated and exported into `published`; every process must call it."""
        if self.published is not self.drafter:
            fill(self.published, self.averages or self.parameters, here=self.processes.evaluates)

    def _roll_out(self, rollouts: Rollouts) -> None:
        """Make new on-policy data, and log what its rounds say about the drafter. The time is part of `seconds`."""
        start = time.monotonic()
        measured = rollouts.renew(self.step, self.parameters)
        self.rollout_seconds += time.monotonic() - start
        self._log("rollout", {}, **measured, rollout_seconds=round(self.rollout_seconds, 3))

    @torch.no_grad()
    def _evaluate(self) -> dict:
        """Losses and accuracies by step, and the expected tau: means over the same held-out batches every time."""
        self._publish()
        if self.heldout is None or self.config.eval_batches < 1 or not self.processes.evaluates:
            return {}
        learner, sums, tau = Learner(self.published, self.objective), Sums(), torch.zeros(3, dtype=torch.float64)
        depth = self.drafter.deepest(self.config.decode_steps)
        for indices in self.heldout.epoch(0)[: self.config.eval_batches]:
            batch = self.heldout.collate(indices)
            features = self._features(self.published, batch)
            with self._autocast():
                loss, metrics = learner(**features)
                tau += expected_tau(self.published, **features, steps=depth).cpu()
            sums.add(batch.loss_mask, loss, metrics)
        _, mean_loss, _, _, mean = sums.means(Processes())
        greedy, sampled = (tau[:2] / tau[2].clamp(min=1)).tolist()
        scalars = {"loss": mean_loss, "expected_tau": greedy, "expected_tau_sampled": sampled}
        logged = self._log("heldout", mean, **scalars)
        return {f"heldout_{key}": logged[key] for key in (*scalars, "losses", "accuracy")}

    def _decode(self, decoding: Decoding) -> dict:
        """The tau of greedy decoding with the drafter as it is now. The best drafter so far is saved in `best/`."""
        self._publish()
        if not self.processes.evaluates:
            return {}
        self._export("draft")
        self.processes.wait()
        found = decoding.tau(self.out / "draft")
        if self.config.decode_every is not None and found["tau"] > self.best:
            self._export("best")
        self.best = max(self.best, found["tau"])
        self._log("decode", {}, **found, best=self.best)
        return found

    def _export(self, name: str) -> None:
        if self.main:
            save_drafter(self.published, self.out / name, self.target)

    def _log(self, split: str, values: dict[str, Tensor], **scalars: float) -> dict:
        when = {"step": self.step, "tokens": self.tokens, "learnt": self.learnt, "seconds": round(self.seconds, 3)}
        return self.log.write(split, when, scalars, values)

    def save(self) -> None:
        """A checkpoint, the drafter in its published layout, and the curves; each whole or not at all."""
        state = state_of(self)
        self._publish()
        if self.main:
            write_checkpoint(self.out, self.step, state, self.config.keep)
            self._export("draft")
            draw_curves(self.log.path, self.out / "curves.png")

    def resume(self) -> None:
        """Continue from the newest sound checkpoint in `out`; ValueError if there is none or the drafter differs."""
        path, state = read_newest(self.out, warn=self.main)
        restore(self, state, path)
        if self.main:
            self.log.forget_after(self.step)
