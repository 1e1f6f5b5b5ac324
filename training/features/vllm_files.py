"""Read features from the hidden states that vLLM writes, one file for each text.

The files are written by `training.vllm_side`, or by vLLM's own `ExampleHiddenStatesConnector`.

vLLM's state i is the input of layer i, and so is hidden state i of transformers. Only the last one differs: vLLM's is
the output of the last layer, and transformers' has passed the final norm, which is done here.
"""

import bisect
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.cli.reading import parse_json
from specdec.model.ends import every_token, sizes_of
from specdec.model.language_model import LanguageModel
from specdec.model.target import Target
from specdec.remote import Remote, in_order
from specdec.training.data import Batch, Sample
from specdec.training.data.render import alike
from specdec.training.features.online import Features, arguments, deferred_logits

KEY = "specdec"  # of the header's entry in which a file says what it holds
WAIT = 60.0  # seconds that a server may take to write a file that it has answered for
LIKELIEST = 4  # by the head, of which vLLM's next token must be one: rounding lets near ones change places
SHAPE = {"hidden": "hidden", "vocab": "vocab", "of_layers": "layers"}  # what a file states -> of the target's config


@dataclass(frozen=True)
class StateFile:
    """A file of hidden states [T,len(layers),H]."""

    path: Path
    ids: np.ndarray  # [T] int32
    layers: tuple[int, ...]  # which states, as vLLM counts them
    next_token: int | None  # that vLLM generated after the last one, if it was greedy and the file has it

    def states(self, length: int) -> Tensor:
        """[length,layers,H], those of the first tokens, in the dtype of the file."""
        with _opened(self.path) as file:
            return file.get_slice("hidden_states")[:length]


