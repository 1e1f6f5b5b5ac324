"""Heads made from the bundled ones for `check_in_vllm.py`, one for each thing that an export for vLLM can say.

They draft worse than what they are made from, and what vLLM makes of them must be the same all the same.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import checkout  # noqa: F401
import torch
from torch import Tensor

from specdec.api import DEMO_TARGET
from specdec.drafters.formats import Checkpoint, find_layout, open_checkpoint
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.formats.eagle3 import PROJECTIONS
from specdec.model.checkpoint import write_folder
from specdec.model.rope import Rope

TAPS = (2, 5, 7)  # instead of 2, 5 and 8: the last is what vLLM has under a name of its own

Change = Callable[..., Checkpoint]


def changed(head: Checkpoint, drop: tuple[str, ...] = (), add: dict[str, Tensor] | None = None, **fields) -> Checkpoint:
    """A head with other tensors and another meaning; names of `Eagle3Forward` go to its switches."""
    meaning, tensors = head.meaning, {k: t for k, t in head.tensors.items() if not k.startswith(drop or ("?",))}
    switches = {name: fields.pop(name) for name in list(fields) if hasattr(getattr(meaning, "forward", None), name)}
    if switches:
        fields["forward"] = dataclasses.replace(meaning.forward, **switches)
    return dataclasses.replace(head, meaning=dataclasses.replace(meaning, **fields), tensors=tensors | (add or {}))


def noise(*shape: int, scale: float = 0.1) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()


@torch.no_grad()
def loudness(target, taps: tuple[int, ...]) -> list[Tensor]:
    """The usual root mean square of each tapped state, and of all of them together."""
    tokens = torch.arange(100, 400)[None]
    _, feats = target(tokens, None, taps=taps, logits=False)
    rms = [x.square().mean(-1).sqrt().mean() for x in (*feats.chunk(len(taps), dim=-1), feats)]
    return [x.cpu() for x in rms]


def without_norms(head: Checkpoint, target) -> Checkpoint:
    """The norms of the taps as constant factors of `fc`."""
    *each, _ = loudness(target, head.meaning.taps)
    streams = head.tensors["fc.weight"].float().chunk(len(each), dim=1)
    gains = [head.tensors[f"fc_norm.{i}.weight"].float() / rms for i, rms in enumerate(each)]
    fc = torch.cat([stream * gain for stream, gain in zip(streams, gains, strict=True)], dim=1)
    return changed(head, ("fc_norm",), {"fc.weight": fc.bfloat16()}, tap_norms=False)


def one_norm(head: Checkpoint, target) -> Checkpoint:
    """The norms of the taps as one norm over all of them."""
    *each, all_ = loudness(target, head.meaning.taps)
    gains = [head.tensors[f"fc_norm.{i}.weight"].float() * all_ / rms for i, rms in enumerate(each)]
    return changed(
        head, ("fc_norm",), {"input_norm.weight": torch.cat(gains).bfloat16()}, tap_norms=False, input_norm=True
    )


def chosen(head: Checkpoint, order: tuple[int, ...]) -> Checkpoint:
    """The head with some of its taps, in this order: the columns of `fc` and the norms move along."""
    streams = head.tensors["fc.weight"].chunk(len(head.meaning.taps), dim=1)
    norms = {f"fc_norm.{i}.weight": head.tensors[f"fc_norm.{j}.weight"] for i, j in enumerate(order)}
    tensors = {"fc.weight": torch.cat([streams[j] for j in order], dim=1)} | norms
    return changed(head, ("fc_norm",), tensors, taps=tuple(head.meaning.taps[j] for j in order))


def eagle3_variants(head: Checkpoint, target) -> Iterator[tuple[str, Checkpoint]]:
    head = changed(head, taps=TAPS)
    rope = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32)
    biases = {f"{x}.bias": noise(len(head.tensors[f"{x}.weight"]), scale=1.0) for x in PROJECTIONS}
    norms = {f"midlayer.self_attn.{x}_norm.weight": 1 + noise(head.meaning.shape.head_dim) for x in "qk"}
    yield "taps 2, 5, 7", head
    yield "taps 7, 2, 5", chosen(head, (2, 0, 1))
    yield "taps 2, 7", chosen(head, (0, 2))
    yield "no norms of taps", without_norms(head, target)
    yield "one norm of all taps", one_norm(head, target)
    yield "norm_before_residual", changed(head, residual_norm=True)
    yield "feedback before the norm", changed(head, feedback="pre")
    yield "another rope", changed(head, shape=dataclasses.replace(head.meaning.shape, rope=rope))
    yield "biases of q, k, v", changed(head, add=biases, qkv_bias=True)
    yield "norms of q and k", changed(head, add=norms, qk_norm=True)
    yield "the target's head", changed(head, ("d2t", "t2d", "lm_head"), own_head=False, draft_vocab=head.meaning.vocab)


def eagle2_variants(head: Checkpoint, target) -> Iterator[tuple[str, Checkpoint]]:
    rows = {x: head.tensors[f"layers.0.self_attn.{x}_proj.weight"].shape[0] for x in "qkv"}
    biases = {f"layers.0.self_attn.{x}_proj.bias": noise(n, scale=1.0) for x, n in rows.items()}
    yield "no bias of fc", changed(head, ("fc.bias",), fc_bias=False)
    yield "biases of q, k, v", changed(head, add=biases, qkv_bias=True)


def medusa_variants(head: Checkpoint, target) -> Iterator[tuple[str, Checkpoint]]:
    shape, matrix = head.meaning.shape, target.head.weight.cpu().float()
    seconds = {f"{i}.1.linear.weight": noise(shape.hidden, shape.hidden, scale=0.02) for i in range(shape.heads)}
    seconds |= {f"{i}.1.linear.bias": noise(shape.hidden) for i in range(shape.heads)}
    own = {f"{i}.1.weight": (matrix + noise(*matrix.shape, scale=0.01)).bfloat16() for i in range(shape.heads)}
    yield "two blocks", changed(head, add=seconds, shape=dataclasses.replace(shape, blocks=2))
    yield "matrices of its own", changed(head, add=own, shape=dataclasses.replace(shape, own_heads=True))


BUNDLED = {"eagle3": eagle3_variants, "eagle2": eagle2_variants, "medusa": medusa_variants}


def saved(head: Checkpoint, folder: Path, name: str) -> Path:
    """The folder in `folder` that a head is written to, in our own layout."""
    place = folder / name.replace(",", "").replace(" ", "_")
    write_folder(place, *find_layout(head.family, head.family.saved_as).write(head.meaning, head.tensors, None))
    return place


def make(folder: Path, target) -> list[tuple[str, Path, Path, dict]]:
    """Name of the case, folder of the head, folder of its export, and what `Family.vllm` says."""
    made = []
    for bundled, variants in BUNDLED.items():
        checkpoint = open_checkpoint(DEMO_TARGET.parent / bundled)
        family = checkpoint.family
        for name, head in variants(checkpoint, target):
            place = saved(head, folder, f"{bundled} {name}")
            exported = place.with_name(place.name + "_in_vllm")
            export(place, exported, "vllm", DEMO_TARGET)
            made.append((f"{bundled}: {name}", place, exported, family.vllm(head.meaning)))
    place = made[0][1]
    exported = place.with_name(place.name + "_in_sglang")
    convert(place, exported, "eagle3", DEMO_TARGET)
    return [*made, ("eagle3: convert --to eagle3", place, exported, {"method": "eagle3"})]
