"""The Python interface: sixty wrong calls are one sentence each with the right name, and results are readable."""

import ast
import copy
import inspect
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused

import specdec
from specdec import Sampling, make_tree
from specdec.__main__ import main
from specdec.trees import DynamicTree

HI = "The quick brown fox"


def reserved(target) -> specdec.Engine:
    engine = specdec.Engine(target)
    engine.reserve(1, 9)
    return engine


# What is called with (target, drafter), and what the message must hold
WRONG = [
    # Names
    (lambda t, d: specdec.generate(t, HI, draft=d), "there is drafter"),
    (lambda t, d: specdec.generate(model=t, prompts=HI), "there is target"),
    (lambda t, d: specdec.generate(t, HI, d, temprature=1.0), "there is temperature"),
    (lambda t, d: specdec.generate(t, HI, d, max_tokens=4), "there is max_new_tokens"),
    (lambda t, d: specdec.compare(t, d, HI, max_tokens=4), "there is max_new_tokens"),
    (lambda t, d: specdec.load_drafter("ngram", t, feedbak="pre"), "there is feedback"),
    (lambda t, d: make_tree(top_k=4), "there is topk"),
    (lambda t, d: specdec.make_verifier("mach"), "match"),
    (lambda t, d: specdec.make_verifier("typical", epsilom=1), "epsilon"),
    (lambda t, d: specdec.train("x.jsonl", out="y", draftr="eagle3"), "there is drafter"),
    (lambda t, d: specdec.train("x.jsonl", out="y", drafter="eagle4"), "eagle3"),
    (lambda t, d: specdec.train("x.jsonl", out="y", settings={"trainer.stepz": 3}), "trainer.steps"),
    # Order and number
    (lambda t, d: specdec.generate(t), "generate(target, prompts, drafter, ...)"),
    (lambda t, d: specdec.generate(HI, t), "the order is generate(target, prompts, drafter)"),
    (lambda t, d: specdec.generate(d, HI, t), "drafter is the target"),
    (lambda t, d: specdec.generate(d, HI), "the target comes first"),
    (lambda t, d: specdec.answer(t, HI), "answer needs an Engine first"),
    (lambda t, d: specdec.load_drafter("ngram"), "load_drafter(path, target, ...)"),
    (lambda t, d: specdec.load_drafter(t, "ngram"), "target must be a loaded target"),
    (lambda t, d: specdec.Engine("demo/target"), "target must be a loaded target"),
    (lambda t, d: specdec.Engine(t, make_tree()), "drafter must be a loaded drafter"),
    (lambda t, d: specdec.Engine(t, d, "4/5/16"), "policy must be a tree"),
    (lambda t, d: specdec.Engine(t, d, type(make_tree())), "policy is the class DynamicTree"),
    (lambda t, d: specdec.Engine(t, d, make_tree(), print), "verifier must be a specdec.verify.Rule"),
    (lambda t, d: specdec.Engine(t, d, make_tree(), adaptive="ema"), "adaptive must be a policy"),
    # Arguments of an engine
    (lambda t, d: specdec.Engine(t).generate([1, 2]), "a prompt must be a list of token ids here, got 1"),
    (lambda t, d: specdec.Engine(t).generate(torch.tensor([[1, 2]])), "a list of token ids here, got tensor([1, 2])"),
    (lambda t, d: specdec.Engine(t).generate([np.arange(3)]), "a list of token ids here, got array([0, 1, 2])"),
    (lambda t, d: specdec.Engine(t).generate([[1]], eos=2), "eos must be a set of token ids here"),
    (lambda t, d: specdec.Engine(t).generate([[1]], sampling={"top_k": 2}), "sampling must be a specdec.Sampling"),
    (lambda t, d: specdec.Engine(t).generate([[1]], max_new_tokens=2.5), "max_new_tokens must be a whole number"),
    (lambda t, d: specdec.Engine(t).generate([[1]], stop="x"), "stop must be a Stop"),
    # Prompts
    (lambda t, d: specdec.generate(t, None), "prompts must be a text"),
    (lambda t, d: specdec.generate(t, np.arange(3)), "call its tolist()"),
    (lambda t, d: specdec.generate(t, {"role": "user", "content": "x"}), "messages stand in a list"),
    (lambda t, d: specdec.generate(t, [None]), "a prompt must be a text"),
    (lambda t, d: specdec.generate(t, [[1, 2.5]]), "token ids"),
    (lambda t, d: specdec.generate(t, []), "no prompt was given"),
    (lambda t, d: specdec.generate(t, [], d, adaptive="ema"), "no prompt was given"),
    (lambda t, d: specdec.generate(t, [HI], d, adaptive="ema", sampling=()), "sampling has 0 values"),
    (lambda t, d: torch.autocast("cpu", torch.bfloat16)(specdec.generate)(t, HI), "autocast to bfloat16 is on"),
    (lambda t, d: specdec.generate(t, [[10**6]]), "vocabulary"),
    (lambda t, d: specdec.generate("demo/target", [{"role": "robot", "content": "x"}]), "role must be one of system"),
    (lambda t, d: specdec.generate("demo/target", [{"role": "human", "content": "x"}]), "did you mean 'user'?"),
    (lambda t, d: specdec.generate(t, [{"content": "x"}]), "role and content"),
    # Models
    (lambda t, d: specdec.generate(3, HI), "target must be a model or its name"),
    (lambda t, d: specdec.generate(HI * 99, HI), "is no checkpoint"),
    (lambda t, d: specdec.load_target("nowhere/at/all"), "no such checkpoint folder"),
    (lambda t, d: specdec.load_target("demo/target", dtype="fp64"), "dtype must be auto, fp32"),
    (lambda t, d: specdec.load_target("demo/target", device="gpu"), "device 'gpu' cannot be used here"),
    (lambda t, d: specdec.load_drafter("demo/target2", t), "nothing bundled is called"),
    (lambda t, d: specdec.load_drafter("ngram", "demo/target"), "see specdec.load_target"),
    (lambda t, d: specdec.generate(t, HI, 3), "drafter must be a drafter or its name"),
    # Settings
    (lambda t, d: specdec.generate(t, HI, max_new_tokens=1e1), "max_new_tokens must be a whole number"),
    (lambda t, d: specdec.generate(t, HI, max_new_tokens=0), "max_new_tokens must be at least 1"),
    (lambda t, d: specdec.generate(t, HI, max_new_tokens=[1, 2]), "max_new_tokens has 2 values"),
    (lambda t, d: specdec.generate(t, HI, temperature=-1), "temperature must be at least 0"),
    (lambda t, d: specdec.generate(t, HI, temperature=1, top_p=2), "top_p must be at most 1"),
    (lambda t, d: specdec.generate(t, HI, temperature=1, sampling=Sampling()), "part of sampling"),
    (lambda t, d: specdec.generate(t, HI, sampling={"temperature": 1}), "sampling must be a Sampling"),
    (lambda t, d: Sampling(temperature="hot"), "temperature must be a number"),
    (lambda t, d: specdec.generate(t, HI, seed="a"), "seed must be a whole number"),
    (lambda t, d: specdec.generate(t, HI, stop=3), "stop must be a text"),
    (lambda t, d: specdec.generate(t, HI, json_schema="x"), "json_schema must be a mapping"),
    (lambda t, d: specdec.generate(t, HI, raw="no"), "raw must be true or false"),
    (lambda t, d: specdec.generate(t, HI, observer=3), "observer must be a function"),
    # Trees and verifiers
    (lambda t, d: specdec.generate(t, HI, d, tree=(4, 5)), "the three numbers topk, steps, num_draft_tokens"),
    (lambda t, d: specdec.generate(t, HI, d, tree=3), "tree must be a text such as 4/5/16"),
    (lambda t, d: specdec.generate(t, HI, d, tree=type(make_tree())), "tree is the class DynamicTree"),
    (lambda t, d: specdec.generate(t, HI, d, tree="4/5/16", topk=2), "topk contradicts tree"),
    (lambda t, d: specdec.generate(t, HI, topk=2), "give a drafter too"),
    (lambda t, d: specdec.generate(t, HI, d, tree="4-5-16"), "4-5-16"),
    (lambda t, d: make_tree(4, 5, 999), "num_draft_tokens is 999"),
    (lambda t, d: specdec.generate(t, HI, d, verifier=3), "verifier must be a name such as match"),
    (lambda t, d: specdec.generate(t, HI, d, children="best"), "children must be one of likeliest"),
    (lambda t, d: specdec.generate(t, HI, d, adaptive="tabel"), "table"),
    (lambda t, d: specdec.generate(t, HI, d, adaptive=5), "adaptive must be the name of a policy"),
    (lambda t, d: specdec.generate(t, HI, d, graphs="x"), "graphs must be true or false"),
    (lambda t, d: specdec.generate(t, HI, d, compile="x"), "compile must be true, false or 'aside'"),
    (lambda t, d: specdec.Engine(t, graphs="x"), "graphs must be true or false"),
    (lambda t, d: specdec.Engine(t, compile="yes"), "compile must be true, false or 'aside'"),
    (lambda t, d: specdec.Engine(t, overlap="no"), "overlap must be true or false"),
    (lambda t, d: specdec.Engine(t, prefixes="1GB"), "prefixes must be a whole number"),
    (lambda t, d: specdec.Engine(t, prefixes=-1), "prefixes must be at least 0"),
    (lambda t, d: specdec.Engine(t).reserve("2", 9), "rows must be a whole number"),
    (lambda t, d: specdec.Engine(t).reserve(2, 9, reads="x"), "reads must be a Reads"),
    (lambda t, d: reserved(t).add(5), "a prompt must be a list"),
    (lambda t, d: reserved(t).add([5], steps=1.5), "steps must be a whole number"),
    (lambda t, d: reserved(t).add([5], top_logprobs=5.0), "top_logprobs must be a whole number"),
    (lambda t, d: reserved(t).add([5], seed="a"), "seed must be a whole number, or two of them"),
    (lambda t, d: reserved(t).add([5], eos="x"), "eos must be a set of token ids"),
    (lambda t, d: reserved(t).add([5], grammar="x"), "grammar must be a Grammar"),
    (lambda t, d: specdec.generate(t, [HI], d, seed=[(1, 2, 3)]), "each seed must be a whole number or two"),
    (lambda t, d: specdec.generate(t, [HI], d, seed=["x"]), "each seed must be a whole number or two"),
    (lambda t, d: specdec.train("x.jsonl", out="y", steps="3"), "steps must be a whole number"),
    (lambda t, d: specdec.train("x.jsonl", out="y", from_="demo/eagle3", drafter="mtp"), "leave out drafter=mtp"),
]


