"""The rows of a batch: what each asks for, what belongs to its text, and when it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.engine.trace import RowTrace
from specdec.types import Sampling


class Stop(Protocol):
    """What ends one row before its `eos` or its limit does, such as a string (`specdec.text.StopStrings`)."""

    def add(self, token: int) -> bool:
        """The row's next token -> is it the last one? Called for each token once, in order."""


@dataclass
class Row:
    """One sequence while it is decoded, and its result. It ends after `limit` tokens for the reason `at_limit`.

    finish: 'eos', 'stop' (a `Stop` said so), 'length' (max_new_tokens) or 'context' (the target's context is full).
    """

    prompt: list[int]
    limit: int
    at_limit: str = "length"
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, under the target's softmax; None if nobody asked
    finish: str | None = None
    trace: RowTrace = field(default_factory=RowTrace)

    def add(self, tokens: list[int], eos: frozenset[int], logprobs: list[float] | None = None) -> list[int]:
        """Append what still belongs to the text, and return it. logprobs: of the tokens, if the row keeps them."""
        kept = tokens[: self.limit - len(self.tokens)]
        for count, token in enumerate(kept, 1):
            if token in eos:
                self.finish = "eos"
            elif self.stop is not None and self.stop.add(token):
                self.finish = "stop"
            if self.finish is not None:
                kept = kept[:count]
                break
        self.tokens += kept
        if logprobs is not None:
            self.logprobs += logprobs[: len(kept)]
        if self.finish is None and len(self.tokens) == self.limit:
            self.finish = self.at_limit
        return kept


def make_rows(
    prompts: Sequence[list[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None,
    stop: Sequence[Stop | None] | None,
    *,
    vocab: int,
    context: int,
) -> list[Row]:
    """A row for each prompt, for a target of `vocab` tokens whose context holds `context`. ValueError, one sentence,
    for what it does not take."""
    if not prompts:
        raise ValueError("no prompt was given")
    count = len(prompts)
    limits = per_row(max_new_tokens, count, "max_new_tokens")
    if min(limits) < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {min(limits)}")
    samplings = per_row(Sampling() if sampling is None else sampling, count, "sampling")
    rows = []
    for prompt, limit, how, end in zip(prompts, limits, samplings, per_row(stop, count, "stop"), strict=True):
        _check_prompt(prompt, vocab, context)
        room = context - len(prompt)
        rows.append(Row(prompt, min(limit, room), "length" if limit <= room else "context", how, end))
    return rows


def _check_prompt(prompt: list[int], vocab: int, context: int) -> None:
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(
            f"the prompt holds token {max(prompt)}, but the target's vocabulary has {vocab} tokens only: "
            "the tokenizer does not belong to it"
        )
    if len(prompt) >= context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the target's context holds {context}, new ones included"
        )


def per_row(value: Any, rows: int, name: str) -> list:
    """A list or tuple with a value for each row as it is, anything else for all rows."""
    if not isinstance(value, list | tuple):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(f"{name} has {len(value)} values, and there are {rows} prompts: give one for each, or for all")
    return list(value)
