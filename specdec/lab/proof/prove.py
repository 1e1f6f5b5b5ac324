"""Test whether speculative decoding is lossless here.

    specdec prove --out proof.md                              this engine with its drafters
    specdec prove --server URL --target T                     a server that speculates
    specdec prove --server URL --plain-server URL --target T  the same, against a plain server

The tests compare texts, greedy and sampled, with plain decoding, token for token; the lossless rules with exact laws;
and sampled texts with the target's own distributions. The exit code is 1 if a test failed, and with --self-test if none
did.
"""

import argparse
import json
import sys
from typing import Any

from specdec import ranks
from specdec.api import DEMO_TARGET, ModelSettings, load_drafter
from specdec.cli.files import write_text
from specdec.cli.parser import read_flags
from specdec.lab.proof import servers
from specdec.lab.proof.proof import as_json, markdown, print_proof, prove
from specdec.lab.proof.servers import against_engine, against_server
from specdec.lab.sweep.comparison import named
from specdec.model.loader import load_texts
from specdec.model.names import bundled_drafts, called
from specdec.remote import Remote
from specdec.text import encode_prompt, read_prompts

PROMPTS = ["What are the benefits of regular exercise?", "Write a short story about a dragon.", "What is a tree?"]


def prompts_of(target, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the first `--limit` prompts of the file, or of the built-in prompts."""
    questions = read_prompts(args.prompts) if args.prompts else PROMPTS
    return [encode_prompt(target, question) for question in questions[: args.limit]]


def prove_server(args: argparse.Namespace) -> None:
    """Ask the server, and a second one or this engine, and say which is right."""
    server = Remote(args.server, args.served_model_name)
    if args.plain_server is not None:
        texts = load_texts(args.target or DEMO_TARGET)
        plain = Remote(args.plain_server, args.served_model_name)
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


def run(args: argparse.Namespace) -> None:
    """Run `specdec prove`. Exits with 1 if a test failed, and with `--self-test` if none did."""
    ranks.share_output(args, "out")
    if args.server is not None:
        prove_server(args)
        return
    target = read_flags(ModelSettings, args).load_target()
    drafts: dict[str, Any] = named(args.draft or [*bundled_drafts(args.target), "ngram", "ngram:suffix"])
    drafters = {name: load_drafter(draft, target) for name, draft in drafts.items()}
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
