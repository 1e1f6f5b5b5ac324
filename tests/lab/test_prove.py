"""The proof of losslessness: it passes what is sound, and finds what is broken, in texts, laws and caches."""

import json
from functools import partialmethod
from unittest.mock import Mock

import pytest
import torch
from helpers import Credulous, main_of, tiny_target
from hybrids import hybrid_target
from scipy import stats

from specdec.engine.engine import Engine
from specdec.lab.proof import prove_command
from specdec.lab.proof.equality import EqualityProver, Mismatch
from specdec.lab.proof.laws import chi_square, exact_distance, prove_law, prove_sampled
from specdec.lab.proof.proof import OneInAThousand, Proof, prove, verdict_line
from specdec.lab.proof.rollback import prove_rollback
from specdec.model.cache import KVCache
from specdec.model.recurrent import BUDGET, RecurrentCache
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import SampleAndMatch, make_verifier

main = main_of("prove")

WARM, FILTERED = Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.9)
PROMPTS = [[3, 5, 7], [1], list(range(12))]
OTHERS = [[3, 5, 7], [1], [(7 * i) % 17 for i in range(11)]]


def test_chi_square_is_scipys():
    seen, expected = torch.tensor([12.0, 18, 30, 40]).double(), torch.full((4,), 25.0).double()
    assert chi_square(seen, expected) == pytest.approx(stats.chisquare(seen, expected).pvalue, rel=1e-10)
    assert chi_square(torch.tensor([99.0, 1]).double(), torch.tensor([100.0, 0]).double()) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["match", "rejection", "block", "sglang"])
def test_one_wrong_token_in_a_thousand_breaks_the_law(name):
    proof = prove_law(SampledTree((1, 1, 1)), OneInAThousand(make_verifier(name)), FILTERED, draws=100_000)
    assert proof.impossible > 0
    assert proof.pvalue == 0


def test_enumeration():
    assert exact_distance(SampleAndMatch(), WARM) < 1e-6
    assert exact_distance(SampleAndMatch(), FILTERED) < 1e-6
    assert exact_distance(Credulous(), WARM) > 0.05


@pytest.mark.parametrize("sampling", [Sampling(), WARM, FILTERED], ids=["greedy", "warm", "filtered"])
def test_texts_are_compared_token_for_token(pair, sampling):
    target, drafter = pair
    prover, tree = EqualityProver(target, PROMPTS, 24, sampling, seed=3), DynamicTree(3, 3, 9)
    proof = prover.prove(drafter, tree, SampleAndMatch())
    assert (proof.same, proof.texts, proof.bugs, proof.ties) == (3, 3, 0, 0)
    broken = prover.prove(drafter, tree, Credulous())
    assert broken.bugs == len(broken.mismatches) > 0
    first = broken.mismatches[0]
    assert prover.plain[first.prompt][first.position] == first.plain != first.speculative
    assert first.margin > 4 * first.error > 0


def test_what_is_a_tie():
    near = {"prompt": 0, "position": 3, "plain": 1, "speculative": 2, "error": 1e-6}
    for margin, leading in ((2e-6, True), (5e-6, True), (0.0, False)):
        assert Mismatch(margin=margin, leading=leading, **near).tie == (leading and margin < 4e-6)


def test_sampled_text_of_a_pair(pair):
    prompts, nucleus = [[i % 17, 3] for i in range(25)], Sampling(1.0, top_p=0.9)
    rules = SampleAndMatch(), Credulous()
    good, bad = (prove_sampled(Engine(*pair, Chain(3), rule), prompts, nucleus, 24) for rule in rules)
    assert (good.outside, good.tokens) == (0, 600)
    assert good.pvalue > 1e-4
    assert bad.pvalue < 1e-6


