"""A conversation as the target reads it: token ids, and which of them the assistant speaks."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from specdec.training.data.sources import Message

MARKER = re.compile(r"{%-?\s*generation")
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
GREETING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@dataclass
class Sample:
    """One tokenised conversation."""

    ids: np.ndarray  # [T]
    mask: np.ndarray  # [T] True where the token is to be learnt: what the assistant says
    weights: np.ndarray | None = None  # [T] how much each token counts; None: all alike
    number: int | None = None  # its place among all that were loaded


def render(tokenizer, messages: list[Message]) -> Sample:
    """Ids and loss mask. All of a plain text is learnt; of a conversation what the assistant says, and its end token.

    Templates with {% generation %} markers tell what that is. With another template, the conversation is rendered up to
    each of the assistant's messages and with it, and what the second text has more is the assistant's. A template that
    rewrites earlier text is refused with a ValueError. jinja2's TemplateError is the template's own refusal.
    """
    if messages[0]["role"] == "text":
        ids = tokenizer(messages[0]["content"])["input_ids"]
        return _sample(ids, [1] * len(ids))
    if MARKER.search(tokenizer.chat_template or ""):
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return _sample(out["input_ids"], out["assistant_masks"])
    if not tokenizer.is_fast:
        raise ValueError(
            "the tokenizer does not tell the places of its tokens, so the assistant's cannot be told; put "
            "{% generation %} markers around the assistant's content in its chat template"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = [_span(tokenizer, messages, i, text) for i, m in enumerate(messages) if m["role"] == "assistant"]
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start and end <= b for a, b in spans) for start, end in out["offset_mapping"]]
    return _sample(out["input_ids"], mask)


def _sample(ids: list[int], mask: list[int]) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


def _span(tokenizer, messages: list[Message], i: int, text: str) -> tuple[int, int]:
    """The characters [start, end) of message i in the rendered text."""
    before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
    if not (after.startswith(before) and text.startswith(after)):
        raise ValueError(
            "the chat template rewrites earlier text, so the assistant's tokens cannot be told; put {% generation %} "
            "markers around the assistant's content in it"
        )
    return len(before), len(after)


def check_tokenizer(tokenizer) -> None:
    """Raise ValueError for a tokenizer with which no conversation can be rendered."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template, so conversations cannot be rendered: add one to it, or give "
            "plain texts (records with 'text')"
        )
    try:
        text = tokenizer.apply_chat_template(GREETING, tokenize=False)
    except TemplateError:
        return  # it may take other conversations
    for token in SPECIAL.findall(text):
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"the chat template writes {token}, which the tokenizer does not hold as one token: this is not the "
                "tokenizer that belongs to the target"
            )


def count_tokens(samples: list[Sample], vocab: int) -> Tensor:
    """[V]: how often each target token is to be learnt in the samples."""
    counts = np.zeros(vocab, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.mask], minlength=vocab)
    return torch.from_numpy(counts)
