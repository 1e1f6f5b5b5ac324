"""`python -m specdec.train`, which is `specdec train`. From Python, this module can be called as the function."""

import sys

from specdec.__main__ import main, make_callable

make_callable(__name__)
if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
