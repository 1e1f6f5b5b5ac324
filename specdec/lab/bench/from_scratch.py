"""What the scripts that make a target from scratch share: how conversations are split, and the model's config."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdec.training.data import Message, read_conversations

SEED = 0


def split(path: Path) -> tuple[list[list[Message]], list[list[Message]]]:
    """(training, held-out) conversations, shuffled. All with the same first prompt are on the same side."""
    conversations = [c for c in read_conversations(path) if c]
    random.Random(SEED).shuffle(conversations)
    train, heldout = [], []
    for c in conversations:
        (heldout if held_out(c) else train).append(c)
    return train, heldout


def held_out(conversation: Sequence[Message]) -> bool:
    """One first prompt in a hundred is held out, the same ones in any data."""
    return int(hashlib.sha256(conversation[0]["content"].encode()).hexdigest(), 16) % 100 == 0


def draw_questions(conversations: list[list[Message]], count: int) -> list[Message]:
    """First messages of users, drawn with replacement in proportion to how long their answers are there.

    Else one-line dialogues would be most of what a drafter sees. Raises ValueError if no conversation begins with a
    question and an answer."""
    pairs = [c for c in conversations if len(c) > 1 and c[0]["role"] == "user"]
    if not pairs:
        raise ValueError("no conversation of the data begins with a question and an answer")
    return random.Random(SEED).choices([c[0] for c in pairs], [len(c[1]["content"]) for c in pairs], k=count)


def llama_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
) -> LlamaConfig:
    """A Llama whose embedding is its head."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
