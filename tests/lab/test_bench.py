"""The benchmark: its numbers by hand on scripted runs, its contenders on a small model, the command as a whole."""

import json
import time
from unittest.mock import Mock

import pytest
from helpers import main_of, run_here, save_hf, tiny_drafter, tiny_target
from hybrids import hybrid_target

from specdec.engine.engine import Engine
from specdec.engine.memory import weight_bytes
from specdec.lab.bench.bench import Bench, Configuration, random_prompts, text_prompts
from specdec.lab.bench.bench_command import print_rows, remarks
from specdec.lab.bench.contenders import Contender, NotAvailable, Ours, TimedRun, of_transformers_by_name, read_bytes
from specdec.lab.bench.random_weights import MARK, SimulatedTau
from specdec.model.loader import load_target
from specdec.structs import Sampling
from specdec.trees import Chain

main = main_of("lab bench")

PLAIN = Configuration("short", prompt=4, new=5)


class Scripted(Contender):
    """A contender whose runs take the given seconds. error: raised in run `at`; wait: real seconds of each."""

    weights = 1000

    def __init__(self, seconds=1.0, ours=False, text=7, drafts=False, error=None, at=0, short=0, wait=0.0, peer=False):
        self.seconds = seconds if isinstance(seconds, list) else [seconds]
        self.ours, self.text, self.drafts, self.short, self.calls = ours, text, drafts, short, 0
        self.error, self.at, self.wait, self.peer = error, at, wait, peer

    def __call__(self, prompt, new, sampling, seed) -> TimedRun:
        time.sleep(self.wait)
        if self.error is not None and self.calls == self.at:
            raise self.error
        taken = self.seconds[self.calls % len(self.seconds)]
        self.calls += 1
        return TimedRun([self.text] * (new - self.short), taken, taken / 5, [taken / 5] * (new - 1), 64)


def bench(target=None, budget=None, random_weights=False, warmups=0, questions=1, **contenders) -> Bench:
    make = {name: (lambda value=value: value) for name, value in contenders.items()}
    how = {"budget": budget, "random_weights": random_weights, "warmups": warmups, "ceiling": 1e9}
    return Bench(target or tiny_target(), make, random_prompts(17, questions, 0), **how)


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["contender"]: row for row in rows}


