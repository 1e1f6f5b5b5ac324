"""`python -m specdec.train`, which is `specdec train`.

From Python, `specdec.train` is the function of `specdec.training.fit`. Importing this module puts it in the function's
place, so it can be called as the function.
"""

import sys
from types import ModuleType

from specdec.__main__ import main


class _Train(ModuleType):
    def __call__(self, *args, **kwargs):
        from specdec.training.fit import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Train

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
