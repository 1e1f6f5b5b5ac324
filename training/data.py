"""Conversations: read them from ShareGPT or OpenAI files, render them with the target's chat template, batch them."""

import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "system": "system"}  # fmt: skip

Message = dict[str, str]


def read_conversations(path: str | Path) -> Iterator[list[Message]]:
    """Yield each conversation of a `.json`, `.jsonl` or `.jsonl.xz` file as OpenAI messages.

    Rows are ShareGPT (`conversations: [{from, value}]`), OpenAI (`messages: [{role, content}]`), or plain text
    (`text`), which becomes one message of the role 'text'.

    Raises ValueError for a file that cannot be read as any of these, naming the row.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such data file: {path}")
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
            if path.suffix == ".json":
                rows = enumerate(json.load(lines), 1)
            else:
                rows = ((n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip())
            for number, row in rows:
                yield _messages(row, f"{path} row {number}")
    except (json.JSONDecodeError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not valid JSON lines of conversations: {error}") from None


def _messages(row: dict, where: str) -> list[Message]:
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return [{"role": "text", "content": row["text"]}]
    if not isinstance(row, dict) or not ("conversations" in row or "messages" in row):
        raise ValueError(f"{where} has none of 'conversations' (ShareGPT), 'messages' (OpenAI) and 'text'")
    messages = []
    for turn in row.get("conversations") or row.get("messages") or []:
        if not isinstance(turn, dict):
            raise ValueError(f"{where} has a turn that is not an object: {turn!r}")
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role not in ROLES:
            raise ValueError(f"{where} has a turn by {role!r}; known are {', '.join(ROLES)}")
        if not isinstance(content, str | None):
            raise ValueError(f"{where} has content that is not text, which is not supported")
        messages.append({"role": ROLES[role], "content": content or ""})
    return messages


@dataclass
class Sample:
    """One tokenised conversation: ids [T] and where the assistant speaks [T]."""

    ids: np.ndarray
    mask: np.ndarray


def tokenise(
    tokenizer, conversations: Iterable[list[Message]], max_length: int, limit: int | None = None
) -> list[Sample]:
    """Render with the chat template and cut at max_length.

    Conversations with nothing to learn, or that the template refuses, are left out.
    """
    samples = []
    for messages in conversations:
        if limit is not None and len(samples) >= limit:
            break
        try:
            ids, mask = _render(tokenizer, messages) if messages else ([], [])
        except TemplateError:  # for example a template that wants the user to speak first
            continue
        if any(mask[:max_length]):
            samples.append(Sample(np.array(ids[:max_length], dtype=np.int32), np.array(mask[:max_length], dtype=bool)))
    return samples


def _render(tokenizer, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Ids and loss mask: all of a plain text; of a conversation what the assistant says, its end token included.

    Templates with {% generation %} markers tell that themselves. Of another template's text, what the assistant says is
    what rendering one message more adds behind the prompt for it; a template that rewrites earlier text is refused.
    """
    if messages[0]["role"] == "text":
        ids = tokenizer(messages[0]["content"])["input_ids"]
        return ids, [1] * len(ids)
    if re.search(r"{%-?\s*generation", tokenizer.chat_template or ""):
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return out["input_ids"], out["assistant_masks"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = [_span(tokenizer, messages, i, text) for i, m in enumerate(messages) if m["role"] == "assistant"]
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start and end <= b for a, b in spans)) for start, end in out["offset_mapping"]]
    return out["input_ids"], mask


def _span(tokenizer, messages: list[Message], i: int, text: str) -> tuple[int, int]:
    """Characters [start, end) of message i in the rendered text."""
    before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
    if not (after.startswith(before) and text.startswith(after)):
        raise ValueError(
            "the chat template rewrites earlier text, so the assistant's tokens cannot be told; put {% generation %} "
            "markers around the assistant's content in it"
        )
    return len(before), len(after)


def count_tokens(samples: list[Sample], vocab: int) -> Tensor:
    """How often each target token is to be learnt: counts [V] over the masked-in tokens."""
    counts = np.zeros(vocab, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.mask], minlength=vocab)
    return torch.from_numpy(counts)


@dataclass
class Batch:
    """Right-padded rows: tokens [B,T] and loss_mask [B,T] (fp32, 0 on padding)."""

    tokens: Tensor
    loss_mask: Tensor


class Batches:
    """An endless, deterministic order of batches of similar lengths, at most `batch_tokens` padded tokens each.

    Batch k of epoch e depends on (seed, e, k) alone, so that a resumed run goes on where it was.
    """

    POOL = 32  # batches whose samples are sorted by length together

    def __init__(self, samples: list[Sample], batch_tokens: int, seed: int):
        if not samples:
            raise ValueError("the data hold no conversation in which the assistant speaks")
        self.samples, self.batch_tokens, self.seed = samples, batch_tokens, seed

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of one epoch, as lists of sample indices."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.samples))
        mean = sum(len(s.ids) for s in self.samples) / len(self.samples)
        pool = max(1, int(self.POOL * self.batch_tokens / mean))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            batches += self._cut(sorted(order[start : start + pool], key=lambda i: len(self.samples[i].ids)))
        rng.shuffle(batches)
        return batches

    def _cut(self, indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in indices:  # ascending, so the newest is the longest
            if batches[-1] and (len(batches[-1]) + 1) * len(self.samples[i].ids) > self.batch_tokens:
                batches.append([])
            batches[-1].append(int(i))
        return batches

    def collate(self, indices: list[int]) -> Batch:
        rows = [self.samples[i] for i in indices]
        shape = len(rows), max(len(row.ids) for row in rows)
        tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, row in enumerate(rows):
            tokens[i, : len(row.ids)] = torch.from_numpy(row.ids)
            mask[i, : len(row.ids)] = torch.from_numpy(row.mask)
        return Batch(tokens, mask)

    def iterate(self, skip: int = 0) -> Iterator[Batch]:
        """All epochs one after the other, the first `skip` batches left out."""
        number = 0
        while True:
            for indices in self.epoch(number):
                if skip > 0:
                    skip -= 1
                    continue
                yield self.collate(indices)
            number += 1
