"""Count NaN and Inf in weights, from a training run that diverged or a tensor that was never filled."""

from torch import Tensor

ALLOWED = "commands that decode take it with --allow-nonfinite"


def nonfinite(name: str, tensor: Tensor) -> str:
    """Return how many values of a tensor are NaN or Inf; empty if none is.

    A sum is finite only if all values are. It reads the tensor once, at the speed of memory; `isfinite` takes ten times
    as long on a CPU. Values are counted only if the sum is not finite, which large numbers can cause too.
    """
    if not tensor.is_floating_point():
        return ""
    if tensor.element_size() == 1:  # torch does not add fp8
        tensor = tensor.float()
    if tensor.sum().isfinite():
        return ""
    counts = {"NaN": int(tensor.isnan().sum()), "Inf": int(tensor.isinf().sum())}
    found = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return found and f"{name} holds {found} among {tensor.numel()} values"
