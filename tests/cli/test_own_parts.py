"""New parts: FILE.py:NAME and entry points of the user's own, how wrong ones are refused, and files in a checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import main_of, refused, run_here, tiny_drafter, tiny_target

import specdec
from specdec import own
from specdec.drafters.formats import load_drafter
from specdec.engine.engine import Engine

train_main = main_of("train")

PARTS = """
from dataclasses import dataclass
from functools import partial
import torch
from specdec.contracts import Drafter, DraftState
from specdec.drafters import eagle3, ngram
from specdec.drafters.vocab import DraftVocab
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.terms import TERMS, term
from specdec.trees import DynamicTree, StaticTree, Tree
from specdec.verify import Rule, SampleAndMatch

def wide():
    return StaticTree([[0], [1], [2], [0, 0]])

@dataclass(frozen=True)
class Small(DynamicTree):
    topk: int = 2
    steps: int = 2
    num_draft_tokens: int = 5

class Flat(Small):
    def grow(self, *given, **how):
        tree = super().grow(*given, **how)
        tree.depth = tree.depth * 0
        return tree

class Later(Small):
    def grow(self, *given, **how):
        tree = super().grow(*given, **how)
        if vars(self).setdefault("grown", []):  # the first tree is right
            tree.tokens[:, 2] = tree.tokens[:, 1]
        self.grown.append(tree)
        return tree

class Bare(Tree):
    topk = steps = num_draft_tokens = 1

@dataclass(frozen=True)
class Lenient(SampleAndMatch):
    lossless = False
    share: float = 0.5

class Greedy(SampleAndMatch):
    def __call__(self, *given):
        verdict = super().__call__(*given)
        verdict.n = verdict.n + 50
        return verdict

class Astray(SampleAndMatch):
    def __call__(self, tree, *given):
        verdict = super().__call__(tree, *given)
        verdict.path = torch.arange(verdict.path.shape[1]).expand_as(verdict.path)
        verdict.n = verdict.n * 0 + verdict.path.shape[1]
        return verdict

class Mute(Rule):
    pass

class Table(Drafter):
    # Drafts the number after the last token.
    def __init__(self, target, vocab=None):
        super().__init__()
        self.vocab = vocab or DraftVocab(target.vocab)
        self.places = torch.arange(target.vocab)

    def state(self, tokens, size=0):
        near = -(self.places - tokens[..., None] - 1).abs().float()
        return DraftState(near, near[..., size:])

    def extend(self, feats, tokens, n, max_len):
        return self.state(tokens.gather(1, (n[:, None] - 1).clamp(min=0)))

    def step(self, tokens, hidden, level, ancestors):
        return self.state(tokens)

class Scribbler(Table):
    def extend(self, feats, tokens, *given):
        return super().extend(feats, tokens.fill_(3), *given)

class Narrow(Table):
    def extend(self, feats, tokens, *given):
        return self.state(tokens[:, :1], size=5)

class Wide(Table):
    def extend(self, feats, tokens, *given):
        return self.state(tokens)

class Nowhere(Table):
    def extend(self, *given):
        return None

class Stepless(Table):
    step = Drafter.step

class Blank(Table):
    def step(self, tokens, *given):
        return DraftState(*[self.state(tokens).hidden * float("nan")] * 2)

class Boundless(Table):
    taps = 3

class Twice(Eagle3Objective):
    def __init__(self, steps: int = 2):
        super().__init__(steps=steps)

@term
def flat(student, teacher):  # one value for all steps
    value, slope, total = TERMS["ce"](student, teacher)
    return value[:, :1], slope, total

class Wordy(Eagle3Objective):
    def __init__(self, terms=None):
        super().__init__(steps=2, terms=terms)

class Terse(Twice):
    def extra_terms(self, *given):
        return 0.0, {"mine": torch.zeros(())}

class Torn(Twice):
    def __call__(self, *given, **named):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 1:  # the first one is the rehearsal
            raise KeyError("mine")
        return super().__call__(*given, **named)

number = 3
no_vocab = lambda target: 3
no_default = lambda target, vocab, width: 3
no_drafter = lambda target, vocab=None: 3

def stubborn(target, vocab=None):
    return ngram.create(target)

def broken(target, vocab=None, width=2):
    return torch.zeros(width) @ torch.zeros(width + 1)

