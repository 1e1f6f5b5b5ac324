"""Build the demo pair from a file of conversations: tokenizer, target, its own answers, an EAGLE-3 drafter.

    python scripts/build_demo.py --data conversations.jsonl.xz --work build

Every stage leaves its result under --work and is skipped when that is there, so an interrupted build goes on. The last
stage copies the pair to --out as bf16 safetensors with a model card.
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.data import read_conversations  # noqa: E402
from training.pretrain import pack, pretrain, train_tokenizer  # noqa: E402

SEED = 0
LENGTH = 1024


def split(path: Path) -> tuple[list, list]:
    """(training, held-out) conversations, shuffled; every conversation with the same first prompt is on the same side."""
    conversations = [c for c in read_conversations(path) if c]
    random.Random(SEED).shuffle(conversations)
    held = [int(hashlib.sha256(c[0]["content"].encode()).hexdigest(), 16) % 100 == 0 for c in conversations]
    return [c for c, h in zip(conversations, held, strict=True) if not h], [
        c for c, h in zip(conversations, held, strict=True) if h
    ]


def build_target(args: argparse.Namespace, work: Path) -> None:
    train, heldout = split(args.data)
    tokenizer = train_tokenizer((m["content"] for c in train[:30_000] for m in c), args.vocab_size)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=args.hidden_size // 64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    data = pack(tokenizer, train, LENGTH, args.target_tokens)
    model, report = pretrain(
        config,
        data,
        pack(tokenizer, heldout, LENGTH, 200_000),
        batch=8,
        lr=3e-3,
        muon_lr=0.02,
        seed=SEED,
        checkpoint=work / "pretrain.pt",
    )
    model.to(torch.bfloat16).save_pretrained(work / "target.tmp")
    tokenizer.save_pretrained(work / "target.tmp")
    (work / "target.tmp" / "report.json").write_text(json.dumps(report, indent=1))
    (work / "target.tmp").rename(work / "target")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="ShareGPT-form .json, .jsonl or .jsonl.xz")
    parser.add_argument("--work", type=Path, default=Path("build"), help="folder for intermediate results")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--target-tokens", type=int, default=15_000_000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "target").exists():
        build_target(args, args.work)


if __name__ == "__main__":
    main()
