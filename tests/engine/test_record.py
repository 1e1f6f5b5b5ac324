"""Traces: the recorder keeps what happened and changes nothing, and a file is whole or refused."""

import json
import math
import time
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import main_of, refused, tiny_drafter, tiny_target
from tape import Interpreted

from specdec import Engine, Sampling
from specdec.engine import engine as engine_
from specdec.engine import recorder as record
from specdec.engine import report as reports_
from specdec.engine import trace_files
from specdec.engine.recorder import Recorder, Trace
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces import metrics
from specdec.sampling.filters import filtered_probs
from specdec.trees import Chain, DynamicTree, SampledTree

PROMPTS = [[3, 5, 7, 9], [1], [8, 2, 6]]
SAMPLED = Sampling(0.8, 7, 0.95)
HOW = {"max_new_tokens": 25, "seed": 3, "eos": frozenset({4})}
TREES = {"chain": Chain(3), "dynamic": DynamicTree(3, 3, 9), "sampled": SampledTree((2, 1))}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def recorded(engine, sampling=None, recorder=None):
    """Return a result, its recorder, and the reports as another observer sees them."""
    recorder, reports = recorder or Recorder(), []
    observer = lambda report: reports.append(report) or recorder(report)  # noqa: E731
    return engine.generate(PROMPTS, sampling=sampling, observer=observer, **HOW), recorder, reports


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_a_trace_is_what_happened(target, tree, sampling):
    """The probabilities of every node are those of the plain text up to it, without cache or tree."""
    engine = Engine(target, tiny_drafter(target), TREES[tree])
    result, recorder, reports = recorded(engine, sampling)
    rows = recorder.trace.rows
    for name in ("tokens", "trace", "finish"):
        assert [getattr(row, name) for row in rows] == [getattr(row, name) for row in result.rows]
    assert len({len(row.rounds) for row in rows}) > 1, "no row ended before another: the test shows too little"
    assert metrics.tau(rows) > 1, "nothing was accepted: the test shows nothing"
    for i, row in enumerate(rows):
        assert (row.prompt, row.steps, row.sampling) == (PROMPTS[i], engine.policy.steps, sampling)
        text, context = row.prompt + row.tokens, len(PROMPTS[i]) + 1
        for number, r in enumerate(row.rounds):
            report = reports[number + 1]
            place = report.rows.index(result.rows[i])
            assert r.context == context
            for name in ("tokens", "parents", "logq"):
                assert torch.equal(getattr(r.tree, name), getattr(report.tree, name)[place].to(getattr(r.tree, name)))
            assert r.path == report.verdict.path[place, : len(r.path)].tolist()
            accepted = r.tree.tokens[r.path[1:]].tolist()
            assert r.emitted[: len(accepted)] == accepted[: len(r.emitted)]
            assert report.accepted[place] == len(accepted[: len(r.emitted)])
            assert (r.tree.logp[0], r.tree.p[0]) == (0, 1)
            for node in range(1, len(r.tree.tokens) if number < 3 else 1):
                above, branch = int(r.tree.parents[node]), []
                while above:
                    branch.insert(0, int(r.tree.tokens[above]))
                    above = int(r.tree.parents[above])
                logits, token = target(torch.tensor([text[:context] + branch]), None)[0][0, -1], r.tree.tokens[node]
                torch.testing.assert_close(r.tree.logp[node], logits.log_softmax(-1)[token], rtol=0, atol=1e-4)
                torch.testing.assert_close(r.tree.p[node], filtered_probs(logits, sampling)[token], rtol=0, atol=1e-4)
            context += len(r.emitted)


def test_seconds_are_those_of_the_engine(target, monkeypatch):
    result, recorder, _ = recorded(Engine(target, tiny_drafter(target), TREES["chain"]))
    longest = max((row.rounds for row in recorder.trace.rows), key=len)
    for part in ("draft", "verify", "commit", "host"):
        assert sum(r.seconds[part] for r in longest) == pytest.approx(result.parts[part], rel=1e-9)
    assert recorder.trace.rows[0].prefill_seconds == pytest.approx(result.parts["prefill"], rel=1e-9)
    with monkeypatch.context() as patch:  # what follows a prefill is no time of the observer
        patch.setattr(engine_, "settings_of", lambda *rows: time.sleep(0.1))
        result, *_ = recorded(Engine(target), recorder=lambda report: None)
    assert result.parts["output"] < 0.1 < result.prefill_seconds
    assert all("output" not in r.seconds for r in longest)


