"""Which experts a forward of transformers' modules has asked."""

from torch import Tensor, nn


class ExpertWatch:
    """Notes the experts that every layer of a mixture chose in the last forward.

    transformers' mixtures give the chosen experts' numbers to one module that holds all experts of a layer."""

    def __init__(self, model: nn.Module):
        self.chosen: list[Tensor] = []  # by layer, [tokens, experts of a token]
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self.chosen += [x for x in given if not x.is_floating_point()][:1]

    def clear(self) -> None:
        self.chosen = []
