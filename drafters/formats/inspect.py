"""What a checkpoint says about itself, read from its headers, without a target and without its weights."""

import os

from drafters.formats import open_checkpoint
from drafters.formats.base import differences


def inspect(path: str | os.PathLike) -> dict:
    """The conventions in force, the numbers of parameters, and a list of what keeps the checkpoint from loading."""
    checkpoint = open_checkpoint(path, headers=True)
    sizes = {name: t.numel() for name, t in checkpoint.tensors.items() if t.is_floating_point()}
    embedding = sizes.get("embed_tokens.weight", 0)
    return {
        "path": str(path),
        **checkpoint.conventions(),
        "dtypes": ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in checkpoint.tensors.values()})),
        "parameters": sum(sizes.values()) - embedding,
        "embedding_parameters": embedding,
        "problems": differences(checkpoint.family, checkpoint.meaning, checkpoint.tensors),
    }


def as_text(report: dict) -> str:
    """The report as lines of name and value."""
    report = dict(report)
    report["parameters"] = f"{report['parameters'] / 1e6:,.2f} M, and {report.pop('embedding_parameters') / 1e6:,.2f} M"
    report["parameters"] += " of embeddings in the file"
    problems = report.pop("problems")
    lines = [f"{name:16} {value}" for name, value in report.items()]
    return "\n".join(
        [*lines, f"{'problems':16} {'; '.join(problems) or 'none: all tensors are there, none is left over'}"]
    )
