"""Turns requests into jobs: prompts to ids, limits and choices. It also describes the model."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from specdec.model.language_model import LanguageModel
from specdec.sampling.grammar import Grammar
from specdec.sampling.json_grammar import grammars_of
from specdec.schema import shown
from specdec.serve.jobs import Delta, Job
from specdec.serve.protocol import Ask, ChatAsk, CompletionAsk, Message
from specdec.serve.refusal import Refusal
from specdec.serve.replies import ChatReply, Choice, CompletionReply, Reply
from specdec.serve.scheduler import Scheduler
from specdec.serve.speculation import Speculation
from specdec.text import StopStrings, encode_chat
from specdec.vocabulary import vocabulary_of


@dataclass(frozen=True)
class Limits:
    """Limits of a request, in addition to the room of a text."""

    body_bytes: int = 4 << 20
    choices: int = 16  # texts of a response: prompts times n


class Service:
    """A model that answers requests by a scheduler.

    Every method is fast except for tokenization, so call `prepare` where it may take a moment.
    """

    target: LanguageModel
    scheduler: Scheduler
    model: str
    limits: Limits
    stream_interval: int | None
    acceptance: str
    prompt_details: bool
    speculation: Speculation
    created: int
    longest: int  # bytes of a token

    def __init__(
        self,
        target: LanguageModel,
        scheduler: Scheduler,
        model: str,
        limits: Limits | None = None,
        *,
        stream_interval: int | None = None,
        acceptance: str = "none",
        prompt_details: bool = False,
        speculation: Speculation | None = None,
    ):
        """Check the target. Raises ValueError for one without a tokenizer.

        Args:
            target: The model.
            scheduler: It decodes with that model.
            model: The model's name in requests and responses.
            limits: What a request may ask for.
            stream_interval: Tokens of an event of a stream; None: those of a step.
            acceptance: Speculation metrics of responses: 'none', 'summary' or 'detailed'.
            prompt_details: Report the number of cached prompt tokens in usages.
            speculation: The speculation settings that requests may choose; None: those of the engine.
        """
        if target.tokenizer is None:
            raise ValueError("a server needs a tokenizer, and this target has none")
        self.target, self.scheduler, self.model = target, scheduler, model
        self.limits = limits or Limits()
        self.stream_interval, self.acceptance, self.prompt_details = stream_interval, acceptance, prompt_details
        self.speculation = speculation or Speculation.of(scheduler.engine)
        self.created = int(time.time())
        vocabulary = vocabulary_of(target.tokenizer)
        self.longest = max(len(vocabulary.bytes_of(token)) for token in range(len(target.tokenizer)))

    def models(self) -> dict:
        """Return the JSON of /v1/models: the one model, with the room of a text and the speculation settings."""
        entry: dict[str, Any] = {"id": self.model, "object": "model", "created": self.created, "owned_by": "specdec"}
        entry |= {"root": self.model, "max_model_len": self.scheduler.room, "speculative": asdict(self.speculation)}
        return {"object": "list", "data": [entry]}

    def check_model(self, name: str | None) -> None:
        """Raise `Refusal` with status 404 for another model's name. None is this model."""
        if name is not None and name != self.model:
            what = f"there is no model {shown(name)} here; there is {self.model!r}"
            raise Refusal(what, "model", status=404, code="model_not_found")

    def prepare(self, ask: Ask, grammar: Grammar | None, tell: Callable[[Delta], None]) -> Reply:
        """Return the reply to a request, with a job for each choice, not yet submitted.

        Args:
            ask: The request.
            grammar: The grammar of all texts, if any.
            tell: Called with every delta of a job.

        Raises:
            Refusal: The request cannot be served.
        """
        self.check_model(ask.model)
        prompts = self._prompts(ask)
        if len(prompts) * ask.n > self.limits.choices:
            wanted = f"{len(prompts)} prompts with n {ask.n}" if len(prompts) > 1 else f"n {ask.n}"
            raise Refusal(
                f"a response has {self.limits.choices} texts at most, got {wanted}", "n" if ask.n > 1 else ask.main
            )
        seed = secrets.randbits(62) if ask.seed is None else ask.seed
        choices: list[Choice] = []
        marked = ask.speculative is not None and ask.speculative.report
        for prompt in prompts:
            for _ in range(ask.n):
                job = self._job(ask, prompt, (seed, len(choices)), tell, grammar)
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

    def _job(
        self,
        ask: Ask,
        prompt: list[int],
        seed: tuple[int, int],
        tell: Callable[[Delta], None],
        grammar: Grammar | None,
    ) -> Job:
        return Job(
            prompt,
            tell,
            max_new_tokens=ask.limit(len(prompt), self.scheduler.room),
            sampling=ask.sampling,
            seed=seed,
            eos=frozenset() if ask.ignore_eos else None,
            stop=StopStrings(self.target.tokenizer, ask.stop) if ask.stop else None,
            logprobs=ask.likely is not None,
            top_logprobs=ask.likely or 0,
            grammar=grammar,
            steps=self.speculation.steps_of(ask.speculative),
        )
