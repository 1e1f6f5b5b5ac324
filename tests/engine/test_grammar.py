"""Texts that obey a grammar: they are what it says, and speculation changes none of them, nor those beside them."""

import json
import re

import pytest
import torch

pytest.importorskip("llguidance")

from helpers import finish
from policies import Restless
from tape import Tape

from specdec.api import DEMO_TARGET
from specdec.drafters.formats import load_drafter
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.sampling.grammar import masked
from specdec.sampling.json_grammar import MOST, Grammars
from specdec.structs import Sampling
from specdec.text import encode_prompt
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import make_verifier

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "of": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "of"],
    "additionalProperties": False,
}
SWITCHES = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
EITHER = {"anyOf": [{"const": "yes"}, {"type": "object", "properties": {"no": {"type": "null"}}, "required": ["no"],
                                       "additionalProperties": False}]}  # fmt: skip
GREEDY, DRAWN = Sampling(), Sampling(0.9, top_p=0.95, repetition_penalty=1.1)
PROMPT, NEW = "Tell me of a person, as JSON.", 60
TREES = {"chain": Chain(3), "tree": DynamicTree(3, 3, 9)}


@pytest.fixture(scope="module")
def pair(target_path, drafter_path):
    """Of random weights: they would write anything."""
    target = load_target(target_path, dtype="fp32")
    return target, load_drafter(drafter_path, target)


@pytest.fixture(scope="module")
def demo():
    target = load_target(DEMO_TARGET, dtype="fp32")
    return target, load_drafter(DEMO_TARGET.parent / "mtp", target)


def grammars_of(pair) -> Grammars:
    return Grammars(pair[0].tokenizer, pair[0].config.vocab, pair[0].eos)


@pytest.fixture(scope="module")
def grammars(pair):
    return grammars_of(pair)


def is_person(value) -> bool:
    name, age, of = (value[key] for key in ("name", "age", "of"))
    of_name = list(value) == ["name", "age", "of"] and isinstance(name, str) and len(name) <= 4
    return of_name and type(age) is int and 0 <= age <= 130 and set(of) <= {"a", "b c"} and len(of) <= 2


def is_switches(value) -> bool:
    return isinstance(value, list) and 2 <= len(value) <= 4 and all(type(x) is bool for x in value)


def of_all(grammars: Grammars | None) -> list:
    """Grammars of a batch's rows; the last has none. None: of none."""
    if grammars is None:
        return [None] * 5
    return [*map(grammars.json, (PERSON, SWITCHES, EITHER)), grammars.regex("[A-C]{2}[0-9]{1,3}!"), None]


def texts(pair, grammars, engine: Engine, sampling: Sampling) -> list[tuple[list[int], str]]:
    """Of a batch."""
    prompt = encode_prompt(pair[0], PROMPT)
    rows = engine.generate([prompt] * 5, max_new_tokens=NEW, sampling=sampling, grammar=of_all(grammars)).rows
    return [(row.tokens, row.finish) for row in rows]


def alone(pair, grammars, sampling: Sampling) -> list[tuple[list[int], str]]:
    """The same, each row by itself and without a drafter."""
    rows = []
    for i, grammar in enumerate(of_all(grammars)):
        how = {"max_new_tokens": NEW, "sampling": sampling, "seed": [(0, i)], "grammar": grammar}
        rows += Engine(pair[0]).generate([encode_prompt(pair[0], PROMPT)], **how).rows
    return [(row.tokens, row.finish) for row in rows]


@pytest.fixture(scope="module")
def plain(pair, grammars):
    return {sampling: alone(pair, grammars, sampling) for sampling in (GREEDY, DRAWN)}


