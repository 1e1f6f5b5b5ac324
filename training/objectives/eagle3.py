"""EAGLE-3's objective: distances to the target's distribution at every step of the training-time test."""

from collections.abc import Mapping

from specdec.training.objectives.base import Objective
from specdec.training.objectives.terms import Weight


class Eagle3Objective(Objective):
    """sum_j decay^j * loss_j over `steps` unrolled steps (EAGLE-3, section 3; `traineagle3/cnets.py`).

    By default loss_j is the cross-entropy -mean sum_v p(v) log q_j(v), with p renormalised over the draft vocabulary.
    EAGLE-3.1 keeps it so. Other trainers of such heads differ in settings of `Objective`: see conf/experiment/preset_*.
    """

    def __init__(self, steps: int = 7, decay: float = 0.8, terms: Mapping[str, Weight] | None = None, **settings):
        """Set EAGLE-3's defaults; `settings` are the further arguments of `Objective`."""
        super().__init__(terms or {"ce": 1.0}, steps=steps, decay=decay, **settings)
