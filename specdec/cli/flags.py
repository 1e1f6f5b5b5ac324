"""The table of flags: each name means the same in every command. `specdec.cli.commands` lists who takes which.

A command may give a flag of its own help or default, and its own type where the flag takes a list.
"""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from specdec import registry
from specdec.sampling_settings import Sampling


class Flag(NamedTuple):
    """A flag. The parser appends the default to the help, unless the help names it."""

    help: str
    kind: Callable[[str], Any] = str  # bool: a switch without a value
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    nargs: str | None = None  # "+": several values after one flag; "append": the flag may be repeated


def dashed(name: str) -> str:
    """Return a flag as it is typed: 'max_new_tokens' -> '--max-new-tokens'."""
    return f"--{name.replace('_', '-')}"


def whole_numbers(text: str) -> list[int]:
    """Read '1,2,4' as [1, 2, 4], in ascending order, each number once."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants whole numbers, such as 1,2,4, and not {text!r}") from None
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"wants numbers of at least 1, got {numbers[0]}")
    return numbers


def rates(text: str) -> list[float]:
    """Read '0.5,2' as [0.5, 2.0], all positive."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"wants positive numbers with commas between them, and not {text!r}")
    return found


MODELS = {
    "target": Flag("folder or hub name of the target (default: demo/target)"),
    "draft": Flag("folder, hub name, demo/NAME, ngram or ngram:suffix (default: the target's bundled one)"),
    "token_map": Flag("the drafter proposes these tokens only (FR-Spec): .json or .pt", Path),
    "feedback": Flag("of MTP heads in a target: before or after the norm", choices=("pre", "post")),
    "draft_dtype": Flag("of the drafter: bf16, fp16, fp32, int8 (default: the target's)",
                        choices=("bf16", "fp16", "fp32", "int8"), metavar="NAME"),
    "allow_nonfinite": Flag("load weights that hold NaN or Inf", bool),
    "dtype": Flag("auto (fp32 on the CPU, else the target's), fp32, fp16, bf16", default="auto"),
    "matmul_precision": Flag("of fp32 products: highest (default), high, medium (rows in bf16)",
                             choices=("highest", "high", "medium"), metavar="NAME"),
    "device": Flag("cpu, cuda, cuda:1, ...", default="cpu"),
    "tp_plan": Flag("auto: the processes of torchrun share the target (docs/scale.md)", choices=("auto",)),
    "device_map": Flag("auto: spread the target over GPUs, memory and disk; or a .json file"),
}  # fmt: skip
SAMPLING = {one.name: Flag(one.metadata["help"], cast(Any, one.type), one.default) for one in fields(Sampling)}
TREE = {
    "steps": Flag("levels (default 5)", int),
    "topk": Flag("nodes expanded on a level, children of each (default 4); 1: a chain", int),
    "num_draft_tokens": Flag("nodes that the target verifies, the root counted (default 16)", int),
    "sample_draft": Flag("topk chains of steps tokens, whose tokens can be drawn from the drafter", bool),
    "children": Flag("above temperature 0: likeliest, coupled or drawn (default: by the rule)",
                     choices=("likeliest", "coupled", "drawn"), metavar="KIND"),
    "tree": Flag(f"instead: auto (default), the fastest; as 1/3/4; {', '.join(registry.names('tree'))}; "
                 "a file with `paths`; your own FILE.py:NAME", metavar="TREE"),
}  # fmt: skip
RULE = {
    "verifier": Flag(f"{', '.join(registry.names('verifier'))}, or your own FILE.py:NAME (default: match); block "
                     "and rejection need --sample-draft; lossy: typical, sglang with a threshold"),
    "verifier_args": Flag("its settings, such as epsilon=0.09,alpha=0.3 or threshold_acc=0.9", metavar="K=X,..."),
}  # fmt: skip
FLAGS = MODELS | SAMPLING | TREE | RULE | {
    # What is decoded
    "prompt": Flag("one prompt", metavar="TEXT"),
    "prompts": Flag("a prompt a line; or .jsonl with `prompt`, `turns` or `messages`", Path),
    "limit": Flag("use this many prompts only", int),
    "chat": Flag("talk to the target, with history", bool),
    "raw": Flag("do not apply the chat template", bool),
    "max_new_tokens": Flag("of an answer", int, 128),
    "stop": Flag("end before this text; may be given repeatedly", metavar="TEXT", nargs="append"),
    "json_schema": Flag("answer in JSON that this schema describes", Path),
    "batch_size": Flag("prompts of --prompts decoded together", int, 1),
    "seed": Flag("of all draws", int, 0),
    # How
    "no_draft": Flag("decode without a drafter", bool),
    "no_graphs": Flag("on a GPU: do not replay rounds as CUDA graphs", bool),
    "compile": Flag("compile the rounds and cache them (docs/compile.md)", bool),
    "settings": Flag("YAML of flags, as specdec tune writes; typed flags override it", Path),
    "recalibrate": Flag("for --tree auto: measure again what rounds cost here", bool),
    "adaptive": Flag("draft by the load: table, ema, survival"),
    # Output
    "out": Flag("the file that is written", Path),
    "json": Flag("one JSON object as the last line, instead of lines for people", bool),
    "show_trees": Flag("draw every tree, accepted nodes starred", bool),
    "compare": Flag("decode without a drafter too: ratio of speeds; identical?", bool),
    "trace": Flag("write a trace of every round (docs/trace.md) there", Path, metavar="FOLDER"),
    "logprobs": Flag("with --json: log-probabilities of the emitted tokens", bool),
    "chart": Flag("throughput against interactivity, PNG", Path),
    # Data
    "data": Flag("a file, a data set of the hub, or the name of a preset in conf/data", metavar="DATA"),
    "split": Flag("of a data set"),
    "bad": Flag("what a record that cannot be used does", default="error", choices=("error", "skip")),
    "shard_size": Flag("answers per file (default: all in one)", int),
    "part": Flag("do one of N parts, the first is 0, as one of several jobs", metavar="K/N"),
    "turns": Flag("answer the first question of a conversation or all", default="first", choices=("first", "all")),
    "samples": Flag("answers per prompt", int, 1),
    "skip": Flag("begin after this many conversations", int, 0),
    "max_length": Flag("tokens; longer conversations are cut", int, 2048),
    "text": Flag("text files: everything counts", Path, (), nargs="*"),
    "size": Flag("tokens in the map", int),
    # A server, ours or another one
    "server": Flag("of OpenAI's interface", metavar="URL"),
    "served_model_name": Flag("the model's name there (default: the first that the server names)", metavar="NAME"),
    "requests": Flag("so many at once", int, 32),
    "plain_server": Flag("compare with this server, which does not speculate", metavar="URL"),
    "host": Flag("address to listen at (default 127.0.0.1: this machine)", default="127.0.0.1"),
    "port": Flag("0 takes a free one (default 8000)", int, 8000),
    "api_key": Flag("what clients must send (default: $SPECDEC_API_KEY, else nothing)", metavar="KEY"),
    "allowed_hosts": Flag("its names, commas between, or * (default: by --host)", metavar="NAMES"),
    "cors_origins": Flag("web pages that may call, commas between, or *", metavar="URLS"),
    "grace": Flag("seconds to finish in when stopped", float, 30.0),
    "stream_interval": Flag("tokens of a stream's event (default: those of a step)", int),
    "per_request_spec_decode_metrics": Flag("none (default), summary, detailed: acceptance in responses",
                                            default="none", metavar="HOW", choices=("none", "summary", "detailed")),
    "enable_prompt_tokens_details": Flag("report cached prompt tokens in the usage of a response", bool),
    "room": Flag("tokens of a text, prompt included (default: the context, 4096)", int),
    "queue": Flag("sequences that may wait for a row", int, 256),
    "prefill_chunk": Flag("of prompts read between two rounds (default 256, on a GPU 2048)", int, metavar="TOKENS"),
    "prefix_cache": Flag("memory for prompts that others begin like", int, 256, metavar="MIB"),
    "max_n": Flag("texts of one response", int, 16),
    "max_seconds": Flag("of a request, queue included (default: no limit)", float),
    "max_body": Flag("bytes of a request", int, 4 << 20),
    # Measurements
    "tries": Flag("settings that are decoded with", int, 4),
    "repeats": Flag("of decoding and of measured rounds", int, 3),
    "remeasure": Flag("do not use stored measurements", bool),
    "keep": Flag("write acceptance.json into the drafter's folder, for --tree auto", bool),
    "draws": Flag("for each rule, tree and sampling", int, 100_000),
    "self_test": Flag("break the rules, one token in 1,000: is it found?", bool),
    "traces": Flag("a folder that --trace wrote", Path, metavar="TRACE", nargs="+"),
    "level": Flag("of the confidence intervals", float, 0.95),
    "resamples": Flag("of the bootstrap over questions", int, 1000),
    "timeout": Flag("seconds of a request at most", float, 600.0),
    "completions": Flag("ask for completions, not in chats", bool),
    "range_ratio": Flag("let --max-new-tokens vary by so large a share", float, 0.0),
    "ignore_eos": Flag("answers have exactly so many tokens", bool),
    "concurrency": Flag("so many at a time (default 1,8,32)", whole_numbers),
    "rate": Flag("instead: so many a second, at random", rates, metavar="X,X,..."),
    "warm_up": Flag("requests before each load, not counted", int, 4),
    # Checkpoints
    "to": Flag("the layout", metavar="LAYOUT"),
    "int8": Flag("round matrices to int8, a scale a row; only specdec reads it", bool),
    "for": Flag("the server that loads it", choices=("sglang", "vllm")),
}  # fmt: skip

# A name that users of other programs type, or that a flag had: what it is here.
MEANT = {
    "model": "target", "target_model": "target", "base_model": "target", "drafter": "draft", "draft_model": "draft",
    "speculative_draft_model_path": "draft", "assistant": "draft", "prompt_file": "prompts", "questions": "prompts",
    "input": "prompts", "dataset": "data", "max_tokens": "max_new_tokens", "num_prompts": "limit", "count": "limit",
    "num_samples": "limit", "output": "out", "output_dir": "out", "speculative_num_steps": "steps",
    "num_speculative_tokens": "steps", "speculative_eagle_topk": "topk", "speculative_num_draft_tokens":
    "num_draft_tokens", "torch_dtype": "dtype", "base_url": "server", "url": "server", "random_seed": "seed",
    "draft": "from", "top_n": "topk", "rule": "verifier", "n": "samples",
}  # fmt: skip
