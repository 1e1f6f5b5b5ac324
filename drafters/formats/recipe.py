"""The layout of drafters without a published one: the YAML that made them, and their parameters by name.

config.json holds `recipe`: the `_target_` of conf/drafter/NAME.yaml, which is a `create` function under
`specdec.drafters`, and its settings. Loading calls that function again and fills every parameter. A new drafter needs
no layout of its own until other programs read it. A drafter of the user's own code has the name of that code as
`_target_` (`specdec.own`). Its code is run only if the user has passed the file, or has installed the package.
"""

import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from specdec import own
from specdec.contracts import Drafter
from specdec.drafters.formats.base import Family, Layout, Meaning, Sizes, Tensors, check_target
from specdec.drafters.formats.parts import fill
from specdec.drafters.vocab import DraftVocab

CREATE = re.compile(r"specdec\.drafters\.[a-z]\w*\.create")
IDS = "draft_ids"


@dataclass(frozen=True)
class RecipeMeaning(Meaning):
    """The config. Only the function that it names knows what it means."""

    config: dict


class RecipeFamily(Family):
    """A recipe states everything, so there are no misreadings."""

    title = "a drafter saved with its settings"
    saved_as = "recipe"
    reads = 0
    knows_tensors = False
    optional = (IDS,)

    def construct(self, meaning: RecipeMeaning, tensors: Tensors, target, name: str) -> Drafter:
        """Make a drafter again by its recipe. Refused unless every tensor fits."""
        config = meaning.config
        recipe = dict(config["recipe"])
        check_target(self.sizes(meaning), (target.config.hidden, target.vocab), name)
        named = str(recipe.pop("_target_", ""))
        create = _creator(named, name)
        try:
            drafter = create(target, vocab=DraftVocab(target.vocab, tensors.get(IDS)), **recipe)
        except (TypeError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{name}: config.json: recipe does not fit {named}: {why}") from None
        fill(dict(drafter.named_parameters()), tensors, name, named, self.optional)
        drafter.recipe = config["recipe"]
        return drafter

    @override
    def sizes(self, meaning: RecipeMeaning) -> Sizes:
        return meaning.config.get("hidden_size"), meaning.config.get("vocab_size")

    def dismantle(self, drafter: Drafter, target) -> tuple[RecipeMeaning, Tensors]:
        """Raises ValueError for a drafter without a recipe, which its maker leaves in `drafter.recipe`."""
        if drafter.recipe is None:
            raise ValueError(f"{type(drafter).__name__} has no published layout and no recipe: set drafter.recipe")
        tensors: Tensors = dict(drafter.named_parameters())
        if scalars := [name for name, parameter in tensors.items() if not parameter.dim()]:
            raise ValueError(f"the parameter {scalars[0]} has no dimension, which is not saved: give it the shape [1]")
        if drafter.vocab.ids is not None:
            tensors[IDS] = drafter.vocab.ids
        sizes = {"vocab_size": drafter.vocab.target_size, "hidden_size": target.config.hidden}
        return RecipeMeaning({"recipe": drafter.recipe, **sizes}), tensors

    def expected(self, meaning: RecipeMeaning, tensors: Tensors) -> dict[str, torch.Size]:
        """The tensors that are there: only the recipe, with a target, knows which ones ought to be."""
        return {name: tensor.shape for name, tensor in tensors.items() if name != IDS}

    @override
    def describe(self, meaning: RecipeMeaning, tensors: Tensors) -> dict[str, str]:
        return {"recipe": ", ".join(f"{name} {value}" for name, value in meaning.config["recipe"].items())}

    @override
    def faults(self, meaning: RecipeMeaning, tensors: Tensors) -> list[str]:
        return []


def _creator(named: str, name: str) -> Callable:
    """Return the function that a recipe names, of the checkpoint `name`.

    A checkpoint must not choose which code runs: the user must have installed the code or passed it.
    """
    # Checkpoints of specdec 0.1 name `drafters.NAME.create`.
    module, _, function = (f"specdec.{named}" if named.startswith("drafters.") else named).rpartition(".")
    if CREATE.fullmatch(f"{module}.{function}"):
        try:
            return pkgutil.resolve_name(f"{module}:{function}")
        except (ImportError, AttributeError):
            raise ValueError(f"{name}: there is no {module}.{function} in this version") from None
    if own.is_own(named):
        part = own.passed(named)
        if part is None:
            raise ValueError(
                f"{name} was trained with {named}, and code that a checkpoint names is not run: pass your copy of the "
                f"file too, as {named}:{own.split(name)[1] or name}"
            )
        return part
    if named.isidentifier() and (part := own.find("drafter", named)) is not None:
        return part
    raise ValueError(
        f"{name}: the recipe's _target_ must be the function `create` of a file in drafters/, your own FILE.py:NAME or "
        f"a drafter of an installed package, got {named}"
    )


def from_code(path: str, target) -> Drafter | None:
    """The drafter that the user's own code makes anew; None for a checkpoint."""
    code, checkpoint = own.split(path)
    fresh = checkpoint is None if own.is_own(path) else path.isidentifier() and not Path(path).exists()
    part = own.find("drafter", code) if fresh else None
    if part is None:
        return None
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        drafter = own.make(code, part, Drafter, target)
    drafter.conventions = {"family": f"made by {code}"}
    return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


LAYOUT = Layout(
    "recipe",
    "ours: the YAML that made the drafter, and its parameters",
    recognise=lambda config, tensors: isinstance(config.get("recipe"), dict),
    read=lambda config, tensors, name: (RecipeMeaning(config), tensors),
    write=lambda meaning, tensors, target: (meaning.config, tensors),
)
FAMILY = RecipeFamily()
