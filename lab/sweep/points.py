"""The points of a sweep: which drafter, which tree, and a key of all that the result depends on."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from lab.sweep.compare import place
from specdec.api import load_drafter
from specdec.contracts import Drafter
from specdec.model.checkpoint import SMALL_FILES, resolve, weight_files
from specdec.model.target import Target

# What a point depends on: these packages, but for what only asks or shows, and of the lab the modules that measure.
CODE = ("specdec", "drafters", "trees", "lab")
NOT_CODE = ("specdec/cli/", "specdec/generate")
LAB = {"lab/sweep/benchmarks", "lab/sweep/points", "lab/sweep/sweep", "lab/trace/diagnose", "lab/trace/metrics"}


@dataclass(frozen=True)
class Shape:
    """A tree in SGLang's words; num_draft_tokens None where topk and steps say it (chains)."""

    topk: int
    steps: int
    num_draft_tokens: int | None = None


@dataclass(frozen=True)
class Draft:
    """A drafter as a sweep's settings name it: see `specdec.load_drafter`."""

    name: str
    path: str
    token_map: str | None = None
    feedback: str | None = None

    @classmethod
    def read(cls, setting: str | dict) -> "Draft":
        given = {"draft": setting} if isinstance(setting, str) else dict(setting)
        unknown = set(given) - {"draft", "token_map", "feedback", "name"}
        if unknown or not isinstance(given.get("draft"), str):
            wrong = f"has the unknown field {min(unknown)}" if unknown else "lacks the field draft"
            raise ValueError(f"an entry of draft {wrong}; known are draft, token_map, feedback, name")
        path, token_map = place(given["draft"]), given.get("token_map")
        name = given.get("name") or "".join([Path(path).name, " FR-Spec" if token_map else ""])
        return cls(name, path, token_map and place(token_map), given.get("feedback"))

    def identity(self) -> dict:
        """Of what it drafts with, whatever the files are called."""
        token_map = self.token_map and _file_digest(Path(self.token_map))
        weights = self.path if self.path.split(":")[0] == "ngram" else fingerprint(self.path)
        return {"weights": weights, "token_map": token_map, "feedback": self.feedback}

    def load(self, target: Target) -> Drafter:
        return load_drafter(self.path, target, token_map=self.token_map, feedback=self.feedback)


@dataclass
class Point:
    """kind: 'decode' (plainly if there is no drafter) or 'best_tree'. `settings` is all that the result depends on,
    `names` what the report calls it."""

    kind: str
    draft: Draft | None
    shape: Shape | None
    settings: dict
    names: dict
    key: str = field(init=False)

    def __post_init__(self) -> None:
        told = json.dumps({"kind": self.kind} | self.settings, sort_keys=True)
        self.key = hashlib.sha256(told.encode()).hexdigest()[:16]


def grid(topk: Iterable[int], steps: Iterable[int], num_draft_tokens: Iterable[int | None]) -> list[Shape]:
    """Every combination, in order and once. A chain (topk 1) has steps + 1 tokens, whatever num_draft_tokens says."""
    shapes = [Shape(k, d, None if k == 1 else n) for k, d, n in itertools.product(topk, steps, num_draft_tokens)]
    return list(dict.fromkeys(shapes))


def fingerprint(path: str) -> str:
    """Of a checkpoint: its weights, configs, tokenizer and templates, byte by byte. ValueError if there is none."""
    folder = resolve(path)
    files = {file for pattern in SMALL_FILES for file in folder.glob(pattern)} | set(weight_files(folder))
    digests = [[file.name, _file_digest(file)] for file in sorted(files)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def code_version() -> str:
    """Of the code that decoding and its metrics go through, and of torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in CODE:
        root = Path(find_spec(package).origin).parent
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root.parent).with_suffix("").as_posix()
            if name in LAB or not name.startswith((*NOT_CODE, "lab/")):
                digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
