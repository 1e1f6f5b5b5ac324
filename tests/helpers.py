"""Small models made on the spot."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import Engine, Sampling
from specdec import __main__ as entry
from specdec.drafters import dflash, eagle, eagle3, medusa, mtp, ngram, pard, peagle
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.vocab import DraftVocab
from specdec.engine.report import RoundReport
from specdec.engine.sequence import Sequence
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.sampling.filters import filtered_probs
from specdec.trees import Chain, DynamicTree
from specdec.verify import SampleAndMatch

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_hf(folder, family: str, dtype=torch.float32, shard: str = "5GB", seed: int = 0, head: float = 1.0, **fields):
    """A random transformers model of a family, saved; biases and norms are random too, so that none is forgotten."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SMALL | fields))
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(4)  # far enough from linear that a wrong term shows
            elif "lm_head" in name:
                parameter.mul_(head)  # a larger head makes the next token less of a lottery
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit_config(folder, *dropped: str, **fields) -> dict:
    """Change config.json of a saved model; returns its new content."""
    file = folder / "config.json"
    config = {key: value for key, value in (json.loads(file.read_text()) | fields).items() if key not in dropped}
    file.write_text(json.dumps(config))
    return config


def edit_tensors(folder, *dropped: str, **added: torch.Tensor) -> None:
    """Change the tensors of a saved model."""
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | added).items() if name not in dropped}
    save_file(tensors, file, {"format": "pt"})


def run_here(main, *words: str) -> subprocess.CompletedProcess:
    """A command's `main` with these arguments in this process, as `subprocess.run` would tell of it: a process of its
    own takes seconds to import what is imported here already."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch("sys.argv", ["command", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def main_of(name: str) -> Callable[..., None]:
    """Return the `main` of a command, with the words that follow its name, or those of sys.argv."""

    def main(words: list[str] | None = None) -> None:
        entry.main([*name.split(), *(sys.argv[1:] if words is None else words)])

    return main


def is_running(number: int | str) -> bool:
    """Whether a process has not ended; an ended one counts until it has been waited for."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def refused(main, *words: object) -> str:
    """Return the one sentence with which a command refuses its arguments: exit code 2, no traceback."""
    done = run_here(main, *map(str, words))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "error: " in line]
    return said


def finish(engine: Engine) -> list[RoundReport]:
    """Step until nothing is left to do; the reports of all steps."""
    return list(iter(engine.step, None))


MIXED = (
    Sampling(), Sampling(0.9, top_k=9), Sampling(0.7, repetition_penalty=1.7, frequency_penalty=0.9),
    Sampling(repetition_penalty=1.3),
)  # fmt: skip


def job(number: int, samplings: tuple = MIXED, **more) -> dict:
    """What `Engine.add` is given for the n-th of many sequences."""
    prompt = [number % 16 + 1, 3 * number % 16 + 1, 5][: number % 3 + 1]
    how = {"max_new_tokens": [30, 4, 17, 9][number % 4], "sampling": samplings[number % len(samplings)]}
    return {"prompt": prompt, "seed": number} | how | more


def come_and_go(engine: Engine, jobs: list[dict], rows: int = 5, room: int = 80, abort: int | None = None, **reserved):
    """Decode `Engine.add`'s jobs, which come in waves, so that all numbers of rows decode at some time. Number `abort`
    is given up when the next one comes. Returns the sequences, which have the texts that they have alone, and the
    reports of all rounds."""
    engine.reserve(rows, room, **reserved)
    sequences, reports, step = [], [], 0
    while True:
        if len(sequences) < len(jobs) and step % 9 in (0, 1, 4):
            sequences.append(engine.add(**jobs[len(sequences)]))
            if len(sequences) - 2 == abort:
                engine.abort(sequences[-2])
        if (report := engine.step()) is None and len(sequences) == len(jobs):
            break
        reports += [] if report is None or report.prefill else [report]
        step += 1
    assert_as_alone(engine.target, sequences)
    return sequences, reports