def test_wrong_calls_are_one_sentence_with_the_right_name(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(WRONG) >= 60
    faults = []
    for call, named in WRONG:
        try:
            call(*pair)
            said = "nothing was refused"
        except (ValueError, TypeError) as error:
            said = str(error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if named not in said or "\n" in said or len(said) > 400:
            faults.append(f"{inspect.getsource(call).split(':', 1)[1].strip()[:90]} -> {said[:300]}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("generate --prompt x --tree my.py:Tree", "there is no file my.py"),
        ("generate --prompt x --verifier no.py:Rule", "there is no file no.py"),
        ("generate --prompt x --draft no.py:create:demo/mtp", "there is no file no.py"),
        ("train drafter=no.py:create", "there is no file no.py"),
        ("train from=demo/eagle4", "demo/eagle3"),
        ("train from=demo/target", "is not a drafter"),
        ("train from=demo/mtp drafter=mtp", "leave out drafter=mtp"),
        ("train init_from=demo/mtp", "There is from"),
        ("train drafter=saved data.path=x.jsonl", "from=CHECKPOINT"),
    ],
)
def test_wrong_words_are_one_sentence(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a b c d e f g h"}\n' * 4)
    assert named in refused(main, *words.split())


def test_a_tree_by_its_numbers(pair):
    target, drafter = pair
    how = {"max_new_tokens": np.int64(8), "temperature": np.float64(0.5), "seed": 3}
    forms = {"tree": (2, 3, 5)}, {"topk": 2, "steps": 3, "num_draft_tokens": 5}, {"tree": "2/3/5"}
    same = [specdec.generate(target, HI, drafter, **form, **how) for form in forms]
    assert len({tuple(one.rows[0].tokens) for one in same}) == 1
    assert {one.steps for one in same} == {3}
    assert specdec.generate(target, HI, drafter, topk=1, max_new_tokens=4).steps == 5
    assert specdec.answer(specdec.Engine(target), HI, max_new_tokens=4, temperature=None, top_p=None).tau == 1
    listed = how | {"max_new_tokens": [np.int64(8)], "seed": [(np.int64(3), 0)]}
    assert specdec.generate(target, [HI], **listed).rows[0].tokens == list(same.pop().rows[0].tokens)
    both = specdec.generate(target, [HI] * 2, drafter, sampling=(Sampling(), Sampling(0.5)), adaptive="table:1=1")
    assert [row.sampling.temperature for row in both.rows] == [0, 0.5]


def test_a_wrong_tree_of_your_own_is_refused_as_an_object_too(pair):
    class Flat(DynamicTree):
        def grow(self, *given, **how):
            tree = super().grow(*given, **how)
            tree.depth = tree.depth * 0
            return tree

    with pytest.raises(ValueError, match="Flat: growing a tree failed: the depth of a node"):
        specdec.generate(pair[0], HI, pair[1], tree=Flat(2, 2, 5), max_new_tokens=4)


def test_an_engine_that_decodes_refuses_another_call(pair):
    engine = specdec.Engine(*pair, make_tree())
    plain = specdec.answer(engine, HI, max_new_tokens=8).rows[0].tokens
    refusals = []

    def interrupt(report):
        answer = lambda: specdec.answer(engine, HI, max_new_tokens=2)  # noqa: E731
        for call in (answer, lambda: engine.reserve(1, 9), lambda: engine.add([5]), engine.step):
            with pytest.raises(ValueError, match="use one engine for each thread") as error:
                call()
            refusals.append(error)

    assert specdec.answer(engine, HI, max_new_tokens=8, observer=interrupt).rows[0].tokens == plain
    assert refusals
    assert specdec.answer(engine, HI, max_new_tokens=8).rows[0].tokens == plain


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_after_decoding_has_weights_of_its_own(pair, copied):
    tokens = [row.tokens for row in specdec.generate(*pair[:1], [HI], pair[1], max_new_tokens=5).rows]
    target, drafter = copied(pair)
    for module in drafter.modules():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight.zero_()
                assert not module(torch.ones(1, module.in_features)).any()
    assert [row.tokens for row in specdec.generate(target, [HI], drafter, max_new_tokens=5).rows] == tokens


def test_a_policy_begins_with_the_acceptance_at_the_temperature(pair, monkeypatch):
    target, drafter = pair
    made = lambda *parts, temperature, **_: seen.append(temperature) or specdec.Engine(*parts[2:])  # noqa: E731
    monkeypatch.setattr("specdec.api.adaptive_engine", made)
    for sampling, expected in ((None, 0.0), (Sampling(0.5), 0.5), ([Sampling(), Sampling(1)], 1)):
        seen = []
        specdec.generate(target, [HI, HI], drafter, sampling=sampling, adaptive="ema", max_new_tokens=2)
        assert seen == [expected]


def test_everything_prints_on_one_line(pair):
    target, drafter = pair
    found = specdec.generate(target, HI, drafter, max_new_tokens=4)
    for thing in (target, drafter, specdec.Engine(target, drafter, make_tree()), found, found.rows[0], found.result):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 300
    assert "layers" in repr(target)
    assert repr(drafter).startswith("Eagle3(taps ")


def test_a_run_from_python_trains_a_checkpoint_further(pair, target_path, drafter_path, tmp_path):
    """And returns the drafter, which has the shape of the checkpoint, and the log."""
    target, drafter = pair
    answer = {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog. " * 2}
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}, answer]} for n in range(8)]
    (tmp_path / "my data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"data.heldout": 2, "trainer.prompts": None, "trainer.log_every": 1, "trainer.lr": 1e-3}
    given = {"out": tmp_path / "run", "target": target_path, "from_": drafter_path, "settings": how}
    run = specdec.train(tmp_path / "my data.jsonl", steps=2, **given)
    assert [step for step, _ in run.losses] == [1, 2]
    assert run.tau is None
    assert run.drafter.taps == drafter.taps
    assert run.drafter.vocab.ids.tolist() == drafter.vocab.ids.tolist()
    assert any((a != b).any() for a, b in zip(run.drafter.parameters(), drafter.parameters(), strict=True))
    assert repr(run).startswith("Training(Eagle3(taps ")
    assert specdec.train(tmp_path / "my data.jsonl", steps=2, resume=True, **given).losses == run.losses
    with pytest.raises(ValueError, match="holds a run already"):
        specdec.train(tmp_path / "my data.jsonl", steps=2, **given)
    plain, fast = (specdec.generate(target, HI, one, max_new_tokens=8) for one in (None, run.drafter))
    assert plain.rows[0].tokens == fast.rows[0].tokens


def test_type_checkers_see_the_whole_interface():
    """They do not run the package's `__getattr__`."""
    (block,) = [x for x in ast.parse(Path(specdec.__file__).read_text(encoding="utf-8")).body if isinstance(x, ast.If)]
    seen = {name.asname or f"{line.module}.{name.name}" for line in block.body for name in line.names}
    assert seen == {name for name, module in specdec.INTERFACE.items() if module != "specdec.api"} | {"specdec.api.*"}
    assert {name for name, module in specdec.INTERFACE.items() if module == "specdec.api"} == set(specdec.api.__all__)
