"""A sequence: what it asks for, what belongs to its text, and when it has ended."""

from collections import abc
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

from torch import Tensor

from specdec.engine.traces import RowTrace
from specdec.sampling.json_grammar import Grammar, TextMatcher, masked
from specdec.sampling.noise import Seed
from specdec.schema import shown
from specdec.structs import DraftTree, Sampling

MOST_LIKELY = 20  # as OpenAI's interface has it
REASONS = {"eos": "stop", "context": "length"}  # a `finish` -> what OpenAI calls it, where that differs


class Stop(Protocol):
    """Stop condition of a sequence other than EOS and the length limit, for example a stop string."""

    def add(self, token: int) -> bool:
        """Return whether this token is the last one. Called for each token of the sequence once, in order."""


@dataclass(eq=False, repr=False)
class Sequence:
    """One text while it is decoded, and its result. It ends after `limit` tokens for the reason `at_limit`.

    finish: 'eos', 'stop' (a `Stop` said so, or the grammar lets nothing follow), 'length' (max_new_tokens), 'context'
    (the target's context is full), 'abort' (the caller did not want more) or 'error' (the grammar's library gave up,
    or the `Stop` has raised `failure`).
    """

    prompt: list[int]
    limit: int
    at_limit: str = "length"
    sampling: Sampling = field(default_factory=Sampling)
    seed: Seed = (0, 0)  # of all that is drawn for it
    stop: Stop | None = None
    eos: frozenset[int] = frozenset()
    steps: int | None = None  # levels of the draft tree that count for it; 0: none; None: all of them
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, under the target's softmax; None if not requested
    top: int = 0  # how many of the most likely tokens at each place to report
    likely: list[list[tuple[int, float]]] = field(default_factory=list)  # by token: they and theirs, best first
    cached: int = 0  # tokens of the prompt that need not be read, as they were with another one
    finish: str | None = None
    failure: Exception | None = None
    matcher: TextMatcher | None = None  # where the text stands in its grammar, while it is decoded
    trace: RowTrace = field(default_factory=RowTrace)

    def __repr__(self) -> str:
        """Return counts: a text may have thousands of tokens."""
        return f"Sequence({len(self.prompt)} prompt tokens, {len(self.tokens)} new tokens, finish={self.finish!r})"

    @property
    def committed(self) -> int:
        """Number of tokens in the caches: all but the last one, which is the root of the next tree."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Number of tokens that the sequence may still add."""
        return self.limit - len(self.tokens)

    @property
    def room(self) -> int:
        """Number of tokens that caches must hold for the sequence, those of the prompt included."""
        return len(self.prompt) + self.limit

    def add(
        self,
        tokens: list[int],
        logprobs: list[float] | None = None,
        likely: list[list[int]] | None = None,
        likely_logprobs: list[list[float]] | None = None,
    ) -> list[int]:
        """Append the tokens that still belong to the text, with what the sequence stores of them, and return them."""
        added = tokens[: self.left]
        for count, token in enumerate(added, 1):
            self.finish = self._end(token)
            if self.finish is not None:
                added = added[:count]
                break
        self.tokens += added
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs[: len(added)]
            if self.top:
                places = zip((likely or ())[: len(added)], likely_logprobs or (), strict=False)
                self.likely += [list(zip(ids[: self.top], own, strict=False)) for ids, own in places]
        if self.finish is None and len(self.tokens) == self.limit:
            self.finish = self.at_limit
        if self.finish is not None:
            self.matcher = None
        return added

    def _end(self, token: int) -> str | None:
        """Return how the next token ends the text; None if it does not."""
        if token in self.eos:
            return "eos"
        try:
            if self.stop is not None and self.stop.add(token):
                return "stop"
        except Exception as error:  # of the caller's code: `raise_failure`, when the other rows have their tokens
            self.failure = error
            return "error"
        if self.matcher is None:
            return None
        if not self.matcher.take(token):
            return "error"
        return "stop" if self.matcher.over else None


class Masks:
    """Masks the logits of rows whose text must match a grammar. A row that has ended has no matcher."""

    def __init__(self, sequences: abc.Sequence[Sequence]):
        """Mask the rows of these sequences."""
        self.sequences = list(sequences)

    def __bool__(self) -> bool:
        """Return whether any running text must match a grammar."""
        return any(s.matcher is not None for s in self.sequences)

    def __call__(self, logits: Tensor, tree: DraftTree | None = None) -> Tensor:
        """Mask logits (`masked`) after the emitted tokens were added to the sequences. This waits for the tree."""
        seen = () if tree is None or not self else (tree.tokens.tolist(), tree.parents.tolist())
        return masked(logits, [s.matcher for s in self.sequences], *seen)


