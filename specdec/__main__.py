"""The command `specdec`, also `python -m specdec`: one entry to all commands.

It knows each command by the name of its module, and imports only the one that is called.
"""

import difflib
import sys
from importlib import import_module

from specdec import __version__
from specdec.cli.errors import one_sentence_errors

# name -> its module, whose `main` reads sys.argv, and what it does
COMMANDS = {
    "generate": ("specdec.cli.generate", "answer prompts, or chat: with a drafter, or plainly"),
    "train": ("specdec.training.train", "train a drafter"),
    "serve": ("specdec.serve.serve_command", "answer OpenAI's clients: a server"),
    "regenerate": ("specdec.training.regenerate", "let the target answer prompts: training data in its own words"),
    "cache": ("specdec.training.cache", "store the target's features, to train without running it"),
    "estimate": ("specdec.training.estimate", "say what a training run takes: disk, memory, time"),
    "show": ("specdec.training.show", "print conversations with the learnt tokens marked"),
    "count": ("specdec.training.count", "count tokens, and write the most frequent as an FR-Spec map"),
    "doctor": ("specdec.drafters.formats.__main__", "inspect, check, convert and export draft checkpoints"),
    "tree": ("specdec.lab.replay.optimal_tree", "measure acceptance, and write the best static tree"),
    "tune": ("specdec.lab.tune_command", "find the fastest setting of a pair on this machine"),
    "prove": ("specdec.lab.proof.prove", "test that decoding is lossless"),
    "bench": ("specdec.lab.bench.bench_command", "our engine against transformers, CTranslate2 and llama.cpp"),
    "bench serve": ("specdec.lab.load.bench_serve", "drive a server: throughput, latencies, acceptance"),
    "sweep": ("specdec.lab.sweep.sweep_command", "drafters and trees on a benchmark: one report"),
    "compare": ("specdec.lab.sweep.compare_command", "drafters side by side: table, CSV, chart"),
    "metrics": ("specdec.lab.traces.metrics_command", "every metric of a trace, with intervals"),
    "jobs": ("specdec.cli.jobs", "a command as several jobs, here or on a cluster"),
}
LAB = ("jobs",)  # commands for studies: `specdec lab NAME`; `specdec NAME` works too
LAB_DOES = f"commands for studies: {', '.join(LAB)}"


def overview(lab: bool = False) -> str:
    """Return the help: of the commands for studies, or of all others."""
    does = {name: words for name, (_, words) in COMMANDS.items() if (name in LAB) == lab}
    does |= {} if lab else {"lab": LAB_DOES}
    width = max(map(len, does))
    prefix = "specdec lab" if lab else "specdec"
    lines = [
        f"usage: {prefix} COMMAND [options]",
        "",
        "Speculative decoding: train a drafter, decode with it, prove it lossless, measure it.",
        "",
        *(f"  {name:{width}}  {words}" for name, words in does.items()),
        "",
        f"{prefix} COMMAND --help says more of one; specdec --version [--verbose] prints the version.",
        'Try:  specdec generate --prompt "Write a short story about a dragon." --compare',
    ]
    return "\n".join(lines[:-1] if lab else lines)


def split(words: list[str]) -> tuple[str, list[str]]:
    """Return the command that a line names, by one word or two, and the words after it."""
    if words[0] == "lab" and words[1:2] and words[1] in LAB:
        return words[1], words[2:]
    count = 2 if " ".join(words[:2]) in COMMANDS else 1
    return " ".join(words[:count]), words[count:]


def nearest(name: str) -> str:
    """Return 'did you mean ...? ' for a name that is near to a command's, or that a flag of one has; else nothing."""
    if name == "chat":
        return "did you mean generate --chat? "
    near = difflib.get_close_matches(name, COMMANDS, 1)
    return f"did you mean {near[0]}? " if near else ""


def installation() -> str:
    """Return what a bug report needs, a line each: versions, system, processor and GPU."""
    import platform

    import torch

    from specdec.engine.recorder import versions
    from specdec.machine import machine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"specdec": __version__} | versions() | {"system": platform.platform()} | machine(device)
    return "\n".join(f"{name}: {value}" for name, value in found.items())


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    name, rest = split((sys.argv[1:] if argv is None else argv) or ["--help"])
    if name in ("-h", "--help", "help"):
        print(overview())
        return
    if name == "lab" and (not rest or rest[0] in ("-h", "--help")):
        print(overview(lab=True))
        return
    if name == "lab":
        raise ValueError(f"there is no command {'lab ' + rest[0]!r}; specdec lab --help lists all")
    if name == "--version":
        print(__version__ if rest != ["--verbose"] else installation())
        return
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; {nearest(name)}specdec --help lists all")
    sys.argv = [f"specdec {name}", *rest]
    import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
