"""The bodies of /tokenize and /detokenize, which are vLLM's, and the answers."""

from typing import Any, ClassVar

from pydantic import Field

from specdec.serve.protocol import Body, Message, Text, read
from specdec.serve.refusal import Refusal
from specdec.serve.service import Service


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


def tokenize(service: Service, body: dict) -> dict:
    """Return the JSON of vLLM's /tokenize: the token ids of a text, or of a chat in the target's template."""
    if body.get("prompt") is None and body.get("messages") is None:
        raise Refusal("give a text as prompt, or messages", "prompt")
    ask = read(TokenizeAsk, body)
    if ask.prompt is not None and ask.messages is not None:
        raise Refusal("give a text as prompt, or messages, but not both", "prompt")
    service.check_model(ask.model)
    ids: list[int] = (
        service.encode(ask.prompt, ask.add_special_tokens)
        if ask.prompt is not None
        else service.encode_chat(ask.messages or [])
    )
    return {"count": len(ids), "max_model_len": service.scheduler.room, "tokens": ids}


def detokenize(service: Service, body: dict) -> dict[str, Any]:
    """Return the JSON of vLLM's /detokenize: the text of token ids."""
    ask, vocab = read(DetokenizeAsk, body), service.target.config.vocab
    service.check_model(ask.model)
    if not all(0 <= token < vocab for token in ask.tokens):
        raise Refusal(f"tokens must be a list of ids from 0 to {vocab - 1}", "tokens")
    return {"prompt": service.target.tokenizer.decode(ask.tokens)}
