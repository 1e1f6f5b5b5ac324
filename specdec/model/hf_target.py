"""Any causal language model of transformers made of attention and recurrent layers, through its own modules.

It offers what `Target` offers. A tree becomes a 4D attention mask with explicit positions, and keys and values live in
our cache. A model with recurrent layers verifies chains only; their states live in our cache too (`model.recurrent`).
transformers' modules take more time a token than our own decoder, and may synchronise with the device.
"""

import inspect
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from typing_extensions import override

from specdec.model.archs import ModelConfig
from specdec.model.attention import document_mask, document_positions
from specdec.model.cache import KVCache, cache_bytes
from specdec.model.ends import read_ends
from specdec.model.hf_cache import SlotCache, Traced, read_states, take_over, trace
from specdec.model.hf_devices import weight_of
from specdec.model.hf_family import ExpertWatch, check, count_experts, exact_context, read_windows
from specdec.model.language_model import LanguageModel
from specdec.model.recurrent import BUDGET, HybridCache, State, hybrid_bytes
from specdec.model.rope import Rope
from specdec.ops.attention import tree_mask, window_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDED = ("attention_mask", "position_ids", "logits_to_keep")
RECURRENT = ("linear_attention", "conv")  # types of layers that take no mask of ours
CACHES = ("cache", "past_key_values", "cache_params")  # what models call their cache; transformers 5.24 renamed most


