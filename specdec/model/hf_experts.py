"""The experts that a forward of transformers' modules has chosen."""

from torch import Tensor, nn


class ExpertWatch:
    """Records the experts that every mixture layer chose in the last forward.

    transformers' mixtures give the chosen experts' numbers to one module that holds all experts of a layer.
    """

    def __init__(self, model: nn.Module):
        """Add a hook to each module of experts in `model`."""
        self.chosen: list[Tensor] = []  # by layer, [tokens, experts of a token]
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self.chosen += [x for x in given if not x.is_floating_point()][:1]

    def clear(self) -> None:
        """Forget the chosen experts; call it before a forward."""
        self.chosen = []
