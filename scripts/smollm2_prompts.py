r"""Write the prompts whose answers the drafters of SmolLM2 were trained on, as two files of conversations.

    python scripts/smollm2_prompts.py --conversations train.jsonl.xz --books books.jsonl.xz --bench BENCH --out build
    specdec data regenerate --target smollm2 --prompts build/greedy.jsonl --limit 4400 --turns all --out build/a.jsonl
    specdec data regenerate --target smollm2 --prompts build/warm.jsonl --limit 4400 --turns all --out build/b.jsonl \
        --temperature 0.7 --seed 7

--conversations: ShareGPT form; an `id` begins with the name of its source (`SOURCES`). --books: objects with `text`.
--bench: a folder of benchmark questions; no prompt of these is written. Functions of Python's standard library become
prompts for code. Every file is a fair sample, so a part of it is one too.
"""

import argparse
import ast
import json
import random
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import checkout  # noqa: F401

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.training.data import Record, read_records

# Source: the largest number of its conversations.
SOURCES = {
    "gpteacher_codegen": 4600, "gpteacher_roleplay": 3500, "dolly": 6400, "oasst": 6000, "gsm": 3000,
    "llamafactory": 1200, "flan_cot": 1000,
}  # fmt: skip
LEAST = 5000  # characters of a book
UNUSED = re.compile("toolformer|sgd|taskmaster|glaive")
SUMMARISE = (
    "Summarize: ", "Summarize the following passage.\n\n", "What is this passage about?\n\n",
    "Give a summary in three sentences: ",
)  # fmt: skip
COMPLETE = (
    "Complete the code I provided.\n\n", "Write the body of this function.\n\n",
    "Complete this Python function:\n\n",
)  # fmt: skip
VERBS = "checks whether", "returns", "counts", "finds", "removes", "sorts", "merges", "reverses"
OBJECTS = (
    "the longest word in a string", "duplicates in a list", "the second largest number of a list",
    "all prime numbers below n", "two sorted lists", "the vowels of a string", "a list of dictionaries by a key",
    "a matrix", "a binary tree", "the most frequent character", "a sentence word by word",
    "the common elements of two sets", "a linked list", "the digits of an integer", "a list of intervals",
)  # fmt: skip
WRITE = (
    "Write a short story about", "Write an email to a colleague about", "Write a blog post about",
    "Compose a poem about", "Draft a speech about", "Write a persuasive essay about",
    "Explain to a beginner the basics of", "Give me ten facts about", "What are the advantages and disadvantages of",
    "Make a plan for a week that is devoted to", "Write a dialogue about", "Describe the history of",
    "Which mistakes do people make with", "Write a product description that has to do with",
    "Imagine you are an expert. Answer the five most common questions about", "Write an outline of a course on",
)  # fmt: skip
TOPICS = (
    "photosynthesis", "supply and demand", "a trip to the sea", "electric cars", "the Roman Empire",
    "learning to swim", "black holes", "remote work", "a lost dog", "sleep", "vaccines", "the water cycle", "chess",
    "public libraries", "climate change", "gardening", "online privacy", "the French Revolution", "a new bakery",
    "machine learning", "time management", "volcanoes", "a job interview", "jazz", "recycling", "the immune system",
    "bicycles in cities", "a late delivery", "inflation", "friendship", "solar energy", "the human heart",
    "mountain hiking", "poetry", "databases", "a school reunion", "earthquakes", "public speaking", "coffee",
    "gravity", "saving money", "whales", "the printing press", "yoga", "space travel", "cooking pasta",
    "a winter morning", "open-source software", "bees", "negotiation", "the moon", "antibiotics", "a power cut",
    "museums", "probability", "street food", "rivers", "robots", "a difficult customer", "evolution",
    "marathon running", "ancient Egypt", "photography", "a mystery in a small town",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you explain that in more detail?", "Give an example.", "Summarize your answer in one sentence.",
    "Rewrite your answer for a ten-year-old.", "What are the drawbacks?", "Now make it shorter.", "Why?",
    "Write the same as a list.", "Continue.", "Translate the first sentence into French.",
    "Rewrite your previous response in a more formal style.", "What would you do differently?",
)  # fmt: skip
Turns = list[str]


def signature(text: str) -> str:
    """Return what two prompts share that count as the same one."""
    return re.sub(r"\W+", " ", text.lower()).strip()[:200]


