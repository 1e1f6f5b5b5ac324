"""The Python interface: load a target, load a drafter, make a tree and a verifier, generate."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from specdec.arguments import (
    as_drafter,
    as_sampling,
    as_target,
    as_tree,
    as_verifier,
    check_drafter,
    check_prompts,
    check_types,
    plain,
)
from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.formats import load_drafter
from specdec.engine.adaptive import Policy
from specdec.engine.engine import Engine, Result
from specdec.engine.report import Observer, RoundReport
from specdec.engine.sequence import Sequence, per_row
from specdec.engine.traces import acceptance_by_depth, tau
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_target
from specdec.model_settings import DEMO_DRAFTER, DEMO_TARGET, ModelSettings
from specdec.sampling.json_grammar import grammars_of
from specdec.sampling.noise import Seed
from specdec.sampling_settings import SamplingWords
from specdec.schema import named_arguments, shown
from specdec.structs import Sampling, Verifier
from specdec.text import Prompt, StopStrings, as_prompts, check_stops, decode_row, encode_prompt
from specdec.trees.base import WORDS
from specdec.trees.spec import load_tree, make_tree, parse_tree
from specdec.tuning.engines import Workload, adaptive_engine
from specdec.verify import make_verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    steps: int
    verifier: Verifier | None

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


@named_arguments
def generate(
    target: "LanguageModel | PreTrainedModel | str | Path",
    prompts: Prompt | abc.Sequence[Prompt],
    drafter: "Drafter | PreTrainedModel | str | Path | None" = None,
    *,
    tree: TreePolicy | str | abc.Sequence[int] | None = None,
    topk: int | None = None,
    steps: int | None = None,
    num_draft_tokens: int | None = None,
    verifier: Verifier | str = "match",
    children: str | None = None,
    adaptive: Policy | str | None = None,
    graphs: bool | None = None,
    compile: bool = False,
    max_new_tokens: int | list[int] = 128,
    sampling: Sampling | list[Sampling] | None = None,
    stop: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[str]] = (),
    json_schema: abc.Mapping | bool | None = None,
    logprobs: bool = False,
    seed: int | abc.Sequence[Seed | int] = 0,
    raw: bool = False,
    observer: Observer | Callable[[RoundReport], None] | None = None,
    **words: Unpack[SamplingWords],
) -> Generation:
    """Answer one prompt, or several as one batch: speculatively with a drafter, plainly without one.

    - `target`: The model, or its name: a folder, a hub name, a GGUF file, `demo/target`, or a model of transformers.
    - `prompts`: A text, a list of messages or a list of token ids; or a list of these.
    - `drafter`: The drafter, or its name: a folder, a hub name, `demo/mtp`, `ngram`. None decodes plainly.
    - `tree`: The draft tree: a text ("4/5/16"), the numbers (topk, steps, num_draft_tokens), or a tree.
    - `topk`, `steps`, `num_draft_tokens`: Children per node, levels, and nodes including the root, instead of `tree`.
    - `verifier`: The rule that accepts drafted tokens, or its name. The default is lossless with any tree.
    - `children`: Children of a node above temperature 0: `likeliest`, `coupled` or `drawn`. None fits the verifier.
    - `adaptive`: A policy that chooses the tree of every round, or its name: `fixed`, `table`, `ema`, `survival`.
    - `graphs`, `compile`: Capture rounds as CUDA graphs, compile them with Inductor, see `Engine`.
    - `sampling`, `max_new_tokens`, and `stop` to `observer`: As in `answer`.
    - `words`: Fields of `Sampling`, such as `temperature`, instead of `sampling`.

    Examples:
        >>> generate("demo/target", "What is a tree?", "demo/mtp", tree=(1, 3, 4), seed=7).tau  # doctest: +SKIP
    """
    return _generate(**locals())


def _generate(
    target: Any, prompts: Any, drafter: Any, tree: Any, adaptive: Any, words: SamplingWords, **given: Any
) -> Generation:
    """`generate`. Whatever can be checked without the models is checked before they are loaded."""
    check_types(tree=tree, adaptive=adaptive, **given)
    check_prompts(prompts, "generate(target, prompts, drafter)")
    check_drafter(drafter)
    given["sampling"] = as_sampling(given["sampling"], words)
    shape = {name: given.pop(name) for name in WORDS}
    how = {name: given.pop(name) for name in ("children", "graphs", "compile")}
    verifier = as_verifier(given.pop("verifier"))
    target = as_target(target)
    drafter = as_drafter(drafter, target)
    parts: Any = target, drafter, as_tree(tree, drafter, **shape), verifier
    if isinstance(adaptive, str):
        rows = len(as_prompts(prompts))
        asked = per_row(given["sampling"], rows, "sampling")
        workload, how["temperature"] = Workload(rows, together=True), max(s.temperature if s else 0.0 for s in asked)
        return answer(adaptive_engine(adaptive, workload, *parts, **how), prompts, **given)
    return answer(Engine(*parts, adaptive=adaptive, **how), prompts, **given)


@named_arguments
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
    if not isinstance(engine, Engine):
        raise TypeError(f"answer needs an Engine first, got {shown(engine)}: generate takes a target")
    given = {"stop": stop, "json_schema": json_schema, "logprobs": logprobs, "raw": raw, "observer": observer}
    check_types(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, **given)
    check_prompts(prompts, "answer(engine, prompts)")
    target, tree = engine.target, engine.policy
    batch = as_prompts(prompts)
    ids = [encode_prompt(target, prompt, raw) for prompt in batch]
    stops = _stops_of_rows(stop, len(batch))
    for strings in stops:
        check_stops(strings, target.tokenizer)
    result = engine.generate(
        ids,
        max_new_tokens=plain(max_new_tokens),
        sampling=as_sampling(sampling, words),
        stop=[StopStrings(target.tokenizer, strings) if strings else None for strings in stops],
        grammar=None if json_schema is None else grammars_of(target).json(json_schema),
        logprobs=logprobs,
        seed=plain(seed),
        observer=observer,
    )
    text = [decode_row(target.tokenizer, row.tokens, strings) for row, strings in zip(result.rows, stops, strict=True)]
    return Generation(text, result.rows, result, tree.steps if tree else 0, engine.verifier if tree else None)


def _stops_of_rows(stop: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[str]], rows: int) -> list[list[str]]:
    """The stop strings of each row."""
    given: list[Any] = [stop] if isinstance(stop, str) else list(stop)
    if any(isinstance(strings, str) for strings in given) or not given:
        given = [given] * rows
    for strings in given:
        check_stops(strings if isinstance(strings, abc.Sequence) else [strings])
    return per_row(given, rows, "stop")


__all__ = [
    "DEMO_DRAFTER", "DEMO_TARGET", "Generation", "ModelSettings", "Sampling", "answer", "generate", "load_drafter",
    "load_target", "load_tree", "make_tree", "make_verifier", "parse_tree",
]  # fmt: skip
