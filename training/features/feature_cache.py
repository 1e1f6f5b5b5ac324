"""A cache of features on disk: what it keeps, what made it, and how it is read in place of running the target.

A cache is a folder of `cache.json` and shards `features-00000-of-00012.safetensors`. A shard holds some conversations
in a row, their tokens concatenated.

- For each token it stores the id, whether it is a training token, and the target's hidden states at the drafter's taps.
- For each position whose next-token distribution may be trained on it stores either the hidden state before the head,
  from which the frozen head computes all logits, or the most likely tokens and the mass of the rest.
"""

import json
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.cli.reading import read_model
from specdec.model.ends import TargetEnds
from specdec.model.weight_files import read_json
from specdec.training.data import Batch, Sample
from specdec.training.features import signature
from specdec.training.features.online import Features, arguments, deferred_logits, online_features
from specdec.training.objectives.teacher import TeacherLogits, TopTokens

SCHEMA = 1
MANIFEST = "cache.json"
STORES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Form:
    """What a cache keeps."""

    store: str  # of `STORES`, for hidden states; int8 has a scale for each position and tap
    keep: int | None  # number of most likely tokens of the draft vocabulary; None: the last hidden state instead
    taps: tuple[int, ...]
    hidden: int  # H of the target
    layers: int  # of the target; its head reads hidden state number `layers`

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown `store` or a `keep` below 1."""
        if self.store not in STORES:
            raise ValueError(f"store must be one of {', '.join(STORES)}, got {self.store!r}")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep must be 'all' or at least 1, got {self.keep}")

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
        """Return for each tensor of a shard the unit of its rows, the row's shape, and the dtype."""
        columns_kept = {
            "lengths": ("sample", (), torch.int32),
            "tokens": ("token", (), torch.int32),
            "mask": ("token", (), torch.bool),
            **self._states("feats", "token", len(self.taps)),
        }
        if self.keep is None:
            return columns_kept if self.layers in self.taps else columns_kept | self._states("hidden", "position", 1)
        log = torch.float32 if self.store == "fp32" else torch.float16
        return columns_kept | {
            "ids": ("position", (self.keep,), torch.int32),
            "logp": ("position", (self.keep,), log),
            "log_rest": ("position", (1,), log),
            "log_share": ("position", (1,), log),
            "choice": ("position", (), torch.int32),
        }

    def _states(self, name: str, rows: str, count: int) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
        states: dict[str, tuple[str, tuple[int, ...], torch.dtype]]
        states = {name: (rows, (count, self.hidden), STORES[self.store])}
        return states | ({f"{name}_scale": (rows, (count, 1), torch.float32)} if self.store == "int8" else {})

    def bytes(self, samples: Iterable[Sample], shards: int) -> int:
        """What the shards take on disk, headers included."""
        masks, tensors = [sample.mask for sample in samples], self.tensors().values()
        rows = {"sample": len(masks), "token": sum(map(len, masks))}
        rows["position"] = sum(int(wanted(mask).sum()) for mask in masks)
        content = sum(rows[per] * math.prod(shape) * dtype.itemsize for per, shape, dtype in tensors)
        return content + shards * (160 + 90 * len(tensors))  # a header is JSON: names, dtypes, shapes, places


def wanted(mask: np.ndarray) -> np.ndarray:
    """[T], True where an objective may need the target's distribution: at each training token and one before it."""
    return mask | np.append(mask[1:], False)


def encode(states: Tensor, store: str) -> tuple[Tensor, Tensor | None]:
    """Hidden states [...,H] as they are stored, and the scales [...,1] of int8."""
    if not states.isfinite().all():
        raise ValueError("the target computes NaN or Inf in these texts: give another target.dtype, such as fp32")
    if store == "int8":
        scale = states.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return (states / scale).round().to(torch.int8), scale
    stored = states.to(STORES[store])
    if not stored.isfinite().all():
        raise ValueError(f"hidden states of up to {states.abs().max():.3g} do not fit {store}: give store=bf16")
    return stored, None


