"""The model card of the demo that `scripts/build_demo.py` makes. Every figure in it comes from the report."""

import textwrap

CARD = """# The demo

A target of {target_m:.1f} M parameters (Llama architecture, {layers} layers, hidden size {hidden}, vocabulary {vocab},
context {context}) and drafters for it; bf16 safetensors, {mebibytes} MiB with the tokenizer. It is a demonstration: it
writes English in the form of a chat, and what it says is often wrong.

- Target: a smaller one of 8 M parameters, trained from scratch on 15 M tokens, was made wider without changing what it
  computes (`scripts/grow.py`), and trained on {tokens:,} tokens more; held out, conversations cost it
  {heldout:.3f} nats a token.
- Then {unlikely} steps of unlikelihood on what its own greedy answers repeated, and the mean of the weights before and
  after. Of the runs of four tokens in greedy answers to questions held out {before:.0%} stood before in the same
  answer, now {after:.0%}; at temperature 0.7 {before_warm:.0%} and {after_warm:.0%}. Since then the loss is
  {heldout_after:.3f}.
- Drafters, trained on the target's own answers (a prompt's first answer greedy, further ones at temperature 0.8), with
  the settings of `conf/experiment/grown_*.yaml`. mtp, eagle3, eagle2 and medusa began as the smaller target's, grown
  with it. Agreement is with the target's first choice on held-out answers, by step of the training objective; tau is
  that of the first turns of MT-bench, greedy, 64 new tokens, at topk/steps/num_draft_tokens, with fewer steps for a
  drafter that guesses fewer tokens ahead.

| drafter | parameters | padded tokens seen | agreement | tau {trees} |
|---|---|---|---|---|
{table}

- `frspec_{map_size}.json`: the {map_size} tokens most frequent in those answers, an FR-Spec map.

## What it writes

The first 80 tokens of an answer.

{samples}

## Made by

    python scripts/build_demo.py --small SMALL --conversations CONVERSATIONS --books BOOKS --bench MT_BENCH

of which none is in this repository{note}. The weights are under the project's licence, Apache-2.0.
"""


def card(report: dict, map_size: int, note: str) -> str:
    """The card's text. map_size: of the FR-Spec map. note: said of the data, which are not in the repository."""
    lines = []
    for name, drafter in report["drafters"].items():
        agreement = ", ".join(f"{a:.2f}" for a in drafter["heldout"]["accuracy"])
        taus = ", ".join(f"{tau:.2f}" for tau in drafter["tau"].values()) or "not measured"
        parameters, tokens = drafter["parameters"] / 1e6, drafter["train"]["tokens"]
        lines.append(f"| {name} | {parameters:.2f} M | {tokens:,} | {agreement} | {taus} |")
    before, after = report["repetition"]["before"], report["repetition"]["after"]
    return CARD.format(
        target_m=report["target_parameters"] / 1e6,
        **report["shape"],
        mebibytes=report["mebibytes"],
        tokens=report["target"]["tokens"],
        heldout=before["heldout_chat"],
        heldout_after=after["heldout_chat"],
        unlikely=report["repetition"]["steps"],
        before=before["repeated_at_0.0"],
        after=after["repeated_at_0.0"],
        before_warm=before["repeated_at_0.7"],
        after_warm=after["repeated_at_0.7"],
        trees=", ".join(next(iter(report["drafters"].values()))["tau"]),
        table="\n".join(lines),
        map_size=map_size,
        samples="\n\n".join(
            f"**{s['question']}** At temperature {s['temperature']}:\n\n" + _quoted(s["answer"])
            for s in report["samples"]
        ),
        note=note,
    )


def _quoted(text: str) -> str:
    lines = [wrapped for line in text.splitlines() for wrapped in textwrap.wrap(line, 116) or [""]]
    return "\n".join(f"> {line}".rstrip() for line in lines)
