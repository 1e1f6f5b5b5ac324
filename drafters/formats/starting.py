"""Command lines that start a server with an exported drafter."""

import json
import shlex
from pathlib import Path

from specdec.drafters.formats import Checkpoint
from specdec.drafters.formats.eagle import TOKEN_MAP
from specdec.drafters.formats.speculators import SPECULATIVE_TOKENS


def vllm_config(asked: dict, folder: Path, steps: int = SPECULATIVE_TOKENS) -> dict:
    """vLLM's `--speculative-config` for an export in `folder`. asked: what `Family.vllm` says. steps: tokens of a
    draft, where that is open."""
    return {"model": str(folder), "num_speculative_tokens": steps} | asked


def command(server: str, checkpoint: Checkpoint, folder: Path, target: str) -> str | None:
    """The command that serves `target`, a folder or hub name, with an export of the checkpoint in `folder`. None where
    nothing is known of it."""
    family = checkpoint.family
    if server == "vllm":
        config = vllm_config(family.vllm(checkpoint.meaning), folder)
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
    algorithm = family.sglang(checkpoint.meaning)
    if algorithm is None:
        return None
    flags = {"model-path": target, "speculative-algorithm": algorithm, "speculative-draft-model-path": folder}
    if algorithm.startswith("EAGLE"):  # a block says itself how many tokens it drafts
        flags["speculative-num-steps"] = SPECULATIVE_TOKENS
        flags["speculative-eagle-topk"] = 1
        flags["speculative-num-draft-tokens"] = SPECULATIVE_TOKENS + 1
    if (folder / TOKEN_MAP).exists():
        flags["speculative-token-map"] = folder / TOKEN_MAP
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])
