"""The ranges of numbers that commands take, by the name of the setting: for flags, settings files and Hydra alike.

What is above them is a mistake, or would take the machine's memory before anybody sees that it is one.
"""

from dataclasses import dataclass, fields

from specdec.schema import ranged

MOST = 1 << 31  # of what is only counted


@dataclass
class Limits:
    """A field for each name that means the same in every command."""

    max_new_tokens: int = ranged(1, 1 << 20, 128)
    batch_size: int = ranged(1, 4096, 1)
    seed: int = ranged(0, 1 << 62, 0)
    limit: int | None = ranged(1, MOST, None)
    topk: int = ranged(1, 1024, 4)
    steps: int = ranged(1, 256, 5)
    num_draft_tokens: int | None = ranged(1, 4096, 16)
    tries: int = ranged(1, 1000, 4)
    repeats: int = ranged(1, 1000, 3)
    trials: int = ranged(1, 10_000, 1)
    draws: int = ranged(1, 10_000_000, 100_000)
    samples: int = ranged(1, 10_000, 1)
    requests: int = ranged(1, 4096, 32)
    shard_size: int | None = ranged(1, MOST, None)
    resamples: int = ranged(1, 1_000_000, 1000)
    max_length: int = ranged(1, MOST, 2048)
    heldout: float = ranged(0, MOST, 0.05)
    size: int = ranged(1, 1 << 24, 1)
    skip: int = ranged(0, MOST, 0)
    count: int = ranged(1, MOST, 1)
    draft_vocab: int = ranged(1, 1 << 24, 32_000)
    batch: int = ranged(1, 1 << 20, 1)
    context: int = ranged(1, MOST, 64)
    questions: int = ranged(1, MOST, 1)
    probe: int = ranged(0, MOST, 4)
    shards: int = ranged(1, MOST, 1)
    shard: int = ranged(0, MOST, 0)
    shard_tokens: int = ranged(1, MOST, 65_536)
    new_tokens: int = ranged(1, 1 << 20, 96)
    # Of drafters that are made
    pack: int | None = ranged(1, MOST, None)
    draft_vocab_size: int | None = ranged(1, 1 << 24, None)
    intermediate_size: int | None = ranged(1, 1 << 20, None)
    num_attention_heads: int | None = ranged(1, 4096, None)
    num_key_value_heads: int | None = ranged(1, 4096, None)
    heads: int = ranged(1, 64, 1)
    blocks: int = ranged(1, 64, 1)
    taps: int | str | None = ranged(0, 1024, None)
    layers: int = ranged(1, 1024, 5)
    sliding_layers: int = ranged(0, 1024, 0)
    block_size: int = ranged(1, 1024, 16)
    rank: int = ranged(1, 1 << 17, 256)
    rope_theta: float | None = ranged(0, 1e12, None, above=True)
    max_ngram: int = ranged(1, 1024, 8)
    min_ngram: int = ranged(1, 1024, 2)
    # Of objectives
    decay: float = ranged(0, 1000, 0.8)
    feature: float = ranged(0, 1e6, 1.0)
    noise: float = ranged(0, 1000, 0.0)
    anchors: int = ranged(1, 1 << 20, 512)
    noise_length: int | None = ranged(1, MOST, None)
    kept: float = ranged(0, 1, 0.7)
    kept_min: float = ranged(0, 1, 0.2)
    drop: float = ranged(0, 1, 0.0)
    # Of the server
    port: int = ranged(0, 65_535, 8000)
    room: int | None = ranged(2, MOST, None)
    queue: int = ranged(0, MOST, 256)
    prefill_chunk: int | None = ranged(1, MOST, None)
    prefix_cache: int = ranged(0, 1 << 30, 256)
    max_n: int = ranged(1, 1 << 16, 16)
    max_body: int = ranged(1, MOST, 4 << 20)
    grace: float = ranged(0, MOST, 30.0)
    stream_interval: int | None = ranged(1, MOST, None)
    max_seconds: float | None = ranged(0, MOST, None, above=True)
    warm_up: int = ranged(0, MOST, 4)
    # Of sampling
    temperature: float = ranged(0, 1e6, 0.0)
    top_k: int = ranged(0, MOST, 0)


LIMITS = {limit.name: limit for limit in fields(Limits)}
