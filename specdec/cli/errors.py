"""What every command line shares: a user's mistake is one sentence and exit code 2."""

import functools
import sys
from collections.abc import Callable


def one_sentence_errors(main: Callable) -> Callable:
    """Turn a ValueError of `main` into 'error: ...' on standard error and exit code 2; anything else is our bug."""

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
        except BrokenPipeError:  # the reader went away, as `head` does
            sys.stderr.close()
            sys.exit(0)

    return wrapped
