"""Does SGLang draft with an exported head what is drafted here? Texts, rounds and accepted tokens, to the last one.

    python scripts/check_in_sglang.py --prompt-file MT_BENCH --env sglang-env --variants --out docs/in_sglang.json

Every bundled EAGLE head that SGLang has a form for is exported (`specdec doctor export --for sglang`). SGLang's engine
is started with what the command says that `export` prints: a chain of 3. It decodes the prompts greedily with the
export, this project with the head itself, and with the export read back, in fp32. For each prompt they must agree in
the text, which must be that of plain decoding in SGLang and here, in the number of rounds, of drafted and of accepted
tokens, and of those accepted at each position. `--variants` does the same with heads made from the bundled ones, one
for each thing that an export can say. What SGLang has no form for is listed with the reason.

SGLang's own are the reading of the checkpoints, the models of target and head, the drafting, its scheduler, its cache
and the backend of attention (`intel_amx`). Not its own are the kernels for CPUs, which no package index has: plain
torch stands in for attention over the cache, the bookkeeping of slots, the links of a chain, and greedy verification
(`sglang_stand_ins.py`). One check of SGLang's is off, which takes that backend from processors without AMX. Its CUDA
kernels, trees and batches are not tried.

--env is the folder of an environment with SGLang, made if it is not there, which takes 2 minutes and 2.7 GB: torch,
then sglang without what it requires, then the few packages of NEEDS. A start of SGLang takes half a minute, and the
prompts as long again. Ends with 1 if anything differs; the last line is one JSON object.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

import checkout
import sglang_variants
from check_in_vllm import Case, as_table, beside, chosen, differences, here, parser_of, run

from specdec.api import DEMO_TARGET, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.drafters.formats.convert import export
from specdec.drafters.formats.starting import command
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts, read_encoded
from specdec.lab.output import write_json
from specdec.model.target import Target

SGLANG, TORCH = "sglang==0.5.23", "torch==2.13.0"
NEEDS = """
    aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro einops fastapi gguf IPython loguru msgspec
    nvidia-ml-py openai==2.8.0 opentelemetry-api orjson partial_json_parser pillow psutil pybase64 python-multipart
    pyzmq requests scipy sentencepiece setproctitle tiktoken transformers==5.19.0 triton uvicorn uvloop watchfiles
    xgrammar==0.2.7 zstandard
"""
SIDE = checkout.ROOT / "scripts" / "sglang_side.py"
STAND_INS = {
    "sgl_kernel": "plain torch for the CPU's attention, slots of the cache, links of a chain and greedy verification",
    "torchvision": "names that are imported and not used",
    "switched off": "the fallback from the attention backend intel_amx on a processor without AMX",
}


def arguments() -> argparse.Namespace:
    args = parser_of(__doc__, "sglang").parse_args()
    check_counts(args, "limit", "max_new_tokens")
    return args


def python_of(env: Path) -> Path:
    """The Python of an environment that has SGLang, which is made if there is none."""
    python = env.resolve() / "bin" / "python"
    if not python.exists():
        print(f"making {env}: about 2 minutes and 2.7 GB")
        run(sys.executable, "-m", "venv", env)
        for packages in ([TORCH], ["--no-deps", SGLANG], NEEDS.split()):
            run(python, "-m", "pip", "--disable-pip-version-check", "install", *packages)
    return python


def engine_arguments(words: str) -> dict:
    """What SGLang's engine is to be given, by the command that starts its server."""
    _, _, module, *flags = shlex.split(words)
    if module != "sglang.launch_server":
        raise ValueError(f"not a command that starts SGLang: {words}")
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdecimal() else value for flag, value in pairs
    }


def in_sglang(python: Path, engine: dict, target: Target, prompts: list[list[int]], args, folder: Path) -> dict:
    """What `sglang_side.py` answers, counted as `here` counts. ValueError with SGLang's last word if it gives none."""
    job = {"engine": engine, "prompts": prompts, "max_new_tokens": args.max_new_tokens, "eos": sorted(target.eos)}
    asked, answer = folder / "job.json", folder / "answer.json"
    asked.write_text(json.dumps(job), encoding="utf-8")
    answer.unlink(missing_ok=True)
    run(python, SIDE, asked, answer)
    found = json.loads(answer.read_text(encoding="utf-8"))
    return found | {"rows": [row_of(row, engine.get("speculative_num_steps", 0)) for row in found["rows"]]}


