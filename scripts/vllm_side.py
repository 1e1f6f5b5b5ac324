"""Greedy decoding in vLLM, for `check_in_vllm.py`. The Python of vLLM's own environment runs it, so it imports nothing
of ours.

    python scripts/vllm_side.py JOBS.json ANSWERS

A job names a target, prompts as token ids, the number of new tokens, and vLLM's speculative settings or null. The
answer to job i, ANSWERS/i.json, holds for each prompt the tokens and what vLLM counted: drafts, drafted and accepted
tokens, accepted by position. Each job has a process of its own, and there is no answer if vLLM refuses. They are forked
from one that has imported vLLM, which takes longer than the decoding.
"""

import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path

PACKAGES = ("vllm", "torch", "transformers")  # of that environment, after SETTINGS are set
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def counts(llm) -> dict:
    """What vLLM has counted since it started."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    found = {name: metrics[key].value if key in metrics else 0 for name, key in COUNTERS.items()}
    return found | {"by_position": list(metrics[BY_POSITION].values) if BY_POSITION in metrics else []}


def less(now: dict, before: dict) -> dict:
    """The counts since `before`."""
    positions = before["by_position"] or [0] * len(now["by_position"])
    by_position = [a - b for a, b in zip(now["by_position"], positions, strict=True)]
    return {name: now[name] - before[name] for name in COUNTERS} | {"by_position": by_position}


def answer(job: dict, file: Path) -> None:
    vllm, torch, transformers = (import_module(name) for name in PACKAGES)
    llm = vllm.LLM(
        model=job["target"],
        speculative_config=job["speculative"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], stop_token_ids=job["eos"], detokenize=False
    )
    rows, before = [], counts(llm)
    for prompt in job["prompts"]:
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        now = counts(llm)
        rows.append({"tokens": list(out.outputs[0].token_ids)} | less(now, before))
        before = now
    versions = {package.__name__: package.__version__ for package in (vllm, torch, transformers)}
    file.write_text(json.dumps({"versions": versions, "rows": rows}))


def main() -> None:
    os.environ.update(SETTINGS)
    import_module("vllm")
    jobs, answers = map(Path, sys.argv[1:])
    for number, job in enumerate(json.loads(jobs.read_text())):
        process = multiprocessing.get_context("fork").Process(target=answer, args=(job, answers / f"{number}.json"))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
