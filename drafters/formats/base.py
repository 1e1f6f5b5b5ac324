"""What a layout and a family are, and the parts that several of them share.

A *family* (EAGLE-3, EAGLE-1/2, ...) is one forward. A *layout* is one way to spell its checkpoints. Reading removes the
spelling: a `Meaning`, whose fields mean one thing each, and the tensors under the family's published names remain.
Building a drafter, describing a checkpoint, writing another layout and trying another reading all start from these two,
so every convention is interpreted in one place.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specdec.contracts import Drafter
from specdec.drafters.layers import DraftShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.rope import Rope
from specdec.model.target import Target

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TargetFacts:
    """What a layout states about the target that a drafter belongs to, and what it copies from it.

    part(name) returns a tensor of the target: 'embedding' [V,H], 'head' [V,H] or 'final_norm' [H], what the final norm
    multiplies by. It raises ValueError for one that is not there."""

    name: str
    architectures: tuple[str, ...]
    layers: int
    part: Callable[[str], Tensor]


def facts_of(target) -> TargetFacts | None:
    """The facts of a loaded target; None without a target."""
    if target is None:
        return None

    def part(name: str) -> Tensor:
        if name != "final_norm":
            return (target.embed if name == "embedding" else target.head).weight
        if not isinstance(target, Target):
            raise ValueError(f"{target.name} runs through transformers, so the weight of its final norm is not known")
        return target.norm.gain()

    return TargetFacts(target.name, (), target.config.layers, part)


class Meaning:
    """What a checkpoint means, whatever its spelling. Each family has a frozen dataclass of it.

    Conversions ask every family for the attributes below. A family in which one of them varies declares a field or a
    property of that name."""

    own_head: bool = True  # False: the file holds no head, and the drafter takes the target's rows
    own_embedding: bool = False  # True: the drafter has an embedding of its own, False: the target's
    taps: tuple[int, ...] | None = None  # the taps that the checkpoint lists, as indices into hidden_states


@dataclass(frozen=True)
class Layout:
    """One spelling of a family's checkpoints.

    recognise(config, tensors) says whether a checkpoint is spelled so; its tensors may be on the meta device.
    read(config, tensors, name) returns the meaning, and the tensors under the family's names.
    write(meaning, tensors, target) returns the config, and the tensors as spelled here. It raises ValueError for what
    the layout cannot express.
    doubts(config) returns what the config leaves open, or what others read otherwise, a sentence each.
    """

    name: str
    title: str
    recognise: Callable[[dict, Tensors], bool]
    read: Callable[[dict, Tensors, str], tuple[Any, Tensors]]
    write: Callable[[Any, Tensors, TargetFacts | None], tuple[dict, Tensors]]
    shares_head: bool = False  # a checkpoint without a head means the target's
    names_layers: bool = False  # it lists taps by layers, and not every hidden state of the target has a name there
    doubts: Callable[[dict], list[str]] = lambda config: []
    wants: Callable[[dict, str], bool] = lambda config, name: True  # which tensors belong to the drafter
    apart: tuple[str, str] | None = None  # a pickle of its own, and how the names of its tensors begin
    beside: Callable[[Tensors], dict[str, Any]] = lambda tensors: {}  # further pickles, as for `write_folder`


@dataclass(frozen=True)
class Reading:
    """Another way to read a checkpoint: its meaning and its tensors in that reading."""

    name: str
    meaning: Any
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Family:
    """One forward of a drafter, and what can be done with its checkpoints once their spelling is gone.

    construct(meaning, tensors, target, name) builds a drafter. It raises ValueError unless every tensor fits the
    meaning, and the meaning the target.
    expected(meaning, tensors) returns names and shapes that a checkpoint of this meaning must hold.
    describe(meaning, tensors) returns every convention in force, in words. The tensors may be on the meta device, but
    for d2t and t2d.
    readings(meaning, tensors, target) returns the plausible misreadings, but for other taps.
    dismantle(drafter, target) returns what a drafter means, and its tensors: the reverse of `construct`.
    vllm(meaning) returns what vLLM's `--speculative-config` says beyond the folder of the export: the method, and how
    many tokens are drafted where it is always the same number. sglang(meaning) returns SGLang's name of the algorithm;
    None where nothing is known of it.
    refuse(server, meaning) raises ValueError for what the server's forward would silently compute otherwise. It names
    the settings of training that would change that.
    faults(meaning, tensors) returns what else than a tensor's name or shape keeps a checkpoint from loading.
    streams(meaning, tensors) returns how many hidden states the drafter reads at once; 0 if none can be chosen.
    retap(meaning, taps) returns the meaning with other taps, as many as that.

    All tensors are under the family's published names.
    """

    title: str
    construct: Callable[[Any, Tensors, Any, str], Drafter]
    expected: Callable[[Any, Tensors], dict[str, torch.Size]]
    describe: Callable[[Any, Tensors], dict[str, str]]
    readings: Callable[[Any, Tensors, Any], list[Reading]]
    dismantle: Callable[[Any, Any], tuple[Any, Tensors]] | None = None
    drafter: type[Drafter] | None = None  # the class of drafters that are saved as this family
    saved_as: str = ""  # the name of the layout that they are saved in
    sign: str = ""  # the tensors that show the family, for users
    servers: Mapping[str, str] = field(default_factory=dict)  # server -> name of the layout that it loads
    vllm: Callable[[Any], dict] | None = None
    sglang: Callable[[Any], str | None] = lambda meaning: None
    refuse: Callable[[str, Any], None] = lambda server, meaning: None
    faults: Callable[[Any, Tensors], list[str]] = lambda meaning, tensors: []
    streams: Callable[[Any, Tensors], int] = lambda meaning, tensors: 0
    retap: Callable[[Any, tuple[int, ...]], Any] = lambda meaning, taps: meaning
    aside: tuple[str, ...] = ()  # tensors that may be there beside the expected ones
    knows_tensors: bool = True  # False: `expected` cannot tell which tensors ought to be there

    def build(self, meaning: Any, tensors: Tensors, target: Any, name: str) -> Drafter:
        """As `construct`, and no weight is drawn that is then read: of large heads that takes seconds."""
        with _Unset():
            return self.construct(meaning, tensors, target, name)


class _Unset(TorchFunctionMode):
    """The functions of `torch.nn.init` leave tensors as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def describe_shape(shape: DraftShape) -> dict[str, str]:
    """The shape of a draft layer, in words."""
    grouped = f", {shape.kv_heads} for keys and values" if shape.kv_heads != shape.heads else ""
    return {
        "layer": f"hidden {shape.hidden}, MLP {shape.intermediate}, {shape.heads} heads of {shape.head_dim}{grouped}",
        "rope": describe_rope(shape.rope),
        "context": f"{shape.context} positions",
        "rms_norm_eps": f"{shape.eps:g}",
    }


