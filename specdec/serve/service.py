"""Turns requests into jobs: prompts to ids, limits, choices, speculation. It also describes and tokenizes."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pydantic import Field

from specdec.engine.engine import Engine
from specdec.model.language_model import LanguageModel
from specdec.sampling.json_grammar import Grammar, grammars_of
from specdec.schema import shown
from specdec.serve.jobs import Delta, Job
from specdec.serve.protocol import Ask, Body, ChatAsk, CompletionAsk, Message, Text, Wish, read
from specdec.serve.refusal import Refusal
from specdec.serve.replies import ChatReply, Choice, CompletionReply, Reply
from specdec.serve.scheduler import Scheduler
from specdec.text import StopStrings, encode_chat
from specdec.vocabulary import vocabulary_of

NAME = "speculative"


@dataclass(frozen=True)
class Speculation:
    """The drafter's name and the largest tree of a server; without a drafter the name is None."""

    draft: str | None = None
    tree: str = ""
    topk: int = 0
    steps: int = 0
    num_draft_tokens: int = 1
    adaptive: str | None = None  # the policy that chooses how much of the tree each round drafts

    @classmethod
    def of(cls, engine: Engine, draft: str | None = None, tree: str | None = None) -> "Speculation":
        """What an engine drafts. draft, tree: the names that the server's command has for them."""
        if engine.policy is None:
            return cls()
        shape = engine.policy.topk, engine.policy.steps, engine.policy.num_draft_tokens
        adaptive = None if engine.adaptive is None else engine.adaptive.name
        return cls(draft or type(engine.drafter).__name__, tree or "/".join(map(str, shape)), *shape, adaptive)

    def steps_of(self, wish: Wish | None) -> int | None:
        """Return how many levels of the tree count for a request; None for all.

        Raises `Refusal` for other settings of this server, as all rows share one drafter and one tree.
        """
        if wish is None:
            return None
        if wish.off:
            if others := sorted(wish.model_fields_set - {"off", "report"}):
                raise Refusal(f"{NAME}.off contradicts {NAME}.{others[0]}", f"{NAME}.off")
            return 0
        if wish.draft not in (None, self.draft):
            has = "decodes plainly" if self.draft is None else f"drafts with {self.draft!r}"
            raise Refusal(f"{NAME}.draft is {shown(wish.draft)}, but this server {has}", f"{NAME}.draft")
        for name in ("tree", "topk"):
            if getattr(wish, name) not in (None, getattr(self, name)):
                raise self._other(name, getattr(wish, name))
        steps = wish.steps
        if wish.num_draft_tokens not in (None, self.num_draft_tokens):
            chain = wish.num_draft_tokens - 1
            if self.topk != 1 or steps not in (None, chain):
                raise self._other("num_draft_tokens", wish.num_draft_tokens)
            steps = chain
        if steps is not None and steps > self.steps:
            raise Refusal(f"{NAME}.steps is {steps}, but this server's tree has {self.steps} levels", f"{NAME}.steps")
        return steps

    def _other(self, name: str, wanted: Any) -> Refusal:
        has = f"its tree is {self.tree}" if self.draft is not None else "it decodes plainly"
        wrong = f"{NAME}.{name} is {shown(wanted)}, which this server does not have"
        return Refusal(f"{wrong}: {has}, of which a request may take fewer steps", f"{NAME}.{name}")


class TokenizeAsk(Body):
    """A request to /tokenize."""

    prompt: Text | None = Field(None, description="a text")
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True  # of a prompt; a chat template writes its own
    main: ClassVar[str] = "prompt"


class DetokenizeAsk(Body):
    """A request to /detokenize."""

    tokens: list[int] = Field(description="a list of ids from 0 to the size of the vocabulary")
    main: ClassVar[str] = "tokens"


