"""EAGLE-3: what its checkpoints mean. Their spelling is in `eagle3_layout`, `speculators` and `vllm`.

Published names of the tensors: midlayer.*, fc, norm, lm_head, d2t (target id minus draft id) and t2d (membership). The
embedding is always the target's, even if the file holds one: exporters have been seen to store a random one. Where the
config states no draft_vocab_size and the file holds no lm_head, the head is the target's, as SGLang and vLLM read it.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.contracts import Drafter
from specdec.drafters.eagle3 import Eagle3, Eagle3Forward
from specdec.drafters.formats.base import EMBEDDING, Family, Meaning, Reading, Sizes, Tensors
from specdec.drafters.formats.maps import describe_vocab, map_fault, map_readings, read_vocab
from specdec.drafters.formats.parts import describe_shape, layer_parameters, shape_faults
from specdec.drafters.layers import DraftShape, SharedHead
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole
from specdec.model.target import check_taps

PROJECTIONS = [f"midlayer.self_attn.{x}_proj" for x in "qkv"]


@dataclass(frozen=True)
class Eagle3Meaning(Meaning):
    """What the head of a checkpoint is."""

    shape: DraftShape
    vocab: int  # the target's tokens
    draft_vocab: int  # tokens that the head proposes
    tap_width: int  # the target's hidden size
    forward: Eagle3Forward
    taps: tuple[int, ...] | None = None  # indices into hidden_states; None for the published default
    own_head: bool = True

    @property
    def own_embedding(self) -> bool:  # type: ignore[override]
        """True for a drafter narrower or wider than the target, which cannot share the target's embedding."""
        return self.tap_width != self.shape.hidden


def ascending(meaning: Eagle3Meaning, tensors: Tensors) -> tuple[Eagle3Meaning, Tensors]:
    """Return the same head with its taps in ascending order, the order in which servers gather them.

    The columns of `fc`, the norms of the taps and P-EAGLE's `mask_hidden` are permuted accordingly. Raises ValueError
    for a tap listed twice.
    """
    taps = meaning.taps
    if taps is None or all(a < b for a, b in itertools.pairwise(taps)):
        return meaning, tensors
    if len(set(taps)) < len(taps):
        raise ValueError(f"the drafter reads a hidden state twice, and servers give it once: taps {list(taps)}")
    order = sorted(range(len(taps)), key=taps.__getitem__)
    moved = {}
    if meaning.forward.tap_norms:
        moved = {f"fc_norm.{new}.weight": tensors[f"fc_norm.{old}.weight"] for new, old in enumerate(order)}
    for name in {"fc.weight", "input_norm.weight", "mask_hidden"} & set(tensors):
        streams = tensors[name].chunk(len(taps), dim=-1)
        moved[name] = torch.cat([streams[i] for i in order], dim=-1)
    return dataclasses.replace(meaning, taps=tuple(taps[i] for i in order)), tensors | moved


SGLANG_KNOWS = ("tap_norms", "input_norm", "feedback")  # of the switches; the rest of its forward is the default


