"""Conversations: read from files and data sets (`sources`, `conversation`), rendered with the target's chat template
(`render`), chosen (`load`), batched (`batches`), written by the target and the drafter in training (`rollouts`), stored
(`shards`).
"""

from specdec.training.data.batches import Batch, Batches
from specdec.training.data.conversation import Conversation, Message
from specdec.training.data.load import Tally, hold_out, load_samples, read_messages, read_samples, tokenise
from specdec.training.data.render import Sample, count_tokens
from specdec.training.data.sources import Record, preset, read_conversations, read_records

__all__ = [
    "Batch",
    "Batches",
    "Conversation",
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
