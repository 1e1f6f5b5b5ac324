"""Published layouts of draft checkpoints. A layout is recognised by its tensors, never by what a config claims.

A new layout is a file with a `Layout`, and its place in `FAMILIES`; a new family a file with a `Family` too.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from specdec.acceptance import read_acceptance
from specdec.contracts import Drafter
from specdec.drafters import draft_model, ngram
from specdec.drafters.formats import (
    dflash,
    dflash_layout,
    eagle,
    eagle3,
    eagle3_layout,
    medusa,
    mtp,
    mtp_inside,
    pard,
    peagle,
    recipe,
    speculators,
    vllm,
)
from specdec.drafters.formats.base import EMBEDDING, Family, Layout, Meaning, Tensors, differences, facts_of
from specdec.drafters.formats.maps import map_doubts, read_token_map
from specdec.drafters.layers import restrict
from specdec.model import checkpoint as weights
from specdec.model.archs import text_config
from specdec.model.checkpoint import (
    DRAFT_DTYPES,
    holds_int8,
    named_tensors,
    read_headers,
    read_pickle,
    read_tensors,
    write_folder,
)
from specdec.model.config_fields import DIAGNOSED, check_config
from specdec.model.layers import round_weights
from specdec.model.loader import is_transformers
from specdec.model.names import bundled, resolve
from specdec.model.weight_files import read_json
from specdec.ops.linear import has_int8
from specdec.schema import named_arguments, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.model.language_model import LanguageModel

# The layouts of each family, in the order in which they are tried: of two that fit, the more special comes first.
FAMILIES: dict[Family, tuple[Layout, ...]] = {
    recipe.FAMILY: (recipe.LAYOUT,),
    dflash.FAMILY: (
        dflash_layout.ZLAB,
        dflash_layout.DEEPSPEC,
        dflash_layout.SPECULATORS,
        dflash_layout.VLLM,
        dflash_layout.SGLANG,
    ),
    pard.FAMILY: (pard.LAYOUT,),
    peagle.FAMILY: (peagle.OWN, peagle.FLAT, peagle.SPECULATORS),
    eagle3.FAMILY: (
        eagle3_layout.OWN,
        eagle3_layout.PUBLISHED,
        vllm.EAGLE3,
        speculators.EAGLE3,
        eagle3_layout.MODELOPT_TRAINING,
        eagle3_layout.MODELOPT,
    ),
    eagle.FAMILY: (eagle.SPECULATORS, vllm.EAGLE, eagle.SGLANG, eagle.PUBLISHED),
    mtp.FAMILY: (*mtp_inside.LAYOUTS, mtp.LAYOUT),
    medusa.FAMILY: (vllm.MEDUSA, medusa.LAYOUT),
}
MAPS = ("d2t", "t2d", "draft_ids")  # small tensors that `describe` reads


@dataclass(frozen=True)
class Checkpoint:
    """A draft checkpoint without its spelling (`base`). With headers alone, all but `MAPS` is on the meta device."""

    path: str
    family: Family
    layout: Layout
    meaning: Meaning
    tensors: Tensors
    doubts: tuple[str, ...] = ()  # what it leaves open, or what others read otherwise
    nonfinite: tuple[str, ...] = ()  # which of the tensors that are read hold NaN or Inf

    def construct(self, target) -> Drafter:
        """A drafter for `target`; ValueError unless the checkpoint fits it."""
        with damaged(self.path):
            return self.family.construct(self.meaning, self.tensors, target, self.path)

    def refuse_nonfinite(self) -> None:
        """Raises ValueError that names the first of the tensors that hold NaN or Inf."""
        if self.nonfinite:
            raise ValueError(f"{self.path}: {self.nonfinite[0]}; {weights.ALLOWED}")

    def problems(self) -> list[str]:
        """What keeps it from loading with any target: tensors, numbers of the config, the map, NaN and Inf."""
        try:
            wrong = differences(self.family, self.meaning, self.tensors)
        except ValueError as error:
            wrong = [str(error)]
        return [*wrong, *self.family.faults(self.meaning, self.tensors), *self.nonfinite]

    def conventions(self) -> dict[str, str]:
        """Everything that is in force, in words."""
        named = {"family": self.family.title, "layout": self.layout.title}
        doubts = {"doubts": "; ".join(self.doubts)} if self.doubts else {}
        return named | self.family.describe(self.meaning, self.tensors) | doubts


def open_checkpoint(path: str | os.PathLike, headers: bool = False) -> Checkpoint:
    """Recognise and read a checkpoint folder or hub name, without a target.

    With `headers` no weights are stored, but each tensor is still checked for NaN and Inf.
    """
    folder = resolve(path)
    with damaged(path):
        return _open(folder, str(path), headers)


@contextmanager
def damaged(path: str | os.PathLike) -> Iterator[None]:
    """Raise ValueError, one sentence, for what a checkpoint of wrong types or sizes makes Python or torch raise."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, UnicodeError) as error:
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
        raise ValueError(f"{path}: a field of config.json or a tensor cannot be used: {reason:.200}") from error


