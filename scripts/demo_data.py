"""The data of the demo's target: packed rows of conversations and of books.

    python scripts/demo_data.py --tokenizer build/grown --conversations conversations.jsonl.xz \
        --books books.jsonl.xz --out build/data

--tokenizer: that of the target which will learn them. --conversations: ShareGPT form, with an `id` that begins with the
source's name (`KEEP`). --books: objects with `title`, `year` and `text`. Both are filtered for answers in whole
sentences: what a target of this size reads, it repeats. Writes OUT/chat.npy, books.npy, held_chat.npy, held_books.npy
([rows, 1024] uint16), heldout.jsonl, and data.json, which says what was kept.
"""

import argparse
import json
import lzma
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
from transformers import AutoTokenizer

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text, write_whole
from specdec.lab.bench.from_scratch import held_out
from specdec.lab.output import write_json
from specdec.text import clean
from specdec.training.data import Message

LENGTH = 1024
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u2026": "..."})
# Of OASST's model outputs: weak models, and base models sampled with a bare prompt; and those that come first.
WEAK = (
    "pythia", "sft-0", "starcoder", "falcon-7b", "open-llama", "llama_30b_pre", "llama_65b_sft", "oasst-1_12b",
    "sft-2-candidiate", "gpt4all", "alpaca_gpt4",
)  # fmt: skip
STRONG = ("gpt-4_", "claude", "deepseek", "gpt-3.5", "vicuna", "llama2", "rlhf")
PER_PROMPT = 40  # OASST: 250 prompts have about 160 answers each
ALL = 10**9
# source: copies, and conversations at most. What is not named is dropped.
KEEP = {
    "oasst": (1, ALL), "oasst_many": (2, ALL), "dolly": (2, ALL), "gpteacher_roleplay": (2, ALL),
    "llamafactory": (3, ALL), "gsm8k": (1, 4000), "flan_cot_ecqa": (1, 5000), "flan_cot_creak": (1, ALL),
    "flan_cot_strategyqa": (1, ALL), "flan_cot_qasc": (1, ALL), "flan_cot_sensemaking": (1, 1500),
    "gpteacher_codegen": (1, 1000), "sgd": (1, 2500), "taskmaster": (1, 300),
}  # fmt: skip
SHORT = ("flan_cot_creak", "flan_cot_sensemaking", "flan_cot_ecqa", "flan_cot_qasc")
DIALOGUES = ("sgd", "taskmaster")
BOOKS, BOOK = 40_000_000, 500_000  # characters of all books, and of one at most
OLDEST = 1840


@dataclass(frozen=True)
class Kept:
    """A conversation that is kept, whether it is held out, and whether a strong model answers in it."""

    messages: list[Message]
    held: bool
    strong: bool


# Conversations


def repeated(text: str) -> float:
    """The share of runs of four words that were there before."""
    words = text.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def listed(text: str) -> float:
    """The share of lines that are points of a list."""
    lines = [line for line in text.split("\n") if line.strip()]
    return sum(bool(re.match(r"\s*([-*\u2022#|]|\d+[.)])", line)) for line in lines) / max(1, len(lines))


def good(kind: str, ident: str, messages: Sequence[Message], rng: random.Random) -> bool:
    """Whether a conversation is worth learning: plain English, whole answers that do not repeat themselves."""
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if not answers or messages[-1]["role"] != "assistant" or any(not m["content"] for m in messages):
        return False
    whole = "".join(m["content"] for m in messages)
    if sum(ord(c) > 0x24F for c in whole) > 0.01 * len(whole) or sum(ord(c) > 127 for c in whole) > 0.03 * len(whole):
        return False
    if any(repeated(a) > 0.05 for a in answers) or re.search(r"(\b\w{3,}\b)[ ,]+\1[ ,]+\1\b", whole):
        return False
    if kind in DIALOGUES:
        return len(messages) >= 4 and sum(map(len, answers)) >= 45 * len(answers)
    if any('{"' in a for a in answers) or len(messages[0]["content"]) > 1500:
        return False
    if kind == "oasst":
        return good_oasst(ident, answers[0], rng)
    return sum(map(len, answers)) >= (60 if kind in SHORT else 80) * len(answers)


def good_oasst(ident: str, answer: str, rng: random.Random) -> bool:
    """Of these there are far too many, so few lists and little code are taken."""
    weak = any(word in ident for word in WEAK) and "rlhf" not in ident
    if weak or not 150 <= len(answer) <= 3500 or answer[0] in "#|*-" or re.match(r"1[.)]", answer):
        return False
    if answer[-1] not in '.!?`)":' or any(w in answer for w in ("language model", "Open Assistant", "OpenAssistant")):
        return False
    return not ((listed(answer) > 0.5 or "```" in answer) and rng.random() < 0.6)


