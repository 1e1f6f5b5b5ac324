"""Benchmarks: every form of a record, and conversations with the target's own answers."""

import json
from pathlib import Path
from unittest import mock

import pytest
from omegaconf import OmegaConf

from specdec.engine.engine import Engine
from specdec.lab.sweep.benchmarks import Question, converse, load_benchmark, template_settings
from specdec.model.loader import load_target
from specdec.structs import Sampling

CONF = Path(__file__).parents[2] / "conf" / "benchmark"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    "{% endif %}"
)

# A record of each benchmark as its source spells it, and what is to be asked.
RECORDS = {
    "mt_bench": ({"prompt_id": 81, "category": "writing", "prompt": ["Write.", "Again."]}, ("Write.", "Again.")),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
        ("Complete the code I provided.\n\ndef f():",),
    ),
    "gsm8k": ({"question": "What is 1 + 1?", "answer": "2"}, ("What is 1 + 1?",)),
    "alpaca": ({"instruction": "Sort.", "input": "", "output": "x", "text": "whole"}, ("Sort.",)),
    "cnn_dm": ({"article": "It rained.", "highlights": "Rain.", "id": "a1"}, ("Summarize: It rained.",)),
    "qa": ({"question": "who was it", "answer": ["he"]}, ("who was it",)),
    "spec_bench": ({"question_id": 1, "category": "rag", "turns": ["Who?"], "reference": ["He."]}, ("Who?",)),
    "sharegpt": ({"conversations": [{"from": f, "value": v} for f, v in (("human", "Hi"), ("gpt", "Ho"))]}, ("Hi",)),
}


def write(folder, *records) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings(name: str, path: str) -> dict:
    files = OmegaConf.load(CONF / "files.yaml")
    own = OmegaConf.load(CONF / f"{name}.yaml")
    own.pop("defaults", None)
    return OmegaConf.to_container(OmegaConf.merge(files, own, {"path": path}))


@pytest.mark.parametrize("name", RECORDS)
def test_every_benchmark_of_conf_reads_its_own_records_and_questions_of_eagles_repository(tmp_path, name):
    record, turns = RECORDS[name]
    (question,) = load_benchmark(**settings(name, write(tmp_path, record))).questions
    assert question.turns == turns
    assert question.category == (record.get("category") or settings(name, "")["category"])
    ready = {"question_id": 3, "category": "c", "turns": ["As it is."], "reference": ["x"]}
    assert load_benchmark(**settings(name, write(tmp_path, ready))).questions == [Question("3", "c", ("As it is.",))]
    assert {file.stem for file in CONF.glob("*.yaml")} == {*RECORDS, "files"}, "every benchmark is tried here"


def test_a_text_has_a_question_a_line(tmp_path):
    (tmp_path / "q.txt").write_text("What is a tree?\n\nWho?\n", encoding="utf-8-sig")
    found = load_benchmark("mt_bench", str(tmp_path / "q.txt")).questions
    assert [q.turns for q in found] == [("What is a tree?",), ("Who?",)]


def test_turns_limits_ids_and_the_digest(tmp_path):
    says = (("system", "Be brief."), ("user", "A?"), ("assistant", "a"), ("user", "B?"), ("assistant", "b"))
    path = write(tmp_path, {"messages": [{"role": role, "content": text} for role, text in says]})
    assert load_benchmark("x", path).questions == [Question("0", None, ("A?", "B?"), "Be brief.")]
    assert load_benchmark("x", path, turns=1).questions[0].turns == ("A?",)
    path = write(tmp_path, *({"question_id": i, "turns": [f"q{i}"]} for i in range(10)))
    assert [q.id for q in load_benchmark("x", path, limit=4).questions] == ["0", "2", "5", "7"]
    assert [q.id for q in load_benchmark("x", path, limit=4, pick="first").questions] == ["0", "1", "2", "3"]
    assert len(load_benchmark("x", path, limit=99).questions) == 10
    one = load_benchmark("x", write(tmp_path, *({"id": "a", "prompt": text} for text in ("x", "y"))))
    assert [q.id for q in one.questions] == ["a", "a (2)"]
    assert one.digest() == load_benchmark("other name", path).digest()
    assert one.digest() != load_benchmark("x", write(tmp_path, {"id": "a", "prompt": "x"})).digest()


