"""A target that repeats itself less: unlikelihood of what its own greedy answers repeat.

    python scripts/unlikelihood.py --target build/target --data build/data --conversations conversations.jsonl.xz \\
        --out build/less

(Welleck et al. 2020, arXiv 1908.04319, of sequences.) Every ten steps the target answers 320 questions greedily. A step
takes 32 of these answers, in which each token that ends a run of four that stood before costs -log(1 - p), and two rows
of --data (scripts/demo_data.py) with the usual loss. That costs likelihood too. So what is written is a mean of the
weights before and after, of which --share are those after (Wortsman et al. 2022, arXiv 2109.01903).
OUT/unlikelihood.json has the share of repeated runs in answers to questions held out, at temperature 0 and 0.7, and the
held-out loss: `before`, `unmixed`, and `after`, of the mean.
"""

import argparse
import copy
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import torch
from torch import Tensor
from tqdm import trange
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.engine.engine import Engine
from specdec.lab.bench.from_scratch import draw_questions, split
from specdec.model.loader import load_target
from specdec.structs import Sampling
from specdec.text import encode_chat
from specdec.training.pretrain import save_target

RUN = 4  # tokens
ANSWERS, EVERY, ROWS = 32, 10, 2  # answers a step, steps between rounds of answers, rows of data a step
PROMPT, NEW = 160, 96  # tokens of a question at most, and of an answer
HELD_OUT, HELD_NEW, HELD_ROWS = 64, 128, 24
LR, WARMUP = 1e-4, 10
FALL = 0.25  # of the steps, in which the rate falls to 0


def repeats(tokens: Sequence[int]) -> list[bool]:
    """Of each token, whether the run of four that it ends stood before."""
    seen, found = set(), []
    for end in range(1, len(tokens) + 1):
        run = tuple(tokens[max(0, end - RUN) : end])
        found.append(len(run) == RUN and run in seen)
        seen.add(run)
    return found


def likelihood(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The usual loss of ids [B,T], in fp32."""
    logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def unlikelihood(model: LlamaForCausalLM, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """The mean of -log(1 - p) over the repeats in answers; rows: the ids of a question and of its answer. 0 of none."""
    width = max((len(question) + len(answer) for question, answer in rows), default=0)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    bad = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (question, answer) in enumerate(rows):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        bad[row, len(question) : len(question) + len(answer)] = torch.tensor(repeats(answer))
    if not bad.any():
        return torch.zeros(())
    states = model.model(ids, use_cache=False).last_hidden_state[:, :-1][bad[:, 1:]]
    logits = model.lm_head(states)
    chosen = logits.gather(1, ids[:, 1:][bad[:, 1:]].unsqueeze(1)).squeeze(1)
    return -torch.log1p(-(chosen - logits.logsumexp(1)).exp().clamp(max=1 - 1e-5)).mean()


class Answerer:
    """A target that is still learning, as our engine decodes with it."""

    def __init__(self, model: LlamaForCausalLM, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def answers(
        self, questions: Sequence[str], new: int, temperature: float = 0.0
    ) -> list[tuple[list[int], list[int]]]:
        """The ids of each question that is short enough, and of its answer."""
        with tempfile.TemporaryDirectory() as folder:
            save_target(copy.deepcopy(self.model), self.tokenizer, Path(folder) / "target")
            target = load_target(Path(folder) / "target")
            prompts = [encode_chat(target, [{"role": "user", "content": text}]) for text in questions]
            prompts = [ids for ids in prompts if len(ids) <= PROMPT]
            engine, rows = Engine(target), []
            for start in range(0, len(prompts), 64):
                part = prompts[start : start + 64]
                result = engine.generate(part, max_new_tokens=new, sampling=Sampling(temperature), seed=0)
                rows += [(ids, row.tokens) for ids, row in zip(part, result.rows, strict=True)]
            return rows

    def report(self, questions: Sequence[str], held: Tensor) -> dict[str, float]:
        """The share of repeated runs at each temperature, and nats a token of rows that are held out."""
        found = {}
        for temperature in (0.0, 0.7):
            flags = [f for _, ids in self.answers(questions, HELD_NEW, temperature) for f in repeats(ids)[RUN - 1 :]]
            found[f"repeated_at_{temperature}"] = round(float(np.mean(flags)), 4)
        with torch.no_grad():
            found["heldout_chat"] = round(
                float(np.mean([likelihood(self.model, part).item() for part in held.split(4)])), 4
            )
        return found


def rows_of(path: Path, count: int) -> Iterator[Tensor]:
    """Rows of the data, `count` at a time, in a random order."""
    rows = np.load(path, mmap_mode="r")
    order = np.random.default_rng(7).permutation(len(rows))
    for start in range(0, len(order) - count + 1, count):
        yield torch.from_numpy(rows[order[start : start + count]].astype(np.int64))


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a Llama with its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="what scripts/demo_data.py wrote")
    parser.add_argument("--conversations", type=Path, required=True, help="whose questions are answered")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--share", type=float, default=0.5, help="of the new weights in the mean")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    output_folder(args.out.parent)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    answerer = Answerer(model, AutoTokenizer.from_pretrained(args.target))
    train, heldout = split(args.conversations)
    asked = itertools.cycle(dict.fromkeys(m["content"] for m in draw_questions(train, 2 * ANSWERS * args.steps)))
    unseen = list(dict.fromkeys(m["content"] for m in draw_questions(heldout, 4 * HELD_OUT)))[:HELD_OUT]
    held = torch.from_numpy(np.load(args.data / "held_chat.npy")[:HELD_ROWS].astype(np.int64))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    report = {"steps": args.steps, "share": args.share, "before": answerer.report(unseen, held)}
    print(json.dumps(report["before"]), flush=True)
    optimizer, data = (
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0),
        rows_of(args.data / "chat.npy", ROWS),
    )
    for step in trange(args.steps, desc="steps"):
        if step % EVERY == 0:
            pool = answerer.answers(list(itertools.islice(asked, ANSWERS * EVERY)), NEW)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP, (args.steps - step) / (FALL * args.steps))
        likelihood(model, next(data)).backward()
        loss = unlikelihood(model, pool[step % EVERY :: EVERY])
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report["unmixed"] = answerer.report(unseen, held)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), start, strict=True):
            parameter.lerp_(old, 1 - args.share)
    report["after"] = answerer.report(unseen, held)
    print(json.dumps(report["after"]), flush=True)
    save_target(model, answerer.tokenizer, args.out, unlikelihood=report)


if __name__ == "__main__":
    main()
