"""`specdec.train`: a training run from Python, with the settings of `specdec train`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.hydra_settings import check_settings, settings_errors
from specdec.cli.hydra_words import own_parts, quoted
from specdec.contracts import Drafter
from specdec.drafters.formats import load_drafter
from specdec.registry import CONF
from specdec.schema import check_value, named_arguments, shown, typed
from specdec.training.build import from_checkpoint
from specdec.training.loop.log import read_log
from specdec.training.train import draft_of, run_through

TEXT = str | Path | None


@dataclass(repr=False)
class Training:
    """A training run that has ended.

    Attributes:
        drafter: The trained drafter, loaded as `specdec.load_drafter` loads it.
        draft: Its name for `load_drafter` and `--draft`.
        log: The rows of log.jsonl: losses and accuracies by step, held-out figures, tau.
        out: The folder of the run.
    """

    drafter: Drafter
    draft: str
    log: list[dict[str, Any]]
    out: Path

    def __repr__(self) -> str:
        """Return the drafter, the number of steps, tau and the folder of the trained drafter."""
        tau = "" if self.tau is None else f", tau {self.tau:.2f}"
        return f"Training({self.drafter!r}, {self.log[-1]['step'] if self.log else 0} steps{tau}, draft={self.draft!r})"

    @property
    def tau(self) -> float | None:
        """Tokens per round on the held-out prompts at the last measurement; None if nothing was decoded."""
        return next((row["tau"] for row in reversed(self.log) if "tau" in row), None)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss of each logged step."""
        return [(row["step"], row["loss"]) for row in self.log if row["split"] == "train"]


@named_arguments
def train(
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    from_: str | Path | None = None,
    objective: str | Path | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    seed: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Training:
    """Train a drafter on conversations, and return it with the log. `specdec train` is the same run.

    Args:
        data: File, pattern, folder or hub name of conversations, or a list of these.
        out: Folder of the run.
        target: Folder or hub name of the target; the bundled one by default.
        drafter: Name in conf/drafter, or your own FILE.py:NAME; EAGLE-3.1 by default.
        from_: Checkpoint of a drafter to train further, instead of `drafter`.
        objective: Name in conf/objective, or your own FILE.py:NAME.
        steps: Optimiser steps.
        epochs: Passes over the data instead; without either there are two.
        seed: Of weights and batches.
        device: Such as cpu or cuda.
        resume: Continue the run in `out`.
        settings: Further settings by their names in `specdec train --cfg job`, such as {"trainer.lr": 1e-3}.

    Raises:
        ValueError: A setting does not exist or does not fit.

    Examples:
        >>> run = train("answers.jsonl", out="runs/mine", from_="demo/eagle3", steps=100)  # doctest: +SKIP
        >>> generate("demo/target", "What is a tree?", run.drafter).tau  # doctest: +SKIP
    """
    trainer = run_through(_configured(**locals()))
    draft = draft_of(trainer)
    return Training(load_drafter(draft, trainer.target), draft, read_log(trainer.log.path), trainer.out)


def _configured(data: Any, settings: Mapping[str, Any] | None, **given: Any):
    """The configuration of `specdec train` with the arguments of `train` that are not None."""
    import hydra
    from omegaconf import OmegaConf

    kinds = {"steps": int | None, "epochs": float | None, "seed": int | None, "resume": bool, "device": str}
    for name, value in given.items():
        check_value(typed(kinds.get(name, TEXT)), value, name)
    check_value(typed(TEXT | list | tuple), data, "data")
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"settings must map names to values, got {shown(settings)}")
    named = {"from_": "from", "target": "target.path"} | {n: f"trainer.{n}" for n in ("steps", "epochs", "seed")}
    found = {named.get(name, name): value for name, value in given.items() if value is not None}
    found = {"data.path": data} | found | dict(settings or {})
    words = own_parts(from_checkpoint([f"{name}={_word(value)}" for name, value in found.items()]))
    with settings_errors("train"), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("train", words)
        plain: Any = OmegaConf.to_container(config, resolve=True)
        check_settings(plain, "train")
    return config


def _word(value: Any) -> str:
    """A value as a word of Hydra holds it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_word(inner)}' for name, inner in value.items())}}}"
    return quoted(str(value)) if isinstance(value, str | Path) else json.dumps(value)
