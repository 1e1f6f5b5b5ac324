"""Compare the speed of this project's engine with other engines in one run.

    specdec lab bench suite=quick prompts=questions.jsonl
    specdec lab bench suite=standard shape=llama_3_2_1b device=cuda        # random weights: speed only
    specdec lab bench suite=quick shape=llama_3_1_8b device=cuda simulate_tau=3.5

Prints a table and writes one JSON file, again after every trial; the last line is one JSON object. docs/bench.md
explains the numbers, `--cfg job` prints every setting.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.cli.files import check_writable
from specdec.cli.terminal import console, print_table
from specdec.lab.bench.bench import Bench, random_prompts, read_configurations, text_prompts
from specdec.lab.bench.contenders import Contender, Ours, bandwidth, of_transformers_by_name
from specdec.lab.bench.peers import peers_by_name
from specdec.lab.bench.random_weights import MARK, SimulatedTau, random_head, random_target, random_transformers
from specdec.lab.models import as_list
from specdec.lab.output import provenance, write_json
from specdec.machine import matmul_precision, set_matmul_precision
from specdec.model.checkpoint import DTYPES, check_device, choose_dtype
from specdec.model.names import draft_for, gguf_file, resolve
from specdec.structs import Verifier
from specdec.text import encode_prompt, read_prompts
from specdec.trees.spec import tree_of_settings
from specdec.verify import sample_and_match

OF_WEIGHTS = ("assistant", "token_map", "draft_dtype")  # settings that random weights in a shape do not have


def number(name: str, form: str) -> Callable[[dict], str]:
    """Return a function that formats a row's entry `name`, or returns '' if the row lacks it."""
    return lambda row: format(row[name], form) if name in row else ""


COLUMNS: dict[str, Callable[[dict], str]] = {
    "": lambda row: f"  {row['contender']}{' *' * ('note' in row)}",
    "tokens/s": number("tokens_per_second", ".1f"),
    "decoding": number("decode_tokens_per_second", ".1f"),
    "step ms: P50, P95": lambda row: "{p50:.2f}, {p95:.2f}".format(**row["step_ms"]) if "step_ms" in row else "",
    "tokens a step": number("tokens_per_step", ".2f"),
    "first token ms": number("time_to_first_token_ms", ".1f"),
    "cache, peak MiB": lambda row: f"{row['cache_bytes'] / 2**20:.1f}, {row['peak_bytes'] / 2**20:.0f}",
    "of bandwidth": number("share_of_bandwidth", ".0%"),
    "to plain": number("to_plain", ".2f"),
    "to transformers": number("to_transformers", ".2f"),
    "same text": lambda row: row.get("same_text_as_plain", ""),
}

OPTIONAL = ("of bandwidth", "cache, peak MiB", "first token ms", "step ms: P50, P95", "decoding", "tokens a step")


def load_pair(settings: dict, device: torch.device) -> tuple:
    """The target, and what makes its drafter: both from checkpoints, or both random in a shape."""
    shape, named = settings.get("shape"), settings["target"]
    if named["device_map"] is not None:
        raise ValueError("target.device_map is for decoding and training: a benchmark has its target on one device")
    set_matmul_precision(named["matmul_precision"])
    if shape is None:
        target = load_target(named["path"] or DEMO_TARGET, dtype=named["dtype"], device=str(device))
        drafts = {"token_map": settings["token_map"], "dtype": settings["draft_dtype"]}
        return target, lambda: load_drafter(draft_for(named["path"], settings["draft"]), target, **drafts)
    if any(given is not None for given in (named["path"], *(settings[name] for name in OF_WEIGHTS))):
        raise ValueError(f"a shape has random weights: with shape= leave out target.path, {', '.join(OF_WEIGHTS)}")
    dtype = choose_dtype(named["dtype"], shape["config"], device)
    target = random_target(shape["config"], f"{shape['name']}, random weights", dtype, device, settings["seed"])
    return target, lambda: random_head(target, **shape["drafter"])


