"""`scripts/check_in_sglang.py` without SGLang: what it asks for, what it notices, and what stands in for kernels."""

from pathlib import Path
from types import SimpleNamespace

import check_in_sglang
import pytest
import sglang_stand_ins as stand_ins
import sglang_variants
import torch
import torch.nn.functional as F

from specdec.api import DEMO_TARGET, load_drafter, load_target

ARGS = SimpleNamespace(max_new_tokens=12)
PROMPTS = [[1, 300, 400, 500], [1, 700, 30, 20]]


@pytest.fixture(scope="module")
def target():
    return load_target(DEMO_TARGET, dtype="fp32")


@pytest.fixture
def case(tmp_path):
    cases, refused = check_in_sglang.exported_cases([(n, DEMO_TARGET.parent / n) for n in ("eagle2", "mtp")], tmp_path)
    assert list(refused) == ["mtp"]
    return cases[0]


def test_the_engine_is_given_what_the_printed_command_says(case):
    assert case.asked == {
        "model_path": str(DEMO_TARGET.resolve()),
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(case.exported),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }


def test_a_part_of_the_vocabulary_comes_with_its_map(target, tmp_path):
    made = [
        (name, path) for name, path in sglang_variants.make(tmp_path / "heads", target) if name.startswith("eagle2")
    ]
    cases, refused = check_in_sglang.exported_cases(made, tmp_path)
    maps = {case.name: case.asked.get("speculative_token_map") for case in cases}
    assert not refused
    assert Path(maps.pop("eagle2: a part of the vocabulary")).exists()
    assert set(maps.values()) == {None}


def test_counts_of_sglang_are_those_of_rounds_here():
    counts = {"spec_verify_ct": 9, "spec_num_proposed_drafts": 27, "spec_num_correct_drafts": 8}
    row = {"tokens": [1, 2], "counts": counts | {"spec_correct_drafts_histogram": [4, 3, 1, 1]}}
    told = {"tokens": [1, 2], "drafts": 9, "drafted": 27, "accepted": 8, "by_position": [5, 2, 1]}
    assert check_in_sglang.row_of(row, 3) == told
    row["counts"]["spec_correct_drafts_histogram"] = [9]
    assert check_in_sglang.row_of(row, 3)["by_position"] == [0, 0, 0]


def answers(target, case, change=lambda plain, drafted: None):
    """A stand-in for SGLang that decodes as this project does, but for a change."""
    drafter = load_drafter(case.drafter, target)
    plain = check_in_sglang.here(target, None, PROMPTS, 0, ARGS.max_new_tokens)
    drafted = check_in_sglang.here(target, drafter, PROMPTS, 3, ARGS.max_new_tokens)
    change(plain, drafted)
    return lambda python, engine, *_: {
        "versions": {},
        "rows": drafted if "speculative_algorithm" in engine else plain,
    }


def one_more_accepted(plain, drafted):
    drafted[1]["accepted"] += 1


def another_text(plain, drafted):
    drafted[0]["tokens"][-1] += 1


def another_plain_text(plain, drafted):
    plain[1]["tokens"][0] += 1


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda plain, drafted: None, []),
        (
            one_more_accepted,
            ["eagle2: prompt 2: other accepted", "eagle2: the export read back: prompt 2: other accepted"],
        ),
        (
            another_text,
            [
                "eagle2: prompt 1: other tokens",
                "eagle2: the export read back: prompt 1: other tokens",
                "eagle2: prompt 1: not SGLang's plain text",
            ],
        ),
        (another_plain_text, ["plain: prompt 2: other tokens", "eagle2: prompt 2: not SGLang's plain text"]),
    ],
)
def test_what_differs_is_noticed(target, case, monkeypatch, tmp_path, change, noticed):
    monkeypatch.setattr(check_in_sglang, "in_sglang", answers(target, case, change))
    report = check_in_sglang.tried([case], Path("python"), target, PROMPTS, ARGS, tmp_path)
    assert report["wrong"] == noticed
    assert report["results"][0]["texts_equal"] == len(PROMPTS) - (change is another_text)


def test_a_head_that_sglang_does_not_answer_with_is_noticed(target, case, monkeypatch, tmp_path):
    works = answers(target, case)

    def in_sglang(python, engine, *rest):
        if "speculative_algorithm" in engine:
            raise ValueError("no such model")
        return works(python, engine)

    monkeypatch.setattr(check_in_sglang, "in_sglang", in_sglang)
    report = check_in_sglang.tried([case], Path("python"), target, PROMPTS, ARGS, tmp_path)
    assert report["wrong"] == ["eagle2: SGLang gave no answer: no such model"]


def test_the_stand_in_for_verification_accepts_as_far_as_the_target_agrees():
    drafts, target = torch.tensor([[5, 7, 8, 9], [5, 6, 6, 6]]), torch.tensor([[7, 8, 1, 2], [4, 6, 6, 3]])
    places = torch.arange(8).view(2, 4)
    predicts, accepted, counts = torch.zeros(8).int(), torch.full((2, 4), -1).int(), torch.zeros(2).int()
    stand_ins.verify_tree_greedy_cpu(predicts, accepted, counts, drafts, places, target_predict=target)
    assert counts.tolist() == [2, 0]
    assert accepted.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts.tolist() == [7, 8, 1, 0, 4, 0, 0, 0]


def test_the_stand_in_for_links_makes_chains():
    mask, positions = torch.ones(2 * 9, dtype=torch.bool), torch.zeros(6, dtype=torch.long)
    index, links = torch.zeros(2, 3).long(), torch.full((2, 3), -1)
    lengths = torch.tensor([5, 9])
    stand_ins.build_tree_kernel_efficient_cpu(
        None, None, lengths, mask, positions, index, links, None, 1, 2, 3, mask_mode=1
    )
    assert positions.tolist() == [5, 6, 7, 9, 10, 11]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert links.tolist() == [[1, 2, -1]] * 2
    assert torch.equal(mask.view(2, 3, 3), torch.ones(2, 3, 3, dtype=torch.bool).tril())


def test_the_stand_ins_for_attention_read_the_slots_of_a_request():
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(6, heads, 8, generator=generator) for heads in (4, 2, 2))
    slots = torch.tensor([7, 2, 5, 9, 1, 3])
    caches = torch.zeros(2, 12, 2, 8)
    caches[0, slots[:5]], caches[1, slots[:5]] = keys[:5], values[:5]
    table, request = torch.zeros(3, 10).int(), torch.tensor([2])
    table[2, :6] = slots
    out, how = torch.zeros(6, 4, 8), (0.5, 0.0, False, 0, None, None)
    length, start = torch.tensor([5]), torch.tensor([0])
    stand_ins.extend_attention_cpu(
        q[:5], None, None, out, *caches, 1, 1, table, request, length, length, start, 5, *how, None, True
    )
    stand_ins.decode_attention_cpu(
        q[5:], *caches, 1, 1, out[5:], keys[5:], values[5:], slots[5:], None, table, request, length + 1, *how
    )
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted[0].transpose(0, 1))
