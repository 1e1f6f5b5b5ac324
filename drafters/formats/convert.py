"""Convert a checkpoint to another layout, or for a server, and start the server with it.

The weights and the meaning stay the same.
"""

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.acceptance import read_acceptance
from specdec.contracts import Drafter
from specdec.drafters.draft_model import EMBEDDINGS
from specdec.drafters.formats import EMBEDDING, FAMILIES, MAPS, Checkpoint, family_of, find_layout, open_checkpoint
from specdec.drafters.formats.base import Family, Layout, TargetFacts, Tensors, check_target, facts_of
from specdec.drafters.formats.eagle import TOKEN_MAP
from specdec.drafters.formats.maps import with_head
from specdec.drafters.formats.speculators import SPECULATIVE_TOKENS
from specdec.model.archs import inner_name, text_config
from specdec.model.checkpoint import read_headers, read_tensors, round_rows, write_folder
from specdec.model.ends import read_ends
from specdec.model.names import resolve
from specdec.model.weight_files import read_json

Where = str | os.PathLike  # a folder, or a hub name
# A tied target has no head but its embedding.
PARTS = {
    "embedding": (EMBEDDINGS,),
    "head": (re.compile(r"(?:lm_head|embed_out)\.weight"), EMBEDDINGS),
    "final_norm": (re.compile(r"model\.norm\.weight"),),
}
SERVERS = {"sglang": "SGLang", "vllm": "vLLM"}


def convert(source: Where, destination: Where, to: str, target: Where | None = None, int8: bool = False) -> Checkpoint:
    """Write `source` in the layout `to`, with bit-identical tensors and the measured acceptance.

    A conversion that would have to leave out or invent a value fails. `source` and `target` are folders or hub names.
    The target is needed if the layout states its name, names taps by its layers, or cannot express that the head is the
    target's. int8: round the matrices (`round_rows`). Only specdec reads such a file.
    """
    checkpoint = open_checkpoint(source)
    _write(checkpoint, Path(destination), find_layout(checkpoint.family, to), target, int8)
    return checkpoint


def export(source: Where, destination: Where, server: str, target: Where | None = None) -> Checkpoint:
    """Write `source` as a server of `SERVERS` loads it, with an embedding only if it is the drafter's own.

    SGLang takes the target's embedding if the file has none. For the contents of a file for vLLM see
    `drafters/formats/vllm.py`.
    """
    if server not in SERVERS:
        raise ValueError(f"can export for {' and '.join(SERVERS)} only, not for {server!r}")
    checkpoint = open_checkpoint(source)
    family, meaning, tensors = checkpoint.family, checkpoint.meaning, dict(checkpoint.tensors)
    layout = layout_for(server, family)
    if server == "vllm" and target is None:
        raise ValueError("an export for vLLM names its target: give --target TARGET, such as demo/target")
    family.refuse(server, meaning)
    if not meaning.own_embedding:
        tensors.pop(EMBEDDING, None)
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    _write(checkpoint, Path(destination), layout, target)
    return checkpoint


def layout_for(server: str, family: Family) -> Layout:
    """The layout in which a server loads a family; ValueError if it has none."""
    if server not in family.servers:
        *known, last = sorted(family.title for family in FAMILIES if server in family.servers)
        listed = f"{', '.join(known)} and {last}"
        raise ValueError(
            f"{SERVERS[server]} loads {listed} heads as draft models, not {family.title} (train with drafter=eagle3)"
        )
    return find_layout(family, family.servers[server])


def without_a_form(drafter: Drafter, target) -> dict[str, str]:
    """Server -> why it could not load this drafter, for each that could not. Nothing is computed or copied."""
    full, family, reasons = facts_of(target), family_of(drafter), {}
    facts = dataclasses.replace(full, part=lambda name: full.part(name).to("meta"))
    meaning, tensors = family.dismantle(drafter, target)
    tensors = {name: t if name.endswith(MAPS) else t.to("meta") for name, t in tensors.items()}
    for server in SERVERS:
        said: list[str] = []
        with _noted(said):
            layout_for(server, family)
            family.refuse(server, meaning)
        with _noted(said):
            layout = layout_for(server, family)
            meant, held = _with_head(meaning, tensors, layout, facts)
            layout.write(meant, held, facts)
        if said:
            reasons[server] = "; ".join(dict.fromkeys(said))
    return reasons


