"""The target: one decoder for all families, with fused weights, a static cache and hidden-state taps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.model.archs import ModelConfig
from specdec.model.attention import Attend, Attention, CacheView, NoCache, document_mask, document_positions
from specdec.model.cache import KVCache, cache_bytes
from specdec.model.language_model import LanguageModel
from specdec.model.layers import GatedMLP, Linear, ModuleList, OffsetRMSNorm, RMSNorm
from specdec.model.rope import RopeTable

Function = Callable[..., Any]


def norm_class(config: ModelConfig) -> type[RMSNorm]:
    """Return the class of the model's norms: Gemma's if the weights are stored less 1."""
    return OffsetRMSNorm if config.norm_offset else RMSNorm


def make_norm(config: ModelConfig) -> RMSNorm:
    """Return a norm of hidden states, of the class and epsilon of the config."""
    return norm_class(config)(config.hidden, config.eps)


class Block(nn.Module):
    """A decoder layer, bound together with the following norm, which is the next layer's first or the final one.

    The MLP's output is added in that norm, in the same pass.
    """

    def __init__(self, config: ModelConfig):
        """Create attention, MLP and their two norms."""
        super().__init__()
        self.input_norm = make_norm(config)
        how: dict[str, Any] = {"o_bias": config.o_bias, "norm": norm_class(config)}
        self.attention = Attention(config, config.hidden, config.qkv_bias, config.qk_norm, **how)
        self.post_norm = make_norm(config)
        self.mlp = GatedMLP(config.hidden, config.intermediate, config.mlp_bias, config.activation)

    def bind(self, following: RMSNorm) -> Function:
        """Return the function (hidden state, its norm, ...) -> (next hidden state, its norm by `following`)."""
        add_attention, add_mlp = self.attention.bind_add(self.post_norm), self.mlp.bind_add(following)

        def block(x: Tensor, normed: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, Tensor]:
            return add_mlp(*add_attention(x, normed, rope, attend))

        return block


class SandwichBlock(Block):
    """Gemma's block: the outputs of attention and MLP are normalised too; `post_norm` still comes before the MLP."""

    def __init__(self, config: ModelConfig):
        """Add norms of the outputs of attention and MLP."""
        super().__init__(config)
        self.attention_norm = make_norm(config)
        self.mlp_norm = make_norm(config)

    @override
    def bind(self, following: RMSNorm) -> Function:
        attention, attention_norm = self.attention.bind(), self.attention_norm.bind()
        mlp, mlp_norm = self.mlp.bind(), self.mlp_norm.bind()
        add_norm, add_following = self.post_norm.bind(), following.bind()

        def block(x: Tensor, normed: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, Tensor]:
            x, normed = add_norm(attention_norm(attention(normed, rope, attend)), x)
            return add_following(mlp_norm(mlp(normed)), x)

        return block


