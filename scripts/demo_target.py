"""Pretraining of the demo's target, for as long as the machine allows.

    python scripts/demo_target.py --start build/grown --data build/data --work build    # until SIGTERM or --until
    python scripts/demo_target.py --start build/grown --data build/data --work build --decay 400 --out build/target

--start: the weights to begin with (scripts/grow.py). --data: what scripts/demo_data.py wrote with that tokenizer. The
first form, of a constant rate, goes on from WORK/pretrain.pt, or begins. A signal drops the step under way and saves.
The second goes on from there for so many steps, in which the rate falls to 0, and writes the target; WORK/decay.pt is
its own state, so pretrain.pt can go on afterwards. WORK/pretrain.jsonl is the log of both.

fp32, compiled: without AMX a processor has no faster products here. A step takes 8 rows of 1024 tokens, at the constant
rate as 16 of 512, as attention is a fifth of the time otherwise. Muon takes the layers' matrices, AdamW the embedding
and the norms.
"""

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import checkout  # noqa: F401
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_whole
from specdec.cli.signals import StopSignals
from specdec.training.loop.checkpoint import save_state
from specdec.training.pretrain import save_target

MICRO, PER_STEP = 4, 8  # rows of a forward, and of a step
PIECE = 512  # tokens that attend to each other at the constant rate
MUON_LR, LR, WARMUP, WEIGHT_DECAY = 0.01, 7e-4, 60, 0.05
BOOKS, BOOKS_DECAYING = 0.2, 0.05  # of the rows
SAVE_SECONDS, LOG_STEPS, HELD_STEPS = 300, 5, 100
HELD_ROWS = {"chat": 24, "books": 8}
# The first four steps of Polar Express (Amsel et al. 2025, arXiv 2505.16932), in fp32. torch's Muon takes five of
# Newton-Schulz in bf16, which takes twice as long where bf16 products are slow.
POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)


@dataclass
class Progress:
    """Where a run stands. chat, books: rows that were read of each."""

    step: int = 0
    tokens: int = 0
    chat: int = 0
    books: int = 0
    owed: float = 0.0  # of the next row of books
    train_seconds: float = 0.0
    from_step: int = 0  # at which the decay began


# Optimisers


def orthogonal(g: Tensor) -> Tensor:
    """About U V^T of g = U S V^T."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() * 1.02 + 1e-7)
    for a, b, c in POLAR:
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon (Nesterov's momentum, rate times sqrt(max(1, rows / columns))) with `orthogonal`."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(momentum, 0.95))
                p.mul_(1 - group["lr"] * WEIGHT_DECAY)
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def build(start: Path) -> tuple[LlamaForCausalLM, list[tuple[torch.optim.Optimizer, float]]]:
    """The model, and its optimisers with their rates."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in named if not (p.ndim == 2 and "layers" in name)]
    adam = torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    return model, [(Muon(matrices, MUON_LR), MUON_LR), (adam, LR)]


# Data


