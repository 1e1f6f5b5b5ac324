"""The same weights, dtype and threads in transformers and here: is the greedy text the same, and how fast is each?

    python scripts/versus_transformers.py --prompt-file questions.jsonl --max-new-tokens 64
    python scripts/versus_transformers.py --prompt-file questions.jsonl --draft demo/mtp --topk 1 --steps 3 \\
        --baseline-tree ../older-checkout
    python scripts/versus_transformers.py --prompt-file questions.jsonl --draft ngram --topk 1 --steps 10 \\
        --prompt-lookup 10

For each prompt transformers' greedy `generate`, in the setting that a short trial finds fastest, plain decoding, and
speculative decoding take turns in one run. The fastest trial of a prompt counts, for all alike. The share of the memory
bandwidth takes the weights, as the engine keeps them, to be read once a token, and the bandwidth to be that of a buffer
that fits no cache: weights that fit one can exceed it. `--baseline-tree` runs the same with another checkout of this
repository, by that checkout's copy of this script, in a process of its own. `--prompt-lookup N` has transformers draft
N tokens from the prompt, too. On a machine that others use, `--threads 1
--clock cpu` counts processor time. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401
import torch
import transformers
from rich.table import Table
from transformers import AutoModelForCausalLM

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, generate, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.terminal import console
from specdec.lab.cost.memory import bandwidth, read_bytes
from specdec.lab.machine import machine_in_short
from specdec.lab.models import check_counts
from specdec.model.checkpoint import DRAFT_DTYPES, DTYPES
from specdec.text import encode_prompt, read_prompts
from specdec.trees.spec import TreeSpec

SETTINGS = ("sdpa dynamic", "eager dynamic", "sdpa static", "sdpa static compiled")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TRIAL_TOKENS = 32

Decode = Callable[[str, int, bool], list[int]]  # prompt, most tokens, raw -> the new tokens


class GreedyTransformers:
    """Greedy `generate` of transformers with one attention and one cache, its forward compiled or not."""

    def __init__(self, target, dtype: torch.dtype, setting: str, **how):
        attention, cache, *compiled = setting.split()
        self.target, self.setting = target, setting
        self.how = how if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
        model = AutoModelForCausalLM.from_pretrained(target.name, dtype=dtype, attn_implementation=attention)
        self.model = model.eval().to(target.device)
        if compiled:
            self.model.forward = torch.compile(self.model.forward)

    @torch.inference_mode()
    def __call__(self, prompt: str, max_new_tokens: int, raw: bool) -> list[int]:
        ids = torch.tensor([encode_prompt(self.target, prompt, raw)], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.target.eos) or None,
            pad_token_id=0,
            **self.how,
        )
        return out[0, ids.shape[1] :].tolist()


def timed(run: Decode, prompt: str, tokens: int, args) -> tuple[list[int], float]:
    """The new tokens, and the seconds from the prompt's text to them."""
    clock = CLOCKS[args.clock]
    start = clock()
    out = run(prompt, tokens, args.raw)
    return out, clock() - start


def fastest_transformers(target, prompt: str, args) -> GreedyTransformers:
    """The setting that decodes `TRIAL_TOKENS` of one prompt fastest, after a first time that compiles.

    Raises ValueError if no setting works."""
    best, found = float("inf"), None
    for setting in args.settings:
        candidate = GreedyTransformers(target, DTYPES[args.dtype], setting)
        try:
            trials = [timed(candidate, prompt, TRIAL_TOKENS, args) for _ in range(3)]
        except Exception as error:  # whatever a compiler or a cache of another library may raise
            print(f"transformers, {setting}: does not work: {str(error).splitlines()[0][:80]}")
            continue
        seconds = min(taken for _, taken in trials[1:])
        print(f"transformers, {setting}: {1e3 * seconds / len(trials[0][0]):.2f} ms a token")
        if seconds < best:
            best, found = seconds, candidate
    if found is None:
        raise ValueError(f"no setting of transformers works: tried {', '.join(args.settings)}")
    return found


