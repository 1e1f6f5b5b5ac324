"""The points of a sweep: which drafter, which tree, and a key of all that the result depends on."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec import own
from specdec.acceptance import FILE
from specdec.api import load_drafter
from specdec.cli.revision import code_digest
from specdec.contracts import Drafter
from specdec.lab.models import read_entry, short_name
from specdec.model.language_model import LanguageModel
from specdec.model.names import SMALL_FILES, bundled, resolve
from specdec.model.weight_files import weight_files
from specdec.trees.base import WORDS, shape_in
from specdec.trees.spec import parse_tree

# The code that a point depends on: these packages without what only asks or shows, and of the lab what measures.
CODE = ("specdec", "specdec/drafters", "specdec/trees")
NOT_CODE = ("specdec/cli/", "specdec/generate", "specdec/__main__")
LAB = (
    "specdec/lab/sweep/benchmarks", "specdec/lab/sweep/points",
    "specdec/lab/sweep/sweep.", "specdec/lab/traces/diagnose", "specdec/lab/traces/metrics.", "specdec/lab/wrapped",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A drafter as a sweep's settings name it, with the settings of `specdec.load_drafter`."""

    name: str
    path: str
    token_map: str | None = None
    feedback: str | None = None

    @classmethod
    def read(cls, setting: str | dict, whole: bool = False) -> "Draft":
        """whole: where the setting gives no name, the whole path is it, and not its end (`short_name`)."""
        given = read_entry(setting, ("draft", "token_map", "feedback", "name"), "an entry of draft")
        path, token_map = bundled(given["draft"]), given.get("token_map")
        short = given["draft"] if whole else short_name(path)
        name = given.get("name") or f"{short}{' FR-Spec' if token_map else ''}"
        return cls(name, path, token_map and bundled(token_map), given.get("feedback"))

    def identity(self) -> dict:
        """What it drafts with, whatever the files are called."""
        token_map = self.token_map and _file_digest(Path(self.token_map))
        code, checkpoint = own.split(self.path)
        plain = self.path.split(":")[0] == "ngram" or (own.is_own(self.path) and checkpoint is None)
        weights = own.short(code) if plain else signature(self.path)
        weights = f"{weights} {own.digest(code)}" if own.is_own(code) else weights
        return {"weights": weights, "token_map": token_map, "feedback": self.feedback}

    def load(self, target: LanguageModel) -> Drafter:
        """Load the drafter for this target."""
        return load_drafter(self.path, target, token_map=self.token_map, feedback=self.feedback)


@dataclass
class SweepPoint:
    """One run of a sweep: a drafter with a tree, plain decoding, or the measuring of a drafter's best tree."""

    kind: str  # 'decode', or 'best_tree'
    draft: Draft | None  # None: plain decoding
    tree: str | None  # its text, of a tree that need not be buildable
    settings: dict  # all that the result depends on
    names: dict  # what the report calls it
    key: str = field(init=False)  # of kind and settings

    def __post_init__(self) -> None:
        """Set `key` to a digest of kind and settings."""
        described = json.dumps({"kind": self.kind} | self.settings, sort_keys=True)
        self.key = hashlib.sha256(described.encode()).hexdigest()[:16]


def tree_settings(tree: str) -> dict[str, int | bool | str | None]:
    """A tree among the settings of a point, on which keys depend. A chain has no num_draft_tokens there.

    A tree that is more than these numbers has a `shape`: its paths, or a digest of the user's own code.
    """
    if (shape := shape_in(tree, "(?:block )?")) is None:
        made = parse_tree(tree)
        text = f"{own.name_of(made)} {own.digest(made)}" if own.name_of(made) else made.text
        numbers = {name: getattr(made, name) for name in WORDS}
        return tree_settings(text) if shape_in(text, "(?:block )?") else numbers | {"shape": text}
    topk, steps, nodes = shape
    kind: dict[str, int | bool | str | None] = {"block": True} if tree.startswith("block") else {}
    return {"topk": topk, "steps": steps, "num_draft_tokens": None if topk == 1 else nodes} | kind


def signature(path: str) -> str:
    """A digest of a checkpoint's weights, configs, tokenizer and templates. Raises ValueError if there is none."""
    folder = resolve(path)
    files = {file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.name != FILE} | set(
        weight_files(folder)
    )
    digests = [[file.name, _file_digest(file)] for file in sorted(files)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def code_version() -> str:
    """A digest of the code that decoding and its metrics go through, and of torch's version."""
    digest = code_digest(CODE, lambda name: name.startswith(LAB) or not name.startswith((*NOT_CODE, "specdec/lab/")))
    return hashlib.sha256(f"{torch.__version__} {digest}".encode()).hexdigest()[:16]
