"""Convert a checkpoint to another layout, or for a server: the same weights, bit for bit, and the same meaning."""

import dataclasses
import os
from pathlib import Path

from torch import Tensor

from drafters.formats import FAMILIES, Checkpoint, find_layout, open_checkpoint
from drafters.formats.base import Layout, TargetFacts, differences, read_vocab
from drafters.layers import SharedHead
from specdec.model.checkpoint import read_json, read_tensors, resolve, write_folder

EMBEDDING = "embed_tokens.weight"
HEADS = ("lm_head.weight", "model.embed_tokens.weight")  # a tied target has no head but its embedding
SERVERS = sorted({server for family in FAMILIES for server in family.servers})


def convert(
    source: str | os.PathLike, destination: str | os.PathLike, to: str, target: str | os.PathLike | None = None
) -> Checkpoint:
    """Write `source` in the layout `to`. Nothing is left out and nothing is made up.

    target: needed if the layout states its name, or cannot express that the head is the target's.
    """
    checkpoint = open_checkpoint(source)
    _write(checkpoint, Path(destination), find_layout(checkpoint.family, to), target)
    return checkpoint


def export(
    source: str | os.PathLike, destination: str | os.PathLike, server: str, target: str | os.PathLike | None = None
) -> Checkpoint:
    """Write `source` as a server of `SERVERS` loads it.

    The target's embedding replaces an embedding in the file. For SGLang the file then holds none, which means the
    target's. For vLLM it holds a copy, because the speculators library (0.9 with transformers 5) leaves the embedding
    of a file without one undefined.
    """
    if server not in SERVERS:
        raise ValueError(f"can export for {' and '.join(SERVERS)} only, not for {server!r}")
    checkpoint = open_checkpoint(source)
    family, meaning = checkpoint.family, checkpoint.meaning
    if server not in family.servers:
        raise ValueError(f"{server} loads EAGLE heads as draft models, not {family.title}")
    if server == "vllm" and target is None:
        raise ValueError("an export for vLLM names its target: give --target")
    if meaning.taps and target is None:
        raise ValueError("the drafter lists its taps, and their names depend on the target's depth: give --target")
    family.refuse(server, meaning)
    layout, tensors = find_layout(family, family.servers[server]), dict(checkpoint.tensors)
    if not meaning.own_embedding:
        tensors.pop(EMBEDDING, None)
        if layout.needs_embedding:
            embedding = read_first(target, ("model.embed_tokens.weight",))
            tensors[EMBEDDING] = embedding.to(tensors["fc.weight"].dtype)
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    _write(checkpoint, Path(destination), layout, target)
    return checkpoint


def _write(checkpoint: Checkpoint, folder: Path, layout: Layout, target: str | os.PathLike | None) -> None:
    if folder.resolve() == resolve(checkpoint.path).resolve():
        raise ValueError(f"{folder} is the checkpoint itself; choose another folder to write to")
    wrong = differences(checkpoint.family, checkpoint.meaning, checkpoint.tensors)
    if wrong:
        raise ValueError(f"{checkpoint.path} does not load, so it cannot be converted: {wrong[0]}")
    meaning, tensors, facts = checkpoint.meaning, checkpoint.tensors, None
    if target is not None:
        facts = read_facts(target)
        if not meaning.own_head and not layout.shares_head:
            ids = read_vocab(tensors, meaning.vocab, checkpoint.path).ids
            rows = SharedHead(read_first(target, HEADS), ids).weight
            tensors = tensors | {"lm_head.weight": rows.to(tensors["fc.weight"].dtype)}
            meaning = dataclasses.replace(meaning, own_head=True)
    write_folder(folder, *layout.write(meaning, tensors, facts))


def read_facts(target: str | os.PathLike) -> TargetFacts:
    """Name, architecture and depth of a target, from its config alone."""
    config = read_json(resolve(target) / "config.json")
    layers = (config.get("text_config") or config).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ValueError(f"{target} is not a target: its config.json states no num_hidden_layers")
    return TargetFacts(str(target), tuple(config.get("architectures") or ()), layers)


def read_first(target: str | os.PathLike, names: tuple[str, ...]) -> Tensor:
    """The first of the tensors `names` that a target holds; ValueError if it holds none."""
    found = dict(read_tensors(resolve(target), only=names))
    for name in names:
        if name in found:
            return found[name]
    raise ValueError(f"{target} holds no tensor {' or '.join(names)}")
