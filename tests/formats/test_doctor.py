"""The doctor tells a checkpoint that is declared wrongly from one that is not, on the demo pair, which was trained."""

import json
import re
from math import comb
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import LEARNERS, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

import specdec
from specdec.drafters import eagle3
from specdec.drafters.formats import __main__ as command
from specdec.drafters.formats import check, open_checkpoint, save_drafter, verdict
from specdec.drafters.formats.eagle3 import PROJECTIONS
from specdec.drafters.formats.evidence import Followed
from specdec.drafters.formats.prompts import PROMPTS
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.text import encode_prompt
from specdec.trees import Chain

EAGLE3 = specdec.DEMO_TARGET.parent / "eagle3"


@pytest.fixture(scope="module")
def demo():
    """The demo target and its own answers, on which all readings are compared."""
    target = specdec.load_target(specdec.DEMO_TARGET)
    answers = check.answer(target, PROMPTS[:4], 32)
    report = check.compare(target, open_checkpoint(EAGLE3), answers, steps=5)
    folder, tau = EAGLE3, report.declared.tau
    return SimpleNamespace(target=target, answers=answers, folder=folder, report=report, tau=tau)


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    """A head of the EAGLE repository's kind, which has learnt the demo target's answers by heart."""
    folder = tmp_path_factory.mktemp("plain") / "eagle3"
    save_drafter(learn(demo.target, demo.answers, rounds=70), folder, demo.target)
    report = check.compare(demo.target, open_checkpoint(folder), demo.answers, steps=5)
    return SimpleNamespace(**vars(demo) | {"folder": folder, "report": report, "tau": report.declared.tau})


def learn(target, answers, rounds):
    torch.manual_seed(0)
    said = torch.cat([torch.arange(500), *(answer.tokens for answer in answers)]).unique()
    vocab = DraftVocab(target.config.vocab, said)
    drafter = eagle3.create(target, vocab=vocab, taps=(2, 5, 8), intermediate_size=256)
    for norm, gain in ((drafter.embed_norm, 3.0), (drafter.hidden_norm, 0.3)):
        norm.requires_grad_(False).weight.fill_(gain)  # as those of heads that have learnt for long, they are not alike
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    with torch.no_grad():
        known = [(a.tokens, target(a.tokens[None, :-1], None, taps=drafter.taps, logits=False)[1]) for a in answers]
    for tokens, feats in known * rounds:
        following, loss = tokens[1:], 0.0
        for j, state in enumerate(drafter.unroll(feats, following[None], 5)):
            true = drafter.vocab.from_target(following[1 + j :])
            loss = loss + F.cross_entropy(state.logits[0, : len(true)], true)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture
def falsified(tmp_path):
    """falsified(change of tensors, folder, config fields) -> the drafter's folder with lies in it.

    A field of None is left out."""

    def make(tensors=None, folder=EAGLE3, **fields):
        config = json.loads((folder / "config.json").read_text())
        found = load_file(folder / "model.safetensors")
        if tensors:
            tensors(found)
        lies = {name: value for name, value in (config | fields).items() if value is not None or name not in fields}
        (tmp_path / "config.json").write_text(json.dumps(lies))
        save_file(found, tmp_path / "model.safetensors")
        return tmp_path

    return make


def best(demo, folder):
    report = check.compare(demo.target, open_checkpoint(folder), demo.answers, steps=5)
    return report.better_reading, report


def swap_halves(tensors):
    for name in PROJECTIONS:
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1).contiguous()


