"""What a checkpoint may be called: a folder, a bundled one by `demo/NAME`, or a name of the hub."""

import os
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"
SMALL_FILES = ["*.json", "*.jinja", "*.model"]


def bundled(name: str | os.PathLike) -> str:
    """What a name stands for: demo/NAME is the bundled target, drafter or file of that name, and any other name stays
    as it is. ./demo/NAME is a folder of yours."""
    inside = DEMO / str(name).removeprefix("demo/")
    return str(inside) if str(name).startswith("demo/") and inside.exists() else str(name)


def called(path: str | os.PathLike) -> str:
    """A checkpoint as a user names it: demo/NAME for a bundled one, and any other as it is."""
    return f"demo/{Path(path).name}" if Path(path).parent == DEMO else str(path)


def resolve(path: str | os.PathLike) -> Path:
    """The folder of a checkpoint: a local folder itself, a bundled one (`bundled`), or the snapshot of a hub name
    `owner/model`, downloaded if it is not in the hub's cache. Raises ValueError if there is none."""
    if not str(path).strip():
        raise ValueError("the name of a checkpoint is empty: give a folder or a hub name")
    folder = Path(bundled(path))
    if str(path).startswith("demo/") and not folder.is_dir():
        there = ", ".join(f"demo/{p.name}" for p in sorted(DEMO.iterdir()) if (p / "config.json").is_file())
        raise ValueError(f"nothing bundled is called {path}; there is {there}")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{path} is a file; give the folder that holds config.json and the safetensors")
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"no such checkpoint folder: {path}{_known(str(path))}")
    try:
        snapshot = _download(str(path), [*SMALL_FILES, "*.safetensors"])
        if not any(snapshot.glob("*.safetensors")):
            snapshot = _download(str(path), [*SMALL_FILES, "*.bin", "*.pt"])
    except Exception as error:  # the hub's library and its HTTP library raise errors of many types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is neither a local folder nor a model that the hub gives us: {reason}") from None
    return snapshot


def _known(name: str) -> str:
    """What may be meant by a name that is no folder: the bundled one of that name, or any form of names."""
    last = Path(name).name
    if last and (DEMO / last / "config.json").is_file():
        return f"; the bundled one is demo/{last}"
    there = f" from {Path.cwd()}" if not Path(name).is_absolute() else ""
    return f"{there}; a name of the hub is OWNER/MODEL, and what is bundled demo/NAME"


def _download(name: str, patterns: list[str]) -> Path:
    """The snapshot's folder. With HF_HUB_OFFLINE=1 the hub's library reads its cache only."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=patterns))
