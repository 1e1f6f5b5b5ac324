"""A disk that is full: one sentence, and what was there before stays. A fake that raises, or a limit on the size of
files, simulates the disk."""

import errno
import os
from pathlib import Path

import pytest
import torch
from short_runs import assert_goes_on, small_files, trainer
from test_cache import samples, target, writer

from specdec.drafters.formats import load_drafter, save_drafter
from specdec.model.loader import load_target
from specdec.training.features.feature_cache import FeatureCache, shard_path
from specdec.training.loop.checkpoint import read_newest, write_checkpoint


def test_a_log_line_that_does_not_fit_stops_the_run_with_its_checkpoint(tmp_path, monkeypatch):
    run, original = trainer(tmp_path / "cut"), Path.open

    def refusing(self, *args, **kwargs):
        if self.name == "log.jsonl" and run.step == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing)
        with pytest.raises(ValueError, match=r"cannot write to .*: No space left on device; resume=true goes on"):
            run.train()
    assert_goes_on(trainer, tmp_path / "cut", 4)


@pytest.mark.parametrize("room", [100, 20_000])
def test_a_disk_that_is_full_leaves_the_last_good_checkpoint(tmp_path, room):
    state = {"step": 1, "weights": torch.arange(50_000.0)}
    write_checkpoint(tmp_path, 1, state, keep=1)
    sentence = r"cannot write .*00002\.pt: File too large; .*00001\.pt is the last good"
    with small_files(room), pytest.raises(ValueError, match=sentence):
        write_checkpoint(tmp_path, 2, state, keep=1)
    assert torch.equal(read_newest(tmp_path)[1]["weights"], state["weights"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.pt"]


def test_a_full_disk_and_a_cache(tmp_path):
    """What fits is stored; with room the same command makes the rest."""
    data = sorted(samples(60), key=lambda sample: len(sample.ids))  # so that the last shards are the largest
    whole = writer(tmp_path, of=target(), data=data, shard_tokens=1)
    sizes = [whole.form.bytes([sample], 1) for sample in data]
    with (
        small_files((min(sizes) + max(sizes)) // 2),
        pytest.raises(ValueError, match=r"File too large.*; \d+ of 60 shards are there, and the same command goes on"),
    ):
        whole.write()
    there = [shard_path(tmp_path, i, 60).exists() for i in range(60)]
    assert there[0]
    assert not there[-1]
    assert not list(tmp_path.glob("*.partial"))
    assert whole.write() == 60 - sum(there)
    assert len(FeatureCache(tmp_path).samples) == 60


def test_a_full_disk_and_an_exported_drafter(target_path, drafter_path, tmp_path):
    of = load_target(target_path)
    drafter = load_drafter(drafter_path, of)
    save_drafter(drafter, tmp_path / "draft", of)
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()
    with small_files(20_000), pytest.raises(ValueError, match=r"cannot write .*draft: .*File too large"):
        save_drafter(drafter, tmp_path / "draft", of)
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft"]
    with pytest.raises(ValueError, match="holds draft, which is not of a drafter"):  # nor is a stranger deleted
        save_drafter(drafter, tmp_path, of)