class Target(LanguageModel):
    """The target of all native families. Weights are frozen: the target is never trained here."""

    capturable = True
    head: Linear
    parts: tuple[Function, Function, list[tuple[Function, int]], Function]  # embedding, norm, (block, its kind), head
    groups: int  # query heads to a key head; like `parts`, set by `bind`

    def __init__(self, config: ModelConfig):
        """Create the decoder of this shape; `loader.load_native` fills its weights."""
        super().__init__()
        self.config, self.cache_shape = config, (config.kv_heads, config.head_dim)
        self.embed = nn.Embedding(config.vocab, config.hidden)
        block = SandwichBlock if config.sandwich_norms else Block
        self.blocks = ModuleList(block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        # Layers are of one kind or of two, full and sliding; those of a kind share positions and view in a forward.
        sliding = config.sliding or (False,) * config.layers
        kinds = sorted(set(sliding))
        self.kind_of = [kinds.index(slides) for slides in sliding]
        self.windows = [config.window if slides else None for slides in kinds]
        ropes = [config.local_rope if slides and config.local_rope else config.rope for slides in kinds]
        self.ropes = ModuleList(RopeTable(rope, config.head_dim) for rope in ropes)
        self.requires_grad_(False)

    def bind(self) -> None:
        """Bind every part to its present weights (`layers.Freezable`)."""
        first, *following = [*(block.input_norm for block in self.blocks), self.norm]
        blocks = [block.bind(norm) for block, norm in zip(self.blocks, following, strict=True)]
        layers = list(zip(blocks, self.kind_of, strict=True))
        self.parts = self._bind_embed(), first.bind(), layers, self._capped(self.head.bind())
        self.groups = self.query_heads // self.cache_shape[0]

    def _bind_embed(self) -> Callable[[Tensor], Tensor]:
        if self.config.embed_scale is None:
            return self.embed
        # Rounded from fp32, as transformers does.
        scale = torch.tensor(self.config.embed_scale, dtype=torch.float32).to(self.device, self.dtype)
        return lambda tokens: self.embed(tokens) * scale

    def _capped(self, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        cap = self.config.logit_softcap
        return head if cap is None else lambda x: torch.tanh(head(x) / cap) * cap

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to hidden states after the final norm: [...,H] -> [...,V]."""
        return self._capped(self.head.bind())(hidden)

    def bind_logits(self, ids: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return the function from hidden states after the final norm, [n,H], to logits [n,U] of the tokens `ids` [U].

        ids: None for the whole vocabulary. dtype: of the product.
        """
        weight = self.head.weight
        if ids is None and dtype == weight.dtype:
            return self._capped(self.head.bind())
        weight = (weight if ids is None else weight[ids]).to(dtype)
        return self._capped(lambda x: F.linear(x.to(dtype), weight))

    @override
    def final_gain(self) -> Tensor:
        return self.norm.gain()

    @override
    def new_cache(self, rows: int, slots: int) -> KVCache:
        self.bind()
        for rope in self.ropes:
            rope.reserve(slots, self.norm.weight)
        return KVCache(self.config.layers, rows, slots, *self.cache_shape, like=self.norm.weight)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        return cache_bytes(self.config.layers, rows, slots, *self.cache_shape, like=self.norm.weight)

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
        """Run tokens [B,N] after the committed part of the cache, in its scratch slots; commit nothing.

        Without a cache the tokens are whole texts from position 0 on, causal, and nothing is stored. Return logits
        [B,N,V] ([B,1,V] with `last`; None if not asked for) and features [B,N,len(taps)*H] (None without taps).

        Args:
            tokens: [B,N] token ids.
            cache: The cache, or None.
            depth: [B,N] position of each token relative to the committed length; None for 0..N-1.
            ancestors: [B,N,offset+N] bool, the scratch slots that each token sees, its own included; None for causal.
            taps: Indices into Hugging Face `hidden_states` (0 = embeddings, L = after the final norm).
            last: [B], compute logits at this position of each row only.
            logits: Compute logits.
            documents: [B,N], without a cache: the text of each token. Texts are separate; positions count in each.
            prefill: The rows of the cache are empty, and the tokens are whole prompts, right-padded.
            offset: Number of scratch slots before the tokens, which an earlier forward has filled.
        """
        b, n = tokens.shape
        if depth is None:
            depth = torch.arange(n, device=tokens.device).expand(b, n)
        views: Sequence[NoCache | CacheView]
        if cache is None:
            positions, views = self._place_texts(depth, documents)
        else:
            scale, positions = self.config.attention_scale, cache.lens[:, None] + depth
            where: dict[str, Any] = {"offset": offset, "prefill": prefill, "depth": depth, "scale": scale}
            views = [CacheView(cache, n, ancestors, self.groups, window=window, **where) for window in self.windows]
        kinds = [(rope(positions), view) for rope, view in zip(self.ropes, views, strict=True)]
        embed, norm, layers, head = self.parts
        x = embed(tokens.flatten())  # [B*N,H]
        states, normed = {0: x} if 0 in taps else {}, norm(x)
        for layer, (block, kind) in enumerate(layers):
            rope, view = kinds[kind]
            x, normed = block(x, normed, rope, view.layer(layer))
            if layer + 1 in taps:
                states[layer + 1] = x
        states[len(layers)] = x = normed
        feats = None
        if taps:
            tapped = [states[tap] for tap in taps]
            feats = (tapped[0] if len(tapped) == 1 else torch.cat(tapped, dim=-1)).view(b, n, -1)
        if not logits:
            return None, feats
        if last is not None:
            x = x[torch.arange(b, device=x.device) * n + last]
        return head(x).view(b, -1, self.vocab), feats

    def _place_texts(self, depth: Tensor, documents: Tensor | None) -> tuple[Tensor, list[NoCache]]:
        """Return positions [B,N] of whole texts, and the view of each kind of layer, without a cache."""
        self.bind()
        for rope in self.ropes:
            rope.reserve(depth.shape[1], self.norm.weight)
        positions = depth if documents is None else document_positions(documents)
        mask = None if documents is None else document_mask(documents)
        return positions, [NoCache(window, self.config.attention_scale, mask) for window in self.windows]


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise ValueError unless every tap is an index into the target's hidden_states."""
    if bad := [tap for tap in taps if not 0 <= tap <= layers]:
        raise ValueError(f"the drafter taps hidden state {bad[0]}, but the target has hidden states 0 to {layers} only")
