"""Calls of drafters, trees and verifiers that are the user's own, and checks of what they return.

A wrong return value would change the text, or write beyond a cache, without an error.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import own
from specdec.contracts import Drafter, DraftState, TreePolicy
from specdec.schema import shown
from specdec.structs import DraftTree, Verdict, Verifier

CHECKED = 64  # calls of each kind


class Parts:
    """Calls a round's parts. An error in the user's own code is one sentence that names the part (`own.blamed`).

    What such code returns is checked in its first `CHECKED` calls, so that later rounds take the time that the part
    takes. On a GPU and in captured rounds only the first call is, because a check waits for the device.
    """

    def __init__(self, drafter: Any, policy: TreePolicy | None, verifier: Verifier):
        """Find which parts are the user's own."""
        self.drafter, self.verifier = drafter, verifier
        self.names = own.name_of(drafter), own.name_of(policy), own.name_of(verifier)
        self.captured, self.calls = False, Counter[str]()

    def state(self, absorb: Callable[..., DraftState], *given: Any) -> DraftState:
        """Return the state of `Drafter.extend` or `Drafter.admit` for these arguments."""
        if not self.names[0]:
            return absorb(*given)
        # Copies, so that the text does not change if the drafter writes to the tokens.
        tensors = [x.clone() if isinstance(x, Tensor) and not x.is_floating_point() else x for x in given]
        rows = next(len(x) for x in tensors if isinstance(x, Tensor))
        return self._call("drafting", self.names[0], absorb, tensors, check_state, self.drafter, rows)

    def grow(self, policy: TreePolicy, *given: Any, levels: Tensor | None) -> DraftTree:
        """Return the tree that `policy.grow` draws for these arguments. levels: as for `Round.play`."""
        if not (name := self.names[1] or self.names[0]):
            return policy.grow(self.drafter, *given)
        given = self.drafter, *given
        vocab = self.drafter.vocab.target_size
        return self._call("growing a tree", name, policy.grow, given, check_tree, policy, given[1], vocab, levels)

    def verdict(self, tree: DraftTree, logits: Tensor, *given: Any) -> Verdict:
        """Return the verdict on a tree by logits [B,N,V], and by the other arguments of the verifier."""
        if not self.names[2]:
            return self.verifier(tree, logits, *given)
        given = tree, logits, *given
        return self._call("verifying", self.names[2], self.verifier, given, check_verdict, tree, logits.shape[-1])

    def _call(self, what: str, name: str, function: Any, given: Any, check: Callable[..., None], *of: Any) -> Any:
        with own.blamed(name, what):
            made = function(*given)
            if self.calls[what] < (1 if self.captured else CHECKED):
                check(made, *of)
                self.calls[what] += 1
        return made


def check_drafter(drafter: Drafter) -> None:
    """Raise ValueError for attributes that are missing or of another type, and for missing methods."""
    kind, name, vocab = type(drafter), own.name_of(drafter), getattr(drafter, "vocab", None)
    if not name:
        return
    if not all(hasattr(vocab, word) for word in ("size", "target_size", "to_target")):
        raise ValueError(f"{name}: vocab must be a specdec.drafters.vocab.DraftVocab, got {shown(vocab)}")
    stepless = drafter.block is None and kind.step is Drafter.step and kind.expand is Drafter.expand
    for word, missing in {"extend": kind.extend is Drafter.extend, "step": stepless}.items():
        if missing:
            raise ValueError(f"{name}: the drafter has no method {word}, see specdec.contracts.Drafter")
    if not isinstance(drafter.taps, tuple | list) or not all(type(tap) is int for tap in drafter.taps):
        raise ValueError(f"{name}: taps must be whole numbers, such as (1, 2, 3), got {shown(drafter.taps)}")
    for word in ("block", "max_steps"):
        if (value := getattr(drafter, word)) is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: {word} must be None or a whole number of at least 1, got {shown(value)}")
    if not isinstance(drafter.trust, int | float) or not drafter.trust > 0:
        raise ValueError(f"{name}: trust must be a number above 0, got {shown(drafter.trust)}")


def check_state(state: DraftState, drafter: Drafter, rows: int) -> None:
    """Raise ValueError unless this is a drafter's state of so many rows, before a tree grows."""
    if not isinstance(state, DraftState):
        raise ValueError(f"extend and admit must return a specdec.contracts.DraftState, got {shown(state)}")
    width, head = drafter.block or 1, state.head
    for name, x in {"hidden": state.hidden, "readout": state.readout}.items():
        if x.ndim != 3 or tuple(x.shape[:2]) != (rows, width):
            raise ValueError(f"{name} of the state has the shape {list(x.shape)}, and must have [{rows}, {width}, any]")
    tokens, usual = state.readout.shape[-1], type(state) is DraftState and type(drafter).root is Drafter.root
    if usual and head is None and tokens != drafter.vocab.size:
        raise ValueError(f"the state has logits of {tokens} tokens, and vocab has {drafter.vocab.size}")
    if state.levels is not None:
        _check_tensor("levels", state.levels, (rows,), torch.int64)
        if (state.levels < 0).any():
            raise ValueError("levels must be at least 0")


