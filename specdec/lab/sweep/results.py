"""What figures and tables ask of a sweep's results (lines of results.jsonl)."""

Results = list[dict]


def by_drafter(points: Results) -> dict[str, Results]:
    """The points of each drafter, in order of appearance."""
    found: dict[str, Results] = {}
    for r in points:
        found.setdefault(r["names"]["draft"], []).append(r)
    return found


def tree_name(r: dict) -> str:
    """topk/steps/num_draft_tokens of a dynamic tree, the same behind 'block' of one over a block, or 'chain' and its
    steps."""
    tree = r["settings"]["tree"]
    if tree["topk"] == 1:
        return f"chain {tree['steps']}"
    return f"{'block ' if tree.get('block') else ''}{tree['topk']}/{tree['steps']}/{tree['num_draft_tokens'] or '-'}"


def tau(r: dict) -> dict:
    """tau with its interval: {"value", "low", "high"}."""
    return r["metrics"]["tau"]


def best(points: Results) -> dict:
    """The point with the greatest tau; of equal ones the first."""
    return max(points, key=lambda r: tau(r)["value"] or 0.0)
