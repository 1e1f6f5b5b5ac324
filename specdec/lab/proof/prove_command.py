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
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.markdown import Markdown

from specdec import ranks
from specdec.api import DEMO_TARGET, ModelSettings, load_drafter
from specdec.cli.files import write_text
from specdec.cli.parser import read_flags
from specdec.cli.terminal import console
from specdec.lab.proof import proof as local
from specdec.lab.proof.equality import ComparedTexts, EqualityProver, Mismatch
from specdec.lab.sweep.comparison import named
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_texts
from specdec.model.names import bundled_drafts, called
from specdec.remote import Completion, Remote, in_order
from specdec.text import encode_prompt, read_prompts
from specdec.trees.spec import parse_tree

PROMPTS = ["What are the benefits of regular exercise?", "Write a short story about a dragon.", "What is a tree?"]
TOP = 5  # most likely tokens that a server is asked for
PROBES = 4  # positions at which the plain server's rounding is measured

# Greedy texts of a speculating server are compared with this engine's with the same weights, or with those of a second
# server that decodes the same weights plainly. Texts may differ without a fault where two tokens are so near each other
# that rounding decides between them. So the first token that differs is judged: by the target in a finer dtype
# (`specdec.lab.proof.equality`), or by the plain server's own log-probabilities and how much they change when the same
# position is requested again.


@dataclass
class ServerProof(ComparedTexts):
    """What became of a server's texts."""

    server: str  # name and version
    reference: str
    drift: float | None = None  # largest difference of a log-probability along equal text; None: none were returned

    def verdict(self) -> str:
        """Return the result in one sentence."""
        summary = f"{self.same} of {self.texts} texts equal ({self.tokens} tokens)"
        ties = f"; {self.ties} differ at a numerical tie" if self.ties else ""
        if self.bugs:
            return f"NOT LOSSLESS: {summary}{ties}; {self.bugs} differ for no numerical reason."
        return f"No bug found: {summary}{ties}."


def against_engine(
    server: Remote, target: LanguageModel, prompts: list[list[int]], new: int, at_once: int = 4
) -> ServerProof:
    """Compare a server's texts with plain decoding of the same weights here. Raises ValueError if it returns no ids."""
    prover = EqualityProver(target, prompts, new)
    said = list(in_order(lambda prompt: server.complete(prompt, new, logprobs=0), prompts, at_once))
    if any(answer.tokens is None for answer in said):
        raise ValueError(
            f"{server.root} returns no token ids (vLLM's return_token_ids), so its texts cannot be compared with this "
            "engine's: give a server without speculation as --plain-server"
        )
    for answer in said:
        server.check_ids(answer, target.vocab)
    proof = ServerProof(len(said), sum(len(a.tokens) for a in said), [], _who(server), f"this engine, {target.name}")
    for number, answer in enumerate(said):
        _note_drift(proof, answer, prover.plain[number], _logprobs(target, prompts[number], prover.plain[number]))
        if _without_end(answer.tokens, target.eos) == _without_end(prover.plain[number], target.eos):
            continue
        if not answer.tokens:
            proof.mismatches.append(Mismatch(number, 0, str(prover.plain[number][0]), "the end"))
            continue
        found = prover.first_mismatch(number, answer.tokens)
        proof.mismatches.append(replace(found, plain=str(found.plain), speculative=str(found.speculative)))
    return proof


def against_server(server: Remote, plain: Remote, prompts: list[list[int]], new: int, at_once: int = 4) -> ServerProof:
    """A server's texts against those of another that does not speculate."""
    said, wanted = (
        list(in_order(lambda prompt, of=of: of.complete(prompt, new, logprobs=TOP), prompts, at_once))
        for of in (server, plain)
    )
    proof = ServerProof(len(said), sum(len(_tokens(a)) for a in said), [], _who(server), _who(plain))
    for number, (answer, reference) in enumerate(zip(said, wanted, strict=True)):
        _note_drift(proof, answer, _tokens(reference), reference.logprobs.token_logprobs)
        if _tokens(answer) != _tokens(reference):
            proof.mismatches.append(_judge(plain, prompts[number], number, answer, reference))
    return proof


