"""What a drafter proposed along known texts, and the files that keep it.

Along a fixed text the tree at every position depends on the text before it alone. So the candidates that the drafter
proposes there, recorded once, hold every tree that is a choice among them.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.cli.files import replace_folder
from specdec.cli.reading import read_model
from specdec.lab.replay.header import Header
from specdec.model.weight_files import read_json
from specdec.structs import Sampling
from specdec.trees.dynamic import Pool

FORMAT, VERSION = "specdec superset", 1
FILES = HEADER, TENSORS = "superset.json", "superset.safetensors"


@dataclass
class RecordedText:
    """One text of the target. Its first token comes from the prefill; a round can begin at every other one."""

    question: int  # which of the prompts it answers
    prompt: list[int]
    tokens: list[int]
    beyond: list[int]  # what the target says behind the end, `steps` tokens: a round accepts of them and is cut off

    @property
    def roots(self) -> int:
        """Places at which a round can begin, which is also the number of tokens that rounds emit."""
        return len(self.tokens) - 1

    def following(self, steps: int) -> Tensor:
        """[roots,steps]: the tokens behind each root."""
        ahead = torch.tensor(self.tokens[1:] + self.beyond, dtype=torch.int32)
        return ahead.unfold(0, steps, 1)[: self.roots]


@dataclass
class Candidates:
    """What was recorded of one vocabulary and one topk W: R roots, M candidates each, all on the CPU."""

    tokens: Tensor  # [R,M] int32; these three are a `Pool`
    scores: Tensor  # [R,M] fp32
    parents: Tensor  # [R,M] int32
    # [R,D,W] the target's filtered probability of the candidates for depth d behind the text's token of depth d-1.
    # 0 for those that end a text and where there are none; None for greedy texts, where one of them is certain, and for
    # coupled children, which know the noise: given that, the text itself is certain.
    p: Tensor | None = None

    @property
    def pool(self) -> Pool:
        return Pool(self.tokens, self.scores, self.parents)


@dataclass
class Marginals:
    """Of a block whose slots do not depend on each other's tokens: the K best tokens of each slot. Every tree over the
    block is a choice among them. R roots, D slots, all on the CPU."""

    gains: Tensor  # [R,D,K] fp32 log-probabilities, best first
    tokens: Tensor  # [R,D,K] int32 target ids
    p: Tensor | None = None  # [R,D,K] as `Candidates.p`


@dataclass
class AlongText:
    """What the drafter says of the text itself, its own output fed back behind each root: R roots, D steps."""

    ranks: Tensor  # [R,D] int32: how many children stand before the text's token; NOWHERE if it has no such child
    q: Tensor | None = (
        None  # [R,D] probability of the text's token under the drafter, filtered as the target's; None: greedy
    )
    levels: Tensor | None = None  # [R] `DraftState.levels`; None: the drafter always has something to propose


PARTS = {"candidates": Candidates, "along": AlongText, "marginals": Marginals}  # of a recording, mappings of these


@dataclass
class Recording:
    """Texts, and what a drafter proposed at each of their R roots, text by text. `lab.replay.record` makes it."""

    steps: int  # D: no tree may be deeper
    max_new_tokens: int
    sampling: Sampling
    texts: list[RecordedText]
    candidates: dict[tuple[str, int], Candidates]  # by vocabulary, '' being the drafter's own, and topk
    along: dict[str, AlongText]  # by vocabulary
    p: Tensor | None  # [R,D] filtered probability of the text's tokens behind each root; None: greedy
    marginals: dict[str, Marginals] = field(default_factory=dict)  # by vocabulary; empty for other drafters
    settings: dict = field(default_factory=dict)  # what was recorded of what, in values that JSON has

    def save(self, folder: Path) -> None:
        """Write a folder, whole or not at all. It replaces an older superset in its place.

        Raises ValueError if the folder holds anything else."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "steps": self.steps,
            "max_new_tokens": self.max_new_tokens,
            "sampling": asdict(self.sampling),
            **{part: list(getattr(self, part)) for part in PARTS},
            "texts": [asdict(text) for text in self.texts],
        }

        def fill(aside: Path) -> None:
            save_file({name: t.contiguous() for name, t in self._tensors().items()}, aside / TENSORS)
            (aside / HEADER).write_text(json.dumps(header) + "\n", encoding="utf-8")

        replace_folder(Path(folder), fill, FILES, "a superset")

    def _tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor | None] = {"p": self.p}
        for part in PARTS:
            for number, recorded in enumerate(getattr(self, part).values()):
                named |= {f"{part}.{number}.{name}": t for name, t in vars(recorded).items()}
        return {name: t for name, t in named.items() if t is not None}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ValueError, one sentence, if there is no superset, or one of another version, or a damaged one."""
        folder = Path(folder)
        if not (folder / HEADER).is_file():
            raise ValueError(f"{folder} is not a superset: it has no {HEADER}")
        content = read_json(folder / HEADER)
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{folder / HEADER} is not a superset of version {VERSION}: record it anew")
        header = read_model(Header, content, str(folder / HEADER))
        told = dict(header) | {"texts": [RecordedText(**dict(text)) for text in header.texts]}
        roots = sum(text.roots for text in told["texts"])
        try:
            tensors = load_file(folder / TENSORS)
            for part, kind in PARTS.items():
                keys = enumerate(told[part])
                told[part] = {key: kind(**_part(tensors, f"{part}.{number}.")) for number, key in keys}
        except (OSError, SafetensorError, TypeError) as error:
            raise ValueError(f"{folder} is damaged, record it anew: {error}") from None
        if wrong := [name for name, tensor in tensors.items() if tensor.shape[:1] != (roots,)]:
            raise ValueError(f"{folder / TENSORS}: tensor {wrong[0]} must have {roots} rows, as {HEADER} says")
        return cls(**told, p=tensors.get("p"))


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