def raise_failure(sequences: abc.Iterable[Sequence]) -> None:
    """Raise the first error of a `Stop` that was not raised before."""
    for sequence in sequences:
        if (failure := sequence.failure) is not None:
            sequence.failure = None
            raise failure


def is_seed(value: Any) -> bool:
    """Return whether this is a `Seed`, or a number that stands for one."""
    pair = value if isinstance(value, list | tuple) else (value, 0)
    return len(pair) == 2 and all(isinstance(x, Integral) and -(2**63) <= int(x) < 2**63 for x in pair)


def make_sequence(
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None,
    seed: Seed | int,
    stop: Stop | None,
    grammar: Grammar | None,
    eos: frozenset[int],
    *,
    vocab: int,
    context: int,
    logprobs: bool = False,
    steps: int | None = None,
    top_logprobs: int = 0,
) -> Sequence:
    """Make a sequence. Raises ValueError for what a target of this vocabulary and context does not support."""
    for name, value, right, wanted in (
        ("max_new_tokens", max_new_tokens, isinstance(max_new_tokens, Integral), "a whole number"),
        ("sampling", sampling, isinstance(sampling, Sampling | None), "a specdec.Sampling"),
        ("stop", stop, stop is None or hasattr(stop, "add"), "a Stop, such as specdec.text.StopStrings"),
        ("eos", eos, isinstance(eos, abc.Collection) and not isinstance(eos, str), "a set of token ids"),
        ("seed", seed, is_seed(seed), "a whole number, or two of them"),
        ("steps", steps, isinstance(steps, Integral | None), "a whole number"),
        ("top_logprobs", top_logprobs, isinstance(top_logprobs, Integral), "a whole number"),
        ("logprobs", logprobs, isinstance(logprobs, bool), "true or false"),
        ("grammar", grammar, grammar is None or hasattr(grammar, "ends"), "a Grammar"),
    ):
        if not right:
            raise ValueError(f"{name} must be {wanted} here, got {shown(value)}")
    if not 0 <= top_logprobs <= MOST_LIKELY:
        raise ValueError(f"top_logprobs must be from 0 to {MOST_LIKELY}, got {top_logprobs}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if steps is not None and steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    check_prompt(prompt, vocab, context)
    if grammar is not None and grammar.ends != eos:
        raise ValueError("a text that obeys a grammar ends by the target's own eos tokens: give no others")
    room = context - len(prompt)
    return Sequence(
        list(map(int, prompt)),  # a copy: the caller's list may grow
        min(max_new_tokens, room),
        "length" if max_new_tokens <= room else "context",
        sampling or Sampling(),
        (int(seed[0]), int(seed[1])) if isinstance(seed, abc.Sequence) else (int(seed), 0),
        stop,
        eos,
        steps,
        logprobs=[] if logprobs or top_logprobs else None,
        top=min(top_logprobs, vocab),
        matcher=None if grammar is None else grammar.start(),
    )


def check_prompt(prompt: list[int], vocab: int, context: int) -> None:
    """Raise ValueError for a prompt that does not fit a target of `vocab` tokens and a context of `context`."""
    if isinstance(prompt, str) or not isinstance(prompt, abc.Sequence):
        raise ValueError(f"a prompt must be a list of token ids here, got {shown(prompt)}")
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if wrong := [token for token in prompt if type(token) is not int and not isinstance(token, Integral)]:
        raise ValueError(f"a prompt must be token ids here, got {wrong[0]!r:.60}")
    if strange := [token for token in prompt if not 0 <= token < vocab]:
        raise ValueError(
            f"the prompt holds token {strange[0]}, but the target's vocabulary has ids 0 to {vocab - 1}: "
            "give ids of this target's tokenizer"
        )
    if len(prompt) >= context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the target's context holds {context}, new ones included"
        )


def per_row(value: Any, rows: int, name: str) -> list:
    """Return a list or tuple with a value for each row as it is, anything else repeated for all rows."""
    if not isinstance(value, list | tuple):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(f"{name} has {len(value)} values, and there are {rows} prompts: give one for each, or for all")
    return list(value)
