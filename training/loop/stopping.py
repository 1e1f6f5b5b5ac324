"""SIGTERM and SIGINT ask a run to stop where nothing is lost."""

import signal
import sys


class StopSignals:
    """While open, the first SIGTERM or SIGINT sets `asked`, and further ones nothing: launchers send several."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame) -> None:
        if not self.asked:
            print(f"\n{signal.Signals(number).name}: finishing the step, then saving", file=sys.stderr)
        self.asked = True
