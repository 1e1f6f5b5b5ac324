"""Does a drafter learn from a target in vLLM what it learns from one here? Answers, features, losses.

    python scripts/vllm_features.py --prompt-file MT_BENCH --env vllm-env --out docs/vllm_features.json

vLLM serves the demo target in fp32 on a CPU, with `training.vllm_side.hidden_state_files` as its connector. It answers
--answers prompts of the file, asked anew in other words where the file has fewer, by `specdec regenerate --server`.
Then `specdec cache from_vllm=FOLDER server=URL` has it compute the features of these conversations, and `specdec train`
trains a head on them for --steps steps, with the target's ends alone. Beside that the same is done without vLLM, and
answers, features and losses are compared. Features of some conversations are also made in bf16, and by two
tensor-parallel processes. vLLM's own connector is tried too, and what becomes of it told. --env is the environment that
`scripts/check_in_vllm.py` makes. Ends with 1 if anything differs by more than rounding; the last line is one JSON
object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import checkout
import torch
from check_in_vllm import python_of
from safetensors.torch import load_file
from vllm_server_check import prompts_to_answer, vllm_server

from specdec.api import DEMO_TARGET, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.remote import Remote
from specdec.structs import Sampling
from specdec.training.loop.log import read_log
from specdec.training.regenerate import regenerate, regenerate_remotely

PORT = 8651
FEW = 20  # conversations of what is only tried
ROOM = {"fp32": 1e-4, "bf16": 2**-5}  # of a state, in parts of the largest: bf16 has 8 bits, and 8 layers add up
LOSS_ROOM = 1e-3  # relative
TAPS = "[2,4,8]"  # hidden states of the default drafter, which are also vLLM's layer ids
OURS = {"kv_connector": "HiddenStateFiles", "kv_connector_module_path": "hidden_state_files"}
SIDE = checkout.ROOT / "training" / "vllm_side"
THEIRS = {"kv_connector": "ExampleHiddenStatesConnector"}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt-file", type=Path, required=True, help="as specdec generate takes it")
    p.add_argument("--env", type=Path, required=True, help="folder of the environment with vLLM")
    p.add_argument("--answers", type=int, default=200, help="prompts that are answered (default 200)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--steps", type=int, default=40, help="of training (default 40)")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "answers", "max_new_tokens", "steps")
    return args


def serve(
    python: Path, folder: Path, connector: dict, dtype: str = "float32", processes: int = 1
) -> AbstractContextManager[str]:
    """A server whose connector writes into `folder`/states."""
    states = {"shared_storage_path": str(folder / "states")}
    how = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": json.loads(TAPS)}},
    }
    transfer = connector | {"kv_role": "kv_producer", "kv_connector_extra_config": states}
    (folder / "states").mkdir(parents=True)
    more = ["--speculative-config", json.dumps(how), "--kv-transfer-config", json.dumps(transfer)]
    more += ["--tensor-parallel-size", str(processes)]
    return vllm_server(python, PORT, folder / "log", *more, dtype=dtype, path=SIDE)


def specdec(*words: str) -> None:
    """A command of ours. Raises ValueError with its last words if it fails."""
    command = [sys.executable, "-m", "specdec", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"specdec {words[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def answers(server: Remote, target, args: argparse.Namespace, folder: Path) -> tuple[Path, dict]:
    """The server's answers, and how many of them are this engine's."""
    prompts = prompts_to_answer(target, args.prompt_file, 1 << 20)[: args.answers]
    how = {"max_new_tokens": args.max_new_tokens, "sampling": Sampling(), "seed": 0}
    (theirs,) = regenerate_remotely(server, target.tokenizer, prompts, folder / "theirs.jsonl", requests=4, **how)
    (ours,) = regenerate(target, prompts, folder / "ours.jsonl", batch_size=1, **how)
    both = [sorted(file.read_text(encoding="utf-8").splitlines()) for file in (theirs, ours)]
    same = sum(a == b for a, b in zip(*both, strict=True))
    return theirs, {"answers": len(prompts), "same": same, "vllm": server.version}


def caches(data: Path, url: str, folder: Path, dtype: str = "fp32", limit: int | None = None) -> dict:
    """Cache features both ways, into `folder`/here and there; how far they are apart, by hidden state, and how large
    they are."""
    words = [f"data.path={data}", f"store={dtype}", f"target.dtype={dtype}", f"data.limit={limit or 'null'}"]
    specdec("cache", *words, f"out={folder / 'there'}", "--from-vllm", str(folder / "states"), f"server={url}")
    specdec("cache", *words, f"out={folder / 'here'}")
    ours, theirs = (
        torch.cat([load_file(path)["feats"].float() for path in sorted((folder / way).glob("*.safetensors"))])
        for way in ("here", "there")
    )
    largest, apart = (x.abs().amax((0, 2)) for x in (ours, theirs - ours))
    return {
        "tokens": len(ours),
        "hidden_states": json.loads(TAPS),
        "largest": largest.tolist(),
        "apart": apart.tolist(),
        "apart_to_largest": (apart / largest).max().item(),
    }


def say(what: str, told: object) -> None:
    print(f"{what}: {json.dumps(told)}", flush=True)


def training(folder: Path, steps: int) -> dict:
    """Train on both caches; how far the losses of each step, and of the held-out conversations, are apart."""
    runs = {"here": "trainer.prompts=null", "there": "whole_target=false"}
    for way, more in runs.items():
        specdec(
            "train", f"data.cache={folder / way}", f"out={folder / way / 'run'}", f"trainer.steps={steps}",
            "trainer.log_every=1", more,
        )  # fmt: skip
    rows = [read_log(folder / way / "run" / "log.jsonl") for way in runs]
    apart = [abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(*rows, strict=True)]
    ends = [{row["split"]: round(row["loss"], 5) for row in way} for way in rows]
    return {
        "steps": steps,
        "losses": len(apart),
        "apart_relative": max(apart),
        "last": dict(zip(runs, ends, strict=True)),
    }


def their_own(python: Path, folder: Path) -> str:
    """What becomes of vLLM's own connector, in words."""
    try:
        with serve(python, folder, THEIRS) as url:
            Remote(url, retries=0, timeout=60).complete([5, 6, 7], 1)
            time.sleep(5)
    except ValueError as error:
        return f"it failed: {str(error)[-300:]}"
    found = sorted(path.suffix for path in (folder / "states").iterdir())
    errors = [line for line in (folder / "log").read_text().splitlines() if "Error" in line]
    return f"it left {len(found)} files ({', '.join(found) or 'none'}); {errors[-1][-200:] if errors else 'no error'}"


