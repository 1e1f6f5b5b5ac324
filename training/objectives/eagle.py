"""EAGLE-1/2's objective: the target's next feature, and its next distribution (arXiv 2401.15077)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.cli.limits import MOST
from specdec.contracts import Drafter, DraftState
from specdec.drafters.eagle import Eagle
from specdec.schema import ranged
from specdec.training.objectives.base import Objective, Positions
from specdec.training.objectives.terms import Weight


@dataclass(eq=False)
class EagleObjective(Objective):
    """feature * SmoothL1(student's feature, target's next feature), plus terms on the distributions.

    The defaults are those of EAGLE's `eagle/train/main.py`: weights 1 and 0.1, and uniform noise on the input features,
    of width 0.2 at 512 tokens and narrower in longer texts. With steps > 1 the drafter's own output is fed back, and
    step j weighs decay^j; HASS (arXiv 2408.15766) and EAGLE-3 do that, EAGLE does not.
    """

    usual: ClassVar[Mapping[str, Weight]] = {"ce": 0.1}
    steps: int = ranged(1, 256, 1)
    decay: float = ranged(0, 1000, 0.8)
    noise: float = ranged(0, 1000, 0.2)
    noise_length: int | None = ranged(1, MOST, 512)
    feature: float = ranged(0, 1e6, 1.0)

    def __call__(self, drafter: Drafter, *inputs: Any, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """As `Objective`; the metrics also have feature_losses [steps]."""
        if not isinstance(drafter, Eagle):
            raise ValueError(
                f"objective=eagle compares a drafter's state with the target's next feature, which "
                f"{type(drafter).__name__} does not predict; use objective=eagle3 or objective=mtp"
            )
        return super().__call__(drafter, *inputs, **named)

    @override
    def extra_terms(self, states: list[DraftState], feats: Tensor, batch: Positions) -> tuple[Tensor, dict]:
        wanted = feats[batch.row, batch.column]
        losses = torch.stack([
            (F.smooth_l1_loss(batch.rows(state.hidden, j).float(), wanted, reduction="none").mean(-1) * share).sum()
            for j, (state, share) in enumerate(zip(states, batch.share, strict=True))
        ])  # fmt: skip
        weights = torch.tensor(self.step_weights, device=losses.device)
        return self.feature * (losses * weights).sum(), {"feature_losses": losses.detach()}
