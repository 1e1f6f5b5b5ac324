"""A small target from scratch: a byte-level BPE tokenizer with a chat template, and a Llama trained on conversations.

Only the demo and the tests need this; a user brings a target. The model is transformers' Llama, so that the engine does
not load what it made itself.
"""

import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.cli.files import replace_folder, write_whole
from specdec.training.loop.checkpoint import save_state
from specdec.training.loop.optim import Optimizers, fast_bf16

ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>"]
END = "<|end|>"
PAD = "<|pad|>"
TARGET_FILES = (
    "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip

# A message is one role token, the text, and one end token, with no white space between them. The generation markers
# show which tokens are the assistant's, so the loss mask comes from the template.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message.content | trim }}<|end|>{% endgeneration %}"
    "{%- else -%}"
    "{{ '<|' + message.role + '|>' + message.content | trim + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which reproduces any string. Each digit is a token, as arithmetic needs it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=ROLE_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def pack(tokenizer, conversations: list[list[dict]], length: int, limit: int) -> Tensor:
    """Render conversations and cut their concatenation into rows: ids [rows, length], `limit` tokens at most."""
    ids: list[int] = []
    for start in range(0, len(conversations), 1000):
        rendered = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations[start : start + 1000]]
        for row in tokenizer(rendered, add_special_tokens=False)["input_ids"]:
            ids.extend(row)
        if len(ids) >= limit:
            break
    rows = min(len(ids), limit) // length
    return torch.tensor(ids[: rows * length], dtype=torch.int32).view(rows, length)


def pretrain(
    model: LlamaForCausalLM,
    data: Tensor,
    heldout: Tensor,
    *,
    batch: int,
    lr: float,
    muon_lr: float,
    checkpoint: Path,
    compile: bool = True,
    seconds: float | None = None,
) -> dict:
    """Train on data [rows, T] once: Muon for the matrices of the blocks, AdamW for the rest. Returns a report.

    `seconds` ends the pass early: the learning rate then falls with the time, so that it reaches zero whatever the
    machine does. The state is written to `checkpoint` every few minutes, and a run that finds it continues.
    Raises ValueError if there are fewer rows than one batch, or none held out.
    """
    if len(data) < batch or len(heldout) == 0:
        raise ValueError(
            f"the data fill {len(data)} rows of {data.shape[1]} tokens, and {len(heldout)} held out; "
            f"at least {batch} and 1 are needed"
        )
    optimizers = Optimizers(model.named_parameters(), lr=lr, muon_lr=muon_lr)
    begun, steps = _resume(checkpoint, model, optimizers), len(data) // batch
    loss_of = partial(next_token_loss, model)
    train_loss = torch.compile(loss_of) if compile else loss_of
    running = math.nan
    began = saved_at = time.monotonic()
    bar = tqdm(range(begun, steps), initial=begun, total=steps, desc="target", mininterval=5)
    for step in bar:
        spent = (time.monotonic() - began) / seconds if seconds else 0.0
        if spent >= 1:
            steps = step
            break
        loss = train_loss(data[step * batch : (step + 1) * batch].to(model.device).long())
        loss.backward()
        optimizers.step(_lr_scale(step, steps, spent), clip=1.0)
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        bar.set_postfix(loss=f"{running:.3f}")
        if time.monotonic() - saved_at > 180:
            state = {"model": model.state_dict(), "optimizers": optimizers.state_dict(), "step": step + 1}
            write_whole(checkpoint, partial(save_state, state))
            saved_at = time.monotonic()
    with torch.no_grad():
        losses = [loss_of(row[None].to(model.device).long()).item() for row in heldout]
    return {"tokens": steps * batch * data.shape[1], "train_loss": running, "heldout_loss": sum(losses) / len(losses)}


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy [] of ids [B, T] after their first. Products are in bf16 where that is fast."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=fast_bf16(ids.device)):
        logits = model.lm_head(model.model(ids).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _resume(checkpoint: Path, model: LlamaForCausalLM, optimizers: Optimizers) -> int:
    """Load a state that an earlier run wrote, if there is one; returns the step to continue with."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, weights_only=True, map_location=model.device)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    return state["step"]


def _lr_scale(step: int, steps: int, spent: float) -> float:
    """Return the factor of the learning rate at a step.

    It rises over the first 2 % of the steps, is constant, and falls to zero over the last 60 % of the steps or of the
    time, whichever ends first. `spent` is the share of the time that has passed.
    """
    return min((step + 1) / (0.02 * steps + 1), 1.0, (1 - max(step / steps, spent)) / 0.6)


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, **reports: dict) -> None:
    """Write a checkpoint folder in bf16, whole or not at all, and each of `reports` in it as NAME.json."""

    def fill(staging: Path) -> None:
        model.bfloat16().save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for name, report in reports.items():
            (staging / f"{name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")

    replace_folder(folder, fill, (*TARGET_FILES, *(f"{name}.json" for name in reports)), "a target made here")
