"""DFlash and its family: what their checkpoints mean. Their spelling is in `dflash_layout`.

Traps: `target_layer_ids` count layers by their outputs, one less than indices into hidden_states. DeepSpec's "DFlash"
is aligned as DSpark: slot k predicts the token p+k+1, and all slots draft. Its files carry copies of the target's
frozen embeddings and head. The files of z-lab and SpecForge have neither. In their layout `d2t` is ours, for a part of
the vocabulary, which is proposed with the target's rows.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.block_layers import BlockForward
from specdec.drafters.conditional import HEADS, Confidence, head_of
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats.base import Family, Meaning, Reading, Tensors
from specdec.drafters.formats.maps import describe_vocab, map_fault, read_vocab
from specdec.drafters.formats.parts import describe_shape, layer_parameters, number, read_shape, shape_faults
from specdec.drafters.layers import DraftShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole

MARKOV = {"vanilla": "markov", "gated": "markov_gated", "rnn": "markov_rnn"}  # `markov_head_type` -> our name
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target, frozen
SERVERS = {"vllm": ("vLLM", (None, "markov")), "sglang": ("SGLang", (None, "markov", "domino"))}  # heads they know

# Published names of the tensors: of a conditional head, and of parts that are published without `.weight`
PARTS = {
    "markov": {"embed": "markov_head.markov_w1", "head": "markov_head.markov_w2"},
    "domino": {"down": "embed_proj.0", "head": "embed_proj.2"},
}
PARTS["markov_gated"] = PARTS["markov"] | {"gate": "markov_head.gate_proj"}
PARTS["markov_rnn"] = PARTS["markov"] | {"joint": "markov_head.joint_proj"}
PARTS["selector"] = {"slot": "candidate_selector.hidden_projection"}
BARE = {
    "domino": {"token": "prefix_gru.weight_ih_l0", "past": "prefix_gru.weight_hh_l0"},
    "selector": {"embed": "candidate_selector.predecessor_codebook", "head": "candidate_selector.successor_codebook"},
}
CONVOLUTIONS = ("attention_conv", "mlp_conv")


@dataclass(frozen=True)
class BlockMeaning(Meaning):
    """What the drafter of a checkpoint is."""

    shape: DraftShape
    vocab: int  # the target's tokens
    draft_vocab: int
    layers: int
    forward: BlockForward
    taps: tuple[int, ...]
    conditional: str | None = None
    rank: int = 0
    head: Mapping[str, int] = field(default_factory=dict)  # settings of the conditional head
    confidence: int | None = None  # the rank of what its confidence head sees of tokens; None: there is none
    own_head: bool = False

    @property
    def part(self) -> bool:
        """Whether it proposes a part of the vocabulary only."""
        return self.draft_vocab != self.vocab


def meaning_of(
    config: dict, layer: dict, tensors: Tensors, name: str, taps: tuple[int, ...], switches: dict, windowed: dict
) -> tuple[BlockMeaning, Tensors]:
    """Return the meaning by the fields on which all layouts agree, and the tensors without copies of the target's.

    Properties that the tensors determine are read from the tensors, not from the config. layer: config of the draft
    layers. switches: fields of `BlockForward`. windowed: those that count only if a layer has a window.
    """
    angelspec = any(key.startswith(("layer_fusion_weights", "hidden_correction.")) for key in tensors)
    if angelspec or layer.get("model_arch") in ("dflare", "dfly"):
        supported = "DFlash, DFlash2, DSpark, Domino and JetSpec"
        raise ValueError(f"{name}: DFlare and DFly drafters are not supported; supported are {supported}")
    shape = read_shape(layer, name)
    rows, mask = (number(config, key, name) for key in ("block_size", "mask_token_id"))
    windows = {}
    if "sliding_attention" in (kinds := layer.get("layer_types") or []):
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
        windows = {"sliding": sliding, "window": layer.get("sliding_window"), **windowed}
    tensors = {key.removeprefix("logit_head."): tensor for key, tensor in tensors.items()}  # SpecForge's first files
    if any(CONVOLUTIONS[0] in key for key in tensors):
        if (taps_of := config.get("conv_kernel_size", 2)) != 2:
            raise ValueError(f"{name}: conv_kernel_size is {taps_of}, but a slot sees 1 slot before it: supported is 2")
        switches = switches | {"convolution": config.get("conv_group_size", 16)}
    forward = BlockForward(rows, mask, **switches, **windows)
    vocab, sure = layer["vocab_size"], tensors.get("confidence_head.proj.weight")
    if "d2t" not in tensors:
        tensors = {key: tensor for key, tensor in tensors.items() if key not in COPIES}
    meaning = BlockMeaning(
        shape=shape,
        vocab=vocab,
        draft_vocab=len(tensors["d2t"]) if "d2t" in tensors else vocab,
        layers=len({key.split(".")[1] for key in tensors if key.startswith("layers.")}),
        taps=taps,
        forward=forward,
        **conditional_of(config, shape, tensors, name),
        confidence=None if sure is None else sure.shape[1] - shape.hidden,
        own_head="lm_head.weight" in tensors,
    )
    return meaning, tensors


def conditional_of(config: dict, shape: DraftShape, tensors: Tensors, name: str) -> dict:
    """The fields of `BlockMeaning` for the conditional head; empty without one."""
    if (markov := tensors.get("markov_head.markov_w1.weight")) is not None:
        kind = config.get("markov_head_type", "vanilla")
        if not isinstance(kind, str) or kind not in MARKOV:
            raise ValueError(f"{name}: markov_head_type must be one of {', '.join(MARKOV)}, got {kind!r}")
        return {"conditional": MARKOV[kind], "rank": markov.shape[1]}
    if (down := tensors.get("embed_proj.0.weight")) is not None:
        settings = {"state": down.shape[1] - shape.hidden, "prefix": config.get("pure_draft_prefix_len", 1)}
        return {"conditional": "domino", "rank": len(down), "head": settings}
    if (slot := tensors.get("candidate_selector.hidden_projection.weight")) is not None:
        return {"conditional": "selector", "rank": len(slot), "head": {"candidates": config.get("selector_top_k", 16)}}
    return {}


def outputs(config: dict, name: str) -> tuple[int, ...]:
    """Taps as indices into hidden_states from `target_layer_ids`, which count layers by their outputs."""
    ids = config.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{name}: target_layer_ids must be a list of layer numbers, got {ids!r}")
    return tuple(i + 1 for i in ids)


class BlockFamily(Family):
    """Define the family of block drafters: DFlash, DSpark, JetSpec, Domino and DFlash2."""

    objective = "block"
    title, noun = "DFlash", "a block drafter"
    drafter = BlockDrafter
    saved_as = "dflash"
    sign = "fc.* and hidden_norm.*"
    servers, method = MappingProxyType({"vllm": "vllm", "sglang": "sglang"}), "dflash"
    optional = ("d2t", "t2d", "embed_tokens.weight")

    @override
    def parameters(self, drafter: BlockDrafter) -> Tensors:
        out = whole(drafter.hidden_norm, "hidden_norm") | whole(drafter.norm, "norm") | whole(drafter.fc, "fc")
        for i, layer in enumerate(drafter.layers):
            out |= whole(layer.input_norm, f"layers.{i}.input_layernorm") | layer_parameters(layer, f"layers.{i}")
            for convolution, name in zip(layer.convolutions or (), CONVOLUTIONS, strict=False):
                out[f"layers.{i}.{name}.base_kernel"] = convolution.shares
                out |= whole(convolution.groups, f"layers.{i}.{name}.kernel_projection")
        if (head := drafter.conditional) is not None:
            kind = next(name for name, one in HEADS.items() if type(head) is one)
            for part, name in PARTS[kind].items():
                out |= whole(getattr(head, part), name)
            for part, name in BARE.get(kind, {}).items():
                out[name] = getattr(head, part).weight
        if drafter.confidence is not None:
            out |= whole(drafter.confidence.proj, "confidence_head.proj")
        return out | whole(drafter.head, "lm_head")

    @override
    def make(self, meaning: BlockMeaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        conditional = head_of(meaning.conditional, vocab, embedding, meaning.rank, meaning.head)
        confidence = None if meaning.confidence is None else Confidence(meaning.shape.hidden, meaning.confidence)
        rows = None if meaning.own_head else head
        how = meaning.layers, taps, vocab, embedding, rows, meaning.forward, conditional, confidence
        return BlockDrafter(meaning.shape, *how)

    @override
    def vocab(self, meaning: BlockMeaning, tensors: Tensors, target, name: str) -> DraftVocab:
        return read_vocab(tensors, meaning.vocab, name)

    @override
    def check(self, meaning: BlockMeaning, tensors: Tensors, target, name: str) -> None:
        mask, rows = meaning.forward.mask_token, len(target.embed.weight)
        if not 0 <= mask < rows:
            raise ValueError(f"{name}: mask_token_id is {mask}, but the target's embedding has {rows} rows")

    @override
    def built_for(self, meaning: BlockMeaning, tensors: Tensors) -> int:
        return len(meaning.taps)

    @override
    def faults(self, meaning: BlockMeaning, tensors: Tensors) -> list[str]:
        fault = map_fault(tensors, meaning.vocab)
        return shape_faults(meaning.shape) + ([fault] if fault else [])

    @override
    def dismantle(self, drafter: BlockDrafter, target) -> tuple[BlockMeaning, Tensors]:
        vocab, head, sure = drafter.vocab, drafter.conditional, drafter.confidence
        kinds = {kind: name for name, kind in HEADS.items()}
        meaning = BlockMeaning(
            shape=drafter.shape,
            vocab=vocab.target_size,
            draft_vocab=vocab.size,
            layers=len(drafter.layers),
            forward=drafter.switches,
            taps=drafter.taps,
            conditional=kinds[type(head)] if head else None,
            rank=head.rank if head else 0,
            head=head.settings() if head else {},
            confidence=sure.rank if sure else None,
            own_head=isinstance(drafter.head, nn.Linear),  # else rows of the target's
        )
        tensors = self.parameters(drafter)
        if vocab.ids is not None:
            tensors |= {"d2t": vocab.ids - torch.arange(vocab.size, device=vocab.ids.device)}
        return meaning, tensors

    @override
    def describe(self, meaning: BlockMeaning, tensors: Tensors) -> dict[str, str]:
        how = meaning.forward
        first = "slot 0 drafts nothing" if how.unused else "all slots draft"
        windows, count = "none", sum(how.sliding)
        if count:
            windows = f"{count} of {meaning.layers} layers see {how.window} positions, by the {how.window_from}"
            windows += ", and no later slot" if how.sliding_causal else ""
        return describe_shape(meaning.shape) | {
            "layers": str(meaning.layers),
            "taps": f"hidden_states[{', '.join(map(str, meaning.taps))}]",
            "block": f"{how.rows} rows: the last token, then mask tokens {how.mask_token}",
            "alignment": f"slot k predicts token {how.label}, {first}",
            "in the block": "a slot sees no later one" if how.causal else "all slots see each other",
            "windows": windows,
            "convolutions": f"over slots, {how.convolution} channels a group" if how.convolution else "none",
            "fusion": "one projection of the taps for all layers",
            "conditional head": f"{meaning.conditional} of rank {meaning.rank}" if meaning.conditional else "none",
            "confidence head": "none" if meaning.confidence is None else "there",
            "head": "its own" if meaning.own_head else "the target's",
            "vocabulary": describe_vocab(tensors, meaning.vocab, meaning.draft_vocab),
            "embedding": "the target's",
        }

    def readings(self, meaning: BlockMeaning, tensors: Tensors, target) -> list[Reading]:
        """Other tokens that a slot predicts, other visible slots, other ropes."""
        how, replace = meaning.forward, dataclasses.replace
        label = "p+k" if how.label == "p+k+1" else "p+k+1"
        out = [Reading(f"slot k predicts token {label}", replace(meaning, forward=replace(how, label=label)), tensors)]
        causal = replace(how, causal=not how.causal)
        words = "a slot sees no later one" if causal.causal else "all slots see each other"
        out.append(Reading(words, replace(meaning, forward=causal), tensors))
        return [*out, *self.rope_readings(meaning, tensors, target)]

    def vllm(self, meaning: BlockMeaning) -> dict:
        """All slots of the block are drafted, as they see each other."""
        method = "dspark" if meaning.conditional else self.method
        return {"method": method, "num_speculative_tokens": meaning.forward.drafts}

    @override
    def sglang(self, meaning: BlockMeaning) -> str | None:
        return {None: "DFLASH", "markov": "DSPARK"}.get(meaning.conditional)

    def refuse(self, server: str, meaning: BlockMeaning) -> None:
        """Raise ValueError for a drafter that vLLM or SGLang would run differently.

        vLLM drafts only from the mask rows of DFlash, and reads neither the gate nor the state of a Markov head. Both
        servers gather taps in ascending order.
        """
        (title, heads), how, kind = SERVERS[server], meaning.forward, meaning.conditional
        if kind not in heads:
            raise ValueError(f"{title} would draft wrongly with this head: it knows no {kind} (train with "
                             "drafter.conditional=markov, or null)")  # fmt: skip
        if how.convolution:
            raise ValueError(f"{title} is not known to draft with this backbone (train drafter=dflash or dspark)")
        if kind is None and meaning.confidence is None and how.label != "p+k":
            raise ValueError(f"{title} knows DFlash with slot k for token p+k only (train with drafter.label=p+k)")
        if any(how.sliding) and how.window_from != "slot":
            raise ValueError(f"{title} knows no windows before the anchor (train with drafter.window_from=slot)")
        if how.causal and server == "sglang":
            raise ValueError("SGLang knows no full layers in which a slot sees no later one (train with "
                             "drafter.causal=false)")  # fmt: skip
        if any(a >= b for a, b in itertools.pairwise(meaning.taps)):
            raise ValueError(f"{title} gathers taps in ascending order, and the drafter has {list(meaning.taps)}")

    @override
    def streams(self, meaning: BlockMeaning, tensors: Tensors) -> int:
        return tensors["fc.weight"].shape[1] // meaning.shape.hidden if "fc.weight" in tensors else 0


FAMILY = BlockFamily()