def test_bad_records_are_named_or_counted(tmp_path):
    path = write(tmp_path, {"prompt": "fine"}, {"nothing": 1}, {"prompt": "  "})
    with pytest.raises(ValueError, match=r"line 2: no question: .*benchmark\.form.*benchmark\.bad=skip"):
        load_benchmark("x", path)
    found = load_benchmark("x", path, bad="skip")
    assert ([q.turns for q in found.questions], found.skipped) == ([("fine",)], 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"path": None}, "the benchmark x has no path"),
        ({"path": "nowhere.jsonl"}, "no such data file: nowhere.jsonl"),
        ({"limit": 0}, r"benchmark\.limit must be at least 1"),
        ({"turns": -1}, r"benchmark\.turns must be at least 1"),
        ({"pick": "best"}, r"benchmark\.pick must be spread or first"),
        ({"bad": "hope"}, r"benchmark\.bad must be error or skip"),
        ({"form": "{missing}"}, r"line 2: .*nor the fields of benchmark\.form: missing"),
        ({"form": "{broken"}, r"benchmark\.form='{broken' is no format string: expected '}'"),
    ],
)
def test_mistakes(tmp_path, how, message):
    path = write(tmp_path, {"prompt": "x"}, *([{"field": "x"}] if "form" in how else []))
    with pytest.raises(ValueError, match=message):
        load_benchmark("x", **{"path": path} | how)


# Conversations


@pytest.fixture(scope="module")
def target(target_path):
    found = load_target(target_path)
    found.tokenizer.chat_template = CHAT
    return found


def hold(target, questions, **how):
    engine, names = Engine(target), []
    how = {"max_new_tokens": 6, "sampling": Sampling(), "name": lambda *parts: names.append(parts)} | how
    with mock.patch.object(engine, "generate", wraps=engine.generate) as generate:
        results, left_out = converse(engine, questions, **how)
    return [call.args[0] for call in generate.call_args_list], names, results, left_out


TWO = Question("q", "c", ("What is 12 + 30?", "Why?"), "Be brief.")
ONE = Question("r", None, ("The quick",))


def test_the_second_prompt_holds_the_targets_own_first_answer(target):
    prompts, names, results, left_out = hold(target, [TWO])
    answer = target.tokenizer.decode(results[0].rows[0].tokens, skip_special_tokens=True)
    said = [("system", "Be brief."), ("user", TWO.turns[0]), ("assistant", answer), ("user", "Why?")]
    text = "".join(f"<{role}>{content}\n" for role, content in said) + "<assistant>"
    assert prompts[1] == [target.tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert names == [(["q"], ["c"])] * 2
    assert left_out == 0


def test_without_a_template_the_text_goes_on(target):
    prompts, _, results, _ = hold(target, [TWO], raw=True)
    encode = target.tokenizer
    first = encode(f"Be brief.\n\n{TWO.turns[0]}")["input_ids"]
    answer = [token for token in results[0].rows[0].tokens if token not in target.eos]
    assert prompts == [[first], [first + answer + encode("\n\nWhy?", add_special_tokens=False)["input_ids"]]]


def test_batches_say_the_same_and_short_conversations_leave_them(target):
    alone = hold(target, [TWO, ONE, TWO])[2]
    prompts, names, together, _ = hold(target, [TWO, ONE, TWO], batch_size=3)
    assert [len(batch) for batch in prompts] == [3, 2]
    assert names[1] == (["q", "q"], ["c", "c"])
    spoken = [row.tokens for result in together for row in result.rows]
    alone = [result.rows[0].tokens for result in alone]
    assert spoken == [alone[0], alone[2], alone[3], alone[1], alone[4]]


def test_turns_that_do_not_fit_are_left_out_and_counted(target):
    long = Question("long", None, ("word " * 300, "Why?"))
    prompts, names, _, left_out = hold(target, [long, ONE], batch_size=2)
    assert len(prompts) == 1
    assert names == [(["r"], [None])]
    assert left_out == 2


def test_thinking_is_the_templates_switch(target, monkeypatch):
    assert template_settings(target, False, None) == (False, {})
    raw, template = template_settings(target, False, False)
    prompts = hold(target, [ONE], raw=raw, template=template)[0]
    assert target.tokenizer.decode(prompts[0][0]).endswith("<assistant>!")
    with pytest.raises(ValueError, match="thinking was set, but the prompts are raw"):
        template_settings(target, True, True)
    monkeypatch.setattr(target.tokenizer, "chat_template", CHAT.replace("enable_thinking", "other"))
    with pytest.raises(ValueError, match="has no switch enable_thinking: leave thinking=null"):
        template_settings(target, False, True)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        hold(target, [ONE], batch_size=0)
