"""Any causal language model of transformers that is made of attention, as a target through its own modules.

It offers what `Target` offers. A tree becomes a 4D attention mask with explicit positions, and keys and values live in
our cache. transformers' modules take more time a token than our own decoder, and may synchronise with the device.
"""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PretrainedConfig
from transformers.utils import logging

from specdec.model.archs import ModelConfig
from specdec.model.archs.tensors import set_aside
from specdec.model.archs.wrapped import inner_name
from specdec.model.attention import document_mask, document_positions, tree_mask, window_mask
from specdec.model.cache import KVCache, cache_bytes
from specdec.model.checkpoint import read_headers
from specdec.model.cpu_linear import transpose_weights
from specdec.model.finite import ALLOWED, nonfinite
from specdec.model.hf_config import exact_context, read_windows
from specdec.model.layers import Rope

# Names in a checkpoint that wraps the model -> the model's own (`archs.wrapped`).
INNER_NAMES = {r"^(?:language_model\.model|model\.language_model)\.": "model.", r"^language_model\.": ""}
NEEDED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")


class SlotCache(Cache):
    """The cache that transformers' modules see in one forward. They write into a KVCache at our slots, and read it."""

    def __init__(self, cache: KVCache, n: int, offset: int = 0):
        super().__init__(layers=[])
        self.cache = cache
        self.slots = cache.slots_of(torch.arange(offset, offset + n, device=cache.lens.device))
        self.visible = min(cache.max_len + offset + n, cache.slots)
        self.head_dim = cache.layers[0].shape[-1]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Store keys and values [B,K,N,Dh] behind the committed part; return all visible slots [B,K,visible,Dh]."""
        new = key_states, value_states
        padded = (F.pad(x, (0, self.head_dim - x.shape[-1])).transpose(1, 2) for x in new)
        self.cache.write(layer_idx, self.slots, *padded)
        kept = self.cache.read(layer_idx, 0, self.visible)
        return tuple(x.narrow(3, 0, y.shape[-1]) for x, y in zip(kept, new, strict=True))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.max_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.visible, 0

    def __len__(self) -> int:
        return len(self.cache.layers)


class TransformersTarget(nn.Module):
    """A causal language model of transformers with the interface of `specdec.model.target.Target`."""

    name: str = ""
    tokenizer = None
    eos: frozenset[int] = frozenset()
    capturable = False  # the modules of some families read values on the host
    masks_prompts = True  # a mask of T x T for each row of a prefill

    def __init__(self, model: nn.Module):
        """Raises ValueError, without the model's name, for a model whose trees would not be exact."""
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        lacking = [name for name in NEEDED if name not in inspect.signature(model.forward).parameters]
        if lacking:
            raise ValueError(f"model family {model.config.model_type!r} cannot verify trees: it takes no {lacking[0]}")
        text = model.config.get_text_config(decoder=True)
        self.windows = read_windows(text)
        self._probe(text)
        self.check()

    @classmethod
    def load(
        cls, folder: Path, name: str, dtype: torch.dtype, device: torch.device, allow_nonfinite: bool = False
    ) -> "TransformersTarget":
        """A target from a checkpoint folder. `name` is what the user calls it.

        Raises ValueError, one sentence, for a model that we cannot run or whose tensors do not all fit."""
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text = config.get_text_config(decoder=True)
            read_windows(text)  # before gigabytes are read
            # Only the plain implementation of attention caps its products where a family asks for that.
            capped = getattr(text, "attn_logit_softcapping", None) is not None
            with quiet():
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder,
                    config=text,
                    key_mapping=INNER_NAMES if text is not config else None,
                    dtype=dtype,
                    attn_implementation="eager" if capped else None,
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
            if info["missing_keys"]:
                raise ValueError(f"the checkpoint lacks the tensor {min(info['missing_keys'])}")
            names = {inner_name(name): name for name in read_headers(folder)} if text is not config else {}
            extra = [names.get(key, key) for key in info["unexpected_keys"]]
            extra = [name for name in extra if not set_aside(name, config.to_dict())]
            if extra:
                raise ValueError(
                    f"the checkpoint holds the tensor {min(extra)}, for which the architecture has no place"
                )
            model.to(device)
            found = [] if allow_nonfinite else filter(None, itertools.starmap(nonfinite, model.named_parameters()))
            if first := next(iter(found), ""):
                raise ValueError(f"{first}; {ALLOWED}")
            transpose_weights(model)
            return cls(model)
        except Exception as error:  # the modules of any family may raise errors of any type
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{name}: {reason}") from None

    @property
    def embed(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def query_heads(self) -> int:
        return self.config.heads

    def final_scale(self) -> Tensor:
        """Root mean square of the last hidden state, measured once on a few tokens."""
        return self._final_scale

    def final_gain(self) -> Tensor:
        """[H], about what the final norm multiplies a normalised state by: the same for all dimensions, as the norm
        itself is the model's own affair."""
        return self._final_scale.expand(self.config.hidden)

    @torch.inference_mode()
    def _probe(self, text: PretrainedConfig) -> None:
        """Read the shapes, and the root mean square of the last hidden state, from a forward over two tokens."""
        cache = DynamicCache()
        ids = torch.tensor([[0, 1]], device=self.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
        shapes = {(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in cache.layers if x.is_initialized}
        last = out.hidden_states[-1]
        if len(shapes) != 1 or last.shape[-1] != self.embed.weight.shape[-1]:
            raise ValueError(
                f"model family {text.model_type!r} is not supported: its layers differ in their keys and values, or "
                "its embeddings are not as wide as its hidden states"
            )
        kv_heads, *dims = shapes.pop()
        self.cache_shape = kv_heads, max(dims)
        self._final_scale = last.float().square().mean().sqrt()
        heads = text.num_attention_heads
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

    @torch.inference_mode()
    def check(self) -> None:
        """Raise ValueError unless trees get the logits that the plain texts get from the model.

        A tree over rows of two lengths is verified, and then a token after part of it was committed. This takes a few
        forwards of a few tokens."""
        device, family = self.device, self.model.config.model_type
        ids = (torch.arange(16, device=device) * 31 + 7).remainder(self.config.vocab).view(2, 8)
        prompts, nodes, lens = ids[:, :4], ids[:, 4:], torch.tensor([4, 2], device=device)
        parents = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
        ancestors = torch.tensor(parents, device=device).bool().expand(2, 4, 4)
        depth, path = (torch.tensor(x, device=device).expand(2, -1) for x in ([0, 1, 1, 2], [0, 2, 3]))
        cache = self.new_cache(2, 16)
        self(prompts, cache)
        cache.advance(lens, 4)
        tree, _ = self(nodes, cache, depth=depth, ancestors=ancestors)
        cache.commit(path, torch.tensor([3, 3], device=device), 7)
        after, _ = self(prompts[:, :1], cache)
        for row, length in enumerate((4, 2)):
            prompt = prompts[row, :length]
            short = self.model(input_ids=torch.cat([prompt, nodes[row, [0, 1]]])[None], use_cache=False).logits[0]
            whole = torch.cat([prompt, nodes[row, path[row]], prompts[row, :1]])
            long = self.model(input_ids=whole[None], use_cache=False).logits[0]
            expected = torch.stack([short[-1], long[-2], long[-1]]).float()
            difference = (torch.stack([tree[row, 1], tree[row, 3], after[row, 0]]).float() - expected).abs().max()
            # The tolerance is for rounding, as a share of the range of the logits. A mask or a position that the model
            # ignores makes a larger difference, and NaN must fail too.
            tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
            if not difference <= tolerance * (expected.max() - expected.min()):
                raise ValueError(
                    f"model family {family!r} cannot verify trees: its logits in a tree differ from the plain text's "
                    f"by {difference:.2g}"
                )

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache(self.config.layers, rows, slots, *self.cache_shape, like=self.embed.weight)

    def cache_bytes(self, rows: int, slots: int) -> int:
        return cache_bytes(self.config.layers, rows, slots, *self.cache_shape, like=self.embed.weight)

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
        """As `specdec.model.target.Target.forward`."""
        keep = 1 if not logits else 0 if last is None else last
        if cache is not None:
            context = self._context(cache, tokens.shape[1], depth, ancestors, offset)
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

    def _context(self, cache: KVCache, n: int, depth: Tensor | None, ancestors: Tensor | None, offset: int = 0) -> dict:
        """The model's arguments for n new positions, `offset` slots behind the committed ones."""
        nodes = torch.arange(n, device=cache.lens.device)
        depth = nodes.expand(cache.batch, n) if depth is None else depth
        if ancestors is None:
            ancestors = (nodes[:, None] >= nodes).expand(cache.batch, n, n)
        slots = SlotCache(cache, n, offset)
        return {
            "past_key_values": slots,
            "use_cache": True,
            "attention_mask": self._masks(cache.lens, depth, ancestors, slots.visible),
            # A tree may reach beyond the end of the context, where learned positions have no row. Nothing from there
            # is ever emitted.
            "position_ids": (cache.lens[:, None] + depth).clamp_(max=self.config.context - 1),
        }

    def _separate(self, documents: Tensor) -> dict:
        """The model's arguments that keep the documents [B,N] of a row apart."""
        depth = document_positions(documents)
        masks = self._masks(documents.new_zeros(len(documents)), depth, document_mask(documents), documents.shape[1])
        return {"attention_mask": masks, "position_ids": depth}

    def _masks(self, lens: Tensor, depth: Tensor, ancestors: Tensor, slots: int) -> Tensor | dict[str, Tensor]:
        """The masks [B,1,N,slots] that are added to the attention scores, by type of layer if there are several."""
        seen, dtype = tree_mask(lens, ancestors, slots), self.dtype
        masks = {}
        for kind, window in self.windows.items():
            mask = seen if window is None else seen & window_mask(lens, depth, slots, window)
            masks[kind] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


@contextmanager
def quiet() -> Iterator[None]:
    """Switch progress bars and reports on tensors off; what matters of them becomes an error here."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
