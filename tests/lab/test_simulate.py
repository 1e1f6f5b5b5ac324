"""The simulation: its formulas by hand, its limits, and that it never passes for a measurement."""

import json
from dataclasses import replace

import pytest

from specdec.lab.cost import simulate
from specdec.lab.cost.roofline import (
    CHAIN,
    CONFIGS,
    HARDWARE,
    PLAIN,
    TREE,
    ForwardShape,
    Hardware,
    Roofline,
    RoundLaunches,
    decoder,
    eagle3_of,
)
from specdec.lab.cost.simulate import speed_up, tau_of
from specdec.trees.spec import TreeSpec

FREE = Hardware(bandwidth=1e12, flops=1e15, memory=1e12, launch=0.0, bandwidth_share=1.0, flops_share=1.0)
TARGET = ForwardShape(weights=5e9, layers=10, kv=1e4, heads_dim=1000)  # 10 GB
DRAFTER = ForwardShape(weights=5e7, layers=1, kv=1e3, heads_dim=1000)
ROUND = RoundLaunches(layer=10, target=7, verification=6, commit=5, settle=4, root=3, level=20, selection=2, absorb=30)
LAUNCHES = {PLAIN: RoundLaunches(10, 7, 3, 1, 4), CHAIN: ROUND, TREE: ROUND}


def costs(hardware: Hardware = FREE) -> Roofline:
    return Roofline(hardware, TARGET, DRAFTER, LAUNCHES, host=0.0)


def test_shape_of_llama_8b():
    """8.03 B parameters, of which the embedding is read by the row; 128 KiB of cache a token."""
    shape = decoder(*CONFIGS["llama-3.1-8b"])
    assert shape.weights + 128256 * 4096 == pytest.approx(8.03e9, rel=2e-3)
    assert shape.kv * shape.bytes_each == 128 * 1024


def test_a_forward_by_hand():
    c = costs()
    # weights 10 GB at 1 TB/s, and the cache of 1000 tokens of 20 kB
    assert c.forward(TARGET, 1, 1000, 1, 0).seconds == pytest.approx(10e-3 + 20e-6)
    # 2000 rows: 2 * 5e9 * 2000 FLOPs at 1 PFLOP/s are more than the weights' bytes; attention 4*10*1000*1000*2000
    assert c.forward(TARGET, 1000, 1000, 2, 0).seconds == pytest.approx(20e-3 + 80e-6)
    slow = costs(Hardware(1e12, 1e15, 1e12, launch=1e-5, bandwidth_share=0.5, flops_share=0.5))
    assert slow.forward(TARGET, 1, 1000, 1, 100).seconds == pytest.approx(2 * (10e-3 + 20e-6) + 100 * 1e-5)
    # 15 logits of 2 bytes for each of 2 rows are written, too
    assert c.forward(replace(TARGET, vocab=15), 2, 1000, 1, 0).bytes == 10e9 + 20e6 + 60


def test_a_round_by_hand():
    setting = TreeSpec(2, 3, 6)
    c = costs(Hardware(1e12, 1e15, 1e12, 1e-5, 1.0, 1.0))
    launches = 3 + 2 * 20 + 2 + (7 + 10 * 10) + 6 + 5 + 30 + 4  # two levels behind the root's
    # two levels and what absorbs read the drafter's weights; keys and values of 3 tokens move
    assert c.round(setting, 0.0, 1) == pytest.approx(3 * 1e-4 + 10e-3 + 2 * 3 * 2e4 / 1e12 + launches * 1e-5)
    assert sum(part.launches for part in c.parts(setting, 0.0).values()) == launches
    assert c.plain(0.0) == pytest.approx(10e-3 + (7 + 10 * 10 + 3 + 1 + 4) * 1e-5)