def assert_as_alone(target: Target, sequences: list[Sequence]) -> None:
    """Each has the text that it has alone and decoded plainly, or, if it was given up, the beginning of it."""
    model = sum(p.double().sum().item() for p in target.parameters())
    for s in sequences:
        key = model, tuple(s.prompt), s.limit, s.sampling, s.seed, s.eos
        if key not in ALONE:
            how = {"max_new_tokens": s.limit, "sampling": s.sampling, "seed": [s.seed], "eos": s.eos}
            ALONE[key] = Engine(target).generate([s.prompt], **how, logprobs=True).rows[0]
        alone, count = ALONE[key], len(s.tokens)
        assert s.tokens == alone.tokens[:count]
        assert s.finish == "abort" or (s.tokens == alone.tokens and s.finish is not None)
        if s.logprobs is not None:
            torch.testing.assert_close(
                torch.tensor(s.logprobs), torch.tensor(alone.logprobs[:count]), rtol=0, atol=1e-4
            )


ALONE: dict[tuple, Sequence] = {}  # texts of plain decoding


def tiny_target(vocab: int = 17, layers: int = 3, seed: int = 0, context: int = 256) -> Target:
    """A random target whose next-token distribution depends strongly on what it read."""
    torch.manual_seed(seed)
    config = ModelConfig(
        layers=layers, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=vocab, eps=1e-5, rope=Rope(),
        context=context, tied=False,
    )  # fmt: skip
    return random_model(config)


def random_model(config: ModelConfig, std: float = 0.25) -> Target:
    """A target whose matrices are random."""
    target = Target(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=std)
    return target


@torch.no_grad()
def randomised(drafter):
    """Add noise to all parameters, biases and norms included, so that none is forgotten."""
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    return drafter


# Every drafter that learns, with the settings under which its forward differs: name -> its `create`.
LEARNERS = {
    "eagle3": eagle3.create,
    "eagle3-post-norm-feedback": partial(eagle3.create, tap_norms=True, feedback="post"),
    "eagle3-speculators": partial(eagle3.create, input_norm=True, residual_norm=True),
    "eagle3-no-head-norm": partial(eagle3.create, head_norm=False, qkv_bias=True),
    "eagle": eagle.create,
    "eagle-no-bias": partial(eagle.create, fc_bias=False),
    "mtp": mtp.create,
    "mtp-pre-norm-feedback": partial(mtp.create, feedback="pre", hidden_first=True),
    "mtp-three-heads": partial(mtp.create, heads=3),
    "mtp-two-heads-pre-norm": partial(mtp.create, heads=2, feedback="pre"),
    "medusa": medusa.create,
    "medusa-own-heads": partial(medusa.create, own_heads=True, blocks=2),
}


def tiny_drafter(target: Target, seed: int = 1, draft_vocab: int | None = None, kind: str = "eagle3"):
    """A random drafter for a tiny target; its draft vocabulary leaves tokens out unless it is None. Biases and norms
    are random too, so that none is forgotten."""
    torch.manual_seed(seed)
    vocab = None
    if draft_vocab is not None:
        ids = torch.arange(draft_vocab) * 2 % target.config.vocab
        vocab = DraftVocab(target.config.vocab, ids.sort().values)
    drafter = LEARNERS[kind](target, vocab=vocab).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


# Block drafters, with the settings under which their forward differs.
BLOCKS = {
    "dflash": {},
    "dflash-windows": {"sliding_layers": 1, "window": 3, "causal": True},
    "dspark": {"label": "p+k+1", "conditional": "markov", "confidence": True},
    "dspark-rnn": {"label": "p+k+1", "conditional": "markov_rnn"},
    "domino": {"label": "p+k+1", "conditional": "domino", "head": {"state": 6, "prefix": 1}},
    "dflash2": {"conditional": "selector", "head": {"candidates": 4}, "convolution": 8},
}


# What differs less.
MORE_BLOCKS = {
    "window before the anchor": {
        "sliding_layers": 1, "window": 2, "window_from": "anchor", "sliding_causal": False,
    },
}  # fmt: skip


def tiny_block(target: Target, seed: int = 1, **switches):
    """A random block drafter for a tiny target, which leaves tokens out."""
    torch.manual_seed(seed)
    vocab = DraftVocab(target.config.vocab, (torch.arange(8) * 2 % target.config.vocab).sort().values)
    how = {"layers": 2, "taps": 2, "block_size": 6, "rank": 4} | switches
    return randomised(dflash.create(target, vocab=vocab, **how).eval())