class Rows:
    """Rows of one file in an order that is drawn anew for every pass."""

    def __init__(self, path: Path):
        self.rows, self.epoch = np.load(path, mmap_mode="r"), -1

    def __getitem__(self, at: int) -> np.ndarray:
        epoch, i = divmod(at, len(self.rows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng(1000 + epoch).permutation(len(self.rows))
        return self.rows[self.order[i]]


class Stopped(Exception):
    """A signal came within a step."""


class Run:
    """A model, its optimisers, its data and where it stands."""

    def __init__(self, args: argparse.Namespace, stop: StopSignals):
        self.args, self.stop, self.progress = args, stop, Progress()
        self.tokenizer = AutoTokenizer.from_pretrained(args.start)
        self.model, self.optimizers = build(args.start)
        self.parameters = list(self.model.parameters())
        self.loss_of = torch.compile(self._loss)
        self.chat, self.books = Rows(args.data / "chat.npy"), Rows(args.data / "books.npy")
        self.held = {
            name: torch.from_numpy(np.load(args.data / f"held_{name}.npy")[:rows].astype(np.int64))
            for name, rows in HELD_ROWS.items()
        }
        self.file = args.work / ("decay.pt" if args.decay else "pretrain.pt")
        self.log = (args.work / "pretrain.jsonl").open("a", buffering=1)
        self._resume()

    def _loss(self, ids: Tensor) -> Tensor:
        logits = self.model.lm_head(self.model.model(ids, use_cache=False).last_hidden_state)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def _resume(self) -> None:
        source = self.file if self.file.exists() else self.args.work / "pretrain.pt"
        if not source.exists():
            if self.args.decay:
                raise ValueError(f"there is no {source} to decay from: run without --decay first")
            return
        state = torch.load(source, weights_only=True, mmap=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.progress = Progress(**{name: state[name] for name in asdict(self.progress) if name in state})
        if self.args.decay and source != self.file:
            self.progress.from_step = self.progress.step

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o, _ in self.optimizers]}
        write_whole(self.file, partial(save_state, state | asdict(self.progress)))

    def note(self, **row) -> None:
        row = {"mode": "decay" if self.args.decay else "train", "step": self.progress.step} | row
        self.log.write(json.dumps(row | {"tokens": self.progress.tokens}) + "\n")

    @property
    def done(self) -> bool:
        now = self.progress
        return bool(self.args.decay and now.step >= now.from_step + self.args.decay) or now.tokens >= self.args.until

    def step(self) -> float:
        """One step; returns its loss. Raises Stopped, with nothing changed, if a signal comes before its end."""
        began, now = time.monotonic(), self.progress
        owed = now.owed + PER_STEP * (BOOKS_DECAYING if self.args.decay else BOOKS)
        books = int(owed)
        chat = PER_STEP - books
        rows = [self.books[now.books + i] for i in range(books)] + [self.chat[now.chat + i] for i in range(chat)]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        total = 0.0
        for part in ids.split(MICRO):
            loss = self.loss_of(part if self.args.decay else part.view(-1, PIECE)) * (MICRO / PER_STEP)
            loss.backward()
            total += loss.item()
            if self.stop.asked:
                raise Stopped
        self._update()
        now.step, now.tokens, now.owed = now.step + 1, now.tokens + ids.numel(), owed - books
        now.chat, now.books = now.chat + chat, now.books + books
        now.train_seconds += time.monotonic() - began
        return total

    def _update(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).item()
        scale = min(1.0, (self.progress.step + 1) / WARMUP)
        if self.args.decay:
            scale *= 1 - (self.progress.step - self.progress.from_step) / self.args.decay
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def heldout(self) -> dict[str, float]:
        """Nats a token of rows that are held out."""
        return {
            f"heldout_{name}": round(float(np.mean([self.loss_of(part).item() for part in ids.split(MICRO)])), 4)
            for name, ids in self.held.items()
        }

    def train(self) -> None:
        saved, losses = time.monotonic(), []
        while not self.done and not self.stop.asked:
            try:
                losses.append(self.step())
            except Stopped:
                break
            if self.progress.step % LOG_STEPS == 0:
                self.note(loss=round(float(np.mean(losses)), 4))
                losses = []
            if self.progress.step % HELD_STEPS == 0:
                self.note(**self.heldout())
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def finish(self) -> None:
        report = asdict(self.progress) | self.heldout() | {"decay_steps": self.args.decay}
        report["parameters"] = sum(p.numel() for p in self.parameters)
        save_target(self.model, self.tokenizer, self.args.out, report=report)
        print(json.dumps(report))


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a target folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--until", type=float, default=math.inf, help="end at so many tokens")
    parser.add_argument("--decay", type=int, default=0, help="steps in which the rate falls to 0")
    parser.add_argument("--out", type=Path, help="where the target goes, with --decay")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if bool(args.decay) != bool(args.out):
        raise ValueError("--decay and --out go together")
    output_folder(args.work)
    torch.set_num_threads(args.threads)
    with StopSignals("saving") as stop:
        run = Run(args, stop)
        run.train()
    if args.decay and run.done:
        run.finish()


if __name__ == "__main__":
    main()
