"""How good drafters become for what they have seen: tau of real decoding against training tokens, one line a run.

    python scripts/quality.py demo demo_lk demo_on_policy demo_eagle demo_mtp --data answers.jsonl --prompts MT_BENCH \\
        --out runs/quality --seeds 0 1 --set trainer.decode_every=200
    python scripts/quality.py runs/mine runs/other --out runs/quality              # trains nothing

Each argument is an experiment (a name of conf/experiment), which is trained for every seed, or the folder of a run. A
run that was interrupted goes on, and one that is finished is only read. A run that began with the drafter of another
run (init_from) is counted and drawn behind that one. Writes quality.csv, which has for every measurement the padded
tokens seen, the learnt tokens among them, seconds and tau, and quality.png, over the learnt tokens. Prompts and padding
cost time and teach nothing, and how many there are depends on the batches: so both counts are given.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
from hydra import compose, initialize_config_dir
from matplotlib import rc_context
from omegaconf import DictConfig, OmegaConf

import specdec.training.train
from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder
from specdec.cli.hydra_entry import CONF, settings_errors
from specdec.lab.figure_style import COLOURS, STYLE, WIDTH, looks_of, subplots
from specdec.lab.output import write_csv, write_figure
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.log import read_log
from specdec.training.loop.same_run import check_same_run

TERMS = {
    "ce": "the target's distribution",
    "tokens": "the text's tokens",
    "lk": "LK",
    "lk_hybrid": "LK, hybrid",
    "kl": "KL",
}
FIELDS = ("tokens", "learnt", "seconds", "tau")


@dataclass
class TrainingRun:
    """A run that is measured."""

    name: str  # in the chart
    folder: Path
    config: DictConfig | None = None  # its settings; None: it is only read


def experiment(name: str, seed: int, args: argparse.Namespace) -> TrainingRun:
    if not (CONF / "experiment" / f"{name}.yaml").is_file():
        known = ", ".join(sorted(p.stem for p in (CONF / "experiment").glob("*.yaml")))
        raise ValueError(f"{name} is neither the folder of a run nor an experiment; of these there are {known}")
    folder = args.out / f"{name}-seed{seed}"
    if args.dry:
        return TrainingRun(name, folder)
    if args.data is None or args.prompts is None:
        raise ValueError(f"to train {name} give --data, conversations to learn, and --prompts, to measure tau on")
    given = {"target.path": args.target, "data.path": args.data, "trainer.prompts": args.prompts}
    given |= {"trainer.seed": seed, "out": folder, "resume": "auto"}
    with initialize_config_dir(str(CONF), version_base="1.3"), settings_errors():
        config = compose("train", [f"+experiment={name}", *(f"{k}={v}" for k, v in given.items()), *args.set])
    if config.trainer.steps is None:
        raise ValueError(f"{name} says no number of steps: give --set trainer.epochs=null trainer.steps=N")
    different = check_same_run(config, folder) if checkpoints(folder) else []
    if different:  # tau measured in two ways would make one line
        raise ValueError(f"{folder} holds a run of other settings: {'; '.join(different)}: give another --out")
    return TrainingRun(name, folder, config)


def finished(run: TrainingRun) -> bool:
    steps = run.config.trainer.steps
    return any(path.stem == f"step-{steps:08d}" for path in checkpoints(run.folder))


def measurements(run: TrainingRun) -> list[dict]:
    """Every measurement of tau, in the order of steps. Raises ValueError if there is none."""
    log = run.folder / "log.jsonl"
    rows = [row for row in read_log(log) if row["split"] == "decode"] if log.is_file() else []
    if not rows:
        raise ValueError(
            f"{log} has no measured tau: train with trainer.prompts=FILE, and trainer.decode_every of at most the steps"
        )
    if missing := [field for field in FIELDS if field not in rows[0]]:
        raise ValueError(f"{log} does not count {missing[0]} tokens: it is of an older version, train anew")
    config = OmegaConf.load(run.folder / "config.yaml")
    who = {"run": run.name, "method": method(config), "seed": config.trainer.seed, "folder": str(run.folder)}
    who["after"] = str(Path(config.init_from).parent) if config.get("init_from") else ""
    before = seen_before(config)
    limits = [{key: row.get(key, "") for key in ("tau_low", "tau_high")} for row in rows]
    counted = [{key: row[key] + before.get(key, 0) for key in ("step", *FIELDS)} for row in rows]
    return [who | count | limit for count, limit in zip(counted, limits, strict=True)]


def method(config: DictConfig) -> str:
    """What a run does, as its authors call it: the drafter, the terms of its loss, whether its data are on-policy."""
    module = config.drafter["_target_"].split(".")[1]
    name = {"eagle": "EAGLE-2", "eagle3": "EAGLE-3", "mtp": "MTP", "medusa": "Medusa"}.get(module, module)
    if module == "eagle3" and config.drafter.get("tap_norms"):
        name = "EAGLE-3.1"
    terms = config.objective.get("terms") or {"ce": 1.0}
    used = [TERMS.get(term, term) for term, weight in terms.items() if weight]
    after = [TERMS.get(term, term) for term, weight in (config.objective.get("then") or {}).items() if weight]
    then = f", then {' + '.join(after)}" if after else ""
    own = ", on-policy" if (config.data.get("on_policy") or {}).get("share") else ""
    return f"{name}: {' + '.join(used)}{then}{own}"


def seen_before(config: DictConfig) -> dict[str, float]:
    """Tokens, learnt tokens and seconds of the run whose drafter this one began with, and of those before it."""
    folder = Path(config.init_from).parent if config.get("init_from") else None
    if folder is None or not (folder / "log.jsonl").is_file():  # a drafter from elsewhere: nobody knows what it saw
        return {}
    earlier = seen_before(OmegaConf.load(folder / "config.yaml"))
    last = [row for row in read_log(folder / "log.jsonl") if row["split"] == "train"][-1]
    return {key: last[key] + earlier.get(key, 0) for key in ("tokens", "learnt", "seconds")}


def draw(runs: list[list[dict]], path: Path) -> None:
    """Draw tau over learnt tokens, with 95 % intervals over prompts where the log has them. Runs of one name share a
    colour, and differ in their lines. A run that goes on from another one is joined to it, if that is drawn too."""
    with rc_context(STYLE):
        figure, axes = subplots(figsize=(WIDTH, 5.5))
        names = list(dict.fromkeys(rows[0]["run"] for rows in runs))
        for i, rows in enumerate(runs):
            name = rows[0]["run"]
            style = ["-", "--", "-.", (0, (1, 1))][sum(r[0]["run"] == name for r in runs[:i]) % 4]
            looks = looks_of(name, names)
            hollow = {"markerfacecolor": "white"} if names.index(name) >= len(COLOURS) else {}  # colours begin anew
            x, y = [r["learnt"] / 1e6 for r in rows], [r["tau"] for r in rows]
            axes.plot(x, y, linestyle=style, label=label_of(rows, runs), **looks, **hollow)
            known = [r for r in rows if r["tau_low"] != ""]
            axes.fill_between([r["learnt"] / 1e6 for r in known], [r["tau_low"] for r in known],
                              [r["tau_high"] for r in known], color=looks["color"], alpha=0.12, lw=0)  # fmt: skip
            if (before := run_before(rows, runs)) is not None:
                joined = [before[-1]["learnt"] / 1e6, x[0]], [before[-1]["tau"], y[0]]
                axes.plot(*joined, linestyle=":", color=looks["color"])
        axes.set(xlabel="learnt tokens seen, millions", ylabel="tau (tokens a round), greedy, held-out prompts")
        figure.legend(loc="outside lower center", ncols=2, title="Dotted: a run goes on from the end of another. "
                      "Shaded: 95 % interval over prompts, where it was measured.")  # fmt: skip
        write_figure(path, figure)


def run_before(rows: list[dict], runs: list[list[dict]]) -> list[dict] | None:
    """The run among these whose drafter this one began with, or None."""
    after = rows[0]["after"]
    same = (other for other in runs if after and Path(other[0]["folder"]).resolve() == Path(after).resolve())
    return next(same, None)


def label_of(rows: list[dict], runs: list[list[dict]]) -> str:
    """What a run is called in the legend: its method, the name of its settings where two of them have this method, the
    seed where there are several, and tau at the end."""
    who, said = rows[0], rows[0]["method"]
    if len({r[0]["run"] for r in runs if r[0]["method"] == said}) > 1:
        said += f" ({who['run']})"
    if len({r[0]["seed"] for r in runs}) > 1:
        said += f", seed {who['seed']}"
    return f"{said}: {rows[-1]['tau']:.2f} at the end"


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="names of conf/experiment, or folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, the table and the chart")
    parser.add_argument("--data", type=Path, help="conversations, as of data.path")
    parser.add_argument("--prompts", type=Path, help="held-out prompts, as of trainer.prompts")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="SETTING=VALUE", help="of python -m specdec.training.train"
    )
    parser.add_argument("--dry", action="store_true", help="train nothing: draw what the runs have measured so far")
    args = parser.parse_args(argv)
    runs: list[TrainingRun] = []
    for name in args.runs:
        if (Path(name) / "log.jsonl").is_file():
            runs.append(TrainingRun(Path(name).name, Path(name)))
        else:
            runs += [experiment(name, seed, args) for seed in args.seeds]
    for run in runs:
        if run.config is not None and not finished(run):
            specdec.training.train.run(
                run.config
            )  # ends the process if a signal asks it to stop; the same command goes on
    measured = [measurements(run) for run in runs]
    output_folder(args.out)
    write_csv(args.out / "quality.csv", [row for rows in measured for row in rows])
    draw(measured, args.out / "quality.png")
    print(json.dumps({f"{rows[-1]['run']}-seed{rows[-1]['seed']}": rows[-1]["tau"] for rows in measured}))


if __name__ == "__main__":
    main()
