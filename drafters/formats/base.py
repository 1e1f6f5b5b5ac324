"""What a layout and a family are, and the parts that several of them share.

A *family* (EAGLE-3, EAGLE-1/2, ...) is one forward. A *layout* is one way to spell its checkpoints. Reading removes the
layout: a `Meaning`, whose fields mean one thing each, and the tensors under the family's published names remain.
Building a drafter, describing a checkpoint, writing another layout and trying another reading all start from these two,
so every convention is interpreted in one place.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specdec.contracts import Drafter
from specdec.drafters.formats.parts import describe_rope, fill, shape_faults
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import check_shapes
from specdec.model.language_model import LanguageModel
from specdec.model.rope import Rope

Tensors = dict[str, Tensor]
Sizes = tuple[int | None, int | None]  # a target's hidden size and vocabulary, as far as they are stated
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class TargetFacts:
    """What a layout states about the target that a drafter belongs to, and what it copies from it.

    part(name) returns a tensor of the target: 'embedding' [V,H], 'head' [V,H] or 'final_norm' [H], what the final norm
    multiplies by. It raises ValueError for one that is not there.
    """

    name: str
    architectures: tuple[str, ...]
    layers: int
    part: Callable[[str], Tensor]
    sizes: Sizes = (None, None)


def facts_of(target: LanguageModel) -> TargetFacts:
    """The facts of a loaded target."""

    def part(name: str) -> Tensor:
        if name != "final_norm":
            return (target.embed if name == "embedding" else target.head).weight
        return target.norm_gain()

    return TargetFacts(target.name, (), target.config.layers, part, (target.config.hidden, target.vocab))


class Meaning:
    """What a checkpoint means, whatever its spelling. Each family has a frozen dataclass of it.

    Conversions ask every family for the attributes below. A family in which one of them varies declares a field or a
    property of that name.
    """

    own_head: bool = True  # False: the file holds no head, and the drafter takes the target's rows
    own_embedding: bool = False  # True: the drafter has an embedding of its own, False: the target's
    taps: tuple[int, ...] | None = None  # those that the checkpoint lists, as indices into hidden_states


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
    pickles: Callable[[Tensors], dict[str, Any]] = lambda tensors: {}  # further pickles, as for `write_folder`


def write_only(name: str, title: str, write: Callable, **switches) -> Layout:
    """A layout for a server: what is written is recognised and read as the published layout that it is in."""
    return Layout(name, title, lambda *given: False, lambda *given: (None, {}), write, **switches)


def needed(target: TargetFacts | None) -> TargetFacts:
    """Raises ValueError without a target, of which a layout of vLLM's holds parts."""
    if target is None:
        raise ValueError("an export for vLLM holds parts of its target: give --target")
    return target


@dataclass(frozen=True)
class Reading:
    """Another way to read a checkpoint: its meaning and its tensors in that reading."""

    name: str
    meaning: Any
    tensors: Tensors


