"""A run continues with the settings that it began with. Changes of its result are refused, others are reported."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from specdec import own
from specdec.registry import read_yaml
from specdec.schema import shown

# What the weights do not depend on. Checkpoints say themselves whether the data, and the batches of a step over all
# processes, are the same: a file may move, and more processes may accumulate less.
FREE = {
    "out", "resume", "logger", "device", "tp_plan", "whole_target", "target.device_map",
    "data.path", "data.cache", "data.streaming",
} | {
    f"trainer.{name}"
    for name in (
        "accumulate", "fsdp", "recompute", "log_every", "save_every", "keep", "eval_batches", "prompts", "decode_every",
        "decode_prompts", "decode_tokens", "decode_steps", "logger", "wandb",
    )
}  # fmt: skip
SILENT = {"out", "resume"}
REMOVED = {"drafter.fusion": "shared"}  # settings of version 0.1, at the value that is built in now


def check_same_run(config: DictConfig, out: Path) -> list[str]:
    """Compare settings with those of the run in `out`; a run without config.yaml is not looked at.

    Returns the differing settings, without changing the run, as 'NAME was A and is B'. Raises ValueError, which names
    them, if one changes the run.
    """
    if not (out / "config.yaml").is_file():
        return []
    before = dict(_flat(read_yaml(out / "config.yaml", "settings")))
    now = dict(_flat(cast(dict, OmegaConf.to_container(config, resolve=True))))
    # Settings of another version that were off, or had the value that is built in now
    gone = {name for name, value in before.items() if name not in now and (not value or REMOVED.get(name) == value)}
    names = [name for name in (*before, *(now.keys() - before.keys())) if before.get(name) != now.get(name)]
    names = [name for name in names if name not in gone]
    said = {name: f"{name} was {shown(before.get(name))} and is {shown(now.get(name))}" for name in names}
    changing = [said[name] for name in names if name not in FREE]
    if changing:
        raise ValueError(
            f"{out} holds a run of other settings: {'; '.join(changing)}: give them as they were, or another out="
        )
    return [said[name] for name in names if name not in SILENT]


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        elif name == "_target_":  # version 0.1 wrote it without the package's name
            yield f"{path}{name}", own.short(str(value)).removeprefix("specdec.")
        else:
            yield f"{path}{name}", value
