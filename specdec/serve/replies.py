"""What clients get back: tokens as text, and the JSON of OpenAI's answers and chunks."""

from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from specdec.engine.sequence import REASONS
from specdec.serve.jobs import Delta, Job
from specdec.text import TextStream
from specdec.vocabulary import vocabulary_of

BY_TOKEN = ("tokens", "likely", "marks", "texts")  # lists of a `Delta`


class Choice:
    """One of the texts of a response, while it grows. It ends before a stop string, and its tokens with the string.

    A possible beginning of a stop string, and an incomplete character, are held back.
    """

    def __init__(self, index: int, job: Job, tokenizer, stops: list[str], marked: bool = False):
        """marked: keep the text of each token, and count rounds, for a response that marks drafted tokens."""
        self.index, self.job, self.tokenizer, self.marked = index, job, tokenizer, marked
        self.stream = TextStream(tokenizer, stops)
        self.pieces: list[Delta] = []  # what steps added, or of a stream its events
        self.count = 0  # tokens so far
        self.vocabulary = vocabulary_of(tokenizer)
        self.decoder = getincrementaldecoder("utf-8")("replace")  # of the tokens so far, without special ones
        self.offset = 0  # characters that it has decoded
        self.stripped: int | None = None  # spaces that the tokenizer strips from the beginning of a text
        self.waiting: Delta | None = None  # tokens that do not fill an event yet
        self.drafted: list[int] = []  # by step in which something was drafted
        self.accepted: list[int] = []
        self.steps = 0  # the prefill, which emits the first token, and rounds

    def portions(self, delta: Delta, interval: int | None) -> Iterator[Delta]:
        """A step as events of `interval` tokens each; the last one of a text may have fewer. None: as it came."""
        self.steps += bool(delta.tokens)
        if delta.drafted:
            self.drafted.append(delta.drafted)
            self.accepted.append(sum(delta.marks))
        if interval is None:
            yield delta
            return
        if self.waiting is not None:
            delta, self.waiting = _joined([self.waiting, delta]), None
        while len(delta.tokens) > interval or (len(delta.tokens) == interval and delta.finish is None):
            yield _part(delta, slice(interval), None)
            delta = _part(delta, slice(interval, None), delta.finish)
        if delta.finish is not None:
            yield delta
        elif delta.tokens:
            self.waiting = delta

    def take(self, delta: Delta) -> Delta:
        """Add its text to a delta, write its `finish` as OpenAI does, and return it."""
        # A token's text is what the token makes final: a character of several tokens is the text of the last one.
        parts = [[token] for token in delta.tokens] if self.marked else [delta.tokens] if delta.tokens else []
        texts = [self.stream.feed(part) for part in parts] or [""]
        if delta.finish is not None:
            texts[-1] += self.stream.end()
            delta.finish = REASONS.get(delta.finish, delta.finish)
        self.count += len(delta.tokens)
        delta.text = "".join(texts)
        if self.marked:
            delta.texts, delta.rounds = texts[: len(delta.tokens)], max(self.steps - 1, 0)
        self.pieces.append(delta)
        return delta

    def whole(self) -> Delta:
        """All of it, when it has ended."""
        return _joined(self.pieces)

    def offset_of(self, token: int) -> int:
        """Return the number of characters of the text before the next token, which is this one."""
        data = b"" if token in self.vocabulary.special else self.vocabulary.bytes_of(token)
        broken = self.decoder.getstate()[0] and data and data[0] & 0xC0 != 0x80  # a character that never gets whole
        offset = max(0, self.offset + bool(broken) - (self.stripped or 0))
        if data:
            self.offset += len(self.decoder.decode(data))
            if self.stripped is None:
                alone = self.tokenizer.decode([token], skip_special_tokens=True)
                self.stripped = int(data.startswith(b" ") and not alone.startswith(" "))
        return offset


def _part(delta: Delta, part: slice, finish: str | None) -> Delta:
    lists = {name: getattr(delta, name)[part] for name in BY_TOKEN}
    logprobs = None if delta.logprobs is None else delta.logprobs[part]
    return replace(delta, logprobs=logprobs, finish=finish, **lists)


def _joined(parts: list[Delta]) -> Delta:
    last = parts[-1]
    logprobs = None if last.logprobs is None else [x for part in parts for x in part.logprobs or ()]
    lists: dict[str, Any] = {name: [x for part in parts for x in getattr(part, name)] for name in BY_TOKEN}
    return replace(last, text="".join(part.text for part in parts), logprobs=logprobs, **lists)