# Drafters of blocks of mask rows, in the same way.
PARALLEL = {
    "peagle": partial(peagle.create, layers=3),
    "peagle-speculators": partial(peagle.create, layers=1, tap_norms=True, residual_norm=True, qk_norm=True),
    "pard": partial(pard.create, layers=2),
    "pard2": partial(pard.create, layers=2, taps=2, scale=0.5),
}


def tiny_parallel(target: Target, kind: str, seed: int = 1):
    """A random drafter of five mask rows for a tiny target; P-EAGLE leaves tokens out."""
    torch.manual_seed(seed)
    ids = (torch.arange(8) * 2 % target.config.vocab).sort().values if kind.startswith("peagle") else None
    return randomised(PARALLEL[kind](target, vocab=DraftVocab(target.config.vocab, ids), block_size=6).eval())


# Every way to draft, on a tiny target: name -> a function of the target.
DRAFTERS = (
    {kind: partial(tiny_drafter, draft_vocab=8, kind=kind) for kind in LEARNERS}
    | {
        "lookup": partial(ngram.create, mode="lookup"),
        "suffix": partial(ngram.create, mode="suffix"),
        "draft-model": lambda target: DraftModel(tiny_target(seed=5)),
    }
    | {kind: partial(tiny_block, **switches) for kind, switches in BLOCKS.items()}
    | {kind: partial(tiny_parallel, kind=kind) for kind in ("peagle", "pard2")}
)


