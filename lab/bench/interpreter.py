"""Triton's interpreter, in which kernels run on CPU tensors."""

import os
from importlib.metadata import PackageNotFoundError, version


def use_interpreter() -> None:
    """Have kernels interpreted in this process. To be called before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        numbers = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return
    if [*map(int, numbers)] < [3, 7]:
        _mend_bounds()


def _mend_bounds() -> None:
    """Triton 3.6 takes the bound of a loop, an array of one element, for a number. numpy refuses that from 2.4 on. This
    is how Triton 3.7 does it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_bounds(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = with_bounds
