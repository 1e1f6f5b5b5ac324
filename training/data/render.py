"""A conversation as the target reads it: token ids, and which of them the assistant speaks."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.text import dated, render_chat, run_template
from specdec.training.data.conversation import CARRIED, Message
from specdec.vocabulary import vocabulary_of

MARKER = re.compile(r"{%-?\s*generation")
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
GREETING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
PROBE = "\u00a7"  # a character that begins no answer
SPLIT = "conversations split into one sample per answer, as the chat template rewrites earlier turns"
SHORTENED = "answers that the chat template shortens"
RETOKENISED = "answers whose tokens do not match their text, so that the text was tokenised"

Span = tuple[int, int]  # characters [start, end) of a rendered text


@dataclass
class Sample:
    """One tokenised conversation."""

    ids: np.ndarray  # [T]
    mask: np.ndarray  # [T] True for training tokens: the assistant's
    weights: np.ndarray | None = None  # [T] how much each token counts; None: all alike
    number: int | None = None  # its place among all that were loaded


def render(
    tokenizer, messages: list[Message], note: Callable[[str], None] = lambda what: None, day: str | None = None
) -> list[Sample]:
    """Return ids and loss masks of a conversation: the assistant's turns with their end tokens, or all of a plain text.

    The places of the assistant's turns are those of {% generation %} markers in the template. A template without
    markers is rendered up to each answer and with it; the difference is the answer. An answer that comes with its
    `tokens` is trained on these. If the template rewrites earlier turns, each answer becomes a sample of its own.

    note: counts what was changed, by its name. day: what the template writes as today's date, YYYY-MM-DD. Raises
    ValueError for a conversation of which the template leaves something out, and the template's own TemplateError.
    """
    first = messages[0]
    if first["role"] == "text":
        ids = tokens_said(tokenizer, first, note) or tokenizer(first["content"])["input_ids"]
        return [_sample(ids, [True] * len(ids))]
    return _Chat(tokenizer, messages, note, day).samples()


def tokens_said(tokenizer, message: Message, note: Callable[[str], None]) -> list[int] | None:
    """Return the tokens that come with an answer or a plain text, if they are those of its text."""
    tokens, text = message.get("tokens"), message["content"]
    if tokens is None:
        return None
    if max(tokens) < len(tokenizer) and min(tokens) >= 0:
        said = tokenizer.decode(tokens, skip_special_tokens=True)
        # Of a plain text spaces do not count: files of earlier versions lack the one between prompt and answer.
        if said == text or (message["role"] == "text" and "".join(said.split()) == "".join(text.split())):
            return tokens
    note(RETOKENISED)
    return None


def _sample(ids: list[int], mask: list[bool]) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


@dataclass
class _Chat:
    """A conversation and the texts of its beginnings."""

    tokenizer: Any
    messages: list[Message]
    note: Callable[[str], None]
    day: str | None
    texts: dict[tuple[int, bool], str] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        whole = self.text(len(self.messages))
        self._check_nothing_left_out(whole)
        answers = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        spans = {i: self._spans(i) for i in answers}
        learnt = [i for i in answers if self.messages[i].get("weight", 1)]
        alike = all(whole.startswith(self.text(i + 1)) for i in answers)
        found = {i: tokens_said(self.tokenizer, self.messages[i], self.note) for i in learnt}
        said = {i: tokens for i, tokens in found.items() if tokens is not None}
        if alike and not said:
            return [self._sample(whole, [span for i in learnt for span in spans[i]])]
        if len(answers) > 1:
            self.note(SPLIT if not alike else "conversations split into one sample per answer, to learn their tokens")
        return [self._of_tokens(i, said[i]) if i in said else self._sample(self.text(i + 1), spans[i]) for i in learnt]

    def text(self, count: int, answer: bool = False) -> str:
        """Return the text of the first `count` messages; answer: with the beginning of the assistant's next turn."""
        if (count, answer) not in self.texts:
            self.texts[count, answer] = self._render(self.messages[:count], self.tools, answer) if count else ""
        return self.texts[count, answer]

    def _render(self, messages: list[Message], tools: list | None, answer: bool = False) -> str:
        return render_chat(self.tokenizer, messages, tools, answer, self.day)

    @property
    def tools(self) -> list | None:
        return getattr(self.messages, "tools", None)

    @cached_property
    def template(self) -> str:
        template = self.tokenizer.get_chat_template(tools=self.tools)
        return template if self.day is None else dated(template, self.day)

    def _spans(self, i: int) -> list[Span]:
        """Return the places of answer i in the text of the messages up to it.

        The opening of a turn belongs to the answer as far as the prompt of an answer does not include it.
        """
        after = self.text(i + 1)
        base = alike(self.text(i), after)
        if MARKER.search(self.template):
            spans = [span for span in self._marked(i + 1) if span[1] > base]
        else:
            prompt = self.text(i, answer=True)
            start = alike(prompt, after)
            if start < len(prompt) and base < len(self.text(i)):
                raise ValueError(
                    "the chat template rewrites earlier text at each turn, so the assistant's tokens cannot be found; "
                    "put {% generation %} markers around the assistant's content in it"
                )
            if start < len(prompt):  # a prompt that opens reasoning, which the template does not write in an answer
                other = [*self.messages[:i], {"role": "assistant", "content": PROBE}]
                start = min(start, alike(prompt, self._render(other, self.tools)))
            spans = [(start, len(after))]
        if self._content(i) not in after[base:]:
            self.note(SHORTENED)
        if self.messages[i].get("finish_reason") == "length":  # the target has not ended it
            end = after.rfind(self._content(i)) + len(self._content(i))
            spans = [(start, min(end, stop)) for start, stop in spans if start < end]
        return spans

    def _content(self, i: int) -> str:
        content = self.messages[i]["content"]
        return content.strip() if isinstance(content, str) else content[-1]["text"].strip()

    def _marked(self, count: int) -> list[Span]:
        """Return the places that {% generation %} marks in the text of the first `count` messages."""
        settings = {"chat_template": self.template, "tools": self.tools, "return_assistant_tokens_mask": True}
        settings |= {"conversations": [list(self.messages[:count])]} | self.tokenizer.special_tokens_map
        written: Any = run_template(render_jinja_template, **settings)
        texts, spans = written
        if texts[0] != self.text(count):
            raise ValueError("the chat template writes another text each time")
        return spans[0]

    def _of_tokens(self, i: int, tokens: list[int]) -> Sample:
        prompt = self.tokenizer(self.text(i, answer=True), add_special_tokens=False)["input_ids"]
        return _sample([*prompt, *tokens], [False] * len(prompt) + [True] * len(tokens))

    def _sample(self, text: str, spans: list[Span]) -> Sample:
        ids, places = tokens_of(self.tokenizer, text)
        return _sample(ids, [any(_belongs(text, place, span) for span in spans) for place in places])

    def _check_nothing_left_out(self, whole: str) -> None:
        """Raise ValueError, which names it, for what the conversation holds and the template does not write."""
        for i, message in enumerate(self.messages):
            for name in sorted(message.keys() & set(CARRIED) - {"tool_call_id", "name"}):
                without = {key: value for key, value in message.items() if key != name}
                # In the text up to this turn: later texts may leave out the reasoning of earlier turns.
                if self._same(self.text(i + 1), [*self.messages[:i], without], self.tools):
                    raise ValueError(_ignored(f"the field {name!r} of turns"))
        if self.tools and self._same(whole, list(self.messages), None):
            raise ValueError(_ignored("the field 'tools'"))
        for i, message in enumerate(self.messages):
            parts = message["content"]
            texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
            written = all(text.strip() in whole for text in texts)
            if len(texts) > 1 and (not written or str(parts[0]) in whole):
                raise ValueError("the target's chat template takes text, and not a list of parts as 'content'")
            others = [*self.messages[:i], *self.messages[i + 1 :]]
            if message["role"] != "assistant" and not written and self._same(whole, others, self.tools):
                raise ValueError(_ignored(f"the turn of {message['role']!r}"))

    def _same(self, whole: str, messages: list[Message], tools: list | None) -> bool:
        try:
            return self._render(messages, tools) == whole
        except (TemplateError, ValueError):  # so the template looks at it
            return False