def speculation(choice: Choice, most: int, detailed: bool) -> dict:
    """What speculation did for a text, in vLLM's words. A step is a round in which something was drafted.

    most: nodes that a round can draft. detailed: step by step too.
    """
    drafted, accepted = choice.drafted, choice.accepted
    steps, length = len(drafted), max([most, *accepted]) + 1
    by_draft = {
        str(n): _histogram([a for a, d in zip(accepted, drafted, strict=True) if d == n], n + 1)
        for n in sorted(set(drafted))
    }
    described = {
        "mean_acceptance_length": 1 + sum(accepted) / steps if steps else None,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if steps else None,
        "acceptance_histogram": _histogram(accepted, length),
        "acceptance_histogram_by_draft_length": by_draft,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
    }
    return described | ({"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {})


def _histogram(values: list[int], length: int) -> list[int]:
    return [values.count(value) for value in range(length)]


@dataclass
class Reply:
    """A response while it grows: its choices, and its JSON, which differs between chat and completions."""

    id: str
    model: str
    created: int
    choices: list[Choice]
    prompt_tokens: int
    token_ids: bool = False  # return the ids of tokens, as vLLM does
    acceptance: str = "none"  # reported with the usage: 'summary', 'detailed'
    drafts: int = 0  # nodes that a round can draft
    prompt_details: bool = False  # report the number of cached prompt tokens in the usage
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def usage(self) -> dict:
        """Return the numbers of prompt, completion and cached tokens, as OpenAI's `usage`."""
        completion = sum(choice.count for choice in self.choices)
        total = self.prompt_tokens + completion
        used = {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": total}
        if not self.prompt_details:
            return used
        # Of each prompt as its first choice found it, as the prompts are counted once too.
        first = {id(choice.job.prompt): choice.job for choice in reversed(self.choices)}
        cached = sum(job.sequence.cached for job in first.values() if job.sequence is not None)
        return used | {"prompt_tokens_details": {"cached_tokens": cached}}

    def whole(self) -> dict:
        """The answer that is not streamed."""
        choices = [self._of_choice(choice, choice.whole(), True) for choice in self.choices]
        return self._json(self.object, choices) | {"usage": self.usage()} | self.metrics()

    def metrics(self) -> dict:
        """The metrics of a response of one text, next to its usage, as in vLLM."""
        if self.acceptance == "none" or len(self.choices) > 1:
            return {}
        described = speculation(self.choices[0], self.drafts, self.acceptance == "detailed")
        return {"metrics": {"speculative_decoding": described}}

    def chunk(self, choice: Choice, piece: Delta, usage: bool = False) -> dict:
        """A chunk of a stream. usage: include the usage so far."""
        json = self._json(self.chunk_object, [self._of_choice(choice, piece)])
        return json | ({"usage": self.usage()} if usage else {})

    def _of_choice(self, choice: Choice, piece: Delta, whole: bool = False) -> dict:
        ids = {"token_ids": piece.tokens} if self.token_ids else {}
        json = {"index": choice.index} | self.fields(choice, piece, whole) | {"finish_reason": piece.finish} | ids
        if choice.marked:
            marks = zip(piece.texts, piece.marks, strict=True)
            tokens = [{"text": text, "drafted": drafted} for text, drafted in marks]
            json["speculative"] = {"rounds": piece.rounds, "tokens": tokens}
        return json

    def last_chunk(self) -> dict:
        """The chunk with the usage: it has no choices."""
        return self._json(self.chunk_object, []) | {"usage": self.usage()} | self.metrics()

    def _json(self, kind: str, choices: list[dict]) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def fields(self, choice: Choice, piece: Delta, whole: bool) -> dict:
        """Return what depends on the kind of response: text and log-probabilities. whole: `piece` is all of it."""
        raise NotImplementedError


class ChatReply(Reply):
    """A response of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    @override
    def fields(self, choice: Choice, piece: Delta, whole: bool) -> dict:
        role = {"role": "assistant"} if whole or len(choice.pieces) == 1 else {}
        logprobs = None
        if piece.logprobs is not None:
            likely = piece.likely or [[]] * len(piece.tokens)
            content = [
                _entry(choice, token, x) | {"top_logprobs": [_entry(choice, *other) for other in others]}
                for token, x, others in zip(piece.tokens, piece.logprobs, likely, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        return {"message" if whole else "delta": role | {"content": piece.text}, "logprobs": logprobs}


def _entry(choice: Choice, token: int, logprob: float) -> dict:
    data = choice.vocabulary.bytes_of(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _by_text(choice: Choice, tokens: list[tuple[int, float]]) -> dict[str, float]:
    """Return log-probabilities by text, in this order; a second token of the same text is named by its id."""
    described: dict[str, float] = {}
    for token, logprob in dict(tokens).items():
        text = choice.vocabulary.text_of(token)
        described[f"token_id:{token}" if text in described else text] = logprob
    return described


class CompletionReply(Reply):
    """A response of /v1/completions."""

    object = chunk_object = "text_completion"

    @override
    def fields(self, choice: Choice, piece: Delta, whole: bool) -> dict:
        logprobs = None
        if piece.logprobs is not None:
            likely = None
            if piece.likely:
                own = zip(piece.tokens, piece.logprobs, strict=True)
                likely = [_by_text(choice, [*of, token]) for of, token in zip(piece.likely, own, strict=True)]
            texts = [choice.vocabulary.text_of(token) for token in piece.tokens]
            offsets = [choice.offset_of(token) for token in piece.tokens]
            logprobs = {
                "tokens": texts, "token_logprobs": piece.logprobs, "top_logprobs": likely, "text_offset": offsets
            }  # fmt: skip
        return {"text": piece.text, "logprobs": logprobs}