def check_tree(tree: DraftTree, policy: TreePolicy, root: Tensor, vocab: int, levels: Tensor | None = None) -> None:
    """Raise ValueError if the tensors of a tree contradict each other or its policy. levels: that count in each row."""
    if not isinstance(tree, DraftTree):
        raise ValueError(f"grow must return a specdec.structs.DraftTree, got {shown(tree)}")
    b, n = len(root), policy.num_draft_tokens
    for name in ("tokens", "parents", "depth"):
        _check_tensor(name, getattr(tree, name), (b, n), torch.int64)
    shapes = {"ancestors": ((b, n, n), torch.bool), "logq": ((b, n), None), "q": ((b, n, vocab), None)}
    for name, (shape, dtype) in shapes.items():
        if dtype or getattr(tree, name) is not None:
            _check_tensor(name, getattr(tree, name), shape, dtype)
    tokens, parents, depth, ancestors = (
        x.cpu().numpy() for x in (tree.tokens, tree.parents, tree.depth, tree.ancestors)
    )
    if (tokens[:, 0] != root.cpu().numpy()).any():
        raise ValueError("node 0 must carry the root token")
    _check_tokens(tokens, vocab)
    if tree.logq is not None and not own.name_of(policy) and tree.logq.isnan().any():
        raise ValueError("the logits or log-probabilities of drafted tokens are nan")
    if (parents[:, 0] != 0).any() or (parents[:, 1:] >= np.arange(1, n)).any() or (parents < 0).any():
        raise ValueError("a parent must stand before its children, and the root is its own parent")
    if tree.steps > policy.steps or (depth > tree.steps).any():
        raise ValueError(f"a node is deeper than steps, which is {policy.steps}")
    above = np.take_along_axis(depth, parents, 1)
    if (depth[:, 0] != 0).any() or (depth[:, 1:] != above[:, 1:] + 1).any():
        raise ValueError("the depth of a node must be one more than that of its parent, and that of the root 0")
    own_, inherited = np.eye(n, dtype=bool), np.take_along_axis(ancestors, parents[..., None], 1)
    if (ancestors[:, 0] != own_[0]).any() or (ancestors[:, 1:] != (inherited | own_)[:, 1:]).any():
        raise ValueError("ancestors must be the nodes on the path from the root to each node, itself included")
    keys = np.where(
        depth > (n if levels is None else levels.cpu().numpy()[:, None]), -np.arange(n), parents * vocab + tokens
    )
    if (np.diff(np.sort(keys[:, 1:], 1), axis=1) == 0).any():
        raise ValueError("two children of a node carry the same token")


def check_verdict(verdict: Verdict, tree: DraftTree, vocab: int) -> None:
    """Raise ValueError unless each row of a verdict is a path of its tree, with the tokens along it and a last one."""
    if not isinstance(verdict, Verdict):
        raise ValueError(f"it must return a specdec.structs.Verdict, got {shown(verdict)}")
    b, p = len(tree.tokens), tree.steps + 1
    for name, shape in {"path": (b, p), "n": (b,), "tokens": (b, p)}.items():
        _check_tensor(name, getattr(verdict, name), shape, torch.int64)
    path, n, emitted = (x.cpu().numpy() for x in (verdict.path, verdict.n, verdict.tokens))
    if (n < 1).any() or (n > p).any():
        raise ValueError(f"n must be from 1 to {p}, got {n.tolist()}")
    counts = np.arange(p) < n[:, None]
    path = np.where(counts, path, 0)
    if (path < 0).any() or (path >= tree.tokens.shape[1]).any():
        raise ValueError(f"path must hold nodes of the tree, 0 to {tree.tokens.shape[1] - 1}")
    tokens, parents, depth = (
        np.take_along_axis(x.cpu().numpy(), path, 1) for x in (tree.tokens, tree.parents, tree.depth)
    )
    follows = (parents[:, 1:] == path[:, :-1]) & (depth == np.arange(p))[:, 1:]
    if (path[:, 0] != 0).any() or not follows[counts[:, 1:]].all():
        raise ValueError("path must lead from the root, which is node 0, from parent to child")
    if (emitted[:, :-1] != tokens[:, 1:])[counts[:, 1:]].any():
        raise ValueError(
            "tokens[:, k] must be the token of node path[:, k + 1], except the last, which follows the path"
        )
    _check_tokens(emitted[counts], vocab)


def _check_tensor(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """dtype: None stands for any floating point."""
    right = isinstance(x, Tensor) and (x.is_floating_point() if dtype is None else x.dtype == dtype)
    if not right or tuple(x.shape) != shape:
        got = f"{str(x.dtype)[6:]} {list(x.shape)}" if isinstance(x, Tensor) else shown(x)
        raise ValueError(f"{name} is {got}, and must be {str(dtype or torch.float32)[6:]} {list(shape)}")


def _check_tokens(tokens: np.ndarray, vocab: int) -> None:
    if (wrong := tokens[(tokens < 0) | (tokens >= vocab)]).size:
        raise ValueError(f"token {wrong[0]} is not of the target, whose tokens are 0 to {vocab - 1}")
