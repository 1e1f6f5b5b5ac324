"""Whether greedy texts are those of plain decoding, and by how much the logits differ where they are not."""

from collections.abc import Sequence

import torch

Texts = Sequence[tuple[list[int], list[int], list[int]]]  # prompt, a contender's text, plain decoding's


def compare_texts(target, texts: Texts, gaps: bool = True) -> dict:
    """Return entries of a contender's row: how many texts are the same, and where each other one differs first.

    With `gaps`, also report the target's logit gap there, before any penalty. Sums in another order change a text where
    two logits are nearly equal. A large gap says that the contender computes something else.
    """
    differences = []
    for number, (prompt, mine, plain) in enumerate(texts):
        at = next((i for i, (a, b) in enumerate(zip(mine, plain, strict=True)) if a != b), None)
        if at is not None:
            gap = {"logit_gap": logit_gap(target, prompt + plain[:at], plain[at], mine[at])} if gaps else {}
            differences.append({"text": number, "token": at} | gap)
    same = {"same_text_as_plain": f"{len(texts) - len(differences)} of {len(texts)}"}
    if not differences:
        return same
    earliest = min(difference["token"] for difference in differences)
    words = f"{len(differences)} of {len(texts)} texts differ from plain decoding's, the earliest at token {earliest}"
    if gaps:
        found = [difference["logit_gap"] for difference in differences]
        words += f"; the target's logits are {min(found):.2g} to {max(found):.2g} apart there"
    return same | {"differences": differences, "differs": words}


@torch.inference_mode()
def logit_gap(target, tokens: list[int], token: int, other: int) -> float:
    """Return how much higher the target's logit of `token` is than that of `other`, after these tokens."""
    ids = torch.tensor([tokens], device=target.device)
    last = torch.tensor([len(tokens) - 1], device=target.device)
    logits, _ = target(ids, target.new_cache(1, len(tokens)), last=last, prefill=True)
    return (logits[0, 0, token] - logits[0, 0, other]).item()
