"""What flags may not say together, what can be refused before torch is loaded, and settings files.

Every key of a settings file but `report` is a flag of `specdec generate`, with underscores for hyphens. A flag that is
typed wins over the file. Entries of the file that contradict it are left out: with --topk typed, a tree of the file is.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec import own, registry
from specdec.cli.files import check_writable
from specdec.cli.flags import FLAGS, MODELS, RULE, SAMPLING, TREE, dashed
from specdec.cli.parser import Parser, read_flags
from specdec.cli.reading import open_text
from specdec.model.names import check_place, draft_for
from specdec.model_settings import ModelSettings
from specdec.sampling_settings import Sampling
from specdec.schema import check_value, typed

REPORT = "report"
KINDS = {name: FLAGS[name].kind for name in (*MODELS, *TREE, *RULE, *SAMPLING, "no_draft")}
OF_TARGET = {"target", "dtype", "matmul_precision", "device", "allow_nonfinite", "tp_plan", "device_map"}
DRAFTING = tuple(name for name in (*MODELS, *TREE, *RULE) if name not in OF_TARGET)
NOT_A_TREE = ("topk", "steps", "num_draft_tokens", "sample_draft")  # what contradicts --tree, which is a whole tree
DECODE = ("generate", "serve")

# Commands, a flag, those that contradict it, and why.
CONTRADICTIONS = (
    (DECODE, "no_draft", (*DRAFTING, "adaptive", "recalibrate", "show_trees", "compare"), ""),
    (DECODE, "tree", NOT_A_TREE, ", which is a whole tree"),
    (DECODE, "compile", ("no_graphs",), ": compiled rounds are replayed"),
    (("generate",), "compile", ("adaptive",), " but in `specdec serve`: its rounds are eager"),
    (("generate",), "chat", ("json", "compare", "raw"), ""),
    (("generate",), "tp_plan", ("chat", "adaptive", "recalibrate", "compile"), ": it is for a process alone"),
    (("lab bench serve",), "rate", ("concurrency",), ": requests arrive in one of the two ways"),
    (("prove",), "server", ("draft", "self_test", "verifier", "tree"), ": a server has its own drafter"),
    (("prove",), "server", ("draws", "seed"), ": the server's texts are greedy"),
    (("prove",), "plain_server", ("dtype", "device", "tp_plan"), ": the servers compute the texts"),
    (("data regenerate",), "server", ("dtype", "matmul_precision", "device", "batch_size"),
     ": the server computes the answers"),
)  # fmt: skip
# Commands, flags, and the one that they need.
NEEDS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("generate",), ("limit",), "prompts"),
    (("generate",), ("logprobs",), "json"),
    (("prove", "data regenerate"), ("plain_server", "served_model_name", "requests"), "server"),
    (("tune tree",), ("num_draft_tokens",), "out"),
)
# Commands, and flags of which one at least is given; True if one alone.
ONE_OF: tuple[tuple[tuple[str, ...], tuple[str, ...], bool], ...] = (
    (("generate",), ("prompt", "prompts", "chat"), True),
    (("data count",), ("data", "text"), False),
    (("tune tree",), ("keep", "out"), False),
)
# Command, whether its flags are wrong, and what is said of them then.
WRONG: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("generate", lambda flags: flags.prompt is not None and not flags.prompt.strip(),
     "the prompt is empty; write something after --prompt"),
    ("generate", lambda flags: flags.recalibrate and not flags.adaptive
     and (flags.tree not in (None, "auto") or any(getattr(flags, name) for name in NOT_A_TREE)),
     "--recalibrate is for --tree auto and --adaptive, which choose by measured costs: leave it out"),
    ("generate", lambda flags: flags.batch_size > 1 and flags.show_trees,
     "--show-trees draws one sequence at a time: leave --batch-size at 1"),
    ("serve", lambda flags: flags.tree == "auto",
     "--tree auto chooses for one load, and a server has many: give --topk, --steps, or --adaptive NAME"),
    ("data regenerate", lambda flags: flags.samples > 1 and not flags.temperature,
     "--samples {samples} needs a --temperature: greedy answers to a prompt are all the same"),
    ("tune", lambda flags: flags.max_new_tokens < 2,
     "--max-new-tokens must be at least 2: the first token comes from the prefill"),
    ("tune tree", lambda flags: flags.topk > 36,  # the digits of acceptance.json
     "--topk must be at most 36, got {topk}"),
    ("tune tree", lambda flags: flags.keep and not (flags.draft and Path(flags.draft).is_dir()),
     "--keep writes into the drafter's folder: give it as --draft FOLDER"),
    ("lab bench serve", lambda flags: not 0 <= flags.range_ratio < 1,
     "--range-ratio must be at least 0 and below 1, got {range_ratio:g}"),
)  # fmt: skip
# Commands that need a drafter, given or bundled, and what else helps.
PLAIN = ", or --no-draft to decode plainly"
PAIRED = {"generate": PLAIN, "serve": PLAIN, "tune": "", "tune tree": "", "trace diagnose": ""}
SUFFIXES = {"data regenerate": (".jsonl",), "data count": (".json", ".pt")}
PACKAGES = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "lab bench serve": ("httpx2",)}


def check(name: str, args: argparse.Namespace, parser: Parser) -> None:
    """Raise ValueError for flags that contradict each other, and for missing files, models and packages."""
    _check_together(name, args, parser)
    flags = vars(args)
    if missing := [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]:
        raise ValueError(f"specdec {name} needs {', '.join(missing)}: pip install 'specdec[serve]'")
    if set(SAMPLING) <= set(flags):
        read_flags(Sampling, args)
    for command, wrong, message in WRONG:
        if name == command and wrong(args):
            raise ValueError(message.format(**flags))
    if name in PAIRED and not flags.get("no_draft"):
        read_flags(ModelSettings, args).check_pair(PAIRED[name])
    if name == "prove" and args.server is None:
        draft_for(args.target, args.draft)
    if flags.get("part") is not None:
        args.part = read_part(args.part)
    for flag, what in (("prompts", "prompt"), ("json_schema", "JSON schema"), ("settings", "settings")):
        if isinstance(flags.get(flag), Path) and not flags[flag].is_fifo():  # which can be read once only
            with open_text(flags[flag], what):
                pass
    for flag in ("out", "chart"):
        if flags.get(flag) is not None and not name.startswith("checkpoint"):
            if flag == "out" and name in SUFFIXES and args.out.suffix not in SUFFIXES[name]:
                raise ValueError(f"--out must end in {' or '.join(SUFFIXES[name])}, got {args.out}")
            if name != "data regenerate":  # which makes the folder
                check_writable(flags[flag])
    points = own.points()
    for flag in ("target", "draft"):
        given = flags.get(flag)
        for place in given if isinstance(given, list) else [given]:
            code, checkpoint = own.split(str(place))
            new = checkpoint is None and (own.is_own(place) or code in points)
            if place is not None and not str(place).startswith("ngram") and not new:
                check_place(place)
    tree = flags.get("tree")
    if isinstance(tree, str) and tree.isidentifier() and tree not in ("auto", *points) and not Path(tree).is_file():
        registry.settings("tree", tree)
    for folder in flags.get("traces") or ():
        if not (folder / "trace.json").is_file():
            raise ValueError(f"{folder} is not a trace: it has no trace.json")
    verifier = flags.get("verifier")
    if verifier is not None and not own.is_own(verifier) and verifier not in points:
        registry.settings("verifier", verifier)


def check_places(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if Hydra's settings name a file of prompts or data, or a target, that is not there.

    Empty names are left to `check_settings`, which names the setting.
    """
    groups = {name: group for name in ("data", "target") if isinstance(group := settings.get(name), Mapping)}
    data, target = (groups.get(name, {}).get("path") for name in ("data", "target"))
    for what, name in (("prompt", settings.get("prompts")), ("data", data)):
        if (
            isinstance(name, str)
            and name.strip()
            and (what == "prompt" or re.fullmatch(r"[^*?\[]+\.(jsonl?|txt|jsonl\.xz)", name))
        ):
            with open_text(Path(name), what):
                pass
    if isinstance(target, str) and target.strip():
        check_place(target)


