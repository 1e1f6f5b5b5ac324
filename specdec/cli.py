"""What every command line shares: a user's mistake is one sentence and exit code 2."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"


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


def hydra_command(run: Callable, name: str) -> Callable[[], None]:
    """The `main` of a command: `run`, with the settings that conf/NAME.yaml and the command line make."""

    @one_sentence_errors
    def main() -> None:
        import hydra

        os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing half a traceback
        with settings_errors():
            hydra.main(config_path=str(CONF), config_name=name, version_base="1.3")(run)()

    return main


@contextmanager
def settings_errors() -> Iterator[None]:
    """What Hydra finds wrong with settings is a user's mistake: a ValueError, and of its text the first line."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error).strip().split("\n")[0]) from None


def output_folder(path: Path | str) -> Path:
    """A folder for results, made if it is not there. Raises ValueError if nothing can be written there."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to {path}: no permission")
    return path
