"""Read a checkpoint into the modules of transformers."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from specdec.cli.files import kept_folder
from specdec.model.archs import inner_name, set_aside
from specdec.model.checkpoint import ALLOWED, nonfinite, read_headers
from specdec.model.hf_devices import hold_ends, keep_shares, local, read_map, share
from specdec.model.hf_family import read_windows
from specdec.model.hf_target import TransformersTarget

# Names in a checkpoint that wraps the model -> the model's own (`archs`).
INNER_NAMES = {r"^(?:language_model\.model|model\.language_model)\.": "model.", r"^language_model\.": ""}


def load_transformers(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    allow_nonfinite: bool = False,
    tp_plan: str | None = None,
    device_map: str | None = None,
) -> TransformersTarget:
    """Load a target into transformers' modules. Arguments: see `load_target`; `name` is for errors.

    Raises ValueError, one sentence, for a model that we cannot run or whose tensors do not all fit.
    """
    quantised = None
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        read_windows(text)  # before gigabytes are read
        if quantised := getattr(config, "quantization_config", getattr(text, "quantization_config", None)):
            text.quantization_config = quantised  # of the whole, where the model is a part
        # Only the plain implementation of attention caps its products where a family asks for that.
        capped = getattr(text, "attn_logit_softcapping", None) is not None
        cut = share(text, device) if tp_plan else None
        spread = read_map(device_map) if device_map else None
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=text,
                key_mapping=INNER_NAMES if text is not config else None,
                dtype=dtype,
                attn_implementation="eager" if capped else None,
                # Modules of some kinds cannot be moved.
                device_map=spread or ({"": device} if quantised and not cut else None),
                offload_folder=kept_folder("offload") if spread else None,
                **({"distributed_config": cut} if cut else {}),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_names` refuses them, and names one
            )
        model, info = loaded
        check_names(folder, config, info, text is not config, quantised)
        if cut:
            keep_shares(model)
        elif spread:
            hold_ends(model)
        elif getattr(model.config, "quantization_config", None) is None:
            model.to(device, dtype if quantised else None)  # what was not in fp8 has the file's dtype
        # Quantised weights are tensors of classes of their own, which know few operators.
        here = ((key, local(p)) for key, p in model.named_parameters())
        plain = [(key, p) for key, p in here if type(p) in (nn.Parameter, torch.Tensor) and p.device.type != "meta"]
        found = [] if allow_nonfinite else filter(None, itertools.starmap(nonfinite, plain))
        if first := next(iter(found), ""):
            raise ValueError(f"{first}; {ALLOWED}")
        transpose_weights(model)
        return TransformersTarget(model)
    except Exception as error:  # the modules of any family may raise errors of any type
        reason = reason_of(error)
        reason = f"the checkpoint is quantised: {reason}" if quantised else reason
        raise ValueError(f"{name}: {reason}") from None


def reason_of(error: Exception) -> str:
    """Return the message of an error in one line: the first, and the next where the first only announces it."""
    if isinstance(error, KeyError):  # its message is the key alone
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]


def check_names(folder: Path, config: PretrainedConfig, info: dict, wrapped: bool, quantised: object) -> None:
    """Raise ValueError for a tensor that is missing, left over or of another shape; `info` is transformers' report."""
    for tensor, found, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(f"tensor {tensor} has shape {list(found)}, the config asks for {list(wanted)}")
    if info["missing_keys"]:
        raise ValueError(f"the checkpoint lacks the tensor {min(info['missing_keys'])}")
    headers = {} if quantised and not wrapped else read_headers(folder)
    names = {inner_name(name): name for name in headers} if wrapped else {}
    extra = [names.get(key, key) for key in info["unexpected_keys"]]
    extra = [name for name in extra if not set_aside(name, config.to_dict())]
    if extra:
        raise ValueError(f"the checkpoint holds the tensor {min(extra)}, for which the architecture has no place")
    whole = [name for name, header in headers.items() if name.endswith(".weight") and not header.is_floating_point()]
    if whole and not quantised:  # transformers would take the numbers as they are, without scales
        raise ValueError(f"tensor {min(whole)} holds whole numbers, and the config has no quantization_config")


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off progress bars and reports on tensors; `check_names` turns what matters into errors."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def transpose_weights(model: nn.Module) -> None:
    """Store each weight of `nn.Linear` on the CPU transposed in memory, for modules that call `F.linear` themselves.

    The product of 4 to 16 rows, a tree, with a transposed weight takes 0.4 to 0.7 of the time of the usual layout in
    torch 2.13 (MKL), and that of one row takes the same (docs/log.md). Values and shapes do not change.
    """
    for module in model.modules():
        plain = isinstance(module, nn.Linear) and type(module.weight) is nn.Parameter  # quantised ones are classes
        if plain and module.weight.device.type == "cpu" and module.weight.is_floating_point():
            weight = module.weight.detach()
            module.weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=module.weight.requires_grad)
