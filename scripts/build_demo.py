"""Build the demo from a file of conversations: tokenizer, target, its own answers, and drafters trained on them.

    python scripts/build_demo.py --data conversations.jsonl.xz --work build --out specdec/demo

Every stage leaves its result under --work and is skipped when that is there, so an interrupted build goes on. The last
stage measures tau on --bench and writes everything to --out as bf16 safetensors with a model card.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import torch

from drafters.formats import save_drafter
from lab.bench.from_scratch import SEED, draw_questions, llama_config, split
from lab.output import write_json
from specdec.api import generate, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.text import read_prompts
from specdec.types import Sampling
from training.data import Message, read_conversations
from training.pretrain import pack, pretrain, save_target, train_tokenizer
from training.regenerate import encode, regenerate
from trees.spec import TreeSpec

LENGTH = 1024  # the target's context
LIMIT_MIB = 24
TREES = (TreeSpec(4, 5, 16), TreeSpec(10, 8, 60), TreeSpec(1, 5, 6))  # with which tau is measured
MAP_SIZE = 4096  # of the FR-Spec map: half the vocabulary
# The experiments of conf/ that train each drafter, each from where the one before ended.
DRAFTERS = {
    "eagle3": ("demo", "demo_tokens"),
    "eagle2": ("demo_eagle", "demo_eagle_tokens"),
    "mtp": ("demo_mtp", "demo_mtp_tokens"),
    "medusa": ("demo_medusa",),
}


def build_target(args: argparse.Namespace, folder: Path) -> None:
    train, heldout = split(args.data)
    tokenizer = train_tokenizer((m["content"] for c in train[:30_000] for m in c), args.vocab_size)
    config = llama_config(
        tokenizer,
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        layers=args.layers,
        heads=args.hidden_size // 32,
        kv_heads=args.hidden_size // 64,
        context=LENGTH,
    )
    model, report = pretrain(
        config,
        pack(tokenizer, train, LENGTH, args.target_tokens),
        pack(tokenizer, heldout, LENGTH, 200_000),
        batch=8,
        lr=3e-3,
        muon_lr=0.02,
        seed=SEED,
        checkpoint=folder.parent / "pretrain.pt",
    )
    save_target(model, tokenizer, folder, report=report)


def build_answers(args: argparse.Namespace, folder: Path) -> None:
    """The target's own answers to questions of the training data. The first answer to a question is greedy, and all
    further ones are sampled."""
    target = load_target(folder.parent / "target")
    first: dict[str, Message] = {}
    again: list[Message] = []
    for prompt in draw_questions(split(args.data)[0], args.answers):
        if prompt["content"] in first:
            again.append(prompt)
        else:
            first[prompt["content"]] = prompt
    for name, prompts, temperature in (("greedy", first.values(), 0.0), ("sampled", again, 0.8)):
        if not (folder / f"{name}.jsonl").exists():
            regenerate(
                target,
                [p for p in (encode(target, [prompt]) for prompt in prompts) if len(p.ids) <= LENGTH // 2],
                folder / f"{name}.jsonl",
                max_new_tokens=args.answer_tokens,
                batch_size=128,
                sampling=Sampling(temperature),
                seed=SEED,
            )
    rows = [line for name in ("greedy", "sampled") for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]
    random.Random(SEED).shuffle(rows)
    write_text(folder / "all.jsonl", "".join(rows))


def run_folder(work: Path, experiment: str) -> Path:
    """The folder of a run, named as scripts/quality.py names it, so that either finds the other's runs."""
    return work / f"{experiment}-seed{SEED}"


def train_drafters(work: Path, bench: Path | None) -> None:
    """Run the trainer once for each part. A finished run resumes at its last step and ends at once. With `bench`, tau
    on its first prompts is measured along the way."""
    for experiment in (name for parts in DRAFTERS.values() for name in parts):
        out = run_folder(work, experiment)
        settings = {
            "target.path": work / "target",
            "data.path": work / "answers" / "all.jsonl",
            "out": out,
            "trainer.seed": SEED,
            "trainer.prompts": "null" if bench is None else bench,
            "+experiment": experiment,
            "resume": "auto",
        }
        command = [sys.executable, "-m", "training.train", *(f"{k}={v}" for k, v in settings.items())]
        trained = subprocess.run(command, check=False)
        if trained.returncode:
            sys.exit(trained.returncode)


def count_map(work: Path, out: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "training.count",
        "--target",
        str(work / "target"),
        "--size",
        str(MAP_SIZE),
    ]
    subprocess.run([*command, "--data", str(work / "answers" / "all.jsonl"), "--out", str(out)], check=True)


def measure(bench: Path, target, drafter) -> dict[str, float]:
    """tau on the first turns of `bench`, greedy, 64 new tokens."""
    prompts = read_prompts(bench)
    trees = [tree for tree in TREES if drafter.max_steps is None or tree.steps <= drafter.max_steps]
    return {
        ", ".join(f"{word} {value}" for word, value in tree.entries().items()): round(
            generate(target, prompts, drafter, tree=tree.build(), max_new_tokens=64).tau, 3
        )
        for tree in trees
    }


