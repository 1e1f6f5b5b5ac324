"""Command lines that start a server with an exported drafter."""

import json
import shlex
from pathlib import Path

from drafters.formats import Checkpoint

VLLM = {"EAGLE-3": "eagle3", "EAGLE-1/2": "eagle", "Medusa": "medusa", "P-EAGLE": "eagle3", "PARD": "draft_model"}
MASK_ROWS = ("P-EAGLE", "PARD")  # of which the method alone does not tell vLLM
SGLANG = {"EAGLE-3": "EAGLE3", "EAGLE-1/2": "EAGLE"}
STEPS = 3  # tokens of a draft, where the drafter takes any number


def vllm_method(checkpoint: Checkpoint) -> tuple[str, int | None]:
    """vLLM's name for the method, and the number of tokens that the drafter always drafts; None for any."""
    meaning = checkpoint.meaning
    if checkpoint.family.title == "DFlash":  # whose slots see each other
        return "dspark" if meaning.conditional else "dflash", meaning.forward.drafts
    return VLLM[checkpoint.family.title], meaning.shape.heads if checkpoint.family.title == "Medusa" else None


def vllm_config(checkpoint: Checkpoint, folder: Path, steps: int = STEPS) -> dict:
    """What `--speculative-config` of vLLM says of an export of the checkpoint that lies in `folder`."""
    method, always = vllm_method(checkpoint)
    config = {"method": method, "model": str(folder), "num_speculative_tokens": always or steps}
    return config | ({"parallel_drafting": True} if checkpoint.family.title in MASK_ROWS else {})


def command(server: str, checkpoint: Checkpoint, folder: Path, target: str) -> str | None:
    """The command that serves `target`, a folder or hub name, with an export of the checkpoint in `folder`. None for
    SGLang and another method than EAGLE's."""
    if server == "vllm":
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(vllm_config(checkpoint, folder))]
        return shlex.join(words)
    algorithm = SGLANG.get(checkpoint.family.title)
    if algorithm is None:
        return None
    flags = {
        "model-path": target,
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": str(folder),
        "speculative-num-steps": STEPS,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": STEPS + 1,
    }
    return "python -m sglang.launch_server " + " ".join(f"--{name} {shlex.quote(str(v))}" for name, v in flags.items())
