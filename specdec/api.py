"""The Python interface: load a target, load a drafter, generate."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drafters.formats import load_drafter
from specdec.engine import Engine, Result, RoundReport, Row
from specdec.loader import load_target
from specdec.model import Target
from specdec.text import encode_prompt
from specdec.trace import acceptance_by_depth, tau
from specdec.types import Drafter, Sampling, TreePolicy
from trees import Chain, DynamicTree

DEMO_TARGET = Path(__file__).parent / "demo" / "target"
DEMO_DRAFTER = Path(__file__).parent / "demo" / "eagle3"


@dataclass
class Generation:
    """The result of one call: a row for each prompt, and what it took."""

    text: list[str]
    rows: list[Row]
    result: Result
    steps: int  # 0 without a drafter

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def rounds(self) -> int:
        return sum(row.trace.rounds for row in self.rows)

    @property
    def tau(self) -> float:
        """Emitted tokens per round; see `specdec.trace.tau`."""
        return tau([row.trace for row in self.rows])

    @property
    def acceptance_by_depth(self) -> list[float]:
        return acceptance_by_depth([row.trace for row in self.rows], self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Decoding only: the prefill, with the first token, is left out, and so is the time spent on showing text."""
        decoded = self.num_tokens - len(self.rows)
        return decoded / self.result.decode_seconds if decoded else 0.0


def make_tree(topk: int = 4, steps: int = 5, num_draft_tokens: int | None = None) -> TreePolicy:
    """The tree policy of SGLang's three words; topk 1 is a chain, whose num_draft_tokens is steps + 1."""
    if topk == 1:
        if num_draft_tokens not in (None, steps + 1):
            raise ValueError(
                f"with topk 1 the tree is a chain of steps + 1 = {steps + 1} tokens, not {num_draft_tokens}"
            )
        return Chain(steps)
    if num_draft_tokens is None:
        num_draft_tokens = min(16, DynamicTree.candidates(topk, steps) + 1)
    return DynamicTree(topk, steps, num_draft_tokens)


def generate(
    target: Target,
    prompts: str | list[str],
    drafter: Drafter | None = None,
    *,
    tree: TreePolicy | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    raw: bool = False,
    observer: Callable[[RoundReport], None] | None = None,
) -> Generation:
    """Answer one prompt, or several as one batch; with a drafter speculatively, without one plainly.

    A prompt is a user's message if the target's tokenizer has a chat template, and plain text if not or if `raw`.
    """
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    ids = [encode_prompt(target, prompt, raw) for prompt in batch]
    if drafter is not None and tree is None:
        tree = make_tree()
    engine = Engine(target, drafter, tree)
    result = engine.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, observer=observer)
    text = [target.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in result.rows]
    return Generation(text, result.rows, result, tree.steps if tree else 0)


__all__ = [
    "DEMO_DRAFTER",
    "DEMO_TARGET",
    "Generation",
    "Sampling",
    "generate",
    "load_drafter",
    "load_target",
    "make_tree",
]
