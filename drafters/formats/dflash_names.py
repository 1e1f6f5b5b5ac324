"""The names under which the tensors of block drafters are published."""

from specdec.drafters.conditional import HEADS
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats.parts import Place, layer_parameters
from specdec.model.checkpoint import whole

PARTS = {  # of a conditional head
    "markov": {"embed": "markov_head.markov_w1", "head": "markov_head.markov_w2"},
    "domino": {"down": "embed_proj.0", "head": "embed_proj.2"},
}
PARTS["markov_gated"] = PARTS["markov"] | {"gate": "markov_head.gate_proj"}
PARTS["markov_rnn"] = PARTS["markov"] | {"joint": "markov_head.joint_proj"}
PARTS["selector"] = {"slot": "candidate_selector.hidden_projection"}
BARE = {  # parts that are published without `.weight`
    "domino": {"token": "prefix_gru.weight_ih_l0", "past": "prefix_gru.weight_hh_l0"},
    "selector": {"embed": "candidate_selector.predecessor_codebook", "head": "candidate_selector.successor_codebook"},
}
CONVOLUTIONS = ("attention_conv", "mlp_conv")


def parameters(drafter: BlockDrafter) -> dict[str, Place]:
    """Published tensor names -> their rows in our modules."""
    out = whole(drafter.hidden_norm, "hidden_norm") | whole(drafter.norm, "norm") | whole(drafter.fc, "fc")
    for i, layer in enumerate(drafter.layers):
        out |= whole(layer.input_norm, f"layers.{i}.input_layernorm") | layer_parameters(layer, f"layers.{i}")
        for convolution, name in zip(layer.convolutions or (), CONVOLUTIONS, strict=False):
            out[f"layers.{i}.{name}.base_kernel"] = convolution.shares, 0, len(convolution.shares)
            out |= whole(convolution.groups, f"layers.{i}.{name}.kernel_projection")
    if (head := drafter.conditional) is not None:
        kind = next(name for name, one in HEADS.items() if type(head) is one)
        for part, name in PARTS[kind].items():
            out |= whole(getattr(head, part), name)
        for part, name in BARE.get(kind, {}).items():
            weight = getattr(head, part).weight
            out[name] = weight, 0, len(weight)
    if drafter.confidence is not None:
        out |= whole(drafter.confidence.proj, "confidence_head.proj")
    return out | whole(drafter.head, "lm_head")
