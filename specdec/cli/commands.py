"""The table of commands: what each does, the module that runs it, and its flags or its settings of Hydra.

Nothing here loads torch. The module of a command has `run(args)`, or `run(config)` where conf/CONF.yaml says its
settings; its docstring is the description that --help prints.
"""

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from specdec import ranks
from specdec.cli import checks
from specdec.cli.flags import FLAGS, MODELS, RULE, SAMPLING, TREE, Flag, whole_numbers
from specdec.cli.parser import Parser, make_parser, with_new_names

# fmt: off
NONE: Mapping = MappingProxyType({})


class Command(NamedTuple):
    """A command. It has `flags`, or `conf` with `words`."""

    does: str
    module: str  # below specdec
    flags: Mapping[str, str] = NONE  # title of a group -> its flags, as `make_parser` takes them
    own: Mapping[str, Flag | str] = NONE  # flags that the table does not have, or that differ from it, or their help
    old: Mapping[str, str] = NONE  # old name of a flag or setting -> its name
    slots: tuple[str, ...] = ()  # flags whose values may stand without the flag, in this order
    positional: str = ""  # the same for several values
    conf: str = ""  # conf/CONF.yaml
    words: Mapping[str, str] = NONE  # name of a flag -> the setting that it stands for
    prepared: bool = False  # the module has prepare(words), which changes them before Hydra reads them


SAMPLED, TREES, RULES = " ".join(SAMPLING), " ".join(TREE), " ".join(RULE)
ONE_PROCESS = " ".join(name for name in MODELS if name != "tp_plan")
PAIR = "target draft allow_nonfinite dtype matmul_precision device"
OF_TARGET = {"target": "target.path", "dtype": "target.dtype", "matmul_precision": "target.matmul_precision"}
OF_MEASURE = OF_TARGET | {"tree": "draft_tree"}  # conf/tree is a group of Hydra's
OF_TRAIN = OF_TARGET | {"data": "data.path", "limit": "data.limit", "seed": "trainer.seed"}
OF_SERVER = {"model": "served_model_name"}
CHECKPOINT: dict[str, Flag | str] = {
    "draft": "folder or hub name of a drafter", "out": Flag("the folder that is written", metavar="FOLDER", kind=Path),
    "target": "folder or hub name of the target, where the layout names it",
}

