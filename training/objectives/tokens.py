"""The objective of heads that learn the text's own tokens: MTP (arXiv 2412.19437, 2509.18362) and Medusa."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from specdec.schema import ranged
from specdec.training.objectives.base import Objective
from specdec.training.objectives.terms import Weight


@dataclass(eq=False)
class TokensObjective(Objective):
    """Compute sum_j w_j * CE_j over `steps` unrolled steps, with w_j = decay^j / sum decay^j.

    CE_j is the cross-entropy of the token j + 1 places after the known one. FastMTP weights the recursions of one MTP
    head like this, with decay 0.6, and Medusa its heads, with decay 0.8. On the target's own answers this is
    distillation from samples. Further terms can be added. A position counts if its token belongs to the loss mask and
    to the draft vocabulary.
    """

    usual: ClassVar[Mapping[str, Weight]] = {"tokens": 1.0}
    steps: int = ranged(1, 256, 3)
    decay: float = ranged(0, 1000, 0.6)

    def __post_init__(self) -> None:
        """Normalise the weights of the steps."""
        super().__post_init__()
        self.step_weights = [w / sum(self.step_weights) for w in self.step_weights]

    @override
    def positions(self, vocab, teacher_logits, labels: Tensor, loss_mask: Tensor) -> Tensor:
        return (labels >= 0).float()