@contextmanager
def _noted(said: list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        said.append(str(error))


def _write(checkpoint: Checkpoint, folder: Path, layout: Layout, target: Where | None, int8: bool = False) -> None:
    if folder.resolve() == resolve(checkpoint.path).resolve():
        raise ValueError(f"{folder} is the checkpoint itself; choose another folder to write to")
    if wrong := checkpoint.problems():
        raise ValueError(f"{checkpoint.path} does not load, so it cannot be converted: {wrong[0]}")
    meaning, facts = checkpoint.meaning, None
    # Copies of the target's rows get the dtype of the drafter: fp8 would round them, and bf16 holds all values of fp8.
    tensors = {name: t.bfloat16() if "float8" in str(t.dtype) else t for name, t in checkpoint.tensors.items()}
    if target is not None:
        facts = read_facts(target)
        check_target(checkpoint.family.sizes(meaning), facts.sizes, checkpoint.path)
        meaning, tensors = _with_head(meaning, tensors, layout, facts)
    elif meaning.taps and layout.names_layers:
        raise ValueError("the drafter lists its taps, and their names depend on the target's depth: give --target")
    acceptance = read_acceptance(resolve(checkpoint.path))
    config, tensors = layout.write(meaning, tensors, facts)
    pickles = layout.pickles(tensors)
    write_folder(folder, config, round_rows(tensors) if int8 else tensors, acceptance, layout.apart, pickles)


def _with_head(meaning, tensors: Tensors, layout: Layout, target: TargetFacts) -> tuple[Any, Tensors]:
    """A checkpoint that leaves the head to its target, with a copy of it if the layout has no name for that."""
    if meaning.own_head or layout.shares_head:
        return meaning, tensors
    return dataclasses.replace(meaning, own_head=True), with_head(tensors, meaning.vocab, target)


def read_facts(target: Where) -> TargetFacts:
    """Name, architecture and depth of a target, from its config alone; its parts are read when they are asked for."""
    folder = resolve(target)
    config = read_json(folder / "config.json")
    stated = text_config(config)
    layers = stated.get("num_hidden_layers") or _depth(folder)
    if not isinstance(layers, int):
        raise ValueError(f"{target} is not a target: its config.json states no num_hidden_layers")
    sizes, part = (stated.get("hidden_size"), stated.get("vocab_size")), partial(_part, target, config)
    return TargetFacts(str(target), tuple(config.get("architectures") or ()), layers, part, sizes)


def _depth(folder: Path) -> int | None:
    """Return the number of layers of a family that has another name for it, such as GPT-2; None if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().num_hidden_layers
    except Exception:  # the configs of any family may raise errors of any type
        return None


def _part(target: Where, config: dict, name: str) -> Tensor:
    folder = resolve(target)
    keys = read_headers(folder)
    stored = [key for part in PARTS[name] for key in keys if part.fullmatch(inner_name(key))]
    if not stored:
        raise ValueError(f"{target} holds no tensor that is its {name.replace('_', ' ')}")
    _, held = next(read_tensors(folder, only=stored[:1]))
    offset = name == "final_norm" and read_ends(config, str(target), head=True).norm_offset
    return 1 + held.float() if offset else held


def vllm_config(asked: dict, folder: Path, steps: int = SPECULATIVE_TOKENS) -> dict:
    """Return vLLM's `--speculative-config` for an export in `folder`.

    asked: what `Family.vllm` returns. steps: number of tokens to draft, where the method does not fix it.
    """
    return {"model": str(folder), "num_speculative_tokens": steps} | asked


def start_command(server: str, checkpoint: Checkpoint, folder: Path, target: str) -> str | None:
    """Return the command that serves `target` with an export of the checkpoint in `folder`.

    `target` is a folder or hub name. Without a known algorithm of SGLang return None.
    """
    family = checkpoint.family
    if server == "vllm":
        config = vllm_config(family.vllm(checkpoint.meaning), folder)
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
    algorithm = family.sglang(checkpoint.meaning)
    if algorithm is None:
        return None
    flags = {"model-path": target, "speculative-algorithm": algorithm, "speculative-draft-model-path": folder}
    if algorithm.startswith("EAGLE"):  # a block says itself how many tokens it drafts
        flags["speculative-num-steps"] = SPECULATIVE_TOKENS
        flags["speculative-eagle-topk"] = 1
        flags["speculative-num-draft-tokens"] = SPECULATIVE_TOKENS + 1
    if (folder / TOKEN_MAP).exists():
        flags["speculative-token-map"] = folder / TOKEN_MAP
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])
