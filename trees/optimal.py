"""The static tree that accepts the most: from measured acceptance by depth and rank (Sequoia, arXiv 2402.12374)."""

import heapq
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.acceptance import DIGITS, NONE, AlongTexts
from specdec.children import LIKELIEST, Coupled
from specdec.contracts import Children, Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.sampling.noise import Noise, Seed, hashes_of
from specdec.structs import Sampling
from specdec.trees.static import RankPath

KEPT = (0.0, 1.0)  # the temperatures of a drafter's acceptance.json

# accept[d-1][r]: probability that the child of rank r at depth d is the target's token
Table = Sequence[Sequence[float]]


def expected_tau(paths: Sequence[Sequence[int]], accept: Table) -> float:
    """Tokens that a round emits: one, and one for each node that is reached."""
    return 1 + sum(_reach(path, accept) for path in paths)


def _reach(path: Sequence[int], accept: Table) -> float:
    probability = 1.0
    for depth, rank in enumerate(path):
        probability *= accept[depth][rank]
    return probability


def most_nodes(topk: int, steps: int) -> int:
    """Nodes of the full tree of so many levels, the root counted."""
    return sum(topk**depth for depth in range(steps + 1))


def optimal_paths(accept: Table, num_draft_tokens: int) -> list[RankPath]:
    """The tree of `num_draft_tokens` nodes, root included, with the greatest expected number of emitted tokens.

    The table's size bounds it: no deeper than the rows, no more children than the columns.
    A node is reached with the product of its path's probabilities, and the expectation is the sum over nodes. No child
    is reached more often than its parent, so the most often reached nodes form a tree, and no tree has a greater sum.
    """
    most = most_nodes(len(accept[0]), len(accept))
    if not 2 <= num_draft_tokens <= most:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}, but a tree of {len(accept)} levels and {len(accept[0])} children "
            f"has 2 to {most} nodes, the root counted"
        )
    chosen: list[RankPath] = []
    frontier: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while len(chosen) < num_draft_tokens:
        share, depth, path = heapq.heappop(frontier)
        chosen.append(path)
        if depth < len(accept):
            for rank, probability in enumerate(accept[depth]):
                heapq.heappush(frontier, (share * probability, depth + 1, (*path, rank)))
    return chosen[1:]


@torch.inference_mode()
def measure_ranks(
    target,
    drafter: Drafter,
    prompts: list[list[int]],
    outputs: list[list[int]],
    steps: int,
    topk: int,
    sampling: Sampling | None = None,
    seeds: Sequence[Seed] = (),
) -> list[str]:
    """For each text of the target, the ranks of its tokens among the `topk` children of a drafter on `steps` levels, as
    `specdec.acceptance` writes them.

    From every place of every output the drafter drafts along the text itself, its own output fed back as in decoding.
    prompts and outputs are token ids, row by row; all rows run as one batch. Of texts that were sampled by
    these seeds, the children are those that are coupled to that noise.
    """
    device = target.device
    rows = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    first, most, longest = (max(map(len, texts)) for texts in (prompts, outputs, rows))
    start = torch.tensor([len(prompt) for prompt in prompts], device=device)
    end = torch.tensor([len(row) for row in rows], device=device)
    texts = torch.tensor([row + [0] * (longest + 1 - len(row)) for row in rows], device=device)
    feats = target(texts, None, taps=drafter.taps, logits=False)[1] if drafter.taps else None
    drafter.reset(len(texts), longest + 1 + steps)
    prompts = None if feats is None else feats[:, :first]
    state = drafter.admit(0, texts[:, 0], prompts, texts[:, 1 : first + 1], start)
    noise, found = None if sampling is None or sampling.greedy else _noise(target, seeds), []
    for place in range(most):  # the root is token `place` of each output
        children = LIKELIEST if noise is None else Coupled(noise.behind(start + place, steps), sampling, drafter.trust)
        found.append(_ranks_behind(drafter, state, texts, start + place, end, steps, topk, children))
        root = (start + place)[:, None].clamp(max=longest - 1)
        absorbed = None if feats is None else feats.gather(1, root[..., None].expand(-1, -1, feats.shape[-1]))
        more = (start + place + 1 < end).long()
        state = drafter.extend(absorbed, texts.gather(1, root + 1), more, first + place + 1)
    ranks = torch.stack(found, 1).tolist()  # [B][place][steps]
    return [" ".join(map(_word, row[: len(out) - 1])) for row, out in zip(ranks, outputs, strict=True)]


