"""Which target tokens a head proposes: d2t [U] of EAGLE-3 holds target id minus draft id, t2d [V] membership.

`read_token_map` reads the maps of FR-Spec (arXiv 2502.14856), which restrict any head.

Traps: offsets and target ids look alike, and a map in another order than the rows of the head loads without an error.
A drafter with a wrong map drafts nothing that is accepted.
"""

from pathlib import Path

import torch
from torch import Tensor

from specdec.cli.reading import parse_json, read_text
from specdec.drafters.formats.base import Reading, TargetFacts, Tensors
from specdec.drafters.layers import SharedHead
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import read_pickle
from specdec.schema import shown

NO_HEAD = "the checkpoint has no head of its own, and this layout needs one: give --target to copy it"


def ids_of(d2t: Tensor) -> Tensor:
    """The target tokens [U] that d2t names, in draft order."""
    return torch.arange(len(d2t)) + d2t.long()


def _are_tokens(ids: Tensor, size: int) -> bool:
    return bool(ids.min() >= 0 and ids.max() < size and len(ids.unique()) == len(ids))


def map_fault(tensors: Tensors, size: int) -> str:
    """What is wrong with the map of a target with `size` tokens, in one clause; empty if nothing is to be seen."""
    if "d2t" not in tensors:
        return ""
    if tensors["d2t"].is_floating_point():  # half of these types hold no large ids
        return f"d2t holds numbers of {tensors['d2t'].dtype}, and must hold whole ones"
    d2t, known = tensors["d2t"].long(), None
    if d2t.ndim != 1 or not len(d2t):
        return f"d2t must be a list of one offset a row of the head, and has the shape {list(d2t.shape)}"
    if "t2d" in tensors:
        if len(tensors["t2d"]) != size:
            return f"t2d speaks of {len(tensors['t2d'])} tokens, the target has {size}"
        known = tensors["t2d"].bool().nonzero().squeeze(-1)

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
    if fault := map_fault(tensors, size):
        raise ValueError(f"{name}: {fault}")
    return DraftVocab(size, ids_of(tensors["d2t"]) if "d2t" in tensors else None)


def with_head(tensors: Tensors, vocab: int, target: TargetFacts) -> Tensors:
    """Add a copy of the target's head, the rows of the draft vocabulary, to a drafter for `vocab` target tokens."""
    rows = SharedHead(target.part("head"), read_vocab(tensors, vocab, target.name).ids).weight
    return tensors | {"lm_head.weight": rows.to(tensors["fc.weight"].dtype)}


def describe_vocab(tensors: Tensors, vocab: int, draft_vocab: int) -> str:
    """Size, coverage and kind of the vocabulary map, in words."""
    if "d2t" not in tensors:
        return f"all {vocab} target tokens, no map"
    share = f"{draft_vocab} of {vocab} target tokens ({draft_vocab / vocab:.1%})"
    if fault := map_fault(tensors, vocab):
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


def with_membership(tensors: Tensors, size: int) -> Tensors:
    """Return the tensors with the mask t2d [V] of the draft tokens, if they have the map d2t."""
    return tensors | {"t2d": DraftVocab(size, ids_of(tensors["d2t"])).contains()} if "d2t" in tensors else tensors


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
            changed = tensors | {"d2t": ids - torch.arange(len(ids))}
            changed = with_membership(changed, meaning.vocab) if "t2d" in tensors else changed
            out.append(Reading(name, meaning, changed))
    return out


def read_token_map(path: Path, target_size: int) -> DraftVocab:
    """The tokens that a file lists, most frequent first: FR-Spec's `freq_*.pt` (thunlp/FR-Spec `fr/fr.py`) or JSON.

    target_size: V. The order is preserved. A token that is listed twice counts once: FR-Spec's own script repeats the
    end-of-sequence token, so the number in a file's name need not be the map's size. Raises ValueError for anything but
    ids of the target.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no such token map: {path}")
    text = path.suffix == ".json"
    ids = parse_json(read_text(path, "token map"), str(path)) if text else read_pickle(path)
    if isinstance(ids, Tensor):
        dense = ids.layout == torch.strided and not ids.is_meta and not ids.is_quantized
        ids = ids.flatten().tolist() if dense else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{path} must hold a list of token ids")
    wrong = next((i for i in ids if not 0 <= i < target_size), None)
    if wrong is not None:
        raise ValueError(
            f"{path} holds token {shown(wrong)}, but the target's vocabulary has {target_size} tokens only"
        )
    return DraftVocab(target_size, torch.tensor(list(dict.fromkeys(ids))))