def _judge(plain: Remote, prompt: list[int], number: int, answer: Completion, reference: Completion) -> Mismatch:
    """Query the plain server again at the first token that differs, and at a few before it."""
    mine, plains = _tokens(answer), _tokens(reference)
    position = next((i for i, (a, b) in enumerate(zip(mine, plains, strict=False)) if a != b), None)
    if position is None:  # one text ends where the other continues
        position = min(len(mine), len(plains))
        first, second = ([*map(str, text), "the end"][position] for text in (plains, mine))
        return Mismatch(number, position, first, second)
    names = [(one.logprobs.tokens or _tokens(one))[position] for one in (reference, answer)]
    found = Mismatch(number, position, str(names[0]), str(names[1]))
    expected = reference.logprobs.top_logprobs
    if reference.tokens is None or not expected:
        return found
    again: dict[str, float] = {}
    for place in sorted({position * i // (PROBES - 1) for i in range(PROBES)}):
        more = plain.complete(prompt + reference.tokens[:place], 1, logprobs=TOP).logprobs.top_logprobs
        again = more[0] if more else {}
        shared = set(again) & set(expected[place])
        found.error = max([found.error, *(abs(again[name] - expected[place][name]) for name in shared)])
    if set(names) <= set(again):
        found.margin = abs(again[names[0]] - again[names[1]])
        found.leading = set(sorted(again, key=again.__getitem__)[-2:]) == set(names)
    return found


def _note_drift(proof: ServerProof, answer: Completion, tokens: list, logprobs: list[float] | None) -> None:
    for a, b, x, y in zip(_tokens(answer), tokens, answer.logprobs.token_logprobs or (), logprobs or (), strict=False):
        if a != b:
            return
        proof.drift = max(proof.drift or 0.0, abs(x - y))


@torch.inference_mode()
def _logprobs(target: LanguageModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens after a prompt, under the target's softmax."""
    ids = torch.tensor([prompt + tokens], device=target.device)
    logits = target(ids, None)[0][0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


def _tokens(answer: Completion) -> list:
    """The tokens in the most exact form that the server returns: ids, names, or else characters."""
    return answer.tokens or answer.logprobs.tokens or list(answer.text)


def _without_end(tokens: list[int], eos: frozenset[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in eos else tokens


def _who(server: Remote) -> str:
    return f"{server.model} at {server.root}, version {server.version}"


def page(proof: ServerProof) -> str:
    """The proof as Markdown."""
    drift = "no log-probabilities" if proof.drift is None else f"{proof.drift:.1e}"
    items = f"- server: {proof.server}\n- reference: {proof.reference}\n"
    items += f"- largest difference of a log-probability along equal text: {drift}\n"
    wrong = "".join(f"- {mismatch}\n" for mismatch in proof.mismatches)
    return f"# Is the server lossless?\n\n**{proof.verdict()}**\n\n{items}\n{wrong}"


def as_json(proof: ServerProof) -> dict:
    """Return the report as a dictionary of plain types for JSON."""
    summary, counts = asdict(proof), {"sound": not proof.bugs, "ties": proof.ties, "bugs": proof.bugs}
    del summary["mismatches"]
    return summary | counts | {"differences": [asdict(m) | {"tie": m.tie} for m in proof.mismatches]}


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
    try:
        if args.json:
            print(json.dumps(as_json(proof)))
        else:
            print(page(proof))
    finally:  # the result is shown even if it cannot be written, and written even if it cannot be shown
        if args.out is not None:
            write_text(args.out, page(proof))
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
    how = {name: getattr(args, name) for name in ("max_new_tokens", "draws", "seed", "self_test", "verifier")}
    how["tree"] = parse_tree(args.tree) if args.tree else None
    proof = local.prove(target, drafters, prompts, **how)
    model = f"Target {called(target.name)}, {str(target.dtype).removeprefix('torch.')}"
    text = local.markdown(proof, f"{model}; prompts: {len(prompts)}; tokens: {args.max_new_tokens}; seed: {args.seed}.")
    try:
        if args.json:
            print(json.dumps(local.as_json(proof)))
        else:
            console(160).print(Markdown(text), local.verdict_line(proof))
    finally:
        if args.out is not None:
            write_text(args.out, text)
    if proof.sound == args.self_test:
        sys.exit(1)