class Undecodable(eagle3.Eagle3):
    def step(self, *given):
        raise RuntimeError("no step")

def undecodable(target, vocab=None):
    made = eagle3.create(target, vocab=vocab)
    made.__class__ = Undecodable
    return made

head = partial(eagle3.create, taps=[1, 2, 3], scale_taps=False)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("my parts")
    (folder / "my.py").write_text(PARTS)
    (folder / "torn.py").write_text("import specdec\nraise KeyError('x')\n")
    answers = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e f g " * 4}]}]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers * 6))
    return folder


def train_words(target_path, parts, out) -> list[str]:
    return [
        f"target.path={target_path}", f'data.path="{parts / "answers.jsonl"}"', "data.heldout=2", "trainer.steps=1",
        "trainer.prompts=null", "trainer.eval_batches=0", f"out={out}",
    ]  # fmt: skip


@pytest.mark.parametrize("tree", ["wide", "Small"])
def test_a_tree_and_a_verifier_of_a_file(parts, tree):
    target = tiny_target()
    drafter, prompts = tiny_drafter(target), [[3, 5, 7], [1, 2]]
    plain = Engine(target).generate(prompts, max_new_tokens=20)
    made = specdec.parse_tree(f"{parts}/my.py:{tree}")
    assert specdec.make_tree(**made.entries()) == made
    rule = specdec.make_verifier(f"{parts}/my.py:Lenient", share=0.25)
    assert (rule.share, rule.lossless) == (0.25, False)
    fast = specdec.generate(target, prompts, drafter, tree=str(made), verifier=rule, max_new_tokens=20)
    assert [r.tokens for r in fast.rows] == [r.tokens for r in plain.rows]


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (specdec.parse_tree, "my.py:Smal", "has no 'Smal'; there is Small"),
        (specdec.parse_tree, "my.py", "needs a name after a colon; there is wide, Small"),
        (specdec.parse_tree, "no.py:Small", "there is no file"),
        (specdec.parse_tree, "torn.py:Small", r"importing it failed: KeyError: 'x' \(torn.py line 2\)"),
        (specdec.parse_tree, "my.py:number", "is a int: name a class or a function"),
        (specdec.parse_tree, "my.py:Lenient", r"makes a Lenient: it must make a specdec\.trees\.base\.Tree"),
        (specdec.parse_tree, "my.py:Bare", "the tree has no method grow"),
        (specdec.make_verifier, "my.py:wide", r"it must make a specdec\.verify\.walk\.Rule"),
        (lambda name: specdec.make_verifier(name, shar=1), "my.py:Lenient", "cannot be called as .*'shar'"),
        (lambda name: load_drafter(name, tiny_target()), "my.py:no_drafter", r"specdec\.contracts\.Drafter"),
        (lambda name: load_drafter(name, tiny_target()), "my.py:broken", r"making it failed: RuntimeError.*line \d+"),
    ],
)
def test_wrong_parts_are_one_sentence(parts, make, name, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(f"{parts}/{name}")
    assert "\n" not in str(raised.value)


def test_a_tree_that_contradicts_itself_is_refused_before_it_changes_the_text(parts):
    target, tree = tiny_target(), specdec.parse_tree(f"{parts}/my.py:Flat")
    for _ in range(2):
        with pytest.raises(ValueError, match="growing a tree failed: the depth of a node must be one more"):
            specdec.generate(target, [[1, 2]], tiny_drafter(target), tree=tree)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"tree": "Later"}, "my.py:Later: growing a tree failed: two children of a node carry the same token"),
        ({"verifier": "Greedy"}, r"my.py:Greedy: verifying failed: n must be from 1 to 3, got \[5"),
        ({"verifier": "Astray"}, "my.py:Astray: verifying failed: path must lead from the root"),
        ({"verifier": "Mute"}, "my.py:Mute: verifying failed: it must return a specdec.structs.Verdict, got null"),
        ({"drafter": "Narrow"}, "my.py:Narrow: drafting failed: the state has logits of 12 tokens, and vocab has 17"),
        ({"drafter": "Wide"}, r"my.py:Wide: drafting failed: hidden of the state has the shape \[1, 2, 17\]"),
        ({"drafter": "Nowhere"}, "my.py:Nowhere: drafting failed: extend and admit must return .*, got null"),
        ({"drafter": "Stepless"}, "my.py:Stepless: the drafter has no method step"),
        ({"drafter": "Blank"}, "my.py:Blank: growing a tree failed: the logits .* of drafted tokens are nan"),
        ({"drafter": "Boundless"}, r"my.py:Boundless: taps must be whole numbers, such as \(1, 2, 3\), got 3"),
    ],
)
def test_what_would_change_the_text_is_refused(parts, part, message):
    target = tiny_target()
    given = {"tree": "2/2/5", "verifier": "match", "drafter": "ngram"}
    given |= {name: f"{parts}/my.py:{mine}" for name, mine in part.items()}
    with pytest.raises(ValueError, match=message):
        specdec.generate(target, [[1, 2]], load_drafter(given.pop("drafter"), target), **given, max_new_tokens=20)


