"""Signatures of a target, its tokenizer and samples: 16 characters that identify what made a cache."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.training.data import Sample

PLACES = 1024  # values of each tensor that are hashed one by one; all of its values enter as a sum


def short(*parts: bytes | str) -> str:
    """The first 16 hexadecimal digits of SHA-256 over the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def target_signature(target, ends: bool = False) -> str:
    """Return a signature of a target's config and loaded weights, independent of device and memory layout.

    It covers the names and shapes, the sum of all bits as integers, and `PLACES` values of each tensor, in the loaded
    dtype. ends: of the weights outside of the layers alone.
    """
    parts: list[str | bytes] = [repr(target.config)]
    for name, weight in sorted(target.named_parameters()):
        if ends and name.startswith("blocks."):
            continue
        weight = weight.detach()
        parts += [f"{name} {list(weight.shape)} {weight.dtype}", *_weight(weight)]
    return short(*parts)


def _weight(weight: Tensor) -> tuple[str, bytes]:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits, count = weight.view(whole), weight.numel()
    places = torch.arange(0, count, max(1, count // PLACES), device=weight.device)
    chosen = bits[torch.unravel_index(places, bits.shape)]  # by index: some layouts are transposed in memory
    return str(bits.sum(dtype=torch.int64).item()), chosen.cpu().numpy().tobytes()


def tokenizer_signature(tokenizer) -> str:
    """Of what turns text into tokens, and of the chat template."""
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())
        model = {key: value for key, value in model.items() if key not in ("padding", "truncation")}
    else:
        model = tokenizer.get_vocab()
    return short(json.dumps(model, sort_keys=True), str(tokenizer.chat_template))


def data_signature(samples: Iterable[Sample]) -> str:
    """Of the samples' tokens and loss masks, in their order."""
    return short(*(part for s in samples for part in (s.ids.tobytes(), s.mask.tobytes())))


def vocabulary_signature(vocab) -> str:
    """Of the target ids that a draft vocabulary holds."""
    return short(str(vocab.target_size), b"" if vocab.ids is None else vocab.ids.cpu().numpy().tobytes())
