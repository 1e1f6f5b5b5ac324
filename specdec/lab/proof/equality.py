"""Is speculative text plain text, token for token? If not, were two scores too close to call, or is it a bug?

A token is the one of the largest score: its logit, and above temperature 0 its log-probability after temperature and
filters plus the row's noise (`specdec.sampling.noise`). So plain decoding says which token it has to be.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.report import GREEDY
from specdec.model.language_model import LanguageModel
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import Sampling, Verifier

FINER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
SLACK = 1e-3  # of top_p and min_p: whether a token at the edge of a filter belongs to it is a matter of rounding


@dataclass
class Mismatch:
    """The first token of a text that differs from the reference's."""

    prompt: int  # the prompt's number
    position: int  # in the new text
    plain: int | str  # token ids, or a server's names for them
    speculative: int | str
    margin: float = math.inf  # between the two tokens' scores, in a finer dtype; infinite if unknown
    error: float = 0.0  # the largest rounding error of the target's scores there: |score - score in the finer dtype|
    leading: bool = False  # are these two the tokens of the largest scores?

    @property
    def tie(self) -> bool:
        """Is the difference one of rounding? Two ways to compute two scores may each be off by `error`."""
        return self.leading and self.margin <= 4 * self.error

    def __str__(self) -> str:
        """Return the mismatch as one line of a report."""
        return (
            f"prompt {self.prompt}, token {self.position}: {self.plain} became {self.speculative}; margin "
            f"{self.margin:.1e}, rounding error {self.error:.1e}: {'a tie' if self.tie else 'a BUG'}"
        )


@dataclass
class ComparedTexts:
    """Texts against the reference's."""

    texts: int
    tokens: int
    mismatches: list[Mismatch]

    @property
    def same(self) -> int:
        """The number of texts that equal the reference's."""
        return self.texts - len(self.mismatches)

    @property
    def ties(self) -> int:
        """The number of texts that differ by rounding alone."""
        return sum(m.tie for m in self.mismatches)

    @property
    def bugs(self) -> int:
        """The number of texts that differ for no numerical reason."""
        return len(self.mismatches) - self.ties


@dataclass
class EqualityProof(ComparedTexts):
    """What one drafter, tree and verifier did on all prompts."""

    rounds: int


class EqualityProver:
    """Compares texts with the plain ones of a target. Prompt number i has the seed (seed, i)."""

    def __init__(
        self, target: LanguageModel, prompts: list[list[int]], new: int, sampling: Sampling = GREEDY, seed: int = 0
    ):
        """Decode `new` tokens after each prompt, a list of token ids, plainly with the target."""
        self.target, self.prompts, self.max_new_tokens, self.sampling, self.seed = target, prompts, new, sampling, seed
        self.plain = [self._decode(Engine(target), number).tokens for number in range(len(prompts))]

    def _decode(self, engine: Engine, number: int):
        how: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "sampling": self.sampling}
        return engine.generate([self.prompts[number]], seed=[(self.seed, number)], **how).rows[0]

    def prove(self, drafter: Drafter, tree: TreePolicy, verifier: Verifier) -> EqualityProof:
        """The verifier must be one that `couples`: its text is what the target draws by the rows' noise."""
        engine = Engine(self.target, drafter, tree, verifier)
        rows = [self._decode(engine, number) for number in range(len(self.prompts))]
        tokens, rounds = sum(len(row.tokens) for row in rows), sum(row.trace.rounds for row in rows)
        wrong = [self.first_mismatch(i, row.tokens) for i, row in enumerate(rows) if row.tokens != self.plain[i]]
        return EqualityProof(len(rows), tokens, wrong, rounds)

    @torch.inference_mode()
    def first_mismatch(self, number: int, tokens: list[int]) -> Mismatch:
        """Where a text of prompt `number` that is not the plain one leaves it, and why."""
        plain = self.plain[number]
        pairs, shorter = zip(plain, tokens, strict=False), min(len(plain), len(tokens))
        # Where all are equal, one text ends where the other continues.
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter - 1)
        prefix = torch.tensor([self.prompts[number] + plain[:position]], device=self.target.device)
        coarse = self.target(prefix, None)[0][0, -1]
        fine = self._reference(prefix, None)[0][0, -1]
        warmth = self.sampling.temperature or 1.0
        error = (coarse.to(fine.dtype) - fine).abs().max().item() / warmth
        a, b = plain[position], tokens[position]
        noise = self._noise(number, prefix.shape[1]).to(fine.dtype)
        free, edge = fine / warmth + noise, self._edge(fine, noise, {a, b})
        best = (filtered_scores(fine, self.sampling) + noise).topk(2).indices.tolist()
        margin = 0.0 if edge else abs(free[a] - free[b]).item()
        return Mismatch(number, position, a, b, margin, error, leading=a != b and (edge or set(best) == {a, b}))

    def _noise(self, number: int, position: int) -> Tensor:
        """[V] of the token at this position of a row; 0 at temperature 0."""
        if self.sampling.greedy:
            return torch.zeros(self.target.vocab, device=self.target.device)
        hashes = hashes_of(torch.arange(self.target.vocab, device=self.target.device))
        last = torch.tensor([position - 1], device=hashes.device)
        return Noise([(self.seed, number)], hashes).after(last).whole[0, 0]

    def _edge(self, logits: Tensor, noise: Tensor, pair: set[int]) -> bool:
        """Does it depend on the rounding of a filter's edge which of the two is drawn?"""
        s = self.sampling
        if s.top_p == 1 and not s.min_p:
            return False
        drawn = set()
        for slack in (-SLACK, 0.0, SLACK):
            near = replace(s, top_p=min(1.0, s.top_p + slack * (s.top_p < 1)), min_p=s.min_p * (1 + slack))
            drawn.add(int((filtered_scores(logits, near) + noise).argmax()))
        return pair <= drawn

    @cached_property
    def _reference(self) -> LanguageModel:
        """The target in a finer dtype. It is made at the first mismatch, since most proofs need none."""
        return copy.deepcopy(self.target).to(FINER.get(self.target.dtype, torch.float64))