def check_texts(target, told: list[tuple[list[int], str]]) -> int:
    """Texts that have come to their end are what they must be. Returns how many those are."""
    fits = (
        lambda said: is_person(json.loads(said)),
        lambda said: is_switches(json.loads(said)),
        lambda said: json.loads(said) in ("yes", {"no": None}),
        lambda said: re.fullmatch(r"[A-C]{2}[0-9]{1,3}!", said),
    )
    ends = [end for _, end in told[:4]]
    assert set(ends) <= {"stop", "length"}  # at the bracket that closes it, not at an eos
    for (tokens, end), fit in zip(told, fits, strict=False):
        assert end == "length" or fit(target.tokenizer.decode(tokens))
    return ends.count("stop")


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_texts_are_what_their_grammar_says(pair, plain, sampling):
    assert check_texts(pair[0], plain[sampling]) >= 2  # a random text may have many spaces
    assert plain[sampling][4] == alone(pair, None, sampling)[4]  # the row beside them is free
    assert plain[sampling][4][1] == "length"


def test_texts_of_a_model_that_was_trained(demo):
    """The bundled pair: what it says obeys, drafted or not, and is the same."""
    grammars = grammars_of(demo)
    told = texts(demo, grammars, Engine(*demo, TREES["tree"]), DRAWN)
    assert check_texts(demo[0], told) == 4
    assert told == texts(demo, grammars, Engine(demo[0]), DRAWN)


@pytest.mark.parametrize(
    ("sampling", "tree", "policy"),
    [(GREEDY, "tree", None), (DRAWN, "chain", None), (DRAWN, "tree", None), (DRAWN, "tree", Restless(3))],
)
def test_speculation_changes_no_text_of_a_grammar_nor_of_the_row_beside(pair, grammars, plain, sampling, tree, policy):
    assert texts(pair, grammars, Engine(*pair, TREES[tree], adaptive=policy), sampling) == plain[sampling]
    assert policy is None or any(any(outcome.accepted) for outcome in policy.outcomes)


def test_rounds_that_are_read_late_or_recorded_give_the_same(pair, grammars, plain):
    """The first two texts end soon, and the free one goes on without them: only then are rounds recorded."""
    ids, own, tape = (2, 3, 4), of_all(grammars), Tape()
    how = {"max_new_tokens": NEW, "sampling": DRAWN, "seed": [(0, i) for i in ids], "grammar": [own[i] for i in ids]}
    for made in ({"overlap": True}, {"graphs": tape}):
        rows = Engine(*pair, Chain(3), **made).generate([encode_prompt(pair[0], PROMPT)] * 3, **how).rows
        assert [(row.tokens, row.finish) for row in rows] == [plain[DRAWN][i] for i in ids]
    assert 0 < tape.replays < len(rows[2].trace.accepted)


def test_a_text_joins_others_that_run_and_another_is_aborted(pair, grammars, plain):
    target, prompt = pair[0], encode_prompt(pair[0], PROMPT)
    engine = Engine(*pair, TREES["tree"], overlap=True)
    engine.reserve(3, len(prompt) + NEW)
    own = of_all(grammars)

    def add(i: int, grammar=True):
        asked = {"max_new_tokens": NEW, "sampling": DRAWN, "seed": (0, i)}
        return engine.add(prompt, **asked, grammar=own[i] if grammar else None)

    free = add(4)
    for _ in range(3):
        engine.step()
    rows = [add(0), add(1)]
    for _ in range(3):
        engine.step()
    engine.abort(rows[0])
    rows.append(add(0))
    finish(engine)
    assert (free.tokens, free.finish) == plain[DRAWN][4]
    assert [(row.tokens, row.finish) for row in rows[1:]] == [plain[DRAWN][1], plain[DRAWN][0]]
    assert rows[0].tokens == plain[DRAWN][0][0][: len(rows[0].tokens)]
    assert target.eos


def test_prompts_that_are_read_in_parts_and_rows_that_take_fewer_levels(pair, grammars, plain):
    prompt, own = encode_prompt(pair[0], PROMPT), of_all(grammars)
    engine = Engine(*pair, TREES["tree"])
    engine.reserve(2, len(prompt) + NEW, part=7)
    rows = [
        engine.add(prompt, max_new_tokens=NEW, sampling=DRAWN, seed=(0, i), grammar=own[i], steps=(0, 1, None)[i % 3])
        for i in range(5)
    ]
    finish(engine)
    assert [(row.tokens, row.finish) for row in rows] == plain[DRAWN]


