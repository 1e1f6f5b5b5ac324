"""Conversations: read (`sources`), rendered with the target's chat template (`render`), loaded (`load`), batched."""

from training.data.batches import Batch, Batches
from training.data.load import Tally, hold_out, load_samples, read_messages, read_samples, tokenise
from training.data.render import Sample, count_tokens
from training.data.sources import Message, Record, preset, read_conversations, read_records

__all__ = [
    "Batch",
    "Batches",
    "Message",
    "Record",
    "Sample",
    "Tally",
    "count_tokens",
    "hold_out",
    "load_samples",
    "preset",
    "read_conversations",
    "read_messages",
    "read_records",
    "read_samples",
    "tokenise",
]
