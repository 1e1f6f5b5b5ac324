"""Whether a contender's greedy texts are plain decoding's, and how close the target's choice was where they are not."""

from collections.abc import Sequence

import torch

Texts = Sequence[tuple[list[int], list[int], list[int]]]  # prompt, a contender's text, plain decoding's


def compare_texts(target, texts: Texts, gaps: bool = True) -> dict:
    """Entries of a contender's row: how many texts are the same, and for each other one where it leaves plain's.

    gaps: state the target's logit gap there too, that of the logits before any penalty. Sums in another order leave a
    text where two logits are as good as equal. A large gap says that the contender computes something else."""
    differences = []
    for number, (prompt, mine, plain) in enumerate(texts):
        at = next((i for i, (a, b) in enumerate(zip(mine, plain, strict=True)) if a != b), None)
        if at is not None:
            difference = {"text": number, "token": at}
            if gaps:
                difference["logit_gap"] = logit_gap(target, prompt + plain[:at], plain[at], mine[at])
            differences.append(difference)
    same = {"same_text_as_plain": f"{len(texts) - len(differences)} of {len(texts)}"}
    return same | ({"differences": differences, "differs": _sentence(differences, len(texts))} if differences else {})


def _sentence(differences: list[dict], texts: int) -> str:
    earliest = min(difference["token"] for difference in differences)
    words = f"{len(differences)} of {texts} texts are not plain decoding's, from token {earliest} on at the earliest"
    if "logit_gap" not in differences[0]:
        return words
    gaps = [difference["logit_gap"] for difference in differences]
    return f"{words}; the target's logits lie {min(gaps):.2g} to {max(gaps):.2g} apart there"


@torch.inference_mode()
def logit_gap(target, tokens: list[int], token: int, other: int) -> float:
    """How much higher the target's logit of `token` is than that of `other`, behind these tokens."""
    ids = torch.tensor([tokens], device=target.device)
    last = torch.tensor([len(tokens) - 1], device=target.device)
    logits, _ = target(ids, target.new_cache(1, len(tokens)), last=last, prefill=True)
    return (logits[0, 0, token] - logits[0, 0, other]).item()
