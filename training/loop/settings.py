"""Settings of the training loop, and of on-policy data."""

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.cli.limits import MOST
from specdec.schema import check_fields, choice, ranged

if TYPE_CHECKING:  # commands check these settings before torch is loaded
    import torch

EPOCHS = 2  # more answers teach more than the same ones again (docs/log.md)
MANY = 40  # epochs; EAGLE's authors take so many, and no other trainer more


@dataclass
class TrainerConfig:
    """conf/trainer/*.yaml says what each is for."""

    steps: int | None = ranged(1, MOST, None)
    epochs: float | None = ranged(0, MOST, None, above=True)
    batch_tokens: int = ranged(1, MOST, 4096)
    accumulate: int = ranged(1, MOST, 1)
    lr: float = ranged(0, 100, 1e-3)
    muon_lr: float | None = ranged(0, 100, None)
    betas: tuple[float, float] = ranged(0, 1, (0.9, 0.95))
    weight_decay: float = ranged(0, 100, 0.0)
    warmup: float = ranged(0, MOST, 0.02)
    schedule: str = choice("cosine", "linear", "constant")
    clip: float = ranged(0, 1e12, 0.5, above=True)
    ema: float | None = None
    autocast: str | None = None
    recompute: bool = False
    fsdp: bool = False
    seed: int = ranged(0, 1 << 62, 0)
    log_every: int = ranged(1, MOST, 10)
    save_every: int = ranged(1, MOST, 200)
    keep: int = ranged(1, MOST, 2)
    eval_batches: int = 8
    prompts: str | None = None
    decode_every: int | None = ranged(1, MOST, 200)
    decode_prompts: int = ranged(1, MOST, 16)
    decode_tokens: int = ranged(1, MOST, 64)
    decode_steps: int = ranged(1, MOST, 5)
    logger: str | list | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for settings out of range or in conflict."""
        check_fields(self, "trainer.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("trainer.steps and trainer.epochs both say how long to train: set one of them to null")
        if len(self.betas) != 2:
            raise ValueError(f"trainer.betas must be two numbers, got {list(self.betas)}")
        if self.autocast not in (None, "bf16"):
            raise ValueError(f"trainer.autocast must be null or bf16, got {self.autocast!r}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"trainer.ema must be null or a decay between 0 and 1, got {self.ema}")

    @property
    def length(self) -> int:
        """`steps`, once `over` has set it."""
        if self.steps is None:
            raise ValueError("the number of steps is not known before the data is")
        return self.steps

    @property
    def loggers(self) -> list[str]:
        """Names of what gets copies of the log."""
        return self.logger.split(",") if isinstance(self.logger, str) else [str(name) for name in self.logger or ()]

    def over(self, batches: float) -> "TrainerConfig":
        """The same with `steps`, for data of so many batches an epoch in each process."""
        if self.steps is not None:
            return self
        steps = math.ceil((self.epochs or EPOCHS) * batches / self.accumulate)
        return dataclasses.replace(self, steps=steps, epochs=None)

    def autocasting(self, device: "torch.device") -> AbstractContextManager:
        """The precision in which the target and the drafter run."""
        import torch

        return nullcontext() if self.autocast is None else torch.autocast(device.type, torch.bfloat16)


@dataclass(frozen=True)
class OnPolicy:
    """Settings of `specdec.training.data.rollouts`; conf/data/files.yaml says what each is for."""

    share: float = ranged(0, 1, 0.0)
    start: int = ranged(0, MOST, 0)
    every: int = ranged(1, MOST, 20)
    prompts: int = ranged(1, MOST, 32)
    batch_size: int = ranged(1, MOST, 32)
    max_new_tokens: int = ranged(1, MOST, 128)
    temperature: float = 0.8
    weight: float = ranged(1, 1e12, 4.0)
    topk: int = 1
    steps: int = 5
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for settings out of range."""
        check_fields(self, "data.on_policy.")