@pytest.mark.parametrize("graphs", [None, Interpreted])
def test_a_prefill_is_all_parts_of_its_prompt_and_no_capture(graphs, unpacked):
    engine, recorder = Engine(tiny_target(), graphs=graphs and graphs()), Recorder()
    for call in (0, 1):  # the second one has a clock of its own
        engine.reserve(1, 40, part=4)
        engine.add([1 + n % 7 for n in range(19)], max_new_tokens=9)
        while (report := engine.step()) is not None:
            recorder(report)
        spent, row = engine.loop.batch.clock.seconds(), recorder.trace.rows[call]
        assert row.prefill_seconds == pytest.approx(spent["prefill"], rel=1e-9)
        for part in {*spent} - {"prefill", "capture", "output"}:  # the callers' time is in none
            assert sum(r.seconds.get(part, 0.0) for r in row.rounds) == pytest.approx(spent[part], rel=1e-9)


def test_rounds_between_the_prefills_of_a_call_are_decoding(target):
    """With a prefix cache prompts that begin alike join one after the other."""
    engine = Engine(target, tiny_drafter(target), TREES["chain"], prefixes=1 << 24)
    prompts = [[3, 5, 7, 9] * 9 + [n] for n in range(9)]
    engine.generate(prompts, **HOW)
    joined: list[bool] = []
    result = engine.generate(prompts, **HOW | {"max_new_tokens": 6}, observer=lambda r: joined.append(r.prefill))
    assert sum(joined) == len(prompts)
    assert joined[:4] == [True, False, True, False]
    assert result.decode_seconds > 0.9 * sum(result.parts[part] for part in ("draft", "verify", "commit", "host"))


def test_numbers_of_numpy_and_lists_that_grow(target, tmp_path):
    recorder, sampling = Recorder(), Sampling(np.float32(0.75), top_k=np.int64(9))
    prompt = list(np.array(PROMPTS[0]))
    made = Engine(target).generate([prompt], sampling=sampling, observer=recorder, **HOW | {"seed": np.int64(7)})
    prompt.append(2)
    write_trace(recorder.trace, tmp_path / "trace")
    row = read_trace(tmp_path / "trace").rows[0]
    assert (row.prompt, row.tokens, tuple(row.seed)) == (PROMPTS[0], made.rows[0].tokens, (7, 0))
    assert row.sampling == Sampling(0.75, top_k=9)


def test_a_clock_that_sums_old_marks(monkeypatch):
    times = iter([0, 1, 3, 6, 10, 15])
    monkeypatch.setattr(reports_, "MOST", 4)
    monkeypatch.setattr(reports_.time, "perf_counter", lambda: next(times))
    clock = reports_.Clock(torch.device("cpu"))
    for part in "abab":
        clock.mark(part)
    clock.fold()
    assert (clock.position, clock.seconds(), clock.marks) == (5, {"a": 4, "b": 6}, [("b", 10)])
    clock.mark("a")
    assert (clock.position, clock.seconds(), clock.intervals()) == (6, {"a": 9, "b": 6}, [("a", 5)])


def test_plain_decoding_several_calls_and_names(target, tmp_path):
    result, recorder, _ = recorded(Engine(target))
    write_trace(recorder.trace, tmp_path / "t")
    rows = read_trace(tmp_path / "t").rows
    assert [row.tokens for row in rows] == [row.tokens for row in result.rows]
    assert {(r.path[0], r.drafted, r.tree) for row in rows for r in row.rounds} == {(0, 0, None)}
    assert metrics.tau(rows) == 1
    assert math.isnan(metrics.vllm_mean_acceptance_length(rows))
    engine, recorder = Engine(target, tiny_drafter(target), TREES["chain"]), Recorder()
    recorder.name(["q1", "q1", "q2"], ["math", "math", None])
    for _ in range(2):
        recorded(engine, recorder=recorder)
    labels = [(row.call, row.question, row.category) for row in recorder.trace.rows]
    assert labels[:3] == [(0, "q1", "math"), (0, "q1", "math"), (0, "q2", None)]
    assert labels[3:] == [(1, "3", None), (1, "4", None), (1, "5", None)]
    recorder.name(["q1"])
    with pytest.raises(ValueError, match="1 questions were named, but 3 prompts"):
        recorded(engine, recorder=recorder)
    with pytest.raises(TypeError, match="not JSON serializable"):  # before the run
        Recorder({"target": object()})


# Files


def plain(trace: Trace) -> tuple:
    """Return all values of a trace, tensors as dtypes and bytes."""
    nodes = [getattr(r.tree, f) for row in trace.rows for r in row.rounds if r.tree for f in record.NODE_FIELDS]
    rows = [asdict(row) | {"rounds": [asdict(r) | {"tree": r.tree is None} for r in row.rounds]} for row in trace.rows]
    return trace.settings, trace.versions, rows, [(x.dtype, x.numpy().tobytes()) for x in nodes]


