"""`python -m specdec.generate`, which is `specdec generate`.

From Python, `specdec.generate` is the function of `specdec.api`. Importing this module puts it in the function's place,
so it can be called as the function.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from specdec.__main__ import main

if TYPE_CHECKING:
    from specdec.api import Generation


class _Generate(ModuleType):
    def __call__(self, *args, **kwargs) -> "Generation":
        from specdec import api

        return api.generate(*args, **kwargs)


sys.modules[__name__].__class__ = _Generate

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
