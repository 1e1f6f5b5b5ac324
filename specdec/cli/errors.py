"""How every command ends: a user's mistake is one sentence on standard error and exit code 2."""

import functools
import sys
from collections.abc import Callable


def one_sentence_errors(main: Callable) -> Callable:
    """`main`, with its ValueError printed as 'error: ...' and exit code 2. Any other exception is a bug of ours, and
    keeps its traceback. An interrupt exits with 130; a reader that went away, as `head` does, is no error."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(0)

    return wrapped
