"""The log of a run: a line of JSON for each thing measured, its picture and copies of it, and the bar on the screen."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from specdec.cli.files import write_text, write_whole
from specdec.cli.reading import lines_of, open_text, parse_json, read_model


class RunLog:
    """`log.jsonl` in the folder of a run. Of several processes only the one with `writes` writes."""

    def __init__(self, out: Path, writes: bool = True, loggers: Sequence[str] = (), settings: dict | None = None):
        """loggers: names in `LOGGERS`, which get copies of the rows, and the settings of the run."""
        self.path, self.writes = out / "log.jsonl", writes
        self.loggers: list[Any] = [LOGGERS[name](out, settings or {}) for name in loggers] if writes else []

    def write(self, split: str, when: dict[str, float], scalars: dict[str, float], values: dict[str, Tensor]) -> dict:
        """Append a row of a kind such as 'train', and return it. values: one for each step of the unroll."""
        lists = {key: value.tolist() for key, value in values.items()}
        row = {"split": split} | when | scalars | {key: [round(v, 5) for v in each] for key, each in lists.items()}
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        flat = scalars | {f"{key}_{j}": v for key, each in lists.items() for j, v in enumerate(each)}
        for logger in self.loggers:
            logger.log({f"{split}/{key}": v for key, v in flat.items()}, int(when["step"]))
        return row

    def forget_after(self, step: int) -> None:
        """Drop the rows that will be written again after a checkpoint's `step`, with a rollout or a switch at it."""
        rows = read_log(self.path) if self.path.exists() else []
        rows = [row for row in rows if row["step"] < step + (row["split"] not in ("rollout", "switch"))]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def read_log(path: Path) -> list[dict]:
    """Rows of a log.jsonl, without a last line that was cut while it was written."""
    from specdec.training.file_models import LogRow  # here: only readers need pydantic

    rows = []
    with open_text(path, "log") as file:
        for number, line in enumerate(lines_of(file), 1):
            if not line.endswith("\n"):
                break
            where = f"{path} line {number}"
            rows.append(parse_json(line, where))
            read_model(LogRow, rows[-1], where)
    return rows


class Wandb:
    """A run of wandb. WANDB_MODE=offline uploads nothing."""

    def __init__(self, out: Path, settings: Mapping):
        """The run begins with the first row."""
        import wandb

        self.begin = lambda: wandb.init(project="specdec", config=settings, dir=str(out))
        self.run: Any = None

    def log(self, row: dict[str, float], step: int) -> None:
        """Send a row."""
        self.run = self.run or self.begin()
        self.run.log(row, step=step)


class TensorBoard:
    """Files of TensorBoard in the folder tensorboard/ of a run. A resumed run replaces the later steps."""

    def __init__(self, out: Path, settings: Mapping):
        """The writer is opened with the first row."""
        from torch.utils.tensorboard import SummaryWriter

        self.begin = lambda step: SummaryWriter(str(out / "tensorboard"), purge_step=step)
        self.writer: Any = None
        self.settings = f"```json\n{json.dumps(settings, indent=1, default=str)}\n```"

    def log(self, row: dict[str, float], step: int) -> None:
        """Write a row, and with the first one the settings of the run."""
        if self.writer is None:
            self.writer = self.begin(step)
            self.writer.add_text("settings", self.settings, step)
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


LOGGERS = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError, one sentence, for a name that is not in `LOGGERS`, and for a package that is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"there is no logger {name!r}: logger may be {', '.join(LOGGERS)}, or both")
        try:
            LOGGERS[name](Path(), {})
        except ImportError:
            raise ValueError(f"logger={name}, but {name} is not installed: pip install 'specdec[{name}]'") from None


def draw_curves(log: Path, picture: Path) -> None:
    """Draw a log.jsonl into a PNG: losses, agreement with the target, tau and gradient norm over steps."""
    from matplotlib.figure import Figure  # not pyplot: no display, no state

    rows = read_log(log)
    figure = Figure(figsize=(11, 7))
    # Fixed: to work the layout out took a third of the time, and a picture is drawn with each checkpoint.
    figure.subplots_adjust(left=0.06, right=0.99, bottom=0.07, top=0.95, wspace=0.15, hspace=0.2)
    loss, accuracy, tau, norm = figure.subplots(2, 2, sharex=True).flat
    for split in ("train", "heldout"):
        _plot(loss, rows, split, "loss", split)
    for j in range(max((len(r.get("accuracy", ())) for r in rows), default=0)):
        _plot(accuracy, rows, "heldout", "accuracy", f"step {j + 1}", at=j)
    _plot(tau, rows, "decode", "tau", "decoding held-out prompts")
    _plot(tau, rows, "rollout", "tau", "on-policy rollouts")
    _plot(tau, rows, "heldout", "expected_tau", "expected, greedy")
    _plot(tau, rows, "heldout", "expected_tau_sampled", "expected, sampled")
    _plot(norm, rows, "train", "gradient_norm", "before clipping")
    titles = ("loss", "held-out agreement with the target", "tau: tokens per round", "norm of the gradient")
    for axes, title in zip((loss, accuracy, tau, norm), titles, strict=True):
        axes.set(title=title, xlabel="step of the optimiser")
        axes.grid(alpha=0.3)
        for i, row in enumerate(row for row in rows if row["split"] == "switch"):
            label = "objective switches" if i == 0 and axes is loss else None
            axes.axvline(row["step"], color="grey", linestyle="--", linewidth=1, label=label)
        if axes.lines:
            axes.legend(fontsize="small")
    write_whole(picture, lambda staging: figure.savefig(staging, dpi=110, format="png"))


def _plot(axes, rows: list[dict], split: str, key: str, label: str, at: int | None = None) -> None:
    chosen = [r for r in rows if r["split"] == split and key in r and (at is None or at < len(r[key]))]
    if chosen:
        values = [r[key] if at is None else r[key][at] for r in chosen]
        axes.plot([r["step"] for r in chosen], values, label=label, marker="." if len(chosen) < 30 else None)


class Progress(tqdm):
    """A bar that also measures the speed of the steps, without what is between them."""

    def __init__(self, steps: int, step: int, quiet: bool):
        """Show the progress of a run of `steps` steps from `step` on, unless `quiet`."""
        super().__init__(total=steps, initial=step, desc="drafter", mininterval=1.0, disable=quiet)
        self.tokens, self.seconds = 0, 0.0  # since the speed was logged last

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.update()

    @property
    def speed(self) -> float:
        """Training tokens per second, padding and prompts counted."""
        return round(self.tokens / max(self.seconds, 1e-9), 1)

    def take_speed(self) -> float:
        """Return the speed, and begin to measure it again."""
        speed, self.tokens, self.seconds = self.speed, 0, 0.0
        return speed

    def show(self, loss: float, values: dict[str, Tensor]) -> None:
        """Show the loss, the accuracy at each step of the unroll, and the speed."""
        accuracy = " ".join(f"{share:.2f}" for share in values["accuracy"].tolist())
        self.set_postfix_str(f"loss={loss:.3f}, acc={accuracy}, {self.speed:,.0f} tokens/s")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.disable:
            self.write(text, file=sys.stderr)