def _check_together(name: str, args: argparse.Namespace, parser: Parser) -> None:
    def given(flag: str) -> bool:
        return getattr(args, flag, None) not in (None, False, (), [], parser.get_default(flag))

    for commands, flags, alone in ONE_OF:
        count = sum(map(given, flags))
        if name in commands and (not count or (alone and count > 1)):
            listed = f"{', '.join(map(dashed, flags[:-1]))} and {dashed(flags[-1])}"
            raise ValueError(f"give {'exactly' if alone else 'at least'} one of {listed}")
    for commands, flag, others, why in CONTRADICTIONS:
        for other in others if name in commands and given(flag) else ():
            if given(other):
                raise ValueError(f"{dashed(other)} contradicts {dashed(flag)}{why}")
    for commands, needy, needed in NEEDS:
        for flag in needy if name in commands and not given(needed) else ():
            if given(flag):
                raise ValueError(f"{dashed(flag)} needs {dashed(needed)}: give both")


def read_part(text: str) -> tuple[int, int]:
    """'2/4' -> (2, 4). Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"--part is K/N, such as 0/4 for the first of 4 parts, and not {text!r}")
    return int(found[1]), int(found[2])


def read_settings(path: str | os.PathLike) -> dict:
    """The entries of a settings file without its report. Raises ValueError, one sentence, for anything else."""
    entries = registry.read_yaml(path, "settings")
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds no settings: it is not a mapping of names to values")
    entries.pop(REPORT, None)
    for name, value in entries.items():
        if name not in KINDS:
            raise ValueError(f"{path}: unknown setting {name!r}; known are {', '.join(KINDS)}, and {REPORT}")
        kind: Any = KINDS[name] if KINDS[name] in (int, float, bool) else str
        check_value(typed(kind | None), value, f"{path}: {name}")
    return entries


def with_settings(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line in which --settings FILE is replaced by the flags in the file."""
    given = parser.parse_args(words)
    if getattr(given, "settings", None) is None:
        return given
    entries = read_settings(given.settings)
    pairs = [(flag, other) for names, flag, others, _ in CONTRADICTIONS if "generate" in names for other in others]
    pairs += [("draft", other) for other in MODELS if other not in ("draft", *OF_TARGET)]
    typed = {name for name in KINDS if getattr(given, name) not in (None, False)}
    gives_way = {other for flag, other in pairs if flag in typed}
    gives_way |= {flag for flag, other in pairs if other in typed and flag != "draft"}
    entries = {key: value for key, value in entries.items() if key not in gives_way}
    flags = []
    for name, value in entries.items():
        flag = dashed(name)
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:  # 0 is a value, though it is equal to False
            flags.append(f"{flag}={value}")
    try:
        known = vars(parser.parse_args(flags))
    except ValueError as error:  # of a flag that was not typed
        raise ValueError(f"{given.settings}: {error}") from None
    return parser.parse_args(words, argparse.Namespace(**known))