class VllmStates:
    """A folder of hidden states, as a source of features for their target."""

    def __init__(
        self, folder: str | Path, target: LanguageModel, taps: tuple[int, ...], layers: Iterable[int] | None = None
    ):
        """taps: that are to be read. layers: what the server was given, for files that do not say it themselves.

        Raises ValueError, one sentence, for a file that is damaged, or not of this target, dtype and taps.
        """
        self.folder, self.target, self.layers = Path(folder), target, layers
        self.wanted = sorted({*taps, target.config.layers})
        if not self.folder.is_dir():
            raise ValueError(f"from_vllm={folder} is no folder")
        self.files: list[StateFile] = []
        self.samples: list[Sample] = []
        self.refresh()

    def refresh(self) -> None:
        """Read what the folder holds by now."""
        known = {file.path for file in self.files}
        new = [path for path in sorted(self.folder.glob("[!.]*.safetensors")) if path not in known]
        self.files = sorted([*self.files, *(self._open(path) for path in new)], key=lambda file: _key(file.ids))
        self.keys = [_key(file.ids) for file in self.files]

    def _open(self, path: Path) -> StateFile:
        with _opened(path) as file:
            if not {"hidden_states", "token_ids"} <= set(file.keys()):
                raise ValueError(f"{path} holds no hidden states of vLLM's: it lacks hidden_states or token_ids")
            stated = _stated(path, file.metadata())
            part, ids = file.get_slice("hidden_states"), file.get_tensor("token_ids").numpy().astype(np.int32)
            shape, dtype = part.get_shape(), part[:0].dtype
        self._check_target(path, stated, dtype)
        layers = stated.get("layers") or self.layers
        if layers is None:
            raise ValueError(
                f"{path} does not say which layers it holds: give layer_ids=[...], the ids that the server was given"
            )
        layers = tuple(sorted(set(layers)))  # vLLM keeps them in this order, whatever it was given
        if ids.ndim != 1 or len(shape) != 3 or shape[0] != len(ids):
            raise ValueError(f"{path} is not whole: it has states of shape {shape} for {ids.size} tokens")
        if shape[1:] != [len(layers), self.target.config.hidden]:
            raise ValueError(
                f"{path} holds {shape[1]} states of width {shape[2]}, and layers {list(layers)} of {self.target.name} "
                f"are {len(layers)} of width {self.target.config.hidden}"
            )
        if missing := [layer for layer in self.wanted if layer not in layers]:
            raise ValueError(
                f"{path} holds layers {list(layers)}, and layer {missing[0]} is read too: give the server "
                f"eagle_aux_hidden_state_layer_ids {self.wanted}"
            )
        return StateFile(path, ids, layers, stated.get("next_token"))

    def _check_target(self, path: Path, stated: dict, dtype: torch.dtype) -> None:
        """Raise ValueError unless the target and dtype in a file are those of this run."""
        for key, field in SHAPE.items():
            here = getattr(self.target.config, field)
            if stated.get(key, here) != here:
                raise ValueError(
                    f"{path} is of {stated.get('model', 'another target')}, with {key} {stated[key]}, and "
                    f"{self.target.name} has {here}"
                )
        if dtype != self.target.dtype:
            found, wanted = (str(d).removeprefix("torch.") for d in (dtype, self.target.dtype))
            raise ValueError(f"{path} holds {found}, and the target is read in {wanted}: set target.dtype, or vLLM's")

    # Which file belongs to which text

    def find(self, ids: np.ndarray) -> StateFile | None:
        """A file whose tokens begin with these: a state depends on no later token."""
        at = bisect.bisect_left(self.keys, _key(ids))
        return self.files[at] if self.keys[at : at + 1] and self.keys[at].startswith(_key(ids)) else None

    def file_of(self, ids: np.ndarray) -> StateFile:
        """As `find`. Raises ValueError if there is no such file."""
        if (file := self.find(ids)) is None:
            raise ValueError(f"{self.folder} has no file whose tokens begin with those of a sample")
        return file

    def take(self, samples: list[Sample], server: Remote | None = None, requests: int = 8) -> None:
        """Serve these samples, numbered in their order.

        Samples without a file are requested from the server, whose connector writes into this folder. Raises ValueError
        if a sample has no file in the end, or if the states are not those of this target.
        """
        missing = [sample for sample in samples if self.find(sample.ids) is None]
        every = every_token(self.target.vocab).numpy()
        if server is not None:
            wanted = [*([] if self.find(every) else [every]), *(sample.ids for sample in missing)]
            for part in (wanted[:1], wanted[1:]):  # the first alone, as its file may be found wrong
                for _ in in_order(lambda ids: server.complete(ids.tolist(), 1), part, requests):
                    pass
                self._wait(part)
        elif missing:
            key = _key(missing[0].ids)
            at = bisect.bisect_left(self.keys, key)
            near = max((alike(key, k) // 4 for k in self.keys[max(at - 1, 0) : at + 1]), default=0)
            raise ValueError(
                f"{self.folder} has no states of {len(missing)} of {len(samples)} conversations: of the first one's "
                f"{len(missing[0].ids)} token ids the nearest file has {near}; give server=URL to let vLLM compute "
                "them, or the data and the tokenizer that it was asked with"
            )
        self.samples = samples
        self._check_next({file.path: file for s in samples if (file := self.find(s.ids))}.values())

    def _wait(self, wanted: list[np.ndarray]) -> None:
        """Until all these token ids have a file. Raises ValueError if none has come for `WAIT` seconds."""
        end = time.monotonic() + WAIT
        while any(self.find(ids) is None for ids in wanted) and time.monotonic() < end:
            before = len(self.files)
            self.refresh()
            if len(self.files) > before:
                end = time.monotonic() + WAIT
            else:
                time.sleep(0.05)
        if late := sum(self.find(ids) is None for ids in wanted):
            raise ValueError(
                f"the server has answered {len(wanted)} texts, and {self.folder} lacks {late} of them after {WAIT:.0f} "
                "seconds: is it the shared_storage_path of its connector?"
            )

    @torch.no_grad()
    def _check_next(self, files: Iterable[StateFile]) -> None:
        """Raise ValueError unless the head finds the tokens likely that vLLM chose, where files state them.

        It does not if the files are of another target, or if their last state is not the last layer's.
        """
        labelled = [file for file in files if file.next_token is not None][:32]
        wrong, target = [], cast(Target, self.target)
        for file in labelled:
            last = self._hidden(file, len(file.ids), (target.config.layers,))[-1]
            if file.next_token not in target.logits(last).float().topk(LIKELIEST).indices[0].tolist():
                wrong.append(file)
        if 2 * len(wrong) > len(labelled):
            raise ValueError(
                f"{wrong[0].path}: by the head of {self.target.name} vLLM's next token is not among the {LIKELIEST} "
                f"likeliest, so in {len(wrong)} of {len(labelled)} files: these are another target's states"
            )

    def sizes(self, taps: tuple[int, ...]) -> dict[int, float]:
        """Return the root mean square of the states of each tap, to the nearest power of two."""
        every = self.find(every_token(self.target.vocab).numpy())
        files = [every] if every else [self.file_of(sample.ids) for sample in self.samples[:32]]
        states = torch.cat([self._hidden(file, len(file.ids), taps) for file in files])
        return dict(zip(taps, sizes_of(states.float()).tolist(), strict=True))

    # Features

    def _hidden(self, file: StateFile, length: int, taps: tuple[int, ...]) -> Tensor:
        """Hidden states [length,len(taps),H] as transformers counts them, on the target's device."""
        states = file.states(length)[:, [file.layers.index(tap) for tap in taps]].to(self.target.device)
        if (last := self.target.config.layers) in taps:
            states[:, taps.index(last)] = cast(Target, self.target).norm(states[:, taps.index(last)])
        return states

    @torch.no_grad()
    def features(self, target, batch: Batch, taps: tuple[int, ...], autocast: AbstractContextManager) -> Features:
        """As `online_features`."""
        last, shape = target.config.layers, batch.tokens.shape
        read = taps if last in taps else (*taps, last)
        states = torch.zeros(*shape, len(read), target.config.hidden, dtype=target.dtype, device=target.device)
        for row, numbers in enumerate(batch.rows or ()):
            end = 0
            for number in numbers:
                ids = self.samples[number].ids
                start, end = end, end + len(ids)
                states[row, start:end] = self._hidden(self.file_of(ids), len(ids), read)
        feats = states[:, :, : len(taps)].flatten(2).float()
        return arguments(batch, feats, deferred_logits(target, states[:, :, read.index(last)], autocast))


def _key(ids: np.ndarray) -> bytes:
    """Bytes that are in order as the ids are, 4 for each."""
    return ids.astype(">i4").tobytes()


def _stated(path: Path, metadata: dict | None) -> dict:
    """The fields of a file's header; {} without any."""
    stated = parse_json((metadata or {}).get(KEY, "{}"), f"{path}: {KEY}")
    layers = stated.get("layers", []) if isinstance(stated, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"{path}: {KEY} must be an object whose layers are whole numbers")
    return stated


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from None
