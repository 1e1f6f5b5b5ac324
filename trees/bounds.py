"""How large a draft tree may be. A larger one is a mistake: its shape alone would fill the memory."""

MOST_STEPS, MOST_TOPK, MOST_NODES = 256, 1024, 4096
MOST_CANDIDATES = 1 << 20  # nodes that a dynamic tree chooses from


def check_shape(topk: int, steps: int) -> None:
    """Raise ValueError if `topk` or `steps` is less than 1."""
    if topk < 1 or steps < 1:
        raise ValueError(f"topk and steps must be at least 1, got topk {topk} and steps {steps}")


def check_nodes(topk: int, steps: int, nodes: int, most: int) -> None:
    """most: nodes that a tree of this topk and steps has if nothing is left out."""
    if not 2 <= nodes <= most:
        raise ValueError(
            f"num_draft_tokens is {nodes}, but with topk {topk} and steps {steps} a tree holds 2 to {most} tokens, the "
            "root counted"
        )


def check_size(topk: int = 1, steps: int = 1, nodes: int = 1, candidates: int = 1) -> None:
    """Raise ValueError, with the bound, for a tree that is too large."""
    for name, size, most in (
        ("steps", steps, MOST_STEPS),
        ("topk", topk, MOST_TOPK),
        ("num_draft_tokens", nodes, MOST_NODES),
        ("the number of nodes that are drafted", candidates, MOST_CANDIDATES),
    ):
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size}")


def check_chains(topk: int, steps: int, wanted: int | None, how: str = "") -> None:
    """Chains, drawn or not, have as many nodes as topk and steps say. how: how the tree is made."""
    nodes = topk * steps + 1
    shape = "a chain of steps + 1" if topk == 1 else f"{topk} chains of topk * steps + 1"
    if wanted not in (None, nodes):
        raise ValueError(f"with topk {topk} the tree{how} is {shape} = {nodes} tokens, not {wanted}")