def test_a_token_reads_the_experts_that_it_chooses(tmp_path):
    model = save_hf(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=1, sliding_window=None)
    sizes = {name: p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > 0
    read = read_bytes(load_target(tmp_path, tokenizer=False), 0, packed=False)
    assert read == sum(sizes.values()) - experts + experts / 4


def test_transformers_decodes_a_hybrid_target(tmp_path):
    """Some of its layers have no keys."""
    target = hybrid_target(tmp_path, "lfm2")
    run = of_transformers_by_name(lambda: target.model, None)["sdpa"]()([1, 2, 3], 4, Sampling(), 0)
    assert len(run.tokens) == 4
    assert run.cache_bytes > 0


def test_a_row_by_hand():
    target = tiny_target()  # fp32, not tied
    plain = Scripted([9.0, 2.0, 1.0], ours=True)  # the median of the trials is 2
    row = by_name(bench(target, plain=plain, sdpa=Scripted(4.0)).run(PLAIN))["plain"]
    head = 4 * 17 * 32  # the embedding is as large, and not read
    keys = 2 * 3 * 2 * 8 * 4 * (4 + 5 / 2)  # of three layers at the mean context
    moved = weight_bytes(target) - head + keys
    expected = {
        "tokens_per_second": 5 / 2,
        "decode_tokens_per_second": 4 / (4 * 2 / 5),
        "time_to_first_token_ms": 400,
        "prefill_tokens_per_second": 4 / 0.4,
        "tokens_per_step": 1,
        "share_of_bandwidth": 2.5 * moved / 1e9,
        "to_transformers": 2,
        "to_plain": 1,
        "trials": 3,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["step_ms"] == pytest.approx({"p50": 400, "p95": 1800})
    assert (row["fastest_of_transformers"], row["same_text_as_plain"]) == ("sdpa", "3 of 3")
    alone = bench(plain=Scripted(ours=True)).run(Configuration("pp512", 4, 1))[0]  # a prompt alone has no decoding
    assert "decode_tokens_per_second" not in alone
    assert alone["prefill_tokens_per_second"] == 20


def test_texts_are_compared_where_they_can_be_and_what_random_weights_accept_is_no_reference():
    contenders = {"plain": Scripted(ours=True), "sdpa": Scripted(2.0, text=8), "lookup": Scripted(0.1, drafts=True)}
    for random, temperature, same, fastest in (
        (False, 0.0, "0 of 3", "lookup"), (True, 0.0, None, "sdpa"), (False, 0.8, None, "lookup"),
    ):  # fmt: skip
        job = bench(**contenders, random_weights=random)
        rows = by_name(job.run(Configuration("short", 4, 5, {"temperature": temperature})))
        assert rows["sdpa"].get("same_text_as_plain") == same
        assert rows["plain"]["fastest_of_transformers"] == fastest
        assert ("means nothing" in rows["lookup"].get("note", "")) == random
        assert "note" not in rows["sdpa"]


def test_a_peer_is_compared_with_plain_and_is_none_of_transformers():
    peers = {"copycat": Scripted(peer=True), "other": Scripted(text=8, peer=True)}
    rows = by_name(bench(plain=Scripted(ours=True), sdpa=Scripted(9.0), random_weights=True, **peers).run(PLAIN))
    assert rows["copycat"]["same_text_as_plain"] == "3 of 3"  # the weights are the same, random or not
    assert ("differs" in rows["copycat"], "same_text_as_plain" in rows["sdpa"]) == (False, False)
    assert rows["plain"]["fastest_of_transformers"] == "sdpa"
    assert [d["token"] for d in rows["other"]["differences"]] == [0] * 3
    assert rows["other"]["differs"].startswith("3 of 3 texts differ from plain decoding's, the earliest at token 0")


def test_a_contender_that_fails_is_reported_and_the_others_go_on():
    broken = Scripted(error=RuntimeError("out of paper\nsecond line"), at=2)
    job = bench(plain=Scripted(ours=True), fails=broken, short=Scripted(short=1))
    job.contenders["absent"] = Mock(side_effect=NotAvailable("no such thing"))
    rows = by_name(job.run(PLAIN))
    assert rows["fails"]["failed"] == "RuntimeError: out of paper"
    assert rows["absent"]["skipped"] == "no such thing"
    assert rows["short"]["failed"] == "it made 4 tokens instead of 5"
    assert rows["plain"]["trials"] == 3
    assert "tokens_per_second" not in rows["fails"]
    assert remarks(list(rows.values()))["absent, skipped: no such thing"] == ["short"]
    print_rows(list(rows.values()), "title")


def test_a_configuration_that_cannot_be_is_skipped():
    for reason, *how in (
        ("300 tokens are needed, the target's context holds 256", 200, 100),
        ("not available: decoding has no magic here", 4, 4, {"temperature": 1.0, "magic": 2}),
        ("temperature must be at least 0", 4, 4, {"temperature": -1.0}),
    ):
        (row,) = bench(plain=Scripted(ours=True)).run(Configuration("odd", *how))
        assert row["contender"] == "all"
        assert reason in row["skipped"]


def test_nothing_begins_after_the_budget_and_a_small_one_is_shared_by_contenders_that_decode_fewer_texts():
    rows = by_name(bench(slow=Scripted(wait=0.3), late=Scripted(), budget=0.2, warmups=1).run(PLAIN))
    assert rows["slow"]["trials"] == 1  # it had been warmed up
    assert rows["late"]["skipped"] == "the budget of 0.2 s is used up"
    slow = {name: Scripted(wait=0.1) for name in ("first", "second", "third")}
    rows = by_name(bench(budget=1.8, warmups=9, questions=9, **slow).run(PLAIN))
    for row in rows.values():
        assert 1 <= row["texts"] < 27
        assert row["cut"] == f"{row['texts']} of 27 texts within the budget of 1.8 s"
    assert "cut" not in by_name(bench(budget=60, questions=2, plain=Scripted(ours=True)).run(PLAIN))["plain"]


def test_what_was_measured_before_a_cut_is_kept():
    saved = []
    job = bench(plain=Scripted(2.0, ours=True), cut=Scripted(error=KeyboardInterrupt(), at=1), late=Scripted())
    job.save = saved.append
    with pytest.raises(KeyboardInterrupt):
        job.run(PLAIN)
    assert [row["contender"] for row in saved[0]] == ["plain", "cut", "late"]
    assert [by_name(rows)["plain"].get("trials") for rows in saved] == [1, 1, 1, 2]  # each begun, and a second turn
    last = by_name(saved[-1])
    assert (last["plain"]["tokens_per_second"], last["cut"]["to_plain"], last["late"]["trials"]) == (5 / 2, 2, 1)


def test_prompts_have_their_length():
    prompts = text_prompts([[1, 2], [3, 4, 5]], questions=2)
    assert prompts(0, 3) == [[5, 1, 2], [3, 4, 5]]  # what is short has the ones before it in front
    assert prompts(0, 6)[0] == [2, 3, 4, 5, 1, 2]
    assert prompts(1, 2) == [[1, 2], [4, 5]]
    draw = random_prompts(17, 2, seed=3)
    assert draw(0, 50) == draw(0, 50) != draw(1, 50)
    assert [len(p) for p in draw(0, 50)] == [50, 50]


# Contenders


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same weights here and in transformers."""
    path = tmp_path_factory.mktemp("bench") / "target"
    model = save_hf(path, "llama", head=8.0)
    return load_target(path, tokenizer=False), model


@pytest.mark.parametrize("name", ["eager", "sdpa", "prompt-lookup", "assisted"])
def test_transformers_says_the_same_and_ends_at_no_token(both, name):
    target, model = both
    prompt, new = [5, 6, 7, 5, 6], 60
    ours = Ours(target)(prompt, new, Sampling(), 0)
    model.generation_config.eos_token_id = ours.tokens[2]  # as if this were the end of the text
    theirs = of_transformers_by_name(lambda: model, lambda: model)[name]()(prompt, new, Sampling(), 0)
    assert theirs.tokens == ours.tokens
    assert len(ours.steps) == new - 1 >= len(theirs.steps)
    for run in (ours, theirs):
        assert run.prefill_seconds + sum(run.steps) <= run.seconds
        tokens = run.cache_bytes / (3 * 2 * 2 * 8 * 4)  # layers, keys and values, heads, head size, fp32
        assert len(prompt) + new - 1 <= tokens <= len(prompt) + new + 64


def test_sampling_of_transformers_is_ours_or_refused(both):
    target, model = both
    makers, prompt = of_transformers_by_name(lambda: model, None), [5, 6, 7]
    theirs, penalised = makers["sdpa"](), Sampling(repetition_penalty=1.5)
    text = theirs(prompt, 30, penalised, 0).tokens
    assert text == Ours(target)(prompt, 30, penalised, 0).tokens != theirs(prompt, 30, Sampling(), 0).tokens
    with pytest.raises(NotAvailable, match="frequency"):
        theirs(prompt, 30, Sampling(frequency_penalty=1.0), 0)
    texts = [theirs(prompt, 20, Sampling(0.8, 50, 0.9), seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(NotAvailable, match="assistant=MODEL"):
        makers["assisted"]()


def test_ours_counts_the_drafters_weights_and_cache():
    target = tiny_target()
    drafter = tiny_drafter(target)
    plain, fast = Ours(target), Ours(target, drafter, Chain(2), SimulatedTau(2))
    assert fast.weights == weight_bytes(target, drafter) > weight_bytes(target) == plain.weights
    one, two = (contender([1, 2], 9, Sampling(), 0) for contender in (plain, fast))
    assert 0 < one.cache_bytes < two.cache_bytes
    assert len(two.steps) == 4


# The command


QUICK = [
    "suite.warmups=0", "suite.trials=1", "configurations.short={prompt: 8, new: 6}", "suite.configurations=[short]"
]  # fmt: skip


def test_a_shape_with_a_simulated_tau(tmp_path):
    out = tmp_path / "a.json"
    words = [f"out={out}", "shape=tiny", "steps=3", "num_draft_tokens=8", "simulate_tau=2.5", *QUICK]
    printed = run_here(main, *words, "suite.contenders=[plain,speculative,sdpa,assisted]").stdout
    result = json.loads(out.read_text())
    rows, name = by_name(result["rows"]), f"speculative, {MARK} tau 2.5"
    assert list(rows) == ["plain", name, "sdpa", "assisted"]
    assert rows[name]["tokens_per_step"] == pytest.approx(5 / 2)  # rounds of 2 and 3
    assert all((rows[name]["simulated"], result["simulated"], result["benchmark"].startswith(MARK)))
    assert result["weights"] == "random: only speed means anything"
    assert {"machine", "versions", "revision", "command", "bandwidth_bytes_per_second", "settings"} <= set(result)
    assert printed.count(MARK) >= 3  # the title, the row, the last line
    assert json.loads(printed.strip().splitlines()[-1])["tokens_per_second"]["short: assisted"] is None


def test_a_trained_pair(tmp_path, target_path, drafter_path, matmul_precision):
    out, prompts = tmp_path / "a.json", tmp_path / "prompts.txt"
    prompts.write_text("The quick brown fox\nWhat is 12 + 30?\n")
    words = [f"out={out}", f"target.path={target_path}", f"draft={drafter_path}", f"prompts={prompts}", "questions=2"]
    words += ["draft_dtype=bf16", "target.matmul_precision=medium"]
    run_here(main, *words, *QUICK, "suite.contenders=[plain,speculative,eager,eager-bf16]")
    result = json.loads(out.read_text())
    assert "medium precision" in result["benchmark"]
    assert not result["simulated"]
    *in_fp32, in_bf16 = result["rows"]
    assert [row["same_text_as_plain"] for row in in_fp32] == ["2 of 2"] * 3
    assert 0.5 < in_bf16["weight_bytes"] / in_fp32[-1]["weight_bytes"] < 0.51  # the rope's frequencies stay in fp32
    assert result["weights"] == str(target_path)


# Simulated taus


@pytest.mark.parametrize("wanted", [1, 2.75, 4])
def test_rounds_emit_a_simulated_tau(wanted):
    target, verifier = tiny_target(), SimulatedTau(wanted)
    engine = Engine(target, tiny_drafter(target), Chain(3), verifier)
    for row in engine.generate([[1, 2, 3], [4] * 7], max_new_tokens=81, eos=frozenset()).rows:
        emitted = row.trace.emitted
        assert sum(emitted) == 80
        assert abs(sum(emitted[:-1]) - wanted * (len(emitted) - 1)) < 1
        assert set(emitted[:-1]) <= {int(wanted), -int(-wanted // 1)}
    assert verifier.rounds.item() == -(-80 // wanted)  # counted on the device: a captured round continues counting
    assert str(verifier).startswith(MARK)
    assert not verifier.lossless
