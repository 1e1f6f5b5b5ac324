"""The ranges of numbers that commands take, by the name of the setting: for flags, settings files and Hydra alike.

What is above them is a mistake, or would take the machine's memory before anybody sees that it is one.
"""

from dataclasses import fields, make_dataclass
from typing import Any

from specdec.schema import ranged

MOST = 1 << 31  # of what is only counted
# (type, lowest, highest): the names that mean the same in every command
RANGES: dict[tuple[Any, float, float], str] = {
    (int, 0, 1024): "sliding_layers",
    (int, 0, 65_535): "port",
    (int, 0, 1 << 30): "prefix_cache",
    (int, 0, MOST): "skip probe shard queue warm_up top_k",
    (int, 0, 1 << 62): "seed",
    (int, 1, 64): "heads blocks",
    (int, 1, 256): "steps",
    (int, 1, 1000): "tries repeats",
    (int, 1, 1024): "topk layers block_size max_ngram min_ngram",
    (int, 1, 4096): "batch_size requests",
    (int, 1, 10_000): "trials samples",
    (int, 1, 1 << 16): "max_n",
    (int, 1, 1 << 17): "rank",
    (int, 1, 1_000_000): "resamples",
    (int, 1, 1 << 20): "max_new_tokens",
    (int, 1, 10_000_000): "draws",
    (int, 1, 1 << 24): "size",
    (int, 1, MOST): "max_length questions shards shard_tokens max_body",
    (int | None, 1, 4096): "num_draft_tokens num_attention_heads num_key_value_heads",
    (int | None, 1, 1 << 20): "intermediate_size",
    (int | None, 1, 1 << 24): "draft_vocab_size",
    (int | None, 1, MOST): "limit shard_size pack prefill_chunk stream_interval",
    (int | None, 2, MOST): "room",
    (int | str | None, 0, 1024): "taps",
    (float, 0, 1e6): "temperature",
    (float, 0, MOST): "heldout grace",
    (float | None, 0, 1e12): "rope_theta",
    (float | None, 0, MOST): "max_seconds budget_s",
    (float | None, 1, 1e6): "simulate_tau",
}
ABOVE = ("rope_theta", "max_seconds", "budget_s")  # the lowest itself is too little
_LIMITS = [
    (name, kind, ranged(low, high, above=name in ABOVE))
    for (kind, low, high), names in RANGES.items()
    for name in names.split()
]
LIMITS = {limit.name: limit for limit in fields(make_dataclass("Limits", _LIMITS))}