def _belongs(text: str, place: Span, span: Span) -> bool:
    """Return whether a token is in a span, but for spaces, such as that before the first word of an answer."""
    (start, end), (a, b) = place, span
    if a <= start and end <= b:
        return True
    inside = text[max(start, a) : min(end, b)]
    outside = text[start : min(a, end)] + text[max(b, start) : end]
    return bool(inside.strip()) and not outside.strip()


def alike(a: Sequence, b: Sequence) -> int:
    """Return the number of characters, or bytes, with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ignored(what: str) -> str:
    return f"the target's chat template leaves out {what}: remove it, or use a template that writes it"


def tokens_of(tokenizer, text: str) -> tuple[list[int], list[Span]]:
    """Return the ids of a rendered text and the characters [start, end) of each.

    The places follow from the tokens' bytes. A tokenizer that changes the text (lower case, spaces) says them itself.

    Raises ValueError if neither is possible.
    """
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids, vocabulary, data = out["input_ids"], vocabulary_of(tokenizer), text.encode()
    pieces = [vocabulary.bytes_of(token) for token in ids]
    joined = b"".join(pieces)
    added = 1 if joined == b" " + data else 0  # a space in front of all
    if joined[added:] == data:
        ends = np.cumsum([0, *map(len, pieces)]) - added
        chars = np.cumsum([0, *((byte & 0xC0) != 0x80 for byte in data)])  # characters that begin before a byte
        places = chars[np.maximum(ends, 0)].tolist()
        return ids, list(pairwise(places))
    if not tokenizer.is_fast:
        raise ValueError("the places of this tokenizer's tokens are unknown: use its fast version (tokenizer.json)")
    places, before = [], 0
    for start, end in out["offset_mapping"]:  # spaces before a token may be left out of its place
        places.append((min(start, before) if text[before:start].isspace() else start, end))
        before = max(before, end)
    return ids, places


def check_tokenizer(tokenizer) -> None:
    """Raise ValueError for a tokenizer with which no conversation can be rendered."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template, so conversations cannot be rendered: add one to it, or give "
            "plain texts (records with 'text')"
        )
    try:
        text = render_chat(tokenizer, GREETING)
    except TemplateError:
        return  # it may take other conversations
    for token in SPECIAL.findall(text):
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"the chat template writes {token}, which the tokenizer does not hold as one token: this is not the "
                "tokenizer that belongs to the target"
            )


def count_tokens(samples: Iterable[Sample], vocab: int) -> Tensor:
    """[V]: how often each target token is a training token of the samples."""
    counts = np.zeros(vocab, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.mask], minlength=vocab)
    return torch.from_numpy(counts)
