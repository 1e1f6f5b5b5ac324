"""Which block drafters vLLM 0.32 and SGLang would draft wrongly with, and why: no error would be seen there.

Traps in vLLM: only the mask rows of DFlash draft. The gate and the state of other Markov heads than DSpark's plain one
are not read. Both servers gather taps in ascending order.
"""

import itertools

from specdec.drafters.formats.dflash import BlockMeaning

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
HEADS = {"vllm": (None, "markov"), "sglang": (None, "markov", "domino")}  # conditional heads that they know


def refuse(server: str, meaning: BlockMeaning) -> None:
    """Raise ValueError for what a server's forward would silently compute otherwise."""
    title, how, kind = TITLES[server], meaning.forward, meaning.conditional
    if kind not in HEADS[server]:
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
