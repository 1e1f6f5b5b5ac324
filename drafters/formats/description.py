"""What a checkpoint says about itself, without a target: conventions from its headers, and what is wrong with it."""

import os

from specdec.acceptance import read_acceptance
from specdec.drafters.formats import open_checkpoint
from specdec.drafters.formats.parts import dtype_name
from specdec.model.checkpoint import holds_int8
from specdec.model.names import resolve


def inspect(path: str | os.PathLike) -> dict:
    """The conventions in force, the numbers of parameters, and a list of what keeps the checkpoint from loading.

    The weights are looked at for NaN and Inf, one tensor at a time.
    """
    checkpoint, folder = open_checkpoint(path, headers=True), resolve(path)
    sizes = {name: t.numel() for name, t in checkpoint.tensors.items() if t.is_floating_point()}
    embedding = sizes.get("embed_tokens.weight", 0)
    rounded = holds_int8(folder)  # then a matrix, which is read as fp32, is int8 in the file
    dtypes = {"int8" if rounded and t.ndim == 2 else dtype_name(t) for t in checkpoint.tensors.values()}
    problems = checkpoint.problems()
    try:
        read_acceptance(folder)
    except ValueError as error:
        problems.append(str(error))
    return {
        "path": str(path),
        **checkpoint.conventions(),
        "dtypes": ", ".join(sorted(dtypes)),
        "parameters": sum(sizes.values()) - embedding,
        "embedding_parameters": embedding,
        "problems": problems,
        "tensors_known": checkpoint.family.knows_tensors,
    }


def as_text(report: dict) -> str:
    """The report as lines of name and value."""
    report = dict(report)
    report["parameters"] = f"{report['parameters'] / 1e6:,.2f} M, and {report.pop('embedding_parameters') / 1e6:,.2f} M"
    report["parameters"] += " of embeddings in the file"
    found, known = report.pop("problems"), report.pop("tensors_known")
    looked_at = "all tensors are there and finite, none is left over" if known else "all tensors are finite"
    none_found = f"none found without a target: {looked_at}"
    none_found += "" if known else "; which ones ought to be there only the target can tell"
    none_found += "; see the doubts" if "doubts" in report else ""
    problems = "; ".join(found) or none_found
    return "\n".join(f"{name:16} {value}" for name, value in [*report.items(), ("problems", problems)])
