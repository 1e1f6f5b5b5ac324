"""An independent small language model of the target's vocabulary as drafter (Leviathan et al., arXiv 2211.17192).

It reads tokens only, and keeps its own conventions: token t has position t, and from it token t+1 is predicted.
"""

import os
import re

import torch
from torch import Tensor
from typing_extensions import override

from specdec.contracts import Drafter, DraftState
from specdec.drafters.vocab import DraftVocab
from specdec.model.cache import KVCache
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_target
from specdec.model.names import resolve
from specdec.schema import shown

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# The embedding of a language model, as the families of transformers name it.
EMBEDDINGS = re.compile(
    r"(?:\w+\.(?:decoder\.)?embed_tokens|(?:\w+\.)?(?:wte|embed_in|word_embeddings)|(?:backbone|model)\.embeddings)\.weight"
)


class DraftModel(Drafter):
    """Any model that can be a target, run over a cache of its own: committed tokens, then the tree.

    A model with sliding windows takes the levels of a tree before a node as close as the node; windows are longer than
    trees are deep.
    """

    cache: KVCache
    trust = 1.0  # a language model, and no head that was taught a peak
    keeps_first = True

    def __init__(self, model: LanguageModel, vocab: DraftVocab | None = None):
        """vocab: the tokens of the target that are proposed; those of ids that the model does not have are never."""
        super().__init__()
        self.model, self.vocab = model, vocab or DraftVocab(model.vocab)
        self.capturable, self.chains_only = model.capturable, model.chains_only

    @override
    def reset(self, rows: int, slots: int) -> None:
        self.cache = self.model.new_cache(rows, slots + 1).clear(0)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        return self.model.cache_bytes(rows, slots + 1)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        """Token 0 goes in with the others: the whole prompt is one causal prefill."""
        whole = torch.cat([first[:, None], tokens], 1)
        part = self.cache.admit(row, len(first), whole.shape[1])
        return self._absorb(part, whole, n + 1, whole.shape[1], prefill=True)

    @override
    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self._absorb(self.cache, tokens, n, max_len + 1)

    def _absorb(self, cache: KVCache, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False) -> DraftState:
        last = (n - 1).clamp(min=0)  # n is 0 for rows that are finished: their state does not matter
        logits, _ = self.model(self._known(tokens), cache, last=last, prefill=prefill)
        cache.advance(n, max_len)
        return self._state(logits)

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        depth, start = torch.full_like(tokens, level - 1), (level - 1) * tokens.shape[1]
        logits, _ = self.model(self._known(tokens), self.cache, depth=depth, ancestors=ancestors, offset=start)
        return self._state(logits)

    def _state(self, logits: Tensor) -> DraftState:
        nothing = logits.new_empty(*logits.shape[:2], 0)  # the whole state is in the cache
        return DraftState(nothing, self.vocab.select(logits[..., : self.vocab.target_size]))

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens with an embedding here: a target with more padding may emit an id that no text has."""
        return tokens.clamp(max=self.model.vocab - 1) if self.model.vocab < self.vocab.target_size else tokens


def create(
    target, *, path: str | os.PathLike | None, vocab: DraftVocab | None = None, allow_nonfinite: bool = False
) -> DraftModel:
    """The model of a checkpoint folder or hub name, in the target's dtype and on its device.

    Raises ValueError, one sentence, unless it is a model that we load and its tokens are the target's.
    """
    if path is None:
        raise ValueError("a draft model is a checkpoint of its own: give its folder or hub name as `path`")
    model = load_model(target, path, allow_nonfinite).to(target.dtype)
    if vocab is None and model.vocab != target.vocab:
        vocab = DraftVocab(target.vocab, torch.arange(model.vocab) if model.vocab < target.vocab else None)
    return DraftModel(model, vocab).eval()


def load_model(target, path: str | os.PathLike, allow_nonfinite: bool = False) -> LanguageModel:
    """Load the language model of a checkpoint folder or hub name on the target's device.

    A transformers model in memory has no tokenizer to compare, so its vocabulary must be as large as the target's.
    Raises ValueError as `create` does.
    """
    if not isinstance(path, str | os.PathLike):
        model, path = load_target(path, allow_nonfinite=allow_nonfinite).to(target.device), type(path).__name__
        if model.vocab == target.vocab:
            return model
        raise ValueError(f"{path} has a vocabulary of {model.vocab}, the target one of {target.vocab}: give its folder")
    folder = resolve(path)
    tokenizer = target.tokenizer
    compare = tokenizer is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)
    model = load_target(folder, device=str(target.device), tokenizer=compare, allow_nonfinite=allow_nonfinite)
    # Models of one family pad their vocabularies differently (Qwen2.5: 151,936 of 0.5B, 152,064 of 7B).
    padded = compare and len(tokenizer) <= min(model.vocab, target.vocab)
    if model.vocab != target.vocab and not padded:
        raise ValueError(
            f"{path}: the draft model has a vocabulary of {model.vocab}, the target one of {target.vocab}; they may "
            "differ only by padding, with the same tokenizer in both folders"
        )
    if compare and model.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{path}: the draft model's tokenizer names tokens differently from the target's; take a model of the "
            "target's family"
        )
    return model


def is_language_model(config: dict, tensors: dict[str, Tensor]) -> bool:
    """Return whether a checkpoint is an ordinary causal language model.

    Heads that read a target's features have no embedding of these names.
    """
    named = config.get("architectures") or [""]
    if not (isinstance(named, list) and isinstance(named[0], str)):
        raise ValueError(f"config.json: architectures must be a list of names, got {shown(named)}")
    return named[0].endswith(("ForCausalLM", "LMHeadModel")) and any(map(EMBEDDINGS.fullmatch, tensors))
