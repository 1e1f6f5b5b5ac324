"""Compare drafters on the same target, prompts and settings (Hydra):  specdec compare prompts=questions.jsonl

Every prompt is decoded plainly and with each of `drafts`, or entry of conf/compare.yaml, in turn. Prints a table and
a summary in words, writes table.csv, chart.png and result.json under `out`; the last line is one JSON object. `--cfg
job` prints every setting.
"""

import json
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from specdec import ops, registry
from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.cli.hydra_entry import hydra_command
from specdec.lab.machine import machine_in_short
from specdec.lab.output import write_csv, write_figure, write_json
from specdec.lab.sweep.compare import as_rows
from specdec.lab.sweep.comparison import compare, named
from specdec.model.names import bundled, called
from specdec.text import read_prompts
from specdec.training.build import instantiate
from specdec.training.train import load_some
from specdec.trees.spec import tree_of_settings


def entries_of(settings: dict) -> dict:
    """What is compared: `drafts`, or else `entries`. ValueError for the demo's entries with another target."""
    if not isinstance(settings["entries"], dict):
        raise ValueError(f"entries must map names to drafters, got {settings['entries']!r:.60}")
    if settings["drafts"]:
        return named(settings["drafts"])
    own = registry.read_yaml(registry.CONF / "compare.yaml", "settings")["entries"]
    target = settings["target"]["path"]
    if target is not None and Path(bundled(target)) != DEMO_TARGET and settings["entries"] == own:
        raise ValueError(
            f"target.path={target} needs drafters of its own, and the entries are the demo's: give drafts=[DRAFT,ngram]"
        )
    return settings["entries"]


@one_sentence_errors
def run(config: DictConfig) -> None:
    if not config.prompts:
        raise ValueError(
            "no prompts: give prompts=FILE (one prompt a line, or JSONL with `prompt`, `turns` or `messages`)"
        )
    if config.max_new_tokens < 2:  # there would be no rates to compare
        raise ValueError("max_new_tokens must be at least 2: the first token comes from the prefill")
    prompts = read_prompts(Path(config.prompts))[: config.limit]
    settings = OmegaConf.to_container(config, resolve=True)
    entries = entries_of(settings)
    out = output_folder(config.out)
    sampling = instantiate(config.sampling)
    if config.compile and config.device.startswith("cuda"):
        ops.use("torch")  # Inductor makes its own of torch's operators
    target = load_some(config, config.device, whole=True)
    how = {name: settings[name] for name in ("max_new_tokens", "seed", "raw", "trials", "token_map", "compile")}
    how["tree"] = tree_of_settings(settings)
    found = compare(target, entries, prompts, sampling=sampling, progress=True, **how)
    scores, rate = found.scores, found.plain_tokens_per_second
    how = "greedy" if sampling.greedy else sampling
    name = called(target.name) if called(target.name) != str(target.name) else Path(target.name).name
    title = f"{name}: {len(prompts)} prompts, {config.max_new_tokens} new tokens, {how}"
    result = {"plain_tokens_per_second": rate, "scores": [asdict(s) for s in scores], "verdict": found.verdict}
    try:
        write_csv(out / "table.csv", as_rows(scores))
        write_json(out / "result.json", result | {"settings": settings} | machine_in_short())
        write_figure(out / "chart.png", found.plot(title))
    finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
        found.print()
    print(f"written: {out}/table.csv, chart.png and result.json")
    print(json.dumps({"out": str(out), "plain_tokens_per_second": rate, "tau": {s.name: s.tau for s in scores}}))


main = hydra_command(run, "compare")

if __name__ == "__main__":
    main()
