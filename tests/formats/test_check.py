"""`checkpoint check` distinguishes correct from wrong declarations of a checkpoint, on small trained heads."""

import json
import math
import random
import re
from math import comb
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import DRAFTERS, LEARNERS, main_of, run_here, save_hf, tiny_block, tiny_drafter, tiny_target
from published import edited, permuted, written
from safetensors.torch import load_file
from transformers import AutoTokenizer

import specdec
from specdec.cli import checkpoint as command
from specdec.drafters import eagle3
from specdec.drafters.formats import check, load_drafter, open_checkpoint, save_drafter, verdict
from specdec.drafters.formats.eagle3 import PROJECTIONS
from specdec.drafters.formats.evidence import Followed, search_taps
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.structs import Sampling
from specdec.text import encode_prompt
from specdec.trees import Chain

EAGLE3 = specdec.DEMO_TARGET.parent / "eagle3"
PROMPTS = ["The fox", "What", "42", "Ein Café", "over", "It is", "lazy dog", "quick"]
ANSWER = 28  # tokens
KINDS = {"EAGLE-3": {}, "EAGLE-3.1": {"tap_norms": True, "feedback": "post"}}


@pytest.fixture(scope="module")
def target(target_path, tmp_path_factory):
    """A random target of eight layers that answers at length."""
    folder, tokenizer = tmp_path_factory.mktemp("pair") / "target", AutoTokenizer.from_pretrained(target_path)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 36, "num_hidden_layers": 8}
    save_hf(folder, "llama", **sizes, eos_token_id=None, head=15.0)
    tokenizer.save_pretrained(folder)
    return load_target(folder)


@pytest.fixture(scope="module")
def answers(target):
    """Greedy answers, as the command takes them, and sampled ones to half of the prompts, which repeat less."""
    prompts = [encode_prompt(target, prompt, True) for prompt in PROMPTS[4:]]
    hot = Engine(target).generate(prompts, max_new_tokens=ANSWER, sampling=Sampling(temperature=2.0), seed=1).rows
    sampled = [check.Answer(torch.tensor(row.prompt + row.tokens), len(row.prompt)) for row in hot]
    return [*check.answer(target, PROMPTS, ANSWER, raw=True), *sampled]


