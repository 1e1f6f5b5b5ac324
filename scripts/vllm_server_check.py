"""Is vLLM's server lossless, and does it answer as this engine does? `prove --server` and `regenerate --server`.

    python scripts/vllm_server_check.py --prompt-file MT_BENCH --env vllm-env --out docs/vllm_server.json

Two servers of vLLM decode the demo target in fp32 on a CPU, one after the other: one plainly, one with the bundled
EAGLE-3 head, exported, as drafter. The texts of both are compared with this engine's, by `specdec prove --server`, and
those of the second with those of the first, by `--plain-server`. Then the plain one answers the first --answers prompts
of the file, asked anew in other words where it has fewer, by `specdec regenerate --server`; the answers are compared
with those of `specdec regenerate` here. --env is the environment that `scripts/check_in_vllm.py` makes. Ends with 1 if
anything differs for no numerical reason; the last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import checkout
import torch
from check_in_vllm import python_of
from vllm_side import SETTINGS

from specdec.api import DEMO_TARGET, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.drafters.formats.convert import export
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts, read_encoded
from specdec.lab.output import write_json
from specdec.lab.proof.servers import against_engine, against_server, as_json
from specdec.remote import Remote
from specdec.structs import Sampling
from specdec.text import read_prompts
from specdec.training.regenerate import Prompt, encode, regenerate, regenerate_remotely

PORT = 8631
STARTS = 600  # seconds that a server may take to start


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt-file", type=Path, required=True, help="as specdec generate takes it")
    p.add_argument("--env", type=Path, required=True, help="folder of the environment with vLLM")
    p.add_argument("--limit", type=int, default=20, help="prompts of the proofs (default 20)")
    p.add_argument("--answers", type=int, default=200, help="prompts that are answered (default 200)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--steps", type=int, default=3, help="length of the chain (default 3)")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "limit", "answers", "max_new_tokens", "steps")
    return args


@contextmanager
def vllm_server(
    python: Path, port: int, log: Path, *more: str, dtype: str = "float32", path: Path = checkout.ROOT
) -> Iterator[str]:
    """A server of vLLM on the demo target; the address. path: where it finds modules. Raises ValueError if it does not
    start."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", Path(DEMO_TARGET).resolve()]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", port, "--enforce-eager"]
    command += ["--dtype", dtype, "--max-num-seqs", 4, "--no-enable-prefix-caching", "--max-logprobs", 5, *more]
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=out,
            stderr=out,
            env=os.environ | SETTINGS | {"PYTHONPATH": str(path)},
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(STARTS):
        if process.poll() is not None:
            raise ValueError(f"vLLM's server ended with {process.returncode}: {log.read_text()[-300:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise ValueError(f"vLLM's server did not start within {STARTS} s")


def prompts_to_answer(target, file: Path, count: int) -> list[Prompt]:
    """The prompts of a file, and again with a word before them, until there are enough."""
    asked = read_prompts(file)
    asked = [*asked, *(f"Briefly: {text}" for text in asked), *(f"In detail: {text}" for text in asked)][:count]
    found = [encode(target, [{"role": "user", "content": text}]) for text in asked]
    return [prompt for prompt in found if len(prompt.ids) <= target.config.context // 2]


def compare_answers(server: Remote, target, args: argparse.Namespace, folder: Path) -> dict:
    """`regenerate --server` beside `regenerate`."""
    prompts, sampling = prompts_to_answer(target, args.prompt_file, args.answers), Sampling()
    how = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": 0}
    (theirs,) = regenerate_remotely(server, target.tokenizer, prompts, folder / "theirs.jsonl", requests=4, **how)
    (ours,) = regenerate(target, prompts, folder / "ours.jsonl", batch_size=1, **how)
    both = [sorted(file.read_text(encoding="utf-8").splitlines()) for file in (theirs, ours)]
    same = sum(a == b for a, b in zip(*both, strict=True))
    return {"answers": len(prompts), "same": same, "record": json.loads((folder / "theirs.run.json").read_text())}


def drafted(server: Remote) -> dict[str, int]:
    """What the server counts as drafted since it started. Raises ValueError if it has drafted nothing."""
    with urllib.request.urlopen(f"{server.root}/metrics", timeout=30) as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    names = ("drafts", "draft_tokens", "accepted_tokens")
    counts = {
        name: int(sum(float(x) for key, x in lines if key.startswith(f"vllm:spec_decode_num_{name}_total")))
        for name in names
    }
    if not counts["drafts"]:
        raise ValueError("vLLM's server has drafted nothing: the check shows nothing")
    return counts


@one_sentence_errors
def main() -> None:
    args = arguments()
    python, target = python_of(args.env), load_target(DEMO_TARGET, dtype="fp32")
    prompts, new = read_encoded(target, args.prompt_file, args.limit), args.max_new_tokens
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        export(DEMO_TARGET.parent / "eagle3", folder / "head", "vllm", DEMO_TARGET)
        how = {"model": str(folder / "head"), "method": "eagle3", "num_speculative_tokens": args.steps}
        plain = Remote(stack.enter_context(vllm_server(python, PORT, folder / "plain.log")))
        answers = compare_answers(plain, target, args, folder)
        drafting = vllm_server(python, PORT + 1, folder / "drafted.log", "--speculative-config", json.dumps(how))
        fast = Remote(stack.enter_context(drafting))
        proofs = {
            "plain vLLM, by this engine": against_engine(plain, target, prompts, new),
            "speculative vLLM, by this engine": against_engine(fast, target, prompts, new),
            "speculative vLLM, by plain vLLM": against_server(fast, plain, prompts, new),
        }
        counts = drafted(fast)
    for name, proof in proofs.items():
        print(f"{name}: {proof.verdict()}")
    print(f"regenerate: {answers['same']} of {answers['answers']} answers are this engine's")
    asked = {"prompts": len(prompts), "max_new_tokens": new, "steps": args.steps, "drafted": counts}
    told = {name: as_json(proof) for name, proof in proofs.items()}
    if args.out is not None:
        write_json(args.out, provenance(torch.device("cpu")) | asked | {"proofs": told, "regenerate": answers})
    wrong = sum(proof.bugs for proof in proofs.values())
    print(json.dumps({"bugs": wrong, "answers": answers["answers"], "same": answers["same"]}))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
