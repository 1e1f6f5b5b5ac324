"""Caches that the modules of transformers receive: views of ours, made for one forward."""

from contextlib import ExitStack
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from typing_extensions import override

from specdec.model.cache import KVCache
from specdec.model.recurrent import HybridCache, Plan, State


class SlotCache(Cache):
    """The cache that transformers' modules receive in one forward: it reads and writes our slots of a KVCache."""

    def __init__(self, cache: KVCache, n: int, offset: int = 0, plan: Plan | None = None):
        """View a cache for n new positions after `offset` scratch slots; `plan` says how recurrent layers run."""
        super().__init__(layers=[])
        self.cache, self.plan = cache, plan
        self.place = cache.place if isinstance(cache, HybridCache) else range(len(cache.layers))
        self.slots = cache.slots_of(torch.arange(offset, offset + n, device=cache.lens.device))
        self.visible = min(cache.max_len + offset + n, cache.slots)

    @override
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Store keys and values [B,K,N,Dh] after the committed part; return all visible slots [B,K,visible,Dh]."""
        new, place = (key_states, value_states), self.place[layer_idx]
        widest = self.cache.layers[place].shape[-1]
        padded = (F.pad(x, (0, widest - x.shape[-1])).transpose(1, 2).to(self.slots.device) for x in new)
        self.cache.write(place, self.slots, *padded)
        stored = zip(self.cache.heads[place], new, strict=True)
        # A layer may be on another device than the cache (`model.hf_devices`).
        return tuple(x[:, :, : self.visible, : y.shape[-1]].to(y.device) for x, y in stored)

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.max_len

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.visible, 0

    @override
    def __len__(self) -> int:
        return len(self.cache.layers)


class StateView(Cache):
    """The cache of a recurrent module while it runs: the states before its positions, then those after them."""

    def __init__(self, state: State):
        """Start from `state`; updates replace its entries."""
        super().__init__(layers=[])
        self.state = state

    @override
    def has_previous_state(self, *args, **kwargs) -> bool:
        return True  # an empty state is one of zeros

    @override
    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # then a single position goes the way of several, and the module writes no state itself

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.state[f"convolution {state_idx}"]

    @override
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.state[f"recurrent {state_idx}"]

    @override
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        """Store the last inputs of the earlier and the new ones [R,C,T]; return all of them."""
        stored = self.get_conv_state(layer_idx, state_idx)
        whole = torch.cat([stored, conv_states], -1)
        self.state[f"convolution {state_idx}"] = whole[..., -stored.shape[-1] :]
        return whole

    @override
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        self.state[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states


class Recurrent:
    """Base class put before a recurrent module's class in transformers, so that our cache runs the module."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        """Run the module over the states of our cache if it receives a `SlotCache`, else unchanged."""
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, SlotCache)), None)
        forward = super().forward  # type: ignore[misc]  # of the class that follows
        if cache is None:
            return forward(hidden_states, *args, **kwargs)

        def run(x: Tensor, state: State) -> tuple[Tensor, State]:
            view = StateView(state)
            others = {k: view if v is cache else v for k, v in kwargs.items() if k != "attention_mask"}
            return forward(x, *(view if v is cache else v for v in args), **others), view.state

        states = cast(HybridCache, cache.cache).recurrent[self.layer_idx]
        return states.forward(run, hidden_states, cast(Plan, cache.plan))


def read_states(cache: DynamicCache) -> dict[int, State]:
    """Return, by layer, the states that a forward has left in a cache of transformers."""
    return {
        layer: {f"convolution {i}": x for i, x in part.conv_states.items() if x is not None}
        | {f"recurrent {i}": x for i, x in part.recurrent_states.items() if x is not None}
        for layer, part in enumerate(cache.layers)
        if isinstance(part, LinearAttentionCacheLayerMixin)
    }


class Traced(DynamicCache):
    """A cache that notes which module is running when a state is updated."""

    def __init__(self, config: PretrainedConfig):
        """Start with no module noted; `config` is that of the model."""
        super().__init__(config=config)
        self.running: list[nn.Module] = []
        self.found: set[nn.Module] = set()

    @override
    def update_conv_state(self, *args, **kwargs) -> Tensor:
        self.found.add(self.running[-1])
        return super().update_conv_state(*args, **kwargs)

    @override
    def update_recurrent_state(self, *args, **kwargs) -> Tensor:
        self.found.add(self.running[-1])
        return super().update_recurrent_state(*args, **kwargs)


def trace(model: nn.Module, cache: Traced, /, **inputs):
    """Run the model over `cache`, which notes the modules that store a state."""

    def leave(module: nn.Module, args, out) -> None:
        cache.running.pop()

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda module, args: cache.running.append(module)))
            hooks.enter_context(module.register_forward_hook(leave))
        return model(**inputs)


def take_over(modules: set[nn.Module]) -> None:
    """Let our cache decide how these modules run."""
    for module in modules:
        if not isinstance(module, Recurrent):
            own = type(module)
            module.__class__ = type(own.__name__, (Recurrent, own), {})