def benchmark_signatures(folder: Path) -> set[str]:
    """Return the signatures of all benchmark questions in the folder's .jsonl files."""
    found = set()
    for path in sorted(folder.rglob("*.jsonl")):
        for row in map(Record.fields, read_records(path)):
            for text in row.get("turns") or [row.get("question") or row.get("prompt") or ""]:
                found |= {signature(text), signature(re.sub(r"^(Summarize:|Complete the code I provided\.)", "", text))}
    return found


def questions(path: Path, seen: set[str], rng: random.Random) -> Iterator[Turns]:
    """Yield the questions of conversations that begin with a new one, at most as many as `SOURCES` says."""
    pools = defaultdict(list)
    for row in map(Record.fields, read_records(path)):
        source = next((name for name in SOURCES if str(row.get("id")).startswith(name)), None)
        asked = [turn["value"] for turn in row.get("conversations", ()) if turn["from"] == "human"]
        if source is None or UNUSED.search(row["id"]) or not asked or not 8 <= len(asked[0]) <= 1600:
            continue
        if signature(asked[0]) not in seen:
            seen.add(signature(asked[0]))
            pools[source].append(asked[:2])
    for source, most in SOURCES.items():
        yield from rng.sample(pools[source], min(most, len(pools[source])))


def passages(path: Path, number: int, rng: random.Random) -> Iterator[Turns]:
    """Yield passages of books to be summarised."""
    texts = [row.get("text") for row in map(Record.fields, read_records(path))]
    if not (books := [text for text in texts if isinstance(text, str) and len(text) > LEAST]):
        raise ValueError(f"{path} holds no book: give records whose `text` has more than {LEAST} characters")
    while number:
        book = rng.choice(books)
        start = book.find(". ", rng.randrange(len(book) // 10, len(book) * 9 // 10)) + 2
        passage = re.sub(r"\s+", " ", book[start : start + rng.randrange(700, 2200)])
        passage = passage[: passage.rfind(".") + 1]
        if len(passage) > 300:
            number -= 1
            yield [rng.choice(SUMMARISE) + passage]


def functions(number: int, rng: random.Random) -> Iterator[Turns]:
    """Yield heads of functions with their docstrings, from Python's standard library, to be completed."""
    heads = []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        if "test" in str(path) or "site-packages" in str(path):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.parse(source).body:
            documented = isinstance(node, ast.FunctionDef) and 60 < len(ast.get_docstring(node) or "") < 900
            if documented and not node.name.startswith("_"):
                heads.append("\n".join(source.split("\n")[node.lineno - 1 : node.body[0].end_lineno]) + "\n")
    for head in rng.sample(heads, min(number, len(heads))):
        yield [rng.choice(COMPLETE) + head]


def conversation(number: int, turns: Turns, rng: random.Random) -> dict:
    """Return a conversation of one or two questions, with answers to be replaced."""
    if len(turns) == 1 and rng.random() < 0.25:
        turns = [*turns, rng.choice(FOLLOW_UPS)]
    elif len(turns) > 1 and rng.random() < 0.5:
        turns = turns[:1]
    said = [{"from": who, "value": text} for turn in turns for who, text in (("human", turn), ("gpt", "."))]
    return {"id": str(number), "conversations": said}


def write(prompts: Iterable[Turns], folder: Path, rng: random.Random) -> None:
    """Shuffle the prompts and write half of them to greedy.jsonl, the others to warm.jsonl."""
    shuffled = list(prompts)
    rng.shuffle(shuffled)
    rows = [conversation(number, turns, rng) for number, turns in enumerate(shuffled)]
    output_folder(folder)
    for name, part in (("greedy", rows[::2]), ("warm", rows[1::2])):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))


@one_sentence_errors
def main() -> None:
    """Collect the prompts of all sources and write them."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("conversations", "books", "bench", "out"):
        p.add_argument(f"--{name}", type=Path, required=True)
    args, rng = p.parse_args(), random.Random(52)
    asked = questions(args.conversations, benchmark_signatures(args.bench), rng)
    tasks = [[f"Write a Python function that {v} {thing}. Explain it briefly."] for v in VERBS for thing in OBJECTS]
    topics = [[f"{start} {topic}."] for start in WRITE for topic in TOPICS]
    write([*asked, *passages(args.books, 2000, rng), *functions(700, rng), *tasks, *topics], args.out, rng)


if __name__ == "__main__":
    main()
