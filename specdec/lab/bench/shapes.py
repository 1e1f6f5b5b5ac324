"""Random weights in the shape of a real model. Only their speed means anything.

They are made where they are needed, and stored nowhere. conf/shape/*.yaml holds the public config of each model. All
values are bf16 values whatever the dtype, as in the checkpoints of these models: on the CPU the speed of fp32 depends
on that (`specdec.ops.linear`).
"""

import torch
from torch import nn

from specdec.drafters import eagle3
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import read_config
from specdec.model.layers import RMSNorm
from specdec.model.target import Target

STD = 0.02


def random_target(config: dict, name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Target:
    """A target of a Hugging Face config, without a tokenizer and without end-of-text tokens."""
    with torch.device("meta"):
        target = Target(read_config(config, name)).to(dtype)
    target.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.normal_(std=STD, generator=generator).bfloat16())
            else:
                parameter.zero_()
        for module in target.modules():
            if isinstance(module, RMSNorm) and not module.offset:
                module.weight.fill_(1)
    if target.config.tied:
        target.head.weight = target.embed.weight
    target.eval().name = name
    return target


def random_head(target: Target, draft_vocab_size: int | None = None, seed: int = 0, **settings) -> nn.Module:
    """An EAGLE-3 head for a target, in its dtype and on its device; `settings` are those of `eagle3.create`."""
    torch.manual_seed(seed)
    vocab = target.vocab
    with torch.device(target.device):  # the CPU would take seconds to draw the weights of a large head
        ids = None if draft_vocab_size is None else torch.arange(min(draft_vocab_size, vocab))
        drafter = eagle3.create(target, vocab=DraftVocab(vocab, ids), init="random", **settings)
    drafter.bfloat16().to(target.device, target.dtype).eval().requires_grad_(False)
    return drafter


def random_transformers(config: dict, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Transformers' own model of the same config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
    return model.eval().requires_grad_(False)
