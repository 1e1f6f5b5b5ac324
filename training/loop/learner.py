"""What several processes train together."""

from torch import Tensor, nn

from specdec.training.objectives.teacher import TeacherLogits


class Learner(nn.Module):
    """The objective over the drafter as one module, for DDP and FSDP to wrap."""

    def __init__(self, drafter: nn.Module, objective):
        super().__init__()
        self.drafter, self.objective = drafter, objective

    def forward(self, **features: Tensor | TeacherLogits) -> tuple[Tensor, dict[str, Tensor]]:
        return self.objective(self.drafter, **features)
