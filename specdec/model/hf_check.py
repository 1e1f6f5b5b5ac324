"""Check that a transformers model is exact with our cache. The check runs when the model is loaded."""

import torch

TREE = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
CHAIN = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@torch.inference_mode()
def check(target) -> None:
    """Raise ValueError unless a tree (a chain, if the model takes no trees) has the logits of the plain texts.

    A tree over rows of two lengths is verified, and then a token after part of it was committed. This takes a few
    forwards of a few tokens.
    """
    device, family = target.device, target.model.config.model_type
    ids = (torch.arange(16, device=device) * 31 + 7).remainder(target.config.vocab).view(2, 8)
    prompts, nodes, lens = ids[:, :4], ids[:, 4:], torch.tensor([4, 2], device=device)
    shape, paths, accepted = (CHAIN, ([0, 1], [0, 1, 2]), 2) if target.chains_only else (TREE, ([0, 1], [0, 2, 3]), 3)
    ancestors = torch.tensor(shape, device=device).bool().expand(2, 4, 4)
    depth = ancestors.long().sum(-1) - 1
    path = torch.tensor(paths[1], device=device).expand(2, -1)
    cache = target.new_cache(2, 16)
    target(prompts, cache)
    cache.advance(lens, 4)
    tree, _ = target(nodes, cache, depth=depth, ancestors=ancestors)
    cache.commit(path, torch.tensor([3, accepted], device=device), 7)
    after, _ = target(prompts[:, :1], cache)
    for row, (length, count) in enumerate(((4, 3), (2, accepted))):
        prompt = prompts[row, :length]
        short = plain(target, torch.cat([prompt, nodes[row, paths[0]]]))
        whole = plain(target, torch.cat([prompt, nodes[row, path[row]]]))
        long = plain(target, torch.cat([prompt, nodes[row, path[row, :count]], prompts[row, :1]]))
        expected = torch.stack([short, whole, long])
        difference = (
            (torch.stack([tree[row, 1], tree[row, paths[1][-1]], after[row, 0]]).float() - expected).abs().max()
        )
        # The tolerance is for rounding, as a share of the range of the logits. A mask or a position that the model
        # ignores makes a larger difference, and NaN must fail too.
        tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
        if not difference <= tolerance * (expected.max() - expected.min()):
            what = "chain" if target.chains_only else "tree"
            raise ValueError(
                f"model family {family!r} cannot verify {what}s: its logits in a {what} differ from the plain text's "
                f"by {difference:.2g}"
            )


def plain(target, text: torch.Tensor) -> torch.Tensor:
    """Return the last logits [V] of a text [T], by the model alone."""
    return target.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
