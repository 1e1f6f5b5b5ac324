"""Build the demo: a larger target grown from a smaller one, its own answers, and drafters trained on them.

    python scripts/build_demo.py --small SMALL --conversations conversations.jsonl.xz --books books.jsonl.xz \\
        --bench MT_BENCH --work build --out specdec/demo

--small: a folder with a target and its drafters mtp, eagle3, eagle2 and medusa; the first were the pair that was
bundled up to revision f518c2e. Every stage leaves its result under --work and is skipped when that is there, so
an interrupted build goes on. The last stage measures tau on --bench and writes everything to --out as bf16 safetensors
with a model card.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import checkout
import torch
from demo_card import card

from specdec.api import generate, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.drafters.formats import save_drafter
from specdec.engine.fits import most_steps
from specdec.lab.bench.from_scratch import SEED, draw_questions, split
from specdec.lab.output import write_json
from specdec.structs import Sampling
from specdec.text import read_prompts
from specdec.training.data import Message
from specdec.training.regenerate import encode, regenerate
from specdec.trees.spec import TreeSpec

LENGTH = 1024  # the target's context
LIMIT_MIB = 50
TREES = (TreeSpec(4, 5, 16), TreeSpec(10, 8, 60), TreeSpec(1, 5, 6))  # with which tau is measured
MAP_SIZE = 4096  # of the FR-Spec map: half the vocabulary
QUESTIONS = "What are the benefits of regular exercise?", "How do I make a vegetable soup?"  # for the card
SIZES = {"hidden_size": 384, "intermediate_size": 1280}
GROWN = ("mtp", "eagle3:512", "eagle2:256")  # drafters that grow with the target, and how wide an MLP is kept
# The experiments of conf/ that train each drafter.
DRAFTERS = {name: f"grown_{name}" for name in ("eagle3", "mtp", "eagle2", "medusa", "dspark", "dflash")}


def script(name: str, **words: object) -> None:
    """Run another script of this folder, with its words as options; ends the build if that fails."""
    options = [part for key, value in words.items() for part in (f"--{key.replace('_', '-')}", *_values(value))]
    done = subprocess.run([sys.executable, str(checkout.ROOT / "scripts" / f"{name}.py"), *options], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _values(value: object) -> Iterable[str]:
    return map(str, value) if isinstance(value, list | tuple) else [str(value)]


def build_target(args: argparse.Namespace, work: Path) -> None:
    """The grown target: its data, its training at a constant rate and at a falling one, and fewer repetitions."""
    if not (work / "grown").exists():
        drafts = [f"{args.small / name}" for name in GROWN]
        script("grow", target=args.small / "target", draft=drafts, out=work / "grown", **SIZES)
    if not (work / "data" / "data.json").exists():
        texts = {"conversations": args.conversations, "books": args.books}
        script("demo_data", tokenizer=work / "grown", out=work / "data", **texts)
    learning = {"start": work / "grown", "data": work / "data", "work": work, "threads": args.threads}
    if not (work / "decayed").exists():
        script("demo_target", until=args.tokens, **learning)
        script("demo_target", decay=args.decay, out=work / "decayed", **learning)
    script(
        "unlikelihood",
        target=work / "decayed",
        data=work / "data",
        conversations=args.conversations,
        threads=args.threads,
        out=work / "target",
    )


def build_answers(args: argparse.Namespace, folder: Path) -> None:
    """The target's own answers to questions of the training data. The first answer to a question is greedy, and all
    further ones are sampled."""
    target = load_target(folder.parent / "target")
    first: dict[str, Message] = {}
    again: list[Message] = []
    for prompt in draw_questions(split(args.conversations)[0], args.answers):
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


def run_folder(work: Path, name: str) -> Path:
    """The folder of a run, named as scripts/quality.py names it, so that either finds the other's runs."""
    return work / f"{DRAFTERS[name]}-seed{SEED}"


def train_drafters(work: Path) -> None:
    """Run the trainer once for each. A finished run resumes at its last step and ends at once."""
    for name, experiment in DRAFTERS.items():
        settings = {
            "target.path": work / "target",
            "data.path": work / "answers" / "all.jsonl",
            "out": run_folder(work, name),
            "trainer.seed": SEED,
            "+experiment": experiment,
            "resume": "auto",
        }
        command = [sys.executable, "-m", "specdec.training.train", *(f"{k}={v}" for k, v in settings.items())]
        trained = subprocess.run(command, check=False)
        if trained.returncode:
            sys.exit(trained.returncode)


