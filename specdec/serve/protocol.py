"""Requests that the server accepts: OpenAI's fields, checked before anything is decoded.

Unsupported fields that would change the answer are rejected unless off. Others are accepted without effect.
"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from specdec.cli.limits import MOST
from specdec.engine.sequence import MOST_LIKELY
from specdec.sampling_settings import FILTERS, Sampling
from specdec.schema import SHOWN, shown
from specdec.serve.refusal import Fault, Refusal, Unsupported, refusal_of
from specdec.text import clean

MOST_STOPS = 16
# Not built, and the values that say so: a request may hold them.
OFF = {
    "add_generation_prompt": (True,), "add_special_tokens": (True,), "allowed_token_ids": ([],), "audio": (),
    "bad_words": ([],), "best_of": (1,), "continue_final_message": (False,), "echo": (False,),
    "function_call": ("none",), "functions": ([],), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "logit_bias": ({},), "min_tokens": (0,), "modalities": (["text"],), "return_token_strs": (False,),
    "skip_special_tokens": (True,), "stop_token_ids": ([],), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "use_beam_search": (False,),
}  # fmt: skip
NO_EFFECT = {
    "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id", "safety_identifier",
    "service_tier", "spaces_between_special_tokens", "store", "user",
}  # fmt: skip


Text = Annotated[str, BeforeValidator(lambda value: clean(value) if isinstance(value, str) else value)]
Ids = Annotated[list[int], Field(min_length=1)]


class Strict(BaseModel):
    """An object without conversions of types: "1" is no number, and neither is NaN."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class Part(Strict):
    """An object within a request, which rejects unknown names."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in given if isinstance(given, dict) else ():
            if name not in known:
                raise Unsupported(f"has no {shown(name)}; it has {', '.join(known)}", clean(name)[:SHOWN])
        return given


class StreamOptions(Part):
    """OpenAI's options of a stream, and vLLM's `continuous_usage_stats`. Obfuscation is accepted and never applied."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Schema(Part):
    """OpenAI's `json_schema` of a response format. Only the schema itself has an effect."""

    name: Any = None
    description: Any = None
    value: Annotated[Any, Field(alias="schema")]
    strict: Any = None


