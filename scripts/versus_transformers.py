"""The same weights, dtype and threads in transformers and here: is the greedy text the same, and how fast is each?

    python scripts/versus_transformers.py --prompt-file questions.jsonl --max-new-tokens 64

Side by side in one run: for each prompt transformers' `generate`, plain decoding, speculative decoding, in turn; the
median of the trials counts. The last line is one JSON object.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, generate, load_drafter, load_target, make_tree
from specdec.checkpoint import DTYPES
from specdec.cli import one_sentence_errors
from specdec.text import encode_prompt, read_prompts


class Transformers:
    """Greedy `generate` of transformers as it comes, with its dynamic cache and SDPA attention."""

    def __init__(self, target, dtype: torch.dtype):
        self.target = target
        model = AutoModelForCausalLM.from_pretrained(target.name, dtype=dtype, attn_implementation="sdpa")
        self.model = model.eval().to(target.embed.weight.device)

    @torch.inference_mode()
    def __call__(self, prompt: str, max_new_tokens: int, raw: bool) -> tuple[list[int], float]:
        ids = torch.tensor([encode_prompt(self.target, prompt, raw)], device=self.model.device)
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.target.eos) or None,
            pad_token_id=0,
        )
        tokens = out[0, ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - start


class Ours:
    def __init__(self, target, drafter=None, tree=None):
        self.target, self.drafter, self.tree = target, drafter, tree
        self.parts: dict[str, float] = {}
        self.rounds = 0

    def __call__(self, prompt: str, max_new_tokens: int, raw: bool) -> tuple[list[int], float]:
        out = generate(self.target, prompt, self.drafter, tree=self.tree, max_new_tokens=max_new_tokens, raw=raw)
        for part, seconds in out.result.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        self.rounds += out.rounds
        return out.rows[0].tokens, out.result.seconds


@one_sentence_errors
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", default=DEMO_TARGET)
    p.add_argument("--draft", default=None, help="default: the demo's, or none for a target of your own")
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=16, help="prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--topk", type=int, default=4)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--num-draft-tokens", type=int)
    p.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    p.add_argument("--device", default="cpu")
    p.add_argument("--raw", action="store_true")
    args = p.parse_args()
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    draft = args.draft or (DEMO_DRAFTER if args.target == DEMO_TARGET else None)
    prompts = read_prompts(args.prompt_file)[: args.limit]
    runs = {"transformers": Transformers(target, DTYPES[args.dtype]), "plain": Ours(target)}
    if draft:
        tree = make_tree(args.topk, args.steps, args.num_draft_tokens)
        runs["speculative"] = Ours(target, load_drafter(draft, target), tree)
    texts: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for trial in range(-1, args.trials):  # trial -1 warms up
        taken = dict.fromkeys(runs, 0.0)
        for name in runs:
            texts[name] = []
        for prompt in prompts:
            for name, run in runs.items():
                tokens, time_taken = run(prompt, args.max_new_tokens, args.raw)
                texts[name].append(tokens)
                taken[name] += time_taken
        if trial >= 0:
            for name in runs:
                seconds[name].append(taken[name])
    print(json.dumps(report(args, runs, texts, {name: statistics.median(s) for name, s in seconds.items()})))


def report(args, runs: dict, texts: dict, seconds: dict[str, float]) -> dict:
    tokens = {name: sum(map(len, rows)) for name, rows in texts.items()}
    rate = {name: tokens[name] / seconds[name] for name in runs}
    print(f"{'':14}{'ms a token':>12}{'tokens/s':>10}{'ratio':>8}   same text as transformers")
    same = {}
    for name in runs:
        same[name] = sum(a == b for a, b in zip(texts[name], texts["transformers"], strict=True))
        print(
            f"{name:14}{1e3 / rate[name]:12.2f}{rate[name]:10.1f}{rate[name] / rate['transformers']:8.2f}"
            f"   {same[name]} of {len(texts[name])}"
        )
    out = {
        "tokens_per_second": rate,
        "ratio_to_transformers": {name: r / rate["transformers"] for name, r in rate.items()},
        "same_text": same,
        "prompts": len(texts["plain"]),
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "device": args.device,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if "speculative" in runs:
        fast = runs["speculative"]
        out["speculative_to_plain"] = rate["speculative"] / rate["plain"]
        out["milliseconds_a_round"] = {part: 1e3 * s / fast.rounds for part, s in fast.parts.items()}
        parts = "  ".join(f"{part} {ms:.2f}" for part, ms in out["milliseconds_a_round"].items() if part != "prefill")
        print(f"speculative to plain {out['speculative_to_plain']:.2f}; ms a round: {parts}")
    return out


if __name__ == "__main__":
    main()
