"""The Python interface: load a target, load a drafter, make a tree and a verifier, generate."""

import difflib
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.formats import load_drafter
from specdec.engine.adaptive import Policy
from specdec.engine.compatibility import most_steps
from specdec.engine.engine import Engine, Result
from specdec.engine.report import Observer, RoundReport
from specdec.engine.sequence import Sequence, per_row
from specdec.engine.traces import acceptance_by_depth, tau
from specdec.model.loader import is_transformers, load_target
from specdec.model.target import Target
from specdec.model_settings import DEMO_DRAFTER, DEMO_TARGET, ModelSettings
from specdec.sampling.json_grammar import grammars_of
from specdec.sampling.noise import Seed
from specdec.schema import check_value
from specdec.structs import Sampling, Verifier
from specdec.text import Prompt, StopStrings, as_prompts, check_stops, decode_row, encode_prompt
from specdec.trees.spec import STEPS, load_tree, make_tree, parse_tree
from specdec.tuning.engines import Workload, adaptive_engine
from specdec.verify import make_verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REQUEST = ("max_new_tokens", "stop", "json_schema", "logprobs", "seed", "raw")  # of `answer`, besides the sampling


@dataclass
class Generation:
    """The answers to a batch of prompts, with statistics.

    Attributes:
        text: The text of each row.
        rows: The sequence of each row: tokens, `finish`, trace, log-probabilities.
        result: The engine's result, with times in seconds.
        steps: Levels of the draft tree; 0 without a drafter.
        verifier: The rule that accepted tokens; None without a drafter.
    """

    text: list[str]
    rows: list[Sequence]
    result: Result
    steps: int  # 0 without a drafter
    verifier: Verifier | None  # None without a drafter

    def __repr__(self) -> str:
        """Texts and counts, without the rows: they hold every token, too much for a notebook."""
        return f"Generation({self.num_tokens} tokens in {self.rounds} rounds, tau {self.tau:.2f}, text={self.text!r})"

    @property
    def lossless(self) -> bool:
        """Whether the verifier keeps the target's distribution."""
        return self.verifier is None or self.verifier.lossless

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def rounds(self) -> int:
        """Rounds of drafting and verification of all rows."""
        return sum(row.trace.rounds for row in self.rows)

    @property
    def tau(self) -> float:
        """Emitted tokens per round."""
        return tau([row.trace for row in self.rows])

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of rounds that accepted at least 1, 2, ... `steps` drafted tokens."""
        return acceptance_by_depth([row.trace for row in self.rows], self.steps)

    @property
    def undrafted(self) -> int:
        """Rounds without a proposal of the drafter; all rounds without a drafter."""
        return sum(row.trace.undrafted for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, without the prefill, the first token and the time of the observer."""
        decoded = self.num_tokens - len(self.rows)
        return decoded / self.result.decode_seconds if decoded else 0.0


def generate(
    target: "Target | PreTrainedModel | str | Path",
    prompts: Prompt | abc.Sequence[Prompt],
    drafter: "Drafter | PreTrainedModel | str | Path | None" = None,
    *,
    tree: TreePolicy | str | None = None,
    verifier: Verifier | str = "match",
    children: str | None = None,
    graphs: bool | None = None,
    compile: bool = False,
    adaptive: Policy | str | None = None,
    **request: Any,
) -> Generation:
    """Answer one prompt, or several as one batch: speculatively with a drafter, plainly without one.

    Args:
        target: The model, or its name: a folder, a hub name, a GGUF file, `demo/target`, or a model of transformers.
        prompts: A text, a list of messages or a list of token ids; or a list of these.
        drafter: The drafter, or its name: a folder, a hub name, `demo/mtp`, `ngram`. None decodes plainly.
        tree: The draft tree, or its text for `parse_tree` ("4/5/16": topk, steps, tokens).
        verifier: The rule that accepts drafted tokens, or its name. The default is lossless with any tree.
        children: Children of a node above temperature 0: `likeliest`, `coupled` or `drawn`. None fits the verifier.
        graphs: Capture rounds as CUDA graphs, see `Engine`.
        compile: Compile rounds with Inductor, see `Engine`.
        adaptive: A policy that chooses the tree of every round, or its name: `fixed`, `table`, `ema`, `survival`.
        **request: Arguments of `answer`, such as `max_new_tokens`, `temperature`, `stop` and `seed`.

    Returns:
        The texts, with the tokens and statistics of each row.

    Example:
        >>> generate("demo/target", "What is a tree?", "demo/mtp", tree="1/3/4", temperature=0.8).tau  # doctest: +SKIP
    """
    target = as_target(target)
    drafter = as_drafter(drafter, target)
    tree = as_tree(tree, drafter)
    parts = target, drafter, tree, as_verifier(verifier)
    how = {"children": children, "graphs": graphs, "compile": compile}
    if isinstance(adaptive, str) and drafter is not None:
        workload = Workload(len(as_prompts(prompts)), together=True)
        return answer(adaptive_engine(adaptive, workload, *parts, **how), prompts, **request)
    return answer(Engine(*parts, adaptive=adaptive, **how), prompts, **request)


