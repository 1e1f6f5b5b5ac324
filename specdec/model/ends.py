"""The ends of a target: embedding, final norm and head, without the layers between them.

A drafter that learns from features on disk needs nothing else of a target. So it can learn from a target that no
local machine can hold and that runs in a server: the ends of a 70B model are 4 GB in bf16.
"""

import os

import torch
from torch import Tensor
from typing_extensions import override

from specdec.model.archs import ModelConfig, NotNative, read_config, text_config, text_name
from specdec.model.checkpoint import check_device, choose_dtype, read_headers, read_tensors
from specdec.model.layers import ModuleList
from specdec.model.loader import allocate, load_tokenizer, read_eos
from specdec.model.names import resolve
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.model.weight_files import read_json

# Families whose layers are not native and whose ends are Llama's, and those whose final norm stores its weight less 1.
PLAIN = ("deepseek_v3", "glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
OFFSET = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


class TargetEnds(Target):
    """A `Target` without its layers. `config` is that of the whole."""

    def __init__(self, config: ModelConfig):
        """Create empty ends; `config` is that of the whole target."""
        super().__init__(config)
        self.blocks = ModuleList()
        self.sizes: dict[int, float] = {}  # hidden state -> its root mean square, set by a caller that ran the layers

    @override
    def forward(self, *_, **__):
        """Raise ValueError: a target without layers cannot run."""
        raise ValueError(f"of {self.name} only the ends are loaded, so it cannot run: load the whole target")


def every_token(vocab: int) -> Tensor:
    """Return [64] token ids from all over a vocabulary, to measure a target without any text."""
    return torch.linspace(0, vocab - 1, 64).long()


@torch.no_grad()
def state_sizes(target, taps: tuple[int, ...]) -> Tensor:
    """Return [len(taps)], the sizes of these hidden states over `every_token`: see `sizes_of`.

    A `TargetEnds` returns the sizes that it was given, and 1 without any.
    """
    if not taps:
        return torch.ones(0, device=target.device)
    if isinstance(target, TargetEnds):
        return torch.tensor([target.sizes.get(tap, 1.0) for tap in taps], device=target.device)
    tokens = every_token(target.vocab).to(target.device)[None]
    return sizes_of(target(tokens, None, taps=taps)[1].float().unflatten(-1, (len(taps), -1)).flatten(0, 1))


def sizes_of(states: Tensor) -> Tensor:
    """Return the root mean square [count] of states [T,count,H], rounded to powers of two.

    A weight times a power of two is exact.
    """
    return states.square().mean((0, 2)).sqrt().log2().round().exp2()


def read_ends(raw: dict, name: str, head: bool) -> ModelConfig:
    """Return the config of the ends from config.json; ValueError if the family's ends are not known.

    `head`: the files hold a head. For a family whose layers are not native, the config has the attention heads that a
    fresh drafter gets.
    """
    # Quantised layers do not matter here. A quantised end is refused, as it holds whole numbers.
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        return read_config(raw, name)
    except NotNative as reason:
        config = text_config(raw)
        if (family := config.get("model_type")) not in PLAIN + OFFSET:
            raise ValueError(f"{name}: {reason}, and how its embedding, norm and head work is not known") from None
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return ModelConfig(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config.get("intermediate_size") or 4 * hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=hidden // heads,
            vocab=config["vocab_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            rope=Rope(),
            context=config.get("max_position_embeddings") or 2048,
            tied=not head,
            norm_offset=family in OFFSET,
        )
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None


def load_ends(path: str | os.PathLike, *, dtype: str = "auto", device: str = "cpu") -> TargetEnds:
    """Load the ends and the tokenizer of a target from a checkpoint folder or a hub name.

    The family is native, or in `PLAIN` or `OFFSET`. Only the tensors of the ends are read. Arguments and errors: see
    `load_target`.
    """
    folder, name = resolve(path), str(path)
    raw, place, headers = read_json(folder / "config.json"), check_device(device), read_headers(folder)
    inner = {text_name(tensor, raw): value for tensor, value in headers.items()}
    config = read_ends(raw, name, "lm_head.weight" in inner)
    target, fill = allocate(TargetEnds, config, name, inner, choose_dtype(dtype, text_config(raw), place), place)
    ours = {tensor: key for tensor in headers if (key := text_name(tensor, raw)) in fill.parameters}
    for tensor, value in read_tensors(folder, only=ours):
        fill.put(ours[tensor], value)
    fill.finish()
    if config.tied:
        target.head.weight = target.embed.weight
    target.eval().name, target.eos, target.tokenizer = name, read_eos(folder, raw), load_tokenizer(folder)
    return target
