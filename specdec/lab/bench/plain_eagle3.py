"""One EAGLE-3 training step as one writes it first: modules of transformers, whole matrices, log_softmax.

`train_step` and `objective_memory` compare ours with it. It follows the published `traineagle3/cnets.py` in its order
of operations: every step makes logits for every position, masked or not, and keeps them for the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specdec.drafters.eagle3 import Eagle3


def whole_loss(logits: Tensor, probs: Tensor, mask: Tensor) -> Tensor:
    """The mean cross-entropy of the positions in mask [B,T]. logits, probs: [B,T,U]."""
    entropy = -(probs * F.log_softmax(logits.float(), dim=-1)).sum(-1)
    return (entropy * mask).sum() / mask.sum().clamp(min=1)


def shift(x: Tensor) -> Tensor:
    """What stands one position later: [B,T,...] -> [B,T,...], zeros at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


class PlainEagle3(nn.Module):
    """The published head with the weights of one of ours, over the whole vocabulary."""

    def __init__(self, drafter: Eagle3):
        super().__init__()
        shape, vocab = drafter.shape, drafter.vocab.size
        self.config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, rms_norm_eps=shape.eps, vocab_size=vocab,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        )  # fmt: skip
        norms = [LlamaRMSNorm(shape.hidden, shape.eps) for _ in range(4)]
        self.embed_norm, self.hidden_norm, self.post_norm, self.norm = norms
        self.q, self.k, self.v = (
            nn.Linear(2 * shape.hidden, n * shape.head_dim, bias=False)
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.fc = nn.Linear(len(drafter.taps) * shape.hidden, shape.hidden, bias=False)
        self.mlp, self.rotary = LlamaMLP(self.config), LlamaRotaryEmbedding(self.config)
        self.head = nn.Linear(shape.hidden, vocab, bias=False)
        self.register_buffer("embedding", drafter.embedding)
        self._copy(drafter)

    @torch.no_grad()
    def _copy(self, drafter: Eagle3) -> None:
        dim, heads, kv = drafter.shape.head_dim, drafter.shape.heads, drafter.shape.kv_heads
        q, k, v = drafter.attention.qkv.weight.split([heads * dim, kv * dim, kv * dim])
        gate, up = drafter.mlp.gate_up.weight.chunk(2)
        pairs = [(self.q, q), (self.k, k), (self.v, v), (self.mlp.gate_proj, gate), (self.mlp.up_proj, up)]
        pairs += [(self.mlp.down_proj, drafter.mlp.down.weight), (self.o, drafter.attention.o.weight)]
        pairs += [(self.get_submodule(n), drafter.get_submodule(n).weight) for n in ("fc", "head", "norm", "post_norm")]
        pairs += [(self.get_submodule(n), drafter.get_submodule(n).weight) for n in ("embed_norm", "hidden_norm")]
        for module, weight in pairs:
            module.weight.copy_(weight)

    def _attend(self, x: Tensor, j: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend causally to the first step's keys, and to the own row of each later step."""
        b, t, _ = x.shape
        positions = torch.arange(j, t + j, device=x.device)[None]
        q, k, v = (f(x).view(b, t, -1, self.config.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(v, positions))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        keys.append(repeat_kv(k, groups))
        values.append(repeat_kv(v, groups))
        scale = self.config.head_dim**-0.5
        scores = q @ keys[0].transpose(2, 3) * scale + torch.full((t, t), -torch.inf, device=x.device).triu(1)
        own = [(q * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :t] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., t + i, None] * value
        return self.o(out.transpose(1, 2).reshape(b, t, -1))

    def forward(
        self, feats: Tensor, tokens: Tensor, teacher_logits: Tensor, loss_mask: Tensor, steps: int, decay: float
    ) -> tuple[Tensor, list[float]]:
        """Inputs as an objective takes them. Returns the loss, and the loss of every step."""
        hidden, keys, values, losses = self.fc(feats), [], [], []
        tokens, mask, teacher_logits = shift(tokens), shift(loss_mask), shift(teacher_logits)
        with torch.no_grad():
            probs = teacher_logits.float().softmax(-1)
        for j in range(steps):
            embeds = F.embedding(tokens, self.embedding)
            x = torch.cat([self.embed_norm(embeds), self.hidden_norm(hidden)], dim=-1)
            hidden = hidden + self._attend(x, j, keys, values)
            hidden = hidden + self.mlp(self.post_norm(hidden))
            logits = self.head(self.norm(hidden))
            losses.append(whole_loss(logits, probs, mask))
            tokens, mask, probs = shift(tokens), shift(mask), shift(probs)
        return sum(decay**j * loss for j, loss in enumerate(losses)), [loss.item() for loss in losses]