class GreedyEngine:
    """Greedy decoding with this project's engine, plainly or with a drafter."""

    def __init__(self, target, drafter=None, tree=None):
        self.target, self.drafter, self.tree = target, drafter, tree
        self.parts: dict[str, float] = {}
        self.rounds = self.undrafted = self.emitted = 0

    def __call__(self, prompt: str, max_new_tokens: int, raw: bool) -> list[int]:
        out = generate(self.target, prompt, self.drafter, tree=self.tree, max_new_tokens=max_new_tokens, raw=raw)
        for part, seconds in out.result.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        self.rounds += out.rounds
        self.undrafted += out.undrafted
        self.emitted += len(out.rows[0].tokens) - 1
        return out.rows[0].tokens


def run_in_turn(runs: dict[str, Decode], prompts: list[str], args) -> tuple[dict, dict[str, float]]:
    """The texts of each run, and its seconds: the fastest trial of every prompt, summed up."""
    texts: dict[str, list[list[int]]] = {}
    best = {name: [float("inf")] * len(prompts) for name in runs}
    for trial in range(-1, args.trials):  # trial -1 warms up
        for name in runs:
            texts[name] = []
        for i, prompt in enumerate(prompts):
            for name, run in runs.items():
                tokens, taken = timed(run, prompt, args.max_new_tokens, args)
                texts[name].append(tokens)
                if trial >= 0:
                    best[name][i] = min(best[name][i], taken)
    return texts, {name: sum(seconds) for name, seconds in best.items()}


def run_baseline(tree: Path, args) -> dict:
    """What plain and speculative decoding of another checkout do with the same prompts, by its own copy of this script.

    Raises ValueError if that fails."""
    script = tree.resolve() / "scripts" / Path(__file__).name
    command = [sys.executable, script, "--settings", "--prompt-file", args.prompt_file.resolve()]
    for name, value in vars(args).items():
        if name in ("settings", "prompt_file", "prompt_lookup", "baseline_tree", "raw", "draft_dtype") or value is None:
            continue
        local = name in ("target", "draft", "token_map") and Path(value).exists()
        command += [f"--{name.replace('_', '-')}", Path(value).resolve() if local else value]
    command = [str(part) for part in command] + ["--raw"] * args.raw
    env = os.environ | {"PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ValueError(f"--baseline-tree: decoding with {tree} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def read_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", default=DEMO_TARGET)
    p.add_argument("--draft", default=None, help="default: the demo's, or none for a target of your own")
    p.add_argument("--token-map", help="tokens that the drafter may propose (FR-Spec)")
    p.add_argument("--draft-dtype", choices=sorted(DRAFT_DTYPES), help="default: the target's")
    p.add_argument("--prompt-file", type=Path, required=True)
    p.add_argument("--limit", type=int, default=16, help="prompts")
    p.add_argument("--skip-long", action="store_true", help="leave out prompts that do not fit the target's context")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--topk", type=int, default=4)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--num-draft-tokens", type=int)
    p.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, help="default: what torch takes")
    p.add_argument("--raw", action="store_true")
    known = ", ".join(map(repr, SETTINGS))
    p.add_argument(
        "--settings",
        nargs="*",
        default=list(SETTINGS[:3]),
        choices=SETTINGS,
        metavar="SETTING",
        help=f"of transformers, to choose from: {known}; default: all but the last; none: without transformers",
    )
    p.add_argument("--prompt-lookup", type=int, metavar="N", help="transformers with N drafted tokens as well")
    p.add_argument("--clock", default="wall", choices=CLOCKS)
    p.add_argument("--baseline-tree", type=Path, help="another checkout of this repository, as a second baseline")
    args = p.parse_args()
    check_counts(args, "limit", "max_new_tokens", "trials", "threads")
    if args.baseline_tree and not (args.baseline_tree / "scripts" / Path(__file__).name).is_file():
        raise ValueError(f"--baseline-tree: {args.baseline_tree} is no checkout of this repository")
    return args


