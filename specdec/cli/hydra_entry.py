"""Commands whose settings are Hydra's."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.cli.errors import one_sentence_errors

CONF = Path(__file__).parents[2] / "conf"


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
