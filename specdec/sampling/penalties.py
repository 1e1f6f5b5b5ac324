"""Penalties for tokens that a text holds already; each node of a tree is held to the text of its own path.

    m      how often the output holds the token so far        seen   prompt or output holds it
    x    = logit / repetition if logit > 0 else logit * repetition      where seen
    x   -= frequency * m + presence * [m > 0]

Repetition is transformers' `RepetitionPenaltyLogitsProcessor` (CTRL, arXiv 1909.05858), presence and frequency are
OpenAI's; that the first looks at prompt and output, the other two at the output only, and that they come in this order
and before the temperature, is vLLM's `apply_penalties`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.structs import DraftTree


class Penalties:
    """The tokens of each row of a batch, counted on the device, and the penalties for them."""

    def __init__(self, rows: Sequence[Any], vocab: int, device: torch.device):
        """Count the tokens of sequences, which have a `sampling`, a `prompt`, and the `tokens` written so far."""

        def column(name: str) -> Tensor:
            values = [getattr(row.sampling, name) for row in rows]
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        self.repetition, self.presence, self.frequency = map(column, names)
        self.prompt = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(len(rows), vocab, dtype=torch.int32, device=device)  # of the output
        for row, prompt, counts in zip(rows, self.prompt, self.counts, strict=True):
            prompt[torch.tensor(row.prompt, device=device)] = True
            counts += torch.tensor(row.tokens, dtype=torch.int64, device=device).bincount(minlength=vocab)

    def add(self, tokens: Tensor, n: Tensor) -> None:
        """Count the first n [B] of tokens [B,P] as output."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) < n[:, None]
        self.counts.scatter_add_(1, tokens, emitted.to(self.counts.dtype))

    def __call__(self, logits: Tensor, tree: DraftTree | None = None) -> Tensor:
        """Penalise logits [B,N,V]; return fp32.

        The counts of node i of the tree are those of the output, which includes the root, and of the tokens on its path
        after the root. Without a tree all N have the output's counts.

        No count for each node and token of the vocabulary is stored: the output's counts are subtracted from all nodes
        alike, and the few tokens of the tree are then written again with their counts on each path.
        """
        logits = logits.float()
        penalised = self._penalise(logits, self.prompt[:, None], self.counts[:, None])
        if tree is None:
            return penalised
        below = tree.ancestors.clone()
        below[..., 0] = False
        same = tree.tokens[:, :, None] == tree.tokens[:, None]
        on_path = below.float() @ same.float()  # [B,N,N]: how often the path of node i holds the token of node j
        counts = self.counts.gather(1, tree.tokens)[:, None] + on_path
        prompt = self.prompt.gather(1, tree.tokens)[:, None]
        tokens = tree.tokens[:, None].expand_as(on_path)
        # Nodes of one token write the same value, so their order does not matter.
        return penalised.scatter_(2, tokens, self._penalise(logits.gather(2, tokens), prompt, counts))

    def _penalise(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        """Penalise logits [B,N,X] of X tokens: in the prompt or not, and their output counts, each [B,1|N,X]."""
        present = counts > 0
        factor = torch.where(prompt | present, self.repetition, 1.0)
        offset = self.frequency * counts + self.presence * present
        return torch.where(logits > 0, logits / factor, logits * factor) - offset
