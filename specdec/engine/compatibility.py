"""Which targets, drafters, tree policies and verifiers fit together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.adaptive import Policy
from specdec.engine.report import Reads
from specdec.model.language_model import LanguageModel
from specdec.schema import check, ranged, shown
from specdec.structs import Verifier

COPY = "give each engine its own, such as copy.deepcopy(drafter)"


@dataclass
class Settings:
    """Types and ranges of an engine's arguments other than its parts."""

    compile: bool | str
    overlap: bool | None
    compact: bool
    abstain: bool
    seed: int
    reads: Reads
    prefixes: int = ranged(0, 2**62)
    rows: int = ranged(1, 2**31)
    room: int = ranged(1, 2**31)
    part: int = ranged(0, 2**31)


def check_settings(graphs: object = None, **given: Any) -> None:
    """Raise ValueError for the first value that has not the type or range of its field in `Settings`."""
    check(Settings, given, "")
    if isinstance(given.get("compile"), str) and given["compile"] != "aside":
        raise ValueError(f"compile must be true, false or 'aside', got {shown(given['compile'])}")
    if not (isinstance(graphs, bool | None) or hasattr(graphs, "capture")):  # an `Executor`
        raise ValueError(f"graphs must be true or false, got {shown(graphs)}")


def check_parts(target: object, drafter: object, policy: object, verifier: object, adaptive: object) -> None:
    """Raise TypeError for a part of another kind, such as a name, a class, or a part in the place of another one."""
    for name, part in {"policy": policy, "verifier": verifier, "adaptive": adaptive}.items():
        if isinstance(part, type):
            raise TypeError(f"{name} is the class {part.__name__}: give one of its objects")
    if target is None or isinstance(target, str | Path | Drafter):
        raise TypeError(f"target must be a loaded target, see specdec.load_target, got {shown(target)}")
    if not isinstance(drafter, Drafter | None):
        raise TypeError(f"drafter must be a loaded drafter, see specdec.load_drafter, got {shown(drafter)}")
    if policy is not None and not hasattr(policy, "grow"):
        raise TypeError(f"policy must be a tree, see specdec.make_tree, got {shown(policy)}")
    if not callable(verifier) or not hasattr(verifier, "couples"):
        raise TypeError(f"verifier must be a specdec.verify.Rule, see specdec.make_verifier, got {shown(verifier)}")
    if not isinstance(adaptive, Policy | None):
        raise TypeError(f"adaptive must be a policy, whose names specdec.generate takes, got {shown(adaptive)}")
    if adaptive is not None and drafter is None:
        raise ValueError("an adaptive policy chooses draft trees, and without a drafter there are none")


def check_autocast(target: LanguageModel) -> None:
    """Raise ValueError under an autocast to another dtype than the target's, in which its caches are."""
    kind = target.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != target.dtype:
        names = (str(dtype).removeprefix("torch.") for dtype in (torch.get_autocast_dtype(kind), target.dtype))
        raise ValueError("torch.autocast to {} is on, and the target decodes in {}: decode outside it".format(*names))


def take(drafter: Drafter, engine: Any) -> None:
    """Let an engine use a drafter. Raises ValueError while another engine is in the middle of a generate with it."""
    if (other := drafter.user and drafter.user()) not in (None, engine) and other.generating:
        raise ValueError(f"this drafter is in the middle of another engine's generate: {COPY}")
    drafter.user = ref(engine)


def check_user(drafter: Drafter | None, engine: Any) -> None:
    """Raise ValueError if another engine has taken the drafter."""
    if drafter is not None and drafter.user() is not engine:
        raise ValueError(f"another engine has taken this drafter since the sequences were added: {COPY}")


def checked(target: LanguageModel, drafter: Drafter, policy: TreePolicy, verifier: Verifier) -> TreePolicy:
    """Return the policy, over the drafter's block if it takes marginals. Raises ValueError if parts do not fit."""
    children = f"this tree's nodes have up to {policy.topk} children: take topk 1"
    for what, part in (("target", target), ("draft model", drafter)):
        if part.chains_only and policy.topk > 1:
            raise ValueError(f"this {what} has recurrent layers, which take chains only, and {children}")
    policy = over_block(drafter, policy)
    if policy.steps > (most := drafter.deepest(policy.steps)):
        raise ValueError(f"steps is {policy.steps}, but this drafter guesses {most} tokens ahead at most")
    if policy.topk > drafter.vocab.size:
        raise ValueError(f"topk is {policy.topk}, but the draft vocabulary has {drafter.vocab.size} tokens only")
    if verifier.chains_only and policy.topk > 1:
        raise ValueError(f"{verifier} verifies chains only, and {children}")
    return policy


def over_block(drafter: Drafter, policy: TreePolicy) -> TreePolicy:
    """Return the policy, over the drafter's block if it takes marginals. Raises ValueError if there is no block."""
    if not policy.marginals:
        return policy
    if drafter.block is None:
        raise ValueError("a block tree takes drafters that guess a block at once, and this one drafts token by token")
    if drafter.conditioned:
        raise ValueError(
            "a block tree takes the slots of a block for independent, and this drafter's depend on the "
            "tokens drafted before them: take a dynamic tree, which drafts each child along its own path"
        )
    return cast(Any, policy).within(drafter.block)