def test_a_drafter_that_writes_to_its_tokens_leaves_the_text(parts):
    target, prompts = tiny_target(), [[3, 5, 7], [1, 2]]
    plain = specdec.generate(target, prompts, max_new_tokens=20)
    out = specdec.generate(target, prompts, load_drafter(f"{parts}/my.py:Scribbler", target), max_new_tokens=20)
    assert [r.tokens for r in out.rows] == [r.tokens for r in plain.rows]


def test_a_run_with_own_parts_leaves_a_drafter_that_needs_them(parts, target_path, tmp_path):
    words = train_words(target_path, parts, tmp_path / "run")
    words += [f'drafter="{parts}/my.py:head"', "drafter.init=random", f'objective="{parts}/my.py:Twice"']
    words.append("objective.steps=3")
    for more in ((), ("resume=true", "trainer.steps=1")):
        done = run_here(train_main, *words, *more)
        assert done.returncode == 0, done.stderr
        assert load_drafter(tmp_path / "run" / "draft", specdec.load_target(target_path)).taps == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drafter=my.py:nothing"], "has no 'nothing'"),
        (["drafter=my.py:no_vocab"], "no_vocab(target, vocab=...): got an unexpected keyword argument 'vocab'"),
        (["drafter=my.py:no_default"], "its argument width needs a default"),
        (["drafter=my.py:head:runs/x"], "give from="),
        (["drafter=my.py:broken", "drafter.wide=3"], "Could not override 'drafter.wide'"),
        (["drafter=my.py:no_drafter"], "makes a int: it must make a specdec.contracts.Drafter"),
        (["drafter=my.py:stubborn"], "my.py:stubborn makes a drafter that does not learn"),
        (["drafter=my.py:undecodable"], "decoding with it failed: RuntimeError: no step"),
        (["objective=my.py:wide"], "it must make a specdec.training.objectives.base.Objective"),
        (["drafter=my.py:head", "objective=block"], "a first training step failed"),
        (["objective=my.py:Torn"], "error: my.py line"),
        (["objective=my.py:Terse"], "my.py:Terse: a first training step failed: RuntimeError"),
        (["objective=my.py:Wordy", "objective.terms={flat: 1}"], "term flat must return (value, slope, total), with a"),
    ],
)
def test_a_run_is_refused_before_it_begins(parts, target_path, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(parts)
    assert message in refused(train_main, *train_words(target_path, parts, tmp_path / "run"), *words)
    assert not (tmp_path / "run" / "draft").exists()


def test_entry_points_of_an_installed_package(target_path, tmp_path, monkeypatch):
    (tmp_path / "pack_1.py").write_text(PARTS)
    (tmp_path / "pack_1-1.0.dist-info").mkdir()
    (tmp_path / "pack_1-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pack_1\nVersion: 1.0\n")
    points = "[specdec.trees]\nsmall = pack_1:Small\n[specdec.drafters]\npeeking = pack_1:head\n"
    (tmp_path / "pack_1-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(specdec.parse_tree("small")).__name__ == "Small"
    assert load_drafter("peeking", specdec.load_target(target_path)).taps == (1, 2, 3)
    with pytest.raises(ValueError, match="there is no tree 'smal'"):
        specdec.parse_tree("smal")


def test_names(parts):
    rule = specdec.make_verifier(f"{parts}/my.py:Lenient")
    assert own.digest(rule) == own.digest(f"{parts}/my.py:wide") != ""
    assert own.digest(specdec.make_verifier("match")) == own.digest("ngram") == ""
    assert own.split("a b/my.py:create:runs/x:y") == ("a b/my.py:create", "runs/x:y")
    assert own.split("demo/mtp") == ("demo/mtp", None)
    assert own.short("../x/my.py:create") == "my.py:create"
    assert not own.is_own("my.pyx")
    assert not own.is_own("ngram:suffix")
    assert Path(own.split("my.py:create:~/x")[1]) == Path("~/x")


# One of each kind, in a checkout: these files, and a field of `Sampling`
TREE = """
from dataclasses import dataclass
from specdec.trees.static import FixedTree

@dataclass(frozen=True)
class New(FixedTree):
    topk: int = 3
    text = "zzz"

    def __post_init__(self):
        self._shape([(rank,) for rank in range(self.topk)], [self.topk])

    @classmethod
    def parse(cls, text):
        return None
"""
VERIFIER = """
from dataclasses import dataclass
from specdec.verify.walk import SampleAndMatch

@dataclass(frozen=True)
class New(SampleAndMatch):
    share: float = 0.5
"""
OBJECTIVE = """
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.terms import TERMS, term

class New(Eagle3Objective):
    pass

@term
def zzz_term(student, teacher):
    value, slope, total = TERMS["ce"](student, teacher)
    return 2 * value, 2 * slope, 2 * total
"""
ADDED = {
    "drafters/zzz.py": "from specdec.drafters.eagle3 import Eagle3, create\n",
    "conf/drafter/zzz.yaml": "_target_: specdec.drafters.zzz.create\ndraft_vocab_size: null\ntaps: [1, 2, 3]\n",
    "trees/zzz.py": TREE,
    "conf/tree/zzz.yaml": "_target_: specdec.trees.zzz.New\ntopk: 3\n",
    "specdec/verify/zzz.py": VERIFIER,
    "conf/verifier/zzz.yaml": "_target_: specdec.verify.zzz.New\nshare: 0.25\n",
    "training/objectives/zzz.py": OBJECTIVE,
    "conf/objective/zzz.yaml": "_target_: specdec.training.objectives.zzz.New\nsteps: 2\nterms: {zzz_term: 1.0}\n",
}
FIELD = '    fresh: float = ranged(0, 1, 0.0, help="new: 0 (default) is off")'
USE = """
import contextlib, io, sys
import specdec
from specdec.__main__ import main
from specdec.serve.protocol import Ask

target, *train = sys.argv[1:]
main(["train", *train, "drafter=zzz", "objective=zzz"])
out, common = io.StringIO(), ["--prompt", "a b", "--target", target, "--draft", "run/draft", "--fresh", "0.5"]
with contextlib.redirect_stdout(out):
    for command in ("generate", "train", "data regenerate"):
        with contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
    main(["generate", *common, "--tree", "zzz", "--verifier", "zzz", "--compare", "--max-new-tokens", "12"])
print(out.getvalue())
model = specdec.load_target(target)
drafter = specdec.load_drafter("run/draft", model)
print(specdec.generate(model, "a b", drafter, tree="zzz", verifier="zzz", fresh=0.5, max_new_tokens=8).verifier)
print(Ask(fresh=0.5).sampling)
"""


def test_one_of_each_is_found_by_its_files(parts, target_path, tmp_path):
    """A drafter, a tree, a verifier, an objective and a term need no other file. A setting of sampling needs no other
    for its flags, its argument of `generate` and its field of a request."""
    skipped = shutil.ignore_patterns("demo", "__pycache__")
    for folder in ("specdec", "drafters", "trees", "training", "conf"):
        shutil.copytree(Path(__file__).parents[2] / folder, tmp_path / folder, symlinks=True, ignore=skipped)
    for name, text in ADDED.items():
        (tmp_path / name).write_text(text)
    file, last = tmp_path / "specdec" / "sampling_settings.py", "    temperature: float | None"
    text = file.read_text().replace("\n    def __post_init__", f"{FIELD}\n\n    def __post_init__", 1)
    file.write_text(text.replace(last, f"{last}\n    fresh: float | None"))
    command = [sys.executable, "-c", USE, target_path, *train_words(target_path, parts, "run"), "hydra.run.dir=."]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert (said.count("--fresh X"), said.count(", zzz")) == (2, 4)  # each name is the last of its list
    for found in ("verifier: zzz (share 0.25)", "identical: yes", "New(share=0.25)", "fresh=0.5)"):
        assert found in said
