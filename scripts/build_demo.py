r"""Build the demo: a target grown from a smaller one, its own answers, and drafters trained on them.

    python scripts/build_demo.py --small SMALL --conversations conversations.jsonl.xz --books books.jsonl.xz \
        --bench MT_BENCH --work build --out specdec/demo

--small: a folder with a target and its drafters mtp, eagle3 and eagle2. --conversations: ShareGPT form; an `id` begins
with the name of its source (`KEEP`). --books: objects with `title`, `year` and `text`. Every stage leaves its result in
--work and is skipped if that exists, so an interrupted build continues. The last stage measures tau on --bench, and
writes everything to --out as bf16 safetensors with a model card. Commit 6084cd3 has the script that built the bundled
demo, with more filters of the data and a schedule of its own.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import checkout
import torch
from demo_models import grow, grow_drafter, grown_config, repeat_less
from pretrain_target import SEED, held_out, prompts_of, split, write_prompts
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.api import generate, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.drafters.formats import save_drafter
from specdec.engine.compatibility import most_steps
from specdec.lab.output import write_json
from specdec.text import clean, read_prompts
from specdec.training.data import Message, Record, read_records
from specdec.training.loop.log import read_log
from specdec.training.pretrain import pack, pretrain, save_target
from specdec.trees import Chain, DynamicTree

LENGTH = 1024  # tokens of a row, and the target's context
BOOKS, BOOK, OLDEST = 0.2, 500_000, 1840  # share of the rows, characters of a book at most, and its year at least
LIMIT_MIB, MAP_SIZE = 50, 4096
TREES = (DynamicTree(4, 5, 16), DynamicTree(10, 8, 60), Chain(5))  # for which tau is measured
QUESTIONS = "What are the benefits of regular exercise?", "How do I make a vegetable soup?"  # for the card
GROWN = {"mtp": None, "eagle3": 512, "eagle2": 256}  # drafters that grow too: neurons that their MLP keeps
DRAFTERS = ("eagle3", "mtp", "eagle2")  # trained by the experiments grown_NAME
# Source: how often each conversation is used, and the largest number of them. Other sources are dropped.
KEEP = {
    "oasst": (1, 30_000), "dolly": (2, 10**9), "gpteacher_roleplay": (2, 10**9), "llamafactory": (3, 10**9),
    "gsm8k": (1, 4000), "flan_cot_ecqa": (1, 5000), "flan_cot_creak": (1, 10**9), "flan_cot_strategyqa": (1, 10**9),
    "flan_cot_qasc": (1, 10**9), "flan_cot_sensemaking": (1, 1500), "gpteacher_codegen": (1, 1000), "sgd": (1, 2500),
    "taskmaster": (1, 300),
}  # fmt: skip
WEAK = re.compile("pythia|sft-0|starcoder|falcon-7b|open-llama|llama_30b_pre|llama_65b_sft|oasst-1_12b|gpt4all|alpaca")
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u2026": "..."})


def is_good(messages: list[Message]) -> bool:
    """Whether a conversation is plain English, with whole answers that do not repeat themselves."""
    texts, answers = ([m["content"] for m in messages if m["role"] != role] for role in ("", "user"))
    whole = "".join(texts)
    if messages[-1]["role"] != "assistant" or not all(texts) or sum(map(len, answers)) < 60 * len(answers):
        return False
    runs = [[tuple(words[i : i + 4]) for i in range(len(words) - 3)] for words in map(str.split, answers)]
    odd = sum(ord(c) > 127 for c in whole) > 0.03 * len(whole) or '{"' in whole
    return not odd and all(len(set(r)) >= 0.95 * len(r) for r in runs)


def conversations(path: Path) -> tuple[list[list[Message]], list[list[Message]]]:
    """Return training and held-out conversations of a file, shuffled, each as often as `KEEP` says."""
    found: dict[str, list] = defaultdict(list)
    asked, train, heldout = Counter(), [], []
    for row in map(Record.fields, read_records(path)):
        kind = next((k for k in KEEP if row["id"].startswith(k)), None)
        turns = [{"role": ROLES[t["from"]], "content": clean(t["value"])} for t in row["conversations"]]
        if kind is None or WEAK.search(row["id"]) or asked[turns[0]["content"]] >= 40 or not is_good(turns):
            continue
        asked[turns[0]["content"]] += 1
        plain = [turn | {"content": turn["content"].translate(PLAIN).strip()} for turn in turns]
        if held_out(turns):
            heldout.append(plain)
        else:
            found[kind].append(plain)
    for kind, (copies, most) in KEEP.items():
        train += found[kind][:most] * copies
    random.Random(SEED).shuffle(train)
    return train, heldout


def books(tokenizer, path: Path, count: int) -> Tensor:
    """Return `count` rows of prose, or as many as there are: no verse, no plays, no old translations."""
    ids: list[int] = []
    for book in map(Record.fields, read_records(path)):
        text = re.sub(r"\[[^\]]{0,40}\]", "", book["text"].translate(PLAIN).replace("_", "")).strip()
        lines = [line for line in text.split("\n") if line.strip()]
        if len(ids) < count * LENGTH and book["year"] >= OLDEST and sum(map(len, lines)) >= 110 * len(lines):
            ids += tokenizer(text[:BOOK], add_special_tokens=False)["input_ids"]
    count = min(count, len(ids) // LENGTH)
    return torch.tensor(ids[: count * LENGTH], dtype=torch.int32).view(count, LENGTH)


def build_target(args: argparse.Namespace, work: Path) -> None:
    """Grow the small target and drafters, train the target on conversations and books, and against repetitions."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(args.small / "target")
    small = LlamaForCausalLM.from_pretrained(args.small / "target", dtype=torch.float32)
    model = grow(small, grown_config(small.config, *args.sizes))
    for name, width in GROWN.items():
        grow_drafter(args.small / name, model.config, work / f"grown-{name}", width)
    train, heldout = conversations(args.conversations)
    chat = pack(tokenizer, train, LENGTH, int((1 - BOOKS) * args.tokens))
    data = torch.cat([chat, books(tokenizer, args.books, int(BOOKS * args.tokens) // LENGTH)])
    data = data[torch.randperm(len(data))]
    unseen = pack(tokenizer, heldout, LENGTH, 32 * LENGTH)
    how = {"checkpoint": work / "pretrain.pt", "compile": not args.eager}
    report = pretrain(model, data, unseen, batch=8, lr=7e-4, muon_lr=0.01, **how)
    known, other = split(args.conversations)
    report |= repeat_less(model, tokenizer, chat, prompts_of(known, 10_000), prompts_of(other, 64), args.less_steps)
    save_target(model, tokenizer, work / "target", report=report)


def run(name: str, *words: object) -> None:
    """Run a command of specdec; a failure ends the build."""
    done = subprocess.run([sys.executable, "-m", "specdec", *name.split(), *map(str, words)], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def build_answers(args: argparse.Namespace, work: Path) -> None:
    """Let the target answer questions of the training data, greedily and with sampling. Finished files are reused."""
    output_folder(work / "answers")
    write_prompts(work / "questions.jsonl", prompts_of(split(args.conversations)[0], args.answers))
    words = ["--target", work / "target", "--prompts", work / "questions.jsonl", "--batch-size", 128]
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        where = ["--out", work / "answers" / f"{name}.jsonl", "--temperature", temperature]
        run("data regenerate", *words, *where, "--max-new-tokens", 160, "--seed", SEED)


def measure(bench: Path, target, drafter) -> dict[str, float]:
    """Return tau by tree on the first turns of `bench`: greedy, 64 new tokens, at most the steps of the drafter."""
    found = {}
    for tree in TREES:
        steps = min(tree.steps, most_steps(drafter) or tree.steps)
        asked = {"tree": tree.smaller(steps), "max_new_tokens": 64}
        found[str(tree)] = round(generate(target, read_prompts(bench), drafter, **asked).tau, 3)
    return found


def publish(args: argparse.Namespace, work: Path) -> None:
    """Copy everything to --out in bf16, check its size, and write report and card."""
    target, out = load_target(work / "target"), args.out
    for old in ("target", *DRAFTERS):
        shutil.rmtree(out / old, ignore_errors=True)
    shutil.copytree(work / "target", out / "target", ignore=shutil.ignore_patterns("report.json"))
    words = ["--target", work / "target", "--size", MAP_SIZE, "--data", work / "answers" / "greedy.jsonl"]
    run("data count", *words, "--out", out / f"frspec_{MAP_SIZE}.json")
    drafters = {}
    for name in DRAFTERS:
        save_drafter(load_drafter(work / name / "draft", target).to(torch.bfloat16), out / name, target)
        if (measured := work / name / "draft" / "acceptance.json").exists():
            shutil.copy(measured, out / name)
        drafter = load_drafter(out / name, target)
        log = read_log(work / name / "log.jsonl")
        last = {row["split"]: row for row in log if row["split"] in ("train", "heldout")}
        size = sum(p.numel() for p in drafter.parameters())
        drafters[name] = {"parameters": size, **last, "tau": measure(args.bench, target, drafter)}
    mebibytes = sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) / 2**20
    if mebibytes > LIMIT_MIB:
        raise ValueError(f"the demo takes {mebibytes:.1f} MiB, more than the {LIMIT_MIB} that may be shipped")
    report = {
        "target": json.loads((work / "target" / "report.json").read_text()),
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "shape": {key: getattr(target.config, key) for key in ("layers", "hidden", "vocab", "context")},
        "drafters": drafters,
        "samples": {text: generate(target, text, max_new_tokens=80).text[0].strip() for text in QUESTIONS},
        "mebibytes": round(mebibytes, 1),
    }
    write_json(out / "report.json", report)
    write_text(out / "README.md", card(report, ": see DATA.md" if (out / "DATA.md").exists() else ""))


def card(report: dict, note: str) -> str:
    """Return the model card. note: on the data, which are not in the repository."""
    lines = []
    for name, drafter in report["drafters"].items():
        columns = (drafter["heldout"]["accuracy"], drafter["tau"].values())
        agreement, taus = (", ".join(f"{x:.2f}" for x in column) for column in columns)
        parameters, tokens = drafter["parameters"] / 1e6, drafter["train"]["tokens"]
        lines.append(f"| {name} | {parameters:.2f} M | {tokens:,} | {agreement} | {taus} |")
    quoted = {question: answer.replace("\n", "\n> ") for question, answer in report["samples"].items()}
    samples = [f"**{question}**\n\n> {answer}" for question, answer in quoted.items()]
    fields = report["target"] | report["shape"] | {"mebibytes": report["mebibytes"], "map_size": MAP_SIZE, "note": note}
    fields |= {"table": "\n".join(lines), "samples": "\n\n".join(samples), "trees": ", ".join(map(str, TREES))}
    template = (checkout.ROOT / "scripts" / "demo_card.md").read_text(encoding="utf-8")
    return template.format(target_m=report["target_parameters"] / 1e6, **fields)


@one_sentence_errors
def main() -> None:
    """Run every stage that has no result yet."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--small", type=Path, required=True, help="folder of the pair that grows")
    p.add_argument("--conversations", type=Path, required=True, help=".jsonl or .jsonl.xz in ShareGPT form")
    p.add_argument("--books", type=Path, required=True, help=".jsonl or .jsonl.xz with title, year and text")
    p.add_argument("--bench", type=Path, required=True, help="prompts on which tau is measured")
    p.add_argument("--work", type=Path, default=checkout.ROOT / "build", help="folder for intermediate results")
    p.add_argument("--out", type=Path, default=checkout.ROOT / "specdec" / "demo", help="folder of the finished demo")
    p.add_argument("--sizes", type=int, nargs=2, default=(384, 1280), help="of the target: hidden, intermediate")
    p.add_argument("--tokens", type=int, default=3_400_000, help="that the target is trained on")
    p.add_argument("--less-steps", type=int, default=80, help="of unlikelihood")
    p.add_argument("--answers", type=int, default=7_000, help="prompts that the target answers")
    p.add_argument("--eager", action="store_true", help="do not compile the target's training step")
    p.add_argument("overrides", nargs="*", help="settings of specdec train for all drafters")
    args = p.parse_args()
    work = output_folder(args.work)
    output_folder(args.out)
    if not (work / "target").exists():
        build_target(args, work)
    build_answers(args, work)
    words = [f"target.path={work / 'target'}", f"data.path={work / 'answers'}/*.jsonl", "resume=auto", *args.overrides]
    for name in DRAFTERS:  # a finished run resumes at its last step and ends at once
        run("train", *words, f"+experiment=grown_{name}", f"out={work / name}")
    publish(args, work)


if __name__ == "__main__":
    main()
