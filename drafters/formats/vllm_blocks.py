"""Block drafters as vLLM 0.32 loads them: DFlash in z-lab's layout, or, for a part of the vocabulary, in that of
`speculators`; DSpark in DeepSpec's. The target's embedding is shared.

Traps: a `speculators` config whose `sliding_window_non_causal` is false makes every layer causal there, those without a
window too. z-lab's `is_causal` speaks of all layers as well. The last hidden state is the one before the final norm.
"""

from specdec.drafters.formats import dflash_layout
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.dflash import BlockMeaning
from specdec.drafters.formats.vllm import needed


def write(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    how, target = meaning.forward, needed(target)
    if target.layers in meaning.taps:
        raise ValueError(
            f"the drafter reads hidden state {target.layers}, which vLLM has only as it is before the final norm "
            "(train with lower drafter.taps)"
        )
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


# What is written is read as the layout that it is in.
BLOCKS = Layout(
    "vllm",
    "block drafters as vLLM reads them",
    lambda config, tensors: False,
    dflash_layout.read,
    write,
    shares_head=True,
)
