"""One command as several jobs, by a launcher of Hydra:  specdec lab jobs parts=4 hydra/launcher=joblib -- COMMAND

COMMAND is any other of specdec's, without its name. In it {part} becomes the job's number, from 0, and {parts} how many
there are. Without a launcher the jobs run one after the other. docs/jobs.md has examples.
"""

import re
import subprocess
import sys
from importlib.util import find_spec

from omegaconf import DictConfig

from specdec.cli.errors import one_sentence_errors
from specdec.cli.hydra_entry import hydra_command

LAUNCHERS = {"joblib": "hydra_joblib_launcher", "submitit": "hydra_submitit_launcher"}  # how names begin -> package


@one_sentence_errors
def run(config: DictConfig) -> None:
    """One job: the command, in a process of its own."""
    words = [word.replace("{parts}", str(config.parts)).replace("{part}", str(config.part)) for word in config.command]
    code = subprocess.run([sys.executable, "-m", "specdec", *words], check=False).returncode
    if code:
        raise ValueError(f"job {config.part} of {config.parts} ended with exit code {code}: specdec {' '.join(words)}")


start = hydra_command(run, "jobs")


@one_sentence_errors
def main() -> None:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        start()
        return
    if "--" not in words or words[-1] == "--":
        raise ValueError(
            "write the command after --, as in: specdec lab jobs parts=2 -- sweep shards={parts} shard={part}"
        )
    cut = words.index("--")
    before, command = words[:cut], words[cut + 1 :]
    given = dict(word.split("=", 1) for word in before if "=" in word)
    if not re.fullmatch(r"[1-9]\d{0,5}", given.get("parts", "")):
        raise ValueError("say how many jobs there are: parts=4")
    launcher = given.get("hydra/launcher", "basic")
    package = next((name for word, name in LAUNCHERS.items() if launcher.startswith(word)), None)
    if package is not None and not (find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}")):
        raise ValueError(f"hydra/launcher={launcher} is not installed: pip install 'specdec[jobs]'")
    parts = [] if "part" in given else [f"part=range({given['parts']})"]
    sys.argv = [sys.argv[0], "--multirun", *before, *parts, f"command=[{','.join(map(quoted, command))}]"]
    start()


def quoted(word: str) -> str:
    """A word as Hydra reads it, whatever it holds. A backslash is one there, except before a quotation mark."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), word)
    return "'" + escaped.replace("${", "\\${") + "'"


if __name__ == "__main__":
    main()
