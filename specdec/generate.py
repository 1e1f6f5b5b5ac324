"""`python -m specdec.generate`, which is `specdec generate`.

Only a command: from Python, `specdec.generate` is the function of `specdec.api`, which importing this module hides.
"""

from specdec.cli.generate import main

if __name__ == "__main__":
    main()
