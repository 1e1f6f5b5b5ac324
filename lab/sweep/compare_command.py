"""Compare drafters on the same target, prompts and settings (Hydra):  specdec compare prompts=questions.jsonl

Every prompt is decoded plainly and with each entry of conf/compare.yaml in turn. Prints a table, writes table.csv,
chart.png and result.json under `out`; the last line is one JSON object. `--cfg job` prints every setting.
"""

import json
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from lab.machine import machine_in_short
from lab.models import bundled
from lab.output import write_csv, write_json
from lab.sweep.compare import ComparedWay, as_rows, compare
from lab.sweep.compare_report import print_scores, write_chart
from specdec.api import DEMO_TARGET, load_drafter, load_target, make_verifier
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.cli.hydra_entry import hydra_command
from specdec.contracts import TreePolicy
from specdec.text import read_prompts
from training.train import instantiate
from trees.spec import TreeSpec


def tree_of(setting: str | dict) -> TreePolicy:
    """A tree of any form that `TreeSpec.parse` reads, or of what a file of conf/tree holds."""
    return instantiate(setting) if isinstance(setting, dict) else TreeSpec.parse(setting).build()


def way_of(name: str, entry: dict, default_tree: str | dict, target) -> ComparedWay:
    """What an entry of the settings describes. Raises ValueError for a field that there is not."""
    unknown = set(entry) - {"draft", "tree", "verifier", "token_map"}
    if unknown or "draft" not in entry:
        wrong = f"has the unknown field {min(unknown)}" if unknown else "lacks the field draft"
        raise ValueError(f"entries.{name} {wrong}; known are draft, tree, verifier, token_map")
    verifier = entry.get("verifier") or {"name": "match"}
    token_map = entry.get("token_map")
    return ComparedWay(
        drafter=load_drafter(bundled(entry["draft"]), target, token_map=token_map and bundled(token_map)),
        tree=tree_of(entry.get("tree") or default_tree),
        verifier=make_verifier(**verifier),
    )


@one_sentence_errors
def run(config: DictConfig) -> None:
    if not config.prompts:
        raise ValueError("no prompts: give prompts=FILE (one prompt a line, or JSONL with `prompt` or `turns`)")
    prompts = read_prompts(Path(config.prompts))[: config.limit]
    out = output_folder(config.out)
    sampling = instantiate(config.sampling)
    target = load_target(config.target.path or DEMO_TARGET, dtype=config.target.dtype, device=config.device)
    settings = OmegaConf.to_container(config, resolve=True)
    ways = {name: way_of(name, entry, settings["tree"], target) for name, entry in settings["entries"].items()}
    with tqdm(total=len(prompts) * config.trials, desc="prompts", mininterval=1.0) as bar:
        rate, scores = compare(
            target,
            prompts,
            ways,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            seed=config.seed,
            raw=config.raw,
            trials=config.trials,
            progress=bar.update,
        )
    print_scores(scores, rate)
    write_csv(out / "table.csv", as_rows(scores))
    how = "greedy" if sampling.greedy else sampling
    title = f"{Path(target.name).name}: {len(prompts)} prompts, {config.max_new_tokens} new tokens, {how}"
    write_chart(scores, out / "chart.png", title)
    result = {
        "plain_tokens_per_second": rate,
        "scores": [asdict(s) for s in scores],
        "settings": settings,
        **machine_in_short(),
    }
    write_json(out / "result.json", result)
    print(json.dumps({"out": str(out), "plain_tokens_per_second": rate, "tau": {s.name: s.tau for s in scores}}))


main = hydra_command(run, "compare")

if __name__ == "__main__":
    main()
