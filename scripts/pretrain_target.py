"""Train a target from scratch in a given time, and draw prompts for its drafter (scripts/gpu_proof.py runs this).

    python scripts/pretrain_target.py --data conversations.jsonl.xz --out build/pair --seconds 240 --device cuda

Writes OUT/target (a Llama of transformers with its tokenizer, in bf16), OUT/prompts.jsonl, whose answers the drafter is
to learn, and OUT/heldout.jsonl, prompts that the target has not seen, of at most half its context. The default sizes
make about 100 M parameters. The training ends in time for measuring and saving, or when the data have been seen once.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import checkout  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.model.checkpoint import check_device
from specdec.training.data import Message, read_conversations
from specdec.training.pretrain import pack, pretrain, save_target, train_tokenizer

SEED = 0
HEAD = 64  # head size
TRAINED_BY = 0.85  # of the time; the rest is for measuring and saving
TOKENIZER_DATA = 20_000  # conversations


def split(path: Path) -> tuple[list[list[Message]], list[list[Message]]]:
    """Return training and held-out conversations, shuffled. All with the same first prompt are on the same side."""
    conversations = [c for c in read_conversations(path) if c]
    random.Random(SEED).shuffle(conversations)
    sides: tuple[list, list] = [], []
    for c in conversations:
        sides[held_out(c)].append(c)
    return sides


def held_out(conversation: Sequence[Message]) -> bool:
    """Hold one first prompt in a hundred out, the same ones in any data."""
    return int(hashlib.sha256(conversation[0]["content"].encode()).hexdigest(), 16) % 100 == 0


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
    how = {"checkpoint": args.out / "pretrain.pt", "compile": not args.eager, "seconds": left}
    report = pretrain(model, data, unseen, batch=batch, lr=3e-3, muon_lr=0.02, **how)
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
    parser.add_argument("--eager", action="store_true", help="do not compile the training step")
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
