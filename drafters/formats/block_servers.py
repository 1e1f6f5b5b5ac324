"""Block drafters as servers load them. Their targets' embedding is shared.

vLLM 0.32: DFlash in z-lab's layout, or, for a part of the vocabulary, in that of `speculators`; DSpark in DeepSpec's.
Traps: a `speculators` config whose `sliding_window_non_causal` is false makes every layer causal there, those without a
window too. z-lab's `is_causal` speaks of all layers as well. The last hidden state is the one before the final norm.

SGLang 0.5.23: DSpark in DeepSpec's layout, the others in z-lab's. Traps: the class is chosen by `architectures` alone,
and DSpark's reads `markov_rank` at the top of the config. A target gives the inputs of its layers, so it has no last
hidden state; that is an error at the first prompt.
"""

from specdec.drafters.formats import dflash_layout
from specdec.drafters.formats.base import TargetFacts, Tensors, write_only
from specdec.drafters.formats.dflash import BlockMeaning
from specdec.drafters.formats.vllm import needed


def write_vllm(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    how, target = meaning.forward, needed(target)
    _check_last(meaning, target, "which vLLM has only as it is before the final norm")
    if meaning.conditional or meaning.confidence is not None:
        return dflash_layout.write_deepspec(meaning, tensors, target)
    if not meaning.own_head:
        config, tensors = dflash_layout.write(meaning, tensors, target)
        return config | ({"is_causal": True} if how.causal else {}), tensors
    if how.causal or any(how.sliding):
        raise ValueError(
            "vLLM has no form for a part of the vocabulary with windows or causal slots (train with "
            "drafter.draft_vocab_size=null)"
        )
    config, tensors = dflash_layout.write_speculators(meaning, tensors, target)
    return config | {"sliding_window_non_causal": True}, tensors


def write_sglang(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    if target is not None:
        _check_last(meaning, target, "which SGLang does not give")
    one = dflash_layout.write_deepspec if meaning.conditional == "markov" else dflash_layout.write
    return one(meaning, tensors, target)


def _check_last(meaning: BlockMeaning, target: TargetFacts, why: str) -> None:
    if target.layers in meaning.taps:
        raise ValueError(f"the drafter reads hidden state {target.layers}, {why} (train with lower drafter.taps)")


VLLM = write_only("vllm", "block drafters as vLLM reads them", write_vllm, shares_head=True)
SGLANG = write_only("sglang", "block drafters as SGLang reads them", write_sglang, shares_head=True)
