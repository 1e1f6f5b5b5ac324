"""The layouts of block drafters: z-lab's and SpecForge's, DeepSpec's, and that of vLLM's `speculators` library.

Traps: a window ends at the slot that looks in z-lab's and SpecForge's code, and before the anchor in the library's
(`BlockForward.window_from`). The library's `aux_hidden_state_layer_ids` are indices into hidden_states. SpecForge's
DSpark drafter is trained with slot k for token p+k+1, though SpecForge's own loop reads its last slots.

Servers get these layouts. They share their target's embedding.

vLLM 0.32: DFlash in z-lab's layout, or, for a part of the vocabulary, in that of `speculators`; DSpark in DeepSpec's.
Traps: a `speculators` config whose `sliding_window_non_causal` is false makes every layer causal there, those without a
window too. z-lab's `is_causal` applies to all layers as well. The last hidden state is the one before the final norm.

SGLang 0.5.23: DSpark in DeepSpec's layout, the others in z-lab's. Traps: the class is chosen by `architectures` alone,
and DSpark's reads `markov_rank` at the top of the config. A target gives the inputs of its layers, so it has no last
hidden state; that is an error at the first prompt.
"""

from typing import Any

from specdec.drafters.block_layers import BlockForward
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors, needed, write_only
from specdec.drafters.formats.dflash import MARKOV, BlockMeaning, meaning_of, outputs
from specdec.drafters.formats.eagle3_layout import check_list
from specdec.drafters.formats.maps import NO_HEAD, with_head, with_membership
from specdec.drafters.formats.parts import dtype_name
from specdec.drafters.formats.speculators import kind_of, nested_config, speculators_fields
from specdec.drafters.layers import shape_fields

PROJECTORS = (None, "dflash", "dspark", "domino")  # of those that SpecForge has
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}


def read(config: dict, tensors: Tensors, name: str) -> tuple[BlockMeaning, Tensors]:
    """Read a checkpoint of z-lab or SpecForge. Raise ValueError for an unsupported `projector_type`."""
    how = config["dflash_config"]
    kind = how.get("projector_type")
    if kind not in PROJECTORS:
        raise ValueError(f"{name}: block drafters of the kind {kind} are not supported")
    shifted = kind == "dspark" or how.get("draft_shift") or how.get("shift_label")
    switches = {"label": "p+k+1" if shifted else "p+k", "causal": bool(how.get("causal_head", False))}
    windowed = {"sliding_causal": bool(config.get("is_causal", True))}
    stated = {"block_size": config.get("block_size")} | how
    return meaning_of(stated, config, tensors, name, outputs(how, name), switches, windowed)


