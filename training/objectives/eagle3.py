"""EAGLE-3's objective: distances to the target's distribution at every step of the training-time test."""

from dataclasses import dataclass

from specdec.schema import ranged
from specdec.training.objectives.base import Objective


@dataclass(eq=False)
class Eagle3Objective(Objective):
    """sum_j decay^j * loss_j over `steps` unrolled steps (EAGLE-3, section 3; `traineagle3/cnets.py`).

    By default loss_j is the cross-entropy -mean sum_v p(v) log q_j(v), with p renormalised over the draft vocabulary.
    EAGLE-3.1 keeps it so. Other trainers of such heads differ in settings of `Objective`: see conf/experiment/preset_*.
    """

    steps: int = ranged(1, 256, 7)
    decay: float = ranged(0, 1000, 0.8)
