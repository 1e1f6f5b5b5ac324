"""The layout of drafters that nobody has published yet: the YAML that made them, and their parameters by name.

config.json holds `recipe`: the `_target_` of conf/drafter/NAME.yaml, a `create` function under `drafters`, and its
settings. Loading calls it again and fills every parameter. A new drafter needs no layout of its own until other
programs read it.
"""

import importlib
from pathlib import Path

from torch import Tensor, nn

from drafters.formats.fields import fill, read_ids
from drafters.vocab import DraftVocab
from specdec.checkpoint import write_folder

IDS = "draft_ids"


def build(config: dict, tensors: dict[str, Tensor], target, name: str) -> nn.Module:
    """A drafter from a parsed config and its tensors, refused unless every one of them fits."""
    recipe, vocab = dict(config["recipe"]), config.get("vocab_size")
    if vocab != target.config.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {vocab}, the target's is {target.config.vocab}")
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


def save(drafter: nn.Module, folder: Path, target) -> None:
    """Write the recipe, which whoever made the drafter left in `drafter.recipe`, and the parameters."""
    recipe = getattr(drafter, "recipe", None)
    if recipe is None:
        raise ValueError(f"{type(drafter).__name__} has no published layout and no recipe: set drafter.recipe")
    tensors = dict(drafter.named_parameters())
    if drafter.vocab.ids is not None:
        tensors[IDS] = drafter.vocab.ids
    config = {"recipe": recipe, "vocab_size": drafter.vocab.target_size, "hidden_size": target.config.hidden}
    write_folder(folder, config, tensors)