# State of rejected drafts


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return hybrid_target(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text")


def test_nothing_stays_of_rejected_drafts(hybrid):
    for target, budgets in ((tiny_target(), [BUDGET]), (hybrid, [BUDGET, 0])):
        for target.state_budget in budgets:
            proof = prove_rollback(target, OTHERS)
            assert (proof.cases, proof.bugs, proof.rounded) == (12, 0, 0)
            assert 0 < proof.largest < 1e-4


def test_experts_round_by_what_is_beside_them(tmp_path):
    proof = prove_rollback(hybrid_target(tmp_path, "qwen3_next"), OTHERS, together=False)
    assert proof.bugs == 0
    assert proof.rounded > 0


def keep_of_drafts(cache: RecurrentCache, n, name: str) -> None:
    """A state of this kind stays where the drafts have left it."""
    window = cache.window
    commit(cache, n)
    cache.tensors[f"{name} 0"].copy_(window.last[f"{name} 0"])


def one_token_short(cache: RecurrentCache, n) -> None:
    """Of several accepted tokens the last does not reach the state. Nothing rejected stays."""
    drafted = cache.window.states is not None and len(cache.window.states) > 1
    commit(cache, torch.where((n > 1) & drafted, n - 1, n))


commit = RecurrentCache.commit


@pytest.mark.parametrize("kept", ["recurrent", "convolution", None])
def test_broken_states_are_found(kept, hybrid, monkeypatch):
    hybrid.state_budget = BUDGET
    broken = partialmethod(keep_of_drafts, name=kept) if kept else one_token_short
    monkeypatch.setattr(RecurrentCache, "commit", broken)
    proof = prove_rollback(hybrid, OTHERS)
    assert proof.astray > 0
    assert (proof.states == proof.logits == 12) == (kept is not None)
    assert "NOT LOSSLESS" in verdict_line(Proof(rollback=[({}, proof)]))


def test_a_broken_cache_of_keys_is_found(monkeypatch):
    """One rejected draft too many is committed."""
    monkeypatch.setattr(KVCache, "commit", lambda cache, path, n, bound: cache.advance(n + 1, bound))
    assert prove_rollback(tiny_target(), OTHERS).states > 0


OWN = """
from specdec.verify import MultiRoundRejection, SampleAndMatch
class Same(SampleAndMatch):
    pass
class Hot(SampleAndMatch):
    def __call__(self, tree, logits, *others):
        return super().__call__(tree, logits / 2, *others)
class Drawn(MultiRoundRejection):
    pass
"""


@pytest.mark.parametrize(("name", "sound"), [("Same", True), ("Hot", False), ("Drawn", True)])
def test_a_rule_of_the_users_own(pair, tmp_path, name, sound):
    target, drafter = pair
    (tmp_path / "my.py").write_text(OWN)
    rule, how = f"{tmp_path}/my.py:{name}", {"max_new_tokens": 8, "draws": 2000}
    proof = prove(target, {"mine": drafter}, PROMPTS, verifier=rule, **how)
    assert proof.sound == sound
    assert {labels["rule"] for labels, _ in proof.laws} == {rule}
    assert bool(proof.equal) == (name != "Drawn")  # its texts are others with the same seed
    if name != "Drawn":
        proof = prove(target, {"mine": drafter}, PROMPTS, verifier=rule, tree=Chain(2), **how)
        assert {labels["tree"] for labels, _ in (*proof.equal, *proof.laws, *proof.sampled)} == {"chain 1/2/3"}
    else:
        with pytest.raises(ValueError, match="Drawn does not take the tree 1/2/3"):
            prove(target, {"mine": drafter}, PROMPTS, verifier=rule, tree=Chain(2), **how)


# The command


def test_the_command(capsys, tmp_path, target_path, drafter_path, monkeypatch):
    how = ["--target", str(target_path), "--draft", str(drafter_path), "--max-new-tokens", "8", "--limit", "2"]
    main([*how, "--draws", "1000", "--json", "--out", str(tmp_path / "proof.md")])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["sound"]
    assert {case["rule"] for case in printed["laws"]} == {"match", "rejection", "block", "sglang"}
    assert "No bug found" in (tmp_path / "proof.md").read_text()
    main([*how, "--draws", "4000", "--self-test"])  # ends well if the broken rules were found out
    assert "NOT LOSSLESS" in capsys.readouterr().out
    monkeypatch.setattr(prove_command, "Markdown", Mock(side_effect=BrokenPipeError))
    with pytest.raises(SystemExit, match="0"):
        main([*how, "--draws", "1000", "--out", str(tmp_path / "third.md")])
    assert "No bug found" in (tmp_path / "third.md").read_text(), "written although nobody reads what is shown"
    monkeypatch.undo()
    monkeypatch.setattr(prove_command, "write_text", Mock(side_effect=ValueError("cannot write")))
    with pytest.raises(SystemExit, match="2"):
        main([*how, "--draws", "1000", "--out", str(tmp_path / "other.md")])
    assert "No bug found" in capsys.readouterr().out  # shown although it cannot be written