@pytest.mark.parametrize("name", ["rejection", "typical"])
def test_other_rules_obey_too(pair, grammars, name):
    """Their draws are others than plain decoding's, and their texts obey all the same."""
    tree = SampledTree((2, 1, 1)) if make_verifier(name).needs_q else TREES["tree"]
    engine = Engine(*pair, tree, make_verifier(name))
    assert check_texts(pair[0], texts(pair, grammars, engine, DRAWN)) >= 2


def test_every_node_is_masked_along_its_own_path(grammars, pair):
    """Against matchers that read each path anew; what lies below a token that may not follow stays as it is."""
    encode = lambda text: pair[0].tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    grammar, vocab = grammars.json({"type": "number"}), pair[0].config.vocab
    digit, minus, dot, comma, other = (encode(x)[0] for x in ("7", "-", ".", ",", "8"))
    (end,) = pair[0].eos
    # Behind "-": 7 -> . -> 8 -> eos and 7 -> comma (wrong) -> 8; comma (wrong) -> 8; eos (wrong).
    tokens, parents = [minus, digit, comma, end, dot, other, comma, other, other, end], [0, 0, 0, 0, 1, 2, 1, 4, 6, 7]
    paths = {0: [], 1: [1], 4: [1, 4], 7: [1, 4, 7]}
    matcher = grammar.start()
    assert matcher.take(minus)
    logits = torch.randn(1, 10, vocab)
    got = masked(logits, [matcher], [tokens], [parents])
    for node in range(10):
        if node not in paths:
            assert torch.equal(got[0, node], logits[0, node])
            continue
        anew = grammar.start()
        assert all(anew.take(token) for token in [minus, *(tokens[i] for i in paths[node])])
        may = torch.tensor([anew.take(token) and (anew.back() or True) for token in range(vocab)])
        may[end] = node in (1, 7)  # "-7" and "-7.8" are whole
        assert torch.equal(got[0, node] > -torch.inf, may)
        assert torch.equal(got[0, node][may], logits[0, node][may])
    assert matcher.take(digit)  # it stands where it stood


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"a": {"frob": 1}}}, "'frob', which is not known"),
        ({"anyOf": [{"items": {"x-guidance": {}}}]}, "x-guidance"),
        ({"not": {"type": "string"}}, "not"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "Unsatisfiable"),
        ({"$ref": "http://somewhere/else"}, "somewhere"),
        (["a"], "a JSON schema is an object"),
        ({"const": "x" * MOST}, f"may have {MOST}"),
    ],
)
def test_a_wrong_schema_is_told_in_one_sentence(grammars, schema, told):
    with pytest.raises(ValueError, match="JSON schema") as error:
        grammars.json(schema)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_grammar_needs(pair, grammars, monkeypatch):
    target = pair[0]
    with pytest.raises(ValueError, match="regular expression is not taken"):
        grammars.regex("[")
    with pytest.raises(ValueError, match="a token that ends a text"):
        Grammars(target.tokenizer, target.config.vocab, frozenset())
    with pytest.raises(ValueError, match="give no others"):
        Engine(target).generate([[1, 2]], eos=frozenset(), grammar=grammars.json(), max_new_tokens=2)
    monkeypatch.setattr("specdec.sampling.json_grammar.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is not installed: pip install"):
        Grammars(target.tokenizer, target.config.vocab, target.eos)


class GivesUp:
    """A grammar whose library gives up after some tokens."""

    over = False

    def __init__(self, ends, left):
        self.ends, self.left = ends, left

    def start(self):
        return GivesUp(self.ends, self.left)

    def take(self, token):
        self.left -= 1
        return self.left >= 0

    def back(self):
        self.left += 1

    def allowed(self):
        return None


def test_a_library_that_gives_up_ends_its_text_only(pair, plain):
    target, prompt = pair[0], encode_prompt(pair[0], PROMPT)
    how = {"max_new_tokens": NEW, "sampling": DRAWN, "seed": [(0, 0), (0, 4)]}
    broken, free = Engine(*pair, Chain(3)).generate([prompt] * 2, grammar=[GivesUp(target.eos, 5), None], **how).rows
    assert (broken.finish, len(broken.tokens)) == ("error", 6)
    assert (free.tokens, free.finish) == plain[DRAWN][4]