@torch.inference_mode()
def assert_close_in_fp32(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to 1e-5, or to 1e-5 of how widely the values are spread, if that is more than 1: processors sum in other
    orders, and fp32 has no more digits."""
    spread = max(1.0, theirs.std(correction=0).item())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * spread)


def assert_tree_matches(model, target) -> None:
    """A ragged prefill, a tree, and a token after part of the tree was committed: the logits of every node are those
    that transformers' model gives for the plain text up to it."""
    torch.manual_seed(3)
    prompts = [torch.randint(99, (n,)) for n in (5, 17, 11)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lens = torch.tensor([len(p) for p in prompts])
    cache = target.new_cache(3, 64)
    last, _ = target(padded, cache, last=lens - 1)
    cache.advance(lens, 17)
    tokens = torch.randint(99, (3, 5))
    parents = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    ancestors = torch.tensor(parents).bool().expand(3, 5, 5)
    depth = torch.tensor([0, 1, 1, 2, 3]).expand(3, 5)
    logits, _ = target(tokens, cache, depth=depth, ancestors=ancestors)
    for b, prompt in enumerate(prompts):
        torch.testing.assert_close(last[b, 0], model(prompt[None]).logits[0, -1], rtol=0, atol=1e-4)
        for node, path in enumerate(([0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4])):
            expected = model(torch.cat([prompt, tokens[b, path]])[None]).logits[0, -1]
            torch.testing.assert_close(logits[b, node], expected, rtol=0, atol=1e-4)

    # Accept root, 2, 3 of row 0, the root alone of row 1, root and 1 of row 2; then go on with one token each.
    cache.commit(torch.tensor([[0, 2, 3], [0, 0, 0], [0, 1, 0]]), torch.tensor([3, 1, 2]), 20)
    following = torch.randint(99, (3, 1))
    logits, _ = target(following, cache)
    for b, path in enumerate(([0, 2, 3], [0], [0, 1])):
        sequence = torch.cat([prompts[b], tokens[b, path], following[b]])
        torch.testing.assert_close(logits[b, 0], model(sequence[None]).logits[0, -1], rtol=0, atol=1e-4)


def texts_of(engine: Engine, prompts: list[list[int]], **how) -> list[list[int]]:
    """Return the tokens of each row."""
    return [row.tokens for row in engine.generate(prompts, **how).rows]


def texts_of_transformers(model, prompts: list[list[int]], new: int, penalty: float = 1.0) -> list[list[int]]:
    """Return the greedy text of each prompt alone by the model's own `generate`."""
    how = {"do_sample": False, "max_new_tokens": new, "eos_token_id": -1, "pad_token_id": 0}
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=penalty, **how)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def assert_same_greedy_text(model, target, new: int = 30, penalty: float = 1.0) -> list[list[int]]:
    """Plain, speculative and transformers' `generate`, one row and three of different lengths: the same tokens, which
    are returned."""
    prompts = [[3, 5, 7, 9], [1], [(7 * i) % 99 for i in range(23)]]
    expected, accepted = texts_of_transformers(model, prompts, new, penalty), 0
    how = {"max_new_tokens": new, "eos": frozenset(), "sampling": Sampling(repetition_penalty=penalty)}
    drafter = eagle3.create(target).eval()
    for engine in (Engine(target), Engine(target, drafter, DynamicTree(3, 3, 9)), Engine(target, drafter, Chain(3))):
        alone = [engine.generate([prompt], **how).rows[0] for prompt in prompts]
        together = engine.generate(prompts, **how).rows
        assert [row.tokens for row in alone] == [row.tokens for row in together] == expected
        accepted += sum(sum(row.trace.accepted) for row in (*alone, *together))
    assert accepted > 0, "nothing was accepted: the test shows nothing"
    return expected


def penalised(logits, prompt: list[int], outputs, sampling: Sampling):
    """The penalties by the book: logits [R,V] after `prompt` and then outputs [R,n], a row at a time, in fp64."""
    result = logits.double().clone()
    for row, output in zip(result, outputs.tolist(), strict=True):
        for token in {*prompt, *output}:
            row[token] *= sampling.repetition_penalty ** (-1 if row[token] > 0 else 1)
        for token in output:
            row[token] -= sampling.frequency_penalty
        for token in set(output):
            row[token] -= sampling.presence_penalty
    return result


@torch.inference_mode()
def joint_of_tokens_2_and_3(target, prompt, sampling):
    """Exact joint distribution [V,V] of the second and third new token, the first summed out.

    The first comes from the prefill; these two come from trees, in one round or in two.
    """
    vocab = target.config.vocab
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    rows = torch.cat([torch.tensor([prompt]).expand(len(pairs), -1), pairs], 1)
    logits, _ = target(rows, None)
    logits = [logits[:, i - 3] for i in range(3)]
    if sampling.penalised:
        logits = [penalised(x, prompt, pairs[:, :i], sampling) for i, x in enumerate(logits)]
    first, second, third = (filtered_probs(x, sampling).view(vocab, vocab, vocab) for x in logits)
    # first[v1, v2, x] = p(x), second[v1, v2, x] = p(x | v1), third[v1, v2, x] = p(x | v1, v2)
    return torch.einsum("a,ab,abc->bc", first[0, 0], second[:, 0], third)


def pvalue_of_tokens_2_and_3(target: Target, prompt: list[int], sampling: Sampling, result) -> float:
    """Chi-square of the second and third tokens of many rows of one prompt against their exact joint distribution."""
    return pvalue_against(joint_of_tokens_2_and_3(target, prompt, sampling), result)


def pvalue_against(joint: torch.Tensor, result) -> float:
    """The same, against a joint distribution [V,V] that is known."""
    vocab = len(joint)
    second, third = torch.tensor([row.tokens[1:3] for row in result.rows]).T
    seen = torch.bincount(second * vocab + third, minlength=vocab**2).double().view(vocab, vocab)
    return pvalue_of_counts(seen.flatten(), joint.double().flatten() * len(result.rows))


def pvalue_of_counts(seen: torch.Tensor, expected: torch.Tensor, least: float = 5.0) -> float:
    """Chi-square of counts against the counts expected. Cells with an expected count below `least` are counted
    together, as the chi-square approximation needs."""
    assert seen[expected == 0].sum() == 0, "what never happens happened, such as a token that the filters exclude"
    rare = expected < least
    together = [] if expected[rare].sum() < least else [rare]
    seen, expected = (torch.stack([*x[~rare], *(x[part].sum() for part in together)]) for x in (seen, expected))
    assert len(seen) > 3
    return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue


class Credulous(SampleAndMatch):
    """A broken rule: it emits the first draft where the target refused it."""

    def __call__(self, tree, logits, sampling, noise=None):
        verdict = super().__call__(tree, logits, sampling, noise)
        verdict.tokens[:, 0] = torch.where(verdict.n == 1, tree.tokens[:, 1], verdict.tokens[:, 0])
        return verdict
