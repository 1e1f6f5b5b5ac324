"""What clients get back: tokens as text, and the JSON of OpenAI's answers and chunks."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.serve.scheduler import REASONS, Delta, Job
from specdec.text import TextStream


@dataclass
class Piece:
    """What a step adds to a choice."""

    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish: str | None  # as OpenAI calls it


class Choice:
    """One of the texts of a response, while it grows. Its tokens end with the one that completes a stop string; its
    text ends before the string. What may be the beginning of one, or is no whole character yet, is held back."""

    def __init__(self, index: int, tokenizer, stops: list[str]):
        self.index, self.tokenizer, self.stops = index, tokenizer, stops
        self.stream = TextStream(tokenizer, stops)
        self.job: Job | None = None
        self.pieces: list[Piece] = []
        self.count = 0  # tokens so far
        self.offset = 0  # characters of the tokens so far, each decoded by itself

    def take(self, delta: Delta) -> Piece:
        text = self.stream.feed(delta.tokens) if delta.tokens else ""
        if delta.finish is not None:
            text += self.stream.end()
        self.count += len(delta.tokens)
        piece = Piece(text, delta.tokens, delta.logprobs, delta.finish and REASONS.get(delta.finish, delta.finish))
        self.pieces.append(piece)
        return piece

    def whole(self) -> Piece:
        """All of it, when it has ended."""
        tokens = [token for piece in self.pieces for token in piece.tokens]
        logprobs = [x for piece in self.pieces for x in piece.logprobs or ()]
        kept = logprobs if self.job.logprobs else None
        return Piece("".join(piece.text for piece in self.pieces), tokens, kept, self.pieces[-1].finish)


@dataclass
class Reply:
    """A response while it grows: its choices, and the JSON of its kind. Chat and completions differ in the methods
    below."""

    id: str
    model: str
    created: int
    choices: list[Choice]
    prompt_tokens: int
    token_ids: bool = False  # tell the ids of tokens, as vLLM does
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def usage(self) -> dict:
        completion = sum(choice.count for choice in self.choices)
        total = self.prompt_tokens + completion
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": total}

    def whole(self) -> dict:
        """The answer that is not streamed."""
        wholes = [(choice, choice.whole()) for choice in self.choices]
        choices = [self.whole_choice(choice, piece) | self._ids(piece) for choice, piece in wholes]
        return self._json(self.object, choices) | {"usage": self.usage()}

    def chunk(self, choice: Choice, piece: Piece, usage: bool = False) -> dict:
        """A chunk of a stream. usage: tell what was used so far."""
        json = self._json(self.chunk_object, [self.part_of_choice(choice, piece) | self._ids(piece)])
        return json | ({"usage": self.usage()} if usage else {})

    def _ids(self, piece: Piece) -> dict:
        return {"token_ids": piece.tokens} if self.token_ids else {}

    def last_chunk(self) -> dict:
        """The chunk that tells the usage: it has no choices."""
        return self._json(self.chunk_object, []) | {"usage": self.usage()}

    def _json(self, kind: str, choices: list[dict]) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def part_of_choice(self, choice: Choice, piece: Piece) -> dict:
        raise NotImplementedError

    def whole_choice(self, choice: Choice, piece: Piece) -> dict:
        raise NotImplementedError


class ChatReply(Reply):
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def part_of_choice(self, choice: Choice, piece: Piece) -> dict:
        first = len(choice.pieces) == 1
        delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        return {"index": choice.index, "delta": delta} | self._end(choice, piece)

    def whole_choice(self, choice: Choice, piece: Piece) -> dict:
        message = {"role": "assistant", "content": piece.text}
        return {"index": choice.index, "message": message} | self._end(choice, piece)

    @staticmethod
    def _end(choice: Choice, piece: Piece) -> dict:
        logprobs = None
        if piece.logprobs is not None:
            texts = [choice.tokenizer.decode([token]) for token in piece.tokens]
            content = [
                {"token": text, "logprob": x, "bytes": list(text.encode()), "top_logprobs": []}
                for text, x in zip(texts, piece.logprobs, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish}


class CompletionReply(Reply):
    object = chunk_object = "text_completion"

    def part_of_choice(self, choice: Choice, piece: Piece) -> dict:
        logprobs = None
        if piece.logprobs is not None:
            texts, offsets = [choice.tokenizer.decode([token]) for token in piece.tokens], []
            for text in texts:
                offsets.append(choice.offset)
                choice.offset += len(text)
            logprobs = {
                "tokens": texts, "token_logprobs": piece.logprobs, "top_logprobs": None, "text_offset": offsets
            }  # fmt: skip
        return {"index": choice.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def whole_choice(self, choice: Choice, piece: Piece) -> dict:
        return self.part_of_choice(choice, piece)
