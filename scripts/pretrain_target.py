"""Train a target from scratch in a given time, and draw prompts for its drafter (scripts/gpu_proof.py runs this).

    python scripts/pretrain_target.py --data conversations.jsonl.xz --out build/pair --seconds 240 --device cuda

Writes OUT/target (a Llama of transformers with its tokenizer, in bf16), OUT/prompts.jsonl, whose answers the drafter is
to learn, and OUT/heldout.jsonl, prompts that the target has not seen, of at most half its context. The default sizes
make about 100 M parameters. The training ends in time for measuring and saving, or when the data have been seen once.
"""

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import checkout  # noqa: F401
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, replace_folder, write_text
from specdec.model.checkpoint import check_device
from specdec.training.data import Message, read_conversations
from specdec.training.loop.optim import Optimizers, fast_bf16

SEED = 0
HEAD = 64  # head size
TRAINED_BY = 0.85  # of the time; the rest is for measuring and saving
TOKENIZER_DATA = 20_000  # conversations
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
    seconds: float,
) -> dict:
    """Train on data [rows, T] once: Muon for the matrices of the blocks, AdamW for the rest. Returns a report.

    `seconds` ends the pass early: the learning rate then falls with the time, so that it reaches zero whatever the
    machine does. Raises ValueError if there are fewer rows than one batch, or none held out.
    """
    if len(data) < batch or len(heldout) == 0:
        raise ValueError(
            f"the data fill {len(data)} rows of {data.shape[1]} tokens, and {len(heldout)} held out; "
            f"at least {batch} and 1 are needed"
        )
    optimizers = Optimizers(model.named_parameters(), lr=lr, muon_lr=muon_lr)
    running, steps, began = math.nan, len(data) // batch, time.monotonic()
    bar = tqdm(range(steps), desc="target", mininterval=5)
    for step in bar:
        spent = (time.monotonic() - began) / seconds
        if spent >= 1:
            steps = step
            break
        loss = next_token_loss(model, data[step * batch : (step + 1) * batch].to(model.device).long())
        loss.backward()
        optimizers.step(_lr_scale(step, steps, spent), clip=1.0)
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        bar.set_postfix(loss=f"{running:.3f}")
    with torch.no_grad():
        losses = [next_token_loss(model, row[None].to(model.device).long()).item() for row in heldout]
    return {"tokens": steps * batch * data.shape[1], "train_loss": running, "heldout_loss": sum(losses) / len(losses)}


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy [] of ids [B, T] after their first. Products are in bf16 where that is fast."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=fast_bf16(ids.device)):
        logits = model.lm_head(model.model(ids).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _lr_scale(step: int, steps: int, spent: float) -> float:
    """Return the factor of the learning rate at a step.

    It rises over the first 2 % of the steps, is constant, and falls to zero over the last 60 % of the steps or of the
    time, whichever ends first. `spent` is the share of the time that has passed.
    """
    return min((step + 1) / (0.02 * steps + 1), 1.0, (1 - max(step / steps, spent)) / 0.6)


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a checkpoint folder in bf16, whole or not at all."""

    def fill(staging: Path) -> None:
        model.bfloat16().save_pretrained(staging)
        tokenizer.save_pretrained(staging)

    replace_folder(folder, fill, TARGET_FILES, "a target made here")


def split(path: Path) -> tuple[list[list[Message]], list[list[Message]]]:
    """Return training and held-out conversations, shuffled. All with the same first prompt are on the same side."""
    conversations = [c for c in read_conversations(path) if c]
    random.Random(SEED).shuffle(conversations)
    sides: tuple[list, list] = [], []
    for c in conversations:  # one first prompt in a hundred is held out, the same ones in any data
        digest = hashlib.sha256(c[0]["content"].encode()).hexdigest()
        sides[int(digest, 16) % 100 == 0].append(c)
    return sides


def prompts_of(conversations: list[list[Message]], count: int) -> list[str]:
    """Draw `count` first questions, no two alike, in proportion to the length of their answers.

    Otherwise a drafter would mostly see one-line dialogues. Raises ValueError without a question and an answer.
    """
    pairs = [c for c in conversations if len(c) > 1 and c[0]["role"] == "user"]
    if not pairs:
        raise ValueError("no conversation of the data begins with a question and an answer")
    questions, lengths = [c[0]["content"] for c in pairs], [len(c[1]["content"]) for c in pairs]
    return list(dict.fromkeys(random.Random(SEED).choices(questions, lengths, k=2 * count)))[:count]


def short_prompts(tokenizer, prompts: list[str], tokens: int) -> list[str]:
    """Those of at most so many tokens. Raises ValueError if there is none."""
    if found := [prompt for prompt in prompts if len(tokenizer(prompt)["input_ids"]) <= tokens]:
        return found
    raise ValueError(f"every prompt held out has more than {tokens} tokens, half of the context: give more --length")


def write_prompts(path: Path, prompts: list[str]) -> None:
    """Write prompts as JSON lines."""
    write_text(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def train(args: argparse.Namespace) -> dict:
    """Write everything to --out; returns the report."""
    began = time.monotonic()
    known, heldout = split(args.data)
    tokenizer = train_tokenizer((m["content"] for c in known[:TOKENIZER_DATA] for m in c), args.vocab_size)
    short = short_prompts(tokenizer, prompts_of(heldout, 4 * args.heldout), args.length // 2)
    write_prompts(args.out / "prompts.jsonl", prompts_of(known, args.prompts))
    write_prompts(args.out / "heldout.jsonl", short[: args.heldout])
    data = pack(tokenizer, known, args.length, args.tokens)
    batch = max(1, args.batch_tokens // args.length)
    prepared = time.monotonic() - began
    left = TRAINED_BY * args.seconds - prepared
    if left <= 0:
        raise ValueError(f"reading and encoding the data took {prepared:.0f} s: give more --seconds, or fewer --tokens")
    width, heads = args.hidden_size, args.hidden_size // HEAD
    shape = {"vocab_size": args.vocab_size, "hidden_size": width, "intermediate_size": width * 11 // 4}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 3)}
    shape |= {"num_hidden_layers": args.layers, "max_position_embeddings": args.length, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**shape, **ends)).to(args.device)
    unseen = pack(tokenizer, heldout, args.length, 100 * args.length)
    report = pretrain(model, data, unseen, batch=batch, lr=3e-3, muon_lr=0.02, seconds=left)
    save_target(model, tokenizer, args.out / "target")
    return report | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_in_data": data.numel(),
        "seconds_to_prepare": round(prepared, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


@one_sentence_errors
def main() -> None:
    """Train the target and write the prompts for its drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="conversations: .json, .jsonl or .jsonl.xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything, reading the data included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--length", type=int, default=1024, help="the target's context")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="use so many tokens of the data at most")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--prompts", type=int, default=10_000, help="for the drafter's data")
    parser.add_argument("--heldout", type=int, default=24, help="prompts to measure on")
    args = parser.parse_args()
    if args.hidden_size % HEAD:
        raise ValueError(f"--hidden-size must be a multiple of {HEAD}, got {args.hidden_size}")
    if args.seconds <= 0:
        raise ValueError(f"--seconds must be positive, got {args.seconds}")
    check_device(args.device)
    output_folder(args.out)
    if (args.out / "target").exists():
        raise ValueError(f"{args.out} holds a target already: give another --out")
    print(json.dumps(train(args)))


if __name__ == "__main__":
    main()