def make_contenders(settings: dict, target, make_drafter, slots: int) -> dict:
    """How to make each contender that the suite names. slots: tokens of the longest text that they will decode."""
    shape, tau = settings.get("shape"), settings["simulate_tau"]
    tree = tree_of_settings(settings)
    verifier: Verifier = sample_and_match if tau is None else SimulatedTau(tau)
    if isinstance(verifier, SimulatedTau):
        verifier.check(tree.steps)

    def of_checkpoint(path: str, dtype: torch.dtype) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(resolve(path), dtype=dtype).to(target.device).eval()

    @cache
    def model(dtype: torch.dtype) -> torch.nn.Module:
        if shape is not None:
            return random_transformers(shape["config"], dtype, target.device)
        return of_checkpoint(target.name, dtype)

    path, assistant = settings["target"]["path"], settings["assistant"]
    known = peers_by_name(target, slots, path and gguf_file(path))
    for suffix, dtype in {"": target.dtype, **{f"-{short}": dtype for short, dtype in DTYPES.items()}}.items():
        theirs = of_transformers_by_name(partial(model, dtype), assistant and partial(of_checkpoint, assistant, dtype))
        known |= {name + suffix: make for name, make in theirs.items()}
    for prefix, compiled in (("compiled-", True), ("", False)):
        ours: dict[str, Callable[[], Contender]] = {
            f"{prefix}plain": partial(Ours, target, compiled=compiled),
            f"{prefix}speculative": partial(lambda how: Ours(target, make_drafter(), tree, verifier, how), compiled),
        }
        known = ours | known
    names = as_list(settings["suite"]["contenders"])
    for name in names:
        if name not in known:
            there = ", ".join(other for other in known if not other.endswith(tuple(DTYPES)))
            raise ValueError(f"there is no contender {name!r}: there are {there}, and some with {' or '.join(DTYPES)}")
    simulated = "" if tau is None else f", {verifier}"
    return {name + simulated * name.endswith("speculative"): known[name] for name in names}


def make_prompts(settings: dict, target):
    """Return random tokens for a shape, else the encoded texts of the prompt file. Raises ValueError without one."""
    questions = settings["questions"]
    if settings.get("shape") is not None:
        return random_prompts(target.vocab, questions, settings["seed"])
    if settings["prompts"] is None:
        raise ValueError("trained weights need text to decode: give prompts=FILE, or a shape= with random weights")
    return text_prompts([encode_prompt(target, text) for text in read_prompts(Path(settings["prompts"]))], questions)


def title_of(settings: dict, target) -> str:
    """Return the table's title: target, dtype, device, reduced matmul precision and simulated tau."""
    words = [Path(target.name).name, str(target.dtype).removeprefix("torch."), str(target.device)]
    if (precision := matmul_precision(target.device)) != "highest":
        words.append(f"products of {precision} precision")
    if settings["simulate_tau"] is not None:
        words.insert(0, f"{MARK} tau {settings['simulate_tau']:g}")
    return ", ".join(words)


def print_rows(rows: list[dict], title: str) -> None:
    """Print the rows by configuration; below the table, what was skipped or failed, and why."""
    table = Table(title=title, caption="tokens/s: end to end; decoding: without prompt and first token")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    before = None
    for row in rows:
        if row["configuration"] != before:
            before = row["configuration"]
            table.add_section()
            table.add_row(Text(before, "bold"))
        if "tokens_per_second" in row:
            table.add_row(*(cell(row) for cell in COLUMNS.values()))
        else:
            table.add_row(f"  {row['contender']}", "failed" if "failed" in row else "skipped")
    screen = console(170)
    print_table(screen, table, OPTIONAL)
    for remark, where in remarks(rows).items():
        screen.print(f"{remark} ({', '.join(where)})", highlight=False)


def remarks(rows: list[dict]) -> dict[str, list[str]]:
    """Remarks, each with the configurations that it is about."""
    out: dict[str, list[str]] = {}
    for row in rows:
        for kind in ("failed", "skipped", "cut", "note", "differs"):
            if kind in row:
                out.setdefault(f"{row['contender']}, {kind}: {row[kind]}", []).append(row["configuration"])
    return out


def run(config: DictConfig) -> None:
    """Run `specdec lab bench`."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    out, suite = Path(settings["out"]), settings["suite"]
    if out.parent == Path("runs"):  # the default folder of all commands
        out.parent.mkdir(exist_ok=True)
    check_writable(out)
    configurations = read_configurations(settings["configurations"], suite["configurations"])
    device = check_device(settings["device"])
    target, make_drafter = load_pair(settings, device)
    slots = min(max(c.prompt + c.new for c in configurations), target.config.context)
    contenders = make_contenders(settings, target, make_drafter, slots)
    prompts, title, ceiling = make_prompts(settings, target), title_of(settings, target), bandwidth(device)
    random = settings.get("shape") is not None
    result: dict[str, Any] = {"benchmark": title, "simulated": settings["simulate_tau"] is not None}
    result |= provenance(device) | {"settings": settings, "bandwidth_bytes_per_second": ceiling}
    result["weights"] = "random: only speed means anything" if random else target.name
    rows: list[dict] = []
    how: dict[str, Any] = {"warmups": suite["warmups"], "trials": suite["trials"], "budget": settings["budget_s"]}
    how |= {"configurations": len(configurations), "seed": settings["seed"], "random_weights": random}
    how |= {"save": lambda more: write_json(out, result | {"rows": rows + more})}
    bench = Bench(target, contenders, prompts, ceiling, **how)
    for configuration in configurations:
        rows += bench.run(configuration)
        bench.save([])
    print_rows(rows, title)
    speeds = {f"{r['configuration']}: {r['contender']}": r.get("tokens_per_second") for r in rows}
    print(json.dumps({"benchmark": title, "out": str(out), "tokens_per_second": speeds}))