def publish(args: argparse.Namespace, work: Path) -> None:
    """Copy everything to --out in bf16, check its size, and write the card."""
    target, out = load_target(work / "target"), args.out
    shutil.rmtree(out / "target", ignore_errors=True)
    shutil.copytree(work / "target", out / "target", ignore=shutil.ignore_patterns("report.json"))
    drafters = {}
    for name, parts in DRAFTERS.items():
        runs = [run_folder(work, experiment) for experiment in parts]
        drafter = load_drafter(runs[-1] / "draft", target).to(torch.bfloat16)
        save_drafter(drafter, out / name, target)
        drafters[name] = {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "tokens": sum(_last_rows(run / "log.jsonl")["train"]["tokens"] for run in runs),
            **_last_rows(runs[-1] / "log.jsonl"),
            "tau": measure(args.bench, target, load_drafter(out / name, target)) if args.bench else {},
        }
    count_map(work, out / f"frspec_{MAP_SIZE}.json")
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) / 2**20
    if size > LIMIT_MIB:
        raise ValueError(f"the demo takes {size:.1f} MiB, more than the {LIMIT_MIB} that may be shipped")
    report = {
        "target": json.loads((work / "target" / "report.json").read_text()),
        "target_parameters": sum(p.numel() for p in target.parameters()) - target.head.weight.numel(),
        "drafters": drafters,
        "mebibytes": round(size, 1),
    }
    write_json(out / "report.json", report)
    write_text(out / "README.md", card(args, report))
    print(json.dumps(report))


CARD = """# The demo

A target of {target_m:.1f} M parameters (Llama architecture, {layers} layers, hidden size {hidden}, vocabulary {vocab},
context {context}) and drafters for it, all trained from scratch; bf16 safetensors, {mebibytes} MiB with the tokenizer.
It is a demonstration: it writes English in the form of a chat, and what it says is often wrong.

- Target: one pass over {tokens:,} tokens; loss {train_loss:.3f} in training, {heldout_loss:.3f} held out (nats a
  token).
- Drafters, trained on the target's own answers (a prompt's first answer greedy, further ones at temperature 0.8), with
  the settings of conf/experiment/. Agreement is with the target's first choice on held-out answers, by step of the
  training objective; tau is that of the first turns of MT-bench, greedy, 64 new tokens, at topk/steps/num_draft_tokens.

| drafter | parameters | padded tokens seen | agreement | tau {trees} |
|---|---|---|---|---|
{table}

- `frspec_{map_size}.json`: the {map_size} tokens most frequent in those answers, an FR-Spec map.

Made by

    python scripts/build_demo.py --data DATA --bench MT_BENCH

with DATA {rows} conversations in ShareGPT form, of which none is in this repository{note}. The weights
are under the project's licence, Apache-2.0.
"""


def card(args: argparse.Namespace, report: dict) -> str:
    """The model card. Every figure in it comes from the report."""
    lines = []
    for name, drafter in report["drafters"].items():
        agreement = ", ".join(f"{a:.2f}" for a in drafter["heldout"]["accuracy"])
        taus = ", ".join(f"{tau:.2f}" for tau in drafter["tau"].values()) or "not measured"
        parameters, tokens = drafter["parameters"] / 1e6, drafter["tokens"]
        lines.append(f"| {name} | {parameters:.2f} M | {tokens:,} | {agreement} | {taus} |")
    return CARD.format(
        target_m=report["target_parameters"] / 1e6,
        layers=args.layers,
        hidden=args.hidden_size,
        vocab=args.vocab_size,
        context=LENGTH,
        mebibytes=report["mebibytes"],
        **report["target"],
        trees=", ".join(map(str, TREES)),
        table="\n".join(lines),
        map_size=MAP_SIZE,
        note=": see DATA.md" if (args.out / "DATA.md").exists() else "",
        rows=f"{sum(1 for _ in read_conversations(args.data)):,}",
    )


def _last_rows(log: Path) -> dict:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {split: [r for r in rows if r["split"] == split][-1] for split in ("train", "heldout")}


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="ShareGPT-form .json, .jsonl or .jsonl.xz")
    parser.add_argument("--work", type=Path, default=checkout.ROOT / "build", help="folder for intermediate results")
    parser.add_argument(
        "--out", type=Path, default=checkout.ROOT / "specdec" / "demo", help="where the finished demo goes"
    )
    parser.add_argument("--bench", type=Path, help="prompts (.jsonl with `turns`) on which tau is measured")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--target-tokens", type=int, default=15_000_000)
    parser.add_argument("--answers", type=int, default=20_000, help="prompts that the target answers")
    parser.add_argument("--answer-tokens", type=int, default=160)
    args = parser.parse_args()
    work = output_folder(args.work)
    output_folder(args.out)
    if not (work / "target").exists():
        build_target(args, work / "target")
    if not (work / "answers" / "all.jsonl").exists():
        build_answers(args, work / "answers")
    train_drafters(work, args.bench)
    publish(args, work)


if __name__ == "__main__":
    main()
