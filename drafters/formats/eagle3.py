"""EAGLE-3: what its checkpoints mean, and the layout of its authors, of SpecForge and of SGLang, which ours extends.

Tensors: midlayer.*, fc, norm, lm_head, d2t (target id minus draft id) and t2d (membership). The embedding is always the
target's, even if the file holds one: exporters have been seen to store a random one. Where the config states no
draft_vocab_size and the file holds no lm_head, the head is the target's, as SGLang and vLLM read it.

Traps: the published configs state no rope, and mean theta 10000 whatever the target's is. Taps that are not listed are
hidden states 2, N/2, N-3; a list of them means different things in different places (`_taps`). `norm_output` switches
the norm before the head off in SpecForge, and the post-norm feedback on in speculators, vLLM and TorchSpec: here it is
SpecForge's, unless the field `norm_output_means`, ours, says 'feedback'.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.eagle3 import Eagle3, Eagle3Forward
from drafters.formats.base import (
    Layout,
    Reading,
    TargetFacts,
    Tensors,
    check_target,
    describe_shape,
    describe_vocab,
    facts_of,
    membership,
    read_vocab,
    rope_readings,
)
from drafters.formats.fields import dtype_name, fill, layer_parameters, read_shape, rows_of, shape_fields
from drafters.layers import DraftShape, SharedHead
from drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole, write_folder
from specdec.model.target import check_taps

TITLE = "EAGLE-3"
MAPS = ("d2t", "t2d")
PROJECTIONS = [f"midlayer.self_attn.{x}_proj" for x in "qkv"]


@dataclass(frozen=True)
class Eagle3Meaning:
    """A head in words that mean one thing. taps: indices into hidden_states, None for the published default.

    own_head False: the file holds no head, and means the target's rows.
    """

    shape: DraftShape
    vocab: int
    draft_vocab: int
    taps: tuple[int, ...] | None
    tap_width: int
    forward: Eagle3Forward
    own_head: bool = True

    @property
    def own_embedding(self) -> bool:
        """A drafter narrower or wider than the target cannot share the target's embedding."""
        return self.tap_width != self.shape.hidden


