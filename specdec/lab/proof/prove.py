"""Is speculative decoding lossless here? The command:  specdec prove --out proof.md

It tests texts, greedy and sampled, against plain decoding, token for token; the lossless rules against exact laws; and
sampled texts against the target's own distributions. It ends with 1 if a test failed, and with --self-test if none did.

    specdec prove --server URL --target T                     is a server that speculates lossless?
    specdec prove --server URL --plain-server URL --target T  compared with a server that does not speculate
"""

import argparse
import json
import sys
from pathlib import Path

from specdec import ranks
from specdec.api import DEMO_DRAFTER, DEMO_TARGET, ModelSettings, load_drafter
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import check_writable, write_text
from specdec.cli.flags import add_flags, command_parser, read_flags
from specdec.lab.models import check_counts
from specdec.lab.proof import servers
from specdec.lab.proof.proof import as_json, markdown, print_proof, prove
from specdec.lab.proof.servers import against_engine, against_server
from specdec.model.loader import load_texts
from specdec.model.names import called
from specdec.remote import Remote
from specdec.text import encode_prompt, read_prompts

DEMO_DRAFTERS = tuple(DEMO_DRAFTER.parent / name for name in ("eagle3", "eagle2", "mtp"))
PROMPTS = ["What are the benefits of regular exercise?", "Write a short story about a dragon.", "What is a tree?"]


def parser() -> argparse.ArgumentParser:
    p = command_parser("prove", __doc__)
    add_flags(p, ModelSettings, "target", "dtype", "device", "tp_plan")
    p.add_argument("--draft", nargs="+", help="drafters (default: all bundled ones, and n-grams)")
    p.add_argument("--prompt-file", type=Path, help="as specdec generate takes it (default: three questions)")
    p.add_argument("--limit", type=int, help="only so many prompts")
    p.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    p.add_argument("--draws", type=int, default=100_000, help="for each rule, tree and sampling (default 100000)")
    p.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    p.add_argument("--out", type=Path, help="write the page here, as Markdown")
    p.add_argument("--json", action="store_true", help="one JSON object as the last line, instead of the tables")
    p.add_argument("--self-test", action="store_true", help="break the rules, one token in 1,000: is it found?")
    server = p.add_argument_group("a server with OpenAI's interface, instead of this engine")
    server.add_argument("--server", metavar="URL", help="its greedy texts are compared with this engine's plain ones")
    server.add_argument("--plain-server", metavar="URL", help="with those of this server, which does not speculate")
    server.add_argument("--model", help="the model's name there (default: the first that the server names)")
    return p


def prompts_of(target, args: argparse.Namespace) -> list[list[int]]:
    questions = read_prompts(args.prompt_file) if args.prompt_file else PROMPTS
    return [encode_prompt(target, question) for question in questions[: args.limit]]


def prove_server(args: argparse.Namespace) -> None:
    """Ask the server, and a second one or this engine, and say which is right."""
    if args.draft or args.self_test:
        raise ValueError("--draft and --self-test are for this engine: a server has its own drafter")
    server = Remote(args.server, args.model)
    if args.plain_server is not None:
        texts = load_texts(args.target or DEMO_TARGET)
        plain = Remote(args.plain_server, args.model)
        proof = against_server(server, plain, prompts_of(texts, args), args.max_new_tokens)
    else:
        target = read_flags(ModelSettings, args).load_target()
        proof = against_engine(server, target, prompts_of(target, args), args.max_new_tokens)
    if args.out is not None:
        write_text(args.out, servers.page(proof))
    if args.json:
        print(json.dumps(servers.as_json(proof)))
    else:
        servers.print_page(proof)
    if proof.bugs:
        sys.exit(1)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_counts(args, "max_new_tokens", "draws", "limit")
    ranks.share_output(args, "out")
    if args.out is not None:
        check_writable(args.out)
    if args.server is not None:
        prove_server(args)
        return
    if args.plain_server is not None or args.model is not None:
        raise ValueError("--plain-server and --model belong to --server")
    if args.target is not None and args.draft is None:
        raise ValueError("a target of your own needs its drafters: give --draft")
    target = read_flags(ModelSettings, args).load_target()
    drafts = args.draft or [*DEMO_DRAFTERS, "ngram", "ngram:suffix"]
    drafters = {Path(str(draft)).name: load_drafter(draft, target) for draft in drafts}
    prompts = prompts_of(target, args)
    how = {name: getattr(args, name) for name in ("max_new_tokens", "draws", "seed", "self_test")}
    proof = prove(target, drafters, prompts, **how)
    if args.out is not None:
        model = f"Target {called(target.name)}, {str(target.dtype).removeprefix('torch.')}"
        conditions = f"{model}; {len(prompts)} prompts, {args.max_new_tokens} tokens; seed {args.seed}."
        write_text(args.out, markdown(proof, conditions))
    if args.json:
        print(json.dumps(as_json(proof)))
    else:
        print_proof(proof)
    if proof.sound == args.self_test:
        sys.exit(1)


if __name__ == "__main__":
    main()