@pytest.fixture
def folder(target, tmp_path):
    _, recorder, _ = recorded(Engine(target, tiny_drafter(target), TREES["dynamic"]), SAMPLED, Recorder({"seed": 3}))
    recorder.name(["ein Straßenname", "日本語", "x\ny"])
    _, recorder, _ = recorded(Engine(target), recorder=recorder)
    recorder.trace.rows[0].seed = (-(2**70), 2**64)  # a seed is any two integers
    folder = tmp_path / "trace"
    write_trace(recorder.trace, folder)
    assert plain(read_trace(folder)) == plain(recorder.trace)
    recorder.trace.rows[0].finish = "error"  # of a grammar's library
    write_trace(recorder.trace, folder)
    assert read_trace(folder).rows[0].finish == "error"
    return folder


def flip(name: str):
    def change(folder):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return change


def edit_header(**fields):
    def change(folder):
        header = json.loads((folder / "trace.json").read_text())
        (folder / "trace.json").write_text(json.dumps(header | fields))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [(flip(name), f"{name} is damaged") for name in ("rows.jsonl", "rounds.jsonl", "nodes.safetensors")]
    + [
        (lambda f: (f / "rounds.jsonl").write_text(""), "rounds.jsonl is damaged"),
        (lambda f: (f / "nodes.safetensors").unlink(), "nodes.safetensors is missing"),
        (lambda f: (f / "trace.json").unlink(), "is not a trace: it has no trace.json"),
        (lambda f: (f / "trace.json").write_text('{"format'), "trace.json is not valid JSON"),
        (edit_header(format="report"), "is not the header of a trace"),
        (edit_header(version=2), "is a trace of version 2, and this program reads version 1"),
    ],
)
def test_damaged_traces_are_refused(folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message):
        read_trace(folder)


def test_a_full_disk_leaves_the_older_trace(folder, monkeypatch):
    before = plain(read_trace(folder))
    monkeypatch.setattr(trace_files, "save_file", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"cannot write .*: No space left"):
        write_trace(Trace({}, {}, []), folder)
    assert plain(read_trace(folder)) == before
    monkeypatch.undo()
    write_trace(Trace({}, {}, []), folder)
    assert read_trace(folder) == Trace({}, {}, [])
    assert [p.name for p in folder.parent.iterdir()] == ["trace"], "what the failure left is still there"


# The command


def test_the_command_writes_what_it_reports(target_path, drafter_path, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("The quick brown\nWhat is 12?\nfox")
    flags = ("--target", target_path, "--draft", drafter_path, "--prompts", tmp_path / "prompts.txt")
    flags += ("--topk", 4, "--max-new-tokens", 16, "--json", "--compare", "--batch-size", 2)
    flags += ("--trace", tmp_path / "trace")
    main_of("generate")([*map(str, flags)])
    labels = json.loads(capsys.readouterr().out.splitlines()[-1])
    trace = read_trace(tmp_path / "trace")
    assert [row.tokens for row in trace.rows] == labels["token_ids"], "plain decoding for --compare is not recorded"
    assert metrics.tau(trace.rows) == labels["tau"]
    assert metrics.acceptance_by_depth(trace.rows) == labels["acceptance_by_depth"]
    assert [row.call for row in trace.rows] == [0, 0, 1]
    assert trace.settings["flags"]["max_new_tokens"] == 16
    assert trace.settings["tree"] == {"class": "DynamicTree", "steps": 5, "topk": 4, "num_draft_tokens": 16}
    assert trace.settings["drafter"]["family"] == "EAGLE-3"
    assert trace.versions["torch"] == torch.__version__


def test_chats_are_traced_too(target_path, tmp_path, monkeypatch):
    lines = iter(["The quick", "brown fox"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or exec("raise EOFError"))
    flags = ("--target", target_path, "--no-draft", "--max-new-tokens", 4, "--trace", tmp_path / "trace", "--chat")
    main_of("generate")([*map(str, flags)])
    first, second = read_trace(tmp_path / "trace").rows
    assert first.tokens != []
    assert second.prompt[: len(first.prompt)] == first.prompt, "the history is part of the second prompt"


def test_a_bad_place_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt, which is not of a trace"):
        write_trace(Trace({}, {}, []), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    monkeypatch.setattr("specdec.api.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    for place in (tmp_path, tmp_path / "notes.txt"):
        assert "choose" in refused(main_of("generate"), "--prompt", "x", "--trace", place)
