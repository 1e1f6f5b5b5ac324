"""Many requests that differ in everything, at once, and whether each got the text that it has alone.

Some clients go away in the middle, some bodies are malformed, and some are too large. All of a case follows from its
number. What it must get is decoded plainly, by itself.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.engine.engine import Engine
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.text import StopStrings, decode_row, encode_chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WAYS = {"whole": 30, "streamed": 40, "vanishes": 20, "wrong": 10}  # how a client behaves: so many of 100
SAMPLINGS: tuple[dict, ...] = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.6},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5},
)
STOPS = (["e", "\n\n"], [" the", "; "], ["."], ["never there", "o "])
SETTINGS = {f.name for f in fields(Sampling)}


@dataclass(frozen=True)
class Case:
    """A request, and what its client does."""

    number: int
    way: str  # of WAYS
    path: str
    body: dict | bytes
    status: int = 200
    after: int = 0  # of one that vanishes: events that it reads; 0: it goes away before the answer


@dataclass
class Text:
    """A choice, as it is heard or as it must be. What is not known of it is None."""

    text: str = ""
    finish: str | None = None
    ids: list[int] | None = None
    logprobs: int | None = None  # how many there are


@dataclass
class Heard:
    """What came back."""

    status: int = 0
    choices: dict[int, Text] = field(default_factory=dict)
    usage: dict | None = None
    error: str = ""
    whole: bool = False  # it came to its end


@dataclass(frozen=True)
class Sizes:
    """Bounds of requests."""

    characters: int = 1200  # of a prompt
    tokens: int = 48  # of an answer
    room: int = 512  # of the server
    body: int = 1 << 16


def draw(number: int, prompts: Sequence[str], sizes: Sizes) -> Case:
    """The case of this number."""
    rng = random.Random(number)
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    if way == "wrong":
        return _wrong(number, rng, sizes)
    chat, text = rng.random() < 0.5, rng.choice(prompts)
    text = text[: rng.randint(min(4, len(text)), min(len(text), sizes.characters))]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    asked |= rng.choice(SAMPLINGS) | {"seed": number, "max_tokens": rng.randint(1, sizes.tokens)}
    some: dict[str, Any] = {"ignore_eos": True, "n": rng.randint(2, 3), "stop": rng.choice(STOPS)}
    some["speculative"] = rng.choice(({"off": True}, {"steps": 1}))
    asked |= {name: value for name, value in some.items() if rng.random() < 0.2}
    if rng.random() < 0.3:
        asked["logprobs"] = True if chat else 0
    if rng.random() < 0.7:
        asked["return_token_ids"] = True
    after = 0
    if way == "streamed" or (way == "vanishes" and rng.random() < 0.6):
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        after = rng.randint(1, 4)
    return Case(number, way, CHAT if chat else TEXT, asked, after=after)


def _wrong(number: int, rng: random.Random, sizes: Sizes) -> Case:
    """A malformed request, or one that is too large."""
    hello = [{"role": "user", "content": "Hello"}]
    path, body, status = rng.choice(
        [
            (TEXT, b'{"prompt": ', 400),
            (TEXT, b"\xff\xfe", 400),
            (CHAT, {"messages": "Hello"}, 400),
            (CHAT, {"messages": hello, "temperature": "hot"}, 400),
            (CHAT, {"messages": hello, "stop": ["a"] * 99}, 400),
            (TEXT, {"prompt": "x", "temprature": 1}, 400),
            (TEXT, {"prompt": [10**9], "max_tokens": 3}, 400),
            (TEXT, {"prompt": "x", "n": 10**4}, 400),
            (TEXT, {"prompt": [1] * (sizes.room + 1)}, 400),
            (CHAT, {"messages": hello, "max_tokens": sizes.room}, 400),
            (TEXT, {"prompt": "x", "model": "nobody"}, 404),
            (CHAT, b" " * (sizes.body + 1), 413),
        ]
    )
    return Case(number, "wrong", path, body, status)


class Alone:
    """What a target says to a request that has it for itself, decoded plainly."""

    def __init__(self, target: Target):
        self.target, self.engine = target, Engine(target)

    def prompt(self, case: Case) -> list[int]:
        if case.path == CHAT:
            return encode_chat(self.target, case.body["messages"])
        return self.target.tokenizer(case.body["prompt"])["input_ids"]

    def __call__(self, case: Case) -> list[Text]:
        """A text for each choice."""
        body, tokenizer = case.body, self.target.tokenizer
        if case.way == "wrong":
            return []
        sampling = Sampling(**{name: value for name, value in body.items() if name in SETTINGS})
        stops, prompt = body.get("stop", []), self.prompt(case)
        how = {"sampling": sampling, "max_new_tokens": body["max_tokens"]}
        how["eos"] = frozenset() if body.get("ignore_eos") else None
        said = []
        for index in range(body.get("n", 1)):
            stop = [StopStrings(tokenizer, stops)] if stops else None
            (row,) = self.engine.generate([prompt], seed=[(case.number, index)], stop=stop, **how).rows
            finish = {"eos": "stop"}.get(row.finish, row.finish)
            said.append(Text(decode_row(tokenizer, row.tokens, stops), finish, row.tokens, len(row.tokens)))
        return said


async def send(client, case: Case) -> Heard:
    """Ask by an `httpx2.AsyncClient`, and behave as the case says."""
    heard = Heard()
    sent = {"content": case.body} if isinstance(case.body, bytes) else {"json": case.body}
    if sent.get("json", {}).get("stream"):
        await _read_stream(client, case, heard, sent)
    elif case.way == "vanishes":
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_read_whole(client, case, heard, sent), 0.01 * (case.number % 40))
    else:
        await _read_whole(client, case, heard, sent)
    return heard


async def _read_whole(client, case: Case, heard: Heard, sent: dict) -> None:
    answer = await client.post(case.path, **sent)
    heard.status, body = answer.status_code, answer.json()
    heard.error = body.get("error", {}).get("message", "")
    for choice in body.get("choices", []):
        _add(heard, choice)
    heard.usage, heard.whole = body.get("usage"), True


async def _read_stream(client, case: Case, heard: Heard, sent: dict) -> None:
    events = 0
    async with client.stream("POST", case.path, **sent) as answer:
        heard.status = answer.status_code
        if answer.status_code != 200:
            heard.error = (await answer.aread()).decode()
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                heard.whole = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                heard.error = heard.error or event.get("error", {}).get("message", "")
                for choice in event.get("choices", []):
                    _add(heard, choice)
                heard.usage = event.get("usage") or heard.usage
                events += 1
                if case.way == "vanishes" and events == case.after:
                    return


def _add(heard: Heard, choice: dict) -> None:
    """Put a choice, or what an event brings of it, to what was heard before."""
    known = heard.choices.setdefault(choice["index"], Text())
    part = choice.get("message") or choice.get("delta") or choice
    known.text += part.get("content") or part.get("text") or ""
    known.finish = choice["finish_reason"] or known.finish
    if "token_ids" in choice:
        known.ids = (known.ids or []) + choice["token_ids"]
    if told := choice.get("logprobs"):
        known.logprobs = (known.logprobs or 0) + len(told.get("content", told.get("token_logprobs")))


def fault(case: Case, heard: Heard, must: Sequence[Text], prompt: int) -> str:
    """What is wrong with what came back, or ''. prompt: its tokens."""
    if case.way == "wrong":
        told = heard.status == case.status and heard.error and "\n" not in heard.error
        return "" if told else f"{heard.status} for {case.status}: {heard.error}"
    if heard.error or heard.status not in (200, 0) or (heard.status == 0 and case.way != "vanishes"):
        return f"status {heard.status}: {heard.error}"
    if not heard.whole and case.way != "vanishes":
        return "the answer has no end"
    for index, known in heard.choices.items():
        if wrong := _differs(known, must[index], heard.whole):
            return f"choice {index}: {wrong}"
    if not heard.whole:
        return ""
    used = {"prompt_tokens": prompt, "completion_tokens": sum(len(text.ids) for text in must)}
    used["total_tokens"] = sum(used.values())
    if heard.usage != used:
        return f"usage {heard.usage}, and it is {used}"
    return "" if len(heard.choices) == len(must) else f"{len(heard.choices)} choices for {len(must)}"


def _differs(known: Text, must: Text, whole: bool) -> str:
    """How what was heard differs from the text alone, of which it may be the beginning if it is not whole."""
    for name in ("text", "ids"):
        said, right = getattr(known, name), getattr(must, name)
        if said is not None and said != (right if whole else right[: len(said)]):
            return f"{name} {said!r} for {right!r}"
    if whole and known.finish != must.finish:
        return f"ended by {known.finish} for {must.finish}"
    if whole and known.logprobs not in (None, must.logprobs):
        return f"{known.logprobs} log-probabilities for {must.logprobs} tokens"
    return ""
