"""The proof of losslessness: it passes what is sound, and finds what is broken."""

import json

import pytest
import torch
from helpers import Credulous, tiny_drafter, tiny_target
from scipy import stats

from specdec.lab.proof.equality import EqualityProver, Mismatch
from specdec.lab.proof.laws import chi_square, exact_distance, prove_law, prove_sampled
from specdec.lab.proof.proof import OneInAThousand
from specdec.lab.proof.prove import main
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import SampleAndMatch, make_verifier

WARM, FILTERED = Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.9)
PROMPTS = [[3, 5, 7], [1], list(range(12))]


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


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_drafter(target)


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
    good, bad = (prove_sampled(*pair, Chain(3), rule, prompts, nucleus, 24) for rule in (SampleAndMatch(), Credulous()))
    assert (good.outside, good.tokens) == (0, 600)
    assert good.pvalue > 1e-4
    assert bad.pvalue < 1e-6


def test_the_command(capsys, tmp_path, target_path, drafter_path):
    how = ["--target", str(target_path), "--draft", str(drafter_path), "--max-new-tokens", "8", "--limit", "2"]
    main([*how, "--draws", "2000", "--json", "--out", str(tmp_path / "proof.md")])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["sound"]
    assert {case["rule"] for case in told["laws"]} == {"match", "rejection", "block", "sglang"}
    assert "No bug found" in (tmp_path / "proof.md").read_text()
    main([*how, "--draws", "10000", "--self-test"])  # ends well if the broken rules were found out
    assert "NOT LOSSLESS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draws", "0"], "--draws must be at least 1"),
        (["--target", "somewhere"], "needs its drafters"),
        (["--out", "nowhere/page.md"], "there is no folder nowhere"),
        (["--prompt-file", "none.txt"], "no such prompt file"),
    ],
)
def test_mistakes_are_one_sentence(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
