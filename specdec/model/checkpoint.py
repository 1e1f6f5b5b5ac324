"""Read and write checkpoint folders in the Hugging Face layout, strictly.

A tensor that is missing, left over or of another shape is an error that names it. Pickles (.bin, .pt) are opened by
torch's restricted unpickler only, which makes tensors and plain values, and runs no code.
"""

import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec.acceptance import FILE as ACCEPTANCE
from specdec.acceptance import Acceptance
from specdec.cli.files import replace_folder
from specdec.model.weight_files import weight_files
from specdec.ops.linear import round_int8

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DRAFT_DTYPES = DTYPES | {"int8": torch.int8}
ALLOWED = "commands that decode take it with --allow-nonfinite"
SCALE = "_scale"  # follows the name of a tensor in int8, as in compressed-tensors


def read_tensors(folder: Path, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a checkpoint folder, one at a time: all, or those in `only`."""
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            yield from read_file(file, only)
        else:
            tensors = named_tensors(read_pickle(file), file)
            yield from ((name, tensor) for name, tensor in tensors.items() if only is None or name in only)


def read_file(file: Path, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a safetensors file: all, or those in `only`. Weights in int8 become fp32."""
    with _safe_open(file) as reader:
        for name, rounded in _entries(reader):
            if only is None or name in only:
                tensor = reader.get_tensor(name)
                yield name, tensor.float() * reader.get_tensor(name + SCALE) if rounded else tensor


def _entries(reader: safe_open) -> list[tuple[str, bool]]:
    """Return the tensors' names, without scales, and whether each is in int8 with scales in the file (`round_rows`)."""
    names = dict.fromkeys(reader.keys())
    rounded = {name for name in names if name + SCALE in names and reader.get_slice(name).get_dtype() == "I8"}
    return [(name, name in rounded) for name in names if name.removesuffix(SCALE) not in rounded - {name}]


def holds_int8(folder: Path) -> bool:
    """Return whether a checkpoint holds weights in int8."""
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with _safe_open(file) as reader:
                if any(rounded for _, rounded in _entries(reader)):
                    return True
    return False


def round_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with each matrix rounded to int8, and a scale [out,1] for each of its rows under NAME_scale.

    The scales are those of `--draft-dtype int8`, so decoding with that rounds nothing further.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            out[name], scales = round_int8(tensor)
            out[name + SCALE] = scales[:, None]
        else:
            out[name] = tensor
    return out


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors on the meta device, without reading weights; ValueError if two files hold one."""
    headers: dict[str, Tensor] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            found = _safetensors_headers(file)
        else:
            found = named_tensors(read_pickle(file, "meta"), file)
        if twice := sorted(set(found) & set(headers)):
            raise ValueError(f"{folder}: the tensor {twice[0]} is there twice; remove the files that do not belong")
        headers |= found
    return headers


def _safetensors_headers(file: Path) -> dict[str, Tensor]:
    headers = {}
    with _safe_open(file) as reader:
        for name, rounded in _entries(reader):
            tensor = reader.get_tensor(name)  # mapped into memory: nothing is read
            headers[name] = torch.empty_like(tensor, dtype=torch.float32 if rounded else None, device="meta")
    return headers


@contextmanager
def _safe_open(file: Path):
    try:
        file.open("rb").close()  # it says why a file cannot be read: safetensors calls each of them missing
        with safe_open(file, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not safetensors: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None


def named_tensors(content: object, file: Path) -> dict[str, Tensor]:
    """Return the content of a pickle if it is dense tensors by name. Raises ValueError otherwise."""
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ValueError(f"{file} is not a checkpoint: it must hold tensors by name")
    for name, value in content.items():
        if value.layout != torch.strided or value.is_quantized:
            kind = "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
            raise ValueError(f"{file}: tensor {name} is {kind}; only dense tensors are read")
    return content


def read_pickle(file: Path, device: str = "cpu"):
    """Return the tensors and plain values in a .bin or .pt. Raises ValueError, and runs no code, for other contents."""
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{file} is damaged, or holds more than tensors, and pickles can run code: refused") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever torch and pickle raise for a damaged file
        reason = (str(error).strip() or "it ends too early").splitlines()[0]
        raise ValueError(f"{file} is damaged: {reason:.200}") from None


def check_shapes(source: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError for the first tensor whose shape differs from the config's, before anything is allocated.

    `StrictFill` finds tensors that are missing or left over.
    """
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            raise _misfit(source, name, tensors[name].shape, shape)


def _misfit(source: str, name: str, found: Sequence[int], wanted: Sequence[int]) -> ValueError:
    return ValueError(f"{source}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")


def nonfinite(name: str, tensor: Tensor) -> str:
    """Return how many values of a tensor are NaN or Inf, as after a training run that diverged; empty if none is.

    A sum is finite only if all values are. It reads the tensor once, at the speed of memory; `isfinite` takes ten times
    as long on a CPU. Values are counted only if the sum is not finite, which large numbers can cause too.
    """
    if not tensor.is_floating_point():
        return ""
    if tensor.element_size() == 1:  # torch does not add fp8
        tensor = tensor.float()
    if tensor.sum().isfinite():
        return ""
    counts = {"NaN": int(tensor.isnan().sum()), "Inf": int(tensor.isinf().sum())}
    found = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return found and f"{name} holds {found} among {tensor.numel()} values"


class StrictFill:
    """Fill parameters from named tensors, each exactly once. A fused parameter is filled in parts."""

    def __init__(self, source: str, parameters: dict[str, Tensor], finite: bool = False):
        """Fill `parameters`, tensor name -> our parameter or rows of it, from a checkpoint called `source`.

        finite: Reject NaN and Inf.
        """
        self.source, self.parameters, self.missing, self.finite = source, parameters, set(parameters), finite

    def put(self, name: str, value: Tensor) -> bool:
        """Copy a tensor to its place. Return False if no parameter has this name.

        Raises ValueError for a wrong shape, whole numbers, a second tensor of the name, and NaN or Inf if rejected.
        """
        if name not in self.parameters:
            return False
        if name not in self.missing:
            raise ValueError(f"{self.source}: the tensor {name} is there twice; remove the files that do not belong")
        slot = self.parameters[name].detach()
        if slot.shape != value.shape:
            raise _misfit(self.source, name, value.shape, slot.shape)
        if not value.is_floating_point():  # quantised: it means nothing without scales, which are not read
            raise ValueError(f"{self.source}: tensor {name} holds whole numbers, and no weights")
        slot.copy_(value)
        if found := self.finite and nonfinite(name, slot):
            raise ValueError(f"{self.source}: {found}; {ALLOWED}")
        self.missing.discard(name)
        return True

    def finish(self) -> None:
        """Raise ValueError if a tensor is missing."""
        if self.missing:
            rest = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise ValueError(f"{self.source}: the checkpoint lacks the tensor {min(self.missing)}{rest}")


def fused(linear: nn.Linear, names: list[str], rows: list[int]) -> dict[str, Tensor]:
    """Map tensor names of separate projections to their rows of one fused linear map, which are views of it."""
    parts = {key: parameter.split(rows) for key, parameter in linear.named_parameters()}
    return {f"{name}.{key}": part[i] for i, name in enumerate(names) for key, part in parts.items()}


def whole(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Map the names of a module's parameters, after the prefix `name`, to the parameters."""
    return {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}


def choose_dtype(dtype: str, config: dict, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; 'auto' is fp32 on the CPU, and elsewhere the config's dtype, or bf16."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype must be auto, fp32, fp16 or bf16, got {dtype!r}")
    if device.type == "cpu":
        return torch.float32
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found = getattr(torch, stated, None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def check_device(device: str) -> torch.device:
    """Return the device of a name; ValueError if torch cannot use it on this machine."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # of torch's many back ends each has its own
        raise ValueError(f"device {device!r:.60} cannot be used here: {str(error).splitlines()[0]:.160}") from None
    return torch.device(device)


def write_folder(
    folder: Path,
    config: dict,
    tensors: dict[str, Tensor],
    acceptance: Acceptance | None = None,
    apart: tuple[str, str] | None = None,
    pickles: Mapping[str, object] | None = None,
) -> None:
    """Write config.json and model.safetensors as one folder, whole or not at all, replacing older files.

    apart: name of a pickle, and the prefix of the tensors that it holds. pickles: further pickles by name; None for a
    pickle only allows replacing an older one.

    Raises ValueError if the folder holds other files, which would be lost, or cannot be written.
    """
    (pickle_name, prefix), pickles = apart or ("", ""), pickles or {}

    def fill(staging: Path) -> None:
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        other = {name: held.pop(name) for name in tensors if prefix and name.startswith(prefix)}
        save_file(held, staging / "model.safetensors")
        if other:
            torch.save(other, staging / pickle_name)
        for name, content in pickles.items():
            if content is not None:
                torch.save(content, staging / name)
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if acceptance is not None:
            (staging / ACCEPTANCE).write_text(acceptance.as_text(), encoding="utf-8")

    names = ("config.json", "model.safetensors", ACCEPTANCE, *([pickle_name] if apart else []), *pickles)
    replace_folder(Path(folder), fill, names, "a drafter")