def parameters(drafter: Eagle3) -> dict[str, tuple[Tensor, int, int]]:
    """Published tensor names -> where their rows lie in our modules."""
    out = (
        whole(drafter.fc, "fc")
        | whole(drafter.norm, "norm")
        | whole(drafter.embed_norm, "midlayer.input_layernorm")  # the published name misleads: it normalises embeddings
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


# From meaning to drafter, and back


def build(config: dict, tensors: Tensors, target, name: str) -> Eagle3:
    """A drafter from a config and tensors in the published layout."""
    return construct(*read(config, tensors, name), target, name)


def construct(meaning: Eagle3Meaning, tensors: Tensors, target, name: str) -> Eagle3:
    """A drafter, refused unless every tensor fits the meaning and the meaning the target."""
    wanted = target.config
    check_target(meaning.tap_width, meaning.vocab, target, name)
    taps = meaning.taps or (2, wanted.layers // 2, wanted.layers - 3)
    width = tensors["fc.weight"].shape[-1]
    if width != len(taps) * wanted.hidden:
        raise ValueError(
            f"{name}: fc.weight takes {width} features, {len(taps)} taps of the target give {len(taps) * wanted.hidden}"
        )
    check_taps(taps, wanted.layers)
    vocab = read_vocab(tensors, wanted.vocab, name)
    if vocab.size != meaning.draft_vocab:
        raise ValueError(f"{name}: the draft vocabulary has {vocab.size} tokens, the config says {meaning.draft_vocab}")
    embedding = _embedding(meaning, tensors, target, name)
    with embedding.device:
        drafter = Eagle3(meaning.shape, taps, vocab, embedding, meaning.forward, wanted.hidden)
    if not meaning.own_head:
        drafter.head = SharedHead(target.head.weight, vocab.ids)
    fill(parameters(drafter), tensors, name, "EAGLE-3", aside=(*MAPS, "embed_tokens.weight"))
    return drafter


def _embedding(meaning: Eagle3Meaning, tensors: Tensors, target, name: str) -> Tensor:
    """The target's, but for a drafter of another width, which can have its own only."""
    if not meaning.own_embedding:
        return target.embed.weight
    if "embed_tokens.weight" not in tensors:
        raise ValueError(f"{name}: a drafter narrower or wider than the target needs embed_tokens.weight of its own")
    return tensors["embed_tokens.weight"].to(target.device, target.dtype)


def expected(meaning: Eagle3Meaning, tensors: Tensors) -> dict[str, torch.Size]:
    """Names and shapes that a checkpoint of this meaning must hold."""
    with torch.device("meta"):
        streams = tensors["fc.weight"].shape[-1] // meaning.tap_width
        vocab = DraftVocab(meaning.draft_vocab)
        embedding = torch.empty(0, meaning.shape.hidden)
        drafter = Eagle3(meaning.shape, (0,) * streams, vocab, embedding, meaning.forward, meaning.tap_width)
    shapes = {name: rows.shape for name, rows in rows_of(parameters(drafter)).items()}
    if not meaning.own_head:
        del shapes["lm_head.weight"]
    if meaning.draft_vocab != meaning.vocab:
        shapes["d2t"] = torch.Size([meaning.draft_vocab])
    return shapes


def dismantle(drafter: Eagle3) -> tuple[Eagle3Meaning, Tensors]:
    """What a drafter means, and its tensors."""
    vocab = drafter.vocab
    ids = torch.arange(vocab.size) if vocab.ids is None else vocab.ids.cpu()
    if not torch.equal(ids, ids.sort().values):
        raise ValueError("the EAGLE-3 layout needs a draft vocabulary in ascending order of ids")
    tensors = rows_of(parameters(drafter))
    own_head = isinstance(drafter.head, nn.Linear) or vocab.ids is not None
    if own_head:
        tensors |= {"d2t": ids - torch.arange(vocab.size), "t2d": vocab.contains()}
        tensors["lm_head.weight"] = drafter.head.weight
    width = drafter.fc.in_features // len(drafter.taps)
    if width != drafter.shape.hidden:
        tensors["embed_tokens.weight"] = drafter.embedding
    meaning = Eagle3Meaning(drafter.shape, vocab.target_size, vocab.size, drafter.taps, width, drafter.how, own_head)
    return meaning, tensors


def save(drafter: Eagle3, folder: Path, target=None) -> None:
    """Write our own layout: the published one, and the taps by name."""
    config, tensors = write_own(*dismantle(drafter), facts_of(target))
    write_folder(folder, config, tensors)


# The published layout


def recognise(config: dict, tensors: Tensors) -> bool:
    return "fc.weight" in tensors and any(name.startswith("midlayer.") for name in tensors)


def read(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """What a checkpoint in the published layout means, and its tensors."""
    reading = config.get("norm_output_means", "head")
    if reading not in ("head", "feedback"):
        raise ValueError(f"{name}: norm_output_means must be 'head' or 'feedback', got {reading!r}")
    feedback = reading == "feedback" and config.get("norm_output", False)
    head_norm = config.get("norm_output", True) if reading == "head" else True
    return meaning_of(config, tensors, name, _taps(config, name), bool(feedback), bool(head_norm)), tensors


def meaning_of(
    config: dict, tensors: Tensors, name: str, taps: tuple[int, ...] | None, feedback: bool, head_norm: bool
) -> Eagle3Meaning:
    """The fields on which all layouts agree. What a tensor shows is read from the tensor, not from the config."""
    shape = read_shape(config, name)
    if "fc.weight" not in tensors:
        raise ValueError(f"{name}: the checkpoint lacks the tensor fc.weight")
    for needed, stated in (("fc_norm.0.weight", "fc_norm"), ("input_norm.weight", "norm_before_fc")):
        if stated in config and bool(config[stated]) != (needed in tensors):
            there = "holds" if needed in tensors else "lacks"
            raise ValueError(f"{name}: the config sets {stated} to {config[stated]}, but the file {there} {needed}")
    width = config.get("target_hidden_size") or shape.hidden
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{name}: config.json lacks the field 'vocab_size'")
    rows = next((len(tensors[key]) for key in ("d2t", "lm_head.weight") if key in tensors), config["vocab_size"])
    return Eagle3Meaning(
        shape=shape,
        vocab=config["vocab_size"],
        draft_vocab=config.get("draft_vocab_size") or rows,
        taps=taps,
        tap_width=width,
        forward=Eagle3Forward(
            tap_norms="fc_norm.0.weight" in tensors,
            input_norm="input_norm.weight" in tensors,
            residual_norm=bool(config.get("norm_before_residual", False)),
            feedback="post" if feedback else "pre",
            head_norm=head_norm,
            qkv_bias=f"{PROJECTIONS[0]}.bias" in tensors,
            qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        ),
        own_head="lm_head.weight" in tensors or config.get("draft_vocab_size") is not None,
    )


def _taps(config: dict, name: str) -> tuple[int, ...] | None:
    """Indices into hidden_states. A list inside `eagle_config` counts layers by their outputs (SpecForge, SGLang,
    ModelOpt), one at the top of the config by their inputs (vLLM); our own field `taps` holds the indices."""
    if config.get("taps") is not None:
        return check_list(config["taps"], name)
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if outputs:
        return tuple(i + 1 for i in check_list(outputs, name))
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    return check_list(inputs, name) if inputs else None


def check_list(taps, name: str) -> tuple[int, ...]:
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"{name}: taps must be a list of layer numbers, got {taps!r}")
    return tuple(taps)


def write(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """The published layout, as SpecForge and SGLang read it."""
    if not meaning.own_head and meaning.draft_vocab != meaning.vocab:
        raise ValueError("the checkpoint has no head of its own, and this layout needs one: give --target to copy it")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shape_fields(meaning.shape),
        "vocab_size": meaning.vocab,
        "draft_vocab_size": meaning.draft_vocab if meaning.own_head else None,
        "dtype": dtype_name(tensors["fc.weight"]),
        **flag_fields(meaning.forward),
        **output_ids(meaning.taps, target),
    }
    how = meaning.forward
    if how.feedback == "post":
        config |= {"norm_output": True, "norm_output_means": "feedback"}
    elif not how.head_norm:
        config |= {"norm_output": False, "norm_output_means": "head"}
    if meaning.tap_width != meaning.shape.hidden:
        config["target_hidden_size"] = meaning.tap_width
    return config, with_membership(tensors, meaning.vocab)


def flag_fields(how: Eagle3Forward) -> dict:
    """The fields of other trainers; those that are off stay out, as in the published configs."""
    flags = {
        "fc_norm": how.tap_norms,
        "norm_before_fc": how.input_norm,
        "norm_before_residual": how.residual_norm,
        "attention_bias": how.qkv_bias,
    }
    return {name: True for name, on in flags.items() if on}


def output_ids(taps: tuple[int, ...] | None, target: TargetFacts | None) -> dict:
    """The taps as outputs of layers. The published default needs no list."""
    if taps is None:
        return {}
    for tap, state in ((0, "the embeddings"), (target.layers if target else -1, "the state after the final norm")):
        if tap in taps:
            raise ValueError(f"the drafter reads {state} (hidden state {tap}), for which this layout has no name")
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}}


