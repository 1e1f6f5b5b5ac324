"""A random target and an EAGLE-3 drafter for it, of any size, and a batch."""

import torch
from torch import Tensor

from specdec.drafters import eagle3
from specdec.drafters.eagle3 import Eagle3
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.training.data import Batch


def random_pair(vocab: int, hidden: int, layers: int = 3) -> tuple[Target, Eagle3]:
    """Random weights, large enough that the target prefers some tokens. The drafter proposes from all tokens."""
    torch.manual_seed(0)
    heads = hidden // 64
    config = ModelConfig(
        layers=layers, hidden=hidden, intermediate=2 * hidden, heads=heads, kv_heads=max(1, heads // 2), head_dim=64,
        vocab=vocab, eps=1e-5, rope=Rope(), context=4096, tied=False,
    )  # fmt: skip
    target = Target(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2 * hidden**-0.5)
    return target, eagle3.create(target, init="random")


def random_batch(vocab: int, rows: int, length: int, learnt: float) -> Batch:
    """`rows` texts of `length` random tokens. The last part `learnt` of each is the assistant's."""
    torch.manual_seed(1)
    mask: Tensor = (torch.arange(length) >= round(length * (1 - learnt))).float()
    return Batch(torch.randint(vocab, (rows, length)), mask.repeat(rows, 1))
