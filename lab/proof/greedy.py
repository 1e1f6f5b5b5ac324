"""Is speculative greedy text plain greedy text? If not, were two logits too close to call, or is it a bug?"""

import copy
from dataclasses import dataclass

import torch

from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.model.target import Target
from specdec.types import Verifier

FINER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass
class Mismatch:
    """The first token of a text that differs from plain decoding."""

    prompt: int  # the prompt's number
    position: int  # in the new text
    plain: int  # token ids
    speculative: int
    margin: float  # between the two tokens' logits, in a finer dtype
    error: float  # the largest of the target's rounding errors there: |logit - logit in the finer dtype|
    leading: bool  # are these two the target's likeliest tokens?

    @property
    def tie(self) -> bool:
        """Is the difference one of rounding? Two ways to compute two logits may each be off by `error`."""
        return self.leading and self.margin <= 4 * self.error


@dataclass
class GreedyProof:
    """What one drafter, tree and verifier did on all prompts."""

    texts: int
    tokens: int
    same: int  # texts equal to plain decoding's
    rounds: int
    mismatches: list[Mismatch]

    @property
    def ties(self) -> int:
        return sum(m.tie for m in self.mismatches)

    @property
    def bugs(self) -> int:
        return len(self.mismatches) - self.ties


class GreedyProver:
    """Compares greedy texts with the plain ones of a target."""

    def __init__(self, target: Target, prompts: list[list[int]], max_new_tokens: int):
        self.target, self.prompts, self.max_new_tokens = target, prompts, max_new_tokens
        self.plain = [self._decode(Engine(target), prompt).tokens for prompt in prompts]
        self._finer: Target | None = None

    def _decode(self, engine: Engine, prompt: list[int]):
        return engine.generate([prompt], max_new_tokens=self.max_new_tokens).rows[0]

    def prove(self, drafter: Drafter, tree: TreePolicy, verifier: Verifier) -> GreedyProof:
        engine = Engine(self.target, drafter, tree, verifier)
        rows = [self._decode(engine, prompt) for prompt in self.prompts]
        mismatches = [
            self._first_mismatch(number, row.tokens)
            for number, row in enumerate(rows)
            if row.tokens != self.plain[number]
        ]
        return GreedyProof(
            texts=len(rows),
            tokens=sum(len(row.tokens) for row in rows),
            same=len(rows) - len(mismatches),
            rounds=sum(row.trace.rounds for row in rows),
            mismatches=mismatches,
        )

    @torch.inference_mode()
    def _first_mismatch(self, number: int, tokens: list[int]) -> Mismatch:
        plain = self.plain[number]
        pairs = zip(plain, tokens, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is None:  # one text ends where the other goes on
            position = min(len(plain), len(tokens)) - 1
        prefix = torch.tensor([self.prompts[number] + plain[:position]], device=self.target.device)
        coarse = self.target(prefix, None)[0][0, -1]
        fine = self._reference()(prefix, None)[0][0, -1]
        a, b = plain[position], tokens[position]
        return Mismatch(
            prompt=number,
            position=position,
            plain=a,
            speculative=b,
            margin=abs(fine[a] - fine[b]).item(),
            error=(coarse.to(fine.dtype) - fine).abs().max().item(),
            leading=a != b and set(fine.topk(2).indices.tolist()) == {a, b},
        )

    def _reference(self) -> Target:
        """The target in a finer dtype. It is made at the first mismatch, since most proofs need none."""
        if self._finer is None:
            dtype = self.target.dtype
            self._finer = copy.deepcopy(self.target).to(FINER.get(dtype, torch.float64))
        return self._finer