def with_membership(tensors: Tensors, vocab: int) -> Tensors:
    return tensors | {"t2d": membership(tensors["d2t"], vocab)} if MAPS[0] in tensors else tensors


def recognise_own(config: dict, tensors: Tensors) -> bool:
    return recognise(config, tensors) and "taps" in config


def write_own(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """The published layout with the field `taps`; a list for others too, where the taps are known to have a name."""
    config, tensors = write(dataclasses.replace(meaning, taps=None), tensors, target)
    config["taps"] = list(meaning.taps) if meaning.taps else None
    if meaning.taps and target is not None and all(0 < tap < target.layers for tap in meaning.taps):
        config |= output_ids(meaning.taps, target)
    return config, tensors


def refuse_for_sglang(meaning: Eagle3Meaning) -> None:
    """ValueError for what SGLang's forward of an EAGLE-3 head would compute otherwise, without a word."""
    other = [
        field.name
        for field in dataclasses.fields(Eagle3Forward)
        if getattr(meaning.forward, field.name) != field.default
    ]
    if other:
        raise ValueError(f"SGLang would draft wrongly with this head: its forward knows no {', '.join(other)}")
    if meaning.taps is not None and len(meaning.taps) != 3:
        raise ValueError(f"SGLang needs three taps, the drafter has {len(meaning.taps)}")


# What the doctor asks


def describe(meaning: Eagle3Meaning, tensors: Tensors) -> dict[str, str]:
    """Every convention in force, in words."""
    how = meaning.forward
    streams = tensors["fc.weight"].shape[-1] // meaning.tap_width
    norms = "one for each tap" if how.tap_norms else "one over all taps" if how.input_norm else "none"
    head = "its own" if meaning.own_head else "none in the file: the target's rows"
    biases = [name for name in ("q, k, v",) if how.qkv_bias] or ["none"]
    return describe_shape(meaning.shape) | {
        "taps": ", ".join(f"hidden_states[{tap}]" for tap in meaning.taps)
        if meaning.taps
        else f"not listed: the default hidden_states[2], [N//2], [N-3] of {streams} streams",
        "fc input": f"{streams} x {meaning.tap_width}, in the order of the taps; norm before fc: {norms}",
        "layer input": "[norm(embedding), norm(hidden)], the embedding first",
        "residual": "the normed hidden state" if how.residual_norm else "the hidden state as it is",
        "feedback": f"the hidden state {'after' if how.feedback == 'post' else 'before'} the final norm",
        "head": f"{head}, {'after' if how.head_norm else 'without'} the final norm",
        "biases": ", ".join(biases),
        "q and k norm": "yes" if how.qk_norm else "no",
        "vocabulary": describe_vocab(tensors, meaning.vocab, meaning.draft_vocab),
        "embedding": "the target's" + (", not the file's" if "embed_tokens.weight" in tensors else ""),
    }


def readings(meaning: Eagle3Meaning, tensors: Tensors, target) -> list[Reading]:
    """Misreadings of EAGLE-3: each has been met in the wild, or in an issue of a serving system."""
    layers, how = target.config.layers, meaning.forward
    replace = dataclasses.replace
    out = []
    taps = meaning.taps or (2, layers // 2, layers - 3)
    for shift, words in ((1, "outputs of the layers listed"), (-1, "inputs of the layers before")):
        moved = tuple(tap + shift for tap in taps)
        if all(0 <= tap <= layers for tap in moved):
            out.append(Reading(f"taps {shift:+d}, {list(moved)}: {words}", replace(meaning, taps=moved), tensors))
    out += rope_readings(meaning, tensors, target)
    other = "pre" if how.feedback == "post" else "post"
    if how.head_norm:
        words = f"feedback {'before' if other == 'pre' else 'after'} the final norm"
        out.append(Reading(words, replace(meaning, forward=replace(how, feedback=other)), tensors))
    flipped = replace(how, residual_norm=not how.residual_norm)
    out.append(Reading(f"norm_before_residual {flipped.residual_norm}", replace(meaning, forward=flipped), tensors))
    swapped = {f"{name}.weight": tensors[f"{name}.weight"] for name in PROJECTIONS}
    swapped = {name: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) for name, weight in swapped.items()}
    out.append(Reading("layer input [hidden, embedding]", meaning, tensors | swapped))
    a, b = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    out.append(Reading("norms of embedding and hidden exchanged", meaning, tensors | {a: tensors[b], b: tensors[a]}))
    return out + absolute_map(meaning, tensors)


def absolute_map(meaning: Eagle3Meaning, tensors: Tensors) -> list[Reading]:
    """d2t read as target ids, where its numbers can be."""
    if "d2t" not in tensors:
        return []
    ids = tensors["d2t"].long()
    if ids.min() < 0 or ids.max() >= meaning.vocab or len(ids.unique()) != len(ids):
        return []
    offsets = ids - torch.arange(len(ids))
    return [
        Reading("d2t as target ids", meaning, tensors | {"d2t": offsets, "t2d": membership(offsets, meaning.vocab)})
    ]


OWN = Layout("specdec", "ours: the EAGLE-3 layout, with taps by name", recognise_own, read, write_own)
PUBLISHED = Layout("eagle3", "EAGLE-3 as of EAGLE, SpecForge and SGLang", recognise, read, write)
