"""PARD: a small language model that guesses a block by mask tokens after the text (arXiv 2504.18583).

PARD-2 adds the target's features to its embeddings (arXiv 2605.08632).

It keeps a language model's conventions: token t has position t. PARD-2 gives token t the target's feature of token
t - 1, nothing to token 0, and to mask rows that of the last real row.
"""

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.contracts import DraftState, Features
from specdec.drafters.dflash import default_taps
from specdec.drafters.draft_model import load_model
from specdec.drafters.layers import SharedHead, mask_row, shape_fields, shape_like
from specdec.drafters.parallel import ParallelDrafter
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import read_config
from specdec.model.attention import CacheView, NoCache
from specdec.model.language_model import LanguageModel
from specdec.model.layers import Linear
from specdec.model.names import resolve
from specdec.model.target import Target, check_taps
from specdec.model.weight_files import read_json


@dataclass(frozen=True)
class PardForward:
    """mask_token: id of the tokens after the text. scale: of what features add to embeddings (PARD-2)."""

    mask_token: int
    scale: float = 0.02


class Pard(ParallelDrafter):
    """Any model of our own decoder whose layers see all positions."""

    switches: PardForward
    trust = 1.0  # a language model, and no head that was taught a peak
    keeps_first = True
    earliest = -1  # the authors learn blocks with nothing before them, too

    def __init__(
        self,
        model: LanguageModel,
        config: dict,
        vocab: DraftVocab,
        block: int,
        forward: PardForward,
        taps: tuple[int, ...] = (),
        tap_width: int | None = None,
    ):
        """config: the model's, as its config.json has it. taps: none for PARD; tap_width: the target's hidden size."""
        super().__init__()
        shape = model.config
        if not isinstance(model, Target) or any(shape.sliding) or shape.logit_softcap or shape.attention_scale:
            raise ValueError("PARD takes models of the Llama kind, without windows and caps on logits")
        self.set_block(block)
        self.model, self.config, self.shape, self.switches = model.requires_grad_(True), config, shape, forward
        self.vocab, self.taps, self.tap_width = vocab, tuple(taps), tap_width
        self.head = model.head if vocab.ids is None else SharedHead(model.head.weight, vocab.ids)
        self.target_proj = Linear(len(taps) * (tap_width or shape.hidden), shape.hidden, bias=False) if taps else None

    @override
    def reset(self, rows: int, slots: int) -> None:
        self.cache = self.model.new_cache(rows, slots + 1 + self.block).clear(0)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        return self.model.cache_bytes(rows, slots + 1 + self.block)

    def reserve(self, positions: int) -> None:
        """Bind the present weights, for so many positions."""
        self.model.bind()
        for rope in self.model.ropes:
            rope.reserve(positions, self.model.norm.weight)

    def texts(self, feats: Features, tokens: Tensor, documents: Tensor, anchors: Tensor) -> tuple:
        """Texts as rows, of which token 0 is the first. No document begins with a feature."""
        if self.first_tokens is None:
            raise ValueError("a language model reads token 0 of a text too: set first_tokens")
        tokens = torch.cat([self.first_tokens[:, None], tokens], 1)
        documents = torch.cat([documents, documents[:, -1:]], 1)
        if self.taps:
            inside = (documents[:, 1:] == documents[:, :-1])[..., None]
            feats = F.pad(feats * inside, (0, 0, 1, 0))
        return feats, tokens, documents, anchors + 1

    @override
    def real(self, feats: Features, tokens: Tensor) -> Tensor:
        return self._added(self._embedded(tokens), feats)

    @override
    def masked(self, feats: Features, anchors: Tensor) -> Tensor:
        embeds = self._embedded(torch.full_like(anchors, self.switches.mask_token))
        if not self.taps:
            return embeds
        at = anchors.clamp(min=0)[..., None].expand(-1, -1, feats.shape[-1])
        return self._added(embeds, feats.gather(1, at) * (anchors >= 0)[..., None])

    def _embedded(self, tokens: Tensor) -> Tensor:
        embed, *_ = self.model.parts
        return embed(tokens)

    def _added(self, embeds: Tensor, feats: Features) -> Tensor:
        if self.target_proj is None:
            return embeds
        return embeds + self.switches.scale * self.target_proj(feats.to(embeds.dtype))

    @override
    def run(self, rows: Tensor, positions: Tensor, view: CacheView | NoCache) -> Tensor:
        (rope,), (_, norm, layers, _) = self.model.ropes, self.model.parts
        x, rope = rows.flatten(0, 1), rope(positions)
        normed = norm(x)
        for index, (block, _) in enumerate(layers):
            x, normed = block(x, normed, rope, view.layer(index))
        return normed.view_as(rows)

    def admit(self, row: int, first: Tensor, feats: Features, tokens: Tensor, n: Tensor) -> DraftState:
        """Token 0 goes in with the others."""
        whole = torch.cat([first[:, None], tokens], 1)
        feats = F.pad(feats, (0, 0, 1, 0)) if self.taps else None
        return super().admit(row, first, feats, whole, n + 1)

    @override
    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return super().extend(feats, tokens, n, max_len + 1)


def create(
    target,
    *,
    path: str | os.PathLike | None = None,
    vocab: DraftVocab | None = None,
    layers: int = 4,
    block_size: int = 8,
    mask_token: int | None = None,
    taps: tuple[int, ...] | int | None = None,
    scale: float = 0.02,
    init: str = "target",
    **shape,
) -> Pard:
    """A PARD drafter of the language model at `path`, or of a fresh one.

    block_size: how many tokens it drafts. mask_token: None is the last row of the model's embedding. taps: indices into
    the target's hidden_states, or how many to spread over its layers; None or 0 for a drafter that reads tokens only.
    Of a fresh model: layers; init 'target' gives it the target's embedding, final norm and head, 'random' does not;
    shape: sizes as in `layers.shape_like`.
    """
    if init not in ("target", "random"):
        raise ValueError(f"init must be 'target' or 'random', got {init!r}")
    vocab, taps = vocab or DraftVocab(target.vocab), taps or ()
    taps = default_taps(target.config.layers, taps) if isinstance(taps, int) else tuple(taps)
    check_taps(taps, target.config.layers)
    if path is not None:
        config = read_json(resolve(path) / "config.json")
        model = load_model(target, path)
    else:
        config = fresh_config(target, layers, **shape)
        model = fresh_model(target, config, init)
    mask = mask_row(mask_token, model.embed.weight)
    drafter = Pard(model.float(), config, vocab, block_size, PardForward(mask, scale), taps, target.config.hidden)
    if drafter.target_proj is not None:
        nn.init.zeros_(drafter.target_proj.weight)  # at first it reads what it read before
    return drafter.to(target.device)


def fresh_config(target, layers: int, **sizes) -> dict:
    """The config.json of a Llama of the target's shape."""
    config = {"architectures": ["LlamaForCausalLM"], **shape_fields(shape_like(target, **sizes))}
    return config | {
        "num_hidden_layers": layers,
        "vocab_size": target.vocab,
        "eos_token_id": sorted(target.eos) or None,
    }


@torch.no_grad()
def fresh_model(target, config: dict, init: str) -> Target:
    """A model of random weights, or with the target's embedding, final norm and head."""
    model = Target(read_config(config, "the fresh model"))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # What is added to the residual stream is small at first, as in GPT-2.
            outward = name.endswith(("attention.o.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * len(model.blocks)) ** (0.5 if outward else 0))
    if init == "target":
        model.embed.weight.copy_(target.embed.weight)
        model.head.weight.copy_(target.head.weight)
        model.norm.weight.copy_(target.final_gain())
    return model