def _open(folder: Path, path: str, headers: bool) -> Checkpoint:
    config = text_config(read_json(folder / "config.json"))  # heads inside a target that wraps its language model
    check_config(config, f"{path}: config.json", any_range=DIAGNOSED)
    held = read_headers(folder)
    family, layout = recognise(config, held, str(path))
    tensors = {name: tensor for name, tensor in held.items() if layout.wants(config, name)}
    read = {name for name in tensors if not headers or name.endswith(MAPS)}
    tensors |= dict(read_tensors(folder, only=read)) | _apart(folder, layout)
    meaning, loaded = layout.read(config, tensors, str(path))
    counted = {id(tensor) for name, tensor in loaded.items() if name != EMBEDDING or meaning.own_embedding}
    names = {name for name, tensor in tensors.items() if id(tensor) in counted}
    there = names if not headers else names - set(held)
    looked_at = chain(read_tensors(folder, only=names - there), ((name, tensors[name]) for name in sorted(there)))
    nonfinite = tuple(filter(None, starmap(weights.nonfinite, looked_at)))
    doubts = (*layout.doubts(config), *map_doubts(loaded))
    return Checkpoint(str(path), family, layout, meaning, loaded, doubts, nonfinite)


def _apart(folder: Path, layout: Layout) -> Tensors:
    """The tensors that a layout keeps in a pickle of their own."""
    if layout.apart is None or not (folder / layout.apart[0]).exists():
        return {}
    return named_tensors(read_pickle(folder / layout.apart[0]), folder / layout.apart[0])


def recognise(config: dict, tensors: Tensors, name: str) -> tuple[Family, Layout]:
    """The family and the layout of a checkpoint; ValueError if there is none that fits."""
    for family, layouts in FAMILIES.items():
        for layout in layouts:
            if layout.recognise(config, tensors):
                return family, layout
    signs = ", ".join(f"{family.sign} ({family.title})" for family in FAMILIES if family.sign)
    raise ValueError(f"{name} is not a drafter of a known layout: it has none of {signs}")


def find_layout(family: Family, name: str) -> Layout:
    """The layout of a family that has this name; ValueError if it has none."""
    layouts = {layout.name: layout for layout in FAMILIES[family]}
    if name not in layouts:
        raise ValueError(f"{family.title} has the layouts {', '.join(layouts)}, not {name!r}")
    return layouts[name]