def lines_of(path: Path) -> Iterator[dict]:
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


def by_source(path: Path, rng: random.Random) -> dict[str, list[Kept]]:
    """What is kept of a file of conversations, each once."""
    found, seen = defaultdict(list), set()
    for row in lines_of(path):
        ident = row["id"]
        kind = next((k for k in KEEP if ident.startswith(k)), None)
        if kind is None or "flan_cot_gsm" in ident:  # the latter is in gsm8k too
            continue
        turns = [{"role": ROLES[t["from"]], "content": clean(t["value"])} for t in row["conversations"]]
        held = held_out(turns)  # before anything is changed in it
        for turn in turns:
            turn["content"] = re.sub(r"\n+Let's think step by step\.$", "", turn["content"].translate(PLAIN)).strip()
        key = hash((turns[0]["content"], turns[-1]["content"]))
        if key in seen or not good(kind, ident, turns, rng):
            continue
        seen.add(key)
        if kind == "oasst" and ("_result_" in ident or "oasst-sft-1_3000" in ident):
            kind = "oasst_many"
        found[kind].append(Kept(turns, held, any(word in ident for word in STRONG)))
    return found


def conversations(path: Path) -> tuple[list[list[Message]], list[list[Message]], dict[str, dict]]:
    """Training and held-out conversations, shuffled, and what was kept of each source."""
    rng = random.Random(0)
    found, train, heldout, counts = by_source(path, rng), [], [], {}
    for kind, (copies, most) in KEEP.items():
        rows = found[kind]
        rng.shuffle(rows)
        rows = rows[:most]
        if kind == "oasst":
            rows.sort(key=lambda row: not row.strong)
            asked, few = Counter(), []
            for row in rows:
                question = row.messages[0]["content"]
                asked[question] += 1
                if asked[question] <= PER_PROMPT:
                    few.append(row)
            rows = few
        known = [row.messages for row in rows if not row.held]
        heldout += [row.messages for row in rows if row.held]
        train += known * copies
        counts[kind] = {
            "conversations": len(known),
            "copies": copies,
            "prompts": len({c[0]["content"] for c in known}),
            "chars": sum(len(m["content"]) for c in known for m in c),
        }
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout, counts


# Books


def books(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Title and text of books of prose: those to learn, and two that are held out."""
    prose = []
    for book in lines_of(path):
        text = re.sub(r"\[[^\]]{0,40}\]", "", book["text"].translate(PLAIN).replace("_", "")).strip()
        paragraphs = [p for p in text.split("\n\n") if p.strip()]
        lines = [line for line in text.split("\n") if line.strip()]
        if book["year"] < OLDEST or sum(map(len, lines)) < 110 * len(lines) or len(paragraphs) < 30:
            continue  # verse, plays, old translations
        prose.append((book["title"], text[:BOOK]))
    random.Random(1).shuffle(prose)
    rest, size = [], 0
    for title, text in prose[2:]:
        if size < BOOKS:
            rest.append((title, text))
            size += len(text)
    return rest, prose[:2]


# Rows


def rows_of(tokenizer, texts: Sequence[str]) -> np.ndarray:
    """The texts one behind the other, cut into rows [rows, LENGTH]."""
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), 500):
        for row in tokenizer(texts[start : start + 500], add_special_tokens=False)["input_ids"]:
            ids.append(np.array(row, dtype=np.uint16))
    flat = np.concatenate(ids)
    count = len(flat) // LENGTH
    return flat[: count * LENGTH].reshape(count, LENGTH)


def write_rows(path: Path, rows: np.ndarray) -> None:
    def fill(aside: Path) -> None:
        with aside.open("wb") as file:  # by a name numpy would add a suffix
            np.save(file, rows)

    write_whole(path, fill)


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True, help=".jsonl or .jsonl.xz")
    parser.add_argument("--books", type=Path, required=True, help=".jsonl or .jsonl.xz")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out = output_folder(args.out)
    train, heldout, counts = conversations(args.conversations)
    read, unread = books(args.books)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    sizes = {}
    for name, texts in (
        ("chat", list(map(render, train))),
        ("held_chat", list(map(render, heldout))),
        ("books", [text[i : i + 50_000] for _, text in read for i in range(0, len(text), 50_000)]),
        ("held_books", [text[30_000:80_000] for _, text in unread]),
    ):
        rows = rows_of(tokenizer, texts)
        write_rows(out / f"{name}.npy", rows)
        sizes[name] = {"rows": len(rows), "tokens": int(rows.size), "chars": sum(map(len, texts))}
    write_text(out / "heldout.jsonl", "".join(json.dumps(c) + "\n" for c in heldout))
    titles = {"held_out_books": [title for title, _ in unread], "books": [title for title, _ in read]}
    write_json(out / "data.json", {"kinds": counts, "sizes": sizes, **titles})
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
