"""The command names the verifier and says whether it is lossless, and refuses what does not fit in one sentence."""

import json
from dataclasses import dataclass

import pytest
import test_generate

from specdec import registry
from specdec.verify import VERIFIERS, Rule, TypicalAcceptance, in_words, make_verifier

run = test_generate.run  # the fixture
PROMPT = ("--prompt", "The quick", "--max-new-tokens", 12)
SGLANG = "--verifier sglang --verifier-args"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "name", "lossless"),
    [
        ("", "SampleAndMatch()", True),
        ("--verifier rejection --sample-draft --topk 3", "MultiRoundRejection()", True),
        ("--verifier block --sample-draft --topk 1", "BlockVerification()", True),
        ("--verifier sglang", "TwoThresholds(threshold_single=1.0, threshold_acc=1.0)", True),
        (
            f"{SGLANG} threshold_single=.5,threshold_acc=.7",
            "TwoThresholds(threshold_single=0.5, threshold_acc=0.7)",
            False,
        ),
        ("--verifier typical", "TypicalAcceptance(epsilon=0.09, alpha=0.3)", False),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_rule_is_named(run, flags, name, lossless, temperature):
    code, out, err = run(*PROMPT, *flags.split(), "--temperature", temperature, "--compare", "--json")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["verifier"], result["lossless"]) == (name, lossless)
    assert result["identical"] is (True if temperature == 0 or name == "SampleAndMatch()" else None)


def test_a_lossy_rule_says_so_and_plain_decoding_has_none(run):
    _, out, _ = run(*PROMPT, "--verifier", "typical", "--temperature", 1, "--compare")
    assert "verifier: typical (epsilon 0.09, alpha 0.3), LOSSY" in out
    assert "identical: not asked, both are draws from two distributions, for the verifier is lossy" in out
    _, out, _ = run(*PROMPT, "--no-draft", "--json", draft=None)
    result = json.loads(out.splitlines()[-1])
    assert (result["verifier"], result["lossless"]) == (None, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--verifier rejection", "this tree does not draw them: give --sample-draft"),
        ("--verifier block --sample-draft", "verifies chains only"),
        ("--verifier best", f"there is no verifier 'best': choose one of {', '.join(VERIFIERS)}"),
        (f"{SGLANG} epsilon=1", "and no 'epsilon'"),
        ("--verifier-args epsilon=1", "'match' has no settings, and no 'epsilon'"),
        (f"{SGLANG} threshold_acc", "takes name=number"),
        (f"{SGLANG} threshold_acc=0", "threshold_acc must be above 0, got 0.0"),
        (f"{SGLANG} threshold_single=1.5", "threshold_single must be at most 1, got 1.5"),
        ("--verifier typical --verifier-args epsilon=nan", "epsilon must be a number above 0 and at most 1, got nan"),
        ("--sample-draft --num-draft-tokens 9", "4 chains of topk * steps + 1 = 21 tokens, not 9"),
        ("--sample-draft --steps 0", "--steps must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(run, flags, says):
    code, _, err = run(*PROMPT, *flags.split())
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_a_new_rule_is_found_by_its_yaml(monkeypatch, tmp_path):
    assert {name: make_verifier(name) for name in VERIFIERS} == {name: rule() for name, rule in VERIFIERS.items()}
    assert make_verifier().lossless
    (tmp_path / "verifier").mkdir()
    rule = "_target_: specdec.verify.rules.TypicalAcceptance\nepsilon: 0.5\n"
    (tmp_path / "verifier" / "lenient.yaml").write_text(rule)
    monkeypatch.setattr(registry, "CONF", tmp_path)
    assert make_verifier("lenient") == TypicalAcceptance(epsilon=0.5)
    assert make_verifier("lenient", epsilon=0.2, alpha=1.0) == TypicalAcceptance(0.2, 1.0)
    with pytest.raises(ValueError, match="there is no verifier 'match': choose one of lenient"):
        make_verifier("match")


def test_settings_of_ones_own_rule_that_are_no_numbers_are_said():
    @dataclass(frozen=True)
    class Mine(Rule):
        mode: str = "plain"
        share: float = 0.25

    assert in_words(Mine()) == "Mine (mode plain, share 0.25)"