def test_what_a_part_of_an_eagle3_head_reads():
    """fc only where it absorbs, the head only where it guesses; all of it once for each guess but the root's fc."""
    drafter = eagle3_of(4096, 14336, 32, 8, 128, 32000)
    c, setting = Roofline(FREE, TARGET, drafter, LAUNCHES, host=0.0), TreeSpec(2, 3, 6)
    parts = c.parts(setting, 0.0)
    fc, head = 3 * 4096 * 4096 * 2, 32000 * 4096 * 2
    assert parts["root"].bytes == head
    assert parts["draft levels"].bytes == 2 * (drafter.bytes - fc)
    assert parts["absorb"].bytes == drafter.bytes - head


def test_tau_by_hand():
    assert tau_of(TreeSpec(1, 3, 4), [0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    # of two ranks the best three nodes behind the root: 0, 00, 1
    assert tau_of(TreeSpec(2, 2, 4), [0.6, 0.3]) == pytest.approx(1 + 0.6 + 0.36 + 0.3)


def test_memory_bound_gains_tau_and_compute_bound_loses():
    setting, tau = TreeSpec(4, 4, 32), 3.0
    alone = speed_up(costs(), setting, tau, 0.0, 1)
    assert 0.9 * tau < alone < tau  # the drafter takes the rest
    assert speed_up(costs(), setting, tau, 0.0, 1000) < tau / 16
    gains = [speed_up(costs(), setting, tau, 100.0, batch) for batch in (1, 8, 64, 512)]
    assert gains == sorted(gains, reverse=True)


def test_the_memory_is_a_limit():
    h = Roofline(HARDWARE["h100"], decoder(*CONFIGS["llama-3.3-70b"]), DRAFTER, LAUNCHES)
    assert not h.fits(1, 1)  # 140 GB of weights
    small = costs(Hardware(1e12, 1e15, 10.2e9))
    assert small.fits(100, 1)
    assert not small.fits(10_000, 1)  # 10.1 GB of weights, 0.2 GB of cache


FEW = ("--batch", "1,64", "--context", "1024,1000000", "--steps", "3", "--topk", "1,2", "--num-draft-tokens", "2,4,8")


def test_the_command_marks_everything(tmp_path, capsys):
    out = tmp_path / "c.png"
    simulate.main(["--hardware", "h200", *FEW, "--out", str(out), "--json"])
    text = capsys.readouterr().out
    assert "SIMULATED" in text.split("\n{")[0]
    assert "does not fit" in text
    result = json.loads(text.splitlines()[-1])
    assert "SIMULATED" in result["note"]
    assert all(row["simulated"] for row in result["rows"])
    assert [row["fits"] for row in result["rows"]] == [True, False, True, False]
    assert result["rows"][0]["speed_up"] > result["rows"][2]["speed_up"]
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_numbers_of_ones_own(capsys):
    """On a machine without arithmetic to spare the advice is to decode plainly."""
    simulate.main(["--bandwidth", "100", "--flops", "0.1", "--target-bytes", "4", *FEW])
    assert "(decode plainly)" in capsys.readouterr().out


def test_a_target_of_ones_own(target_path, capsys):
    simulate.main(["--hardware", "4090", "--target", str(target_path), *FEW, "--json"])
    assumed = json.loads(capsys.readouterr().out.splitlines()[-1])["assumed"]
    assert assumed["target"]["layers"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --hardware"),
        (["--bandwidth", "100"], "or --flops too"),
        (["--hardware", "h100", "--bandwidth", "-1"], "--bandwidth must be positive"),
        (["--hardware", "h100", "--flops-share", "1.5"], "--flops-share must lie in (0, 1]"),
        (["--hardware", "h100", "--accept", "0.7,0.6"], "their sum 1.3 exceeds 1"),
        (["--hardware", "h100", "--accept", "0.7,x"], "wants numbers"),
        (["--hardware", "h100", "--accept", "0.7", "--topk", "2"], "no setting"),
        (["--hardware", "h100", "--target-bytes", "0"], "--target-bytes must be positive"),
        (["--hardware", "h100", "--steps", "0"], "must be at least 1"),
    ],
)
def test_mistakes(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        simulate.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
