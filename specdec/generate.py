"""Decode with a draft checkpoint:  python -m specdec.generate --prompt "..."  (all flags: --help).

Only the entry: from Python, `specdec.generate` is the function of `specdec.api`; importing this module would hide it.
"""

from specdec.cli.generate import main

if __name__ == "__main__":
    main()
