"""The bar of a run: loss, accuracy, training tokens per second and the time left."""

import sys

from torch import Tensor
from tqdm import tqdm


class Progress(tqdm):
    """A bar that also measures the speed of the steps, without what is between them."""

    def __init__(self, steps: int, step: int, quiet: bool):
        """Show the progress of a run of `steps` steps from `step` on, unless `quiet`."""
        super().__init__(total=steps, initial=step, desc="drafter", mininterval=1.0, disable=quiet)
        self.tokens, self.seconds = 0, 0.0  # since the speed was logged last

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.update()

    @property
    def speed(self) -> float:
        """Training tokens per second, padding and prompts counted."""
        return round(self.tokens / max(self.seconds, 1e-9), 1)

    def take_speed(self) -> float:
        """Return the speed, and begin to measure it again."""
        speed, self.tokens, self.seconds = self.speed, 0, 0.0
        return speed

    def show(self, loss: float, values: dict[str, Tensor]) -> None:
        """Show the loss, the accuracy at each step of the unroll, and the speed."""
        accuracy = " ".join(f"{share:.2f}" for share in values["accuracy"].tolist())
        self.set_postfix_str(f"loss={loss:.3f}, acc={accuracy}, {self.speed:,.0f} tokens/s")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.disable:
            self.write(text, file=sys.stderr)


def switches(objective, step: int, steps: int) -> bool:
    """Return whether the step after `step` of `steps` is the first with the second part of the objective."""
    part_at = getattr(objective, "part_at", lambda progress: 0)
    return step > 0 and part_at((step - 1) / steps) != part_at(step / steps)