def exchange_norms(tensors):
    a, b = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def absolute_ids(tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def permute(offsets):
    def change(tensors):
        d2t, places = tensors["d2t"], torch.arange(len(tensors["d2t"]))
        order = torch.randperm(len(d2t), generator=torch.Generator().manual_seed(0))
        tensors["d2t"] = d2t[order] if offsets else (d2t + places)[order] - places

    return change


HARMFUL = {
    "concat order": ({}, swap_halves, "layer input [hidden, embedding]"),
    "no rope": ({"rope_theta": 0}, None, "the target's rope, theta 10000"),
}
DO_NOT_LOAD = ("absolute ids", "offsets permuted", "no rope")
# Of an EAGLE-3.1 head, whose taps have norms of their own and which feeds back a normed state, other lies do no harm:
# neighbouring taps, norm_before_residual and exchanged norms leave tau within chance of what it was (docs/log.md).
LIES = {
    "demo": HARMFUL | {
        "a rope that it was not trained with": ({"rope_theta": 100.0}, None, "the target's rope, theta 10000"),
    },
    "plain": HARMFUL | {  # its draft vocabulary is a part of the target's
        "absolute ids": ({}, absolute_ids, "d2t as target ids"),
        "offsets permuted": ({}, permute(True), "the offsets of d2t in ascending order"),
        "tokens permuted": ({}, permute(False), "the tokens of d2t in ascending order"),
        "taps dropped": ({"taps": None}, None, "taps [2, 5, 8]"),
        "taps one too low": ({"taps": [1, 4, 7]}, None, "taps +1, [2, 5, 8]"),
        "the list read as inputs": (
            {"taps": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, None, "taps +1, [2, 5, 8]"
        ),
        "post-norm feedback": (
            {"norm_output": True, "norm_output_means": "feedback"}, None, "feedback before the final norm"
        ),
        "norm_before_residual": ({"norm_before_residual": True}, None, "norm_before_residual False"),
        "exchanged norms": ({}, exchange_norms, "norms of embedding and hidden exchanged"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("head", "lie"), [(head, lie) for head in LIES for lie in LIES[head]])
def test_a_mis_declared_checkpoint_is_caught(request, falsified, head, lie):
    (fields, change, expected), truth = LIES[head][lie], request.getfixturevalue(head)
    reading, report = best(truth, falsified(change, truth.folder, **fields))
    assert reading is not None
    assert reading.startswith(expected)
    assert report.chosen[0].tau == truth.tau
    assert len(report.chosen) == 1
    assert report.declared.refused if lie in DO_NOT_LOAD else report.declared.tau < truth.tau


def test_a_state_fed_back_as_it_is_but_trained_normed_is_caught(demo, falsified):
    """Two readings normalise the state again: after the layer, or where the residual starts."""
    reading, report = best(demo, falsified(norm_output=False))
    assert reading in ("norm_before_residual True", "feedback after the final norm")
    assert report.declared.tau < demo.tau


def test_the_true_taps_of_the_demo_head_are_found_among_all_triples(demo, falsified):
    """With other things declared wrongly too: without `norm_output` its state is fed back as it is."""
    answers = check.answer(demo.target, PROMPTS[:16], 64)
    folder = falsified(taps=None, norm_output=None)
    report = check.compare(demo.target, open_checkpoint(folder), answers, steps=5)
    assert report.better_reading == "feedback after the final norm; taps [2, 5, 8]"
    assert min(report.searched[:2]) >= comb(9, 3)
    assert report.searched[2] == 0
    taps = {o.name: o for o in report.rounds[1] if o.name.startswith("taps")}
    assert (
        taps["taps +1, [3, 5, 6]: outputs of the layers listed"].verdict == "better"
    )  # than the default, and yet wrong
    said = verdict.verdict(report)
    assert "Not told apart from it" in said
    assert all(f"'{o.name}'" in said for o in report.rounds[2] if o.verdict == "noise")


def test_several_streams_in_another_order_are_found(demo, falsified):
    def last_first(tensors):
        tensors["fc.weight"] = torch.cat(
            tensors["fc.weight"].chunk(3, dim=1)[-1:] + tensors["fc.weight"].chunk(3, dim=1)[:2], 1
        )
        norms = [tensors[f"fc_norm.{i}.weight"] for i in (2, 0, 1)]
        tensors |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}

    reading, report = best(demo, falsified(last_first))
    assert reading.startswith("taps [8, ")
    assert report.chosen[0].tau > 0.9 * demo.tau


def test_a_head_that_drafts_nothing_is_not_called_sound(plain, falsified):
    def scramble(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0)

    reading, report = best(plain, falsified(scramble, plain.folder))
    assert reading is None
    assert "drafts next to nothing" in verdict.verdict(report)


def test_intervals_are_over_answers():
    rounds = torch.tensor([[10, 20], [10, 20], [10, 20]], dtype=torch.float64)
    assert check.tau_of(rounds) == (2.0, (2.0, 2.0))
    tau, (low, high) = check.tau_of(torch.tensor([[10, 10], [10, 30]] * 8, dtype=torch.float64))
    assert tau == 2.0
    assert 1.4 < low < 1.7
    assert 2.3 < high < 2.6
    assert check.tau_of(rounds[:1]) == (2.0, None)


@pytest.mark.parametrize(
    ("gain", "taus", "expected"),
    [
        (0.1, (2.0, 2.1), "better"),
        (0.1, (2.0, 2.0), "likelier"),
        (-0.1, (2.0, 2.1), "worse"),
        (0.001, (2.0, 2.1), "noise"),
    ],
)
def test_a_reading_is_better_if_it_drafts_further_beyond_chance(gain, taus, expected):
    noise = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)) * 0.1
    start, other = (
        check.Outcome(check.Reading("", None, {}), None, Followed([], logp), (), tau)
        for logp, tau in zip((torch.zeros(400, 5), gain + noise - noise.mean()), taus, strict=True)
    )
    check.judge(other, start, tests=100)
    assert other.verdict == expected
    assert other.gain == pytest.approx(gain, abs=1e-6)
    assert other.margin == pytest.approx(1.96 * (noise.sum(1).std() / 400**0.5 * 5**0.5 / 5).item(), rel=1e-3)


@pytest.mark.parametrize("which", ["demo", "plain"])
def test_what_is_declared_as_it_was_trained_is_left_alone(request, which):
    truth = request.getfixturevalue(which)
    assert truth.report.better_reading is None
    assert truth.tau > 2
    assert {o.refused for o in truth.report.rounds[0]} == {None}


def test_tau_is_that_of_decoding_with_a_chain(demo):
    drafter = specdec.load_drafter(EAGLE3, demo.target)
    outcome = check.compare(demo.target, open_checkpoint(EAGLE3), demo.answers, steps=4).declared
    ids = [encode_prompt(demo.target, prompt, False) for prompt in PROMPTS[:4]]
    rows = [Engine(demo.target, drafter, Chain(4)).generate([i], max_new_tokens=32).rows[0] for i in ids]
    rounds = sum(row.trace.rounds for row in rows)
    assert outcome.tau == sum(sum(row.trace.emitted) for row in rows) / rounds


@pytest.mark.parametrize("kind", LEARNERS)
def test_every_family_has_readings_that_load(kind, tmp_path):
    target = tiny_target(layers=8, vocab=40)
    drafter = tiny_drafter(target, kind=kind)
    save_drafter(drafter, tmp_path / "it", target)
    rows = Engine(target).generate([[1, 2, 3]], max_new_tokens=12, sampling=Sampling()).rows
    answers = [check.Answer(torch.tensor(row.prompt + row.tokens), 3) for row in rows]
    outcomes = check.compare(target, open_checkpoint(tmp_path / "it"), answers, steps=3).rounds[0]
    assert len(outcomes) > 1
    assert all(outcome.tau >= 1 for outcome in outcomes)
    report = command.description.inspect(tmp_path / "it")
    assert report["problems"] == []
    assert report["parameters"] == sum(p.numel() for p in drafter.parameters())


# The command


@pytest.fixture
def run(capsys):
    """run(*arguments) -> exit code, standard output, standard error."""

    def call(*arguments):
        try:
            command.main([str(a) for a in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())

    return call


def test_inspect_tells_conventions_and_problems(run, falsified, plain):
    code, out, _ = run("inspect", EAGLE3, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["taps"] == "hidden_states[2], hidden_states[5], hidden_states[8]"
    assert report["rope"] == "theta 10000"
    assert report["vocabulary"] == "all 8192 target tokens, no map"
    report = json.loads(run("inspect", plain.folder, "--json")[1])
    assert re.match(r"\d+ of 8192 target tokens \(\d+\.\d%\); d2t holds offsets", report["vocabulary"])

    def spoil(tensors):
        tensors.pop("norm.weight")
        tensors["extra"] = torch.ones(1)
        absolute_ids(tensors)

    folder = falsified(spoil, plain.folder)
    code, out, _ = run("inspect", folder)
    assert code == 0
    assert "norm.weight is missing; extra is left over" in out
    assert "BROKEN" in out


def test_inspect_counts_parameters(run):
    code, out, _ = run("inspect", EAGLE3)
    assert code == 0
    held = load_file(EAGLE3 / "model.safetensors")
    assert f"{sum(tensor.numel() for tensor in held.values()) / 1e6:.2f} M" in out


def test_check_prints_a_verdict(run, falsified, plain, tmp_path):
    prompts = tmp_path.parent / "prompts.txt"
    prompts.write_text(PROMPTS[0] + "\n" + PROMPTS[2] + "\n")
    arguments = ["--target", specdec.DEMO_TARGET, "--prompt-file", prompts, "--max-new-tokens", 24]
    code, out, _ = run("check", "--draft", falsified(None, plain.folder, norm_before_residual=True), *arguments)
    assert code == 0
    assert "Another reading does better: 'norm_before_residual False'" in out
    assert "95 % interval" in out
    assert "'noise' is a gain that chance explains" in " ".join(out.split())
    code, out, _ = run("check", "--draft", EAGLE3, *arguments, "--json")
    found = json.loads(out)
    assert found["better_reading"] is None
    low, high = found["readings"][0]["tau_interval"]
    assert low < found["readings"][0]["tau"] < high
    code, _, err = run("check", "--draft", tmp_path / "nowhere", *arguments)
    assert code == 2
    assert err.count("\n") == 1


def test_a_flag_that_is_none_is_looked_for_among_those_of_the_sub_command(run):
    pair = ["--target", "x", "--draft", "y"]
    for flag, told in (("--qqq", "specdec doctor check --help lists all"), ("--stepz", "there is --steps and --help")):
        assert run("check", *pair, flag, 3) == (2, "", f"error: there is no flag {flag}; {told}\n")


def test_check_ends_with_2_if_the_draft_does_not_load(run, falsified, tmp_path):
    prompts = tmp_path.parent / "prompts.txt"
    prompts.write_text(PROMPTS[0] + "\n")
    arguments = ["--target", specdec.DEMO_TARGET, "--prompt-file", prompts, "--max-new-tokens", 8, "--draft"]
    code, out, _ = run("check", *arguments, falsified(rope_theta=0))  # another reading helps
    assert code == 2
    assert "as declared the drafter does not load" in " ".join(out.split())
    code, _, err = run("check", *arguments, falsified(lambda t: t.pop("norm.weight")))  # none does
    assert code == 2
    assert "lacks the tensor norm.weight" in err
    spoilt = falsified(lambda t: t["fc.weight"].fill_(float("nan")))
    code, _, err = run("check", *arguments, spoilt)
    assert code == 2
    assert re.search(r"fc\.weight holds (\d+) NaN among \1 values", err)
    code, out, _ = run("check", *arguments, spoilt, "--allow-nonfinite")
    assert code == 0
    assert "computes NaN or Inf" in out


def test_convert_and_export(run, falsified, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("converted")
    source = specdec.DEMO_TARGET.parent / "eagle2"
    code, out, _ = run("convert", "--to", "speculators", source, tmp_path / "there")
    assert code == 0
    assert "-> speculators" in out
    assert run("convert", "--to", "eagle", tmp_path / "there", tmp_path / "back")[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "back"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    to_speculators = "convert", "--to", "speculators", EAGLE3, tmp_path / "x"
    code, _, err = run(*to_speculators)
    assert code == 2
    assert "give --target" in err
    code, _, err = run(*to_speculators, "--target", specdec.DEMO_TARGET)
    assert code == 2
    assert "hidden state 8, after the final norm" in err
    code, out, _ = run("export", "--for", "vllm", "--target", specdec.DEMO_TARGET, EAGLE3, tmp_path / "x")
    assert code == 0
    assert "note: the last tap is read before the target's final norm" in out
    assert f"try it: vllm serve {specdec.DEMO_TARGET} --speculative-config " in out
    assert run("convert", "--to", "specdec", tmp_path / "x", tmp_path / "again")[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (EAGLE3, tmp_path / "again"))
    assert set(after) - set(before) == {"embed_tokens.weight", "lm_head.weight"}  # the target's, which vLLM wants
    assert all(torch.equal(before[name], after[name]) for name in before)
    folder = falsified(None, norm_output=True, norm_output_means="head")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in fields.items() if k not in ("norm_output_means", "taps")})
    )
    code, _, err = run("convert", "--to", "modelopt", folder, tmp_path / "there")
    assert code == 0
    assert err.startswith("warning: ")
    assert "norm_output is read as SpecForge's" in err
