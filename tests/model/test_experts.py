"""Mixtures of experts: reports, traces and metrics name the experts that a verification used."""

import pytest
import torch
from helpers import save_hf, tiny_drafter, tiny_target

from specdec import Engine, Recorder, load_target
from specdec.drafters import eagle3
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces.metrics import experts_per_verification
from specdec.trees import Chain, DynamicTree

PROMPTS = [[3, 5, 7, 9], [1]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    how = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    save_hf(folder, "qwen3_moe", head=15.0, head_dim=16, **how)
    return load_target(folder, tokenizer=False)


def traced(engine: Engine, prompts):
    recorder = Recorder()
    engine.generate(prompts, max_new_tokens=6, eos=frozenset(), observer=recorder)
    return recorder.trace


def test_the_experts_of_a_round_are_counted(target, tmp_path):
    """A node alone asks 2, a tree of 9 more, and never more than there are or than its nodes can ask."""
    drafter, counts = eagle3.create(target).eval(), []
    for tree in (Chain(1), DynamicTree(3, 3, 9)):
        trace = traced(Engine(target, drafter, tree), PROMPTS[:1])
        counts.append(experts_per_verification(trace.rows))
        nodes = tree.num_draft_tokens
        assert all(2 <= r.experts <= min(16, 2 * nodes) for row in trace.rows for r in row.rounds)
    assert counts[0] < counts[1]
    write_trace(trace, tmp_path / "trace")
    assert experts_per_verification(read_trace(tmp_path / "trace").rows) == counts[1]


def test_they_are_those_that_the_model_chooses(target):
    """By transformers' own router, over the text and the tree's nodes."""
    engine, seen = Engine(target, eagle3.create(target).eval(), Chain(2)), []

    def look(report):
        if report.tree is not None and not seen:
            row = report.rows[0]
            text = row.prompt + row.tokens[: len(row.tokens) - len(report.emitted[0])]
            seen.append((text[:-1] + report.tree.tokens[0].tolist(), [x.clone() for x in report.experts]))

    engine.generate(PROMPTS[:1], max_new_tokens=6, eos=frozenset(), observer=look)
    text, chosen = seen[0]
    with torch.inference_mode():
        router = target.model(torch.tensor([text]), output_router_logits=True).router_logits
    assert len(chosen) == len(router) == 2  # of three layers one is dense
    for ours, logits in zip(chosen, router, strict=True):
        assert torch.equal(ours.sort().values, logits.topk(2).indices[-3:].sort().values)


def test_a_dense_target_has_none():
    target = tiny_target()
    trace = traced(Engine(target, tiny_drafter(target), Chain(2)), [[3]])
    assert all(r.experts is None for row in trace.rows for r in row.rounds)