def _word(ranks: list[int]) -> str:
    return "".join(DIGITS[rank] for rank in itertools.takewhile(lambda rank: rank >= 0, ranks)) or NONE


def _noise(target, seeds: Sequence[Seed]) -> Noise:
    return Noise(seeds, hashes_of(torch.arange(target.vocab, device=target.device)))


def _ranks_behind(
    drafter: Drafter,
    state: DraftState,
    texts: Tensor,
    root: Tensor,
    end: Tensor,
    steps: int,
    topk: int,
    children: Children,
) -> Tensor:
    """Draft the tokens behind root [B] of texts [B,T], which end [B] bounds: -> [B,steps] the rank of each, -1 where it
    is not among the children, or one before it was not, or the text is over."""
    b = len(texts)
    alive = torch.ones_like(root, dtype=torch.bool)
    end = end if state.levels is None else end.minimum(root + 1 + state.levels)  # behind that nothing is drafted
    first, state = state, drafter.root(state)
    ranks = []
    for depth in range(1, steps + 1):
        token = texts.gather(1, (root + depth)[:, None].clamp(max=texts.shape[1] - 1))
        ids = drafter.vocab.to_target(children.best(state, drafter.vocab, depth - 1, topk)[1][:, 0])
        found = (ids == token) & (alive & (root + depth < end))[:, None]
        alive = found.any(1)
        ranks.append(torch.where(alive, found.long().argmax(1), -1))
        if depth < steps:
            ancestors = torch.ones(b, 1, depth, dtype=torch.bool, device=texts.device)
            state = drafter.expand(first, token, state.hidden, depth, ancestors)
    return torch.stack(ranks, 1)


def along_answers(
    target,
    drafter: Drafter,
    prompts: list[list[int]],
    temperature: float,
    *,
    max_new_tokens: int = 128,
    steps: int = 8,
    topk: int = 8,
    seed: int = 0,
) -> AlongTexts:
    """Let the target answer prompts (token ids) plainly, and the drafter draft along the answers. A drafter that goes
    less deep than `steps`, or has fewer tokens than `topk`, goes as far as it can."""
    sampling = Sampling(temperature)
    answers = Engine(target).generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed).rows
    steps = drafter.deepest(steps)
    topk = min(topk, drafter.vocab.size)
    texts = [row.prompt for row in answers], [row.tokens for row in answers]
    how = {"sampling": sampling, "seeds": [row.seed for row in answers]}
    return AlongTexts(temperature, topk, steps, tuple(measure_ranks(target, drafter, *texts, steps, topk, **how)))


def measure_acceptance(
    target, drafter: Drafter, prompts: list[list[int]], outputs: list[list[int]], steps: int, topk: int, **how
) -> Tensor:
    """accept [steps,topk] of a drafter on texts of the target: how often the child of rank r at depth d is the text's
    token, of all places where the tokens before were among the `topk` children too.

    Every place counts once. Decoding begins its rounds more often where drafts fail, so where hits come in long runs,
    as from repetitions, a tree falls short of `expected_tau`; the order of trees is what the table is for. how:
    sampling and seeds, as for `measure_ranks`.
    """
    texts = measure_ranks(target, drafter, prompts, outputs, steps, topk, **how)
    return torch.tensor(AlongTexts(0.0, topk, steps, tuple(texts)).table())