@one_sentence_errors
def main() -> None:
    args = read_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    args.draft = args.draft or (DEMO_DRAFTER if args.target == DEMO_TARGET else None)
    prompts = read_prompts(args.prompt_file)
    if args.skip_long:
        most = target.config.context - args.max_new_tokens
        prompts = [prompt for prompt in prompts if len(encode_prompt(target, prompt, args.raw)) <= most]
    prompts = prompts[: args.limit]
    if not prompts:
        raise ValueError(f"{args.prompt_file} has no prompt that fits the target's context")
    runs: dict[str, Decode] = {}
    if args.settings:
        runs["transformers"] = fastest_transformers(target, prompts[0], args)
    if args.prompt_lookup:
        lookup = {"prompt_lookup_num_tokens": args.prompt_lookup}  # which wants a cache that can be cropped
        runs["prompt lookup"] = GreedyTransformers(target, DTYPES[args.dtype], SETTINGS[0], **lookup)
    runs["plain"] = GreedyEngine(target)
    if args.draft:
        how = {"token_map": args.token_map} if args.token_map else {}
        if args.draft_dtype:
            how["dtype"] = DRAFT_DTYPES[args.draft_dtype]
        drafter = load_drafter(args.draft, target, **how)
        runs["speculative"] = GreedyEngine(
            target, drafter, TreeSpec.of(args.topk, args.steps, args.num_draft_tokens).build()
        )
    ceiling = bandwidth(target.device)
    texts, seconds = run_in_turn(runs, prompts, args)
    out = report(args, runs, texts, seconds) | share_of_bandwidth(target, ceiling, texts, seconds)
    if args.baseline_tree:
        out["baseline_tree"] = report_baseline(run_baseline(args.baseline_tree, args), out)
    print(json.dumps(out))


def share_of_bandwidth(target, ceiling: float, texts: dict, seconds: dict[str, float]) -> dict:
    size, tokens = read_bytes(target, context=0), sum(map(len, texts["plain"]))
    share = size * tokens / seconds["plain"] / ceiling
    print(f"weights {size / 1e6:.1f} MB; memory {ceiling / 1e9:.1f} GB/s, of which plain decoding takes {share:.0%}")
    return {"weight_bytes": size, "bandwidth": ceiling, "plain_share_of_bandwidth": share}


def report_baseline(theirs: dict, ours: dict) -> dict:
    for name, rate in theirs["tokens_per_second"].items():
        faster = ours["tokens_per_second"][name] / rate
        print(f"baseline tree, {name}: {rate:.1f} tokens/s; here {faster:.2f} times as fast")
    return theirs


def report(args, runs: dict, texts: dict, seconds: dict[str, float]) -> dict:
    tokens = {name: sum(map(len, rows)) for name, rows in texts.items()}
    rate = {name: tokens[name] / seconds[name] for name in runs}
    first = next(iter(runs))  # what the others are compared with: transformers, if it takes part
    same = {name: sum(a == b for a, b in zip(texts[name], texts[first], strict=True)) for name in runs}
    table = Table("", "ms a token", "tokens/s", "ratio", f"same text as {first}")
    for name, r in rate.items():
        of = f"{same[name]} of {len(texts[name])}"
        table.add_row(name, f"{1e3 / r:.2f}", f"{r:.1f}", f"{r / rate[first]:.2f}", of)
    console(100).print(table)
    out = {
        "tokens_per_second": rate,
        f"ratio_to_{first}": {name: r / rate[first] for name, r in rate.items()},
        "same_text": same,
        "prompts": len(texts["plain"]),
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "device": args.device,
        "clock": args.clock,
        **machine_in_short(),
        "transformers": transformers.__version__,
    }
    if "transformers" in runs:
        out["transformers_setting"] = runs["transformers"].setting
    if "speculative" in runs:
        fast = runs["speculative"]
        out["tau"] = fast.emitted / fast.rounds
        out["identical_to_plain"] = sum(a == b for a, b in zip(texts["speculative"], texts["plain"], strict=True))
        out["speculative_to_plain"] = rate["speculative"] / rate["plain"]
        out["undrafted_share"] = fast.undrafted / fast.rounds
        out["milliseconds_a_round"] = {part: 1e3 * s / fast.rounds for part, s in fast.parts.items()}
        parts = "  ".join(f"{part} {ms:.2f}" for part, ms in out["milliseconds_a_round"].items() if part != "prefill")
        print(f"speculative to plain {out['speculative_to_plain']:.2f}; tau {out['tau']:.2f}; ms a round: {parts}")
        if fast.undrafted:
            print(f"rounds without a draft: {out['undrafted_share']:.0%}")
        print(f"speculative and plain text are the same for {out['identical_to_plain']} of {out['prompts']} prompts")
    return out


if __name__ == "__main__":
    main()
