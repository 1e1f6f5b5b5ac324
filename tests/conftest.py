"""Checkpoints on disk that several tests share: a tiny target with a tokenizer, and a drafter that fits it.

Fixtures import what they make them with, as the process that only hands tests out to others reads this file too.
"""

import hashlib
import os

import checkout  # noqa: F401  (processes that tests start import this checkout too, installed or not)

if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: more threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from interpreter import use_interpreter

if not torch.cuda.is_available():  # kernels run on CPU tensors; to be said before anything imports Triton
    use_interpreter()

import pytest

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is 12 + 30? It is 42.",
    "Ein Straßenname, ein Café, 日本語.",
]


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="run all cases of tests marked `matrix`, not a tenth of them")


def pytest_collection_modifyitems(config, items):
    """Of every test marked `matrix` keep a fixed tenth of the cases, at least one."""
    if config.getoption("--whole"):
        return
    matrices: dict[str, list[tuple[str, str]]] = {}
    for item in items:
        if item.get_closest_marker("matrix"):
            name = hashlib.sha256(item.name.encode()).hexdigest()
            matrices.setdefault(item.nodeid.partition("[")[0], []).append((name, item.nodeid))
    left_out = {nodeid for cases in matrices.values() for _, nodeid in sorted(cases)[max(len(cases) // 10, 1) :]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol():
    """End a process of xdist whose device is lost, and let another take its place.

    Otherwise one faulty kernel would fail every later test of the process."""
    done = yield
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(70)  # the reports have been sent; an orderly end would ask the device again
    return done


@pytest.fixture(scope="session")
def whole(request) -> bool:
    """Whether all cases are asked for (`--whole`): tests that draw their cases draw a tenth of them otherwise."""
    return request.config.getoption("--whole")


@pytest.fixture
def as_in_decoding():
    """Seeds torch, and switches gradients off."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def matmul_precision():
    """Sets torch's precision of products of fp32, for a test."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def target_path(tmp_path_factory):
    from helpers import save_hf

    from scripts.pretrain_target import train_tokenizer

    path = tmp_path_factory.mktemp("checkpoints") / "target"
    tokenizer = train_tokenizer(iter(TEXTS * 20), 320)
    save_hf(path, "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, head=15.0)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def drafter_path(target_path):
    from specdec.drafters import eagle3
    from specdec.drafters.formats import save_drafter
    from specdec.drafters.vocab import DraftVocab
    from specdec.model.loader import load_target

    target = load_target(target_path)
    torch.manual_seed(0)
    vocab = DraftVocab(target.config.vocab, torch.arange(0, target.config.vocab, 2))
    drafter = eagle3.create(target, vocab=vocab)
    save_drafter(drafter, target_path.parent / "drafter", target)
    return target_path.parent / "drafter"


@pytest.fixture(scope="module")
def pair(target_path, drafter_path):
    """These two, loaded. Their weights are random, so they would write anything."""
    from specdec import load_drafter, load_target

    target = load_target(target_path)
    return target, load_drafter(drafter_path, target)


@pytest.fixture(autouse=True)
def no_first_line(monkeypatch):
    """Leave out the line with which commands begin (`specdec.cli.commands.loading`): tests compare standard error."""
    monkeypatch.setattr("specdec.__main__.loading", lambda *what: None)
    monkeypatch.setattr("specdec.cli.hydra_entry.loading", lambda *what: None)
