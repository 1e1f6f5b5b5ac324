"""Greedy decoding in SGLang's engine, for `check_in_sglang.py`. The Python of SGLang's own environment runs it, so it
imports nothing of ours but the stand-ins beside it.

    python scripts/sglang_side.py JOB.json ANSWER.json

A job names prompts as token ids, the number of new tokens, the tokens that end a text, and the engine's arguments. The
answer holds for each prompt the tokens and what SGLang counted of its drafts. There is none if SGLang refuses. Its
workers are new processes. Each runs this file first, so they have the stand-ins too.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import sglang_stand_ins

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
sglang_stand_ins.install()
sglang_stand_ins.keep_the_backend()

PACKAGES = ("sglang", "torch", "transformers")
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "intel_amx",
    "skip_tokenizer_init": True,
    "max_running_requests": 1,
    "max_total_tokens": 4096,
    "page_size": 1,
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "log_level": "warning",
}


def row_of(out: dict) -> dict:
    counts = {name: value for name, value in out["meta_info"].items() if name.startswith("spec_")}
    return {"tokens": list(out["output_ids"]), "counts": counts}


def main() -> None:
    job, file = map(Path, sys.argv[1:])
    job = json.loads(job.read_text())
    packages = [import_module(name) for name in PACKAGES]
    engine = packages[0].Engine(**SETTINGS | job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": job["max_new_tokens"], "stop_token_ids": job["eos"]}
    outs = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in job["prompts"]]
    versions = {package.__name__: package.__version__ for package in packages}
    file.write_text(json.dumps({"versions": versions, "rows": [row_of(out) for out in outs]}))
    engine.shutdown()


if __name__ == "__main__":
    main()
