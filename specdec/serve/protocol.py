"""What clients may ask for: the fields of OpenAI's requests that are taken here, checked before anything is decoded.

Nothing is left out in silence. A field that would change the answer and is not built is refused, unless its value says
that it is off. A field that cannot change the answer is taken and has no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from specdec.cli.limits import MOST
from specdec.engine.sequence import MOST_LIKELY
from specdec.schema import SHOWN, check_value, ranged, shown
from specdec.structs import FILTERS, Sampling
from specdec.text import check_stops, clean

MOST_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
# Not built, and the values that say so: a request may hold them.
OFF = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
NO_EFFECT = {
    "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id", "safety_identifier",
    "service_tier", "spaces_between_special_tokens", "store", "user",
}  # fmt: skip


class Refusal(ValueError):
    """A request that is not served, as OpenAI's errors tell it."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(kw_only=True)
class Ask:
    """What both sorts of requests have in common. The defaults are OpenAI's."""

    model: str | None = None
    max_tokens: int | None = ranged(1, MOST, None)
    temperature: float = ranged(0, 1e6, 1.0)
    top_p: float = ranged(0, 1, 1.0, above=True)
    top_k: int = ranged(-1, MOST, 0)  # -1 and 0 are off
    min_p: float = ranged(0, 1, 0.0)
    repetition_penalty: float = ranged(0, 1e6, 1.0, above=True)
    presence_penalty: float = ranged(-2, 2, 0.0)
    frequency_penalty: float = ranged(-2, 2, 0.0)
    seed: int | None = ranged(-(1 << 63), (1 << 63) - 1, None)  # choice i draws by (seed, i); None: by a fresh one
    stop: str | list[str] | None = None
    n: int = ranged(1, 1 << 16, 1)
    stream: bool = False
    stream_options: dict | None = None
    ignore_eos: bool = False
    response_format: dict | None = None  # `specdec.serve.formats` reads these two
    structured_outputs: dict | None = None
    return_token_ids: bool = False  # vLLM's: the ids of the emitted tokens, beside their text
    speculative: dict | None = None  # ours: `specdec.serve.speculation.Wish`

    @property
    def stops(self) -> list[str]:
        """The stop strings. `Refusal` for what is none."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stops = [clean(stop) for stop in stops]
        if len(stops) > MOST_STOPS:
            raise Refusal(f"stop may hold {MOST_STOPS} strings at most, got {len(stops)}", "stop")
        try:
            check_stops(stops)
        except ValueError as error:
            raise Refusal(str(error), "stop") from None
        return stops

    @property
    def sampling(self) -> Sampling:
        """At temperature 0 what filters the likeliest tokens changes nothing, and is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(Sampling)} | {"top_k": max(self.top_k, 0)}
        if self.temperature == 0:
            for name in FILTERS:
                del values[name]
        return Sampling(**values)

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def likely(self) -> int:
        """How many of the likeliest tokens are told in the place of each."""
        raise NotImplementedError

    def limit(self, prompt: int, room: int) -> int:
        """How many tokens it may get behind a prompt of so many. `Refusal` if both do not fit into the room."""
        raise NotImplementedError

    def usage_in_stream(self) -> tuple[bool, bool]:
        """Whether a stream ends with its usage, and whether every chunk tells it."""
        options = self.stream_options or {}
        for name, value in options.items():
            if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
                raise Refusal(f"stream_options has no {shown(name)}", "stream_options")
            if not isinstance(value, bool):
                raise Refusal(f"stream_options.{name} must be true or false, got {shown(value)}", "stream_options")
        if options and not self.stream:
            raise Refusal("stream_options needs stream to be true", "stream_options")
        return options.get("include_usage", False), options.get("continuous_usage_stats", False)


@dataclass(kw_only=True)
class CompletionAsk(Ask):
    prompt: Any = None
    logprobs: int | None = ranged(0, MOST_LIKELY, None)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def likely(self) -> int:
        return self.logprobs or 0

    def limit(self, prompt: int, room: int) -> int:
        return _fitting(self.max_tokens or 16, prompt, room, "max_tokens")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts, or lists of ids. `Refusal` for anything else."""
        given = [self.prompt] if isinstance(self.prompt, str) or _are_ids(self.prompt) else self.prompt
        if not isinstance(given, list) or not given or not all(isinstance(p, str) or _are_ids(p) for p in given):
            raise Refusal(
                f"prompt must be a text, a list of token ids, or a list of either, got {shown(self.prompt)}", "prompt"
            )
        if "" in given:
            raise Refusal("the prompt is empty; give at least one token", "prompt")
        return [clean(p) if isinstance(p, str) else p for p in given]


@dataclass(kw_only=True)
class ChatAsk(Ask):
    messages: list[dict]
    max_completion_tokens: int | None = ranged(1, MOST, None)
    logprobs: bool = False
    top_logprobs: int | None = ranged(0, MOST_LIKELY, None)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def likely(self) -> int:
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
        return self.top_logprobs or 0

    def limit(self, prompt: int, room: int) -> int:
        asked = self.max_completion_tokens or self.max_tokens
        return _fitting(asked or max(room - prompt, 1), prompt, room, "max_completion_tokens")

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them; a content of parts becomes one text. `Refusal` for others."""
        if not self.messages:
            raise Refusal("messages is empty; give at least one", "messages")
        return [_message(message, f"messages[{place}]") for place, message in enumerate(self.messages)]


Kind = TypeVar("Kind", bound=Ask)


def read(kind: type[Kind], body: Any) -> Kind:
    """A request's JSON as an `Ask` of this kind. `Refusal` for what it does not take; null stands for no value."""
    if not isinstance(body, Mapping):
        raise Refusal(f"the body must be a JSON object, got {shown(body)}")
    known = {f.name: f for f in fields(kind)}
    given = {name: value for name, value in body.items() if value is not None and name not in NO_EFFECT}
    if given.get("ignore_eos") is True and not given.get("stop"):
        given.pop("min_tokens", None)  # only max_tokens can end it
    for name in [name for name in given if name not in known]:
        if name not in OFF:
            raise Refusal(f"there is no parameter {shown(name)}", clean(name)[:SHOWN], code="unknown_parameter")
        if given[name] not in OFF[name]:
            raise Refusal(f"{name} is not built, got {shown(given[name])}", name, code="unsupported_parameter")
        del given[name]
    for name, value in given.items():
        try:
            check_value(known[name], value, name)
        except ValueError as error:
            raise Refusal(str(error), name) from None
    for name in ("messages",) if kind is ChatAsk else ("prompt",):
        if name not in given:
            raise Refusal(f"{name} is missing", name)
    return kind(**given)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _fitting(asked: int, prompt: int, room: int, param: str) -> int:
    if prompt + asked > room:
        raise Refusal(
            f"the prompt has {prompt} tokens and {asked} are asked for, but a text may have {room} here",
            param if prompt < room else None,
            code="context_length_exceeded",
        )
    return asked


def _message(message: Mapping, where: str) -> dict[str, str]:
    others = {name for name, value in message.items() if value not in (None, [])} - {"role", "content", "name"}
    if others:
        raise Refusal(f"{where} has {shown(min(others))}, which is not built", "messages", code="unsupported_parameter")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise Refusal(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "messages")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refusal(f"{where}.content must be a text, or a list of parts of type 'text'", "messages")
    return {"role": role, "content": clean("".join(part["text"] for part in parts))}
