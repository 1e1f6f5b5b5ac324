"""One streamed request to a server that speaks OpenAI's interface, and when its parts arrived.

Times are those of vLLM's benchmark: an event with a non-empty `choices` counts, also one without text. The first makes
the TTFT, each later one an ITL, and TPOT is (last event - first event) / (tokens - 1), tokens by the server's usage.
"""

import json
import random
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise


@dataclass(frozen=True)
class Asked:
    """What every request of a run has in common."""

    model: str
    max_tokens: int
    chat: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    # The most tokens of request i are drawn, by i, from (1 - this) to (1 + this) times as many.
    range_ratio: float = 0.0

    def of(self, number: int) -> "Asked":
        """What is asked in request `number`: the same of every server, and at every load."""
        if not self.range_ratio:
            return self
        share = 1 + self.range_ratio * random.Random(number).uniform(-1, 1)
        return replace(self, max_tokens=max(1, round(share * self.max_tokens)), range_ratio=0.0)

    def body(self, prompt: str) -> dict:
        """Return the JSON body of a streaming request for this prompt."""
        own = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        limit = {"max_completion_tokens" if self.chat else "max_tokens": self.max_tokens}
        how = {"temperature": self.temperature, "stream": True, "stream_options": {"include_usage": True}}
        how |= {"ignore_eos": True} if self.ignore_eos else {}
        how |= {"seed": self.seed} if self.seed is not None else {}
        return {"model": self.model} | own | limit | how


@dataclass
class Answer:
    """A response. Times are seconds since the request was sent."""

    sent: float  # on `time.perf_counter`
    arrivals: list[float] = field(default_factory=list)  # of events with choices
    seconds: float = 0.0  # until the stream ended
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    finish: str | None = None
    wrong: str = ""  # why it is not valid

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies in seconds."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def take(self, event: dict) -> None:
        """Add an event of the stream, which has just arrived."""
        if "error" in event:
            self.wrong = str(event["error"].get("message", event["error"]))
        if event.get("choices"):
            self.arrivals.append(time.perf_counter() - self.sent)
            choice = event["choices"][0]
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]

    def fault(self, asked: Asked, done: bool) -> str:
        """Why an answer that came without an error is not valid, or ''. done: the stream said that it ends."""
        if not done:
            return "the stream has no end"
        if not self.arrivals or self.finish is None:
            return "the stream has no text, or no finish_reason"
        if not self.tokens:
            return "the server tells no usage"
        if self.tokens > asked.max_tokens or (asked.ignore_eos and self.tokens != asked.max_tokens):
            return f"{self.tokens} tokens came, and {asked.max_tokens} were asked for"
        return ""


async def ask(client, asked: Asked, prompt: str) -> Answer:
    """Send a request by an `httpx2.AsyncClient` and read its stream. What goes wrong is noted in the answer."""
    import httpx2  # an extra

    answer, done = Answer(time.perf_counter()), False
    path = "/v1/chat/completions" if asked.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=asked.body(prompt)) as response:
            if response.status_code != 200:
                reply = (await response.aread()).decode(errors="replace")
                answer.wrong = f"status {response.status_code}: {reply[:200]}"
                return answer
            async for line in response.aiter_lines():  # comments are skipped
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    done = data == "[DONE]"
                    if not done:
                        answer.take(json.loads(data))
        answer.wrong = answer.wrong or answer.fault(asked, done)
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        answer.wrong = f"{type(error).__name__}: {error}"
    finally:
        answer.seconds = time.perf_counter() - answer.sent
    return answer
