"""What a layout and a family are, and the parts that several of them read alike.

A *family* (EAGLE-3, EAGLE-1/2, ...) is one forward; a *layout* is one way to spell its checkpoints. Reading takes the
spelling away: what stays is a `meaning`, a dataclass of the family in words that mean one thing, and the tensors under
the family's published names. Building a drafter, saying what is in force, writing another layout and trying another
reading all start from there, so a convention is interpreted in one place.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.layers import DraftShape
from drafters.vocab import DraftVocab
from specdec.model.layers import Rope

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TargetFacts:
    """What a layout states about the target that a drafter belongs to."""

    name: str
    architectures: tuple[str, ...]
    layers: int


def facts_of(target) -> TargetFacts | None:
    """Of a loaded target, or of none."""
    return None if target is None else TargetFacts(target.name, (), target.config.layers)


@dataclass(frozen=True)
class Layout:
    """One spelling of a family's checkpoints.

    recognise(config, tensors): is a checkpoint spelled so? tensors may be on the meta device. read(config, tensors,
    name) -> meaning, tensors by the family's names. write(meaning, tensors, target) -> config, tensors as spelled here;
    ValueError for what the layout cannot say.
    """

    name: str
    title: str
    recognise: Callable[[dict, Tensors], bool]
    read: Callable[[dict, Tensors, str], tuple[Any, Tensors]]
    write: Callable[[Any, Tensors, TargetFacts | None], tuple[dict, Tensors]]
    shares_head: bool = False  # a checkpoint without a head means the target's
    wants: Callable[[dict, str], bool] = lambda config, name: True  # which tensors belong to the drafter


@dataclass(frozen=True)
class Reading:
    """Another way to read a checkpoint: what it would be declared as, and its tensors as that reading has them."""

    name: str
    meaning: Any
    tensors: Tensors


class Family(Protocol):
    """A module of this package: what can be done with a checkpoint once its spelling is gone."""

    TITLE: str

    def construct(self, meaning, tensors: Tensors, target, name: str):
        """A drafter, refused unless every tensor fits the meaning and the meaning the target."""

    def expected(self, meaning, tensors: Tensors) -> dict[str, torch.Size]:
        """Names and shapes that a checkpoint of this meaning must hold, by the family's names."""

    def describe(self, meaning, tensors: Tensors) -> dict[str, str]:
        """Every convention in force, in words; tensors may be on the meta device, but for d2t and t2d."""

    def readings(self, meaning, tensors: Tensors, target) -> list[Reading]:
        """The misreadings that are plausible for this family."""

    def save(self, drafter, folder: Path, target=None) -> None:
        """Write a drafter in the layout that we prefer for the family."""


def read_vocab(tensors: Tensors, size: int, name: str) -> DraftVocab:
    """The map d2t, checked against t2d: offsets and absolute ids look alike and draft nothing when confused."""
    if "d2t" not in tensors:
        return DraftVocab(size)
    d2t = tensors["d2t"].long()
    ids = torch.arange(len(d2t)) + d2t
    known = tensors["t2d"].nonzero().squeeze(-1) if "t2d" in tensors else None
    fits = ids.min() >= 0 and ids.max() < size and len(ids.unique()) == len(ids)
    if not fits or (known is not None and not torch.equal(known, ids.sort().values)):
        absolute = known is None or torch.equal(known, d2t.sort().values)
        hint = "; they look like target ids" if absolute and d2t.min() >= 0 and d2t.max() < size else ""
        raise ValueError(
            f"{name}: d2t and t2d name different tokens, or none of the target's; d2t must hold target id minus draft "
            f"id{hint}"
        )
    return DraftVocab(size, ids)


def describe_shape(shape: DraftShape) -> dict[str, str]:
    grouped = f", {shape.kv_heads} for keys and values" if shape.kv_heads != shape.heads else ""
    return {
        "layer": f"hidden {shape.hidden}, MLP {shape.intermediate}, {shape.heads} heads of {shape.head_dim}{grouped}",
        "rope": describe_rope(shape.rope),
        "context": f"{shape.context} positions",
        "rms_norm_eps": f"{shape.eps:g}",
    }


def describe_rope(rope: Rope) -> str:
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"theta {rope.theta:g}{scaling}"


def describe_vocab(tensors: Tensors, vocab: int, draft_vocab: int) -> str:
    """Size, coverage and kind of the vocabulary map."""
    if "d2t" not in tensors:
        return f"all {vocab} target tokens, no map"
    share = f"{draft_vocab} of {vocab} target tokens ({draft_vocab / vocab:.1%})"
    try:
        ids = read_vocab(tensors, vocab, "").ids
    except ValueError as error:
        return f"{share}; BROKEN: {str(error).removeprefix(': ')}"
    order = "ascending" if torch.equal(ids, ids.sort().values) else "not ascending"
    also = "agrees with t2d" if "t2d" in tensors else "no t2d"
    return f"{share}; d2t holds offsets, ids {ids.min()} to {ids.max()} {order}, {also}"


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d [V] bool from the offsets d2t [U]."""
    return DraftVocab(size, torch.arange(len(d2t)) + d2t.long()).contains()


def rope_readings(meaning, tensors: Tensors, target) -> list[Reading]:
    """The two ropes that a config without one, or with a copied one, is taken to mean."""
    seen, out = {meaning.shape.rope}, []
    for name, rope in (("the target's rope", target.config.rope), ("rope as where none is stated", Rope())):
        if rope not in seen:
            seen.add(rope)
            shape = dataclasses.replace(meaning.shape, rope=rope)
            words = f"{name}, {describe_rope(rope)}"
            out.append(Reading(words, dataclasses.replace(meaning, shape=shape), tensors))
    return out


def tap_readings(meaning, tensors: Tensors, target) -> list[Reading]:
    """For families that read one hidden state: the last, after the final norm, or the one before it."""
    last = target.config.layers
    other = last - 1 if meaning.tap in (None, last) else last
    return [Reading(f"taps [{other}]", dataclasses.replace(meaning, tap=other), tensors)]


def check_target(hidden: int, vocab: int, target, name: str) -> None:
    """Raise ValueError, with the two numbers, unless hidden size and vocabulary are the target's."""
    wanted = target.config
    if hidden != wanted.hidden:
        raise ValueError(f"{name}: the drafter's hidden size is {hidden}, the target's is {wanted.hidden}")
    if vocab != wanted.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {vocab}, the target's is {wanted.vocab}")


def differences(family: Family, meaning, tensors: Tensors) -> list[str]:
    """What keeps a checkpoint from loading strictly: tensors that are missing, left over or of another shape, by the
    family's names."""
    wanted = family.expected(meaning, tensors)
    extra = sorted(set(tensors) - set(wanted) - {"d2t", "t2d", "embed_tokens.weight"})
    return (
        [f"{name} is missing" for name in sorted(set(wanted) - set(tensors))]
        + [f"{name} is left over" for name in extra]
        + [
            f"{name} has shape {list(tensors[name].shape)}, the config asks for {list(shape)}"
            for name, shape in sorted(wanted.items())
            if name in tensors and tensors[name].shape != shape
        ]
    )