@dataclass
class Service:
    """A model that answers requests by a scheduler. Every method is fast except those that tokenize."""

    target: LanguageModel
    scheduler: Scheduler
    model: str  # its name in requests and responses
    body_bytes: int = 4 << 20  # of a request at most
    choices: int = 16  # texts of a response at most: prompts times n
    stream_interval: int | None = None  # tokens of an event of a stream; None: those of a step
    acceptance: str = "none"  # metrics in responses: none, summary or detailed
    prompt_details: bool = False  # report the number of cached prompt tokens in usages
    speculation: Speculation | None = None  # what requests may choose; None: what the engine has

    def __post_init__(self) -> None:
        """Check the target. Raises ValueError for one without a tokenizer."""
        if self.target.tokenizer is None:
            raise ValueError("a server needs a tokenizer, and this target has none")
        self.speculates = self.speculation or Speculation.of(self.scheduler.engine)
        self.created = int(time.time())
        vocabulary = vocabulary_of(self.target.tokenizer)
        self.longest = max(len(vocabulary.bytes_of(token)) for token in range(len(self.target.tokenizer)))  # in bytes

    def models(self) -> dict:
        """Return the JSON of /v1/models: the one model, with the room of a text and the speculation settings."""
        entry: dict[str, Any] = {"id": self.model, "object": "model", "created": self.created, "owned_by": "specdec"}
        entry |= {"root": self.model, "max_model_len": self.scheduler.room, "speculative": asdict(self.speculates)}
        return {"object": "list", "data": [entry]}

    def check_model(self, name: str | None) -> None:
        """Raise `Refusal` with status 404 for another model's name. None is this model."""
        if name is not None and name != self.model:
            what = f"there is no model {shown(name)} here; there is {self.model!r}"
            raise Refusal(what, "model", status=404, code="model_not_found")

    def prepare(self, ask: Ask, grammar: Grammar | None, tell: Callable[[Delta], None]) -> Reply:
        """Return the reply to a request, with a job for each choice, not yet submitted. `tell` gets every delta."""
        self.check_model(ask.model)
        count = len(ask.prompt) if isinstance(ask, CompletionAsk) else 1
        if count * ask.n > self.choices:  # before thousands of prompts are tokenized
            wanted = f"{count} prompts with n {ask.n}" if count > 1 else f"n {ask.n}"
            raise Refusal(f"a response has {self.choices} texts at most, got {wanted}", "n" if ask.n > 1 else ask.main)
        prompts = self._prompts(ask)
        seed = secrets.randbits(62) if ask.seed is None else ask.seed
        choices: list[Choice] = []
        marked = ask.speculative is not None and ask.speculative.report
        for prompt in prompts:
            for _ in range(ask.n):
                job = Job(
                    prompt,
                    tell,
                    max_new_tokens=ask.limit(len(prompt), self.scheduler.room),
                    sampling=ask.sampling,
                    seed=(seed, len(choices)),
                    eos=frozenset() if ask.ignore_eos else None,
                    stop=StopStrings(self.target.tokenizer, ask.stop) if ask.stop else None,
                    logprobs=ask.likely is not None,
                    top_logprobs=ask.likely or 0,
                    grammar=grammar,
                    steps=self.speculates.steps_of(ask.speculative),
                )
                choices.append(Choice(len(choices), job, self.target.tokenizer, ask.stop, marked))
        kind, name = (ChatReply, "chatcmpl") if isinstance(ask, ChatAsk) else (CompletionReply, "cmpl")
        used = sum(map(len, prompts))
        who = f"{name}-{secrets.token_hex(12)}", self.model, int(time.time())
        drafted = self.scheduler.engine.round.nodes - 1
        return kind(*who, choices, used, ask.return_token_ids, self.acceptance, drafted, self.prompt_details)

    def grammar_of(self, ask: Ask) -> Grammar | None:
        """The grammar of all texts of a request; None for any text. `Refusal` for a form that is not implemented."""
        form, given = ask.response_format, ask.structured_outputs.given if ask.structured_outputs else {}
        wanted = [(f"structured_outputs.{kind}", kind, value) for kind, value in given.items()]
        if form is not None and form.type != "text":
            schema = form.json_schema.value if form.type == "json_schema" and form.json_schema else None
            field = "response_format" if schema is None else "response_format.json_schema.schema"
            wanted.append((field, "json", schema))
        if not wanted:
            return None
        if len(wanted) > 1:
            raise Refusal("structured_outputs contradicts response_format", "structured_outputs")
        ((field, kind, value),) = wanted
        if ask.ignore_eos:
            raise Refusal(f"ignore_eos contradicts {field}: a text ends where its form is complete", "ignore_eos")
        try:
            grammars = grammars_of(self.target)  # the first takes a second
            return grammars.regex(value) if kind == "regex" else grammars.json(None if kind == "json_object" else value)
        except ValueError as error:
            raise Refusal(str(error), field) from None

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Return the prompt's token ids by the chat template. Raises `Refusal` without one or for a long text."""
        if not self.target.tokenizer.chat_template:
            raise Refusal("the target's tokenizer has no chat template: ask for completions", "messages")
        self._check_length(sum(len(message.content or "") for message in messages), "messages")
        try:
            return encode_chat(self.target, [message.model_dump() for message in messages])
        except ValueError as error:
            raise Refusal(str(error), "messages") from None

    def _prompts(self, ask: Ask) -> list[list[int]]:
        if isinstance(ask, ChatAsk):
            return [self.encode_chat(ask.messages)]
        assert isinstance(ask, CompletionAsk)
        return [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompt]

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse a text that is too long whatever its tokens are: to tokenize megabytes takes many seconds."""
        most = self.scheduler.room * self.longest
        if characters > most:
            wanted = f"the prompt has {characters} characters, and {self.scheduler.room} tokens hold at most {most}"
            raise Refusal(wanted, field, code="context_length_exceeded")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text, with special tokens if `special`. Raises Refusal for a text that is too long."""
        self._check_length(len(text), "prompt")
        return self.target.tokenizer(text, add_special_tokens=special)["input_ids"]

    def tokenize(self, body: dict) -> dict:
        """Return the JSON of vLLM's /tokenize: the token ids of a text, or of a chat in the target's template."""
        if body.get("prompt") is None and body.get("messages") is None:
            raise Refusal("give a text as prompt, or messages", "prompt")
        ask = read(TokenizeAsk, body)
        if ask.prompt is not None and ask.messages is not None:
            raise Refusal("give a text as prompt, or messages, but not both", "prompt")
        self.check_model(ask.model)
        ids: list[int] = (
            self.encode(ask.prompt, ask.add_special_tokens)
            if ask.prompt is not None
            else self.encode_chat(ask.messages or [])
        )
        return {"count": len(ids), "max_model_len": self.scheduler.room, "tokens": ids}

    def detokenize(self, body: dict) -> dict[str, Any]:
        """Return the JSON of vLLM's /detokenize: the text of token ids."""
        ask, vocab = read(DetokenizeAsk, body), self.target.config.vocab
        self.check_model(ask.model)
        if not all(0 <= token < vocab for token in ask.tokens):
            raise Refusal(f"tokens must be a list of ids from 0 to {vocab - 1}", "tokens")
        return {"prompt": self.target.tokenizer.decode(ask.tokens)}
