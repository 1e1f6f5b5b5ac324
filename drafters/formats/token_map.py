"""FR-Spec token maps (arXiv 2502.14856): which tokens a drafter may propose."""

from pathlib import Path

import torch
from torch import Tensor

from specdec.cli.reading import parse_json, read_text
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import read_pickle
from specdec.schema import shown


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
