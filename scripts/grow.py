"""A wider Llama that computes what a smaller one computes, and drafters that go with it: a start for their training.

    python scripts/grow.py --target specdec/demo/target --out build/grown --hidden-size 384 --intermediate-size 1280 \\
        --draft specdec/demo/mtp specdec/demo/eagle3:512

Writes OUT, a target, and OUT-NAME for each drafter NAME. A drafter's MLP stays as wide as it is, or is cut to the given
number of neurons, those of the largest weights. An EAGLE-3 head takes the target's output head in place of its own.

What is new reads at random and writes nothing: columns that read new dimensions, rows of new heads and new neurons are
drawn as wide as their matrix is, columns that write from them and rows that write to new dimensions are 0. A norm
divides by the mean of more squares, so its weights are scaled by the root of the ratio. The logits are the smaller
model's up to rounding and the norms' epsilon. Every new weight has a gradient from the first or the second step on. The
number of layers, the head size and the queries that share a key stay (as in Net2Net, Chen et al. 2015, arXiv
1511.05641, but with zeros in place of copies, which would stay equal).
"""

import argparse
import json
import math
from pathlib import Path

import checkout  # noqa: F401
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, replace_folder
from specdec.training.pretrain import save_target

HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
WRITERS = ("o_proj", "down_proj", "fc", "input_proj", "linear")  # of the state that the layers add to
KEEP_ROWS = ("gate_proj", "up_proj")  # outputs that do not grow with the state
KEEP_COLUMNS = ("down_proj",)


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


def grown(name: str, old: Tensor, shape: torch.Size, hidden: int) -> Tensor:
    """The parameter `name` in its new shape: [new] of a norm or a bias, [new rows, new columns] of a matrix.

    hidden: the old width of the state. Where a matrix reads several states, they stay side by side."""
    if old.ndim == 1:
        if "bias" in name:
            return torch.cat([old, torch.zeros(shape[0] - len(old))])
        new = torch.full(shape, old.mean().item())
        new[: len(old)] = old
        return new * math.sqrt(len(old) / len(new))
    reads = not any(word in name for word in (*WRITERS, "embed_tokens"))
    new = torch.randn(shape) * old.std() if reads else torch.zeros(shape)
    parts = 1 if "down_proj" in name else old.shape[1] // hidden
    for there, here in zip(new.chunk(parts, 1), old.chunk(parts, 1), strict=True):
        there[: here.shape[0], : here.shape[1]] = here
    return new


def grow(small: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of `config` with the logits of `small`, in fp32."""
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for (name, new), old in zip(model.named_parameters(), small.float().parameters(), strict=True):
            new.copy_(grown(name, old, new.shape, small.config.hidden_size))
    return model


def narrowed(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """The MLP's neurons of the largest weights, `width` of them."""
    (gate,), (up,), (down,) = (
        [name for name in tensors if kind in name] for kind in ("gate_proj", "up_proj", "down_proj")
    )
    sizes = tensors[gate].float().norm(dim=1) * tensors[up].float().norm(dim=1) * tensors[down].float().norm(dim=0)
    kept = sizes.topk(width).indices.sort().values
    return tensors | {gate: tensors[gate][kept], up: tensors[up][kept], down: tensors[down][:, kept]}


def grow_drafter(folder: Path, config: LlamaConfig, out: Path, width: int | None = None) -> None:
    """A drafter for the wider target, of EAGLE's, MTP's or Medusa's form. width: neurons of its MLP, if not all."""
    own = json.loads((folder / "config.json").read_text())
    old, new, head = own["hidden_size"], config.hidden_size, config.head_dim
    held = load_file(folder / "model.safetensors")
    if width is not None:
        held, own["intermediate_size"] = narrowed(held, width), width
    for name in ("lm_head.weight", "d2t", "t2d"):
        held.pop(name, None)
    own.pop("draft_vocab_size", None)
    tensors = {}
    for name, tensor in held.items():
        kind = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        rows = getattr(config, HEADS[kind]) * head if kind in HEADS else len(tensor) if kind in KEEP_ROWS else new
        shape = torch.Size([rows] if tensor.ndim == 1 else [rows, tensor.shape[1]])
        if tensor.ndim == 2 and kind not in KEEP_COLUMNS:
            shape = torch.Size([rows, tensor.shape[1] // old * new])
        tensors[name] = grown(name, tensor.float(), shape, old).contiguous()
    heads = {key: getattr(config, key) for key in HEADS.values() if key in own}

    def fill(aside: Path) -> None:
        save_file(tensors, aside / "model.safetensors")
        (aside / "config.json").write_text(json.dumps(own | {"hidden_size": new, "dtype": "float32"} | heads, indent=1))

    replace_folder(out, fill, ("model.safetensors", "config.json"), "a drafter made here")


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a Llama with its tokenizer")
    parser.add_argument("--draft", nargs="*", default=[], metavar="FOLDER[:WIDTH]", help="its drafters")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--intermediate-size", type=int, required=True)
    args = parser.parse_args()
    output_folder(args.out.parent)
    torch.manual_seed(0)
    small = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    model = grow(small, grown_config(small.config, args.hidden_size, args.intermediate_size))
    ids = torch.randint(small.config.vocab_size, (2, 64))
    with torch.no_grad():
        apart = (model(ids).logits - small(ids).logits).abs().max().item()
    report = {"grown_from": str(args.target), "logits_apart": apart}
    save_target(model, AutoTokenizer.from_pretrained(args.target), args.out, report=report)
    for text in args.draft:
        folder, _, width = text.partition(":")
        out = args.out.with_name(f"{args.out.name}-{Path(folder).name}")
        grow_drafter(Path(folder), model.config, out, int(width) if width else None)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, logits apart by {apart:.1e}")


if __name__ == "__main__":
    main()
