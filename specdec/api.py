"""The Python interface: load a target, load a drafter, generate."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drafters.formats import load_drafter
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine, Result, RoundReport
from specdec.engine.sequence import Sequence, per_row
from specdec.engine.trace import acceptance_by_depth, tau
from specdec.model.loader import load_target
from specdec.model.target import Target
from specdec.text import StopStrings, check_stops, decode_row, encode_prompt
from specdec.types import Sampling, Verifier
from specdec.verify import make_verifier, sample_and_match
from trees.spec import TreeSpec, load_tree

DEMO_TARGET = Path(__file__).parent / "demo" / "target"
DEMO_DRAFTER = Path(__file__).parent / "demo" / "eagle3"


@dataclass
class Generation:
    """The result of one call: a row for each prompt, and what it took."""

    text: list[str]
    rows: list[Sequence]
    result: Result
    steps: int  # 0 without a drafter
    verifier: Verifier | None  # None without a drafter

    @property
    def lossless(self) -> bool:
        """Is the text distributed as the target's own? Only a verifier can make it otherwise."""
        return self.verifier is None or self.verifier.lossless

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def rounds(self) -> int:
        return sum(row.trace.rounds for row in self.rows)

    @property
    def tau(self) -> float:
        """Emitted tokens per round; see `specdec.engine.trace.tau`."""
        return tau([row.trace for row in self.rows])

    @property
    def acceptance_by_depth(self) -> list[float]:
        return acceptance_by_depth([row.trace for row in self.rows], self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Decoding only: the prefill, with the first token, is left out, and so is the time spent on showing text."""
        decoded = self.num_tokens - len(self.rows)
        return decoded / self.result.decode_seconds if decoded else 0.0


def make_tree(
    topk: int = 4, steps: int = 5, num_draft_tokens: int | None = None, sample_draft: bool = False
) -> TreePolicy:
    """The tree policy of SGLang's three words: `TreeSpec.of`, built. topk 1 is a chain, whose num_draft_tokens is
    steps + 1. With `sample_draft` the children are drawn: topk chains from different first tokens."""
    return TreeSpec.of(topk, steps, num_draft_tokens, sample_draft).build()


def generate(
    target: Target,
    prompts: str | list[str],
    drafter: Drafter | None = None,
    *,
    tree: TreePolicy | None = None,
    verifier: Verifier = sample_and_match,
    graphs: bool | None = None,
    **request,
) -> Generation:
    """Answer one prompt, or several as one batch; with a drafter speculatively, without one plainly.

    The `verifier` (`make_verifier`) decides which drafted tokens are emitted; the default is lossless with any tree.
    graphs: see `Engine`. request: sampling, max_new_tokens, stop, logprobs, seed, raw, observer, as `answer` takes
    them.
    """
    if drafter is not None and tree is None:
        tree = make_tree()
    return answer(Engine(target, drafter, tree, verifier, graphs=graphs), prompts, **request)


def answer(
    engine: Engine,
    prompts: str | list[str],
    *,
    sampling: Sampling | list[Sampling] | None = None,
    max_new_tokens: int | list[int] = 128,
    stop: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[str]] = (),
    logprobs: bool = False,
    seed: int = 0,
    raw: bool = False,
    observer: Callable[[RoundReport], None] | None = None,
) -> Generation:
    """`generate` with an engine, which keeps what it has allocated and captured for the next call.

    A prompt is a user's message if the target's tokenizer has a chat template, and plain text if not or if `raw`. A
    list of `sampling` or `max_new_tokens` has one for each prompt.

    stop: strings before which the text ends, for all prompts, or a sequence of them for each. The row keeps its tokens
    up to the one that completes a string (`finish` 'stop'), as transformers does; the text excludes the string, as
    vLLM's does. logprobs: see `Engine.generate`.
    """
    target, tree = engine.target, engine.policy
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    ids = [encode_prompt(target, prompt, raw) for prompt in batch]
    stops = _stops_of_rows(stop, len(batch))
    result = engine.generate(
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=[StopStrings(target.tokenizer, strings) if strings else None for strings in stops],
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
    "Sampling",
    "TreeSpec",
    "answer",
    "generate",
    "load_drafter",
    "load_target",
    "load_tree",
    "make_tree",
    "make_verifier",
]
