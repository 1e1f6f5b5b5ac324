"""The static tree that accepts the most: from measured acceptance by depth and rank (Sequoia, arXiv 2402.12374)."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from specdec.acceptance import DIGITS, NONE, AlongTexts
from specdec.children import LIKELIEST, Coupled
from specdec.contracts import Children, Drafter, DraftState
from specdec.engine.engine import Engine
from specdec.sampling.noise import Noise, Seed, hashes_of
from specdec.structs import Sampling
from specdec.trees.block import most_nodes
from specdec.trees.static import RankPath

KEPT = (0.0, 1.0)  # the temperatures of a drafter's acceptance.json

# accept[d-1][r]: probability that the child of rank r at depth d is the target's token
Table = Sequence[Sequence[float]]


def expected_tau(paths: Sequence[Sequence[int]], accept: Table) -> float:
    """Tokens that a round emits: one, and one for each node that is reached."""
    return 1 + sum(prod(accept[depth][rank] for depth, rank in enumerate(path)) for path in paths)


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
    longest = max(map(len, rows))
    start = torch.tensor([len(prompt) for prompt in prompts], device=device)
    end = torch.tensor([len(row) for row in rows], device=device)
    texts = torch.tensor([row + [0] * (longest + 1 - len(row)) for row in rows], device=device)
    feats = target(texts, None, taps=drafter.taps, logits=False)[1] if drafter.taps else None
    drafter.reset(len(texts), longest + 1 + steps)
    noise, found = None if sampling is None or sampling.greedy else noise_of(target, seeds), []
    for root, state in states_along(drafter, texts, feats, start, end - start):
        children = LIKELIEST if noise is None else Coupled(noise.behind(root, steps), sampling, drafter.trust)
        found.append(_ranks_behind(drafter, state, texts, root, end, steps, topk, children))
    ranks = torch.stack(found, 1).tolist()  # [B][place][steps]
    return [" ".join(map(_word, row[: len(out) - 1])) for row, out in zip(ranks, outputs, strict=True)]


def states_along(
    drafter: Drafter, texts: Tensor, feats: Tensor | None, start: Tensor, count: Tensor
) -> Iterator[tuple[Tensor, DraftState]]:
    """The roots [B] and the drafter's state at them: `count` [B] roots of each of the texts [B,T], from `start` [B] on.

    The drafter, which has room for these rows, absorbs the texts and the target's features [B,T,F] as in decoding whose
    rounds emit one token each. What is said of a text behind its last root is void."""
    first = int(start.max())
    state = drafter.admit(0, texts[:, 0], None if feats is None else feats[:, :first], texts[:, 1 : first + 1], start)
    for n in range(int(count.max())):
        yield start + n, state
        at = (start + n)[:, None].clamp(max=texts.shape[1] - 2)
        absorbed = None if feats is None else feats.gather(1, at[..., None].expand(-1, -1, feats.shape[-1]))
        state = drafter.extend(absorbed, texts.gather(1, at + 1), (n + 1 < count).long(), first + n + 1)


def levels_along(drafter: Drafter, first: DraftState, tokens: Tensor) -> Iterator[DraftState]:
    """The drafter's states on the levels behind a root of each text, tokens [B,D] of the text itself fed back."""
    state = drafter.root(first)
    for depth in range(1, tokens.shape[1] + 1):
        yield state
        if depth < tokens.shape[1]:
            ancestors = torch.ones(len(tokens), 1, depth, dtype=torch.bool, device=tokens.device)
            state = drafter.expand(first, tokens[:, depth - 1 : depth], state.hidden, depth, ancestors)


def _word(ranks: list[int]) -> str:
    return "".join(DIGITS[rank] for rank in itertools.takewhile(lambda rank: rank >= 0, ranks)) or NONE


def noise_of(target, seeds: Sequence[Seed]) -> Noise:
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
    alive = torch.ones_like(root, dtype=torch.bool)
    end = end if state.levels is None else end.minimum(root + 1 + state.levels)  # behind that nothing is drafted
    places = root[:, None] + torch.arange(1, steps + 1, device=root.device)
    tokens, ranks = texts.gather(1, places.clamp(max=texts.shape[1] - 1)), []
    for depth, here in enumerate(levels_along(drafter, state, tokens)):
        ids = drafter.vocab.to_target(children.best(here, drafter.vocab, depth, topk)[1][:, 0])
        found = (ids == tokens[:, depth : depth + 1]) & (alive & (places[:, depth] < end))[:, None]
        alive = found.any(1)
        ranks.append(torch.where(alive, found.long().argmax(1), -1))
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