COMMANDS = {
    "generate": Command("answer prompts, or chat, with a drafter or without", "cli.generate", {
        "prompts": "prompt prompts limit chat raw max_new_tokens stop json_schema batch_size",
        "models": f"{' '.join(MODELS)} no_draft no_graphs compile settings",
        "sampling of the target": f"{SAMPLED} seed",
        "draft tree and verification": f"{TREES} recalibrate adaptive {RULES}",
        "output": "show_trees compare trace logprobs json",
    }),
    "serve": Command("serve OpenAI's interface", "serve.serve_command", {
        "server": "host port api_key allowed_hosts cors_origins served_model_name grace",
        "reporting": "stream_interval per_request_spec_decode_metrics enable_prompt_tokens_details trace",
        "limits": "batch_size=8 room queue prefill_chunk prefix_cache max_n max_seconds max_body",
        "models": f"{ONE_PROCESS} no_draft no_graphs compile",
        "draft tree": f"{TREES} adaptive",
        "verification": RULES,
    }, {
        "served_model_name": "(default: the target's name)", "batch_size": "sequences decoded together",
        "trace": "write a trace (docs/trace.md) when stopped",
    }),
    "train": Command("train a drafter; train cache, train estimate", "training.train", conf="train", words=OF_TRAIN),
    "train cache": Command("store the target's hidden states, to train without running it", "training.cache",
                           conf="cache", words=OF_TRAIN),
    "train estimate": Command("estimate disk, memory and time of a training run", "training.estimate",
                              conf="train", words=OF_TRAIN),
    "data regenerate": Command("let the target answer prompts: training data", "training.regenerate", {
        "prompts and answers": "prompts! out! split bad shard_size part limit turns samples max_new_tokens=256 "
                               "batch_size=64",
        "target": "target dtype matmul_precision device",
        "a server that has the target": "server served_model_name requests",
        "sampling": f"{SAMPLED} seed",
    }, {
        "prompts": Flag("conversations (.json, .jsonl, .jsonl.xz, .parquet), lines that are continued without the chat "
                        "template (.txt), a data set of the hub, or the name of a preset in conf/data", metavar="DATA"),
        "out": "a .jsonl file", "server": "of OpenAI's interface; then --target gives the tokenizer alone",
    }, OF_SERVER),
    "data show": Command("print conversations with the training tokens marked", "training.show", {
        "options": "target data! split bad skip limit=1 max_length",
    }, {"target": "whose tokenizer and template (default: demo/target)", "limit": "show this many"},
        {"count": "limit"}),
    "data count": Command("count tokens, and write the most frequent as an FR-Spec map", "training.count", {
        "options": "target data text size! out!",
    }, {
        "target": "whose tokenizer (default: demo/target)", "out": "the map: .json or .pt",
        "data": Flag("conversations: what the assistant says counts", Path, (), nargs="*"),
    }),
    "checkpoint inspect": Command("family, layout, every convention in force, and what is wrong", "cli.checkpoint", {
        "options": "draft! json",
    }, CHECKPOINT, slots=("draft",)),
    "checkpoint check": Command("does the drafter do better when its checkpoint is read another way?",
                                "cli.checkpoint", {
        "options": "target! draft! allow_nonfinite dtype device prompts raw max_new_tokens=64 steps=5 json",
    }, {"prompts": "a prompt a line, or .jsonl (default: built-in prompts)", "steps": "length of the drafted chain"},
        slots=("draft",)),
    "checkpoint convert": Command("write a checkpoint in another layout, bit for bit", "cli.checkpoint", {
        "options": "draft! out! to! int8 target",
    }, CHECKPOINT, slots=("draft", "out")),
    "checkpoint export": Command("write a checkpoint as vLLM or SGLang loads it", "cli.checkpoint", {
        "options": "draft! out! for! target",
    }, CHECKPOINT | {"target": "folder or hub name of the target; vllm needs it"}, slots=("draft", "out")),
    "compare": Command("drafters side by side, and other engines", "lab.sweep.compare_command",
                       old={"drafts": "draft"}, conf="compare", words=OF_MEASURE),
    "sweep": Command("drafters and trees on a benchmark: one report", "lab.sweep.sweep_command", conf="sweep",
                     words=OF_MEASURE | {"prompts": "benchmark.path", "limit": "benchmark.limit"}),
    "tune": Command("find the fastest setting of a pair on this machine; tune tree", "lab.tune", {
        "models": f"{PAIR} token_map feedback",
        "what is decoded": f"prompts! limit=16 max_new_tokens=64 {SAMPLED} seed raw batch_size",
        "what is tried": "topk steps=8 num_draft_tokens tree tries repeats remeasure",
        "output": "out! json",
    }, {
        "topk": Flag("children of a node", whole_numbers, [1, 2, 4, 8]), "steps": "levels at most",
        "num_draft_tokens": Flag("nodes (default 2,3,4,6,8,12,... 64)", whole_numbers,
                                 [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        "tree": Flag("a static tree to try too: its file, or a name; may be given again", nargs="append",
                     metavar="TREE"),
        "out": "the settings file",
    }),
    "tune tree": Command("measure acceptance, and write the best static tree", "lab.tune_tree", {
        "models": PAIR,
        "answers": "prompts! limit=20 max_new_tokens temperature seed raw",
        "tree": "num_draft_tokens=16 steps=8 topk=8 out keep",
    }, {
        "num_draft_tokens": "nodes, the root counted", "steps": "no node is deeper, nor than the drafter goes",
        "topk": "no node has more children", "out": "a YAML file for `specdec generate --tree`",
    }),
    "prove": Command("test that decoding is lossless", "lab.proof.prove_command", {
        "options": "target draft dtype device tp_plan prompts limit max_new_tokens=64 draws seed out json self_test",
        "one rule, one tree": "verifier tree",
        "a server with OpenAI's interface, instead of this engine": "server plain_server served_model_name",
    }, {
        "draft": Flag("drafters (default: those bundled for the target, and n-grams)", nargs="+"),
        "prompts": "as specdec generate takes it (default: three questions)",
        "verifier": "the rule that is tested, or your own FILE.py:NAME (default: all that are lossless)",
        "tree": "the tree that is tested, or your own FILE.py:NAME (default: a few)",
        "out": "write the page here, as Markdown",
        "server": "its greedy texts are compared with this engine's plain ones",
    }, OF_SERVER),
    "trace metrics": Command("every acceptance metric of a trace, with intervals", "lab.traces.metrics", {
        "options": "traces level resamples seed json",
    }, positional="traces"),
    "trace diagnose": Command("why acceptance is low, in words", "lab.traces.diagnose", {
        "options": f"traces {PAIR} json",
    }, positional="traces"),
    "lab bench": Command("our engine against transformers, CTranslate2 and llama.cpp", "lab.bench.bench_command",
                         conf="bench", words=OF_MEASURE | {"limit": "questions"}),
    "lab bench serve": Command("drive a server: throughput, latencies, acceptance", "lab.bench.bench_serve", {
        "server": "server=http://127.0.0.1:8000 served_model_name api_key timeout",
        "requests": "prompts! limit=80 completions max_new_tokens=64 range_ratio ignore_eos temperature seed",
        "load": "concurrency rate warm_up",
        "output": "out chart json",
    }, {
        "prompts": Flag("of MT-bench, of ShareGPT, or lines with `prompt`", metavar="FILE"),
        "limit": "prompts at each load; they are used again", "api_key": "(default: $OPENAI_API_KEY)",
        "seed": "of arrivals, and of draws", "out": "all figures, JSON",
    }, OF_SERVER | {"base_url": "server", "num_prompts": "limit"}),
    "lab jobs": Command("a command as several jobs, here or on a cluster", "cli.jobs", conf="jobs", prepared=True),
}
# fmt: on
GROUPS = {
    "data": "training data: regenerate, show, count",
    "checkpoint": "draft checkpoints: inspect, check, convert, export",
    "trace": "traces of rounds: metrics; diagnose: why acceptance is low",
    "lab": "studies: bench, bench serve, jobs",
}
OLD = {  # for one release
    "regenerate": "data regenerate",
    "show": "data show",
    "count": "data count",
    "cache": "train cache",
    "estimate": "train estimate",
    "doctor": "checkpoint",
    "tree": "tune tree",
    "metrics": "trace metrics",
    "bench": "lab bench",
    "jobs": "lab jobs",
}
OLD_FLAGS = {"prompt_file": "prompts"}


def description(command: Command) -> str:
    """Return the docstring of a command's module, which is read and not imported."""
    file = Path(__file__).parents[1] / f"{command.module.replace('.', '/')}.py"
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or command.does


def parser_of(name: str) -> Parser:
    """Return the parser of a command with flags."""
    command = COMMANDS[name]
    one_of = [flags for commands, flags, _ in checks.ONE_OF if name in commands]
    flags = own_flags(command)
    return make_parser(f"specdec {name}", description(command), command.flags, flags, one_of, command.positional)


def own_flags(command: Command) -> dict[str, Flag]:
    """Return the flags of a command that the table does not have, or that differ from it."""
    return {name: FLAGS[name]._replace(help=own) if isinstance(own, str) else own for name, own in command.own.items()}


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Return the checked flags of a command, with its name as `command`. Raises ValueError for wrong ones."""
    command = COMMANDS[name]
    words = with_new_names(f"specdec {name}", words, {**OLD_FLAGS, **command.old})
    parser = parser_of(name)
    args = checks.with_settings(parser, with_slots(command, words))
    args.command = name
    checks.check(name, args, parser)
    return args


def loading(name: str, target: str | None, draft: object) -> None:
    """Print what a command loads, before it does: torch alone takes seconds. Of several processes the first prints."""
    drafts = draft if isinstance(draft, list) else [draft]
    named = " and ".join([str(target or "demo/target"), *(one for one in drafts if isinstance(one, str))])
    if not ranks.rank():
        print(f"specdec {name}: loading {named}", file=sys.stderr, flush=True)


def with_slots(command: Command, words: Sequence[str]) -> list[str]:
    """Return the words, with its flag before each value that stands alone and has a slot."""
    given = {word.partition("=")[0] for word in words}
    found, slots, after_flag = [], [slot for slot in command.slots if f"--{slot}" not in given], False
    known = FLAGS | own_flags(command)
    for word in words:
        is_flag = word.startswith("-")
        if not is_flag and not after_flag and slots:
            found.append(f"--{slots.pop(0)}")
        found.append(word)
        name = word.lstrip("-").replace("-", "_")
        after_flag = is_flag and "=" not in word and not (name in known and known[name].kind is bool)
    return found
