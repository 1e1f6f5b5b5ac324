"""specdec.compare, and names, messages and ids where specdec.generate takes objects and texts."""

import math

import pytest

import specdec
from specdec import registry
from specdec.lab.sweep.compare import PARTS, Decoded, Score, Tally, ratio
from specdec.lab.sweep.compare_command import entries_of
from specdec.lab.sweep.comparison import Comparison, named

PROMPTS = ["The quick brown", "What is 12", "Ein Café"]


@pytest.fixture(scope="module")
def target(target_path):
    return specdec.load_target(target_path)


def comparison(speeds: dict[str, list[float]], **differences) -> Comparison:
    """Each way decodes a token a prompt, in so many seconds; plain decoding takes 1."""
    tallies = {"": Tally(single=[Decoded(str(i), 1, 1, 1.0) for i in range(len(next(iter(speeds.values()))))])}
    tallies |= {name: Tally(single=[Decoded(str(i), 1, 1, s) for i, s in enumerate(t)]) for name, t in speeds.items()}
    scores = []
    for name in speeds:
        times, interval = ratio(tallies[name], tallies[""])
        shared = {"drafter": "D", "tree": "1/3/4", "verifier": "match", "rule": "match", "lossless": True,
                  "tau": 2.0, "settled": True,
                  "tau_interval": (1.9, 2.1), "acceptance_by_depth": [0.5], "tokens_per_second": 1.0, "draft_vocab": 9,
                  "milliseconds_a_round": dict.fromkeys(PARTS, 1.0), "same_as_plain": 3,
                  "prompts": 3, "num_draft_tokens": 4}  # fmt: skip
        scores.append(Score(name=name, ratio_to_plain=times, ratio_interval=interval, **shared | differences))
    return Comparison(scores, 1.0, tallies)


@pytest.mark.parametrize(
    ("speeds", "differences", "verdict"),
    [
        ({"a": [0.5, 0.5, 0.5], "b": [0.8, 0.8, 0.8]}, {},
         "a is 2.00 times as fast as plain decoding (2.00 to 2.00). All texts are plain decoding's."),
        ({"a": [0.4, 0.6, 0.5], "b": [0.6, 0.4, 0.55]}, {}, "Not told apart from it: b."),
        ({"a": [2.0, 2.0, 2.0]}, {}, "No drafter pays here: a, the nearest, is 0.50 times as fast"),
        ({"a": [0.5, 1.5, 0.9]}, {}, "No drafter is shown to pay: a came out 1.03 times as fast"),
        ({"a": [0.5]}, {}, "a was 2.00 times as fast as plain decoding. One prompt says nothing of others"),
        ({"a": [0.5, 0.5, 0.5]}, {"same_as_plain": 2}, "Texts that differ from plain decoding's: a 1 of 3."),
        ({"a": [0.5, 0.5, 0.5]}, {"lossless": False}, "Lossy: a."),
        ({"a": [0.5, 0.5, 0.5]}, {}, "3 prompts are few, and the intervals rough."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_the_intervals_say(speeds, differences, verdict):
    assert verdict in comparison(speeds, **differences).verdict


def test_compare_decodes_as_generate_does(target, drafter_path):
    how = {"temperature": 0.8, "max_new_tokens": 8, "seed": 3}
    found = specdec.compare(target, [drafter_path, "ngram"], PROMPTS, tree="2/2/5", progress=False, **how)
    assert [score.name for score in found.scores] == [drafter_path.name, "ngram"]
    drafter = specdec.load_drafter(drafter_path, target)
    alone = specdec.generate(target, PROMPTS, drafter, tree=specdec.make_tree(2, 2, 5), **how)
    assert [row.tokens for row in found.tallies[drafter_path.name].rows] == [row.tokens for row in alone.rows]
    score = found.scores[0]
    assert score.tau == alone.tau
    assert score.tau_interval[0] <= score.tau <= score.tau_interval[1]
    assert score.same_as_plain == 3
    assert f"{score.tau:.2f} (" in str(found)
    assert str(found).endswith(found.verdict)
    assert math.isnan(specdec.compare(target, "ngram", "x", max_new_tokens=2, progress=False).scores[0].tau_interval[0])
    with pytest.raises(ValueError, match="NGram cannot be captured"):
        specdec.compare(target, "ngram", "x", compile=True)


def test_names_stand_for_objects_and_messages_and_ids_for_texts(target, target_path, drafter_path):
    drafter = specdec.load_drafter(drafter_path, target)
    tree, rule = specdec.make_tree(1, 3), specdec.make_verifier("match")
    sampling = specdec.Sampling(temperature=0.8, top_k=9)
    made = specdec.generate(target, PROMPTS, drafter, tree=tree, verifier=rule, sampling=sampling, max_new_tokens=8)
    how = {"tree": "1/3/4", "verifier": "match", "temperature": 0.8, "top_k": 9, "max_new_tokens": 8}
    assert specdec.generate(target_path, PROMPTS, drafter_path, **how).text == made.text
    ids = [row.prompt for row in made.rows]
    assert specdec.generate(target, ids, drafter, **how).text == made.text
    assert specdec.generate(target, ids[0], drafter, **how).text == made.text[:1]
    message = [{"role": "user", "content": PROMPTS[0]}]
    assert specdec.generate(target, message, drafter, **how).text == made.text[:1]
    assert specdec.generate(target, [message, message], drafter, **how).rows[1].prompt == ids[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temprature": 0.8}, "there is no setting temprature; there is temperature"),
        ({"max_tokens": 8}, "there is no setting max_tokens; there is max_new_tokens"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 0.8, "sampling": specdec.Sampling()}, "temperature is a part of sampling"),
        ({"verifier": "mach"}, "there is no verifier 'mach'"),
        ({"tree": "oak"}, "there is no tree 'oak'"),
        ({"prompts": [{"role": "user"}]}, "a prompt is a text, a list of messages"),
        ({"prompts": [[1, "x"]]}, "a prompt is a text, a list of messages"),
        (
            {"drafter": "demo/eagle9"},
            "nothing bundled is called demo/eagle9; there is demo/dflash, demo/dspark",
        ),
    ],
)
def test_what_is_no_such_thing_is_told(target, drafter_path, how, message):
    with pytest.raises(ValueError, match=message):
        specdec.generate(target, **{"prompts": "x", "drafter": drafter_path} | how)


def test_the_interface_can_be_looked_through():
    assert set(specdec.__all__) <= set(dir(specdec))
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    assert specdec.__version__


def test_drafts_have_names_of_their_own_and_another_target_needs_its_own():
    assert list(named(["a/draft", "b/draft", "ngram:suffix"])) == ["a", "b", "ngram:suffix"]
    assert list(named(["a/x", "b/x/", "draft"])) == ["a/x", "b/x/", "draft"]
    assert list(named(["demo/mtp", {"draft": "demo/mtp", "name": "mine"}])) == ["mtp", "mine"]
    for wrong, message in ((["ngram", "ngram"], "two drafters are called ngram"), ([], "no drafter was given")):
        with pytest.raises(ValueError, match=message):
            named(wrong)
    own = registry.read_yaml(registry.CONF / "compare.yaml", "settings")
    assert entries_of(own | {"target": {"path": None}}) == own["entries"]
    assert entries_of(own | {"target": {"path": "demo/target"}}) == own["entries"]
    assert list(entries_of(own | {"target": {"path": "x"}, "drafts": ["ngram"]})) == ["ngram"]
    with pytest.raises(ValueError, match=r"target.path=x needs drafters of its own.*drafts=\[DRAFT,ngram\]"):
        entries_of(own | {"target": {"path": "x"}})