@one_sentence_errors
def main() -> None:
    args = arguments()
    python, target = python_of(args.env), load_target(DEMO_TARGET, dtype="fp32")
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        with serve(python, at / "fp32", OURS) as url:
            data, told = answers(Remote(url), target, args, at)
            say("answers", told)
            told["fp32"] = caches(data, url, at / "fp32")
            say("fp32", told["fp32"])
        told["training"] = training(at / "fp32", args.steps)
        with serve(python, at / "bf16", OURS, dtype="bfloat16") as url:
            told["bf16"] = caches(data, url, at / "bf16", "bf16", FEW)
        with serve(python, at / "two", OURS, processes=2) as url:
            told["two tensor-parallel processes, fp32"] = caches(data, url, at / "two", "fp32", FEW)
        told["vLLM's own connector"] = their_own(python, at / "own")
    if args.out is not None:
        write_json(args.out, provenance(torch.device("cpu")) | told)
    wrong = [key for key, value in told.items() if isinstance(value, dict) and "apart_to_largest" in value
             and value["apart_to_largest"] > ROOM["bf16" if key == "bf16" else "fp32"]]  # fmt: skip
    wrong += ["training"] * (told["training"]["apart_relative"] > LOSS_ROOM)
    wrong += ["answers"] * (told["same"] < told["answers"])
    print(json.dumps({"wrong": wrong} | told))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
