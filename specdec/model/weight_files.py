"""The files of a checkpoint folder that hold its weights."""

import sys
from functools import cache
from pathlib import Path

from specdec.cli.reading import parse_json, read_text
from specdec.schema import shown

# In transformers' order: the first that a folder has is read
NAMED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt", "*.pth")  # of a folder without any of these
# Files of other things, and of the same weights for another loader
NO_WEIGHTS = ("training_args", "freq_", "optimizer", "scheduler", "rng_state", "consolidated", "adapter_")


def read_json(path: Path) -> dict:
    """Return the JSON object in a file of a checkpoint folder; ValueError if it is missing or no JSON object."""
    if not path.exists() and not path.is_symlink():
        raise ValueError(f"{path.parent} is not a checkpoint: it has no {path.name}")
    content = parse_json(read_text(path, "JSON"), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors.

    These are the file or the files of an index that transformers reads (`NAMED`), or all of the first kind in `WEIGHTS`
    that the folder has. Raises ValueError if one is missing or there is none.
    """
    for name in NAMED:
        file = folder / name
        if file.exists() or file.is_symlink():
            files = _indexed_files(file) if file.suffix == ".json" else [_weights(file)]
            _note(folder, tuple(sorted(other.name for other in folder.glob("*.safetensors") if other not in files)))
            return files
    for pattern in WEIGHTS:
        files = sorted(file for file in folder.glob(pattern) if not file.name.startswith(NO_WEIGHTS))
        if files:
            return [_weights(file) for file in files]
    raise ValueError(f"{folder} is not a checkpoint: it has no safetensors, .bin or .pt")


@cache  # print it once
def _note(folder: Path, others: tuple[str, ...]) -> None:
    if others:
        print(f"note: {folder}: {', '.join(others)} passed over, as transformers does", file=sys.stderr)


def _weights(file: Path) -> Path:
    if not file.is_file():
        what = "a folder" if file.is_dir() else "no regular file" if file.exists() else "a link to what is not there"
        raise ValueError(f"{file} is {what}, no weights")
    return file


def _indexed_files(index: Path) -> list[Path]:
    """Return the files that an index names, in the folder of the index."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index} is no index: weight_map must map names of tensors to names of files")
    names = sorted(set(named.values()))
    for name in names:
        if not name or Path(name).name != name:
            raise ValueError(f"{index}: weight_map must name files in its own folder, got {shown(name)}")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} lacks the shard {name} that its index names")
    return [index.parent / name for name in names]