def count_map(work: Path, out: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "specdec.training.count",
        "--target",
        str(work / "target"),
        "--size",
        str(MAP_SIZE),
    ]
    subprocess.run([*command, "--data", str(work / "answers" / "all.jsonl"), "--out", str(out)], check=True)


def measure(bench: Path, target, drafter) -> dict[str, float]:
    """tau on the first turns of `bench`, greedy, 64 new tokens. A drafter that guesses fewer tokens ahead than a tree
    has steps takes as many steps as it can."""
    prompts = read_prompts(bench)
    found = {}
    for tree in TREES:
        steps = min(tree.steps, most_steps(drafter) or tree.steps)
        size = steps + 1 if tree.topk == 1 else tree.num_draft_tokens
        grown = replace(tree, steps=steps, num_draft_tokens=size).build()
        found[str(tree)] = round(generate(target, prompts, drafter, tree=grown, max_new_tokens=64).tau, 3)
    return found


def sample(target) -> list[dict]:
    """What the target writes, greedy and at temperature 0.8."""
    return [
        {"temperature": temperature, "question": question, "answer": out.text[0].strip()}
        for question in QUESTIONS
        for temperature in (0.0, 0.8)
        for out in [generate(target, [question], max_new_tokens=80, sampling=Sampling(temperature), seed=SEED)]
    ]


def publish(args: argparse.Namespace, work: Path) -> None:
    """Copy everything to --out in bf16, check its size, and write the card."""
    target, out = load_target(work / "target"), args.out
    for old in ("target", *DRAFTERS):
        shutil.rmtree(out / old, ignore_errors=True)
    shutil.copytree(work / "target", out / "target", ignore=shutil.ignore_patterns("unlikelihood.json"))
    count_map(work, out / f"frspec_{MAP_SIZE}.json")
    drafters = {}
    for name in DRAFTERS:
        run = run_folder(work, name)
        drafter = load_drafter(run / "draft", target).to(torch.bfloat16)
        save_drafter(drafter, out / name, target)
        if (run / "draft" / "acceptance.json").exists():
            shutil.copy(run / "draft" / "acceptance.json", out / name)
        drafters[name] = {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            **_last_rows(run / "log.jsonl"),
            "tau": measure(args.bench, target, load_drafter(out / name, target)) if args.bench else {},
        }
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) / 2**20
    if size > LIMIT_MIB:
        raise ValueError(f"the demo takes {size:.1f} MiB, more than the {LIMIT_MIB} that may be shipped")
    report = {
        "target": json.loads((work / "decayed" / "report.json").read_text()),
        "repetition": json.loads((work / "target" / "unlikelihood.json").read_text()),
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "shape": {key: getattr(target.config, key) for key in ("layers", "hidden", "vocab", "context")},
        "drafters": drafters,
        "samples": sample(target),
        "mebibytes": round(size, 1),
    }
    write_json(out / "report.json", report)
    write_text(out / "README.md", card(report, MAP_SIZE, ": see DATA.md" if (out / "DATA.md").exists() else ""))
    print(json.dumps(report))


def _last_rows(log: Path) -> dict:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {split: [r for r in rows if r["split"] == split][-1] for split in ("train", "heldout")}


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, required=True, help="folder of the pair that grows")
    parser.add_argument("--conversations", type=Path, required=True, help="ShareGPT-form .jsonl or .jsonl.xz")
    parser.add_argument("--books", type=Path, required=True, help=".jsonl or .jsonl.xz with title, year and text")
    parser.add_argument("--work", type=Path, default=checkout.ROOT / "build", help="folder for intermediate results")
    parser.add_argument(
        "--out", type=Path, default=checkout.ROOT / "specdec" / "demo", help="where the finished demo goes"
    )
    parser.add_argument("--bench", type=Path, help="prompts (.jsonl with `turns`) on which tau is measured")
    parser.add_argument("--tokens", type=float, default=2.4e6, help="of the grown target, at a constant rate")
    parser.add_argument("--decay", type=int, default=120, help="steps in which the rate falls to 0")
    parser.add_argument("--answers", type=int, default=7_000, help="prompts that the target answers")
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    work = output_folder(args.work)
    output_folder(args.out)
    if not (work / "target").exists():
        build_target(args, work)
    if not (work / "answers" / "all.jsonl").exists():
        build_answers(args, work / "answers")
    train_drafters(work)
    publish(args, work)


if __name__ == "__main__":
    main()
