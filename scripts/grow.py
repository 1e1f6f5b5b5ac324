"""A wider Llama that computes what a smaller one computes, as the start of its own training.

    python scripts/grow.py --target specdec/demo/target --out build/grown --hidden-size 384 --intermediate-size 1280

What is new reads at random and writes nothing: columns that read new dimensions, rows of new heads and new neurons are
drawn as wide as their matrix is, columns that write from them and rows that write to new dimensions are 0. A norm
divides by the mean of more squares, so its weights are scaled by the root of the ratio. The logits are the smaller
model's up to rounding and the norms' epsilon. Every new weight has a gradient from the first or the second step on. The
number of layers, the head size and the queries that share a key stay (as in Net2Net, Chen et al. 2015, arXiv
1511.05641, but with zeros in place of copies, which would stay equal).
"""

import argparse
import math
from pathlib import Path

import checkout  # noqa: F401
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.cli.errors import one_sentence_errors
from training.pretrain import save_target

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def grown_config(config: LlamaConfig, hidden_size: int, intermediate_size: int) -> LlamaConfig:
    """The wider configuration. Raises ValueError if the heads do not divide it, or if it is not wider."""
    group = config.head_dim * config.num_attention_heads // config.num_key_value_heads
    if hidden_size % group or hidden_size < config.hidden_size or intermediate_size < config.intermediate_size:
        raise ValueError(
            f"hidden_size must be a multiple of {group} from {config.hidden_size} on and intermediate_size "
            f"at least {config.intermediate_size}, but they are {hidden_size} and {intermediate_size}"
        )
    heads = hidden_size // config.head_dim
    wider = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads * config.num_key_value_heads // config.num_attention_heads,
    }
    return LlamaConfig(**config.to_dict() | wider)


def grown(name: str, old: Tensor, shape: torch.Size) -> Tensor:
    """The parameter `name` in its new shape: [new] of a norm, [new rows, new columns] of a matrix."""
    if old.ndim == 1:
        new = torch.full(shape, old.mean().item())
        new[: len(old)] = old
        return new * math.sqrt(len(old) / len(new))
    reads = any(reader in name for reader in READERS)
    new = torch.randn(shape) * old.std() if reads else torch.zeros(shape)
    new[: old.shape[0], : old.shape[1]] = old
    return new


def grow(small: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of `config` with the logits of `small`, in fp32."""
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for (name, new), old in zip(model.named_parameters(), small.float().parameters(), strict=True):
            new.copy_(grown(name, old, new.shape))
    return model


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a Llama with its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--intermediate-size", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    small = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    model = grow(small, grown_config(small.config, args.hidden_size, args.intermediate_size))
    ids = torch.randint(small.config.vocab_size, (2, 64))
    with torch.no_grad():
        apart = (model(ids).logits - small(ids).logits).abs().max().item()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    report = {"grown_from": str(args.target), "logits_apart": apart}
    save_target(model, tokenizer, args.out, report=report)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, logits apart by {apart:.1e}")


if __name__ == "__main__":
    main()