def write(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of z-lab and SpecForge. Raise ValueError for a drafter that it cannot express."""
    how = meaning.forward
    _check_head(meaning)
    if any(how.sliding) and how.window_from != "slot":
        raise ValueError("a window before the anchor has no name in this layout: take the layout speculators")
    fields: dict[str, Any] = {"mask_token_id": how.mask_token, "target_layer_ids": [tap - 1 for tap in meaning.taps]}
    if meaning.conditional == "domino":
        fields |= {"projector_type": "domino", "shift_label": how.label == "p+k+1", **head_fields(meaning)}
    elif meaning.conditional in MARKOV.values() or meaning.confidence is not None:
        fields |= {"projector_type": "dspark", **head_fields(meaning)}
        if how.label == "p+k":
            raise ValueError(
                "a Markov or confidence head has no name for slot k for token p+k (train with drafter.label=p+k+1)"
            )
    else:
        fields |= head_fields(meaning) if meaning.conditional else {}
        fields |= {"draft_shift": True} if how.label == "p+k+1" else {}
    if how.causal:
        fields["causal_head"] = True
    fields |= convolution_fields(how)
    kind = "DFlash2DraftModel" if how.convolution else "DFlashDraftModel"
    config = {"architectures": [kind], **layer_fields(meaning), "block_size": how.rows}
    if any(how.sliding) and not how.sliding_causal:
        config["is_causal"] = False
    config |= {"num_target_layers": target.layers if target else None, "dflash_config": fields}
    return config | {"dtype": dtype_name(tensors["norm.weight"])}, tensors


def _check_head(meaning: BlockMeaning) -> None:
    if meaning.own_head:
        raise ValueError("this layout has no head of a drafter's own: take the layout speculators")


def layer_fields(meaning: BlockMeaning) -> dict:
    """The config of the layers, as Qwen3's."""
    how, kinds = meaning.forward, ("full_attention", "sliding_attention")
    return shape_fields(meaning.shape) | {
        "model_type": "qwen3",
        "num_hidden_layers": meaning.layers,
        "vocab_size": meaning.vocab,
        "attention_bias": False,
        "layer_types": [kinds[sliding] for sliding in how.sliding or (False,) * meaning.layers],
        "sliding_window": how.window,
        "use_sliding_window": any(how.sliding),
    }


def head_fields(meaning: BlockMeaning) -> dict:
    """The fields of the heads after the backbone."""
    if meaning.conditional == "selector":
        return {"selector_rank": meaning.rank, "selector_top_k": meaning.head["candidates"]}
    if meaning.conditional == "domino":
        settings = {"gru_hidden_dim": meaning.head["state"], "pure_draft_prefix_len": meaning.head["prefix"]}
        return {"emb_dim": meaning.rank, **settings}
    names = {ours: theirs for theirs, ours in MARKOV.items()}
    return {
        "markov_rank": meaning.rank,
        "markov_head_type": names[meaning.conditional] if meaning.conditional else "vanilla",
        "enable_confidence_head": meaning.confidence is not None,
        "confidence_head_with_markov": bool(meaning.confidence),
    }


def convolution_fields(how: BlockForward) -> dict:
    """Return the config fields of the convolutions, or {} without convolutions."""
    return {"conv_kernel_size": 2, "conv_group_size": how.convolution} if how.convolution else {}


def check_form(meaning: BlockMeaning, *, heads: tuple[str, ...]) -> None:
    """Raise ValueError for a conditional head other than `heads`."""
    if meaning.conditional not in (None, *heads):
        raise ValueError(f"this layout has no conditional head {meaning.conditional!r}: take the layout dflash")


def recognise_deepspec(config: dict, tensors: Tensors) -> bool:
    """Return whether a checkpoint is in DeepSpec's layout: the fields of the block are at the top of the config."""
    flat = "target_layer_ids" in config and "mask_token_id" in config
    return flat and "dflash_config" not in config and "hidden_norm.weight" in tensors


def read_deepspec(config: dict, tensors: Tensors, name: str) -> tuple[BlockMeaning, Tensors]:
    """Read a checkpoint of DeepSpec, in which slot k predicts token p+k+1."""
    return meaning_of(config, config, tensors, name, outputs(config, name), {"label": "p+k+1"}, {})


def write_deepspec(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """With copies of the target's embeddings and head, as DeepSpec's modules expect them."""
    how = meaning.forward
    if meaning.part:
        raise ValueError("this layout has no part of a vocabulary: take the layout speculators")
    _check_head(meaning)
    check_form(meaning, heads=tuple(MARKOV.values()))
    if how.label != "p+k+1" or how.causal or any(how.sliding) or how.convolution:
        raise ValueError(
            "this layout is for blocks whose slot k predicts token p+k+1, without windows, causality and convolutions"
        )
    if target is None:
        raise ValueError("this layout holds the target's embeddings and head: give --target to copy them")
    copies = {"embed_tokens.weight": target.part("embedding"), "lm_head.weight": target.part("head")}
    config = {"architectures": ["Qwen3DSparkModel"], **layer_fields(meaning), **head_fields(meaning)}
    config |= {
        "block_size": how.rows,
        "mask_token_id": how.mask_token,
        "target_layer_ids": [tap - 1 for tap in meaning.taps],
        "num_target_layers": target.layers,
        "dtype": dtype_name(tensors["norm.weight"]),
    }
    dtype = tensors["norm.weight"].dtype  # of a tied target both are one tensor, which files do not hold twice
    return config, tensors | {name: part.to(dtype, copy=True) for name, part in copies.items()}


def read_speculators(config: dict, tensors: Tensors, name: str) -> tuple[BlockMeaning, Tensors]:
    """Read a block drafter in the layout of the speculators library, whose windows end before the anchor."""
    from_anchor = config.get("sample_from_anchor", kind_of(config) == "dspark")
    windowed = {"sliding_causal": not config.get("sliding_window_non_causal", False), "window_from": "anchor"}
    taps = check_list(config.get("aux_hidden_state_layer_ids"), name)
    return meaning_of(
        config, nested_config(config, name), tensors, name, taps, {"label": "p+k+1" if from_anchor else "p+k"}, windowed
    )


def speculators_kind(meaning: BlockMeaning) -> str:
    """The library's name for a drafter. Raises ValueError for parts that it does not put together."""
    selector, convolution = meaning.conditional == "selector", bool(meaning.forward.convolution)
    if selector != convolution or (selector and (meaning.part or meaning.confidence is not None)):
        raise ValueError(
            "this layout has convolutions and a selector together, for the whole vocabulary and without a confidence "
            "head: take the layout dflash"
        )
    if selector:
        return "dflash2"
    return "dspark" if meaning.conditional or meaning.confidence is not None else "dflash"


def write_speculators(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of the speculators library. Raise ValueError for a drafter that it cannot express."""
    how = meaning.forward
    check_form(meaning, heads=(*MARKOV.values(), "selector"))
    if how.causal:
        raise ValueError("this layout has no name for full layers in which a slot sees no later one")
    if any(how.sliding) and how.window_from != "anchor":
        raise ValueError("in this layout a window ends before the anchor (train with drafter.window_from=anchor)")
    if meaning.part and not meaning.own_head:
        if target is None:
            raise ValueError(NO_HEAD)
        tensors = with_head(tensors, meaning.vocab, target)
    kind = speculators_kind(meaning)
    config = speculators_fields(kind, ARCHITECTURES[kind], target, how.drafts) | {
        "aux_hidden_state_layer_ids": list(meaning.taps),
        "block_size": how.rows,
        "draft_vocab_size": meaning.draft_vocab,
        "mask_token_id": how.mask_token,
        "sample_from_anchor": how.label == "p+k+1",
        "sliding_window_non_causal": not how.sliding_causal,
        "transformer_layer_config": layer_fields(meaning),
        "dtype": dtype_name(tensors["norm.weight"]),
        **(head_fields(meaning) if kind != "dflash" else {}),
        **convolution_fields(how),
    }
    return config, with_membership(tensors, meaning.vocab)


ZLAB = Layout(
    "dflash",
    "block drafters as of z-lab and SpecForge",
    lambda config, tensors: isinstance(config.get("dflash_config"), dict) and "hidden_norm.weight" in tensors,
    read,
    write,
    shares_head=True,
)
DEEPSPEC = Layout(
    "deepspec", "block drafters as of DeepSpec", recognise_deepspec, read_deepspec, write_deepspec, shares_head=True
)
SPECULATORS = Layout(
    "speculators",
    "block drafters as of speculators and vLLM",
    lambda config, tensors: kind_of(config) in ARCHITECTURES and "hidden_norm.weight" in tensors,
    read_speculators,
    write_speculators,
    shares_head=True,
)


# Servers


def write_vllm(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout that vLLM reads for this drafter. Raise ValueError if there is none, or without a target."""
    how, target = meaning.forward, needed(target)
    _check_last(meaning, target, "which vLLM has only as it is before the final norm")
    if meaning.conditional or meaning.confidence is not None:
        return write_deepspec(meaning, tensors, target)
    if not meaning.part:
        config, tensors = write(meaning, tensors, target)
        return config | ({"is_causal": True} if how.causal else {}), tensors
    if how.causal or any(how.sliding):
        raise ValueError(
            "vLLM has no form for a part of the vocabulary with windows or causal slots (train with "
            "drafter.draft_vocab_size=null)"
        )
    config, tensors = write_speculators(meaning, tensors, target)
    return config | {"sliding_window_non_causal": True}, tensors


def write_sglang(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout that SGLang reads for this drafter. Raise ValueError if there is none."""
    if target is not None:
        _check_last(meaning, target, "which SGLang does not give")
    if meaning.part:
        raise ValueError("SGLang has no form for a part of the vocabulary (train with drafter.draft_vocab_size=null)")
    one = write_deepspec if meaning.conditional == "markov" else write
    return one(meaning, tensors, target)


def _check_last(meaning: BlockMeaning, target: TargetFacts, why: str) -> None:
    if target.layers in meaning.taps:
        raise ValueError(f"the drafter reads hidden state {target.layers}, {why} (train with lower drafter.taps)")


VLLM = write_only("vllm", "block drafters as vLLM reads them", write_vllm, shares_head=True)
SGLANG = write_only("sglang", "block drafters as SGLang reads them", write_sglang, shares_head=True)
