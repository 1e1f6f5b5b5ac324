"""SIGTERM and SIGINT ask a run to stop after the current step."""

import signal
import sys


class StopSignals:
    """While open, the first SIGTERM or SIGINT sets `asked`. Later ones do nothing, because launchers send several."""

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
