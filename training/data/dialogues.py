"""Conversations that the target holds: a prompt, its answer, and the questions that follow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdec.model.language_model import LanguageModel
from specdec.text import encode_chat
from specdec.training.data.conversation import Conversation, Message


@dataclass
class Prompt:
    """A conversation to answer. `ids` is the first prompt in it."""

    ids: list[int]
    messages: Conversation  # up to the first answer
    number: int = 0  # among all prompts, by which it is seeded
    later: tuple[list[Message], ...] = ()  # the messages before each of the following answers


@dataclass
class Answer:
    """What the target has said."""

    text: str
    tokens: list[int] | None  # None: the server does not return them
    reason: str  # stop or length

    def fields(self) -> dict:
        """Return the fields of an answer in a row of the file: `tokens`, if known, and `finish_reason`."""
        return ({"tokens": self.tokens} if self.tokens else {}) | {"finish_reason": self.reason}


def encode(target: LanguageModel, messages: Conversation, day: str | None = None) -> list[int]:
    """Return the token ids of a plain text, or of a conversation in the target's chat template."""
    if messages[0]["role"] == "text":
        return target.tokenizer(messages[0]["content"])["input_ids"]
    return encode_chat(target, messages, messages.tools, day)


class Dialogues:
    """Conversations with the target, a turn at a time: prompts in, rows of the file out."""

    def __init__(self, target: LanguageModel, prompts: list[Prompt], day: str | None):
        """Start a conversation for each prompt; `day` is the date that chat templates write."""
        self.target, self.prompts, self.day = target, prompts, day
        self.longest = target.config.context // 2
        self.talks = [Conversation(prompt.messages, prompt.messages.tools) for prompt in prompts]
        self.last: list[Answer | None] = [None] * len(prompts)
        self.ids = [prompt.ids for prompt in prompts]
        self.going = list(range(len(prompts)))  # conversations of which the target answers another turn
        self.turn = 0

    def add(self, answers: list[Answer]) -> None:
        """Add the answers of the running conversations. A conversation ends at an answer that was cut off."""
        asked, self.going, self.turn = self.going, [], self.turn + 1
        for i, answer in zip(asked, answers, strict=True):
            self.last[i] = answer
            self.talks[i].append({"role": "assistant", "content": answer.text} | answer.fields())
            later = self.prompts[i].later[self.turn - 1 : self.turn]
            if later and answer.reason != "length":
                more = Conversation([*self.talks[i], *later[0]], self.talks[i].tools)
                self.ids[i] = encode(self.target, more, self.day)
                if len(self.ids[i]) <= self.longest:
                    self.talks[i] = more
                    self.going.append(i)

    def rows(self) -> Iterator[dict]:
        """Yield the rows of the output file, one for each prompt."""
        for prompt, talk, last in zip(self.prompts, self.talks, self.last, strict=True):
            if last is None or talk[0]["role"] != "text":
                yield {"messages": list(talk)} | ({"tools": talk.tools} if talk.tools else {})
            else:
                whole = replace(last, tokens=last.tokens and [*prompt.ids, *last.tokens])
                yield {"text": talk[0]["content"] + last.text} | whole.fields()


def cut_off(row: dict) -> int:
    """Return the number of answers in a row that were cut off."""
    return sum(message.get("finish_reason") == "length" for message in row.get("messages", [row]))