class TransformersTarget(LanguageModel):
    """A causal language model of transformers. Not capturable: modules of some families read values on the host."""

    masks_prompts = True
    _gain: Tensor | None  # of the final norm, where it is known

    def __init__(self, model: "PreTrainedModel"):
        """Check and wrap a model. Raises ValueError, without its name, if its chains or trees would not be exact."""
        super().__init__()
        self.model = model
        model.eval().requires_grad_(False)
        text = model.config.get_text_config(decoder=True)
        self.windows, self.experts = read_windows(text), count_experts(text)
        takes = inspect.signature(model.forward).parameters
        lacking: Sequence[str] = [
            name for name in NEEDED if name not in takes and (self.windows or name == "logits_to_keep")
        ]
        names = [name for name in CACHES if name in takes]
        if lacking or not names:
            lacking = lacking or CACHES
            raise ValueError(f"model family {model.config.model_type!r} cannot verify trees: it takes no {lacking[0]}")
        self.cache_name = names[0]
        self.watch = ExpertWatch(self.model)
        self._probe(text)
        self.state_budget = self._check()
        self.reads_on = self.state_budget != inf  # some recurrent modules start from an empty state only

    def _check(self) -> float:
        """Check that the model is exact, and return the most bytes that states after each position may take.

        Modules that start several positions from an empty state, whatever they are given, run one position at a time.
        """
        self.state_budget = 0
        try:
            check(self)
        except ValueError:
            if not self.chains_only:
                raise
            self.state_budget = inf
            check(self)
            return inf
        if self.chains_only:
            self.state_budget = BUDGET
            check(self)
        return BUDGET

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        """Return the token embedding [V,H]."""
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """Return the output projection [V,H]."""
        return cast(nn.Linear, self.model.get_output_embeddings())

    @override
    def final_scale(self) -> Tensor:
        return self._final_scale  # measured once on a few tokens

    @override
    def final_gain(self) -> Tensor:
        # The norm is the model's own: unless the family is native, all dimensions have about the same factor.
        return self._final_scale.expand(self.config.hidden) if self._gain is None else self._gain

    @override
    def norm_gain(self) -> Tensor:
        return self._stored_gain(read_ends(self.model.config.to_dict(), self.name, head=True))

    def _stored_gain(self, config: ModelConfig) -> Tensor:
        return weight_of(cast(Any, self.model.base_model).norm).to(self.device).float() + config.norm_offset

    def take_shape(self, config: ModelConfig) -> None:
        """Take the shape that our own decoder has for a native family, so that fresh drafters are the same."""
        self.config, gain = config, self._stored_gain(config)
        self._gain, self._final_scale = gain, gain.square().mean().sqrt()

    @torch.inference_mode()
    def _probe(self, text: PretrainedConfig) -> None:
        """Read the shapes, and the root mean square of the last hidden state, from a forward over two tokens."""
        cache = Traced(text)
        ids = torch.tensor([[0, 1]], device=self.device)
        how: dict[str, Any] = {self.cache_name: cache, "use_cache": True, "output_hidden_states": True}
        try:
            out = trace(self.model, cache, input_ids=ids, **how)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(
                f"model family {text.model_type!r} is not supported: it does not run over transformers' cache ({error})"
            ) from None
        take_over(cache.found)
        self.states: dict[int, State] = read_states(cache)  # of recurrent layers
        self.chains_only = bool(self.states)
        layers: Sequence[Any] = cache.layers
        keys = {layer: part for layer, part in enumerate(layers) if getattr(part, "keys", None) is not None}
        self.attention = list(keys)  # which layers attend
        shapes = {(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in keys.values()}
        last = out.hidden_states[-1]
        if len(shapes) != bool(keys) or last.shape[-1] != self.embed.weight.shape[-1]:
            raise ValueError(
                f"model family {text.model_type!r} is not supported: its layers differ in their keys and values, or "
                "its embeddings are not as wide as its hidden states"
            )
        kv_heads, *dims = shapes.pop() if shapes else (1, 2)
        self.cache_shape = kv_heads, max(dims)
        self._final_scale = last.float().square().mean().sqrt()
        self._gain = None
        heads = getattr(text, "num_attention_heads", None) or max(1, last.shape[-1] // 64)
        self.config = ModelConfig(
            layers=len(out.hidden_states) - 1,
            hidden=last.shape[-1],
            intermediate=getattr(text, "intermediate_size", None) or 4 * last.shape[-1],
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=last.shape[-1] // heads,
            vocab=out.logits.shape[-1],
            eps=1e-6,
            rope=Rope(),  # for fresh drafters; the model's own is in its modules
            context=exact_context(text),
            tied=bool(text.tie_word_embeddings),
        )

    @override
    def chosen_experts(self) -> list[Tensor]:
        return self.watch.chosen

    @override
    def new_cache(self, rows: int, slots: int) -> KVCache:
        sizes, like = (rows, slots, *self.cache_shape), self.embed.weight
        if not self.states:
            return KVCache(self.config.layers, *sizes, like=like)
        return HybridCache(self.attention, self.states, self.state_budget, sizes, like)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        sizes, like = (rows, slots, *self.cache_shape), self.embed.weight
        if not self.states:
            return cache_bytes(self.config.layers, *sizes, like=like)
        return hybrid_bytes(len(self.attention), self.states, sizes, like)

    @override
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None,
        *,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
        taps: Sequence[int] = (),
        last: Tensor | None = None,
        logits: bool = True,
        documents: Tensor | None = None,
        prefill: bool = False,
        offset: int = 0,
    ) -> tuple[Tensor | None, Tensor | None]:
        self.watch.clear()
        keep = 1 if not logits else 0 if last is None else last
        if cache is not None:
            lengths = (last + 1).tolist() if prefill and last is not None and self.states else None
            context = self._context(cache, tokens.shape[1], depth, ancestors, offset, lengths)
        else:
            context = {"use_cache": False} | (self._separate(documents) if documents is not None else {})
        out = self.model(input_ids=tokens, logits_to_keep=keep, output_hidden_states=bool(taps), **context)
        feats = torch.cat([out.hidden_states[tap] for tap in taps], dim=-1) if taps else None
        if not logits:
            return None, feats
        if last is None:
            return out.logits, feats
        # The model computes every row at all positions of `last`; row b wants the b-th of them.
        return out.logits.diagonal().movedim(-1, 0)[:, None], feats

    def _context(
        self,
        cache: KVCache,
        n: int,
        depth: Tensor | None,
        ancestors: Tensor | None,
        offset: int,
        lengths: Sequence[int] | None,
    ) -> dict:
        """Return the model's arguments for n positions, `offset` slots after the committed ones."""
        nodes = torch.arange(n, device=cache.lens.device)
        depth = nodes.expand(cache.batch, n) if depth is None else depth
        plan = cache.plan(n, lengths, offset > 0) if isinstance(cache, HybridCache) else None
        slots = SlotCache(cache, n, offset, plan)
        context = {self.cache_name: slots, "use_cache": True}
        if not self.windows:
            return context
        if ancestors is None:
            ancestors = (nodes[:, None] >= nodes).expand(cache.batch, n, n)
        return context | {
            "attention_mask": self._masks(cache.lens, depth, ancestors, slots.visible),
            # A tree may reach beyond the end of the context, where learned positions have no row. Nothing from there
            # is ever emitted.
            "position_ids": (cache.lens[:, None] + depth).clamp_(max=self.config.context - 1),
        }

    def _separate(self, documents: Tensor) -> dict:
        """Return the model's arguments that separate the documents [B,N] of a row."""
        if self.states:
            raise ValueError(
                f"model family {self.model.config.model_type!r} has recurrent layers, which cannot keep texts of one "
                "row apart: give each text a row of its own"
            )
        depth = document_positions(documents)
        masks = self._masks(documents.new_zeros(len(documents)), depth, document_mask(documents), documents.shape[1])
        return {"attention_mask": masks, "position_ids": depth}

    def _masks(self, lens: Tensor, depth: Tensor, ancestors: Tensor, slots: int) -> Any:
        """Return masks [B,1,N,slots] to add to the attention scores, by layer type if there are several."""
        seen, dtype = tree_mask(lens, ancestors, slots), self.dtype
        masks: dict[str, Any] = {}
        for kind, window in self.windows.items():
            mask = seen if window is None else seen & window_mask(lens, depth, slots, window)
            masks[kind] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
        return masks | dict.fromkeys(RECURRENT) if len(masks) > 1 else masks.popitem()[1]
