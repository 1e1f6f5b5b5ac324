"""`python -m specdec.generate`, which is `specdec generate`. From Python, this module can be called as the function."""

import sys

from specdec.__main__ import main, make_callable

make_callable(__name__)
if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
