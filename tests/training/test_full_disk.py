"""A disk that is full: one sentence, and what was there before stays. A fake that raises in place of the system, and a
real small file system where one may be mounted."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
from helpers import run_here
from short_runs import SMALL, assert_same_weights, composed, logged, trainer
from test_cache import samples, target, writer

from specdec.drafters.formats import load_drafter, save_drafter
from specdec.model.loader import load_target
from specdec.training import cache, train
from specdec.training.features.feature_cache import FeatureCache, shard_path
from specdec.training.loop.checkpoint import checkpoints, read_newest


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take all room but so many bytes."""
    ballast = disk / "ballast"
    stat = os.statvfs(disk)
    ballast.write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - leave))
    return ballast


class Refusing:
    """A file that takes what is written and refuses it when it is flushed or closed, as a full disk does."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        full()

    flush = full


@pytest.mark.parametrize("when", ["write", "flush"])
def test_a_log_line_that_does_not_fit_stops_the_run_with_its_checkpoint(tmp_path, monkeypatch, when):
    run = trainer(tmp_path)
    original = Path.open

    def refusing(self, mode="r", *args, **kwargs):
        if self.name == "log.jsonl" and run.step == 5:
            return full() if when == "write" else Refusing(original(self, mode, *args, **kwargs))
        return original(self, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing)
        with pytest.raises(ValueError, match=r"cannot write to .*: No space left on device; resume=true goes on"):
            run.train()
    whole, resumed = trainer(tmp_path / "whole"), trainer(tmp_path)
    whole.train()
    resumed.resume()
    assert resumed.step == 4
    resumed.train()
    assert_same_weights(whole, resumed)
    assert logged(tmp_path) == logged(tmp_path / "whole")


@pytest.mark.parametrize("name", ["config.yaml", "log.jsonl"])
def test_a_run_that_cannot_write_down_its_settings_says_so(where, tmp_path, monkeypatch, capsys, name):
    original = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda self, *a, **k: full() if name in self.name else original(self, *a, **k)
    )
    with pytest.raises(SystemExit) as stopped:
        train.run(composed("train", *where, f"out={tmp_path / 'run'}"))
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"cannot write {tmp_path}/run/{name}: No space left on device\n")


def test_a_real_full_disk_and_a_cache(small_disk):
    """Two of the shards fit; with room the same command makes the rest."""
    data = samples(60)
    whole = writer(small_disk / "cache", of=target(), data=data, shard_tokens=100)
    count = len(whole.manifest["shards"])
    ballast = fill(small_disk, leave=int(2.5 * whole.form.bytes(data, count) // count))
    with pytest.raises(
        ValueError, match=r"No space left on device.*; [123] of \d shards are there, and the same command"
    ):
        whole.write()
    there = [shard_path(small_disk / "cache", i, count).exists() for i in range(4)]
    assert there[0]
    assert not there[3]
    assert not list((small_disk / "cache").glob("*.partial"))
    ballast.unlink()
    assert whole.write() == count - sum(there)
    assert len(FeatureCache(small_disk / "cache").samples) == 60


@pytest.mark.parametrize("leave", [0, 4096, 100_000])
def test_a_real_full_disk_and_a_run(small_disk, leave):
    """The disk is filled after the second checkpoint; whatever does not fit, the run goes on from there."""
    ballast: list[Path] = []
    run = trainer(small_disk / "run", keep=1)
    step = run._step

    def watched(group):
        if run.step == 4 and not ballast:
            ballast.append(fill(small_disk, leave))
        return step(group)

    run._step = watched
    with pytest.raises(ValueError, match=r"cannot write .*No space left on device.*resume=true goes on from"):
        run.train()
    assert [p.name for p in checkpoints(small_disk / "run")] == ["step-00000004.pt"]
    assert read_newest(small_disk / "run")[1]["step"] == 4
    ballast[0].unlink()
    resumed = trainer(small_disk / "run", keep=1)
    resumed.resume()
    resumed.train()
    assert [row["step"] for row in logged(small_disk / "run") if row["split"] == "train"] == [*range(1, 7)]


def test_a_real_full_disk_and_an_exported_drafter(small_disk, target_path, drafter_path):
    of = load_target(target_path)
    drafter = load_drafter(drafter_path, of)
    save_drafter(drafter, small_disk / "draft", of)
    before = (small_disk / "draft" / "model.safetensors").read_bytes()
    fill(small_disk, leave=20_000)
    with pytest.raises(ValueError, match=r"cannot write .*draft: .*No space left on device"):
        save_drafter(drafter, small_disk / "draft", of)
    assert (small_disk / "draft" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in small_disk.iterdir()) == ["ballast", "draft"]


def test_the_command_on_a_real_full_disk_ends_with_one_sentence(small_disk, where):
    fill(small_disk, leave=40_000)
    done = run_here(cache.main, *SMALL, *where, f"out={small_disk / 'cache'}")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