class Eagle3Family(Family):
    """Define the family of EAGLE-3 heads (arXiv 2503.01840)."""

    title = noun = "EAGLE-3"
    drafter: type[Drafter] = Eagle3
    saved_as = "specdec"
    sign = "midlayer.* with fc"
    servers = MappingProxyType({"vllm": "vllm", "sglang": "eagle3"})
    method = "eagle3"
    algorithm: str | None = "EAGLE3"
    optional: tuple[str, ...] = ("d2t", "t2d", EMBEDDING)

    @override
    def parameters(self, drafter: Any) -> Tensors:
        out = (
            whole(drafter.fc, "fc")
            | whole(drafter.norm, "norm")
            | whole(drafter.embed_norm, "midlayer.input_layernorm")  # which normalises embeddings
            | whole(drafter.hidden_norm, "midlayer.hidden_norm")
            | layer_parameters(drafter, "midlayer")
        )
        if isinstance(drafter.head, nn.Linear):
            out |= whole(drafter.head, "lm_head")
        if drafter.input_norm is not None:
            out |= whole(drafter.input_norm, "input_norm")
        for i, norm in enumerate(drafter.tap_norms or ()):
            out |= whole(norm, f"fc_norm.{i}")
        return out

    @override
    def make(self, meaning: Eagle3Meaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        drafter = Eagle3(meaning.shape, taps, vocab, embedding, meaning.forward, meaning.tap_width)
        if not meaning.own_head:
            drafter.head = SharedHead(head, vocab.ids)
        return drafter

    @override
    def taps(self, meaning: Eagle3Meaning, layers: int) -> tuple[int, ...]:
        return meaning.taps or (2, layers // 2, layers - 3)

    @override
    def vocab(self, meaning: Eagle3Meaning, tensors: Tensors, target, name: str) -> DraftVocab:
        vocab = read_vocab(tensors, target.vocab, name)
        if vocab.size != meaning.draft_vocab:
            asked = meaning.draft_vocab
            raise ValueError(f"{name}: the draft vocabulary has {vocab.size} tokens, the config says {asked}")
        return vocab

    @override
    def sizes(self, meaning: Eagle3Meaning) -> Sizes:
        return meaning.tap_width, meaning.vocab

    @override
    def check(self, meaning: Eagle3Meaning, tensors: Tensors, target, name: str) -> None:
        check_taps(self.taps(meaning, target.config.layers), target.config.layers)
        if EMBEDDING not in tensors and meaning.shape.hidden != target.config.hidden:
            raise ValueError(f"{name}: a drafter narrower or wider than the target needs {EMBEDDING} of its own")

    @override
    def expected(self, meaning: Eagle3Meaning, tensors: Tensors) -> dict[str, torch.Size]:
        mapped = {"d2t": torch.Size([meaning.draft_vocab])} if meaning.draft_vocab != meaning.vocab else {}
        return super().expected(meaning, tensors) | mapped

    @override
    def faults(self, meaning: Eagle3Meaning, tensors: Tensors) -> list[str]:
        taps, width, out = meaning.taps, tensors["fc.weight"].shape[-1], shape_faults(meaning.shape)
        count = 3 if taps is None else len(taps)
        if width != (given := count * meaning.tap_width):
            out.append(f"fc.weight takes {width} features, {count} taps of {meaning.tap_width} give {given}")
        if min(taps or (0,)) < 0:
            out.append(f"the taps {list(taps or ())} name a hidden state below 0")
        fault = map_fault(tensors, meaning.vocab)
        return [*out, fault] if fault else out

    def dismantle(self, drafter: Eagle3, target) -> tuple[Eagle3Meaning, Tensors]:
        """Raises ValueError for a draft vocabulary out of order, which the layouts cannot express."""
        vocab = drafter.vocab
        ids = torch.arange(vocab.size) if vocab.ids is None else vocab.ids.cpu()
        if not torch.equal(ids, ids.sort().values):
            raise ValueError("the EAGLE-3 layout needs a draft vocabulary in ascending order of ids")
        tensors = self.parameters(drafter) | {"fc.weight": drafter.scaled_fc()}
        own_head = isinstance(drafter.head, nn.Linear)  # else rows of the target's
        if own_head or vocab.ids is not None:
            tensors |= {"d2t": ids - torch.arange(vocab.size), "t2d": vocab.contains()}
        if own_head:
            tensors["lm_head.weight"] = drafter.head.weight
        width = drafter.fc.in_features // len(drafter.taps)
        if width != drafter.shape.hidden:
            tensors[EMBEDDING] = drafter.embedding
        meaning = Eagle3Meaning(
            drafter.shape, vocab.target_size, vocab.size, width, drafter.switches, taps=drafter.taps, own_head=own_head
        )
        return meaning, tensors

    @override
    def refuse(self, server: str, meaning: Eagle3Meaning) -> None:
        if server != "sglang":
            return
        other = {
            field.name: str(field.default).lower()
            for field in dataclasses.fields(Eagle3Forward)
            if field.name not in SGLANG_KNOWS and getattr(meaning.forward, field.name) != field.default
        }
        if other:
            settings = " ".join(f"drafter.{name}={value}" for name, value in other.items())
            names = ", ".join(other)
            raise ValueError(
                f"SGLang would draft wrongly with this head: its forward knows no {names} (train with {settings})"
            )
        if len(meaning.taps or (0,) * 3) * meaning.tap_width == meaning.shape.hidden:
            raise ValueError(
                "SGLang would draft wrongly with this head: features as wide as the head do not go through fc there "
                "(train with drafter.taps=3)"
            )

    @override
    def describe(self, meaning: Eagle3Meaning, tensors: Tensors) -> dict[str, str]:
        how, count = meaning.forward, self.streams(meaning, tensors)
        norms = "one for each tap" if how.tap_norms else "one over all taps" if how.input_norm else "none"
        head = "its own" if meaning.own_head else "none in the file: the target's rows"
        return describe_shape(meaning.shape) | {
            "taps": ", ".join(f"hidden_states[{tap}]" for tap in meaning.taps)
            if meaning.taps
            else f"not listed: the default hidden_states[2], [N//2], [N-3] of {count} streams",
            "fc input": f"{count} x {meaning.tap_width}, in the order of the taps; norm before fc: {norms}",
            "layer input": "[norm(embedding), norm(hidden)], the embedding first",
            "residual": "the normed hidden state" if how.residual_norm else "the hidden state as it is",
            "feedback": f"the hidden state {'after' if how.feedback == 'post' else 'before'} the final norm",
            "head": f"{head}, {'after' if how.head_norm else 'without'} the final norm",
            "biases": "q, k, v" if how.qkv_bias else "none",
            "q and k norm": "yes" if how.qk_norm else "no",
            "vocabulary": describe_vocab(tensors, meaning.vocab, meaning.draft_vocab),
            "embedding": "the target's" + (", not the file's" if EMBEDDING in tensors else ""),
        }

    def readings(self, meaning: Eagle3Meaning, tensors: Tensors, target) -> list[Reading]:
        """Each has been met in the wild, or in an issue of a serving system."""
        layers, how = target.config.layers, meaning.forward
        replace = dataclasses.replace
        out = []
        taps = self.taps(meaning, layers)
        for shift, words in ((1, "outputs of the layers listed"), (-1, "inputs of the layers before")):
            moved = tuple(tap + shift for tap in taps)
            if all(0 <= tap <= layers for tap in moved):
                out.append(Reading(f"taps {shift:+d}, {list(moved)}: {words}", replace(meaning, taps=moved), tensors))
        out += self.rope_readings(meaning, tensors, target)
        for feedback, head_norm in (("pre", True), ("post", True), ("pre", False)):
            if (feedback, head_norm) != (how.feedback, how.head_norm):
                words = f"feedback {'before' if feedback == 'pre' else 'after'} the final norm"
                words += "" if head_norm else ", which the head does not see"
                forward = replace(how, feedback=feedback, head_norm=head_norm)
                out.append(Reading(words, replace(meaning, forward=forward), tensors))
        flipped = replace(how, residual_norm=not how.residual_norm)
        out.append(Reading(f"norm_before_residual {flipped.residual_norm}", replace(meaning, forward=flipped), tensors))
        swapped = {f"{name}.weight": tensors[f"{name}.weight"] for name in PROJECTIONS}
        swapped = {name: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) for name, weight in swapped.items()}
        out.append(Reading("layer input [hidden, embedding]", meaning, tensors | swapped))
        a, b = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
        exchanged = tensors | {a: tensors[b], b: tensors[a]}
        out.append(Reading("norms of embedding and hidden exchanged", meaning, exchanged))
        return out + map_readings(meaning, tensors)

    @override
    def streams(self, meaning: Eagle3Meaning, tensors: Tensors) -> int:
        return tensors["fc.weight"].shape[-1] // meaning.tap_width


FAMILY = Eagle3Family()
