"""On-policy data: text that the target writes with the drafter in training, which learns most where its drafts failed.

Every so many steps the target continues beginnings of the data's conversations by speculative decoding, with the
drafter as it is by then. Verification is lossless, so the text is the target's own. Where a round's drafts missed, the
token that the target put in their place weighs more than others. This follows Draft-OPD (arXiv 2605.29343), where
rollouts under the target visit the drafter's own states, and rejected positions are replayed.

The heavier token replays the failure itself. The accepted tokens of the round are in the text, so the unroll over it
reaches, from position root - 1 at step `accepted`, the state in which the drafter missed. The unroll's other steps
draft the same token from other roots, as rounds that begin elsewhere would. Drafts after a rejection are not replayed:
no verifier would have reached them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdec.api import make_tree
from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.engine.traces import tau
from specdec.model.language_model import LanguageModel
from specdec.structs import Sampling
from specdec.training.data import Batch, Batches, Sample
from specdec.training.loop.parallel import Processes, fill
from specdec.training.loop.settings import OnPolicy


class Rollouts:
    """The batches of a run: those of `data`, and among them those of the newest rollout, a `share` of all.

    Each process decodes its part of the prompts, and all processes learn from all of the text. The text depends on the
    seed, the step and the weights, and not on the number of processes. A checkpoint holds the samples in use.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        data: Batches,
        settings: OnPolicy,
        seed: int,
        processes: Processes | None = None,
        batches_a_step: int = 1,
    ):
        """Set up decoding with a `shell` of the drafter in training, because decoding leaves caches in a drafter.

        batches_a_step: of all processes together. Raises ValueError if the drafter cannot draft such a tree, or if no
        conversation has an answer that can be continued.
        """
        self.data, self.settings, self.seed, self.processes = data, settings, seed, processes or Processes()
        self.drafter = drafter.to(target.device, target.dtype).eval()
        tree = make_tree(settings.topk, drafter.deepest(settings.steps), settings.num_draft_tokens)
        self.levels = tree.steps
        self.engine = Engine(target, self.drafter, tree, graphs=False)  # weights change with every call
        self.sampling = Sampling(settings.temperature)
        self.first = settings.start * batches_a_step  # the number of the first batch that can be a rollout's
        self.longest = data.pack or data.batch_tokens  # of a sample
        masks = (sample.mask for sample in data.samples)
        begins = (np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]])).tolist() for mask in masks)
        # The places at which the assistant begins to speak
        self.answers = [(i, start) for i, starts in enumerate(begins) for start in starts if start < self.longest]
        if not self.answers:
            raise ValueError(f"data.on_policy: no conversation has an answer within {self.longest} tokens")
        self.samples: list[Sample] = []
        self.batches: list[Batch] = []

    def due(self, step: int) -> bool:
        """Whether `renew` is to be called before this step."""
        since = step - self.settings.start
        return since >= 0 and (since % self.settings.every == 0 or not self.samples)

    def renew(self, step: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Decode with these weights, use the text from now on, and return figures to log; all processes call it."""
        fill(self.drafter, weights)
        prompts, size, new = self._prompts(step), self.settings.batch_size, self.settings.max_new_tokens
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])
        own = []
        for number in range(self.processes.rank, -(-len(prompts) // size), self.processes.world):
            places = range(number * size, min((number + 1) * size, len(prompts)))
            asked, seeds = [prompts[i] for i in places], [(seed, i) for i in places]
            found = self.engine.generate(asked, max_new_tokens=new, sampling=self.sampling, seed=seeds)
            own.append((number, found.rows))
        self.drafter.reset(1, 1)  # frees its cache
        rows = [row for _, rows in sorted(self.processes.gather(own), key=lambda item: item[0]) for row in rows]
        self._use([self._sample(row) for row in rows])
        new, rejected = sum(len(row.tokens) for row in rows), sum(len(self._rejected(row)) for row in rows)
        return {"tau": tau([row.trace for row in rows]), "new_tokens": new, "rejected": rejected / new}

    def iterate(self, skip: int = 0) -> Iterator[Batch]:
        """Yield all batches except the first `skip`: those of a rollout, spread evenly by their number, and others."""
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
        """Return the texts before random answers, each answer at most once, sorted by length.

        Of a plain text, a prefix of random length is taken. Sorting puts prompts of similar lengths into one batch.
        """
        rng, prompts = np.random.default_rng([self.seed, step]), []
        for place in rng.permutation(len(self.answers))[: self.settings.prompts]:
            i, start = self.answers[place]
            ids = self.data.samples[i].ids[: self.longest]
            prompts.append(ids[: start or rng.integers(1, max(len(ids), 2))].tolist())
        return sorted(prompts, key=len)

    def _rejected(self, row: Sequence) -> list[int]:
        """Return the places of a row's tokens with which the target replaced a draft, except at the text's end."""
        places, end = [], 1  # the first token is the prefill's
        for accepted, emitted in zip(row.trace.accepted, row.trace.emitted, strict=True):
            end += emitted
            if accepted < self.levels and emitted == accepted + 1:
                places.append(end - 1)
        return places

    def _sample(self, row: Sequence) -> Sample:
        ids = np.array([*row.prompt, *row.tokens], dtype=np.int32)
        weights = np.ones(len(ids), dtype=np.float32)
        weights[[len(row.prompt) + place for place in self._rejected(row)]] = self.settings.weight
        cut = slice(self.longest)
        return Sample(ids[cut], (np.arange(len(ids)) >= len(row.prompt))[cut], weights[cut])

    def _use(self, samples: list[Sample]) -> None:
        """Make the following batches from these samples: as few as possible, and of similar sizes."""
        data = self.data
        batches = partial(Batches, samples, seed=data.seed, pack=data.pack, lookahead=data.lookahead)
        count = len(batches(data.batch_tokens).epoch(0))
        sizes = range(data.pack or max(len(s.ids) for s in samples), data.batch_tokens)
        least = bisect_left(sizes, True, key=lambda size: len(batches(size).epoch(0)) <= count)
        chosen = batches(sizes.start + least)
        self.samples, self.batches = samples, [chosen.collate(indices) for indices in chosen.epoch(0)]

    def state_dict(self) -> list[list[Tensor]]:
        """Return the samples in use as tensors, for a checkpoint."""
        parts = ((s.ids, s.mask, s.weights) for s in self.samples)
        return [[torch.from_numpy(part) for part in sample if part is not None] for sample in parts]

    def load_state_dict(self, state: list[list[Tensor]]) -> None:
        """Use the samples of a checkpoint."""
        self._use([Sample(ids.numpy(), mask.numpy(), weights.numpy()) for ids, mask, weights in state])