class Family:
    """One forward of a drafter, and what can be done with its checkpoints once their spelling is gone.

    A family is a subclass, of which `FAMILIES` has one instance. It defines how a drafter is made (`make`), where its
    tensors go (`parameters`), which conventions are in force (`describe`), and what else differs from this class. All
    tensors are under the family's published names.
    """

    title: str
    noun: str  # a drafter of the family, in errors
    drafter: type[Drafter] | None = None  # the class of drafters that are saved as this family
    saved_as: str = ""  # the name of the layout that they are saved in
    sign: str = ""  # the tensors that show the family, for users
    servers: Mapping[str, str] = MappingProxyType({})  # server -> the name of the layout that it loads
    optional: tuple[str, ...] = ()  # tensors that may be there in addition to those of `parameters`
    reads: int = 1  # hidden states, where the number is always the same; 0 if none can be chosen
    knows_tensors: bool = True  # False: `expected` does not list the tensors
    objective: str = "recipe"  # of conf/objective, which trains its checkpoints further
    method: str = ""  # vLLM's name of the method
    algorithm: str | None = None  # SGLang's name of the algorithm

    def make(self, meaning: Any, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor) -> Drafter:
        """The drafter without its weights, on the device that torch is set to. embedding, head [V,H]: the target's."""
        raise NotImplementedError

    def parameters(self, drafter: Any) -> Tensors:
        """Published tensor names -> our parameters, or rows of them as views."""
        raise NotImplementedError

    def taps(self, meaning: Any, layers: int) -> tuple[int, ...]:
        """The hidden states that the drafter reads of a target of so many layers; by default the last one."""
        return meaning.taps or (layers,)

    def vocab(self, meaning: Any, tensors: Tensors, target: Any, name: str) -> DraftVocab:
        """The tokens that the drafter proposes."""
        return DraftVocab(target.vocab, tensors.get("draft_ids"))

    def embedding(self, meaning: Any, tensors: Tensors, target: Any) -> Tensor:
        """Return the embedding [V,H] that the drafter uses: the file's if that is its own, else the target's."""
        own = meaning.own_embedding and EMBEDDING in tensors
        return tensors[EMBEDDING].to(target.device, target.dtype) if own else target.embed.weight

    def sizes(self, meaning: Any) -> Sizes:
        """Hidden size and vocabulary of the target that the drafter was trained for."""
        return meaning.shape.hidden, meaning.vocab

    def check(self, meaning: Any, tensors: Tensors, target: Any, name: str) -> None:
        """Raise ValueError for anything else in the meaning that does not fit the target."""

    def construct(self, meaning: Any, tensors: Tensors, target: Any, name: str) -> Drafter:
        """Build a drafter. Raises ValueError unless every tensor fits the meaning, and the meaning the target.

        No weight is drawn that is then read: of large heads that would take seconds.
        """
        # First, as faults may follow from a target of another size.
        check_target(self.sizes(meaning), (target.config.hidden, target.vocab), name)
        if faults := self.faults(meaning, tensors):
            raise ValueError(f"{name}: {faults[0]}")
        self.check(meaning, tensors, target, name)
        check_shapes(name, tensors, self.expected(meaning, tensors))
        taps, vocab = self.taps(meaning, target.config.layers), self.vocab(meaning, tensors, target, name)
        embedding = self.embedding(meaning, tensors, target)
        with target.device, Unset():
            drafter = self.make(meaning, taps, vocab, embedding, target.head.weight)
        fill(self.parameters(drafter), tensors, name, self.noun, self.optional)
        return drafter

    def built_for(self, meaning: Any, tensors: Tensors) -> int:
        """How many hidden states the drafter is made for, by its meaning."""
        return self.streams(meaning, tensors)

    def proposed(self, meaning: Any, tensors: Tensors) -> int:
        """How many tokens the drafter proposes, by its meaning: its `draft_vocab`, if the family has one."""
        return getattr(meaning, "draft_vocab", meaning.vocab)

    def expected(self, meaning: Any, tensors: Tensors) -> dict[str, torch.Size]:
        """Names and shapes that a checkpoint of this meaning must hold."""
        with torch.device("meta"):
            ends, vocab = torch.empty(meaning.vocab or 1, meaning.shape.hidden), DraftVocab(meaning.vocab or 1)
            vocab.size = self.proposed(meaning, tensors)
            drafter = self.make(meaning, (0,) * self.built_for(meaning, tensors), vocab, ends, ends)
        shapes = {name: rows.shape for name, rows in self.parameters(drafter).items()}
        return shapes | {name: tensors[name].shape for name in ("draft_ids",) if name in tensors}

    def faults(self, meaning: Any, tensors: Tensors) -> list[str]:
        """What else than a tensor's name or shape keeps a checkpoint from loading."""
        return shape_faults(meaning.shape) + ids_faults(meaning, tensors)

    def dismantle(self, drafter: Any, target: Any) -> tuple[Any, Tensors]:
        """What a drafter means, and its tensors: the reverse of `construct`."""
        raise NotImplementedError

    def describe(self, meaning: Any, tensors: Tensors) -> dict[str, str]:
        """Every convention in force, in words. The tensors may be on the meta device, but for d2t and t2d."""
        raise NotImplementedError

    def readings(self, meaning: Any, tensors: Tensors, target: Any) -> list[Reading]:
        """The plausible misreadings, but for other taps."""
        return []

    def rope_readings(self, meaning: Any, tensors: Tensors, target: Any) -> list[Reading]:
        """Readings with the two ropes that a config may mean if it states none or a copied one."""
        seen, out = {meaning.shape.rope}, []
        for name, rope in (("the target's rope", target.config.rope), ("rope as where none is stated", Rope())):
            if rope not in seen:
                seen.add(rope)
                shape = dataclasses.replace(meaning.shape, rope=rope)
                words = f"{name}, {describe_rope(rope)}"
                out.append(Reading(words, dataclasses.replace(meaning, shape=shape), tensors))
        return out

    def sglang(self, meaning: Any) -> str | None:
        """SGLang's name of the algorithm; None where nothing is known of it."""
        return self.algorithm

    def vllm(self, meaning: Any) -> dict:
        """Return the fields of vLLM's `--speculative-config` that the exported folder does not state.

        These are the method, and the number of drafted tokens where it is fixed.
        """
        return {"method": self.method}

    def refuse(self, server: str, meaning: Any) -> None:
        """Raise ValueError for a drafter whose drafts the server's forward would silently compute differently.

        The message names the training settings that avoid the difference.
        """

    def streams(self, meaning: Any, tensors: Tensors) -> int:
        """How many hidden states the drafter reads at once; 0 if none can be chosen."""
        return self.reads


class Unset(TorchFunctionMode):
    """The functions of `torch.nn.init` leave tensors as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Return the tensor unchanged if `function` is one of `torch.nn.init`, and call any other function."""
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def ids_faults(meaning, tensors: Tensors) -> list[str]:
    """What is wrong with `draft_ids`."""
    try:
        DraftVocab(meaning.vocab or 2**31, tensors.get("draft_ids"))
    except ValueError as error:
        return [str(error)]
    return []


def check_target(trained_for: Sizes, target: Sizes, name: str) -> None:
    """Raise ValueError, with both numbers, if hidden size or vocabulary, where stated, differ from the target's."""
    words = ("the drafter's hidden size is", "the drafter is for a vocabulary of")
    for said, its, others in zip(words, trained_for, target, strict=True):
        if None not in (its, others) and its != others:
            raise ValueError(f"{name}: {said} {its}, the target's is {others}: give the target that it was trained for")


def differences(family: Family, meaning, tensors: Tensors) -> list[str]:
    """The tensors that keep a checkpoint from loading: those that are missing, left over or of another shape."""
    wanted = family.expected(meaning, tensors)
    there = [(name, tensors[name], shape) for name, shape in sorted(wanted.items()) if name in tensors]
    weights = [(name, tensor) for name, tensor, _ in there if name not in ("d2t", "draft_ids")]
    return [
        *(f"{name} is missing" for name in sorted(set(wanted) - set(tensors))),
        *(f"{name} is left over" for name in sorted(set(tensors) - set(wanted) - set(family.optional))),
        *(f"{name} holds whole numbers, and no weights" for name, tensor in weights if not tensor.is_floating_point()),
        *(
            f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
            for name, tensor, shape in there
            if tensor.shape != shape
        ),
    ]
