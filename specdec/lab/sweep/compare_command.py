"""Compare drafters on the same target, prompts and settings.

    specdec compare --prompts questions.jsonl

Every prompt is decoded plainly and with each drafter of --draft, or entry of conf/compare.yaml, in turn. With --with
transformers,ctranslate2,llama.cpp, other engines decode too. Prints a table and a summary in words, writes table.csv,
chart.png and result.json under `out`; the last line is one JSON object. `--cfg job` prints every setting.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdec import ops, registry
from specdec.cli.files import no_empty_folder, output_folder
from specdec.lab.bench.bench import Bench, Configuration, text_prompts
from specdec.lab.bench.bench_command import make_contenders, print_rows
from specdec.lab.bench.contenders import Ours, bandwidth
from specdec.lab.models import as_list
from specdec.lab.output import machine_in_short, write_csv, write_figure, write_json
from specdec.lab.sweep.comparison import compare, named, way_of
from specdec.lab.sweep.turns import as_rows
from specdec.model.names import bundled_drafts, called, draft_for
from specdec.text import encode_prompt, read_prompts
from specdec.training.build import instantiate
from specdec.training.train import load_some
from specdec.trees.spec import tree_of_settings

ENGINE_PROMPT = 64  # tokens of the prompts that other engines decode


def entries_of(settings: dict) -> dict:
    """Return what is compared: `draft`, or else `entries`, whose default are drafters of the demo's target.

    Another target gets its own bundled drafters and n-grams. Raises ValueError if none is bundled for it.
    """
    if not isinstance(settings["entries"], dict):
        raise ValueError(f"entries must map names to drafters, got {settings['entries']!r:.60}")
    if settings["draft"]:
        return named(settings["draft"])
    own = registry.read_yaml(registry.CONF / "compare.yaml", "settings")["entries"]
    target = settings["target"]["path"]
    if settings["entries"] != own or draft_for(target) == draft_for(None):
        return settings["entries"]
    return named([*bundled_drafts(target), "ngram", "ngram:suffix"])


def contenders_of(settings: dict, target, name: str, entry: object) -> dict:
    """Return how to make plain decoding, the first entry and the engines of `with`. ValueError if there is none."""
    contenders = ["plain", "speculative", *as_list(settings["with"])]
    given = {"tree": tree_of_settings(settings), "verifier": "match"}
    given |= {key: settings[key] for key in ("token_map", "compile")}
    settings = settings | {"shape": None, "simulate_tau": None, "assistant": None, "suite": {"contenders": contenders}}
    slots = min(ENGINE_PROMPT + settings["max_new_tokens"], target.config.context)
    way = partial(way_of, name, entry, target, given)

    def speculative() -> Ours:
        one = way()
        return Ours(target, one.drafter, one.tree, one.verifier, one.compile)

    made = make_contenders(settings, target, lambda: way().drafter, slots)
    return made | {"plain": partial(Ours, target, compiled=settings["compile"]), "speculative": speculative}


def with_engines(made: dict, settings: dict, target, prompts: list[str]) -> list[dict]:
    """Decode greedily with the contenders, on prompts of `ENGINE_PROMPT` tokens, and return the benchmark's rows."""
    texts = text_prompts([encode_prompt(target, text, settings["raw"]) for text in prompts], 1)
    how: dict[str, Any] = {"warmups": 1, "trials": max(settings["trials"], 3), "seed": settings["seed"], "budget": None}
    bench = Bench(target, made, texts, bandwidth(target.device), **how)
    return bench.run(Configuration(f"prompts of {ENGINE_PROMPT} tokens", ENGINE_PROMPT, settings["max_new_tokens"]))


def engines_in_words(rows: list[dict], drafter: str) -> str:
    """Say how fast plain and speculative decoding are compared with each other engine."""
    rates = {row["contender"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    plain, speculative = rates.pop("plain", 0.0), rates.pop("speculative", 0.0)
    return "\n".join(
        f"Plain decoding is {plain / rate:.2f} times as fast as {name}, and {drafter} {speculative / rate:.2f} times."
        for name, rate in rates.items()
    )


def run(config: DictConfig) -> None:
    """Run `specdec compare`. Raises ValueError without prompts, or with fewer than two new tokens."""
    with no_empty_folder(config.out):
        if not config.prompts:
            raise ValueError(
                "no prompts: give --prompts FILE (one prompt a line, or JSONL with `prompt`, `turns` or `messages`)"
            )
        if config.max_new_tokens < 2:  # there would be no rates to compare
            raise ValueError("max_new_tokens must be at least 2: the first token comes from the prefill")
        prompts = read_prompts(Path(config.prompts))[: config.limit]
        settings: Any = OmegaConf.to_container(config, resolve=True)
        entries = entries_of(settings)
        out = output_folder(config.out)
        sampling = instantiate(config.sampling)
        if config.compile and config.device.startswith("cuda"):
            ops.use("torch")  # Inductor makes its own of torch's operators
        target = load_some(config, config.device, whole=True)
        passed_on = ("max_new_tokens", "seed", "raw", "trials", "token_map", "compile")
        how: dict[str, Any] = {name: settings[name] for name in passed_on} | {"tree": tree_of_settings(settings)}
        first = next(iter(entries))
        made = contenders_of(settings, target, first, entries[first]) if settings["with"] else {}
        found = compare(target, entries, prompts, sampling=sampling, progress=True, **how)
        scores, rate = found.scores, found.plain_tokens_per_second
        drawn = "greedy" if sampling.greedy else sampling
        name = called(target.name) if called(target.name) != str(target.name) else Path(target.name).name
        title = f"{name}: {len(prompts)} prompts, {config.max_new_tokens} new tokens, {drawn}"
        result: dict[str, Any] = {"plain_tokens_per_second": rate, "scores": [asdict(s) for s in scores]}
        result["verdict"] = found.verdict
        if settings["with"]:
            result["engines"] = with_engines(made, settings, target, prompts)
        try:
            write_csv(out / "table.csv", as_rows(scores))
            write_json(out / "result.json", result | {"settings": settings} | machine_in_short())
            write_figure(out / "chart.png", found.plot(title))
        finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
            found.print()
            if settings["with"]:
                print_rows(result["engines"], f"{first} and other engines")
                print(engines_in_words(result["engines"], first))
        print(f"written: {out}/table.csv, chart.png and result.json")
        print(json.dumps({"out": str(out), "plain_tokens_per_second": rate, "tau": {s.name: s.tau for s in scores}}))
