"""On-policy data: while the drafter learns, the target writes with its help, and it learns from where it failed.

Every so many steps the target continues beginnings of the data's conversations by speculative decoding, with the
drafter as it is by then. The text is the target's own, since verification is lossless. A token that a round's drafts
missed, the one that the target put in their place, weighs more than others. After Draft-OPD (arXiv 2605.29343), where
rollouts under the target make the states that the drafter visits, and rejected positions are replayed.

Weighing the token replays the failure itself: what the round accepted is the text's own, so the unroll over the text
comes, at row root - 1 and step `accepted`, to the very state in which the drafter missed. The unroll's other steps
draft the same token from other roots, as rounds that begin elsewhere would. Drafts behind a rejection are not replayed:
no verifier would ever have come to them.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdec.api import make_tree
from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.engine.trace import tau
from specdec.model.target import Target
from specdec.types import Sampling
from training.data import Batch, Batches, Sample
from training.loop.parallel import Processes, fill, gather
from training.loop.settings import OnPolicy


class Rollouts:
    """The batches of a run: those of `data`, and among them, as a `share` of all, those of the newest rollout.

    Each process decodes its part of the prompts, and all learn from all. What is written depends on the seed, the step
    and the weights, and not on the number of processes; a checkpoint holds what is in use.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        data: Batches,
        settings: OnPolicy,
        seed: int,
        processes: Processes | None = None,
        batches_a_step: int = 1,
    ):
        """drafter: a `shell` of the one in training, as decoding leaves caches in it that training must not meet.
        batches_a_step: of all processes. Raises ValueError if the drafter cannot draft such a tree, or the data hold no
        beginning to go on from."""
        self.data, self.settings, self.seed, self.processes = data, settings, seed, processes or Processes()
        self.drafter = drafter.to(target.device, target.dtype).eval()
        steps = min(settings.steps, drafter.max_steps or settings.steps)
        tree = make_tree(settings.topk, steps, settings.num_draft_tokens)
        self.engine = Engine(target, self.drafter, tree, graphs=False)  # weights change with every call
        self.sampling = Sampling(settings.temperature)
        self.first = settings.start * batches_a_step  # the number of the first batch that can be a rollout's
        self.longest = data.pack or data.batch_tokens  # of a sample
        answers = ((i, start) for i, sample in enumerate(data.samples) for start in _answers(sample.mask))
        self.answers = [(i, start) for i, start in answers if start < self.longest]
        if not self.answers:
            raise ValueError(f"data.on_policy: no conversation has an answer within {self.longest} tokens")
        self.samples: list[Sample] = []
        self.batches: list[Batch] = []

    def due(self, step: int) -> bool:
        since = step - self.settings.start
        return since >= 0 and (since % self.settings.every == 0 or not self.samples)

    def renew(self, step: int, weights: dict[str, Tensor]) -> dict[str, float]:
        """Decode with these weights of the drafter, and take what comes for the batches from now on; every process must
        call it. Returns tau, new_tokens, and rejected, the share of these that drafts missed."""
        fill(self.drafter, weights)
        prompts, size = self._prompts(step), self.settings.batch_size
        own = [
            (number, self._decode(prompts[number * size : (number + 1) * size], step, number))
            for number in range(self.processes.rank, -(-len(prompts) // size), self.processes.world)
        ]
        self.drafter.reset(1, 1, torch.zeros(1, dtype=torch.int64, device=self.engine.device))  # gives memory back
        rows = [row for _, rows in sorted(gather(own, self.processes), key=lambda item: item[0]) for row in rows]
        self._use([self._sample(row) for row in rows])
        new, rejected = sum(len(row.tokens) for row in rows), sum(len(self._rejected(row)) for row in rows)
        return {"tau": tau([row.trace for row in rows]), "new_tokens": new, "rejected": rejected / new}

    def iterate(self, skip: int = 0) -> Iterator[Batch]:
        """All batches, the first `skip` left out. Of any number in a row, a rollout's are its share, evenly spread;
        which of the rollout they are depends on the batch's number alone."""
        number, data = skip, self.data.iterate(skip - self._before(skip))
        while True:
            place, number = self._before(number), number + 1
            if self._before(number) > place:
                yield self.batches[place % len(self.batches)]
            else:
                yield next(data)

    def part(self, start: int, end: int) -> float:
        """The share of the batches numbered start to end that are a rollout's."""
        return (self._before(end) - self._before(start)) / (end - start)

    def _before(self, number: int) -> int:
        """How many of the first `number` batches are a rollout's."""
        return int(max(number - self.first, 0) * self.settings.share)

    def _prompts(self, step: int) -> list[list[int]]:
        """What stands before answers drawn at random, each once at most; of a plain text a beginning of random length.
        Sorted by length, so that those decoded together are alike."""
        rng, prompts = np.random.default_rng([self.seed, step]), []
        for place in rng.permutation(len(self.answers))[: self.settings.prompts]:
            i, start = self.answers[place]
            ids = self.data.samples[i].ids[: self.longest]
            prompts.append(ids[: start or rng.integers(1, max(len(ids), 2))].tolist())
        return sorted(prompts, key=len)

    def _decode(self, prompts: list[list[int]], step: int, number: int) -> list[Sequence]:
        seed = int(np.random.SeedSequence([self.seed, step, number]).generate_state(1)[0])
        settings = {"max_new_tokens": self.settings.max_new_tokens, "sampling": self.sampling}
        return self.engine.generate(prompts, seed=seed, **settings).rows

    def _rejected(self, row: Sequence) -> list[int]:
        """Which of a row's tokens the target put in the place of a draft: the last of a round that accepted less than
        the tree is deep, unless the text ended before it."""
        places, end = [], 1  # the first token is the prefill's
        for accepted, emitted in zip(row.trace.accepted, row.trace.emitted, strict=True):
            end += emitted
            if accepted < self.engine.policy.steps and emitted == accepted + 1:
                places.append(end - 1)
        return places

    def _sample(self, row: Sequence) -> Sample:
        ids = np.array([*row.prompt, *row.tokens], dtype=np.int32)
        weights = np.ones(len(ids), dtype=np.float32)
        weights[[len(row.prompt) + place for place in self._rejected(row)]] = self.settings.weight
        cut = slice(self.longest)
        return Sample(ids[cut], (np.arange(len(ids)) >= len(row.prompt))[cut], weights[cut])

    def _use(self, samples: list[Sample]) -> None:
        """As few batches as there can be, and those as even as they can be: each makes a step as large as any other."""
        data = self.data
        batches = partial(Batches, samples, seed=data.seed, pack=data.pack, lookahead=data.lookahead)
        count = len(batches(data.batch_tokens).epoch(0))
        sizes = range(data.pack or max(len(s.ids) for s in samples), data.batch_tokens)
        least = bisect_left(sizes, True, key=lambda size: len(batches(size).epoch(0)) <= count)
        chosen = batches(sizes.start + least)
        self.samples, self.batches = samples, [chosen.collate(indices) for indices in chosen.epoch(0)]

    def state_dict(self) -> list[list[Tensor]]:
        return [[torch.from_numpy(part) for part in (s.ids, s.mask, s.weights)] for s in self.samples]

    def load_state_dict(self, state: list[list[Tensor]]) -> None:
        self._use([Sample(*(part.numpy() for part in parts)) for parts in state])


def _answers(mask: np.ndarray) -> list[int]:
    """Where the assistant begins to speak."""
    return np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]])).tolist()
