"""Read and write checkpoint folders of the Hugging Face form, strictly.

A tensor that is missing, left over or of another shape is an error that names it. Only safetensors are opened: a pickle
can run code.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def resolve(path: str | os.PathLike) -> Path:
    """A local folder as it is; a hub name `owner/model` as the folder of its snapshot, downloaded if need be."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{path} is a file; give the folder that holds config.json and the safetensors")
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"no such checkpoint folder: {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:  # the hub's own errors and whatever its HTTP library raises
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is neither a local folder nor a model that the hub gives us: {reason}") from None


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a checkpoint: it has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder, one at a time."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} holds only the pickle {pickles[0]}; convert it to safetensors, pickles can run code"
            )
        raise ValueError(f"{folder} is not a checkpoint: it has no safetensors")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks the shard {name} that its index names")
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (safe_open is not a dict)
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged or not safetensors: {error}") from None


class StrictFill:
    """Fill parameters from named tensors, each exactly once; a fused parameter is filled in parts."""

    def __init__(self, source: str, parameters: dict[str, tuple[Tensor, int, int]]):
        """parameters: checkpoint name -> (our tensor, first row, number of rows)."""
        self.source, self.parameters, self.missing = source, parameters, set(parameters)

    def put(self, name: str, value: Tensor) -> bool:
        """True if the name is one of ours; ValueError on a wrong shape."""
        if name not in self.parameters:
            return False
        if name not in self.missing:
            raise ValueError(f"{self.source}: the tensor {name} is there twice; remove the files that do not belong")
        tensor, start, rows = self.parameters[name]
        slot = tensor.detach()[start : start + rows]
        if slot.shape != value.shape:
            raise ValueError(
                f"{self.source}: tensor {name} has shape {list(value.shape)}, the config asks for {list(slot.shape)}"
            )
        slot.copy_(value)
        self.missing.discard(name)
        return True

    def finish(self) -> None:
        if self.missing:
            rest = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise ValueError(f"{self.source}: the checkpoint lacks the tensor {min(self.missing)}{rest}")


def fused(linear: nn.Linear, names: list[str], rows: list[int]) -> dict[str, tuple[Tensor, int, int]]:
    """Where the rows of separate projections lie in one fused linear map."""
    out, start = {}, 0
    for name, count in zip(names, rows, strict=True):
        out[f"{name}.weight"] = (linear.weight, start, count)
        if linear.bias is not None:
            out[f"{name}.bias"] = (linear.bias, start, count)
        start += count
    return out


def whole(module: nn.Module, name: str) -> dict[str, tuple[Tensor, int, int]]:
    return {f"{name}.{key}": (p, 0, p.shape[0]) for key, p in module.named_parameters()}


def choose_dtype(dtype: str, config: dict, device: torch.device) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype must be auto, fp32, fp16 or bf16, got {dtype!r}")
    if device.type == "cpu":
        return torch.float32
    stated = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return getattr(torch, stated, torch.bfloat16)


def check_device(device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return torch.device(device)


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors as one folder, whole or not at all; an older one of the kind is replaced.

    Raises ValueError if the folder holds anything else, which would be lost, or cannot be written.
    """
    folder = Path(folder)
    aside, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    others = sorted(p.name for p in folder.glob("*") if p.name not in ("config.json", "model.safetensors"))
    if others:
        raise ValueError(f"{folder} holds {others[0]}, which is not of a drafter; choose another folder to write to")
    try:
        for leftover in (aside, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside / "model.safetensors")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
