"""Test that a rejected draft leaves nothing in a target's caches.

Attention forgets a rejected token when its slot is overwritten; a recurrent or a convolution state does not. Texts show
that late or not at all, as logits change by little. So the same tokens are accepted twice, after different rejected
drafts. The target's caches must then be the same bits, and so must the logits that follow. That does not find lost
state of accepted tokens, so the logits are also compared with those of the plain text, in which rounding may differ.

Experts compute a token together with all others that chose them, so the last bits of an accepted token may depend on
the drafts in the batch. For such targets, differences up to `ROUNDING` are counted separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.model.language_model import LanguageModel

DRAFTS = 4  # of a round
LONGEST = 48  # tokens of a prompt
# Of logits against the plain text's, as a share of their range: the tolerance of the check on loading.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF = 0.1
ROUNDING = 1000  # roundings of the target's dtype, of the largest number in a state


@dataclass
class RollbackProof:
    """What stayed of rejected drafts, over all cases. A case is a row that verified, accepted a part, and went on."""

    cases: int = 0
    states: int = 0  # cases whose caches depend on what was rejected
    logits: int = 0  # cases whose next logits depend on it
    rounded: int = 0  # cases in which they do by rounding alone, for targets with experts
    astray: int = 0  # cases whose logits are not the plain text's
    largest: float = 0.0  # difference of a logit from the plain text's, as a share of the range

    @property
    def bugs(self) -> int:
        """The number of faulty cases: the largest of `states`, `logits` and `astray`."""
        return max(self.states, self.logits, self.astray)


@dataclass(frozen=True)
class Script:
    """Rounds of some rows: in each, the nodes of a chain, and how many of them are committed."""

    prompts: list[list[int]]
    rounds: list[tuple[Tensor, Tensor]]  # nodes [B,N] with the root first, and n [B] of them to keep

    def other(self, seed: int, vocab: int) -> "Script":
        """The same with other rejected drafts, none of which is the one that it replaces."""
        generator, rounds = torch.Generator().manual_seed(seed), []
        for nodes, n in self.rounds:
            shift = torch.randint(1, vocab, nodes.shape, generator=generator)
            rejected = torch.arange(nodes.shape[1]) >= n[:, None]
            rounds.append((torch.where(rejected, (nodes + shift) % vocab, nodes), n))
        return Script(self.prompts, rounds)

    def texts(self, row: int) -> list[list[int]]:
        """What is accepted of a row after each round."""
        text, found = list(self.prompts[row]), []
        for nodes, n in self.rounds:
            text = text + nodes[row, : n[row]].tolist()
            found.append(text)
        return found


def script(prompts: list[list[int]], accepted: int, vocab: int, seed: int) -> Script:
    """Return three rounds for the rows of a test: drafts, none, and drafts again.

    Row r accepts (`accepted` + r) modulo `DRAFTS` of its drafts in the first and the last round, so never all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    taken = (torch.arange(len(prompts)) + accepted) % DRAFTS
    rounds = []
    for count in (DRAFTS, 0, DRAFTS):
        nodes = torch.randint(vocab, (len(prompts), count + 1), generator=generator)
        rounds.append((nodes, taken + 1 if count else torch.ones_like(taken)))
    return Script(prompts, rounds)


@torch.inference_mode()
def play(target, acts: Script) -> tuple[list[list[list[Tensor]]], list[Tensor]]:
    """After each round, what each row keeps; and the logits [B,V] at the first node of each round, and of one more."""
    device, lens = target.device, torch.tensor([len(prompt) for prompt in acts.prompts])
    longest, rows = int(lens.max()), len(lens)
    cache = target.new_cache(rows, longest + sum(nodes.shape[1] + 1 for nodes, _ in acts.rounds) + DRAFTS)
    tokens = torch.tensor([[*p] + [0] * (longest - len(p)) for p in acts.prompts], device=device)
    target(tokens, cache, last=lens.to(device) - 1, prefill=True)
    cache.advance(lens.to(device), longest)
    bound, committed_states, logits = longest, [], []
    for nodes, n in [*acts.rounds, (torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))]:
        count = nodes.shape[1]
        chain = torch.ones(count, count, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        depth = torch.arange(count, device=device).expand(rows, -1)
        found, _ = target(nodes.to(device), cache, depth=depth, ancestors=chain)
        bound += count
        cache.commit(depth * (depth < n.to(device)[:, None]), n.to(device), bound)
        committed_states.append([[part.clone() for part in cache.committed(row)] for row in range(rows)])
        logits.append(found[:, 0])
    return committed_states, logits


def prove_rollback(
    target: LanguageModel, prompts: Sequence[list[int]], *, together: bool = True, seed: int = 0
) -> RollbackProof:
    """Verify drafts and accept part of them, for every number of accepted drafts from 0 to `DRAFTS` - 1.

    prompts: token ids, of which the last `LONGEST` are used; together: in one ragged batch, not one by one.
    """
    prompts, proof = [prompt[-LONGEST:] for prompt in prompts], RollbackProof()
    for group in [prompts] if together else [[prompt] for prompt in prompts]:
        for accepted in range(DRAFTS):
            first = script(group, accepted, target.vocab, seed + accepted)
            runs = play(target, first), play(target, first.other(seed + accepted, target.vocab))
            for row in range(len(group)):
                _judge(target, first, runs, row, proof)
    return proof


@torch.inference_mode()
def _judge(target, acts: Script, runs, row: int, proof: RollbackProof) -> None:
    """Add what became of a row to the proof."""
    (states, logits), (other_states, other_logits) = runs
    proof.cases += 1
    committed_states = [zip(x[row], y[row], strict=True) for x, y in zip(states, other_states, strict=True)]
    in_states = max((_apart(a, b) for pairs in committed_states for a, b in pairs), default=0.0)
    in_logits = max(_apart(a[row], b[row]) for a, b in zip(logits, other_logits, strict=True))
    allowed = ROUNDING * torch.finfo(target.dtype).eps if target.experts else 0.0
    proof.states += in_states > allowed
    proof.logits += in_logits > allowed
    proof.rounded += 0 < max(in_states, in_logits) <= allowed
    following = [nodes[row, :1].tolist() for nodes, _ in acts.rounds[1:]] + [[0]]
    astray = 0.0
    for text, token, found in zip(acts.texts(row), following, logits[1:], strict=True):
        whole, _ = target(torch.tensor([text + token], device=target.device), None)
        plain = whole[0, -1].float()
        difference = ((found[row].float() - plain).abs().max() / (plain.max() - plain.min())).item()
        astray = max(astray, difference if difference == difference else float("inf"))  # NaN is astray too
    proof.largest = max(proof.largest, astray)
    proof.astray += astray > TOLERANCE.get(target.dtype, HALF)


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference as a share of the largest number; 0: the same bits, infinite: NaN or other sizes."""
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    share = ((a.float() - b.float()).abs().max() / a.float().abs().max()).item()
    return share if share == share else float("inf")
