"""Block drafters as SGLang 0.5.23 loads them: DSpark in DeepSpec's layout, the others in z-lab's.

Traps: the class is chosen by `architectures` alone, and DSpark's reads `markov_rank` at the top of the config. A target
gives the inputs of its layers, so it has no last hidden state; that is an error at the first prompt.
"""

from specdec.drafters.formats import dflash_layout
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.dflash import BlockMeaning


def write(meaning: BlockMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    if target is not None and target.layers in meaning.taps:
        raise ValueError(
            f"the drafter reads hidden state {target.layers}, which SGLang does not give "
            "(train with lower drafter.taps)"
        )
    one = dflash_layout.write_deepspec if meaning.conditional == "markov" else dflash_layout.write
    return one(meaning, tensors, target)


# What is written is read as the layout that it is in.
BLOCKS = Layout(
    "sglang",
    "block drafters as SGLang reads them",
    lambda config, tensors: False,
    dflash_layout.read,
    write,
    shares_head=True,
)
