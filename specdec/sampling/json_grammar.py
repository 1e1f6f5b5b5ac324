"""Grammars of JSON schemas and regular expressions, by llguidance, and the masks of logits that follow from them.

The host knows the state of a text in its grammar, so a round of a batch with such a text waits for its draft, and the
mask of a node costs a walk of the vocabulary on the host. A batch without one never waits. llguidance is an extra, and
is imported where a grammar is made. docs/serve.md lists what is supported.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.model.language_model import LanguageModel
from specdec.schema import shown

MOST = 1 << 15  # characters of a schema or an expression
# Between the parts of an object or array: a space, or a new line and its indentation. JSON takes any number of them,
# and a model that may write as many as it likes may never write anything else.
WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,24})"
# The keywords that are known. Of these llguidance refuses itself what it does not do.
KNOWN = {
    "$schema", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "additionalItems", "additionalProperties", "contentSchema", "items", "allOf", "anyOf", "oneOf",
    "prefixItems", "$defs", "definitions", "patternProperties", "properties", "$id", "$ref", "const", "enum", "format",
    "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "type",
}  # fmt: skip
NAMED = {"$defs", "definitions", "patternProperties", "properties"}  # their values are schemas by name
VALUES = {"const", "default", "enum", "examples"}  # theirs are no schemas
COMPILE_SECONDS, COMPILE_BYTES = 4, 1 << 30
COMPILE = f"""
import signal, sys
signal.alarm({COMPILE_SECONDS})
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({COMPILE_BYTES}, {COMPILE_BYTES}))
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
"""
_MADE: "WeakKeyDictionary[LanguageModel, Grammars]" = WeakKeyDictionary()


def grammars_of(target: LanguageModel) -> "Grammars":
    """Return the `Grammars` of a target, made once for its `eos`; ValueError as for `Grammars`."""
    if (made := _MADE.get(target)) is None or made.ends != target.eos:
        made = _MADE[target] = Grammars(target.tokenizer, target.config.vocab, target.eos)
    return made


class Grammars:
    """The grammars of one target. Creating this takes a second, and a grammar some milliseconds."""

    def __init__(self, tokenizer, vocab: int, ends: frozenset[int]):
        """Prepare for a fast tokenizer of transformers. vocab: V, of the logits. ends: the tokens that end a text.

        Raises ValueError if llguidance is not installed or rejects the tokenizer, or if no token ends a text.
        """
        if find_spec("llguidance") is None:
            raise ValueError("a grammar needs llguidance, which is not installed: pip install 'specdec[structured]'")
        if tokenizer is None or not ends:
            raise ValueError("a grammar needs a target with a tokenizer and with a token that ends a text")
        import llguidance.hf

        self.ends = frozenset(ends)
        try:
            self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(ends))
        except Exception as error:  # the library's own kinds, for a tokenizer that is slow, or too large
            raise ValueError(f"llguidance does not take this target's tokenizer: {_first_line(error)}") from None

    def json(self, schema: Any = None) -> "Grammar":
        """Return the grammar of JSON that this schema (as read from JSON) describes; None: any object.

        Raises ValueError, one sentence, for a schema that is invalid, too large, or uses an unsupported keyword.
        """
        from llguidance import LLMatcher

        schema = {"type": "object"} if schema is None else schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"a JSON schema is an object, got {shown(schema)}")
        try:
            text = _within_limit(json.dumps(schema), "JSON schema")
        except RecursionError:
            raise ValueError("the JSON schema is nested too deeply") from None
        for keyword in _keywords(schema):
            if keyword not in KNOWN:
                raise ValueError(f"the JSON schema has the keyword {shown(keyword)}, which is not known here")
        how = {"whitespace_pattern": WHITESPACE}
        return self._grammar("JSON schema", LLMatcher.grammar_from_json_schema, text, how)

    def regex(self, pattern: str) -> "Grammar":
        """Return the grammar of texts that match the pattern from beginning to end; ValueError as for `json`."""
        from llguidance import LLMatcher

        return self._grammar("regular expression", LLMatcher.grammar_from_regex, _within_limit(pattern, "pattern"))

    def _grammar(self, what: str, make, *given) -> "Grammar":
        from llguidance import LLMatcher

        try:
            grammar = make(*given)
            _check_cost(grammar)
            made = LLMatcher(self.tokenizer, grammar, log_level=0)
        except Exception as error:  # the library's own kinds
            raise ValueError(f"the {what} is not taken: {_first_line(error)}") from None
        made.compute_bitmask()  # some grammars exceed the library's limits at the first token
        if made.is_error():
            reason = made.get_error().replace("NoExtensionBias", "no text is complete by it")
            raise ValueError(f"the {what} is not taken: {_first_line(reason)}")
        return Grammar(made, self.ends)


class Grammar:
    """The language of a text, for the tokens of one target."""

    def __init__(self, fresh, ends: frozenset[int]):
        """Hold an `LLMatcher` that has taken nothing, and the tokens that end a text."""
        self.fresh, self.ends = fresh, ends

    def start(self) -> "TextMatcher":
        """Return the state before the first token."""
        return TextMatcher(self.fresh.deep_copy(), self.ends)


class TextMatcher:
    """The state of one text in its grammar."""

    def __init__(self, matcher, ends: frozenset[int]):
        """Hold an `LLMatcher` of its own, and the tokens that end a text."""
        self.matcher, self.ends = matcher, ends

    @property
    def over(self) -> bool:
        """Whether the text is whole: nothing but its end may follow."""
        return self.matcher.is_stopped()

    def take(self, token: int) -> bool:
        """Advance by a token if it may follow; else change nothing. Tokens that end a text are not taken."""
        return token not in self.ends and self.matcher.try_consume_tokens([token]) == 1

    def back(self) -> None:
        """Undo the last token that was taken."""
        self.matcher.rollback(1)

    def allowed(self) -> NDArray[np.uint8] | None:
        """Return the tokens that may follow, one bit each, the lowest of a byte first, at least V bits.

        Tokens that end a text are among them if it is whole. Returns None if llguidance has failed for this text;
        `take` then accepts no more tokens.
        """
        bits = self.matcher.compute_bitmask()
        return None if self.matcher.is_error() else np.frombuffer(bits, np.uint8)


Nodes = Sequence[Sequence[int]]  # [B][N], a number of each node of a tree


def masked(
    logits: Tensor, matchers: Sequence[TextMatcher | None], tokens: Nodes | None = None, parents: Nodes | None = None
) -> Tensor:
    """Return logits [B,N,V] with -inf for excluded tokens; rows without a matcher are unchanged.

    Row b's matcher has taken the row's text, the root's token included. Node i of the tree that has these tokens and
    parents is masked as the text and the path to i require; without a tree N is 1. Nodes below a token that may not
    follow are void and unchanged.
    """
    width, places, bits = logits.shape[1], [], []
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            own = ([], [[]]) if tokens is None or parents is None else (tokens[row], _children(parents[row]))
            for node, allowed in _visit(matcher, *own):
                places.append(row * width + node)
                bits.append(allowed)
    if not places:
        return logits
    index = torch.tensor(places, device=logits.device)
    known = torch.from_numpy(np.stack(bits)).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((known[..., None] >> shifts) & 1).flatten(1)[:, : logits.shape[-1]] == 0
    flat = logits.flatten(0, 1)
    return flat.index_copy(0, index, flat[index].masked_fill_(forbidden, -torch.inf)).view_as(logits)


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    return children


def _visit(
    matcher: TextMatcher, tokens: Sequence[int], children: list[list[int]], node: int = 0
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (node, allowed tokens) for this node and those below it. The matcher is restored."""
    allowed = matcher.allowed()
    if allowed is None:
        return
    yield node, allowed
    for child in children[node]:
        if matcher.take(tokens[child]):
            if not matcher.over:  # what a whole text is followed by is dropped
                yield from _visit(matcher, tokens, children, child)
            matcher.back()


def _keywords(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema and of all schemas in it; llguidance checks malformed parts."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        for keyword, value in found.items() if isinstance(found, Mapping) else ():
            yield keyword
            if keyword in NAMED and isinstance(value, Mapping):
                waiting += value.values()
            elif keyword not in VALUES:
                waiting += value if isinstance(value, list) else [value]


@lru_cache(maxsize=64)
def _check_cost(grammar: str) -> None:
    """Raise ValueError for a grammar that exceeds `COMPILE_SECONDS` or `COMPILE_BYTES`, or that makes llguidance crash.

    llguidance's own limits do not cover all constructs, so a process that can be killed compiles first.
    """
    done = subprocess.run([sys.executable, "-P", "-c", COMPILE], input=grammar.encode(), capture_output=True)
    if done.returncode:
        raise ValueError(f"it does not compile within {COMPILE_SECONDS} s and {COMPILE_BYTES >> 20} MiB")


def _within_limit(text: str, what: str) -> str:
    if len(text) > MOST:
        raise ValueError(f"the {what} has {len(text)} characters, and may have {MOST}")
    return text


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
