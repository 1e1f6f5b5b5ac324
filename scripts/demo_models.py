"""How scripts/build_demo.py makes the demo's target: a wider start with the same logits, and less repetition.

Growing keeps the number of layers, the head size and the queries per key. What is new reads at random and writes zeros
(Net2Net, Chen et al. 2015, arXiv 1511.05641, but with zeros instead of copies, which would stay equal).
"""

import copy
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import checkout  # noqa: F401
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.cli.files import replace_folder
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.text import encode_chat
from specdec.training.pretrain import next_token_loss, save_target

HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
WRITERS = ("o_proj", "down_proj", "fc", "input_proj", "linear", "embed_tokens")  # of the state between layers
RUN = 4  # tokens of a repetition
ANSWERS, EVERY = 32, 10  # answers a step, steps between rounds of answers


def grown_config(config: LlamaConfig, hidden_size: int, intermediate_size: int) -> LlamaConfig:
    """Return the wider configuration. Raises ValueError if the heads do not divide it, or if it is not wider."""
    group, least = config.head_dim * config.num_attention_heads // config.num_key_value_heads, config.intermediate_size
    if hidden_size % group or hidden_size < config.hidden_size or intermediate_size < least:
        wanted = f"a multiple of {group} from {config.hidden_size} on and at least {least}"
        raise ValueError(f"the sizes must be {wanted}, but they are {hidden_size} and {intermediate_size}")
    heads = hidden_size // config.head_dim
    keys = heads * config.num_key_value_heads // config.num_attention_heads
    wider = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return LlamaConfig(**config.to_dict() | wider | {"num_attention_heads": heads, "num_key_value_heads": keys})


def grown(name: str, old: Tensor, shape: torch.Size, hidden: int) -> Tensor:
    """Return the parameter `name` in its new shape. hidden: the old width of the state; a matrix may read several."""
    if old.ndim == 1:
        if "bias" in name:
            return torch.cat([old, torch.zeros(shape[0] - len(old))])
        new = torch.full(shape, old.mean().item())
        new[: len(old)] = old
        return new * math.sqrt(len(old) / len(new))  # as a norm divides by the mean of more squares
    new = torch.zeros(shape) if any(word in name for word in WRITERS) else torch.randn(shape) * old.std()
    parts = 1 if "down_proj" in name else old.shape[1] // hidden
    for there, here in zip(new.chunk(parts, 1), old.chunk(parts, 1), strict=True):
        there[: here.shape[0], : here.shape[1]] = here
    return new


@torch.no_grad()
def grow(small: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """Return a model of `config` with the logits of `small`, in fp32."""
    model = LlamaForCausalLM(config).float()
    for (name, new), old in zip(model.named_parameters(), small.float().parameters(), strict=True):
        new.copy_(grown(name, old, new.shape, small.config.hidden_size))
    return model


def narrowed(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Keep the MLP's `width` neurons of the largest weights."""
    gate, up, down = (next(n for n in tensors if kind in n) for kind in ("gate_proj", "up_proj", "down_proj"))
    sizes = tensors[gate].float().norm(dim=1) * tensors[up].float().norm(dim=1) * tensors[down].float().norm(dim=0)
    widest = sizes.topk(width).indices.sort().values
    return tensors | {gate: tensors[gate][widest], up: tensors[up][widest], down: tensors[down][:, widest]}


def grow_drafter(folder: Path, config: LlamaConfig, out: Path, width: int | None = None) -> None:
    """Write a drafter for the wider target, without a head of its own. width: neurons that its MLP keeps, or all."""
    own, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    old, new = own["hidden_size"], config.hidden_size
    if width is not None:
        held, own["intermediate_size"] = narrowed(held, width), width
    own.pop("draft_vocab_size", None)
    tensors = {}
    for name, tensor in held.items():
        if name in ("lm_head.weight", "d2t", "t2d"):
            continue
        kind = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        rows = getattr(config, HEADS[kind]) * config.head_dim if kind in HEADS else new
        shape = [len(tensor) if kind in ("gate_proj", "up_proj") else rows]
        shape += [size if kind == "down_proj" else size // old * new for size in tensor.shape[1:]]
        tensors[name] = grown(name, tensor.float(), torch.Size(shape), old).contiguous()
    own |= {"hidden_size": new, "dtype": "float32"} | {k: getattr(config, k) for k in HEADS.values() if k in own}

    def fill(staging: Path) -> None:
        save_file(tensors, staging / "model.safetensors")
        (staging / "config.json").write_text(json.dumps(own, indent=1))

    replace_folder(out, fill, ("model.safetensors", "config.json"), "a drafter made here")


# Less repetition


def repeats(tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether the run of four that it ends occurred before."""
    runs = [tuple(tokens[max(0, end - RUN) : end]) for end in range(1, len(tokens) + 1)]
    return [len(run) == RUN and run in runs[:i] for i, run in enumerate(runs)]


def unlikelihood(model: LlamaForCausalLM, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Return the mean of -log(1 - p) over repeats in answers (arXiv 1908.04319). rows: ids of question and answer."""
    bad = [[False] * len(question) + repeats(answer) for question, answer in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor([*question, *answer]) for question, answer in rows], batch_first=True)
    places = pad(list(map(torch.tensor, bad)), batch_first=True)[:, 1:]
    if not places.any():
        return torch.zeros(())
    logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[:, :-1][places])
    chosen = logits.gather(1, ids[:, 1:][places].unsqueeze(1)).squeeze(1)
    return -torch.log1p(-(chosen - logits.logsumexp(1)).exp().clamp(max=1 - 1e-5)).mean()


def greedy_answers(model: LlamaForCausalLM, tokenizer, questions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each short question and of its greedy answer, decoded by the engine."""
    with tempfile.TemporaryDirectory() as folder:
        save_target(copy.deepcopy(model), tokenizer, Path(folder) / "target")
        engine = Engine(load_target(Path(folder) / "target"))
        prompts = [encode_chat(engine.target, [{"role": "user", "content": text}]) for text in questions]
        rows = engine.generate([ids for ids in prompts if len(ids) <= 160], max_new_tokens=96).rows
    return [(row.prompt, row.tokens) for row in rows]


def repeat_less(model: LlamaForCausalLM, tokenizer, data: Tensor, asked: list, unseen: list, steps: int) -> dict:
    """Train the model on data [rows, T] and against its own repetitions. Returns their share before and after."""

    def share() -> float:
        flags = [flag for _, ids in greedy_answers(model, tokenizer, unseen) for flag in repeats(ids)[RUN - 1 :]]
        return sum(flags) / max(1, len(flags))

    start, before = [parameter.detach().clone() for parameter in model.parameters()], share()
    optimizer, questions = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), itertools.cycle(asked)
    rows = itertools.cycle(data.split(2))
    for step in trange(steps, desc="unlikelihood"):
        if step % EVERY == 0:
            pool = greedy_answers(model, tokenizer, list(itertools.islice(questions, ANSWERS * EVERY)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * min(1.0, (step + 1) / 10, 4 * (steps - step) / steps)
        (
            next_token_loss(model, next(rows).long()) + unlikelihood(model, pool[step % EVERY :: EVERY] or pool)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), start, strict=True):
            parameter.lerp_(old, 0.5)  # a mean of the weights before and after (Wortsman et al. 2022, arXiv 2109.01903)
    return {"steps": steps, "before": before, "after": share()}
