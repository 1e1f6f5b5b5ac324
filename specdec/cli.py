"""What every command line shares: a user's mistake is one sentence and exit code 2."""

import functools
import os
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


def run_hydra(hydra_main: Callable[[], None]) -> None:
    """Call a function under `hydra.main`; what Hydra finds wrong with the settings becomes a ValueError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing half a traceback
    try:
        hydra_main()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error).strip().split("\n")[0]) from None
