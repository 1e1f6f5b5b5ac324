"""Greedy decoding in vLLM, for `check_in_vllm.py`. The Python of vLLM's own environment runs it, so it imports nothing
of ours.

    python scripts/vllm_side.py JOB.json ANSWER.json

The job names a target, prompts as token ids, the number of new tokens, and vLLM's speculative settings or null. The
answer holds, for each prompt, the tokens and what vLLM counted: drafts, drafted and accepted tokens, accepted by
position.
"""

import json
import os
import sys
from pathlib import Path

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


def answer(job: dict) -> dict:
    os.environ.update(SETTINGS)
    import torch
    import transformers
    import vllm

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
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "rows": rows}


if __name__ == "__main__":
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(answer(json.loads(job.read_text()))))
