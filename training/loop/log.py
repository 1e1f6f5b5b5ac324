"""The log of a run: a line of JSON for each thing measured, and a copy in wandb if that is asked for."""

import json
from pathlib import Path

from torch import Tensor

from specdec.cli.files import write_text


class RunLog:
    """`log.jsonl` in the folder of a run. Of several processes only the one with `writes` writes."""

    def __init__(self, out: Path, writes: bool = True, wandb: bool | str = False, settings: dict | None = None):
        """wandb: False, or its mode, 'online' or 'offline'; settings go there. Raises ValueError if it is not
        installed."""
        self.path, self.writes = out / "log.jsonl", writes
        self.tracker = _start_wandb(wandb, settings or {}, out) if wandb and writes else None

    def write(self, split: str, when: dict[str, float], scalars: dict[str, float], values: dict[str, Tensor]) -> dict:
        """Append a row, and return it. when: `step`, and what else tells how far the run is; values: by name, one for
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
    """Rows of a log.jsonl; a last line that was cut while it was written is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _start_wandb(mode: str, settings: dict, out: Path):
    try:
        import wandb
    except ImportError:
        raise ValueError(f"trainer.wandb={mode}, but wandb is not installed: pip install '.[wandb]'") from None
    return wandb.init(project="specdec", config=settings, mode=mode, dir=str(out))