@pytest.fixture(scope="module")
def heads(target, answers, tmp_path_factory):
    """heads(kind) -> a head that has learnt the target's answers by heart: its folder, and how it does as declared."""
    made = {}

    def head(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("head") / "it"
            save_drafter(learn(target, answers, **KINDS[kind]), folder, target)
            report = check.compare(target, open_checkpoint(folder), answers, steps=5)
            made[kind] = SimpleNamespace(folder=folder, report=report, tau=report.declared.tau)
        return made[kind]

    return head


def learn(target, answers, **forward):
    torch.manual_seed(0)
    tokens = torch.nn.utils.rnn.pad_sequence([answer.tokens for answer in answers], batch_first=True)
    some = DraftVocab(target.vocab, torch.cat([torch.arange(50), tokens.flatten()]).unique())
    drafter = eagle3.create(target, vocab=some, taps=(2, 5, 8), intermediate_size=128, **forward)
    # The norms differ, as those of heads that were trained for long.
    for norm, gain in (drafter.embed_norm, 3.0), (drafter.hidden_norm, 0.3), (drafter.norm, torch.rand(36) * 2 + 0.2):
        norm.requires_grad_(False).weight.copy_(torch.as_tensor(gain))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    with torch.no_grad():
        feats = target(tokens[:, :-1], None, taps=drafter.taps, logits=False)[1]
    for _ in range(90):
        loss = 0.0
        for j, state in enumerate(drafter.unroll(feats, tokens[:, 1:], 5)):
            true = drafter.vocab.from_target(tokens[:, 2 + j :])
            loss = loss + F.cross_entropy(state.logits[:, : true.shape[1]].flatten(0, 1), true.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture
def falsified(tmp_path):
    """falsified(folder, change of tensors, config fields) -> the drafter's folder with wrong fields.

    A field of None is left out."""

    def make(folder, tensors=None, **fields):
        config = json.loads((folder / "config.json").read_text()) | fields
        found = load_file(folder / "model.safetensors")
        if tensors:
            tensors(found)
        stated = {name: value for name, value in config.items() if fields.get(name, value) is not None}
        return written(tmp_path, stated, found)

    return make


def swap_halves(tensors):
    for name in PROJECTIONS:
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1).contiguous()


def exchange_norms(tensors):
    a, b = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


absolute_ids = edited("d2t", lambda d2t: d2t + torch.arange(len(d2t)))
HARMFUL = {
    "concat order": ({}, swap_halves, "layer input [hidden, embedding]"),
    "norm_before_residual": ({"norm_before_residual": True}, None, "norm_before_residual False"),
}
DO_NOT_LOAD = ("absolute ids", "offsets permuted", "no rope")
# An EAGLE-3.1 head has a norm for each tap: neighbouring taps leave its tau within chance of what it was.
LIES = {
    "EAGLE-3": HARMFUL | {
        "no rope": ({"rope_theta": 0}, None, "the target's rope, theta 10000"),
        "exchanged norms": ({}, exchange_norms, "norms of embedding and hidden exchanged"),
        "absolute ids": ({}, absolute_ids, "d2t as target ids"),
        "offsets permuted": ({}, permuted(True), "the offsets of d2t in ascending order"),
        "tokens permuted": ({}, permuted(False), "the tokens of d2t in ascending order"),
        "streams in another order": (
            {}, edited("fc.weight", lambda fc: fc.roll(fc.shape[1] // 3, 1)), "taps [8, 2, 5]"
        ),
        "taps dropped": ({"taps": None}, None, "taps [2, 5, 8]"),
        "taps one too low": ({"taps": [1, 4, 7]}, None, "taps +1, [2, 5, 8]: outputs of the layers listed"),
        "the list read as inputs": (
            {"taps": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, None,
            "taps +1, [2, 5, 8]: outputs of the layers listed",
        ),
        "post-norm feedback": (
            {"norm_output": True, "norm_output_means": "feedback"}, None, "feedback before the final norm"
        ),
        "two lies": (
            {"taps": None, "norm_before_residual": True}, None, "taps [2, 5, 8]; norm_before_residual False"
        ),
    },
    "EAGLE-3.1": HARMFUL | {
        "a rope that it was not trained with": ({"rope_theta": 100.0}, None, "the target's rope, theta 10000"),
        "a normed state fed back as it is": ({"norm_output": False}, None, "feedback after the final norm"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "lie"), [(kind, lie) for kind in LIES for lie in LIES[kind]])
def test_a_mis_declared_checkpoint_is_caught(target, answers, heads, falsified, kind, lie):
    (fields, change, expected), truth = LIES[kind][lie], heads(kind)
    report = check.compare(target, open_checkpoint(falsified(truth.folder, change, **fields)), answers, steps=5)
    assert sorted(report.better_reading.split("; ")) == sorted(expected.split("; "))
    assert report.chosen[-1].tau == truth.tau
    assert report.declared.refused if lie in DO_NOT_LOAD else report.declared.tau < truth.tau
    if "taps [" in expected:  # all triples were tried, and once they are found they are not searched again
        assert max(report.searched) >= comb(9, 3)
        assert report.searched[-1] == 0 or lie == "two lies"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_declared_as_it_was_trained_is_left_alone(heads, kind):
    truth = heads(kind)
    assert truth.report.better_reading is None
    assert truth.tau > 2
    assert {o.refused for o in truth.report.rounds[0]} == {None}


def test_what_answers_do_not_tell_apart_is_said(target, answers, heads):
    report = check.compare(target, open_checkpoint(heads("EAGLE-3.1").folder), answers[:1], steps=5)
    noise = [o.name for o in report.rounds[-1] if o.verdict == "noise"]
    said = verdict.verdict(report)
    assert noise
    assert "No significant difference from it" in said
    assert all(f"'{name}'" in said for name in noise)


def test_a_head_that_drafts_nothing_is_not_called_sound(target, answers, heads, falsified):
    folder = falsified(heads("EAGLE-3").folder, edited("lm_head.weight", lambda head: head.roll(7, 0)))
    report = check.compare(target, open_checkpoint(folder), answers, steps=5)
    assert report.better_reading is None
    assert "drafts next to nothing" in verdict.verdict(report)


def test_tau_is_that_of_decoding_with_a_chain(target, answers, heads):
    folder = heads("EAGLE-3").folder
    outcome = check.compare(target, open_checkpoint(folder), answers[: len(PROMPTS)], steps=4).declared
    engine = Engine(target, load_drafter(folder, target), Chain(4))
    prompts = [encode_prompt(target, prompt, True) for prompt in PROMPTS]
    rows = [engine.generate([prompt], max_new_tokens=ANSWER).rows[0] for prompt in prompts]
    assert outcome.tau == sum(sum(row.trace.emitted) for row in rows) / sum(row.trace.rounds for row in rows)


def test_intervals_are_over_answers():
    rounds = torch.tensor([[10, 20], [10, 20], [10, 20]], dtype=torch.float64)
    assert check.tau_of(rounds) == (2.0, (2.0, 2.0))
    tau, (low, high) = check.tau_of(torch.tensor([[10, 10], [10, 30]] * 8, dtype=torch.float64))
    assert tau == 2.0
    assert 1.4 < low < 1.7
    assert 2.3 < high < 2.6
    assert check.tau_of(rounds[:1]) == (2.0, None)


def test_one_position_is_no_verdict():
    pair = (
        check.Outcome(check.Reading("", None, {}), None, Followed([], torch.full((1, 5), x)), (), 2) for x in (0, 1)
    )
    start, other = pair
    check.judge(other, start, tests=1)
    assert (other.verdict, other.gain) == (start.verdict, start.gain)


@pytest.mark.parametrize(
    ("gain", "tau", "expected"),
    [(0.1, 2.1, "better"), (0.1, 2.0, "likelier"), (-0.1, 2.1, "worse"), (0.001, 2.1, "noise")],
)
def test_a_reading_is_better_if_it_drafts_further_beyond_chance(gain, tau, expected):
    noise = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)) * 0.1
    start, other = (
        check.Outcome(check.Reading("", None, {}), None, Followed([], logp), (), of)
        for logp, of in ((torch.zeros(400, 5), 2.0), (gain + noise - noise.mean(), tau))
    )
    check.judge(other, start, tests=100)
    assert other.verdict == expected
    assert other.gain == pytest.approx(gain, abs=1e-6)
    assert other.margin == pytest.approx(1.96 * (noise.sum(1).std() / 400**0.5 * 5**0.5 / 5).item(), rel=1e-3)


@pytest.mark.parametrize("kind", [*LEARNERS, "dflash", "peagle"])
def test_every_family_has_readings_that_load(kind, tmp_path):
    target = tiny_target(layers=5, vocab=40)
    drafter = DRAFTERS[kind](target) if kind not in LEARNERS else tiny_drafter(target, kind=kind)
    save_drafter(drafter, tmp_path / "it", target)
    rows = Engine(target).generate([[1, 2, 3]], max_new_tokens=8).rows
    texts = [check.Answer(torch.tensor(row.prompt + row.tokens), 3) for row in rows]
    taus = {o.name: o.tau for o in check.compare(target, open_checkpoint(tmp_path / "it"), texts, steps=3).rounds[0]}
    assert len(taus) > 1
    assert min(taus.values()) >= 1
    if kind == "dflash":
        assert {"slot k predicts token p+k+1", "a slot sees no later one"} <= set(taus)
    assert kind != "peagle" or not any("feedback" in name for name in taus)  # it feeds nothing back
    report = command.description.inspect(tmp_path / "it")
    assert report["problems"] == []
    if kind in LEARNERS:  # of the others the file holds a head, or an embedding that counts by itself
        assert report["parameters"] == sum(p.numel() for p in drafter.parameters())


def test_a_token_that_a_selector_does_not_propose_is_no_error(tmp_path):
    target = tiny_target(layers=5, vocab=16)
    save_drafter(tiny_block(target, conditional="selector", head={"candidates": 2}), tmp_path, target)
    rows = Engine(target).generate([[1, 2, 3]], max_new_tokens=8).rows
    texts = [check.Answer(torch.tensor(row.prompt + row.tokens), 3) for row in rows]
    report = check.compare(target, open_checkpoint(tmp_path), texts, steps=3)
    assert "NaN" not in verdict.verdict(report)
    assert None not in [outcome.gain for outcome in report.rounds[0][1:]]


# The search over taps finds the best ones of all without trying all, on scores as hidden states give them


def landscape(true, noise):
    """Score by the distance of each tap to the true one of its stream, the last stream counting most; noise falls from
    stage to stage, as there is more text."""

    def score(taps, stage):
        shaken = random.Random(hash((taps, stage))).gauss(0, noise / 4**stage)
        return shaken - sum((i + 1) * math.log1p(abs(a - b)) for i, (a, b) in enumerate(zip(taps, true, strict=True)))

    return score


@pytest.mark.parametrize(
    ("states", "true"),
    [(9, (2, 5, 8)), (33, (2, 16, 29)), (33, (29, 2, 16)), (81, (1, 40, 79)), (37, (2, 10, 18, 26, 34)), (81, (79,))],
)
def test_the_true_taps_are_found(states, true):
    for noise in (0.0, 0.2):
        found, tried = search_taps(landscape(true, noise), states, len(true))
        assert found[0] == true
        assert tried < 4000  # of 504 for the first, and up to 52 million


def test_what_is_plausible_is_tried_even_if_the_grid_leaves_it_out():
    only = (7, 31, 76)  # a needle: nothing around it says where it is
    assert search_taps(lambda taps, stage: float(taps == only), 81, 3, [only])[0][0] == only


# The command


def run(*words, code=0):
    """Standard output, with single spaces, and standard error of a command that ends with this code."""
    done = run_here(main_of("checkpoint"), *map(str, words))
    assert done.returncode == code, done.stderr
    return " ".join(done.stdout.split()), done.stderr


def test_inspect_tells_conventions_problems_and_parameters(falsified, heads):
    report = json.loads(run("inspect", EAGLE3, "--json")[0])
    assert report["taps"] == "hidden_states[2], hidden_states[5], hidden_states[8]"
    assert report["rope"] == "theta 10000"
    assert report["vocabulary"] == "all 8192 target tokens, no map"
    assert report["dtypes"] == "bfloat16, int8"
    held = {name: t for name, t in load_file(EAGLE3 / "model.safetensors").items() if not name.endswith("_scale")}
    assert f"{sum(tensor.numel() for tensor in held.values()) / 1e6:.2f} M" in run("inspect", EAGLE3)[0]
    folder = heads("EAGLE-3").folder
    report = json.loads(run("inspect", folder, "--json")[0])
    assert re.match(r"\d+ of \d+ target tokens \(\d+\.\d%\); d2t holds offsets", report["vocabulary"])

    def spoil(tensors):
        tensors.pop("norm.weight")
        tensors["extra"] = torch.ones(1)
        absolute_ids(tensors)

    out, _ = run("inspect", falsified(folder, spoil))
    assert "norm.weight is missing; extra is left over" in out
    assert "BROKEN" in out


@pytest.fixture
def arguments(target, tmp_path_factory):
    """Those of `check` but for the drafter."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return ["check", "--target", target.name, "--prompts", prompts, "--raw", "--max-new-tokens", ANSWER, "--draft"]


def test_check_prints_a_verdict(falsified, heads, arguments, tmp_path):
    folder = heads("EAGLE-3").folder
    out, _ = run(*arguments, falsified(folder, norm_before_residual=True))
    assert "Another reading does better: 'norm_before_residual False'" in out
    assert "95 % interval" in out
    assert "'noise' is a gain that chance explains" in out
    found = json.loads(run(*arguments, folder, "--json")[0])
    assert found["better_reading"] is None
    spreads = [(*r["tau_interval"], r["tau"]) for r in found["readings"] if r["tau_interval"] is not None]
    assert all(low <= tau <= high for low, high, tau in spreads)
    assert any(low < tau < high for low, high, tau in spreads)  # a head that knows all answers has the same tau in each
    assert run(*arguments, tmp_path / "nowhere", code=2)[1].count("\n") == 1
    lists = "specdec checkpoint check --help lists all"
    for flag, hint in (("--qqq", lists), ("--stepz", "there is --steps and --help")):
        assert run(*arguments, "x", flag, 3, code=2) == ("", f"error: there is no flag {flag}; {hint}\n")


def test_check_ends_with_2_if_the_draft_does_not_load(falsified, heads, arguments):
    folder = heads("EAGLE-3").folder
    out, _ = run(*arguments, falsified(folder, rope_theta=0), code=2)  # another reading helps
    assert "as declared the drafter does not load" in out
    _, err = run(*arguments, falsified(folder, lambda t: t.pop("norm.weight")), code=2)  # none does
    assert "lacks the tensor norm.weight" in err
    spoilt = falsified(folder, lambda t: t["fc.weight"].fill_(float("nan")))
    assert re.search(r"fc\.weight holds (\d+) NaN among \1 values", run(*arguments, spoilt, code=2)[1])
    assert "computes NaN or Inf" in run(*arguments, spoilt, "--allow-nonfinite")[0]


def test_convert_and_export(falsified, heads, tmp_path_factory):
    there = tmp_path_factory.mktemp("converted")
    source = specdec.DEMO_TARGET.parent / "eagle2"
    assert "-> speculators" in run("convert", "--to", "speculators", source, there / "speculators")[0]
    to_speculators = "convert", "--to", "speculators", EAGLE3, there / "x"
    for more, message in ((), "give --target"), (("--target", specdec.DEMO_TARGET), "state 8, after the final norm"):
        assert message in run(*to_speculators, *more, code=2)[1]
    out, _ = run("export", "--for", "vllm", "--target", specdec.DEMO_TARGET, EAGLE3, there / "x")
    assert "note: the last tap is read before the target's final norm" in out
    assert f"try it: vllm serve {specdec.DEMO_TARGET} --speculative-config " in out
    folder = falsified(heads("EAGLE-3").folder, norm_output=True, norm_output_means=None, taps=None)
    _, err = run("convert", "--to", "modelopt", folder, there / "modelopt")
    assert err.startswith("warning: ")
    assert "norm_output is read as SpecForge's" in err
