"""Texts obey their grammars, and speculation changes neither these texts nor those of their neighbours."""

import json
import re

import pytest

pytest.importorskip("llguidance")

from policies import Restless
from tape import Tape

from specdec import DEMO_TARGET, Engine, Sampling, generate, load_drafter, load_target, make_verifier
from specdec.sampling.json_grammar import Grammars
from specdec.text import encode_prompt
from specdec.trees import Chain, DynamicTree, SampledTree

FIELDS = {
    "name": {"type": "string", "maxLength": 4},
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "of": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 2},
}
PERSON = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
SWITCHES = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
EITHER = {"anyOf": [{"const": "yes"}, {"type": "object", "properties": {"no": {"type": "null"}}, "required": ["no"],
                                       "additionalProperties": False}]}  # fmt: skip
GREEDY, DRAWN = Sampling(), Sampling(0.9, top_p=0.95, repetition_penalty=1.1)
PROMPT, NEW = "Tell me of a person, as JSON.", 60
TREES = {"chain": Chain(3), "tree": DynamicTree(3, 3, 9)}


@pytest.fixture(scope="module")
def grammars(pair):
    return Grammars(pair[0].tokenizer, pair[0].config.vocab, pair[0].eos)


def of_all(grammars: Grammars | None) -> list:
    """Return the grammars of five rows; the last row has none."""
    return [*map(grammars.json, (PERSON, SWITCHES, EITHER)), grammars.regex("[A-C]{2}[0-9]{1,3}!"), None]


def ids_and_finish(rows) -> list[tuple[list[int], str]]:
    return [(row.tokens, row.finish) for row in rows]


def texts(pair, grammars, engine: Engine, sampling: Sampling) -> list[tuple[list[int], str]]:
    prompt = encode_prompt(pair[0], PROMPT)
    how = {"max_new_tokens": NEW, "sampling": sampling, "grammar": of_all(grammars)}
    return ids_and_finish(engine.generate([prompt] * 5, **how).rows)


@pytest.fixture(scope="module")
def plain(pair, grammars):
    """The text of each row alone, decoded plainly."""
    engine, prompt = Engine(pair[0]), encode_prompt(pair[0], PROMPT)

    def alone(i, sampling):
        how = {"max_new_tokens": NEW, "sampling": sampling, "seed": [(0, i)], "grammar": of_all(grammars)[i]}
        return ids_and_finish(engine.generate([prompt], **how).rows)[0]

    return {sampling: [alone(i, sampling) for i in range(5)] for sampling in (GREEDY, DRAWN)}


def is_person(name, age, of) -> bool:
    return type(name) is str and len(name) <= 4 and type(age) is int and 0 <= age <= 130 and {*of} <= {"a", "b c"}


def check_texts(target, rows: list[tuple[list[int], str]]) -> int:
    """Check the texts that are complete, and return their number. They end at the closing bracket, not at an eos."""
    fits = (
        lambda text: is_person(**json.loads(text)),
        lambda text: 2 <= len(json.loads(text)) <= 4 and all(type(x) is bool for x in json.loads(text)),
        lambda text: json.loads(text) in ("yes", {"no": None}),
        lambda text: re.fullmatch(r"[A-C]{2}[0-9]{1,3}!", text),
    )
    assert {end for _, end in rows[:4]} <= {"stop", "length"}
    for (tokens, end), fit in zip(rows, fits, strict=False):
        assert end == "length" or fit(target.tokenizer.decode(tokens))
    return sum(end == "stop" for _, end in rows[:4])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_texts_obey_their_grammar(pair, plain, sampling):
    assert check_texts(pair[0], plain[sampling]) >= 2  # a random text may have many spaces
    how = {"max_new_tokens": NEW, "sampling": sampling, "seed": [(0, 4)]}
    free = Engine(pair[0]).generate([encode_prompt(pair[0], PROMPT)], **how)
    assert ids_and_finish(free.rows) == plain[sampling][4:]
    assert plain[sampling][4][1] == "length"


def test_texts_of_a_trained_model():
    target = load_target(DEMO_TARGET, dtype="fp32")
    pair = target, load_drafter(DEMO_TARGET.parent / "mtp", target)
    grammars = Grammars(target.tokenizer, target.config.vocab, target.eos)
    rows = texts(pair, grammars, Engine(*pair, TREES["tree"]), DRAWN)
    assert check_texts(target, rows) == 4
    assert rows == texts(pair, grammars, Engine(target), DRAWN)


@pytest.mark.parametrize(
    ("sampling", "tree", "policy"),
    [(GREEDY, "tree", None), (DRAWN, "chain", None), (DRAWN, "tree", None), (DRAWN, "tree", Restless(3))],
)
def test_speculation_changes_no_text(pair, grammars, plain, sampling, tree, policy):
    assert texts(pair, grammars, Engine(*pair, TREES[tree], adaptive=policy), sampling) == plain[sampling]
    assert policy is None or any(any(outcome.accepted) for outcome in policy.outcomes)


def test_recorded_rounds_give_the_same(pair, grammars, plain):
    """Rounds are recorded only after the texts with grammars have ended."""
    ids, own, tape = (2, 3, 4), of_all(grammars), Tape()
    how = {"max_new_tokens": NEW, "sampling": DRAWN, "seed": [(0, i) for i in ids], "grammar": [own[i] for i in ids]}
    rows = Engine(*pair, Chain(3), graphs=tape).generate([encode_prompt(pair[0], PROMPT)] * 3, **how).rows
    assert ids_and_finish(rows) == [plain[DRAWN][i] for i in ids]
    assert 0 < len(tape.rows) < len(rows[2].trace.accepted)


@pytest.mark.parametrize("name", ["rejection", "typical"])
def test_other_rules_obey_too(pair, grammars, name):
    tree = SampledTree((2, 1, 1)) if make_verifier(name).needs_q else TREES["tree"]
    engine = Engine(*pair, tree, make_verifier(name))
    assert check_texts(pair[0], texts(pair, grammars, engine, DRAWN)) >= 2


def test_a_wrong_schema_gives_one_sentence(grammars):
    for schema, message in (
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"a": {"frob": 1}}}, "'frob', which is not known"),
        ({"anyOf": [{"items": {"x-guidance": {}}}]}, "x-guidance"),
        ({"not": {"type": "string"}}, "not"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "Unsatisfiable"),
        ({"$ref": "http://somewhere/else"}, "somewhere"),
        (["a"], "a JSON schema is an object"),
        (True, "a JSON schema is an object, got True"),
        ({"const": "x" * 32_768}, "may have 32768"),
    ):
        with pytest.raises(ValueError, match="JSON schema") as error:
            grammars.json(schema)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_what_a_grammar_needs(pair, grammars, monkeypatch):
    target = pair[0]
    with pytest.raises(ValueError, match="regular expression is not taken"):
        grammars.regex("[")
    with pytest.raises(ValueError, match="a token that ends a text"):
        Grammars(target.tokenizer, target.config.vocab, frozenset())
    with pytest.raises(ValueError, match="give no others"):
        Engine(target).generate([[1, 2]], eos=frozenset(), grammar=grammars.json(), max_new_tokens=2)
    for ends in (target.eos, target.eos | {3}):
        monkeypatch.setattr(target, "eos", ends)
        assert generate(target, "Hello!", json_schema={"const": 7}, max_new_tokens=9).rows[0].eos == ends
    monkeypatch.setattr("specdec.sampling.json_grammar.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is not installed: pip install"):
        Grammars(target.tokenizer, target.config.vocab, target.eos)
