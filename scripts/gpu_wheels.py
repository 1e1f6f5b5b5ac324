"""Install what a bare machine with a GPU lacks, into a folder that travels with the checkout.

    python scripts/gpu_wheels.py

Needs the network and pip, once. Hydra, OmegaConf and the ANTLR runtime, in the versions of constraints.txt, are
installed in build/wheels, which git ignores: put that folder and the checkout on PYTHONPATH (docs/gpu.md). They are
pure Python, so the folder serves every version of Python. Torch, Triton, transformers, accelerate, pytest and
pytest-xdist must be there already.

Every call writes the commit and a digest of the code to build/wheels/REVISION. Where there is no git, results name the
commit by that, as long as the code is the same: call this again after the last change. --out writes the packages to
another folder, without the note.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import checkout

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import output_folder, write_text
from specdec.cli.revision import NOTE, code_digest, revision

PACKAGES = ("hydra-core", "omegaconf")
ANTLR = "antlr4-python3-runtime==4.9.3"  # both packages ask for 4.9; it comes as source, and pip builds it
PURE = "Tag: py3-none-any"


def wanted() -> list[str]:
    """The packages with their versions. Raises ValueError if constraints.txt does not name one."""
    lines = (checkout.ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pinned = {line.split("==")[0]: line.split("#")[0].strip() for line in lines if "==" in line}
    if absent := set(PACKAGES) - set(pinned):
        raise ValueError(f"constraints.txt names no version of {min(absent)}")
    return [*(pinned[name] for name in PACKAGES), ANTLR]


def install(packages: list[str], folder: Path) -> None:
    """Lay packages out in a folder. Raises ValueError if pip fails, or if one is not pure Python."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    _run([*pip, "--no-compile", "--upgrade", "--target", str(folder), *packages])
    for tags in folder.glob("*.dist-info/WHEEL"):
        if PURE not in tags.read_text(encoding="utf-8"):
            raise ValueError(f"{tags.parent.name} is not pure Python: it would fit this machine only")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"pip failed: {(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}")


@one_sentence_errors
def main() -> None:
    """Install the packages and write the note. Raises ValueError if git does not know the commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the packages; default: build/wheels, with the note")
    args = parser.parse_args()
    folder = output_folder(args.out or NOTE.parent)
    there = {path.stem for path in folder.glob("*.dist-info")}
    if missing := [package for package in wanted() if package.replace("-", "_").replace("==", "-") not in there]:
        install(missing, folder)
    if args.out is None:
        commit = revision()
        if commit is None:
            raise ValueError("git does not tell the commit of this checkout, so results could not name it")
        write_text(NOTE, f"{commit} {code_digest()}\n")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {', '.join(wanted())}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
