"""Which target tokens an EAGLE-3 head proposes: d2t [U] holds target id minus draft id, t2d [V] membership.

Traps: offsets and target ids look alike, and a map in another order than the rows of the head loads without an error.
A drafter with a wrong map drafts nothing that is accepted.
"""

import torch
from torch import Tensor

from specdec.drafters.formats.base import Reading, Tensors
from specdec.drafters.vocab import DraftVocab


def ids_of(d2t: Tensor) -> Tensor:
    """The target tokens [U] that d2t names, in draft order."""
    return torch.arange(len(d2t)) + d2t.long()


def _are_tokens(ids: Tensor, size: int) -> bool:
    return bool(ids.min() >= 0 and ids.max() < size and len(ids.unique()) == len(ids))


def map_fault(tensors: Tensors, size: int) -> str:
    """What is wrong with the map of a target with `size` tokens, in one clause; empty if nothing is to be seen."""
    if "d2t" not in tensors:
        return ""
    d2t, known = tensors["d2t"].long(), None
    if d2t.ndim != 1 or not len(d2t):
        return f"d2t must be a list of one offset a row of the head, and has the shape {list(d2t.shape)}"
    if "t2d" in tensors:
        if len(tensors["t2d"]) != size:
            return f"t2d speaks of {len(tensors['t2d'])} tokens, the target has {size}"
        known = tensors["t2d"].nonzero().squeeze(-1)

    def fits(ids: Tensor) -> bool:
        return _are_tokens(ids, size) and (known is None or torch.equal(known, ids.sort().values))

    if fits(ids_of(d2t)):
        return ""
    hint = ""
    if fits(d2t):
        hint = "; they look like target ids"
    elif fits(ids_of(d2t.sort().values)):
        hint = "; in ascending order they would fit, so they have been permuted"
    what = "d2t and t2d name different tokens, or d2t" if known is not None else "d2t"
    return f"{what} names none of the target's, or one twice; it must hold target id minus draft id{hint}"


def read_vocab(tensors: Tensors, size: int, name: str) -> DraftVocab:
    """The draft vocabulary that the map d2t gives, for a target with `size` tokens; all tokens if there is no map.

    Raises ValueError if d2t names no tokens of the target, or others than t2d does.
    """
    fault = map_fault(tensors, size)
    if fault:
        raise ValueError(f"{name}: {fault}")
    return DraftVocab(size, ids_of(tensors["d2t"]) if "d2t" in tensors else None)


def describe_vocab(tensors: Tensors, vocab: int, draft_vocab: int) -> str:
    """Size, coverage and kind of the vocabulary map, in words."""
    if "d2t" not in tensors:
        return f"all {vocab} target tokens, no map"
    share = f"{draft_vocab} of {vocab} target tokens ({draft_vocab / vocab:.1%})"
    fault = map_fault(tensors, vocab)
    if fault:
        return f"{share}; BROKEN: {fault}"
    ids = ids_of(tensors["d2t"])
    order = "ascending" if torch.equal(ids, ids.sort().values) else "not ascending"
    also = "agrees with t2d" if "t2d" in tensors else "no t2d"
    return f"{share}; d2t holds offsets, ids {ids.min()} to {ids.max()} {order}, {also}"


def map_doubts(tensors: Tensors) -> list[str]:
    """What a map that loads leaves open."""
    if "d2t" not in tensors:
        return []
    ids = ids_of(tensors["d2t"])
    if not _are_tokens(ids, 2**62) or torch.equal(ids, ids.sort().values):
        return []
    return ["the tokens of d2t are not in ascending order, as every known trainer writes them: it may be permuted"]


def membership(d2t: Tensor, size: int) -> Tensor:
    """t2d [V] bool from the offsets d2t [U]."""
    return DraftVocab(size, ids_of(d2t)).contains()


def map_readings(meaning, tensors: Tensors) -> list[Reading]:
    """Other interpretations of d2t and t2d as maps, if they name tokens of the target."""
    if "d2t" not in tensors:
        return []
    d2t = tensors["d2t"].long()
    ways = {
        "d2t as target ids": d2t,
        "the offsets of d2t in ascending order": ids_of(d2t.sort().values),
        "the tokens of d2t in ascending order": ids_of(d2t).sort().values,
        "the tokens of d2t, whatever t2d says": ids_of(d2t),
    }
    if "t2d" in tensors:
        ways["the tokens of t2d"] = tensors["t2d"].nonzero().squeeze(-1)
    seen, out = [] if map_fault(tensors, meaning.vocab) else [ids_of(d2t)], []
    for name, ids in ways.items():
        if len(ids) == len(d2t) and _are_tokens(ids, meaning.vocab) and not any(torch.equal(ids, s) for s in seen):
            seen.append(ids)
            offsets = ids - torch.arange(len(ids))
            changed = {"d2t": offsets} | ({"t2d": membership(offsets, meaning.vocab)} if "t2d" in tensors else {})
            out.append(Reading(name, meaning, tensors | changed))
    return out
