"""What made a cache of features, in a few characters: hashes of a target, its tokenizer and the samples."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from training.data import Sample

PLACES = 1024  # of each tensor so many values are hashed one by one; all of it enters as a sum


def short(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def target_fingerprint(target) -> str:
    """Of the shape and of the weights as they are loaded, their precision included, on whatever device and in whatever
    memory layout: names, shapes, the sum of all bits as integers, and 1024 values by place."""
    parts: list[str | bytes] = [repr(target.config)]
    for name, weight in sorted(target.named_parameters()):
        weight = weight.detach()
        parts += [f"{name} {list(weight.shape)} {weight.dtype}", *_weight(weight)]
    return short(*parts)


def _weight(weight: Tensor) -> tuple[str, bytes]:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits, count = weight.view(whole), weight.numel()
    places = torch.arange(0, count, max(1, count // PLACES), device=weight.device)
    chosen = bits[torch.unravel_index(places, bits.shape)]  # by logical place: some layouts are transposed in memory
    return str(bits.sum(dtype=torch.int64).item()), chosen.cpu().numpy().tobytes()


def tokenizer_fingerprint(tokenizer) -> str:
    """Of what it makes of a text, and of its chat template."""
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())
        model = {key: value for key, value in model.items() if key not in ("padding", "truncation")}
    else:
        model = tokenizer.get_vocab()
    return short(json.dumps(model, sort_keys=True), str(tokenizer.chat_template))


def data_fingerprint(samples: Iterable[Sample]) -> str:
    """Of the tokens and the loss masks, in their order."""
    return short(*(part for s in samples for part in (s.ids.tobytes(), s.mask.tobytes())))


def vocabulary_fingerprint(vocab) -> str:
    return short(str(vocab.target_size), b"" if vocab.ids is None else vocab.ids.cpu().numpy().tobytes())
