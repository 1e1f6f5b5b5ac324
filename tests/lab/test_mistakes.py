"""Mistakes in the words of the lab's commands are refused by one sentence, and nothing is written."""

import json

import pytest
from helpers import main_of, refused
from sweeps import QUESTIONS

from scripts import gpu_proof

USUAL = {  # words of every case of a command; those of the case replace them
    "lab bench": "out={tmp}/out.json",
    "compare": "out={tmp}/out prompts={prompts}",
    "sweep": "out={tmp}/out benchmark.path={questions} target.path={target} draft=ngram",
    "tune": "--target {target} --draft {drafter} --prompts {prompts} --out {tmp}/out.yaml --max-new-tokens 8 --topk 1,2"
    " --steps 2 --num-draft-tokens 3,5 --tries 2 --repeats 1",
    "prove": "",
    "gpu_proof": "--device cpu",
}
CASES = [
    ("lab bench", "shape=tiny simulate_tau=9", "a simulated tau of 9 needs trees of at least 8 levels, this one has 5"),
    ("lab bench", "shape=tiny simulate_tau=0.5", "simulate_tau must be at least 1"),
    ("lab bench", "shape=tiny simulate_tau=[3]", "simulate_tau must be a number from 1"),
    ("lab bench", "shape=tiny budget_s={{a:1}}", "budget_s must be a number above 0"),
    ("sweep", "benchmark.limit=[2]", "benchmark.limit must be a whole number from 1"),
    ("lab bench", "shape=tiny simulate_tau=x", "simulate_tau must be a number from 1"),
    ("lab bench", "shape=tiny suite.contenders=plein", "there is no contender 'plein'"),
    ("lab bench", "shape=tiny budget_s=x", "budget_s must be a number above 0"),
    ("lab bench", "shape=tiny suite.contenders=[vllm]", "there is no contender 'vllm': there are plain"),
    ("lab bench", "shape=tiny suite.configurations=[huge]", "there is no configuration 'huge'"),
    ("lab bench", "shape=tiny configurations.short.prompt=0", "short.prompt must be at least 1, got 0"),
    ("lab bench", "shape=tiny +configurations.short.odd=1", "configurations.short: got an unexpected keyword argument"),
    (
        "lab bench",
        "shape=tiny draft_dtype=bf16",
        "with shape= leave out target.path, assistant, token_map, draft_dtype",
    ),
    ("lab bench", "shape=tiny device=abacus", "device 'abacus' cannot be used here"),
    ("lab bench", "shape=tiny out=/no/such/folder/a.json", "there is no folder /no/such/folder"),
    ("lab bench", "shape=huge", "In 'bench': Could not find 'shape/huge'"),
    ("lab bench", "", "give prompts=FILE, or a shape="),
    ("compare", "prompts=null", "no prompts: give --prompts FILE"),
    ("compare", "prompts=nowhere.txt", "nowhere.txt"),
    ("compare", "max_new_tokens=1", "max_new_tokens must be at least 2"),
    ("compare", "~entries +entries.a={{tree:chain}}", "entries.a lacks the field draft"),
    ("compare", "~entries +entries.a={{draft:ngram,trees:x}}", "unknown field trees"),
    ("compare", "target.path=nowhere", "nowhere"),
    ("compare", "with=[transformer] draft=ngram", "there is no contender 'transformer'"),
    ("sweep", "benchmark.path=null", "the benchmark own has no path: give benchmark.path=FILE"),
    ("sweep", "benchmark.path=nowhere.jsonl", "no such data file: nowhere.jsonl"),
    ("sweep", "draft=nowhere/at/all", "no such checkpoint folder: nowhere/at/all"),
    ("sweep", "draft={{drafts:x}}", "an entry of draft has the unknown field drafts"),
    ("sweep", "draft=[ngram,ngram]", "two drafters are called ngram"),
    ("sweep", "draft={{draft:ngram,token_map:nowhere.json}}", "cannot read nowhere.json"),
    ("sweep", "steps=[]", "steps must be a positive whole number or a list of such, got []"),
    ("sweep", "shards=2 shard=2", "shard must lie between 0 and shards - 1, got shard 2 of 2"),
    ("sweep", "max_new_tokens=1", "every answer to own is one token long"),
    ("sweep", "max_new_tokens=5000", "no question of own fits the target's context"),
    ("sweep", "thinking=true raw=true", "thinking was set, but the prompts are raw"),
    ("sweep", "out={questions}", "cannot write to"),
    (
        "sweep",
        "draft_tree=1/1/2 num_draft_tokens=null",
        "best_tree finds trees of num_draft_tokens nodes: give numbers",
    ),
    ("tune", "--repeats 0", "--repeats must be at least 1"),
    ("tune", "--max-new-tokens 1", "must be at least 2"),
    ("tune", "--topk 1,x", "wants whole numbers"),
    ("tune", "--topk 0", "wants numbers of at least 1"),
    ("tune", "--topk 2 --num-draft-tokens 60", "there is no setting"),
    ("tune", "--prompts nowhere.txt", "no such prompt file: nowhere.txt"),
    ("tune", "--out nowhere/x.yaml", "there is no folder"),
    ("tune", "--tree nowhere.yaml", "no such tree file: nowhere.yaml"),
    ("prove", "--target some/where", "no drafter is bundled for some/where: give --draft FOLDER, or --draft ngram"),
    ("prove", "--target somewhere", "no such checkpoint folder: somewhere"),
    ("prove", "--out nowhere/page.md", "there is no folder nowhere"),
    ("prove", "--prompts none.txt", "no such prompt file"),
    ("prove", "--plain-server http://x", "--plain-server needs --server"),
    ("prove", "--server localhost:8000", "begins with http:// or https://"),
    ("prove", "--server http://x --draft ngram", "a server has its own drafter"),
    ("gpu_proof", "--stages moon", "there is no part and no stage 'moon': there are tests: tests; shape: bench"),
    ("gpu_proof", "--minutes 0", "--minutes must be positive"),
    ("gpu_proof", "--conversations nowhere.jsonl", "no such data file: nowhere.jsonl"),
    ("gpu_proof", "--device abacus", "device 'abacus' cannot be used here"),
]


@pytest.mark.parametrize(("command", "words", "message"), CASES)
def test_mistakes_are_one_sentence(command, words, message, tmp_path, target_path, drafter_path):
    places = {"tmp": tmp_path, "target": target_path, "drafter": drafter_path}
    places |= {"prompts": tmp_path / "prompts.txt", "questions": tmp_path / "questions.jsonl"}
    places["prompts"].write_text("The quick\nWhat is 12\n")
    places["questions"].write_text("".join(json.dumps({"turns": q.turns}) + "\n" for q in QUESTIONS))
    given = words.format(**places).split()
    names = {word.partition("=")[0] for word in given if "=" in word}
    usual = [word for word in USUAL[command].format(**places).split() if word.partition("=")[0] not in names]
    main = gpu_proof.main if command == "gpu_proof" else main_of(command)
    assert message in refused(main, *usual, *given)
    assert not [*tmp_path.glob("out*")]
