"""Run one command as several jobs, by a launcher of Hydra.

  specdec lab jobs parts=4 hydra/launcher=joblib -- COMMAND

COMMAND is any other command of specdec, without "specdec". In COMMAND, {part} becomes the job's number, from 0, and
{parts} the number of jobs. Without a launcher the jobs run one after the other. docs/jobs.md has examples.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from omegaconf import DictConfig

from specdec.cli.hydra_words import hydra_words, quoted

LAUNCHERS = {"joblib": "hydra_joblib_launcher", "submitit": "hydra_submitit_launcher"}  # how names begin -> package


def run(config: DictConfig) -> None:
    """Run one job: the command, in a process of its own."""
    if config.part not in range(config.parts):
        raise ValueError(
            f"part must be a number from 0 to {config.parts - 1} where parts={config.parts}, got {config.part}"
        )
    words = [word.replace("{parts}", str(config.parts)).replace("{part}", str(config.part)) for word in config.command]
    code = subprocess.run([sys.executable, "-m", "specdec", *words], check=False).returncode
    if code:
        job = f"job {config.part} of {config.parts}"
        raise ValueError(f"{job} ended with exit code {code}: specdec {shlex.join(words)}")


def prepare(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra reads them, with the command after -- as a setting."""
    if "--" not in words or words[-1] == "--":
        raise ValueError(
            "write the command after --, as in: specdec lab jobs parts=2 -- sweep shards={parts} shard={part}"
        )
    cut = words.index("--")
    before, command = hydra_words("jobs", {}, {}, words[:cut]), words[cut + 1 :]
    given = dict(word.split("=", 1) for word in before if "=" in word)
    if not re.fullmatch(r"[1-9]\d{0,5}", given.get("parts", "")):
        raise ValueError("say how many jobs there are: parts=4")
    launcher = given.get("hydra/launcher", "basic")
    package = next((name for word, name in LAUNCHERS.items() if launcher.startswith(word)), None)
    if package is not None and not (find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}")):
        raise ValueError(f"hydra/launcher={launcher} is not installed: pip install 'specdec[jobs]'")
    parts = [] if "part" in given else [f"part=range({given['parts']})"]
    return ["--multirun", *before, *parts, f"command=[{','.join(map(quoted, command))}]"]
