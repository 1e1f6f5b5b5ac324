"""The training loop of a drafter: features, objective, step, log, checkpoint, resume."""

import json
import math
import os
import pickle
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from drafters.common import RecurrentDrafter
from drafters.formats import save_drafter
from specdec.model import Target
from training.data import Batches
from training.features import online_features
from training.optim import Optimizers, schedule

STATE = "trainer.pt"


@dataclass
class TrainerConfig:
    """conf/trainer/*.yaml. `steps` optimiser steps of at most `batch_tokens` tokens; warmup below 1 is a share."""

    steps: int = 1000
    batch_tokens: int = 4096
    lr: float = 1e-3
    muon_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.02
    schedule: str = "cosine"
    clip: float = 0.5
    autocast: str | None = None
    seed: int = 0
    log_every: int = 10
    save_every: int = 200
    eval_batches: int = 8
    wandb: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {getattr(self, name)}")
        if self.autocast not in (None, "bf16"):
            raise ValueError(f"trainer.autocast must be null or bf16, got {self.autocast!r}")
        schedule(0, 1, 0, self.schedule)


class Trainer:
    """Trains `drafter` for `target` into the folder `out`: `draft/` (published layout), trainer.pt, log.jsonl."""

    def __init__(
        self,
        target: Target,
        drafter: RecurrentDrafter,
        objective,
        train: Batches,
        heldout: Batches | None,
        config: TrainerConfig,
        out: Path,
        run_config: dict | None = None,
    ):
        self.target, self.drafter, self.objective = target, drafter, objective
        self.train_data, self.heldout, self.config, self.out = train, heldout, config, out
        self.run_config = run_config or {}
        self.optimizers = Optimizers(
            drafter.named_parameters(),
            lr=config.lr,
            betas=tuple(config.betas),
            weight_decay=config.weight_decay,
            muon_lr=config.muon_lr,
        )
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.tracker = _start_wandb(self.run_config) if config.wandb else None

    def train(self) -> dict:
        """Run to the last step; returns the last metrics. Saves at the end, and every `save_every` steps."""
        config = self.config
        warmup = int(config.warmup * config.steps) if config.warmup < 1 else int(config.warmup)
        batches = self.train_data.iterate(skip=self.step)
        bar = tqdm(total=config.steps, initial=self.step, desc="drafter", mininterval=1.0)
        metrics: dict = {}
        mark = time.monotonic()
        while self.step < config.steps:
            batch = next(batches)
            loss, values = self._loss(batch)
            if not math.isfinite(loss.item()):
                raise ValueError(f"the loss is {loss.item()} at step {self.step}; lower trainer.lr or look at the data")
            loss.backward()
            scale = schedule(self.step, config.steps, warmup, config.schedule)
            norm = self.optimizers.step(scale, config.clip)
            self.step += 1
            self.tokens += int(batch.loss_mask.numel())
            now = time.monotonic()
            self.seconds, mark = self.seconds + now - mark, now
            bar.update()
            if self.step % config.log_every == 0 or self.step == config.steps:
                metrics = self._log("train", values, loss=loss.item(), gradient_norm=norm, lr_scale=scale)
                bar.set_postfix(loss=f"{loss.item():.3f}", acc=" ".join(f"{a:.2f}" for a in metrics["accuracy"]))
            if self.step % config.save_every == 0 and self.step < config.steps:
                self._evaluate()
                self.save()
        bar.close()
        metrics |= self._evaluate()
        self.save()
        return metrics

    def _autocast(self):
        if self.config.autocast is None:
            return nullcontext()
        return torch.autocast(self.target.embed.weight.device.type, torch.bfloat16)

    def _loss(self, batch) -> tuple[Tensor, dict[str, Tensor]]:
        features = online_features(self.target, batch, self.drafter.taps, self._autocast())
        self.drafter.documents = None if batch.documents is None else batch.documents.to(features["tokens"].device)
        with self._autocast():
            return self.objective(self.drafter, **features)

    @torch.no_grad()
    def _evaluate(self) -> dict:
        """Mean held-out losses and accuracies per step, over the same batches every time."""
        if self.heldout is None or self.config.eval_batches < 1:
            return {}
        indices = self.heldout.epoch(0)[: self.config.eval_batches]
        results = [self._loss(self.heldout.collate(i)) for i in indices]
        mean = {key: torch.stack([values[key] for _, values in results]).mean(0) for key in results[0][1]}
        logged = self._log("heldout", mean, loss=sum(loss.item() for loss, _ in results) / len(results))
        return {f"heldout_{key}": logged[key] for key in ("loss", "losses", "accuracy")}

    def _log(self, split: str, values: dict[str, Tensor], **scalars: float) -> dict:
        row = {"split": split, "step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 3)}
        row |= scalars | {key: [round(v, 5) for v in value.tolist()] for key, value in values.items()}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        if self.tracker is not None:
            flat = {f"{split}/{k}": v for k, v in scalars.items()}
            for key, value in values.items():
                flat |= {f"{split}/{key}_{j}": v for j, v in enumerate(value.tolist())}
            self.tracker.log(flat, step=self.step)
        return row

    def save(self) -> None:
        """The drafter in its published layout, then the state to resume from; each whole or not at all."""
        save_drafter(self.drafter, self.out / "draft", self.target)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "drafter": {name: p.detach() for name, p in self.drafter.named_parameters()},
            "meaning": self._meaning(),
            "vocab": self.drafter.vocab.ids,
            "optimizers": self.optimizers.state_dict(),
            "rng": torch.get_rng_state(),
        }
        aside = self.out / (STATE + ".partial")
        torch.save(state, aside)
        os.replace(aside, self.out / STATE)

    def _meaning(self) -> str:
        """What the weights mean beyond their shapes: taps, rope, and so on."""
        return f"{type(self.drafter).__name__} taps {list(self.drafter.taps)} {self.drafter.shape}"

    def resume(self) -> None:
        """Go on from the folder's state. Raises ValueError if there is none, or if it is of another drafter."""
        path = self.out / STATE
        if not path.is_file():
            raise ValueError(f"nothing to resume: {path} does not exist")
        try:
            state = torch.load(path, map_location=self.target.embed.weight.device, weights_only=True)
            weights, vocab, meaning = state["drafter"], state["vocab"], state["meaning"]
        except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged or not ours: {str(error).splitlines()[0]}") from None
        own, ids = dict(self.drafter.named_parameters()), self.drafter.vocab.ids
        same_shapes = {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in weights.items()}
        same_vocab = (ids is None and vocab is None) or (
            ids is not None and vocab is not None and torch.equal(ids, vocab)
        )
        if not same_shapes or not same_vocab or meaning != self._meaning():
            raise ValueError(
                f"{path} belongs to another drafter: give the same drafter and data settings, or another `out`"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self.optimizers.load_state_dict(state["optimizers"])
        torch.set_rng_state(state["rng"].cpu())
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def _start_wandb(run_config: dict):
    try:
        import wandb
    except ImportError:
        raise ValueError("trainer.wandb is on, but wandb is not installed: pip install 'specdec[wandb]'") from None
    return wandb.init(project="specdec", config=run_config)
