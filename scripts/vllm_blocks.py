"""Drafters of blocks for `check_in_vllm.py`, which have learnt the target's answers to its prompts by heart.

None is bundled, and one that was trained for a minute would have nothing accepted, so that a wrong slot were not seen.
"""

from collections.abc import Iterator
from pathlib import Path

import checkout  # noqa: F401
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.api import DEMO_TARGET
from specdec.contracts import Drafter
from specdec.drafters import dflash, pard, peagle
from specdec.drafters.formats import save_drafter
from specdec.drafters.formats.convert import export
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.model.target import Target
from specdec.training.objectives.block import BlockObjective
from specdec.training.objectives.parallel import ParallelObjective

STEPS, RATE = 60, 4e-3
TAPS = (2, 4, 6)


def drafters(target: Target, known: Tensor) -> Iterator[tuple[str, Drafter]]:
    """Name and a fresh drafter. known: the tokens of the answers, for a part of the vocabulary."""
    some = DraftVocab(target.vocab, known.unique())
    block = {"layers": 2, "taps": TAPS, "block_size": 6}
    yield "peagle", peagle.create(target, layers=2, taps=TAPS, block_size=5)
    yield "peagle: part of the vocabulary", peagle.create(target, vocab=some, layers=2, taps=TAPS, block_size=5)
    yield "pard", pard.create(target, layers=2, block_size=5)
    yield "dflash", dflash.create(target, **block)
    yield "dflash: part of the vocabulary", dflash.create(target, vocab=some, **block)
    yield "dflash: causal", dflash.create(target, causal=True, **block)


def learn(target: Target, drafter: Drafter, tokens: Tensor, mask: Tensor) -> None:
    """Let a drafter learn texts tokens [B,T] where mask [B,T] is 1."""
    with torch.no_grad():
        logits, feats = target(tokens, None, taps=drafter.taps)
    feats = tokens.new_zeros(*tokens.shape, 0, dtype=torch.float32) if feats is None else feats
    own = isinstance(drafter, dflash.BlockDrafter)
    objective = BlockObjective() if own else ParallelObjective({"tokens": 1.0}, kept=1.0, counts="label")
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=RATE)
    drafter.first_tokens = tokens[:, 0]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (STEPS - step) / (STEPS / 2))
        loss, _ = objective(drafter, feats, tokens, logits, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make(
    folder: Path, target: Target, prompts: list[list[int]], new: int, only: list[str] | None = None
) -> list[tuple[str, Path, Path, dict]]:
    """Name of the case, folder of the drafter, folder of its export, what `Family.vllm` says. only: those of
    these names."""
    rows = Engine(target).generate(prompts, max_new_tokens=new, eos=frozenset(target.eos)).rows
    texts = [torch.tensor(row.prompt + row.tokens) for row in rows]
    answers = [torch.arange(len(text)) >= len(row.prompt) for text, row in zip(texts, rows, strict=True)]
    tokens, mask = pad_sequence(texts, batch_first=True), pad_sequence(answers, batch_first=True).float()
    made = []
    torch.manual_seed(0)
    for name, drafter in drafters(target, tokens):
        if only and name not in only:
            continue
        learn(target, drafter, tokens, mask)
        place = folder / name.replace(": ", "_").replace(" ", "_")
        exported = place.with_name(place.name + "_in_vllm")
        save_drafter(drafter, place, target)
        checkpoint = export(place, exported, "vllm", DEMO_TARGET)
        made.append((name, place, exported, checkpoint.family.vllm(checkpoint.meaning)))
    return made
