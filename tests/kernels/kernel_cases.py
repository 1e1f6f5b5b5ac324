"""What the tests of kernels share: the devices that they run on, and the errors that rounding allows.

On CPU tensors they run in Triton's interpreter, which conftest.py switches on.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FINE = torch.finfo(torch.float32).eps
INTERPRETED = not torch.cuda.is_available()


def roundings(dtype: torch.dtype, times: int) -> float:
    """Relative error of a value that is rounded to `dtype` so many times. The interpreter rounds towards 0."""
    return times * torch.finfo(dtype).eps / (1 if INTERPRETED else 2)


def sums(terms: int) -> float:
    """Relative error of a sum of that many products in fp32, in any order: rounding errors are independent, so they
    grow with the root of their number (Higham and Mary 2019, https://doi.org/10.1137/18M1226312), here by 4 sigma."""
    return 4 * FINE * terms**0.5


def close(got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor | float) -> None:
    """Assert |got - wanted| <= allowed everywhere; NaN fails."""
    excess = (got.double() - wanted).abs() - allowed
    assert (excess <= 0).all(), f"off by {excess.nan_to_num(torch.inf).max():.1e} more than rounding explains"
