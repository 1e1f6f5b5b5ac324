"""The log of a run: a line of JSON for each thing measured, its picture, and a copy in wandb if that is asked for."""

import json
from pathlib import Path

from torch import Tensor

from specdec.cli.files import write_text, write_whole
from specdec.cli.reading import lines_of, open_text, parse_json, read_model


class RunLog:
    """`log.jsonl` in the folder of a run. Of several processes only the one with `writes` writes."""

    def __init__(self, out: Path, writes: bool = True, wandb: bool | str = False, settings: dict | None = None):
        """wandb: False, or its mode, 'online' or 'offline'; settings go there. Raises ValueError if it is not
        installed."""
        self.path, self.writes = out / "log.jsonl", writes
        self.tracker = _start_wandb(wandb, settings or {}, out) if wandb and writes else None

    def write(self, split: str, when: dict[str, float], scalars: dict[str, float], values: dict[str, Tensor]) -> dict:
        """Append a row, and return it. when: `step`, and other measures of progress; values: by name, one for
        each step of the unroll."""
        lists = {key: value.tolist() for key, value in values.items()}
        row = {"split": split} | when | scalars | {key: [round(v, 5) for v in each] for key, each in lists.items()}
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.tracker is not None:
            flat = scalars | {f"{key}_{j}": v for key, each in lists.items() for j, v in enumerate(each)}
            self.tracker.log({f"{split}/{key}": v for key, v in flat.items()}, step=when["step"])
        return row

    def forget_after(self, step: int) -> None:
        """Drop the rows of later steps than a checkpoint's, which will come again. So will a rollout at its very
        step."""
        rows = read_log(self.path) if self.path.exists() else []
        rows = [row for row in rows if row["step"] < step + (row["split"] != "rollout")]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def read_log(path: Path) -> list[dict]:
    """Rows of a log.jsonl; a last line that was cut while it was written is left out.

    Raises ValueError, one sentence, for a line that is no row of a log."""
    from specdec.training.loop.log_row import LogRow  # here: only readers need pydantic

    rows = []
    with open_text(path, "log") as file:
        for number, line in enumerate(lines_of(file), 1):
            if not line.endswith("\n"):
                break
            where = f"{path} line {number}"
            rows.append(parse_json(line, where))
            read_model(LogRow, rows[-1], where)
    return rows


def _start_wandb(mode: str, settings: dict, out: Path):
    try:
        import wandb
    except ImportError:
        raise ValueError(f"trainer.wandb={mode}, but wandb is not installed: pip install '.[wandb]'") from None
    return wandb.init(project="specdec", config=settings, mode=mode, dir=str(out))


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
    titles = ("loss", "held-out agreement with the target", "tau (tokens a round)", "gradient norm")
    for axes, title in zip((loss, accuracy, tau, norm), titles, strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    write_whole(picture, lambda staging: figure.savefig(staging, dpi=110, format="png"))


def _plot(axes, rows: list[dict], split: str, key: str, label: str, at: int | None = None) -> None:
    chosen = [r for r in rows if r["split"] == split and key in r and (at is None or at < len(r[key]))]
    if chosen:
        values = [r[key] if at is None else r[key][at] for r in chosen]
        axes.plot([r["step"] for r in chosen], values, label=label, marker="." if len(chosen) < 30 else None)
