"""Cache the target's features (Hydra).

    specdec train cache target.path=... data.path=... out=FOLDER

Then `specdec train data.cache=FOLDER ...` trains without running the target's layers. The drafter's settings
say which hidden states are cached. The same command continues after an interruption: it checks the existing shards,
and makes missing and damaged ones. Every setting is in conf/cache.yaml.

With from_vllm=FOLDER, or --from-vllm FOLDER, a target that runs in vLLM has computed the features, however many GPUs it
takes: its files of hidden states are read, and of the target here only embedding, final norm and head.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, ListConfig
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from specdec.cli.files import output_folder, write_text, write_whole
from specdec.cli.lock import only_writer
from specdec.model.ends import state_sizes
from specdec.model.target import Target
from specdec.model.weight_files import read_json
from specdec.remote import Remote
from specdec.training.build import build_drafter
from specdec.training.data import Batches, Sample, hold_out, load_samples
from specdec.training.features import feature_cache
from specdec.training.features.online import online_features
from specdec.training.features.vllm_files import VllmStates
from specdec.training.objectives.losses import pieces
from specdec.training.objectives.teacher import read_teacher
from specdec.training.train import all_settings, load_some


class FeatureCacheWriter:
    """Writes the features of `samples` into `folder`, shard by shard; each shard is whole or not there."""

    def __init__(
        self,
        folder: Path,
        target,
        vocab,
        samples: list[Sample],
        form: feature_cache.Form,
        shard_tokens: int,
        batch_tokens: int,
        autocast: AbstractContextManager | None = None,
        states: VllmStates | None = None,
    ):
        """Write cache.json, or raise ValueError unless an existing one has the same contents.

        The target runs in `autocast` on `batch_tokens` at a time, unless there are `states`, which vLLM has written.
        """
        if form.keep is None and not isinstance(target, Target):
            raise ValueError(
                f"keep=all needs the head of our own decoder, and {target.name} has none: give keep=NUMBER"
            )
        if form.keep is not None and form.keep >= vocab.size:
            raise ValueError(f"keep={form.keep} is all of a draft vocabulary of {vocab.size} tokens: give keep=all")
        self.folder, self.target, self.vocab, self.samples, self.form = folder, target, vocab, samples, form
        self.batch_tokens, self.autocast = batch_tokens, autocast or nullcontext()
        self.features = online_features if states is None else states.features
        source = None if states is None else "vLLM"
        self.manifest = feature_cache.describe(target, form.taps, vocab, samples, form.keep, source)
        self.manifest |= {"store": form.store, "keep": form.keep}
        self.manifest["shards"] = [list(bounds) for bounds in feature_cache.shard_bounds(samples, shard_tokens)]
        path = folder / feature_cache.MANIFEST
        if path.exists():
            begun = read_json(path)
            feature_cache.check_same(
                folder, begun, self.manifest, "give the same settings to go on with it, or another out="
            )
            self.manifest = begun
            return
        if states is None:
            self.manifest["ends"] = feature_cache.signed(target, ends=True)
            sizes = state_sizes(target, form.taps).tolist()
        else:
            sizes = [states.sizes(form.taps)[tap] for tap in form.taps]
        self.manifest["sizes"] = sizes
        output_folder(folder)
        write_text(path, json.dumps(self.manifest, indent=1) + "\n")

    def write(self) -> int:
        """Write the shards that are missing or damaged; returns how many that were."""
        bounds, written = self.manifest["shards"], 0
        with tqdm(total=sum(len(s.ids) for s in self.samples), desc="features", unit="token", mininterval=1.0) as bar:
            for number, (first, end) in enumerate(bounds):
                path, samples = feature_cache.shard_path(self.folder, number, len(bounds)), self.samples[first:end]
                if not self._sound(path):
                    tensors = self.compute(samples)
                    # One entry, as safetensors writes several in any order: a cache made twice has the same bytes.
                    metadata = {"cache": f"{feature_cache.manifest_signature(self.manifest)} {checksum(tensors)}"}
                    try:
                        write_whole(path, partial(save_file, tensors, metadata=metadata))
                    except ValueError as error:
                        raise ValueError(
                            f"{error}; {number} of {len(bounds)} shards are there, and the same command goes on"
                        ) from None
                    written += 1
                bar.update(sum(len(s.ids) for s in samples))
        return written

    def _sound(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            shard = feature_cache.open_shard(path, self.manifest)
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no dict)
        except ValueError as error:
            print(f"warning: {error}")
            return False
        return checksum(tensors) == shard.metadata()["cache"].split()[1]

    @torch.no_grad()
    def compute(self, samples: list[Sample]) -> dict[str, Tensor]:
        """A shard's tensors; see `Form.tensors`."""
        parts: list[dict[str, Tensor]] = [{}] * len(samples)
        batches = Batches(samples, self.batch_tokens, seed=0)
        for indices in batches.by_length():
            features = self.features(self.target, batches.collate(indices), self.form.taps, self.autocast)
            for row, i in enumerate(indices):
                parts[i] = dict(self._kept(features, row, samples[i]))
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {"lengths": torch.tensor([len(s.ids) for s in samples], dtype=torch.int32)} | tensors

    def _kept(self, features: dict, row: int, sample: Sample) -> Iterator[tuple[str, Tensor]]:
        """The rows of each tensor that one sample has."""
        form, length = self.form, len(sample.ids)
        yield "tokens", torch.from_numpy(sample.ids)
        yield "mask", torch.from_numpy(sample.mask)
        yield from self._encoded("feats", features["feats"][row, :length].unflatten(1, (len(form.taps), form.hidden)))
        column = torch.from_numpy(feature_cache.wanted(sample.mask).nonzero()[0]).to(features["tokens"].device)
        if form.keep is not None:
            yield from self._top(features["teacher_logits"], row, column)
        elif "hidden" in form.tensors():
            yield from self._encoded("hidden", features["teacher_logits"].hidden[row, column][:, None].float())

    def _encoded(self, name: str, states: Tensor) -> Iterator[tuple[str, Tensor]]:
        stored, scale = feature_cache.encode(states, self.form.store)
        yield name, stored.cpu()
        if scale is not None:
            yield f"{name}_scale", scale.cpu()

    def _top(self, teacher_logits, row: int, column: Tensor) -> Iterator[tuple[str, Tensor]]:
        form, none = self.form, torch.full((row + 1, int(column.max()) + 1), -1, device=column.device)
        found: dict[str, list[Tensor]] = {}
        for piece in pieces(len(column), self.vocab.target_size):
            here = torch.full_like(column[piece], row), column[piece]
            teacher: Any = read_teacher(teacher_logits, here, self.vocab, none, renormalise=True)
            top = teacher.logp.topk(form.keep, dim=-1)
            rest = teacher.logp.scatter(1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
            share = torch.zeros_like(rest) if teacher.log_share is None else teacher.log_share
            logs = {"logp": top.values, "log_rest": rest, "log_share": share}
            for name, value in (logs | {"ids": top.indices, "choice": teacher.choice}).items():
                found.setdefault(name, []).append(value)
        least = torch.finfo(torch.float16).min  # in place of -inf, the log of a mass of zero
        for name, values in found.items():
            yield name, torch.cat(values).clamp(min=least).to(form.tensors()[name][2]).cpu()


def checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(memoryview(cast(Any, tensors[name].contiguous().view(torch.uint8).numpy())))
    return digest.hexdigest()


def check(config: DictConfig) -> None:
    """Raise ValueError for a wrong `keep`, and for settings of vLLM's states that are wrong or need from_vllm."""
    if config.keep != "all" and type(config.keep) is not int:
        raise ValueError(f"keep must be 'all' or a number of tokens, got {config.keep!r}")
    for name in ("layer_ids", "server"):
        if config.from_vllm is None and config[name] is not None:
            raise ValueError(f"{name} is for from_vllm=FOLDER, which is not given")
    ids = config.layer_ids
    if ids is not None and not (isinstance(ids, ListConfig) and all(type(layer) is int for layer in ids)):
        raise ValueError(f"layer_ids must be a list of whole numbers, got {ids!r}")


def run(config: DictConfig) -> None:
    """Cache the features that the composed settings of `specdec train cache` describe."""
    (settings, _), out = all_settings(config), Path(config.out)
    check(config)
    target = load_some(config, config.device, whole=config.from_vllm is None)
    samples = load_samples(config.data, target)
    train, _ = hold_out(samples, config.data.heldout)
    drafter = build_drafter(config.drafter, target, train, settings.seed)
    keep = None if config.keep == "all" else config.keep
    form = feature_cache.Form(config.store, keep, drafter.taps, target.config.hidden, target.config.layers)
    how = config.shard_tokens, settings.batch_tokens, settings.autocasting(target.device)
    start, states = time.monotonic(), None
    with only_writer(out, inside=True):
        if config.from_vllm is not None:
            states = VllmStates(str(config.from_vllm), target, drafter.taps, config.layer_ids)
            states.take(samples, None if config.server is None else Remote(str(config.server)), config.requests)
        writer = FeatureCacheWriter(out, target, drafter.vocab, samples, form, *how, states)
        written = writer.write()
    report = {
        "cache": str(out),
        "conversations": len(samples),
        "tokens": sum(len(s.ids) for s in samples),
        "shards": len(writer.manifest["shards"]),
        "written": written,
        "bytes": sum(path.stat().st_size for path in out.glob("features-*.safetensors")),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(report))