@named_arguments
def load_drafter(
    path: "str | os.PathLike | PreTrainedModel",
    target: "LanguageModel",
    *,
    token_map: str | os.PathLike | None = None,
    feedback: str | None = None,
    dtype: torch.dtype | str | None = None,
    allow_nonfinite: bool = False,
) -> Drafter:
    """Load a frozen drafter for `target`, on its device. `requires_grad_(True)` makes it trainable.

    Args:
        path: Folder or hub name of a checkpoint, a language model, a transformers model, `ngram` or `ngram:suffix`.
            Your own code is `my.py:create`, and a checkpoint trained with it `my.py:create:CHECKPOINT`.
            `drafter.conventions` lists how a checkpoint was read.
        target: The target that the drafter was trained for.
        token_map: File of a token map (FR-Spec) that restricts the proposals.
        feedback: 'pre' or 'post' the norm, for MTP heads inside the target's checkpoint.
        dtype: 'fp32', 'bf16', 'fp16' or 'int8' (in products, on a CPU). None: int8 if the file is, else the target's.
        allow_nonfinite: Accept weights with NaN or Inf.

    Raises:
        ValueError: The checkpoint is not a drafter, is damaged, or does not fit the target.
    """
    _check_arguments(path, target, dtype)
    dtype = DRAFT_DTYPES[dtype] if isinstance(dtype, str) else dtype
    drafter = _without_a_layout(path, target, allow_nonfinite)
    if drafter is not None:
        if token_map is not None or feedback is not None or dtype is not None:
            raise ValueError("token_map, feedback and dtype are for drafters that learn, not for n-grams and models")
        return drafter
    checkpoint = open_checkpoint(cast("str | os.PathLike", path))
    if not allow_nonfinite:
        checkpoint.refuse_nonfinite()
    if feedback is not None:
        if checkpoint.layout not in mtp_inside.LAYOUTS:
            raise ValueError(f"{path}: its own config says what it feeds back; feedback is for MTP heads in a target")
        meaning = cast(Any, checkpoint.meaning)
        checkpoint = replace(checkpoint, meaning=replace(meaning, forward=replace(meaning.forward, feedback=feedback)))
    drafter = checkpoint.construct(target)
    for doubt in checkpoint.doubts:
        warnings.warn(f"{path}: {doubt}", stacklevel=2)
    drafter.conventions = checkpoint.conventions()
    drafter.acceptance = read_acceptance(resolve(checkpoint.path))
    if token_map is not None:
        restrict(drafter, cast(Any, read_token_map(Path(bundled(token_map)), target.vocab).ids))
        drafter.acceptance = None  # it was measured with all tokens
        drafter.conventions["token map"] = f"{token_map}, which leaves {drafter.vocab.size} tokens to propose"
    rounds = dtype == torch.int8 or (dtype is None and holds_int8(resolve(checkpoint.path)) and has_int8(target.device))
    drafter.to(device=target.device, dtype=target.dtype if rounds else dtype or target.dtype)
    if not allow_nonfinite and not checkpoint.nonfinite:
        for name, weight in drafter.named_parameters():
            if found := weights.nonfinite(name, weight):  # a value was finite in the file and is too large here
                raise ValueError(f"{path}: in {weight.dtype} {found}; choose a wider dtype, or {weights.ALLOWED}")
    drafter.eval().requires_grad_(False)
    if rounds:
        round_weights(drafter)
        drafter.conventions["products"] = "with weights rounded to int8"
    return drafter


def _check_arguments(path: object, target: object, dtype: object) -> None:
    """Raise TypeError for arguments in another order, and ValueError for a dtype that there is not."""
    if target is None or isinstance(target, str | os.PathLike | Drafter):
        raise TypeError(f"target must be a loaded target, see specdec.load_target, got {shown(target)}")
    if not isinstance(path, str | os.PathLike) and not is_transformers(path):
        raise TypeError(f"path must be a folder or a name such as demo/mtp, got {shown(path)}")
    if not isinstance(dtype, torch.dtype | None) and dtype not in DRAFT_DTYPES:
        raise ValueError(f"dtype of a drafter must be one of {', '.join(sorted(DRAFT_DTYPES))}, got {shown(dtype)}")


def _without_a_layout(path: "str | os.PathLike | PreTrainedModel", target, allow_nonfinite: bool) -> Drafter | None:
    """The drafter that is no checkpoint of a family: n-grams, or a draft model; None if it is one."""
    if not isinstance(path, str | os.PathLike):
        return draft_model.create(target, path=cast(Any, path), allow_nonfinite=allow_nonfinite)
    if (named := ngram.from_name(str(path), target) or recipe.from_code(str(path), target)) is not None:
        return named
    folder = resolve(path)
    config, held = text_config(read_json(folder / "config.json")), read_headers(folder)
    more = any(layout.recognise(config, held) for layout in (*mtp_inside.LAYOUTS, pard.LAYOUT))  # than a language model
    if more or not draft_model.is_language_model(config, held):
        return None
    return draft_model.create(target, path=path, allow_nonfinite=allow_nonfinite)


def family_of(drafter: Drafter) -> Family:
    """The family that a drafter is saved as."""
    return next((family for family in FAMILIES if family.drafter is type(drafter)), recipe.FAMILY)


def save_drafter(drafter: Drafter, folder: str | os.PathLike, target=None) -> None:
    """Write a drafter atomically as a folder, in its family's layout, or in the first layout that can express it."""
    layout, config, tensors = as_saved(drafter, target)
    write_folder(Path(folder), config, tensors, apart=layout.apart)


def as_saved(drafter: Drafter, target=None) -> tuple[Layout, dict, Tensors]:
    """Return the layout of a saved drafter, the config and the tensors. ValueError if no layout can express it."""
    family = family_of(drafter)
    meaning, tensors = family.dismantle(drafter, target)
    usual, refused = find_layout(family, family.saved_as), []
    for layout in (usual, *(other for other in FAMILIES[family] if other is not usual)):
        try:
            return layout, *layout.write(meaning, tensors, None if target is None else facts_of(target))
        except ValueError as reason:
            refused.append(f"{layout.name}: {reason}")
    raise ValueError(f"no layout can express this drafter: {'; '.join(refused)}")
