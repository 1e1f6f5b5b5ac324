"""A client of any server with OpenAI's interface: vLLM, SGLang, `specdec serve`. It asks for completions by token ids.

Answers are checked by models of pydantic, field by field. Token ids come back from servers that know vLLM's
`return_token_ids`; others give text alone.
"""

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specdec.cli.reading import read_model
from specdec.structs import Sampling

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
PAUSE = 0.5  # seconds before the first retry; each further one waits twice as long
LONGEST_PAUSE = 30.0


class _Answer(BaseModel):
    """An object in a server's answer. Fields that nothing here reads may be anything."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Model(_Answer):
    id: str


class _Models(_Answer):
    data: list[_Model] = []


class Logprobs(_Answer):
    """Log-probabilities by position; None for those that were not requested or not returned."""

    tokens: list[str] | None = None  # the server's names of the emitted tokens
    token_logprobs: list[float] | None = None  # of the emitted tokens
    top_logprobs: list[dict[str, float]] | None = None  # of the most likely tokens, by name


class Completion(_Answer):
    """A server's answer to a prompt."""

    text: str
    tokens: list[Annotated[int, Field(ge=0)]] | None = Field(None, alias="token_ids")  # None where none are returned
    finish: str | None = Field(None, alias="finish_reason")
    logprobs: Logprobs = Logprobs()

    @field_validator("logprobs", mode="before")
    @classmethod
    def _none_returned(cls, value: Any) -> Any:
        return Logprobs() if value is None else value

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lists = {"token_ids": self.tokens, **{f"logprobs.{name}": value for name, value in self.logprobs}}
        lengths = {name: len(value) for name, value in lists.items() if value is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"has lists of different lengths: {lengths}")
        return self


class _Completions(_Answer):
    choices: list[Completion] = Field(min_length=1)


class Remote:
    """One model of one server. Its methods may be called from many threads."""

    def __init__(self, url: str, model: str | None = None, *, retries: int = 6, timeout: float = 600.0):
        """Connect to a server. The key is in the variable OPENAI_API_KEY. Raises ValueError if that is not possible.

        model: None takes the only one, or the first. retries: of a request, with growing pauses. timeout: seconds.
        """
        self.root = url.rstrip("/").removesuffix("/v1")
        if not self.root.startswith(("http://", "https://")):
            raise ValueError(f"a server's address begins with http:// or https://, got {url!r}")
        self.retries, self.timeout = retries, timeout
        self.tells_ids = True  # until it refuses
        there = read_model(_Models, self._ask("/v1/models"), f"the answer of {self.root}/v1/models")
        models = [entry.id for entry in there.data]
        if model is None and not models:
            raise ValueError(f"{url} names no model: give --served-model-name")
        if model is not None and models and model not in models:
            raise ValueError(f"{url} has no model {model!r}; it has {', '.join(models)}")
        self.model = model or models[0]
        self.version = self._version()

    def _version(self) -> str:
        """Return the server's version, from the field that vLLM, SGLang or specdec has for it."""
        for path in ("/version", "/get_server_info"):
            try:
                return str(self._ask(path, retries=0).get("version", "unknown"))
            except ValueError:
                continue
        return "unknown"

    def complete(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
    ) -> Completion:
        """Continue token ids. logprobs: 0 for those of the emitted tokens, k for the k most likely too.

        Raises ValueError with the server's own words, or with the name of the field if the answer is no completion.
        """
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_new_tokens}
        body |= settings_of(sampling or Sampling()) | ({} if seed is None else {"seed": seed})
        body |= {} if logprobs is None else {"logprobs": logprobs}
        if self.tells_ids:
            try:
                return self._read(self._ask("/v1/completions", body | {"return_token_ids": True}))
            except Refused:
                answer = self._ask("/v1/completions", body)  # raises again if it was not for the ids
                self.tells_ids = False
                return self._read(answer)
        return self._read(self._ask("/v1/completions", body))

    def _read(self, answer: dict) -> Completion:
        return read_model(_Completions, answer, f"the answer of {self.root}/v1/completions").choices[0]

    def check_ids(self, answer: Completion, vocab: int) -> None:
        """Raise ValueError if the answer holds a token id that a vocabulary of this size does not have."""
        if (largest := max(answer.tokens or [0])) >= vocab:
            wrong = f"{self.root} returns the token id {largest}, and the target has {vocab} tokens"
            raise ValueError(f"{wrong}: give the --target that this server serves")

    def _ask(self, path: str, body: dict | None = None, retries: int | None = None) -> dict:
        """Send GET, or POST a body, and return the JSON that comes back."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            pause = min(PAUSE * 2**attempt, LONGEST_PAUSE)
            try:
                request = urllib.request.Request(self.root + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    content = json.loads(answer.read() or b"{}")
                if not isinstance(content, dict):
                    raise ValueError("the answer is no JSON object")
                return content
            except urllib.error.HTTPError as error:
                said = _message(error)
                if error.code not in RETRIED:
                    raise Refused(f"{self.root}{path} answers {error.code}: {said}") from None
                reason = f"{error.code}: {said}"
                after = error.headers.get("retry-after", "")
                pause = max(pause, min(float(after), LONGEST_PAUSE)) if after.isdigit() else pause
            except (OSError, http.client.HTTPException, ValueError) as error:
                # There is no connection, or it broke off, or half an answer came.
                reason = str(getattr(error, "reason", error))
            if attempt < retries:
                time.sleep(pause)
        raise ValueError(f"{self.root}{path} gave no answer in {retries + 1} attempts; the last: {reason}")


class Refused(ValueError):
    """The server rejects this request."""


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request: settings that are on, and the temperature, as servers' defaults differ."""
    asked = {f.name: getattr(sampling, f.name) for f in fields(Sampling) if f.name in sampling.active}
    return {"temperature": sampling.temperature} | asked


def seed_of(seed: int, number: int) -> int:
    """Return the seed of request number `number`: one of 48 bits that depends on both."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:6], "big")


def in_order(function, items: Iterable, at_once: int) -> Iterator:
    """Return function(item) for each item, `at_once` at a time in threads, in the order of the items."""
    items = iter(items)
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(function, item) for item in islice(items, at_once)]
        try:
            while waiting:
                done = waiting.pop(0).result()
                waiting += [pool.submit(function, item) for item in islice(items, 1)]
                yield done
        finally:
            for future in waiting:
                future.cancel()


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error, in OpenAI's form or any other."""
    try:
        body = json.loads(error.read())
        said = body.get("error", body)
        return str(said.get("message", said) if isinstance(said, dict) else said)[:300]
    except (ValueError, AttributeError, OSError):
        return str(error.reason)