def describe_rope(rope: Rope) -> str:
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"theta {rope.theta:g}{scaling}"


def rope_readings(meaning, tensors: Tensors, target) -> list[Reading]:
    """Readings with the two ropes that a config may mean if it states none or a copied one."""
    seen, out = {meaning.shape.rope}, []
    for name, rope in (("the target's rope", target.config.rope), ("rope as where none is stated", Rope())):
        if rope not in seen:
            seen.add(rope)
            shape = dataclasses.replace(meaning.shape, rope=rope)
            words = f"{name}, {describe_rope(rope)}"
            out.append(Reading(words, dataclasses.replace(meaning, shape=shape), tensors))
    return out


def one_tap(meaning, taps: tuple[int, ...]):
    """`Family.retap` of families that read one hidden state."""
    return dataclasses.replace(meaning, tap=taps[0])


def shape_faults(shape: DraftShape) -> list[str]:
    """The numbers of a shape with which nothing can be computed."""
    out = [shape.rope.fault()]
    if not 0 <= shape.eps < 1:
        out.append(f"rms_norm_eps is {shape.eps:g}, and must be from 0 to 1")
    if shape.context < 1:
        out.append(f"max_position_embeddings is {shape.context}, and must be at least 1")
    return [fault for fault in out if fault]


def ids_faults(meaning, tensors: Tensors) -> list[str]:
    """What is wrong with `draft_ids`."""
    try:
        DraftVocab(meaning.vocab or 2**31, tensors.get("draft_ids"))
    except ValueError as error:
        return [str(error)]
    return []


def check_faults(faults: list[str], name: str) -> None:
    """Raise ValueError, with the checkpoint's name, for the first of these."""
    if faults:
        raise ValueError(f"{name}: {faults[0]}")


def check_target(hidden: int, vocab: int, target, name: str) -> None:
    """Raise ValueError, with the two numbers, unless hidden size and vocabulary are the target's."""
    if hidden != target.config.hidden:
        raise ValueError(f"{name}: the drafter's hidden size is {hidden}, the target's is {target.config.hidden}")
    if vocab != target.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {vocab}, the target's is {target.vocab}")


def differences(family: Family, meaning, tensors: Tensors) -> list[str]:
    """The tensors that keep a checkpoint from loading: those that are missing, left over or of another shape."""
    wanted = family.expected(meaning, tensors)
    extra = sorted(set(tensors) - set(wanted) - set(family.aside))
    return (
        [f"{name} is missing" for name in sorted(set(wanted) - set(tensors))]
        + [f"{name} is left over" for name in extra]
        + [
            f"{name} holds whole numbers, and no weights"
            for name in sorted(wanted)
            if name in tensors and not tensors[name].is_floating_point() and name not in ("d2t", "draft_ids")
        ]
        + [
            f"{name} has shape {list(tensors[name].shape)}, the config asks for {list(shape)}"
            for name, shape in sorted(wanted.items())
            if name in tensors and tensors[name].shape != shape
        ]
    )