def shard_bounds(samples: list[Sample], shard_tokens: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each shard: so many conversations in a row that they have `shard_tokens` tokens or more."""
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    bounds, first, tokens = [], 0, 0
    for end, sample in enumerate(samples, 1):
        tokens += len(sample.ids)
        if tokens >= shard_tokens or end == len(samples):
            bounds.append((first, end))
            first, tokens = end, 0
    return bounds


def describe(
    target, taps: tuple[int, ...], vocab, samples: list[Sample], keep: int | None, source: str | None = None
) -> dict:
    """What must be the same when a cache is made and when it is used, as cache.json states it.

    source: what computed the features in place of the target here, of which then only the ends count.
    """
    return ({} if source is None else {"source": source}) | {
        "schema": SCHEMA,
        "target": signed(target, source is not None),
        "tokenizer": signature.tokenizer_signature(target.tokenizer),
        "taps": list(taps),
        "draft vocabulary": None if keep is None else f"{signature.vocabulary_signature(vocab)} ({vocab.size} tokens)",
        "data": f"{signature.data_signature(samples)} ({len(samples)} conversations)",
    }


def signed(target, ends: bool) -> str:
    """Return the signature of a target, or of its ends alone, its name and its dtype."""
    return f"{signature.target_signature(target, ends)} ({target.name}, {str(target.dtype)[6:]})"


def check_same(folder: Path, made: dict, now: dict, remedy: str) -> None:
    """Raise ValueError unless `made` has all values of `now`. Of the target, which may move, the signature counts."""
    for what, value in now.items():
        same = made.get(what) == value
        if what in ("target", "ends") and isinstance(made.get(what), str):
            same = made[what].partition(" ")[0] == value.partition(" ")[0]
        if not same:
            raise ValueError(f"{folder} was made with {what} {made.get(what)}, and this is {value}: {remedy}")


def shard_path(folder: Path, number: int, count: int) -> Path:
    """Return the path of shard `number` of `count`."""
    return folder / f"features-{number:05d}-of-{count:05d}.safetensors"


class FeatureCache:
    """A finished cache: its samples, and their features as `online_features` gives them."""

    def __init__(self, folder: str | Path):
        """Raises ValueError if the cache is not whole. Hidden states are read when a batch asks for them."""
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(f"{folder} is no cache of features: it has no {MANIFEST}")
        self.manifest = read_json(self.folder / MANIFEST)
        if (schema := self.manifest.get("schema")) != SCHEMA:
            raise ValueError(f"{folder} is of schema {schema}, and this reads {SCHEMA}: make it anew")
        from specdec.training.file_models import Manifest  # here: only readers need pydantic

        written = read_model(Manifest, self.manifest, str(self.folder / MANIFEST))
        self.keep, count = written.keep, len(written.shards)
        paths = [shard_path(self.folder, i, count) for i in range(count)]
        if missing := sum(not path.is_file() for path in paths):
            raise ValueError(
                f"{folder} lacks {missing} of {len(paths)} shards: specdec train cache with its settings goes on"
            )
        self.shards = [open_shard(path, self.manifest) for path in paths]
        self.samples: list[Sample] = []
        self.places: list[tuple[int, int, int]] = []  # of each sample: shard, first token, first stored position
        for number, shard in enumerate(self.shards):
            lengths, ids, masks = (shard.get_tensor(name).numpy() for name in ("lengths", "tokens", "mask"))
            token = position = 0
            for length in lengths.tolist():
                here = slice(token, token + length)
                self.places.append((number, token, position))
                self.samples.append(Sample(ids[here], masks[here], number=len(self.samples)))
                token, position = here.stop, position + int(wanted(masks[here]).sum())

    def sizes(self) -> dict[int, float]:
        """Tap -> the root mean square of its states, to the nearest power of two. Older caches lack it."""
        return dict(zip(self.manifest["taps"], self.manifest.get("sizes", ()), strict=False))

    def check(self, target, taps: tuple[int, ...], vocab, samples: list[Sample]) -> None:
        """Raise ValueError unless target, tokenizer, taps, data and, if it was used, vocabulary made this cache."""
        source = self.manifest.get("source")
        now = describe(target, taps, vocab, samples, self.keep, source)
        if isinstance(target, TargetEnds) and source is None:
            del now["target"]  # it covers all weights, and only the ends are loaded
            now["ends"] = signed(target, ends=True)
        check_same(self.folder, self.manifest, now, "use what made it, or make it anew with specdec train cache")

    def features(self, target, batch: Batch, taps: tuple[int, ...], autocast: AbstractContextManager) -> Features:
        """As `online_features`. The target runs only for a batch that holds other conversations."""
        if batch.rows is None or any(number is None for row in batch.rows for number in row):
            return online_features(target, batch, taps, autocast)
        device, shape = target.device, batch.tokens.shape
        feats = torch.zeros(*shape, len(taps), target.config.hidden)
        columns_kept: dict[str, Tensor] = {}
        for row, numbers in enumerate(batch.rows):
            end = 0
            for number in numbers:
                start, end = end, end + len(self.samples[number].ids)
                self._read(number, row, start, feats, columns_kept)
        if self.keep is None:
            last = target.config.layers
            hidden = feats[:, :, taps.index(last)] if last in taps else columns_kept["hidden"][:, :, 0]
            logits: TeacherLogits = deferred_logits(target, hidden.to(device, target.head.weight.dtype), autocast)
        else:
            logits = TopTokens(**{name: values.to(device) for name, values in columns_kept.items()})
        return arguments(batch, feats.flatten(2).to(device), logits)

    def _read(self, number: int, row: int, start: int, feats: Tensor, columns_kept: dict[str, Tensor]) -> None:
        """Copy a sample's features into `row` of feats [B,T,count,H] and columns_kept [B,T,...], from `start` on."""
        which, token, position = self.places[number]
        mask, shard = self.samples[number].mask, self.shards[which]
        feats[row, start : start + len(mask)] = _states(shard, "feats", slice(token, token + len(mask)))
        columns = torch.from_numpy(start + wanted(mask).nonzero()[0])
        rows = slice(position, position + len(columns))
        if self.keep is not None:
            found = {name: shard.get_slice(name)[rows] for name in ("ids", "logp", "log_rest", "log_share", "choice")}
            mass = torch.cat([found["logp"].float(), found["log_rest"].float()], -1).logsumexp(-1, keepdim=True)
            found["ids"], found["choice"] = found["ids"].long(), found["choice"].long()
            found["logp"], found["log_rest"] = found["logp"] - mass, found["log_rest"] - mass  # rounded when stored
            found["log_share"] = found["log_share"].float()
        else:
            found = {"hidden": _states(shard, "hidden", rows)} if "hidden" in shard.keys() else {}  # noqa: SIM118
        for name, values in found.items():
            if name not in columns_kept:
                columns_kept[name] = values.new_zeros(*feats.shape[:2], *values.shape[1:])
            columns_kept[name][row, columns] = values


def _states(shard, name: str, rows: slice) -> Tensor:
    """Hidden states [n,count,H] of a shard's rows, in fp32."""
    stored = shard.get_slice(name)[rows].float()
    return stored * shard.get_slice(f"{name}_scale")[rows] if f"{name}_scale" in shard.keys() else stored  # noqa: SIM118


def open_shard(path: Path, manifest: dict):
    """Open a shard for reading. Raises ValueError if it is cut off, or belongs to another cache."""
    try:
        shard = safe_open(path, framework="pt")
        found = (shard.metadata() or {}).get("cache", "").split(" ")[0]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; specdec train cache with its settings makes it anew") from None
    if found != manifest_signature(manifest):
        raise ValueError(f"{path} belongs to another cache: remove it, and let specdec train cache make it anew")
    return shard


def manifest_signature(manifest: dict) -> str:
    """Return a short hash of a cache's manifest."""
    return signature.short(json.dumps(manifest, sort_keys=True))