class ResponseFormat(Part):
    """OpenAI's format of a text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.value is None):
            raise ValueError("must have a json_schema with a schema")
        return self


class StructuredOutputs(Part):
    """vLLM's constraints of a text, of which a request sets exactly one."""

    json_value: Annotated[Any, Field(alias="json")] = None
    json_object: Any = None
    regex: Text | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that the request sets, by kind."""
        kinds = {"json": self.json_value, "json_object": self.json_object, "regex": self.regex}
        return {kind: value for kind, value in kinds.items() if value is not None and value is not False}

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.given) != 1:
            raise ValueError(f"must have one of json, json_object, regex, got {shown(sorted(self.given))}")
        return self


class Wish(Part):
    """The speculation settings of a request, a field that only this server has."""

    off: bool = False
    report: bool = False  # responses mark the tokens that were drafted
    steps: int | None = Field(None, ge=0)
    draft: Text | None = None
    tree: Text | None = None
    topk: int | None = Field(None, ge=1)
    num_draft_tokens: int | None = Field(None, ge=1)


class Message(Strict):
    """A message of a chat, with its content as one text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        names = {name for name, value in given.items() if value not in (None, [])} if isinstance(given, dict) else set()
        if others := names - {"role", "content", "name"}:
            name = min(others)
            raise Unsupported(f"has {shown(name)}, which is not built", clean(name)[:SHOWN])
        return given

    @field_validator("content", mode="before", json_schema_input_type=str | list[dict[str, Any]])
    @classmethod
    def _join(cls, content: Any) -> str:
        """Return the content's parts as one text."""
        wanted = "a content is a text, or a list of parts of type 'text'"
        if not isinstance(content, str | list):
            raise Fault(f"must be a text, or a list of parts of type 'text', got {shown(content)}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for i, part in enumerate(parts):
            if not isinstance(part, dict):
                raise Fault(f"must be an object, got {shown(part)}: {wanted}", i)
            if part.get("type") != "text":
                raise Fault(f"must be 'text', got {shown(part.get('type'))}: {wanted}", i, "type")
            if not isinstance(part.get("text"), str):
                raise Fault(f"must be a text, got {shown(part.get('text'))}", i, "text")
        return "".join(part["text"] for part in parts)


class Body(Strict):
    """The fields of every request."""

    model: Text | None = None
    main: ClassVar[str]  # the field that a request must have


SAMPLING: Any = {one.name: (one.type, Field(one.default, **one.metadata["limits"])) for one in fields(Sampling)}


class Ask(pydantic.create_model("Sampled", __base__=Body, **SAMPLING)):  # type: ignore[misc]  # mypy does not call it
    """The fields of both kinds of requests for text: those of `Sampling`, and more. The defaults are OpenAI's."""

    max_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float = Field(1.0, ge=0, le=1e6)
    top_k: int = Field(0, ge=-1, le=MOST)  # -1 and 0 are off
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)  # choice i draws by (seed, i)
    stop: list[Text] = Field([], description="a text, or a list of texts")
    n: int = Field(1, ge=1, le=1 << 16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False  # vLLM's: the ids of the emitted tokens, in addition to their text
    speculative: Wish | None = None
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)  # how long a text may be, by the first of these that is given
    default: ClassVar[int | None] = None  # or by none of them; None: what is left of the room

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        if stop == "":
            raise Fault("needs at least one character")
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, stops: list[str]) -> list[str]:
        if len(stops) > MOST_STOPS:
            raise Fault(f"may hold {MOST_STOPS} strings at most, got {len(stops)}")
        if "" in stops:
            raise Fault("needs at least one character", stops.index(""))
        return stops

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options and self.stream_options.model_fields_set and not self.stream:
            raise Refusal("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def sampling(self) -> Sampling:
        """The request's sampling settings; without filters at temperature 0, where they change nothing."""
        values = {f.name: getattr(self, f.name) for f in fields(Sampling)} | {"top_k": max(self.top_k, 0)}
        if self.temperature == 0:
            for name in FILTERS:
                del values[name]
        return Sampling(**values)

    @property
    def likely(self) -> int | None:
        """The number of most likely tokens to report at each position; None: no log-probabilities at all."""
        raise NotImplementedError

    def limit(self, prompt: int, room: int) -> int:
        """Return how many tokens may follow a prompt of `prompt` tokens. Raises `Refusal` if `room` is too small."""
        field = next((name for name in self.lengths if getattr(self, name) is not None), None)
        asked = getattr(self, field) if field else self.default or max(room - prompt, 1)
        if prompt + asked > room:
            wrong = f"the prompt has {prompt} tokens and {asked} are asked for, but a text may have {room} here"
            at_fault = field if field and prompt < room else self.main
            raise Refusal(wrong, at_fault, code="context_length_exceeded")
        return asked


class CompletionAsk(Ask):
    """A request to /v1/completions."""

    prompt: list[Text | Ids] = Field(min_length=1, description="a text, a list of token ids, or a list of either")
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    main, default = "prompt", 16

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str | list[int]])
    @classmethod
    def _as_prompts(cls, given: Any) -> Any:
        one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
        return [given] if one else given

    @field_validator("prompt")
    @classmethod
    def _check_prompts(cls, prompts: list[str | list[int]]) -> list[str | list[int]]:
        if "" in prompts:
            raise Refusal("the prompt is empty; give at least one token", "prompt")
        return prompts

    @property
    def likely(self) -> int | None:
        """The field `logprobs`."""
        return self.logprobs


class ChatAsk(Ask):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    main, lengths = "messages", ("max_completion_tokens", "max_tokens")

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @property
    def likely(self) -> int | None:
        """The field `top_logprobs`, which needs `logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


Kind = TypeVar("Kind", bound=Body)


def read(kind: type[Kind], body: Any) -> Kind:
    """Parse a request's JSON as a `Body` of this kind. Raises `Refusal` for invalid fields; null means no value."""
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, got {shown(body)}")
    given = {name: value for name, value in body.items() if value is not None and name not in NO_EFFECT}
    if given.get("ignore_eos") is True and not given.get("stop"):
        given.pop("min_tokens", None)  # only max_tokens can end it
    for name in [name for name in given if name not in kind.model_fields]:
        if name not in OFF:
            raise Refusal(f"there is no parameter {shown(name)}", clean(name)[:SHOWN], code="unknown_parameter")
        if given[name] not in OFF[name]:
            raise Refusal(f"{name} is not built, got {shown(given[name])}", name, code="unsupported_parameter")
        del given[name]
    try:
        return kind.model_validate(given)
    except ValidationError as found:
        order = [*given, kind.main]  # the first mistake of the body; what is missing comes last
        errors = found.errors(include_url=False)
        raise refusal_of(kind, given, min(errors, key=lambda one: order.index((*one["loc"], kind.main)[0]))) from None