def as_target(target: "Target | PreTrainedModel | str | Path") -> Target:
    """A target; a name is loaded, and a model of transformers is taken as it is in memory."""
    return target if isinstance(target, nn.Module) and not is_transformers(target) else load_target(target)


def as_drafter(drafter: "Drafter | PreTrainedModel | str | Path | None", target: Target) -> Drafter | None:
    """A drafter; a name is loaded, and a model of transformers becomes a draft model."""
    return drafter if drafter is None or isinstance(drafter, Drafter) else load_drafter(drafter, target)


def as_tree(tree: TreePolicy | str | None, drafter: Drafter | None) -> TreePolicy | None:
    """A policy; a text is read as `parse_tree` does. The default has no more levels than the drafter guesses ahead."""
    if tree is None and drafter is not None:
        return make_tree(steps=min(STEPS, most_steps(drafter) or STEPS))
    return parse_tree(tree) if isinstance(tree, str | Path) else tree


def as_verifier(verifier: Verifier | str) -> Verifier:
    """A verifier; a name of conf/verifier is made."""
    return make_verifier(verifier) if isinstance(verifier, str) else verifier


def as_sampling(
    sampling: Sampling | list[Sampling] | None, words: dict[str, float]
) -> Sampling | list[Sampling] | None:
    """The sampling that is asked for, as it is or by the fields of `Sampling`.

    Raises ValueError for both at once, for another field, and for a value of another type."""
    known = {f.name: f for f in fields(Sampling)}
    for name, value in words.items():
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *REQUEST]) or [*known, *REQUEST]
            raise ValueError(f"there is no setting {name}; there is {', '.join(near)}")
        check_value(known[name], value, name)
    if words and sampling is not None:
        raise ValueError(f"{next(iter(words))} is a part of sampling: give one of the two")
    return Sampling(**words) if words else sampling


def answer(
    engine: Engine,
    prompts: Prompt | abc.Sequence[Prompt],
    *,
    sampling: Sampling | list[Sampling] | None = None,
    max_new_tokens: int | list[int] = 128,
    stop: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[str]] = (),
    json_schema: abc.Mapping | bool | None = None,
    logprobs: bool = False,
    seed: int | abc.Sequence[Seed | int] = 0,
    raw: bool = False,
    observer: Observer | Callable[[RoundReport], None] | None = None,
    **words: float,
) -> Generation:
    """Answer prompts with an existing engine, which reuses its caches and captured rounds.

    Args:
        engine: The engine that decodes.
        prompts: A text, a list of messages (`{"role": "user", "content": "..."}`) or a list of token ids; or a list of
            these. If the tokenizer has a chat template, a text is a user's message.
        sampling: Settings for all prompts, or a list with one per prompt.
        max_new_tokens: The limit for all prompts, or a list with one per prompt.
        stop: Strings that end a text, or a list of them per prompt. The text excludes the string. The tokens include
            the one that completes it, and `finish` is "stop".
        json_schema: A JSON schema that the texts must match.
        logprobs: Store the log-probabilities of emitted tokens, see `Engine.generate`.
        seed: Row i has the seed (seed, i), or seed[i] of a list.
        raw: Do not apply the chat template.
        observer: Called with a `RoundReport` after every step.
        **words: Fields of `Sampling`, such as `temperature`, instead of `sampling`.

    Returns:
        The texts, with the tokens and statistics of each row.

    Raises:
        ValueError: A prompt or setting does not fit the target or the drafter.
    """
    target, tree = engine.target, engine.policy
    batch = as_prompts(prompts)
    ids = [encode_prompt(target, prompt, raw) for prompt in batch]
    stops = _stops_of_rows(stop, len(batch))
    for strings in stops:
        check_stops(strings, target.tokenizer)
    result = engine.generate(
        ids,
        max_new_tokens=max_new_tokens,
        sampling=as_sampling(sampling, words),
        stop=[StopStrings(target.tokenizer, strings) if strings else None for strings in stops],
        grammar=None if json_schema is None else grammars_of(target).json(json_schema),
        logprobs=logprobs,
        seed=seed,
        observer=observer,
    )
    text = [decode_row(target.tokenizer, row.tokens, strings) for row, strings in zip(result.rows, stops, strict=True)]
    return Generation(text, result.rows, result, tree.steps if tree else 0, engine.verifier if tree else None)


def _stops_of_rows(stop: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[str]], rows: int) -> list[list[str]]:
    """The stop strings of each row."""
    stop = [stop] if isinstance(stop, str) else list(stop)
    if any(isinstance(strings, str) for strings in stop) or not stop:
        stop = [stop] * rows
    for strings in stop:
        check_stops(strings)
    return per_row(stop, rows, "stop")


__all__ = [
    "DEMO_DRAFTER",
    "DEMO_TARGET",
    "Generation",
    "ModelSettings",
    "Sampling",
    "answer",
    "generate",
    "load_drafter",
    "load_target",
    "load_tree",
    "make_tree",
    "make_verifier",
    "parse_tree",
]
