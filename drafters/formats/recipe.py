"""The layout of drafters that nobody has published yet: the YAML that made them, and their parameters by name.

config.json holds `recipe`: the `_target_` of conf/drafter/NAME.yaml, a `create` function under `drafters`, and its
settings. Loading calls it again and fills every parameter. A new drafter needs no layout of its own until other
programs read it.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from drafters.formats.base import Layout, Reading, TargetFacts, Tensors
from drafters.formats.fields import fill, read_ids
from drafters.vocab import DraftVocab
from specdec.model.checkpoint import write_folder

TITLE = "a recipe"
IDS = "draft_ids"


@dataclass(frozen=True)
class RecipeMeaning:
    """The config: what it means is known to the function that it names."""

    config: dict


def construct(meaning: RecipeMeaning, tensors: Tensors, target, name: str) -> nn.Module:
    """A drafter, made anew by its recipe, refused unless every tensor fits."""
    config = meaning.config
    recipe, vocab = dict(config["recipe"]), config.get("vocab_size")
    if vocab != target.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {vocab}, the target's is {target.vocab}")
    if config.get("hidden_size") != target.config.hidden:
        raise ValueError(
            f"{name}: the drafter's hidden size is {config.get('hidden_size')}, the target's is {target.config.hidden}"
        )
    module, _, function = str(recipe.pop("_target_", "")).rpartition(".")
    if not module.startswith("drafters."):  # a checkpoint must not choose what code runs
        raise ValueError(f"{name}: the recipe's _target_ must be a function under `drafters`, got {module}.{function}")
    try:
        create = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        raise ValueError(f"{name}: there is no {module}.{function} in this version") from None
    drafter = create(target, vocab=DraftVocab(vocab, read_ids(tensors, IDS)), **recipe)
    fill({key: (p, 0, p.shape[0]) for key, p in drafter.named_parameters()}, tensors, name, module, aside=(IDS,))
    drafter.recipe = config["recipe"]
    return drafter


def recognise(config: dict, tensors: Tensors) -> bool:
    return isinstance(config.get("recipe"), dict)


def read(config: dict, tensors: Tensors, name: str) -> tuple[RecipeMeaning, Tensors]:
    return RecipeMeaning(config), tensors


def write(meaning: RecipeMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    return meaning.config, tensors


def expected(meaning: RecipeMeaning, tensors: Tensors) -> dict[str, torch.Size]:
    """What is there: only the recipe, with a target, knows what ought to be."""
    return {name: tensor.shape for name, tensor in tensors.items() if name != IDS}


def describe(meaning: RecipeMeaning, tensors: Tensors) -> dict[str, str]:
    """The recipe, as it stands."""
    return {"recipe": ", ".join(f"{name} {value}" for name, value in meaning.config["recipe"].items())}


def readings(meaning: RecipeMeaning, tensors: Tensors, target) -> list[Reading]:
    return []


def save(drafter: nn.Module, folder: Path, target) -> None:
    """Write the recipe, which whoever made the drafter left in `drafter.recipe`, and the parameters."""
    recipe = drafter.recipe
    if recipe is None:
        raise ValueError(f"{type(drafter).__name__} has no published layout and no recipe: set drafter.recipe")
    tensors = dict(drafter.named_parameters())
    if drafter.vocab.ids is not None:
        tensors[IDS] = drafter.vocab.ids
    config = {"recipe": recipe, "vocab_size": drafter.vocab.target_size, "hidden_size": target.config.hidden}
    write_folder(folder, config, tensors)


LAYOUTS = (Layout("recipe", "ours: the YAML that made the drafter, and its parameters", recognise, read, write),)