def row_of(row: dict, steps: int) -> dict:
    """Tokens and counts of one answer. SGLang's histogram says in how many rounds 0, 1, ... drafts were accepted."""
    said = row["counts"]
    rounds = said.get("spec_correct_drafts_histogram", [])
    return {
        "tokens": row["tokens"],
        "drafts": said.get("spec_verify_ct", 0),
        "drafted": said.get("spec_num_proposed_drafts", 0),
        "accepted": said.get("spec_num_correct_drafts", 0),
        "by_position": [sum(rounds[i + 1 :]) for i in range(steps)],
    }


def exported_cases(drafters: list[tuple[str, Path]], folder: Path) -> tuple[list[Case], dict[str, str]]:
    """The drafters that SGLang reads, exported, each with the arguments of its engine, and why the others are not
    tried."""
    cases, refused, target = [], {}, str(DEMO_TARGET.resolve())
    for name, path in drafters:
        exported = folder / f"{len(cases)}"
        try:
            said = command("sglang", export(path, exported, "sglang", target), exported, target)
        except ValueError as error:
            refused[name] = str(error)
            continue
        engine = engine_arguments(said) if said else {}
        if engine.get("speculative_algorithm", "").startswith("EAGLE"):
            cases.append(Case(name, path, exported, engine))
        else:
            refused[name] = f"SGLang has {engine.get('speculative_algorithm', 'this')} not on a CPU"
    return cases, refused


def bundled() -> list[tuple[str, Path]]:
    """Names and folders of the bundled drafters."""
    folders = sorted(file.parent for file in DEMO_TARGET.parent.glob("*/config.json"))
    return [(folder.name, folder) for folder in folders if folder != DEMO_TARGET]


def compare(case: Case, answer: dict, plain: list[dict], target: Target, prompts: list[list[int]], args) -> dict:
    """SGLang's answer to a case beside ours, and its texts beside its plain ones."""
    rows, engine = answer["rows"], case.asked
    found = beside(case, rows, target, prompts, engine["speculative_num_steps"], args, "sglang")
    for number, (row, other) in enumerate(zip(rows, plain, strict=True), 1):
        if row["tokens"] != other["tokens"]:
            found["wrong"].append(f"prompt {number}: not SGLang's plain text")
    told = {"algorithm": engine["speculative_algorithm"], "token_map": "speculative_token_map" in engine}
    return {"case": case.name} | told | found


def tried(cases: list[Case], python: Path, target: Target, prompts: list[list[int]], args, folder: Path) -> dict:
    """The report's part that SGLang has to do with."""
    plain = in_sglang(python, {"model_path": str(DEMO_TARGET.resolve())}, target, prompts, args, folder)
    ours = here(target, None, prompts, 0, args.max_new_tokens)
    results, wrong = [], [f"plain: {what}" for what in differences(plain["rows"], ours)]
    for case in cases:
        try:
            answer = in_sglang(python, case.asked, target, prompts, args, folder)
        except ValueError as error:
            wrong.append(f"{case.name}: SGLang gave no answer: {error}")
            continue
        results.append(compare(case, answer, plain["rows"], target, prompts, args))
        wrong += [f"{case.name}: {what}" for what in results[-1]["wrong"]]
        print(f"{case.name}: {len(results[-1]['wrong'])} differences", file=sys.stderr)
    return {"in_sglang": plain["versions"], "stand_ins": STAND_INS, "results": results, "wrong": wrong}


@one_sentence_errors
def main() -> None:
    args = arguments()
    target = load_target(DEMO_TARGET, dtype="fp32")
    prompts = read_encoded(target, args.prompt_file, args.limit)
    python = python_of(args.env)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drafters = bundled()
        if args.variants:
            drafters += sglang_variants.make(folder / "variants", target)
        cases, refused = exported_cases(drafters, folder / "exports")
        report = tried(chosen(cases, args.only), python, target, prompts, args, folder)
    console(120).print(as_table(report["results"], len(prompts), "sglang"))
    print("\n".join([*report["wrong"], *(f"{name}: {reason}" for name, reason in refused.items())]))
    report = {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens} | report
    report |= {"not_tried": refused} | provenance(target.device)
    if args.out:
        write_json(args.out, report)
    print(json.dumps({"cases": len(report["results"]), "wrong": len(report["wrong"])}))
    if report["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
