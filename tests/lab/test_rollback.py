"""What rejected drafts leave behind: nothing in our caches; the proof finds it in broken ones."""

import pytest
import torch
from helpers import tiny_target
from hybrids import hybrid_target

from specdec.lab.proof.proof import Proof, verdict_line
from specdec.lab.proof.rollback import prove_rollback
from specdec.model.cache import KVCache
from specdec.model.recurrent import BUDGET, RecurrentCache

PROMPTS = [[3, 5, 7], [1], [(7 * i) % 17 for i in range(11)]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return hybrid_target(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text")


def test_nothing_stays_of_rejected_drafts(hybrid):
    for target, budgets in ((tiny_target(), [BUDGET]), (hybrid, [BUDGET, 0])):
        for target.state_budget in budgets:
            proof = prove_rollback(target, PROMPTS)
            assert (proof.cases, proof.bugs, proof.rounded) == (12, 0, 0)
            assert 0 < proof.largest < 1e-4


def test_experts_round_by_what_is_beside_them(tmp_path):
    proof = prove_rollback(hybrid_target(tmp_path, "qwen3_next"), PROMPTS, together=False)
    assert proof.bugs == 0
    assert proof.rounded > 0


def keeps(name: str):
    """A state of this kind stays where the drafts have left it."""

    def broken(cache: RecurrentCache, n) -> None:
        window = cache.window
        commit(cache, n)
        cache.kept[f"{name} 0"].copy_(window.last[f"{name} 0"])

    return broken


def one_token_short(cache: RecurrentCache, n) -> None:
    """Of several accepted tokens the last does not reach the state. Nothing rejected stays."""
    drafted = cache.window.states is not None and len(cache.window.states) > 1
    commit(cache, torch.where((n > 1) & drafted, n - 1, n))


commit = RecurrentCache.commit


@pytest.mark.parametrize("broken", [keeps("recurrent"), keeps("convolution"), one_token_short])
def test_broken_states_are_found(broken, hybrid, monkeypatch):
    hybrid.state_budget = BUDGET
    monkeypatch.setattr(RecurrentCache, "commit", broken)
    proof = prove_rollback(hybrid, PROMPTS)
    assert proof.astray > 0
    assert (proof.states == proof.logits == 12) == (broken is not one_token_short)
    assert "NOT LOSSLESS" in verdict_line(Proof(rollback=[("", proof)]))


def test_a_broken_cache_of_keys_is_found(monkeypatch):
    """One rejected draft too many is kept."""
    monkeypatch.setattr(KVCache, "commit", lambda cache, path, n, bound: cache.advance(n + 1, bound))
    assert prove_rollback(tiny_target(), PROMPTS).states > 0
