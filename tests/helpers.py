"""Small models made on the spot."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import eagle3
from drafters.vocab import DraftVocab
from specdec.archs import ModelConfig
from specdec.layers import Rope
from specdec.model import Target

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_hf(folder, family: str, dtype=torch.float32, shard: str = "5GB", seed: int = 0, **fields):
    """A random transformers model of a family, saved; biases and norms are random too, so that none is forgotten."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SMALL | fields))
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(4)  # far enough from linear that a wrong term shows
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tiny_target(vocab: int = 17, layers: int = 3, seed: int = 0, context: int = 256) -> Target:
    """A random target whose next-token distribution depends strongly on what it read."""
    torch.manual_seed(seed)
    config = ModelConfig(
        layers=layers, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=vocab, eps=1e-5, rope=Rope(),
        context=context, tied=False,
    )  # fmt: skip
    target = Target(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    return target


def tiny_drafter(target: Target, seed: int = 1, draft_vocab: int | None = None):
    """A random EAGLE-3 drafter for a tiny target; its draft vocabulary leaves tokens out unless it is None."""
    torch.manual_seed(seed)
    vocab = (
        None
        if draft_vocab is None
        else DraftVocab(target.config.vocab, torch.arange(draft_vocab) * 2 % target.config.vocab)
    )
    if vocab is not None:
        vocab = DraftVocab(target.config.vocab, vocab.ids.sort().values)
    return eagle3.create(target, vocab=vocab).eval()
