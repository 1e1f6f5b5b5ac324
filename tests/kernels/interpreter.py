"""Triton's interpreter, in which kernels run on CPU tensors."""

import os
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any


def use_interpreter() -> None:
    """Have kernels interpreted in this process. To be called before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        numbers = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return
    from triton import language
    from triton.runtime import interpreter

    if [*map(int, numbers)] < [3, 7]:
        _mend_bounds(interpreter)
    # Triton puts functions that interpret in the place of its language's for each launch and each call of a function
    # inside one, and takes them away again, which took a third of a launch's time. Nothing in this process is compiled,
    # so they stay.
    kernels: Any = interpreter
    patch = kernels._patch_lang
    patched: set[Any] = set()

    def patch_once(function: Any) -> SimpleNamespace:
        modules = {id(x) for x in function.__globals__.values() if x is language or x is language.core}
        if not modules or not modules <= patched:
            patch(function)
            patched.update(modules)
        return SimpleNamespace(restore=lambda: None)

    # It looks up each value's numpy dtype in a table that it builds every time, which took a twelfth.
    find, found = interpreter._get_np_dtype, {}

    def remembered(kind):
        elements = kind.scalar.name  # what it finds depends on these alone
        if elements not in found:
            found[elements] = find(kind)
        return found[elements]

    kernels._patch_lang, kernels._get_np_dtype = patch_once, remembered


def _mend_bounds(interpreter) -> None:
    """Triton 3.6 takes the bound of a loop, an array of one element, for a number. numpy refuses that from 2.4 on. This
    is how Triton 3.7 does it.
    """
    patch = interpreter._patch_lang_tensor

    def with_bounds(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = with_bounds
