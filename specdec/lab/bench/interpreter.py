"""Triton's interpreter, in which kernels run on CPU tensors."""

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace


def use_interpreter() -> None:
    """Have kernels interpreted in this process. To be called before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        numbers = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return
    if [*map(int, numbers)] < [3, 7]:
        _mend_bounds()
    _patch_once()
    _remember_dtypes()


def _mend_bounds() -> None:
    """Triton 3.6 takes the bound of a loop, an array of one element, for a number. numpy refuses that from 2.4 on. This
    is how Triton 3.7 does it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_bounds(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = with_bounds


def _patch_once() -> None:
    """Triton puts functions that interpret in the place of its language's for each launch, and for each call of a
    function inside one, and takes them away again. That took a third of a launch's time. Nothing in this process is
    compiled, so they stay."""
    from triton import language
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(function: Callable) -> SimpleNamespace:
        modules = {id(x) for x in function.__globals__.values() if x is language or x is language.core}
        if not modules or not modules <= patched:
            patch(function)
            patched.update(modules)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


def _remember_dtypes() -> None:
    """For each value Triton looks numpy's dtype up in a table that it makes anew, which took a twelfth of a launch's
    time. What it finds depends on the elements alone."""
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, {}

    def remembered(kind):
        elements = kind.scalar.name
        if elements not in found:
            found[elements] = find(kind)
        return found[elements]

    interpreter._get_np_dtype = remembered
